// POST /v1/responses: the OpenAI Responses dialect, without state between requests.
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

// A custom tool takes one free text. The model sees a function with this one parameter.
constexpr std::string_view kCustomSchema =
    R"({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]})";

// ---- reading ------------------------------------------------------------------------------------

// A string, or an array of input_text, output_text, text, refusal and input_image.
Result<std::vector<ContentBlock>> read_parts(const Json& content, const std::string& path) {
  std::vector<ContentBlock> out;
  if (content.is_string()) {
    out.push_back(ContentBlock::of_text(content.text));
    return out;
  }
  if (!content.is_array()) {
    return text::must_be(path, "a string or an array", content);
  }
  for (size_t i = 0; i < content.items.size(); ++i) {
    const Json& part = content.items[i];
    const std::string part_path = fmt::format("{}[{}]", path, i);
    if (!part.is_object()) {
      return text::must_be(part_path, "an object", part);
    }
    CACHALOT_TRY(const std::string type, text::required_string(part, part_path, "type"));
    if (type == "input_image") {
      ContentBlock block;
      block.type = ContentBlock::Type::kImage;
      block.image.field = part_path + ".image_url";
      CACHALOT_TRY(block.image.url, text::required_string(part, part_path, "image_url"));
      out.push_back(std::move(block));
      continue;
    }
    const bool refusal = type == "refusal";
    const bool text_part = type == "input_text" || type == "output_text" || type == "text" ||
                           type == "reasoning_text" || type == "summary_text";
    if (!refusal && !text_part) {
      return invalid("{}.type '{}' is not supported", part_path, type);
    }
    CACHALOT_TRY(const std::string piece,
                 text::string_field(part, part_path, refusal ? "refusal" : "text"));
    out.push_back(ContentBlock::of_text(piece));
  }
  return out;
}

std::string joined(const std::vector<ContentBlock>& blocks) {
  std::string out;
  for (const ContentBlock& block : blocks) {
    out += block.text;
  }
  return out;
}

// Items of one assistant turn come one by one; this gathers them into messages.
class InputReader {
 public:
  Status read(const Json& item, const std::string& path) {
    if (!item.is_object()) {
      return text::must_be(path, "an object", item);
    }
    CACHALOT_TRY(std::string type, text::string_field(item, path, "type"));
    if (type.empty() || type == "message") {
      return read_message(item, path);
    }
    if (type == "reasoning") {
      return read_reasoning(item, path);
    }
    if (type == "function_call" || type == "custom_tool_call") {
      return read_call(item, path, type == "custom_tool_call");
    }
    if (type == "function_call_output" || type == "custom_tool_call_output") {
      return read_result(item, path);
    }
    return invalid("{}.type '{}' is not supported", path, type);
  }

  std::vector<Message> take() { return std::move(messages_); }

 private:
  Status read_message(const Json& item, const std::string& path) {
    CACHALOT_TRY(const std::string role, text::required_string(item, path, "role"));
    const Json* content = text::present(item, "content");
    if (content == nullptr) {
      return invalid("{}.content must be a string or an array", path);
    }
    CACHALOT_TRY(std::vector<ContentBlock> parts, read_parts(*content, path + ".content"));
    if (role == "assistant") {
      Message& turn = assistant();
      std::string text = joined(parts);
      if (turn.content.empty()) {
        turn.content.push_back(ContentBlock::of_text(std::move(text)));
      } else {
        turn.content[0].text += text;
      }
      return {};
    }
    Message message;
    if (role == "system") {
      message.role = Role::kSystem;
    } else if (role != "user" && role != "developer") {
      return invalid(
          "{}.role '{}' is not supported; it must be user, assistant, system or developer",
          path,
          role);
    }
    message.content = std::move(parts);
    messages_.push_back(std::move(message));
    return {};
  }

  Status read_reasoning(const Json& item, const std::string& path) {
    if (!messages_.empty() && messages_.back().role == Role::kAssistant &&
        !(messages_.back().content.empty() && messages_.back().tool_calls.empty())) {
      messages_.emplace_back().role = Role::kAssistant;
    }
    Message& turn = assistant();
    for (const char* key : {"content", "summary"}) {
      const Json* content = text::present(item, key);
      if (content != nullptr && turn.reasoning.empty()) {
        CACHALOT_TRY(const std::vector<ContentBlock> parts,
                     read_parts(*content, text::child(path, key)));
        turn.reasoning = joined(parts);
      }
    }
    return {};
  }

  Status read_call(const Json& item, const std::string& path, bool custom) {
    text::ToolCall call;
    CACHALOT_TRY(call.id, text::required_string(item, path, "call_id"));
    CACHALOT_TRY(call.name, text::required_string(item, path, "name"));
    CACHALOT_TRY(const std::string space, text::string_field(item, path, "namespace"));
    if (!space.empty()) {
      CACHALOT_TRY(call.name, text::qualified_tool_name(space, call.name));
    }
    CACHALOT_TRY(call.arguments, text::string_field(item, path, custom ? "input" : "arguments"));
    if (custom) {
      call.arguments = R"({"input": )" + text::python_string(call.arguments) + "}";
    }
    assistant().tool_calls.push_back(std::move(call));
    return {};
  }

  Status read_result(const Json& item, const std::string& path) {
    Message message;
    message.role = Role::kTool;
    CACHALOT_TRY(message.tool_call_id, text::required_string(item, path, "call_id"));
    const Json* output = text::present(item, "output");
    if (output == nullptr) {
      return invalid("{}.output must be a string or an array", path);
    }
    CACHALOT_TRY(message.content, read_parts(*output, path + ".output"));
    messages_.push_back(std::move(message));
    return {};
  }

  // The assistant's turn in progress.
  Message& assistant() {
    if (messages_.empty() || messages_.back().role != Role::kAssistant) {
      messages_.emplace_back().role = Role::kAssistant;
    }
    return messages_.back();
  }

  std::vector<Message> messages_;
};

Status read_tool(const Json& tool,
                 const std::string& path,
                 const std::string& space,
                 ChatRequest* out) {
  if (!tool.is_object()) {
    return text::must_be(path, "an object", tool);
  }
  CACHALOT_TRY(const std::string type, text::required_string(tool, path, "type"));
  if (type == "namespace" && space.empty()) {
    CACHALOT_TRY(const std::string name, text::required_string(tool, path, "name"));
    CACHALOT_TRY(const Json* inner, text::array_field(tool, path, "tools"));
    for (size_t i = 0; inner != nullptr && i < inner->items.size(); ++i) {
      CACHALOT_RETURN_IF_ERROR(
          read_tool(inner->items[i], fmt::format("{}.tools[{}]", path, i), name, out));
    }
    return {};
  }
  if (type != "function" && type != "custom") {
    return {};  // a tool of the vendor's servers, which we do not have
  }
  CACHALOT_TRY(std::string name, text::required_string(tool, path, "name"));
  if (!space.empty()) {
    CACHALOT_TRY(name, text::qualified_tool_name(space, name).with(path));
  }
  CACHALOT_TRY(const std::string description, text::string_field(tool, path, "description"));
  std::string schema(kCustomSchema);
  if (type == "function") {
    CACHALOT_TRY(const Json* parameters, text::object_field(tool, path, "parameters"));
    schema = parameters != nullptr ? text::python_json(*parameters) : "";
  }
  CACHALOT_TRY(text::ToolDefinition definition, text::make_tool(name, description, schema));
  out->tools.push_back(std::move(definition));
  return {};
}

Status read_tool_choice(const Json& body, ChatRequest* out) {
  const Json* choice = text::present(body, "tool_choice");
  if (choice == nullptr) {
    return {};
  }
  if (choice->is_object()) {
    CACHALOT_TRY(out->named_tool, text::required_string(*choice, "tool_choice", "name"));
    out->tool_choice = text::ToolChoice::kRequired;
    return {};
  }
  CACHALOT_TRY(const std::string name, text::string_field(body, "", "tool_choice"));
  if (name == "none") {
    out->tool_choice = text::ToolChoice::kNone;
  } else if (name == "required") {
    out->tool_choice = text::ToolChoice::kRequired;
  } else if (name != "auto") {
    return invalid("tool_choice '{}' is not known; it must be auto, none, required or a tool",
                   name);
  }
  return {};
}

Status read_format(const Json& body, GenerationRequest* out, ChatRequest* chat) {
  CACHALOT_TRY(const Json* settings, text::object_field(body, "", "text"));
  if (settings == nullptr) {
    return {};
  }
  CACHALOT_TRY(const Json* format, text::object_field(*settings, "text", "format"));
  if (format == nullptr) {
    return {};
  }
  CACHALOT_TRY(const std::string type, text::required_string(*format, "text.format", "type"));
  if (type == "text") {
    return {};
  }
  if (type != "json_object" && type != "json_schema") {
    return invalid("text.format.type '{}' is not supported", type);
  }
  chat->response_schema = R"({"type": "json_object"})";
  out->structure.emplace();
  out->structure_field = "text";
  if (type == "json_schema") {
    CACHALOT_TRY(const Json* schema, text::object_field(*format, "text.format", "schema"));
    if (schema == nullptr) {
      return invalid("text.format.schema must be an object");
    }
    chat->response_schema = text::python_json(*schema);
    out->structure->kind = text::GrammarSpec::Kind::kSchema;
    out->structure->text = chat->response_schema;
  }
  return {};
}

Status read_limits(const Json& body, GenerationRequest* out) {
  for (const char* field : {"previous_response_id", "conversation", "prompt"}) {
    if (text::present(body, field) != nullptr) {
      return error(
          Code::kUnimplemented, "{} is not supported: requests carry their whole input", field);
    }
  }
  for (const char* field : {"store", "background"}) {
    CACHALOT_TRY(const std::optional<bool> flag, text::bool_field(body, "", field));
    if (flag.value_or(false)) {
      return error(Code::kUnimplemented, "{} is not supported: nothing is kept", field);
    }
  }
  CACHALOT_TRY(out->model, text::string_field(body, "", "model"));
  CACHALOT_TRY(out->max_tokens,
               text::integer_field(body, "", "max_output_tokens", 1, int64_t{1} << 31));
  CACHALOT_TRY(const std::optional<bool> stream, text::bool_field(body, "", "stream"));
  out->stream = stream.value_or(false);
  CACHALOT_TRY(const std::optional<double> temperature,
               text::number_field(body, "", "temperature", 0, 2));
  out->sampling.temperature = static_cast<float>(temperature.value_or(1.0));
  CACHALOT_TRY(const std::optional<double> top_p, text::number_field(body, "", "top_p", 0, 1));
  out->sampling.top_p = static_cast<float>(top_p.value_or(0.95));
  CACHALOT_TRY(const std::optional<bool> parallel,
               text::bool_field(body, "", "parallel_tool_calls"));
  out->parallel_tool_calls = parallel.value_or(true);
  return {};
}

Result<GenerationRequest> parse(Json& body, const ServedModel& /*model*/) {
  if (!body.is_object()) {
    return text::must_be("request body", "an object", body);
  }
  GenerationRequest out;
  ChatRequest chat;
  CACHALOT_RETURN_IF_ERROR(read_limits(body, &out));
  CACHALOT_RETURN_IF_ERROR(read_scheduling(body, &out));
  CACHALOT_TRY(const std::string instructions, text::string_field(body, "", "instructions"));
  if (!instructions.empty()) {
    Message message;
    message.role = Role::kSystem;
    message.content.push_back(ContentBlock::of_text(instructions));
    chat.messages.push_back(std::move(message));
  }
  const Json* input = text::present(body, "input");
  if (input != nullptr && input->is_string()) {
    Message message;
    message.content.push_back(ContentBlock::of_text(input->text));
    chat.messages.push_back(std::move(message));
  } else if (input == nullptr || !input->is_array() || input->items.empty()) {
    return invalid("input must be a string or an array that is not empty");
  } else {
    InputReader reader;
    for (size_t i = 0; i < input->items.size(); ++i) {
      CACHALOT_RETURN_IF_ERROR(reader.read(input->items[i], fmt::format("input[{}]", i)));
    }
    for (Message& message : reader.take()) {
      chat.messages.push_back(std::move(message));
    }
  }
  CACHALOT_TRY(const Json* tools, text::array_field(body, "", "tools"));
  for (size_t i = 0; tools != nullptr && i < tools->items.size(); ++i) {
    CACHALOT_RETURN_IF_ERROR(read_tool(tools->items[i], fmt::format("tools[{}]", i), "", &chat));
  }
  CACHALOT_RETURN_IF_ERROR(read_tool_choice(body, &chat));
  CACHALOT_RETURN_IF_ERROR(read_format(body, &out, &chat));
  CACHALOT_TRY(const Json* reasoning, text::object_field(body, "", "reasoning"));
  const Json* effort = reasoning != nullptr ? text::present(*reasoning, "effort") : nullptr;
  if (effort != nullptr) {
    CACHALOT_TRY(const text::Effort value, text::read_effort(*effort, "reasoning.effort"));
    chat.effort = value.value;
    chat.thinking = value.thinking;
  }
  out.prompt = std::move(chat);
  // The answer repeats what was asked.
  out.echoed.kind = Json::Kind::kObject;
  for (const char* key : {"instructions",
                          "max_output_tokens",
                          "metadata",
                          "parallel_tool_calls",
                          "reasoning",
                          "temperature",
                          "text",
                          "tool_choice",
                          "tools",
                          "top_p"}) {
    if (Json* value = body.find(key)) {
      text::set(out.echoed, key, std::move(*value));
    }
  }
  return out;
}

// ---- writing ------------------------------------------------------------------------------------

// One item of the output.
struct Item {
  enum class Kind : uint8_t { kReasoning, kMessage, kFunctionCall, kCustomCall };
  Kind kind = Kind::kMessage;
  std::string id;
  std::string text;  // the text, or the arguments
  std::string call_id;
  std::string name;
  bool cut = false;  // the answer ended within it
};

class ResponsesEncoder final : public BlockEncoder {
 public:
  explicit ResponsesEncoder(std::shared_ptr<const Job> job) : job_(std::move(job)) {}

  void begin(const Usage& /*prompt*/, std::string& out) override {
    for (const char* type : {"response.created", "response.in_progress"}) {
      JsonWriter w = open_event(type);
      w.key("response");
      response(w, "in_progress", nullptr);
      emit(type, w, out);
    }
  }

  void end(const Usage& usage, std::string& out) override {
    const bool cut = finish_.reason == Finish::Reason::kLength;
    const char* type = cut ? "response.incomplete" : "response.completed";
    JsonWriter w = open_event(type);
    w.key("response");
    response(w, cut ? "incomplete" : "completed", &usage);
    emit(type, w, out);
  }

  void error(const ApiError& error, std::string& out) override {
    error_ = error;
    if (open_) {
      items_.back().cut = true;
    }
    JsonWriter w = open_event("response.failed");
    w.key("response");
    response(w, "failed", nullptr);
    emit("response.failed", w, out);
  }

  std::string whole(const std::vector<Output>& outputs, const Usage& usage) override {
    const Output& output = outputs[0];
    finish_ = output.finish;
    if (!output.message.reasoning.empty()) {
      add(Item::Kind::kReasoning).text = output.message.reasoning;
    }
    if (!output.message.content.empty()) {
      add(Item::Kind::kMessage).text = output.message.content;
    }
    for (const text::ToolCall& call : output.message.tool_calls) {
      Item& item = add(call_kind(call.name));
      item.call_id = call.id;
      item.name = call.name;
      item.text =
          item.kind == Item::Kind::kCustomCall ? custom_input(call.arguments) : call.arguments;
    }
    if (finish_.reason == Finish::Reason::kLength && !items_.empty()) {
      items_.back().cut = true;
    }
    JsonWriter w;
    response(w, finish_.reason == Finish::Reason::kLength ? "incomplete" : "completed", &usage);
    return w.text();
  }

 private:
  // ---- items ----

  Item& add(Item::Kind kind) {
    constexpr const char* kPrefix[] = {"rs_", "msg_", "fc_", "ctc_"};
    Item& item = items_.emplace_back();
    item.kind = kind;
    item.id =
        fmt::format("{}{}_{}", kPrefix[static_cast<size_t>(kind)], job_->id, items_.size() - 1);
    return item;
  }

  // Whether the tool of this qualified name is a custom one of the list, or of a namespace in it.
  static bool is_custom(const Json* tools, const std::string& space, const std::string& name) {
    for (size_t i = 0; tools != nullptr && i < tools->items.size(); ++i) {
      const Json& tool = tools->items[i];
      const Json* type = tool.find("type");
      const Json* own = tool.find("name");
      if (type == nullptr || own == nullptr) {
        continue;
      }
      if (type->text == "namespace" && space.empty()) {
        if (is_custom(tool.find("tools"), own->text, name)) {
          return true;
        }
      } else if (type->text == "custom") {
        const Result<std::string> qualified =
            space.empty() ? own->text : text::qualified_tool_name(space, own->text);
        if (qualified.ok() && *qualified == name) {
          return true;
        }
      }
    }
    return false;
  }

  Item::Kind call_kind(const std::string& name) const {
    return is_custom(job_->request.echoed.find("tools"), "", name) ? Item::Kind::kCustomCall
                                                                   : Item::Kind::kFunctionCall;
  }

  // The text of {"input": text}; other arguments as they are.
  static std::string custom_input(const std::string& arguments) {
    const Result<Json> parsed = text::parse_json(arguments, "arguments");
    const Json* input = parsed.ok() ? parsed->find("input") : nullptr;
    return input != nullptr && input->is_string() ? input->text : arguments;
  }

  static void content_part(JsonWriter& w, const Item& item) {
    w.begin_object();
    if (item.kind == Item::Kind::kReasoning) {
      w.field("type", "reasoning_text").field("text", item.text);
    } else {
      w.field("type", "output_text").field("text", item.text);
      w.key("annotations").begin_array().end_array().key("logprobs").begin_array().end_array();
    }
    w.end_object();
  }

  static void write_item(JsonWriter& w, const Item& item, bool complete) {
    w.begin_object().field("id", item.id);
    const bool text_item = item.kind == Item::Kind::kReasoning || item.kind == Item::Kind::kMessage;
    switch (item.kind) {
      case Item::Kind::kReasoning:
        w.field("type", "reasoning").key("summary").begin_array().end_array();
        break;
      case Item::Kind::kMessage:
        w.field("type", "message").field("role", "assistant");
        break;
      case Item::Kind::kFunctionCall:
      case Item::Kind::kCustomCall: {
        const bool custom = item.kind == Item::Kind::kCustomCall;
        const text::ToolName name = text::split_tool_name(item.name);
        w.field("type", custom ? "custom_tool_call" : "function_call")
            .field("call_id", item.call_id);
        w.field("name", name.name);
        if (!name.tool_namespace.empty()) {
          w.field("namespace", name.tool_namespace);
        }
        w.field(custom ? "input" : "arguments", complete ? item.text : "");
        break;
      }
    }
    if (text_item) {
      w.key("content").begin_array();
      if (complete) {
        content_part(w, item);
      }
      w.end_array();
    }
    w.field("status", !complete ? "in_progress" : item.cut ? "incomplete" : "completed");
    w.end_object();
  }

  // ---- the response object ----

  void echoed(JsonWriter& w, std::string_view key, std::string_view fallback) const {
    const Json* value = job_->request.echoed.find(key);
    w.key(key).raw(value != nullptr ? text::python_json(*value) : std::string(fallback));
  }

  void response(JsonWriter& w, std::string_view status, const Usage* usage) const {
    w.begin_object().field("id", "resp_" + job_->id).field("object", "response");
    w.field("created_at", job_->created).field("status", status).key("error");
    if (error_.message.empty()) {
      w.null();
    } else {
      w.begin_object().field("code", error_.code).field("message", error_.message).end_object();
    }
    w.key("incomplete_details");
    if (status == "incomplete") {
      w.begin_object().field("reason", "max_output_tokens").end_object();
    } else {
      w.null();
    }
    echoed(w, "instructions", "null");
    echoed(w, "max_output_tokens", "null");
    w.field("model", job_->model->name).key("output").begin_array();
    if (status != "in_progress") {
      for (const Item& item : items_) {
        write_item(w, item, true);
      }
    }
    w.end_array();
    echoed(w, "parallel_tool_calls", "true");
    w.key("previous_response_id").null();
    echoed(w, "reasoning", R"({"effort": null, "summary": null})");
    w.field("store", false);
    echoed(w, "temperature", "1.0");
    echoed(w, "text", R"({"format": {"type": "text"}})");
    echoed(w, "tool_choice", "\"auto\"");
    echoed(w, "tools", "[]");
    echoed(w, "top_p", "0.95");
    w.field("truncation", "disabled");
    echoed(w, "metadata", "{}");
    w.key("usage");
    if (usage == nullptr) {
      w.null();
    } else {
      w.begin_object().field("input_tokens", usage->prompt_tokens);
      w.key("input_tokens_details").begin_object();
      w.field("cached_tokens", usage->cached_tokens).end_object();
      w.field("output_tokens", usage->completion_tokens);
      w.key("output_tokens_details").begin_object();
      w.field("reasoning_tokens", usage->reasoning_tokens).end_object();
      w.field("total_tokens", usage->prompt_tokens + usage->completion_tokens).end_object();
    }
    w.end_object();
  }

  // ---- events ----

  JsonWriter open_event(std::string_view type) {
    JsonWriter w;
    w.begin_object().field("type", type).field("sequence_number", sequence_++);
    return w;
  }

  static void emit(std::string_view type, JsonWriter& w, std::string& out) {
    w.end_object();
    append_event(out, type, w.text());
  }

  // An event about the item that is open.
  JsonWriter item_event(std::string_view type, bool with_part) {
    JsonWriter w = open_event(type);
    w.field("item_id", items_.back().id).field("output_index", items_.size() - 1);
    if (with_part) {
      w.field("content_index", 0);
    }
    return w;
  }

  void piece(const ChatEvent& event, std::string& out) override {
    switch (event.type) {
      case ChatEvent::Type::kReasoning:
      case ChatEvent::Type::kContent: {
        const bool reasoning = event.type == ChatEvent::Type::kReasoning;
        open(reasoning ? Item::Kind::kReasoning : Item::Kind::kMessage, event, out);
        append(reasoning ? "response.reasoning_text.delta" : "response.output_text.delta",
               event.text,
               out);
        return;
      }
      case ChatEvent::Type::kToolCallBegin:
        close(out);
        open(call_kind(event.name), event, out);
        return;
      case ChatEvent::Type::kToolArguments:
        if (items_.back().kind == Item::Kind::kCustomCall) {
          items_.back().text += event.text;  // its text is inside the JSON: sent when complete
        } else {
          append("response.function_call_arguments.delta", event.text, out);
        }
        return;
      case ChatEvent::Type::kToolCallEnd:
        close(out);
        return;
    }
  }

  void append(std::string_view type, const std::string& text, std::string& out) {
    items_.back().text += text;
    const bool part =
        items_.back().kind == Item::Kind::kReasoning || items_.back().kind == Item::Kind::kMessage;
    JsonWriter w = item_event(type, part);
    w.field("delta", text);
    if (items_.back().kind == Item::Kind::kMessage) {
      w.key("logprobs").begin_array().end_array();
    }
    emit(type, w, out);
  }

  void open(Item::Kind kind, const ChatEvent& event, std::string& out) {
    if (open_ && items_.back().kind == kind) {
      return;
    }
    close(out);
    open_ = true;
    Item& item = add(kind);
    item.call_id = event.id;
    item.name = event.name;
    JsonWriter w = open_event("response.output_item.added");
    w.field("output_index", items_.size() - 1).key("item");
    write_item(w, item, false);
    emit("response.output_item.added", w, out);
    if (kind == Item::Kind::kReasoning || kind == Item::Kind::kMessage) {
      JsonWriter part = item_event("response.content_part.added", true);
      part.key("part");
      content_part(part, item);
      emit("response.content_part.added", part, out);
    }
  }

  void close(std::string& out) override {
    if (!open_) {
      return;
    }
    open_ = false;
    Item& item = items_.back();
    item.cut = finish_.reason == Finish::Reason::kLength;
    const auto done = [&](const char* type, std::string_view key, bool part) {
      JsonWriter w = item_event(type, part);
      w.field(key, item.text);
      if (item.kind == Item::Kind::kMessage) {
        w.key("logprobs").begin_array().end_array();
      } else if (item.kind == Item::Kind::kFunctionCall) {
        w.field("name", text::split_tool_name(item.name).name);
      }
      emit(type, w, out);
    };
    switch (item.kind) {
      case Item::Kind::kReasoning:
        done("response.reasoning_text.done", "text", true);
        break;
      case Item::Kind::kMessage:
        done("response.output_text.done", "text", true);
        break;
      case Item::Kind::kFunctionCall:
        // Clients run a call whose arguments are done.
        if (!item.cut) {
          done("response.function_call_arguments.done", "arguments", false);
        }
        break;
      case Item::Kind::kCustomCall: {
        if (item.cut) {
          break;
        }
        item.text = custom_input(item.text);
        JsonWriter w = item_event("response.custom_tool_call_input.delta", false);
        w.field("delta", item.text);
        emit("response.custom_tool_call_input.delta", w, out);
        done("response.custom_tool_call_input.done", "input", false);
        break;
      }
    }
    if (item.kind == Item::Kind::kReasoning || item.kind == Item::Kind::kMessage) {
      JsonWriter part = item_event("response.content_part.done", true);
      part.key("part");
      content_part(part, item);
      emit("response.content_part.done", part, out);
    }
    JsonWriter w = open_event("response.output_item.done");
    w.field("output_index", items_.size() - 1).key("item");
    write_item(w, item, true);
    emit("response.output_item.done", w, out);
  }

  std::shared_ptr<const Job> job_;
  std::vector<Item> items_;
  bool open_ = false;  // the last item is in progress
  int64_t sequence_ = 0;
  ApiError error_;
};

}  // namespace

const Dialect kResponses = {
    .parse = parse,
    .encoder = [](std::shared_ptr<const Job> job) -> std::unique_ptr<Encoder> {
      return std::make_unique<ResponsesEncoder>(std::move(job));
    },
    .error = [](const ApiError& error, std::string_view) { return openai_error_json(error); },
    .call_prefix = "call_",
    .prompt_field = "input",
};

}  // namespace cachalot::server
