#include "server/generation.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <unordered_set>

#include "base/format.h"
#include "server/request_id.h"
#include "text/control_tokens.h"

namespace cachalot::server {
namespace {

// Output without a limit of the client's: as the hosted service has it.
constexpr int64_t kDefaultThinkingTokens = 65536;
constexpr int64_t kDefaultChatTokens = 8192;
constexpr int64_t kDefaultCompletionTokens = 16;

// Every assistant turn with calls is followed by exactly the results of these calls.
Status check_tool_results(const std::vector<text::Message>& messages, std::string_view field) {
  std::unordered_set<std::string> open;
  const auto answered = [&](const std::string& id) -> Status {
    if (open.erase(id) == 0) {
      return invalid("{}: there is a result for '{}', which is not an open tool call", field, id);
    }
    return {};
  };
  const auto all_answered = [&]() -> Status {
    if (!open.empty()) {
      return invalid("{}: the tool call '{}' has no result after it", field, *open.begin());
    }
    return {};
  };
  for (const text::Message& message : messages) {
    if (message.role == text::Role::kTool) {
      CACHALOT_RETURN_IF_ERROR(answered(message.tool_call_id));
      continue;
    }
    for (const text::ContentBlock& block : message.content) {
      if (block.type == text::ContentBlock::Type::kToolResult) {
        CACHALOT_RETURN_IF_ERROR(answered(block.tool_use_id));
      }
    }
    CACHALOT_RETURN_IF_ERROR(all_answered());
    for (const text::ToolCall& call : message.tool_calls) {
      if (!open.insert(call.id).second) {
        return invalid("{}: two tool calls have the id '{}'", field, call.id);
      }
    }
  }
  return all_answered();
}

std::vector<text::GrammarTool> grammar_tools(const text::ChatRequest& chat) {
  std::vector<text::GrammarTool> tools;
  for (const text::ToolDefinition& tool : chat.tools) {
    if (!chat.named_tool.empty() && tool.name != chat.named_tool) {
      continue;
    }
    text::GrammarTool out{tool.name, ""};
    if (const Result<text::Json> function = text::parse_json(tool.json, "tool"); function.ok()) {
      const text::Json* parameters = function->find("parameters");
      if (parameters != nullptr && parameters->is_object()) {
        out.schema = text::python_json(*parameters);
      }
    }
    tools.push_back(std::move(out));
  }
  return tools;
}

// The prompt of a chat, and what its tool choice asks of the grammar.
Result<engine::ImagePrompt> chat_prompt(GenerationRequest& request,
                                        const Dialect& dialect,
                                        const ServedModel& model) {
  auto& chat = std::get<text::ChatRequest>(request.prompt);
  CACHALOT_RETURN_IF_ERROR(check_tool_results(chat.messages, dialect.prompt_field));
  const bool forced = chat.tool_choice == text::ToolChoice::kRequired && !chat.tools.empty();
  std::vector<text::GrammarTool> tools;
  if (chat.tool_choice != text::ToolChoice::kNone) {
    tools = grammar_tools(chat);
  }
  if (forced && model.grammar != nullptr && !tools.empty()) {
    text::GrammarSpec spec;
    spec.kind = text::GrammarSpec::Kind::kCalls;
    spec.tools = tools;
    spec.open = !chat.thinking;
    spec.parallel = request.parallel_tool_calls;
    request.structure = std::move(spec);
    request.structure_field = "tools";
    if (chat.thinking) {
      // The block cannot be opened by the prompt: it follows the reasoning, where the grammar
      // demands it. A named tool is the only one shown, as without thinking.
      std::erase_if(chat.tools, [&](const text::ToolDefinition& tool) {
        return !chat.named_tool.empty() && tool.name != chat.named_tool;
      });
      chat.named_tool.clear();
      chat.tool_choice = text::ToolChoice::kAuto;
    }
  } else if (request.structure) {
    request.structure->tools = tools;
    request.structure->parallel = request.parallel_tool_calls;
  }
  return engine::encode_chat(
      *model.tokenizer, chat, model.images, model.context, dialect.prompt_field);
}

Result<Prompt> plain_prompt(const GenerationRequest& request,
                            const PlainPrompt& plain,
                            const Dialect& dialect,
                            const ServedModel& model) {
  Prompt prompt;
  if (plain.is_ids) {
    for (const int32_t id : plain.ids) {
      if (id < 0 || id >= model.vocab_size) {
        return invalid(
            "{} holds token {}, the vocabulary has {}", dialect.prompt_field, id, model.vocab_size);
      }
    }
    prompt.ids = plain.ids;
    return prompt;
  }
  const int64_t bytes = std::ssize(plain.text) + (plain.suffix ? std::ssize(*plain.suffix) : 0);
  CACHALOT_RETURN_IF_ERROR(
      engine::check_length(*model.tokenizer, bytes, model.context, dialect.prompt_field));
  if (request.add_bos) {
    prompt.ids.push_back(model.bos_id);
    prompt.hidden = 1;
  }
  const auto append = [&](std::string_view text) -> Status {
    CACHALOT_TRY(const std::vector<int32_t> ids, model.tokenizer->encode(text));
    prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
    return {};
  };
  if (!plain.suffix) {
    CACHALOT_RETURN_IF_ERROR(append(plain.text));
    return prompt;
  }
  const auto control = [&](std::string_view token) -> Status {
    CACHALOT_TRY(const int32_t id, model.tokenizer->control_id(token));
    prompt.ids.push_back(id);
    return {};
  };
  CACHALOT_RETURN_IF_ERROR(control(text::kFimBeginToken));
  CACHALOT_RETURN_IF_ERROR(append(plain.text));
  CACHALOT_RETURN_IF_ERROR(control(text::kFimHoleToken));
  CACHALOT_RETURN_IF_ERROR(append(*plain.suffix));
  CACHALOT_RETURN_IF_ERROR(control(text::kFimEndToken));
  return prompt;
}

}  // namespace

Status check_model(const ServedModel& model, std::string_view name) {
  if (name.empty() || name == model.name ||
      std::find(model.aliases.begin(), model.aliases.end(), name) != model.aliases.end()) {
    return {};
  }
  return error(Code::kNotFound, "model '{}' is not served here; it must be '{}'", name, model.name);
}

int64_t GenerationRequest::choices() const {
  const auto* plain = std::get_if<std::vector<PlainPrompt>>(&prompt);
  return n * (plain == nullptr ? 1 : std::ssize(*plain));
}

Usage& Usage::operator+=(const Usage& other) {
  prompt_tokens += other.prompt_tokens;
  cached_tokens += other.cached_tokens;
  completion_tokens += other.completion_tokens;
  reasoning_tokens += other.reasoning_tokens;
  return *this;
}

void Output::apply(const Delta& delta) {
  if (!delta.prompt.empty()) {
    prompt = delta.prompt;
  }
  for (const text::ChatEvent& event : delta.events) {
    message.apply(event);
  }
  tokens.insert(tokens.end(), delta.tokens.begin(), delta.tokens.end());
  if (delta.finish) {
    finish = *delta.finish;
  }
}

Result<std::vector<int32_t>> prompt_ids(const text::ChatRequest& chat, const ServedModel& model) {
  CACHALOT_TRY(
      engine::ImagePrompt encoded,
      engine::encode_chat(*model.tokenizer, chat, model.images, model.context, "messages"));
  return std::move(encoded.ids);
}

Result<std::shared_ptr<Job>> prepare(GenerationRequest request,
                                     const Dialect& dialect,
                                     const ServedModel& model) {
  auto job = std::make_shared<Job>();
  job->model = &model;
  job->id = random_hex();
  job->created = std::chrono::duration_cast<std::chrono::seconds>(
                     std::chrono::system_clock::now().time_since_epoch())
                     .count();
  job->seed = request.seed ? *request.seed : random_bits();
  CACHALOT_RETURN_IF_ERROR(check_model(model, request.model));
  for (const int32_t id : request.stop_ids) {
    if (id < 0 || id >= model.vocab_size) {
      return invalid("stop_token_ids names token {}, the vocabulary has {}", id, model.vocab_size);
    }
  }
  CACHALOT_RETURN_IF_ERROR(engine::validate(request.sampling, model.vocab_size));

  engine::ImagePrompt encoded;  // of a chat
  int64_t wanted = request.max_tokens.value_or(kDefaultCompletionTokens);
  if (auto* chat = std::get_if<text::ChatRequest>(&request.prompt)) {
    wanted =
        request.max_tokens.value_or(chat->thinking ? kDefaultThinkingTokens : kDefaultChatTokens);
    CACHALOT_TRY(encoded, chat_prompt(request, dialect, model));
    job->prompts.push_back({.ids = std::move(encoded.ids), .images = {}, .start = encoded.start});
  } else {
    for (const PlainPrompt& plain : std::get<std::vector<PlainPrompt>>(request.prompt)) {
      CACHALOT_TRY(Prompt prompt, plain_prompt(request, plain, dialect, model));
      if (prompt.ids.empty()) {
        return invalid("{} must hold at least one token", dialect.prompt_field);
      }
      job->prompts.push_back(std::move(prompt));
    }
  }
  int64_t longest = 0;
  for (const Prompt& prompt : job->prompts) {
    longest = std::max(longest, static_cast<int64_t>(prompt.ids.size()));
  }
  // Room for one token of output at least; a longer wish ends with the context.
  const int64_t room = model.context - longest;
  if (room < std::min<int64_t>(1, wanted)) {
    return error(Code::kOutOfRange,
                 "{}: this model's maximum context length is {} tokens, and the prompt has {}",
                 dialect.prompt_field,
                 model.context,
                 longest);
  }
  job->max_tokens = std::min(wanted, room);
  if (request.structure) {
    if (request.ignore_eos) {
      return invalid("ignore_eos must be false where {} structures the output",
                     request.structure_field);
    }
    if (model.grammar == nullptr) {
      return error(Code::kUnimplemented,
                   "{} needs the grammar core, which this build does not have "
                   "(CACHALOT_WITH_GRAMMAR)",
                   request.structure_field);
    }
    CACHALOT_TRY(job->grammar,
                 model.grammar->compile(*request.structure).with(request.structure_field));
  }
  if (!encoded.files.empty()) {
    CACHALOT_TRY(job->prompts[0].images, engine::decode_images(encoded, model.images));
  }
  job->request = std::move(request);
  return job;
}

HttpResponse error_response(const ApiError& error,
                            const Dialect& dialect,
                            std::string_view request_id) {
  HttpResponse response;
  response.status = error.status;
  response.body = dialect.error(error, request_id);
  if (error.retry_after > 0) {
    response.headers.emplace_back("retry-after", std::to_string(error.retry_after));
  }
  if (!error.allow.empty()) {
    response.headers.emplace_back("allow", error.allow);
  }
  return response;
}

void BlockEncoder::delta(const Delta& delta, std::string& out) {
  for (const text::ChatEvent& event : delta.events) {
    piece(event, out);
  }
  if (delta.finish) {
    finish_ = *delta.finish;
    close(out);
  }
}

void append_event(std::string& out, std::string_view name, std::string_view json) {
  if (!name.empty()) {
    fmt::format_to(std::back_inserter(out), "event: {}\n", name);
  }
  fmt::format_to(std::back_inserter(out), "data: {}\n\n", json);
}

}  // namespace cachalot::server
