// POST /v1/messages: the Anthropic dialect.
#include "server/messages.h"

#include "base/format.h"
#include "base/json.h"
#include "server/openai_fields.h"
#include "text/json_fields.h"

namespace cachalot::server {
namespace {

using text::ChatEvent;
using text::ChatRequest;
using text::ContentBlock;
using text::Json;
using text::Message;
using text::Role;

// ---- reading ------------------------------------------------------------------------------------

// A string, or text blocks joined by an empty line as the prompt joins blocks.
Result<std::vector<ContentBlock>> read_system(const Json& content, const std::string& path) {
  CACHALOT_TRY(std::vector<ContentBlock> blocks, text::read_content(content, path));
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].type != ContentBlock::Type::kText) {
      return invalid("{}[{}] must be a text block", path, i);
    }
  }
  return blocks;
}

Result<Message> read_assistant(const Json& content, const std::string& path) {
  Message out;
  out.role = Role::kAssistant;
  std::string text;
  if (content.is_string()) {
    text = content.text;
  } else if (!content.is_array()) {
    return text::must_be(path, "a string or an array", content);
  }
  for (size_t i = 0; i < content.items.size(); ++i) {
    const Json& block = content.items[i];
    const std::string block_path = fmt::format("{}[{}]", path, i);
    if (!block.is_object()) {
      return text::must_be(block_path, "an object", block);
    }
    CACHALOT_TRY(const std::string type, text::required_string(block, block_path, "type"));
    if (type == "text") {
      CACHALOT_TRY(const std::string piece, text::string_field(block, block_path, "text"));
      text += piece;
    } else if (type == "thinking") {
      CACHALOT_TRY(const std::string piece, text::string_field(block, block_path, "thinking"));
      out.reasoning += piece;
    } else if (type == "tool_use") {
      text::ToolCall call;
      CACHALOT_TRY(call.id, text::required_string(block, block_path, "id"));
      CACHALOT_TRY(call.name, text::required_string(block, block_path, "name"));
      CACHALOT_TRY(const Json* input, text::object_field(block, block_path, "input"));
      call.arguments = input != nullptr ? text::python_json(*input) : "{}";
      out.tool_calls.push_back(std::move(call));
    } else if (type != "redacted_thinking") {
      return invalid(
          "{}.type '{}' is not supported; it must be text, thinking or tool_use", block_path, type);
    }
  }
  if (!text.empty()) {
    out.content.push_back(ContentBlock::of_text(std::move(text)));
  }
  return out;
}

Result<Message> read_message(const Json& message, const std::string& path) {
  if (!message.is_object()) {
    return text::must_be(path, "an object", message);
  }
  CACHALOT_TRY(const std::string role, text::required_string(message, path, "role"));
  const Json* content = text::present(message, "content");
  const std::string content_path = path + ".content";
  if (content == nullptr) {
    return invalid("{} must be a string or an array", content_path);
  }
  if (role == "assistant") {
    return read_assistant(*content, content_path);
  }
  Message out;
  if (role == "user") {
    CACHALOT_TRY(out.content, text::read_content(*content, content_path));
    return out;
  }
  if (role != "system") {
    return invalid(
        "{}.role '{}' is not supported; it must be user, assistant or system", path, role);
  }
  // In the middle of a conversation the model knows reminders, not system messages.
  CACHALOT_TRY(const std::vector<ContentBlock> blocks, read_system(*content, content_path));
  std::string reminder;
  for (const ContentBlock& block : blocks) {
    reminder += (reminder.empty() ? "" : "\n\n") + block.text;
  }
  out.content.push_back(
      ContentBlock::of_text("<system-reminder>\n" + reminder + "\n</system-reminder>"));
  return out;
}

Status read_tools(const Json& body, ChatRequest* out) {
  CACHALOT_TRY(const Json* tools, text::array_field(body, "", "tools"));
  for (size_t i = 0; tools != nullptr && i < tools->items.size(); ++i) {
    const Json& tool = tools->items[i];
    const std::string path = fmt::format("tools[{}]", i);
    if (!tool.is_object()) {
      return text::must_be(path, "an object", tool);
    }
    CACHALOT_TRY(const std::string type, text::string_field(tool, path, "type"));
    if (!type.empty() && type != "custom") {
      continue;  // a tool of the vendor's servers, which we do not have
    }
    CACHALOT_TRY(const std::string name, text::required_string(tool, path, "name"));
    CACHALOT_TRY(const std::string description, text::string_field(tool, path, "description"));
    CACHALOT_TRY(const Json* schema, text::object_field(tool, path, "input_schema"));
    CACHALOT_TRY(
        text::ToolDefinition definition,
        text::make_tool(name, description, schema != nullptr ? text::python_json(*schema) : ""));
    out->tools.push_back(std::move(definition));
  }
  return {};
}

Status read_tool_choice(const Json& body, ChatRequest* out) {
  CACHALOT_TRY(const Json* choice, text::object_field(body, "", "tool_choice"));
  if (choice == nullptr) {
    return {};
  }
  CACHALOT_TRY(const std::string type, text::required_string(*choice, "tool_choice", "type"));
  if (type == "any" || type == "tool") {
    out->tool_choice = text::ToolChoice::kRequired;
  } else if (type == "none") {
    out->tool_choice = text::ToolChoice::kNone;
  } else if (type != "auto") {
    return invalid("tool_choice.type '{}' is not known; it must be auto, any, tool or none", type);
  }
  if (type == "tool") {
    CACHALOT_TRY(out->named_tool, text::required_string(*choice, "tool_choice", "name"));
  }
  return {};
}

Status read_effort(const Json& body, ChatRequest* out) {
  CACHALOT_TRY(const Json* config, text::object_field(body, "", "output_config"));
  const Json* effort = config != nullptr ? text::present(*config, "effort") : nullptr;
  if (effort != nullptr) {
    CACHALOT_TRY(const text::Effort value, text::read_effort(*effort, "output_config.effort"));
    out->effort = value.value;
    out->thinking = value.thinking;
  }
  return text::read_thinking(body, out);
}

// output_config.format, {"type": "json_schema", "schema": ...}.
Status read_format(const Json& body, GenerationRequest* out, ChatRequest* chat) {
  CACHALOT_TRY(const Json* config, text::object_field(body, "", "output_config"));
  if (config == nullptr) {
    return {};
  }
  CACHALOT_TRY(const Json* format, text::object_field(*config, "output_config", "format"));
  if (format == nullptr) {
    return {};
  }
  CACHALOT_TRY(const std::string type,
               text::required_string(*format, "output_config.format", "type"));
  CACHALOT_TRY(const Json* schema, text::object_field(*format, "output_config.format", "schema"));
  if (type != "json_schema" || schema == nullptr) {
    return invalid("output_config.format must be a json_schema with its schema");
  }
  chat->response_schema = text::python_json(*schema);
  out->structure.emplace();
  out->structure->kind = text::GrammarSpec::Kind::kSchema;
  out->structure->text = chat->response_schema;
  out->structure_field = "output_config";
  return {};
}

Result<GenerationRequest> parse(Json& body, const ServedModel& /*model*/) {
  CACHALOT_TRY(ChatRequest chat, read_messages(body));
  GenerationRequest out;
  CACHALOT_TRY(out.model, text::string_field(body, "", "model"));
  if (out.model.starts_with("claude")) {
    out.model.clear();  // tools name the vendor's models: they mean the one that is here
  }
  CACHALOT_TRY(out.max_tokens, text::integer_field(body, "", "max_tokens", 1, int64_t{1} << 31));
  if (!out.max_tokens) {
    return invalid("max_tokens must be a positive integer");
  }
  CACHALOT_TRY(out.stop, read_stop(body, "stop_sequences"));
  CACHALOT_TRY(const std::optional<bool> stream, text::bool_field(body, "", "stream"));
  out.stream = stream.value_or(false);
  out.sampling.temperature = 1.0f;
  out.sampling.top_p = 0.95f;
  CACHALOT_TRY(const std::optional<double> temperature,
               text::number_field(body, "", "temperature", 0, 2));
  out.sampling.temperature = static_cast<float>(temperature.value_or(1.0));
  CACHALOT_TRY(const std::optional<double> top_p, text::number_field(body, "", "top_p", 0, 1));
  out.sampling.top_p = static_cast<float>(top_p.value_or(0.95));
  CACHALOT_TRY(const std::optional<int64_t> top_k,
               text::integer_field(body, "", "top_k", 0, int64_t{1} << 31));
  out.sampling.top_k = top_k.value_or(0);
  if (const Json* choice = body.find("tool_choice"); choice != nullptr && choice->is_object()) {
    CACHALOT_TRY(const std::optional<bool> single,
                 text::bool_field(*choice, "tool_choice", "disable_parallel_tool_use"));
    out.parallel_tool_calls = !single.value_or(false);
  }
  CACHALOT_RETURN_IF_ERROR(read_scheduling(body, &out));
  CACHALOT_RETURN_IF_ERROR(read_format(body, &out, &chat));
  out.prompt = std::move(chat);
  return out;
}

// ---- writing ------------------------------------------------------------------------------------

class MessagesEncoder final : public BlockEncoder {
 public:
  explicit MessagesEncoder(std::shared_ptr<const Job> job) : job_(std::move(job)) {}

  void begin(const Usage& prompt, std::string& out) override {
    JsonWriter w;
    w.begin_object().field("type", "message_start").key("message");
    head(w);
    w.key("content").begin_array().end_array();
    w.key("stop_reason").null().key("stop_sequence").null();
    w.key("usage").raw(usage_json(prompt)).end_object().end_object();
    append_event(out, "message_start", w.text());
  }

  void end(const Usage& usage, std::string& out) override {
    JsonWriter w;
    w.begin_object().field("type", "message_delta").key("delta").begin_object();
    stop_fields(w, finish_);
    w.end_object().key("usage").raw(usage_json(usage)).end_object();
    append_event(out, "message_delta", w.text());
    append_event(out, "message_stop", R"({"type": "message_stop"})");
  }

  void error(const ApiError& error, std::string& out) override {
    append_event(out, "error", anthropic_error_json(error, ""));
  }

  std::string whole(const std::vector<Output>& outputs, const Usage& usage) override {
    const Output& output = outputs[0];
    JsonWriter w;
    head(w);
    w.key("content").begin_array();
    if (!output.message.reasoning.empty()) {
      w.begin_object().field("type", "thinking").field("thinking", output.message.reasoning);
      w.field("signature", signature()).end_object();
    }
    if (!output.message.content.empty()) {
      w.begin_object().field("type", "text").field("text", output.message.content).end_object();
    }
    for (const text::ToolCall& call : output.message.tool_calls) {
      w.begin_object().field("type", "tool_use").field("id", call.id).field("name", call.name);
      w.key("input").raw(input_of(call.arguments)).end_object();
    }
    w.end_array();
    stop_fields(w, output.finish);
    w.key("usage").raw(usage_json(usage)).end_object();
    return w.text();
  }

 private:
  enum class Block : uint8_t { kNone, kThinking, kText, kToolUse };

  void head(JsonWriter& w) const {
    w.begin_object().field("id", "msg_" + job_->id).field("type", "message");
    w.field("role", "assistant").field("model", job_->model->name);
  }

  // SDKs send a thinking block back only with its signature.
  std::string signature() const { return "cachalot-" + job_->id; }

  // Output that was cut off inside a call has no complete arguments.
  static std::string input_of(const std::string& arguments) {
    const Result<Json> parsed = text::parse_json(arguments, "arguments");
    return parsed.ok() && parsed->is_object() ? arguments : "{}";
  }

  static std::string usage_json(const Usage& usage) {
    JsonWriter w;
    w.begin_object().field("input_tokens", usage.prompt_tokens - usage.cached_tokens);
    w.field("cache_creation_input_tokens", 0).field("cache_read_input_tokens", usage.cached_tokens);
    w.field("output_tokens", usage.completion_tokens).end_object();
    return w.text();
  }

  static void stop_fields(JsonWriter& w, const Finish& finish) {
    w.key("stop_reason");
    switch (finish.reason) {
      case Finish::Reason::kStop:
        w.value("end_turn");
        break;
      case Finish::Reason::kStopSequence:
        w.value("stop_sequence");
        break;
      case Finish::Reason::kLength:
        w.value("max_tokens");
        break;
      case Finish::Reason::kToolCalls:
        w.value("tool_use");
        break;
    }
    w.key("stop_sequence");
    if (finish.reason == Finish::Reason::kStopSequence) {
      w.value(finish.stop_sequence);
    } else {
      w.null();
    }
  }

  void piece(const ChatEvent& event, std::string& out) override {
    switch (event.type) {
      case ChatEvent::Type::kReasoning:
        open(Block::kThinking, event, out);
        block_delta("thinking_delta", "thinking", event.text, out);
        return;
      case ChatEvent::Type::kContent:
        open(Block::kText, event, out);
        block_delta("text_delta", "text", event.text, out);
        return;
      case ChatEvent::Type::kToolCallBegin:
        close(out);
        open(Block::kToolUse, event, out);
        return;
      case ChatEvent::Type::kToolArguments:
        block_delta("input_json_delta", "partial_json", event.text, out);
        return;
      case ChatEvent::Type::kToolCallEnd:
        close(out);
        return;
    }
  }

  void open(Block block, const ChatEvent& event, std::string& out) {
    if (open_ == block) {
      return;
    }
    close(out);
    open_ = block;
    JsonWriter w;
    w.begin_object().field("type", "content_block_start").field("index", index_);
    w.key("content_block").begin_object();
    if (block == Block::kThinking) {
      w.field("type", "thinking").field("thinking", "").field("signature", "");
    } else if (block == Block::kText) {
      w.field("type", "text").field("text", "");
    } else {
      w.field("type", "tool_use").field("id", event.id).field("name", event.name);
      w.key("input").begin_object().end_object();
    }
    w.end_object().end_object();
    append_event(out, "content_block_start", w.text());
  }

  void close(std::string& out) override {
    if (open_ == Block::kNone) {
      return;
    }
    if (open_ == Block::kThinking) {
      block_delta("signature_delta", "signature", signature(), out);
    }
    JsonWriter w;
    w.begin_object().field("type", "content_block_stop").field("index", index_).end_object();
    append_event(out, "content_block_stop", w.text());
    open_ = Block::kNone;
    ++index_;
  }

  void block_delta(std::string_view type,
                   std::string_view key,
                   const std::string& text,
                   std::string& out) const {
    JsonWriter w;
    w.begin_object().field("type", "content_block_delta").field("index", index_);
    w.key("delta").begin_object().field("type", type).field(key, text).end_object().end_object();
    append_event(out, "content_block_delta", w.text());
  }

  std::shared_ptr<const Job> job_;
  Block open_ = Block::kNone;
  int64_t index_ = 0;  // of the block that is open, or of the next one
};

}  // namespace

Result<ChatRequest> read_messages(const Json& body) {
  if (!body.is_object()) {
    return text::must_be("request body", "an object", body);
  }
  ChatRequest out;
  if (const Json* system = text::present(body, "system")) {
    Message message;
    message.role = Role::kSystem;
    CACHALOT_TRY(message.content, read_system(*system, "system"));
    out.messages.push_back(std::move(message));
  }
  CACHALOT_TRY(const Json* messages, text::array_field(body, "", "messages"));
  if (messages == nullptr || messages->items.empty()) {
    return invalid("messages must be an array that is not empty");
  }
  for (size_t i = 0; i < messages->items.size(); ++i) {
    CACHALOT_TRY(Message message, read_message(messages->items[i], fmt::format("messages[{}]", i)));
    out.messages.push_back(std::move(message));
  }
  // An answer that the client has begun is continued.
  Message& last = out.messages.back();
  last.without_eos = last.role == Role::kAssistant;
  CACHALOT_RETURN_IF_ERROR(read_tools(body, &out));
  CACHALOT_RETURN_IF_ERROR(read_tool_choice(body, &out));
  CACHALOT_RETURN_IF_ERROR(read_effort(body, &out));
  return out;
}

const Dialect kMessages = {
    .parse = parse,
    .encoder = [](std::shared_ptr<const Job> job) -> std::unique_ptr<Encoder> {
      return std::make_unique<MessagesEncoder>(std::move(job));
    },
    .error = anthropic_error_json,
    .call_prefix = "toolu_",
    .prompt_field = "messages",
};

}  // namespace cachalot::server
