// POST /v1/chat/completions.
#include "base/format.h"
#include "base/json.h"
#include "server/openai_fields.h"
#include "text/json_fields.h"

namespace cachalot::server {
namespace {

using text::ChatEvent;
using text::Json;

constexpr int64_t kMaxTopLogprobs = 20;

Result<GenerationRequest> parse(Json& body, const ServedModel& /*model*/) {
  GenerationRequest out;
  if (!body.is_object()) {
    return text::must_be("request body", "an object", body);
  }
  if (const Json* format = text::present(body, "response_format"); format != nullptr) {
    const Json* type = format->find("type");
    if (type != nullptr && (type->text == "json_object" || type->text == "json_schema")) {
      out.structure.emplace();
      out.structure_field = "response_format";
    }
  }
  CACHALOT_RETURN_IF_ERROR(read_openai_fields(body, &out));
  if (out.max_tokens == 0) {
    return invalid("max_tokens is 0, must be positive");
  }
  CACHALOT_TRY(const std::optional<bool> logprobs, text::bool_field(body, "", "logprobs"));
  out.logprobs = logprobs.value_or(false);
  CACHALOT_TRY(const std::optional<int64_t> top,
               text::integer_field(body, "", "top_logprobs", 0, kMaxTopLogprobs));
  if (top && !out.logprobs) {
    return invalid("top_logprobs must be absent unless logprobs is true");
  }
  out.top_logprobs = top.value_or(0);
  CACHALOT_TRY(const std::optional<bool> parallel,
               text::bool_field(body, "", "parallel_tool_calls"));
  out.parallel_tool_calls = parallel.value_or(true);
  CACHALOT_TRY(text::ChatRequest chat, text::parse_chat_request(body));
  if (out.structure && out.structure_field == "response_format" &&
      chat.response_schema != R"({"type": "json_object"})") {
    out.structure->kind = text::GrammarSpec::Kind::kSchema;
    out.structure->text = chat.response_schema;
  }
  out.prompt = std::move(chat);
  return out;
}

void write_token(JsonWriter& w, const text::Tokenizer& tokenizer, int32_t id, float logprob) {
  const std::string_view bytes = tokenizer.token_bytes(id);
  w.field("token", bytes).field("logprob", static_cast<double>(logprob)).key("bytes").begin_array();
  for (const char byte : bytes) {
    w.value(static_cast<int>(static_cast<uint8_t>(byte)));
  }
  w.end_array();
}

class ChatEncoder final : public Encoder {
 public:
  explicit ChatEncoder(std::shared_ptr<const Job> job) : job_(std::move(job)) {}

  void begin(const Usage& /*prompt*/, std::string& out) override {
    for (int64_t i = 0; i < job_->choices(); ++i) {
      JsonWriter w = open_chunk();
      if (i == 0 && job_->request.return_token_ids) {
        prompt_ids(w);
      }
      w.key("choices").begin_array().begin_object().field("index", i);
      w.key("delta").begin_object().field("role", "assistant");
      if (job_->prompts[0].start == text::OutputStart::kReasoning) {
        w.key("content").null().field("reasoning_content", "");
      } else {
        w.field("content", "");
      }
      w.end_object().key("finish_reason").null().end_object().end_array();
      close_chunk(w, out);
    }
  }

  void delta(const Delta& delta, std::string& out) override {
    // Tokens whose text is still held back come in a piece of their own.
    if (delta.events.empty() && needs_tokens(delta)) {
      piece(delta, nullptr, &delta, out);
    }
    for (size_t i = 0; i < delta.events.size(); ++i) {
      if (delta.events[i].type != ChatEvent::Type::kToolCallEnd ||
          (i == 0 && needs_tokens(delta))) {
        piece(delta, &delta.events[i], i == 0 ? &delta : nullptr, out);
      }
    }
    if (!delta.finish) {
      return;
    }
    JsonWriter w = open_chunk();
    w.key("choices").begin_array().begin_object().field("index", delta.choice);
    w.key("delta").begin_object().end_object();
    w.field("finish_reason", openai_finish(*delta.finish)).end_object().end_array();
    if (++finished_ == job_->choices() && !job_->request.include_usage) {
      // The usage comes with the last finish; end() knows it.
      last_ = w.text();
      return;
    }
    close_chunk(w, out);
  }

  void end(const Usage& usage, std::string& out) override {
    if (job_->request.include_usage) {
      JsonWriter w = open_chunk();
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
    head(w, "chat.completion");
    w.key("choices").begin_array();
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Output& output = outputs[i];
      w.begin_object().field("index", i).key("message");
      message(w, output.message);
      w.key("logprobs");
      if (job_->request.logprobs) {
        logprobs(w, output.tokens);
      } else {
        w.null();
      }
      w.field("finish_reason", openai_finish(output.finish));
      if (job_->request.return_token_ids) {
        token_ids(w, output.tokens);
      }
      w.end_object();
    }
    w.end_array();
    if (job_->request.return_token_ids) {
      prompt_ids(w);
    }
    w.key("usage").raw(openai_usage(usage)).end_object();
    return w.text();
  }

 private:
  bool needs_tokens(const Delta& delta) const {
    return !delta.tokens.empty() && (job_->request.logprobs || job_->request.return_token_ids);
  }

  void head(JsonWriter& w, std::string_view object) const {
    w.begin_object().field("id", "chatcmpl-" + job_->id).field("object", object);
    w.field("created", job_->created).field("model", job_->model->name);
    w.field("system_fingerprint", job_->fingerprint);
  }

  JsonWriter open_chunk() const {
    JsonWriter w;
    head(w, "chat.completion.chunk");
    return w;
  }

  void close_chunk(JsonWriter& w, std::string& out) const {
    if (job_->request.include_usage) {
      w.key("usage").null();
    }
    w.end_object();
    append_event(out, "", w.text());
  }

  // One event, or none, and the tokens of `tokens` where asked for.
  void piece(const Delta& delta,
             const ChatEvent* event,
             const Delta* tokens,
             std::string& out) const {
    JsonWriter w = open_chunk();
    w.key("choices").begin_array().begin_object().field("index", delta.choice);
    w.key("delta").begin_object();
    if (event != nullptr) {
      event_fields(w, *event);
    }
    w.end_object();
    if (tokens != nullptr && job_->request.logprobs) {
      w.key("logprobs");
      logprobs(w, tokens->tokens);
    }
    w.key("finish_reason").null();
    if (tokens != nullptr && job_->request.return_token_ids) {
      token_ids(w, tokens->tokens);
    }
    w.end_object().end_array();
    close_chunk(w, out);
  }

  static void event_fields(JsonWriter& w, const ChatEvent& event) {
    switch (event.type) {
      case ChatEvent::Type::kReasoning:
        w.field("reasoning_content", event.text);
        return;
      case ChatEvent::Type::kContent:
        w.field("content", event.text);
        return;
      case ChatEvent::Type::kToolCallBegin:
        w.key("tool_calls").begin_array().begin_object().field("index", event.call);
        w.field("id", event.id).field("type", "function").key("function").begin_object();
        w.field("name", event.name).field("arguments", "");
        w.end_object().end_object().end_array();
        return;
      case ChatEvent::Type::kToolArguments:
        w.key("tool_calls").begin_array().begin_object().field("index", event.call);
        w.key("function").begin_object().field("arguments", event.text);
        w.end_object().end_object().end_array();
        return;
      case ChatEvent::Type::kToolCallEnd:
        return;
    }
  }

  void message(JsonWriter& w, const text::ChatOutput& output) const {
    w.begin_object().field("role", "assistant").key("content");
    // With calls and no text there is no content, as clients expect.
    if (output.content.empty() && !output.tool_calls.empty()) {
      w.null();
    } else {
      w.value(output.content);
    }
    if (job_->prompts[0].start == text::OutputStart::kReasoning) {
      w.field("reasoning_content", output.reasoning);
    }
    if (!output.tool_calls.empty()) {
      w.key("tool_calls").begin_array();
      for (size_t i = 0; i < output.tool_calls.size(); ++i) {
        const text::ToolCall& call = output.tool_calls[i];
        w.begin_object().field("index", i).field("id", call.id).field("type", "function");
        w.key("function").begin_object().field("name", call.name);
        w.field("arguments", call.arguments).end_object().end_object();
      }
      w.end_array();
    }
    w.end_object();
  }

  void logprobs(JsonWriter& w, const std::vector<OutputToken>& tokens) const {
    w.begin_object();
    for (const bool reasoning : {false, true}) {
      w.key(reasoning ? "reasoning_content" : "content").begin_array();
      for (const OutputToken& token : tokens) {
        if (token.reasoning != reasoning) {
          continue;
        }
        w.begin_object();
        write_token(w, *job_->model->tokenizer, token.token.id, token.token.logprob);
        w.key("top_logprobs").begin_array();
        for (const auto& [id, logprob] : token.token.top) {
          w.begin_object();
          write_token(w, *job_->model->tokenizer, id, logprob);
          w.end_object();
        }
        w.end_array().end_object();
      }
      w.end_array();
    }
    w.key("refusal").null().end_object();
  }

  static void token_ids(JsonWriter& w, const std::vector<OutputToken>& tokens) {
    w.key("token_ids").begin_array();
    for (const OutputToken& token : tokens) {
      w.value(token.token.id);
    }
    w.end_array();
  }

  void prompt_ids(JsonWriter& w) const {
    w.key("prompt_token_ids").begin_array();
    for (const int32_t id : job_->prompts[0].ids) {
      w.value(id);
    }
    w.end_array();
  }

  std::shared_ptr<const Job> job_;
  int64_t finished_ = 0;
  std::string last_;
};

}  // namespace

const Dialect kChatCompletions = {
    .parse = parse,
    .encoder = [](std::shared_ptr<const Job> job) -> std::unique_ptr<Encoder> {
      return std::make_unique<ChatEncoder>(std::move(job));
    },
    .error = [](const ApiError& error, std::string_view) { return openai_error_json(error); },
    .call_prefix = "call_",
    .prompt_field = "messages",
};

}  // namespace cachalot::server
