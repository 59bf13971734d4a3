// POST /v1/completions.
#include "base/format.h"
#include "base/json.h"
#include "base/utf8.h"
#include "server/openai_fields.h"
#include "text/json_fields.h"

namespace cachalot::server {
namespace {

using text::Json;

constexpr int64_t kMaxLogprobs = 20;
constexpr size_t kMaxPrompts = 1024;
constexpr int64_t kMaxFimTokens = 4096;

// A string, an array of token ids, or an array of either.
Result<std::vector<PlainPrompt>> read_prompts(const Json& body) {
  const Json* prompt = text::present(body, "prompt");
  if (prompt == nullptr) {
    return invalid("prompt must be a string or an array");
  }
  std::vector<PlainPrompt> out;
  const auto add = [&](const Json& value, const std::string& path) -> Status {
    PlainPrompt plain;
    if (value.is_string()) {
      plain.text = value.text;
    } else if (value.is_array()) {
      plain.is_ids = true;
      CACHALOT_TRY(plain.ids, read_ids(value, path));
    } else {
      return text::must_be(path, "a string or an array of token ids", value);
    }
    out.push_back(std::move(plain));
    return {};
  };
  const bool several = prompt->is_array() && !prompt->items.empty() &&
                       (prompt->items[0].is_string() || prompt->items[0].is_array());
  if (!several) {
    CACHALOT_RETURN_IF_ERROR(add(*prompt, "prompt"));
    return out;
  }
  if (prompt->items.size() > kMaxPrompts) {
    return invalid(
        "prompt has {} entries, must have at most {}", prompt->items.size(), kMaxPrompts);
  }
  for (size_t i = 0; i < prompt->items.size(); ++i) {
    CACHALOT_RETURN_IF_ERROR(add(prompt->items[i], fmt::format("prompt[{}]", i)));
  }
  return out;
}

Result<GenerationRequest> parse(Json& body, const ServedModel& /*model*/) {
  GenerationRequest out;
  if (!body.is_object()) {
    return text::must_be("request body", "an object", body);
  }
  CACHALOT_RETURN_IF_ERROR(read_openai_fields(body, &out));
  CACHALOT_TRY(std::vector<PlainPrompt> prompts, read_prompts(body));
  CACHALOT_TRY(const std::optional<int64_t> logprobs,
               text::integer_field(body, "", "logprobs", 0, kMaxLogprobs));
  out.logprobs = logprobs.has_value();
  out.top_logprobs = logprobs.value_or(0);
  CACHALOT_TRY(const std::optional<bool> echo, text::bool_field(body, "", "echo"));
  out.echo = echo.value_or(false);
  if (out.max_tokens == 0 && !out.echo) {
    return invalid("max_tokens is 0, must be positive unless echo is true");
  }
  CACHALOT_TRY(const std::optional<bool> add_bos, text::bool_field(body, "", "add_special_tokens"));
  out.add_bos = add_bos.value_or(true);
  if (text::present(body, "suffix") != nullptr) {
    CACHALOT_TRY(const std::string text, text::string_field(body, "", "suffix"));
    for (PlainPrompt& prompt : prompts) {
      if (prompt.is_ids) {
        return invalid("suffix must be absent where prompt holds token ids");
      }
      prompt.suffix = text;
    }
    if (out.echo) {
      return invalid("suffix must be absent where echo is true");
    }
    out.max_tokens = std::min(out.max_tokens.value_or(kMaxFimTokens), kMaxFimTokens);
  }
  out.prompt = std::move(prompts);
  return out;
}

// A token as a key of top_logprobs: its text, or the bytes of a part of a character.
std::string token_key(const text::Tokenizer& tokenizer, int32_t id) {
  const std::string_view bytes = tokenizer.token_bytes(id);
  for (size_t i = 0; i < bytes.size();) {
    const int length = utf8_sequence_length(bytes.substr(i));
    if (length == 0) {
      std::string out = "bytes:";
      for (const char byte : bytes) {
        out += fmt::format("\\x{:02x}", static_cast<uint8_t>(byte));
      }
      return out;
    }
    i += static_cast<size_t>(length);
  }
  return std::string(bytes);
}

class CompletionEncoder final : public Encoder {
 public:
  explicit CompletionEncoder(std::shared_ptr<const Job> job)
      : job_(std::move(job)), progress_(static_cast<size_t>(job_->choices())) {}

  void begin(const Usage& /*prompt*/, std::string& /*out*/) override {}

  void delta(const Delta& delta, std::string& out) override {
    std::string text;
    for (const text::ChatEvent& event : delta.events) {
      text += event.text;
    }
    JsonWriter w;
    head(w);
    w.key("choices").begin_array();
    choice(
        w, delta.choice, text, delta.prompt, delta.tokens, delta.finish ? &*delta.finish : nullptr);
    w.end_array();
    if (delta.finish && ++finished_ == job_->choices() && !job_->request.include_usage) {
      last_ = w.text();
      return;
    }
    if (job_->request.include_usage) {
      w.key("usage").null();
    }
    w.end_object();
    append_event(out, "", w.text());
  }

  void end(const Usage& usage, std::string& out) override {
    if (job_->request.include_usage) {
      JsonWriter w;
      head(w);
      w.key("choices").begin_array().end_array().key("usage").raw(openai_usage(usage)).end_object();
      append_event(out, "", w.text());
    } else {
      append_event(out, "", last_ + ", \"usage\": " + openai_usage(usage) + "}");
    }
    append_event(out, "", "[DONE]");
  }

  void error(const ApiError& error, std::string& out) override { append_openai_error(out, error); }

  std::string whole(const std::vector<Output>& outputs, const Usage& usage) override {
    JsonWriter w;
    head(w);
    w.key("choices").begin_array();
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Output& output = outputs[i];
      choice(w,
             static_cast<int64_t>(i),
             output.message.content,
             output.prompt,
             output.tokens,
             &output.finish);
    }
    w.end_array().key("usage").raw(openai_usage(usage)).end_object();
    return w.text();
  }

 private:
  void head(JsonWriter& w) const {
    w.begin_object().field("id", "cmpl-" + job_->id).field("object", "text_completion");
    w.field("created", job_->created).field("model", job_->model->name);
    w.field("system_fingerprint", job_->fingerprint);
  }

  void choice(JsonWriter& w,
              int64_t index,
              const std::string& text,
              const std::vector<std::optional<engine::TokenOutput>>& prompt,
              const std::vector<OutputToken>& tokens,
              const Finish* finish) {
    w.begin_object().field("index", index).field("text", text).key("logprobs");
    if (job_->request.logprobs) {
      logprobs(w, index, prompt, tokens);
    } else {
      w.null();
    }
    w.key("finish_reason");
    if (finish != nullptr) {
      w.value(openai_finish(*finish));
    } else {
      w.null();
    }
    if (finish != nullptr && !finish->stop_sequence.empty()) {
      w.field("stop_reason", finish->stop_sequence);
    }
    if (job_->request.return_token_ids) {
      w.key("token_ids").begin_array();
      for (const OutputToken& token : tokens) {
        w.value(token.token.id);
      }
      w.end_array();
      // Once per choice: with its first piece.
      if (!progress_[static_cast<size_t>(index)].begun) {
        w.key("prompt_token_ids").begin_array();
        for (const int32_t id : job_->prompt_of(index).ids) {
          w.value(id);
        }
        w.end_array();
      }
    }
    progress_[static_cast<size_t>(index)].begun = true;
    w.end_object();
  }

  // The four parallel arrays of the completions dialect, over the echoed prompt and the output.
  void logprobs(JsonWriter& w,
                int64_t index,
                const std::vector<std::optional<engine::TokenOutput>>& prompt,
                const std::vector<OutputToken>& tokens) {
    const text::Tokenizer& tokenizer = *job_->model->tokenizer;
    const Prompt& given = job_->prompt_of(index);
    struct Entry {
      int32_t id;
      const engine::TokenOutput* token;  // null: the first token of a prompt
    };
    std::vector<Entry> entries;
    for (size_t i = 0; i < prompt.size(); ++i) {
      entries.push_back(
          {given.ids[static_cast<size_t>(given.hidden) + i], prompt[i] ? &*prompt[i] : nullptr});
    }
    for (const OutputToken& token : tokens) {
      entries.push_back({token.token.id, &token.token});
    }
    w.begin_object().key("tokens").begin_array();
    for (const Entry& entry : entries) {
      w.value(token_key(tokenizer, entry.id));
    }
    w.end_array().key("token_logprobs").begin_array();
    for (const Entry& entry : entries) {
      if (entry.token != nullptr) {
        w.value(static_cast<double>(entry.token->logprob));
      } else {
        w.null();
      }
    }
    w.end_array().key("top_logprobs").begin_array();
    for (const Entry& entry : entries) {
      if (entry.token == nullptr) {
        w.null();
        continue;
      }
      w.begin_object();
      bool chosen = job_->request.top_logprobs == 0;
      for (const auto& [id, logprob] : entry.token->top) {
        w.field(token_key(tokenizer, id), static_cast<double>(logprob));
        chosen = chosen || id == entry.id;
      }
      if (!chosen) {
        w.field(token_key(tokenizer, entry.id), static_cast<double>(entry.token->logprob));
      }
      w.end_object();
    }
    w.end_array().key("text_offset").begin_array();
    size_t& offset = progress_[static_cast<size_t>(index)].characters;
    for (const Entry& entry : entries) {
      w.value(offset);
      for (const char byte : tokenizer.token_bytes(entry.id)) {
        offset += (byte & 0xC0) != 0x80 ? 1 : 0;
      }
    }
    w.end_array().end_object();
  }

  struct Progress {
    size_t characters = 0;  // of the tokens so far
    bool begun = false;
  };

  std::shared_ptr<const Job> job_;
  std::vector<Progress> progress_;
  int64_t finished_ = 0;
  std::string last_;
};

}  // namespace

const Dialect kCompletions = {
    .parse = parse,
    .encoder = [](std::shared_ptr<const Job> job) -> std::unique_ptr<Encoder> {
      return std::make_unique<CompletionEncoder>(std::move(job));
    },
    .error = [](const ApiError& error, std::string_view) { return openai_error_json(error); },
    .call_prefix = "call_",
    .prompt_field = "prompt",
};

}  // namespace cachalot::server
