// Reading a chat-completions body into a ChatRequest.
#include <utility>

#include "base/format.h"
#include "text/chat.h"
#include "text/json_fields.h"
#include "text/json_tree.h"

namespace cachalot::text {
namespace {

using Kind = Json::Kind;

// ---- content ------------------------------------------------------------------------------------

Result<ImageSource> parse_image(const Json& block, const std::string& path) {
  ImageSource image;
  if (const Json* url = present(block, "image_url"); url != nullptr && url->is_object()) {
    image.field = path + ".image_url.url";
    CACHALOT_TRY(image.url, string_field(*url, path + ".image_url", "url"));
  } else if (url != nullptr) {
    image.field = path + ".image_url";
    CACHALOT_TRY(image.url, string_field(block, path, "image_url"));
  } else if (present(block, "url") != nullptr) {
    image.field = path + ".url";
    CACHALOT_TRY(image.url, string_field(block, path, "url"));
  } else {
    const std::string source_path = path + ".source";
    CACHALOT_TRY(const Json* source, object_field(block, path, "source"));
    if (source != nullptr && present(*source, "data") != nullptr) {
      CACHALOT_TRY(const std::string media, required_string(*source, source_path, "media_type"));
      CACHALOT_TRY(const std::string data, required_string(*source, source_path, "data"));
      image.field = source_path + ".data";
      image.url = fmt::format("data:{};base64,{}", media, data);
    } else if (source != nullptr) {
      image.field = source_path + ".url";
      CACHALOT_TRY(image.url, string_field(*source, source_path, "url"));
    }
  }
  if (image.url.empty()) {
    return invalid("{} must give an image: image_url.url, or a source with data or url", path);
  }
  return image;
}

// A file that is sent with the request; there is no store of files.
Result<ImageSource> parse_file(const Json& block, const std::string& path) {
  CACHALOT_TRY(const Json* object, object_field(block, path, "file"));
  const std::string file_path = object != nullptr ? path + ".file" : path;
  const Json& file = object != nullptr ? *object : block;
  if (present(file, "file_id") != nullptr) {
    return invalid("{}.file_id: no files are stored here; send file_data", file_path);
  }
  ImageSource image;
  image.field = file_path + ".file_data";
  CACHALOT_TRY(image.url, required_string(file, file_path, "file_data"));
  if (!image.url.starts_with("data:")) {
    image.url = "data:;base64," + image.url;
  }
  return image;
}

// String content is one text block. `inside_result` is true for the content of a tool result, which
// holds no further tool results.
Result<std::vector<ContentBlock>> parse_content(const Json& content,
                                                const std::string& path,
                                                bool inside_result) {
  std::vector<ContentBlock> blocks;
  if (content.is_null()) {
    return blocks;
  }
  if (content.is_string()) {
    blocks.push_back(ContentBlock::of_text(content.text));
    return blocks;
  }
  if (!content.is_array()) {
    return must_be(path, "a string or an array", content);
  }
  for (size_t i = 0; i < content.items.size(); ++i) {
    const Json& item = content.items[i];
    const std::string item_path = fmt::format("{}[{}]", path, i);
    if (!item.is_object()) {
      return must_be(item_path, "an object", item);
    }
    CACHALOT_TRY(const std::string type, required_string(item, item_path, "type"));
    ContentBlock block;
    if (type == "text") {
      const Json* text = item.find("text");
      if (text == nullptr || !text->is_string()) {
        return must_be(item_path + ".text", "a string", text != nullptr ? *text : Json());
      }
      block.text = text->text;
    } else if (type == "image_url" || type == "image") {
      block.type = ContentBlock::Type::kImage;
      CACHALOT_TRY(block.image, parse_image(item, item_path));
    } else if (type == "file") {
      block.type = ContentBlock::Type::kImage;
      CACHALOT_TRY(block.image, parse_file(item, item_path));
    } else if (type == "tool_result" && !inside_result) {
      block.type = ContentBlock::Type::kToolResult;
      CACHALOT_TRY(block.tool_use_id, string_field(item, item_path, "tool_use_id"));
      if (const Json* result = item.find("content")) {
        CACHALOT_TRY(block.result, parse_content(*result, item_path + ".content", true));
      }
    } else {
      block.type = ContentBlock::Type::kUnsupported;
      block.text = type;
    }
    blocks.push_back(std::move(block));
  }
  return blocks;
}

// ---- tools --------------------------------------------------------------------------------------

struct Namespace {
  std::string name;
  std::string description;
};

Result<Namespace> parse_namespace(const Json& object, std::string_view path) {
  Namespace out;
  const Json* value = present(object, "namespace");
  if (value == nullptr) {
    return out;
  }
  if (!value->is_object()) {
    CACHALOT_TRY(out.name, string_field(object, path, "namespace"));
    return out;
  }
  const std::string inner = child(path, "namespace");
  CACHALOT_TRY(out.name, required_string(*value, inner, "name"));
  CACHALOT_TRY(out.description, string_field(*value, inner, "description"));
  return out;
}

Result<std::string> parse_tool_name(const Json& object,
                                    const Json& function,
                                    const std::string& path) {
  CACHALOT_TRY(const Namespace space, parse_namespace(object, path));
  CACHALOT_TRY(std::string name, required_string(function, path + ".function", "name"));
  if (space.name.empty()) {
    return name;
  }
  return qualified_tool_name(space.name, name).with(path);
}

Result<const Json*> function_of(const Json& object, const std::string& path) {
  if (!object.is_object()) {
    return must_be(path, "an object", object);
  }
  CACHALOT_TRY(const std::string type, string_field(object, path, "type"));
  if (!type.empty() && type != "function") {
    return invalid("{}.type '{}' is not supported; it must be 'function'", path, type);
  }
  CACHALOT_TRY(const Json* function, object_field(object, path, "function"));
  if (function == nullptr) {
    return invalid("{}.function must be an object", path);
  }
  return function;
}

// The schema line is the whole function object; a namespace changes its name and description.
Result<ToolDefinition> parse_tool(Json& tool, const std::string& path) {
  CACHALOT_RETURN_IF_ERROR(function_of(tool, path));
  Json& function = *tool.find("function");
  const std::string function_path = path + ".function";
  ToolDefinition out;
  CACHALOT_TRY(out.name, parse_tool_name(tool, function, path));
  CACHALOT_TRY(std::string description, string_field(function, function_path, "description"));
  CACHALOT_RETURN_IF_ERROR(object_field(function, function_path, "parameters"));
  CACHALOT_TRY(const Namespace space, parse_namespace(tool, path));
  if (!space.name.empty()) {
    set(function, "name", string_value(out.name));
  }
  if (!space.description.empty()) {
    set(function, "description", string_value(space.description + "\n" + description));
  }
  out.json = python_json(function);
  return out;
}

Result<std::vector<ToolDefinition>> parse_tools(Json& object, std::string_view path) {
  std::vector<ToolDefinition> tools;
  CACHALOT_RETURN_IF_ERROR(array_field(object, path, "tools"));
  if (present(object, "tools") == nullptr) {
    return tools;
  }
  Json& list = *object.find("tools");
  for (size_t i = 0; i < list.items.size(); ++i) {
    CACHALOT_TRY(ToolDefinition tool,
                 parse_tool(list.items[i], fmt::format("{}[{}]", child(path, "tools"), i)));
    tools.push_back(std::move(tool));
  }
  return tools;
}

Result<ToolCall> parse_tool_call(const Json& call, const std::string& path) {
  CACHALOT_TRY(const Json* function, function_of(call, path));
  ToolCall out;
  CACHALOT_TRY(out.id, string_field(call, path, "id"));
  CACHALOT_TRY(out.name, parse_tool_name(call, *function, path));
  const Json* arguments = present(*function, "arguments");
  if (arguments != nullptr && arguments->is_object()) {
    out.arguments = python_json(*arguments);
  } else if (arguments != nullptr) {
    if (!arguments->is_string()) {
      return must_be(path + ".function.arguments", "a string or an object", *arguments);
    }
    out.arguments = arguments->text;
  }
  return out;
}

// ---- messages -----------------------------------------------------------------------------------

Result<Role> parse_role(const Json& message, const std::string& path) {
  CACHALOT_TRY(const std::string role, required_string(message, path, "role"));
  constexpr std::pair<std::string_view, Role> kRoles[] = {
      {"system", Role::kSystem},
      {"user", Role::kUser},
      {"assistant", Role::kAssistant},
      {"tool", Role::kTool},
      {"latest_reminder", Role::kLatestReminder},
  };
  for (const auto& [name, value] : kRoles) {
    if (role == name) {
      return value;
    }
  }
  return invalid(
      "{}.role '{}' is not supported; it must be system, user, assistant, tool or latest_reminder",
      path,
      role);
}

Result<std::optional<Task>> parse_task(const Json& message, const std::string& path) {
  CACHALOT_TRY(const std::string task, string_field(message, path, "task"));
  constexpr std::pair<std::string_view, Task> kTasks[] = {
      {"action", Task::kAction},
      {"query", Task::kQuery},
      {"authority", Task::kAuthority},
      {"domain", Task::kDomain},
      {"title", Task::kTitle},
      {"read_url", Task::kReadUrl},
  };
  if (task.empty()) {
    return std::optional<Task>();
  }
  for (const auto& [name, value] : kTasks) {
    if (task == name) {
      return std::optional<Task>(value);
    }
  }
  return invalid(
      "{}.task '{}' is not known; it must be action, query, authority, domain, title or read_url",
      path,
      task);
}

Result<Message> parse_message(Json& json, const std::string& path, bool last) {
  if (!json.is_object()) {
    return must_be(path, "an object", json);
  }
  Message out;
  CACHALOT_TRY(out.role, parse_role(json, path));
  CACHALOT_TRY(out.task, parse_task(json, path));
  CACHALOT_TRY(out.tools, parse_tools(json, path));

  // A user message may carry its blocks under their own key; they then win over a plain `content`.
  const Json* content = present(json, "content");
  std::string content_path = path + ".content";
  if (const Json* blocks = present(json, "content_blocks");
      blocks != nullptr && (out.role == Role::kUser || content == nullptr)) {
    content = blocks;
    content_path = path + ".content_blocks";
  }
  const bool needs_content = out.role == Role::kUser || out.role == Role::kLatestReminder;
  if (needs_content && content == nullptr) {
    return invalid("{}.content must be a string or an array", path);
  }
  if (content != nullptr) {
    CACHALOT_TRY(out.content, parse_content(*content, content_path, false));
  }

  CACHALOT_TRY(const Json* format_object, object_field(json, path, "response_format"));
  if (format_object != nullptr && out.role == Role::kSystem) {
    out.response_format = python_json(*format_object);
  }
  if (out.role == Role::kTool) {
    CACHALOT_TRY(out.tool_call_id, string_field(json, path, "tool_call_id"));
  }
  if (out.role != Role::kAssistant) {
    return out;
  }
  CACHALOT_TRY(out.reasoning, string_field(json, path, "reasoning_content"));
  CACHALOT_TRY(const Json* calls, array_field(json, path, "tool_calls"));
  for (size_t i = 0; calls != nullptr && i < calls->items.size(); ++i) {
    CACHALOT_TRY(ToolCall call,
                 parse_tool_call(calls->items[i], fmt::format("{}.tool_calls[{}]", path, i)));
    out.tool_calls.push_back(std::move(call));
  }
  CACHALOT_TRY(const std::optional<bool> prefix, bool_field(json, path, "prefix"));
  CACHALOT_TRY(const std::optional<bool> without_eos, bool_field(json, path, "wo_eos"));
  if (prefix.value_or(false) && !last) {
    return invalid("{}.prefix: only the last message can be continued", path);
  }
  out.without_eos = prefix.value_or(false) || without_eos.value_or(false);
  return out;
}

// ---- the rest of the request --------------------------------------------------------------------

// The effort of an object, if it is given.
Result<std::optional<Effort>> parse_effort(const Json& object, std::string_view path) {
  const Json* value = present(object, "reasoning_effort");
  if (value == nullptr) {
    return std::optional<Effort>();
  }
  CACHALOT_TRY(const Effort effort, read_effort(*value, child(path, "reasoning_effort")));
  return std::optional<Effort>(effort);
}

Status parse_thinking(const Json& root, ChatRequest* out) {
  CACHALOT_TRY(const Json* kwargs, object_field(root, "", "chat_template_kwargs"));
  CACHALOT_TRY(std::optional<Effort> effort, parse_effort(root, ""));
  if (kwargs != nullptr) {
    constexpr std::string_view kPath = "chat_template_kwargs";
    for (const char* key : {"thinking", "enable_thinking"}) {
      CACHALOT_TRY(const std::optional<bool> flag, bool_field(*kwargs, kPath, key));
      out->thinking = flag.value_or(out->thinking);
    }
    CACHALOT_TRY(const std::optional<bool> drop, bool_field(*kwargs, kPath, "drop_thinking"));
    out->drop_thinking = drop.value_or(true);
    CACHALOT_TRY(const std::optional<Effort> inner, parse_effort(*kwargs, kPath));
    effort = effort ? effort : inner;
  }
  if (effort) {
    out->effort = effort->value;
    out->thinking = out->thinking && effort->thinking;
  }
  return read_thinking(root, out);
}

Status parse_tool_choice(const Json& root, ChatRequest* out) {
  const Json* choice = present(root, "tool_choice");
  if (choice == nullptr) {
    return {};
  }
  if (choice->is_object()) {
    CACHALOT_TRY(const Json* function, function_of(*choice, "tool_choice"));
    CACHALOT_TRY(out->named_tool, parse_tool_name(*choice, *function, "tool_choice"));
    out->tool_choice = ToolChoice::kRequired;
    return {};
  }
  CACHALOT_TRY(const std::string name, string_field(root, "", "tool_choice"));
  constexpr std::pair<std::string_view, ToolChoice> kChoices[] = {
      {"auto", ToolChoice::kAuto},
      {"none", ToolChoice::kNone},
      {"required", ToolChoice::kRequired},
  };
  for (const auto& [known, value] : kChoices) {
    if (name == known) {
      out->tool_choice = value;
      return {};
    }
  }
  return invalid("tool_choice '{}' is not known; it must be auto, none, required or a function",
                 name);
}

Status parse_response_format(const Json& root, ChatRequest* out) {
  CACHALOT_TRY(const Json* response, object_field(root, "", "response_format"));
  if (response == nullptr) {
    return {};
  }
  CACHALOT_TRY(const std::string type, required_string(*response, "response_format", "type"));
  if (type == "text") {
    return {};
  }
  if (type == "json_object") {
    out->response_schema = R"({"type": "json_object"})";
    return {};
  }
  if (type != "json_schema") {
    return invalid(
        "response_format.type '{}' is not supported; it must be text, json_object or json_schema",
        type);
  }
  CACHALOT_TRY(const Json* outer, object_field(*response, "response_format", "json_schema"));
  const Json* schema = nullptr;
  if (outer != nullptr) {
    CACHALOT_TRY(schema, object_field(*outer, "response_format.json_schema", "schema"));
  }
  if (schema == nullptr) {
    return invalid("response_format.json_schema.schema must be an object");
  }
  out->response_schema = python_json(*schema);
  return {};
}

}  // namespace

ContentBlock ContentBlock::of_text(std::string text) {
  ContentBlock block;
  block.text = std::move(text);
  return block;
}

Result<int32_t> effort_of(std::string_view name) {
  if (name == "low") {
    return 50;
  }
  if (name == "high") {
    return 75;
  }
  if (name == "max") {
    return 100;
  }
  return invalid("effort '{}' is not known; it must be low, high or max", name);
}

Result<Effort> read_effort(const Json& value, const std::string& path) {
  // The names of the public API; the model itself knows low, high and max.
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"minimal", "low"},
      {"low", "low"},
      {"medium", "high"},
      {"high", "high"},
      {"xhigh", "high"},
      {"max", "max"},
      {"ultra", "max"},
  };
  Effort out;
  if (value.is_string()) {
    if (value.text == "none") {
      out.thinking = false;
      return out;
    }
    for (const auto& [name, effort] : kNames) {
      if (value.text == name) {
        CACHALOT_TRY(out.value, effort_of(effort));
        return out;
      }
    }
    return invalid(
        "{} '{}' is not known; it must be an integer from 1 to 100 or one of none, minimal, low, "
        "medium, high, xhigh, max, ultra",
        path,
        value.text);
  }
  const std::optional<int64_t> number = value.integer();
  if (!number || *number < 1 || *number > 100) {
    return invalid("{} must be an integer from 1 to 100 or a name", path);
  }
  out.value = static_cast<int32_t>(*number);
  return out;
}

Status read_thinking(const Json& root, ChatRequest* out) {
  CACHALOT_TRY(const Json* thinking, object_field(root, "", "thinking"));
  if (thinking == nullptr) {
    return {};
  }
  CACHALOT_TRY(const std::string type, required_string(*thinking, "thinking", "type"));
  if (type != "enabled" && type != "adaptive" && type != "disabled") {
    return invalid("thinking.type '{}' is not known; it must be enabled, adaptive or disabled",
                   type);
  }
  out->thinking = type != "disabled";
  return {};
}

Result<std::vector<ContentBlock>> read_content(const Json& content, const std::string& path) {
  return parse_content(content, path, false);
}

Result<ChatRequest> parse_chat_request(std::string_view json) {
  CACHALOT_TRY(Json root, parse_json(json, "request body"));
  return parse_chat_request(root);
}

Result<ChatRequest> parse_chat_request(Json& root) {
  if (!root.is_object()) {
    return must_be("request body", "an object", root);
  }
  ChatRequest out;
  CACHALOT_TRY(out.model, string_field(root, "", "model"));
  CACHALOT_RETURN_IF_ERROR(array_field(root, "", "messages"));
  Json* messages = root.find("messages");
  if (messages == nullptr || messages->items.empty()) {
    return invalid("messages must be an array that is not empty");
  }
  for (size_t i = 0; i < messages->items.size(); ++i) {
    CACHALOT_TRY(
        Message message,
        parse_message(
            messages->items[i], fmt::format("messages[{}]", i), i + 1 == messages->items.size()));
    out.messages.push_back(std::move(message));
  }
  CACHALOT_TRY(out.tools, parse_tools(root, ""));
  CACHALOT_RETURN_IF_ERROR(parse_tool_choice(root, &out));
  CACHALOT_RETURN_IF_ERROR(parse_response_format(root, &out));
  CACHALOT_RETURN_IF_ERROR(parse_thinking(root, &out));
  return out;
}

Result<ToolDefinition> make_tool(std::string_view name,
                                 std::string_view description,
                                 std::string_view parameters) {
  if (name.empty()) {
    return invalid("a tool's name must not be empty");
  }
  Json function;
  function.kind = Kind::kObject;
  set(function, "name", string_value(std::string(name)));
  set(function, "description", string_value(std::string(description)));
  if (!parameters.empty()) {
    const std::string path = fmt::format("parameters of tool '{}'", name);
    CACHALOT_TRY(Json schema, parse_json(parameters, path));
    if (!schema.is_object()) {
      return must_be(path, "an object", schema);
    }
    set(function, "parameters", std::move(schema));
  }
  return ToolDefinition{std::string(name), python_json(function)};
}

Result<std::string> qualified_tool_name(std::string_view tool_namespace, std::string_view name) {
  for (const std::string_view part : {tool_namespace, name}) {
    if (part.find("::") != std::string_view::npos) {
      return invalid("'{}' must not contain '::'", part);
    }
  }
  return fmt::format("{}::{}", tool_namespace, name);
}

ToolName split_tool_name(std::string_view qualified) {
  const size_t mark = qualified.find("::");
  if (mark == std::string_view::npos) {
    return {"", std::string(qualified)};
  }
  return {std::string(qualified.substr(0, mark)), std::string(qualified.substr(mark + 2))};
}

}  // namespace cachalot::text
