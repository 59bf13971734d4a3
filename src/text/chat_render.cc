// Rendering messages into a prompt.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/format.h"
#include "text/chat.h"
#include "text/control_tokens.h"
#include "text/json_tree.h"

namespace cachalot::text {
namespace {

// Trained text. {D} is the DSML token, {T} and {/T} are the tokens around reasoning.
constexpr std::string_view kToolsHead = R"(## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{D} calls>" block like the following:

<{D} calls>
<{D} invoke name="$TOOL_NAME">
<{D} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{D} parameter>
...
</{D} invoke>
<{D} invoke name="$TOOL_NAME2">
...
</{D} invoke>
</{D} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {T}), you MUST output your complete reasoning inside {T}...{/T} BEFORE any tool calls or final response.

Otherwise, output directly after {/T} with tool calls or final response.

### Available Tool Schemas

)";
constexpr std::string_view kToolsTail =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n";
constexpr std::string_view kResponseFormatHead =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

std::string_view task_token(Task task) {
  switch (task) {
    case Task::kAction:
      return kActionToken;
    case Task::kQuery:
      return kQueryToken;
    case Task::kAuthority:
      return kAuthorityToken;
    case Task::kDomain:
      return kDomainToken;
    case Task::kTitle:
      return kTitleToken;
    case Task::kReadUrl:
      return kReadUrlToken;
  }
  return {};
}

// ---- preparation of the messages ----------------------------------------------------------------

// Tool messages become results inside user messages, and neighbouring user messages become one.
std::vector<Message> merge_tool_messages(const std::vector<Message>& messages) {
  std::vector<Message> merged;
  for (const Message& message : messages) {
    Message* previous =
        !merged.empty() && merged.back().role == Role::kUser ? &merged.back() : nullptr;
    if (message.role == Role::kTool) {
      if (previous == nullptr) {
        previous = &merged.emplace_back();
      }
      ContentBlock block;
      block.type = ContentBlock::Type::kToolResult;
      block.tool_use_id = message.tool_call_id;
      for (const ContentBlock& part : message.content) {
        if (part.type == ContentBlock::Type::kText || part.type == ContentBlock::Type::kImage) {
          block.result.push_back(part);
        }
      }
      previous->content.push_back(std::move(block));
    } else if (message.role == Role::kUser && previous != nullptr && !previous->task) {
      previous->content.insert(
          previous->content.end(), message.content.begin(), message.content.end());
    } else {
      merged.push_back(message);
    }
  }
  return merged;
}

// Results of a user message go into the order of the calls that they answer; other blocks keep
// their places. A result of an unknown call sorts as the first one.
void sort_tool_results(std::vector<Message>* messages) {
  std::unordered_map<std::string_view, size_t> order;
  for (Message& message : *messages) {
    if (message.role == Role::kAssistant && !message.tool_calls.empty()) {
      order.clear();
      for (size_t i = 0; i < message.tool_calls.size(); ++i) {
        if (!message.tool_calls[i].id.empty()) {
          order[message.tool_calls[i].id] = i;
        }
      }
      continue;
    }
    if (message.role != Role::kUser || order.empty()) {
      continue;
    }
    std::vector<size_t> slots;
    // (place of the call, slot): the slot keeps the results of one call in their order.
    std::vector<std::pair<size_t, size_t>> keys;
    for (size_t i = 0; i < message.content.size(); ++i) {
      if (message.content[i].type == ContentBlock::Type::kToolResult) {
        const auto found = order.find(message.content[i].tool_use_id);
        keys.emplace_back(found != order.end() ? found->second : 0, i);
        slots.push_back(i);
      }
    }
    std::sort(keys.begin(), keys.end());
    std::vector<ContentBlock> results;
    for (const auto& [call, slot] : keys) {
      results.push_back(std::move(message.content[slot]));
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      message.content[slots[i]] = std::move(results[i]);
    }
  }
}

// Puts the request's tools and schema where the protocol has a place for them: into the first
// message, which must then be a system message.
Status attach_to_system(const ChatRequest& request, std::vector<Message>* messages) {
  std::vector<ToolDefinition> tools;
  if (request.tool_choice != ToolChoice::kNone) {
    for (const ToolDefinition& tool : request.tools) {
      if (request.named_tool.empty() || tool.name == request.named_tool) {
        tools.push_back(tool);
      }
    }
    if (!request.named_tool.empty() && tools.empty()) {
      return invalid("tool_choice names the function '{}', which is not in tools",
                     request.named_tool);
    }
  }
  if (tools.empty() && request.tool_choice == ToolChoice::kRequired) {
    return invalid("tool_choice asks for a call, but tools is empty");
  }
  if (tools.empty() && request.response_schema.empty()) {
    return {};
  }
  if (messages->front().role != Role::kSystem) {
    Message system;
    system.role = Role::kSystem;
    messages->insert(messages->begin(), std::move(system));
  }
  Message& system = messages->front();
  system.tools.insert(system.tools.end(), tools.begin(), tools.end());
  if (!request.response_schema.empty()) {
    if (!system.response_format.empty()) {
      return invalid("response_format is given by the request and by messages[0]");
    }
    system.response_format = request.response_schema;
  }
  return {};
}

Status check_tool_names(const std::vector<ToolDefinition>& tools) {
  std::unordered_map<std::string_view, size_t> seen;
  for (size_t i = 0; i < tools.size(); ++i) {
    const auto [first, fresh] = seen.emplace(tools[i].name, i);
    if (!fresh) {
      return invalid(
          "tools[{}] and tools[{}] have the same name '{}'", first->second, i, tools[i].name);
    }
  }
  return {};
}

// ---- rendering ----------------------------------------------------------------------------------

class Renderer {
 public:
  Renderer(const ChatRequest& request, const std::vector<Message>& messages)
      : request_(request), messages_(messages) {
    drop_ = request.drop_thinking;
    for (const Message& message : messages) {
      drop_ = drop_ && message.tools.empty();
    }
    for (size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].role == Role::kUser || (messages[i].role == Role::kSystem && i > 0)) {
        last_user_ = static_cast<int64_t>(i);
      }
    }
  }

  RenderedChat run() {
    control(kBosToken);
    for (size_t i = 0; i < messages_.size(); ++i) {
      message(i);
      transition(i);
    }
    const Message& last = messages_.back();
    if (last.role == Role::kAssistant && last.without_eos) {
      out_.start = OutputStart::kContinuation;
    }
    if (request_.tool_choice == ToolChoice::kRequired) {
      plain("\n\n<");
      control(kDsmlToken);
      plain(" calls>\n");
      out_.start = OutputStart::kToolCalls;
    }
    return std::move(out_);
  }

 private:
  void plain(std::string_view text) {
    if (text.empty()) {
      return;
    }
    if (out_.parts.empty() || out_.parts.back().control) {
      out_.parts.push_back({false, {}});
    }
    out_.parts.back().text += text;
  }
  void control(std::string_view token) { out_.parts.push_back({true, std::string(token)}); }

  void trained(std::string_view text) {
    constexpr std::pair<std::string_view, std::string_view> kMarks[] = {
        {"{D}", kDsmlToken}, {"{T}", kThinkToken}, {"{/T}", kThinkEndToken}};
    while (!text.empty()) {
      const size_t brace = text.find('{');
      plain(text.substr(0, brace));
      if (brace == std::string_view::npos) {
        return;
      }
      text.remove_prefix(brace);
      const auto* mark = std::find_if(std::begin(kMarks), std::end(kMarks), [&](const auto& m) {
        return text.substr(0, m.first.size()) == m.first;
      });
      CACHALOT_CHECK(mark != std::end(kMarks));
      control(mark->second);
      text.remove_prefix(mark->first.size());
    }
  }

  void block(const ContentBlock& block) {
    switch (block.type) {
      case ContentBlock::Type::kText:
        plain(block.text);
        return;
      case ContentBlock::Type::kImage:
        control(kImageToken);
        out_.images.push_back(block.image);
        return;
      case ContentBlock::Type::kToolResult:
        plain("<tool_result>");
        blocks(block.result, /*text_only=*/false);
        plain("</tool_result>");
        return;
      case ContentBlock::Type::kUnsupported:
        plain(fmt::format("[Unsupported {}]", block.text));
        return;
    }
  }

  // Blocks joined by an empty line. Roles other than user have a place for text and images only.
  void blocks(const std::vector<ContentBlock>& list, bool text_only) {
    bool first = true;
    for (const ContentBlock& item : list) {
      const bool skip = text_only && item.type != ContentBlock::Type::kText &&
                        item.type != ContentBlock::Type::kImage;
      if (skip) {
        continue;
      }
      plain(first ? "" : "\n\n");
      block(item);
      first = false;
    }
  }

  void tools_block(const std::vector<ToolDefinition>& tools) {
    trained(kToolsHead);
    for (size_t i = 0; i < tools.size(); ++i) {
      plain(i > 0 ? "\n" : "");
      plain(tools[i].json);
    }
    plain(kToolsTail);
  }

  // The calls of an earlier turn, in the markup that the model writes.
  void calls_block(const std::vector<ToolCall>& calls) {
    trained("<{D} calls>\n");
    for (const ToolCall& call : calls) {
      trained("<{D} invoke name=\"");
      plain(call.name);
      plain("\">\n");
      parameters(call);
      trained("\n</{D} invoke>\n");
    }
    trained("</{D} calls>");
  }

  void parameters(const ToolCall& call) {
    // The text may be JSON that was encoded twice.
    Result<Json> arguments = parse_json(call.arguments, "arguments");
    if (arguments.ok() && arguments->is_string()) {
      arguments = parse_json(std::string(arguments->text), "arguments");
    }
    if (!arguments.ok() || !arguments->is_object()) {
      parameter("arguments", "true", call.arguments);
      return;
    }
    for (size_t i = 0; i < arguments->items.size(); ++i) {
      const Json& value = arguments->items[i];
      plain(i > 0 ? "\n" : "");
      if (value.is_string()) {
        parameter(arguments->keys[i], "true", value.text);
      } else {
        parameter(arguments->keys[i], "false", python_json(value));
      }
    }
  }

  void parameter(std::string_view key, std::string_view is_string, std::string_view value) {
    trained("<{D} parameter name=\"");
    plain(key);
    plain("\" string=\"");
    plain(is_string);
    plain("\">");
    plain(value);
    trained("</{D} parameter>");
  }

  // Whether a turn at this place shows its reasoning.
  bool keeps_reasoning(int64_t index, int64_t first_kept) const {
    return request_.thinking && (!drop_ || index >= first_kept);
  }

  void message(size_t i) {
    const Message& m = messages_[i];
    if (i == 0 && (request_.thinking || m.role == Role::kSystem)) {
      control(kSystemToken);
    }
    if (i == 0 && request_.thinking) {
      plain(fmt::format(
          "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the "
          "reasoning)\n\n",
          request_.effort));
    }
    switch (m.role) {
      case Role::kSystem:
        if (i > 0) {
          control(kSystemToken);
        }
        blocks(m.content, /*text_only=*/true);
        if (!m.tools.empty()) {
          plain("\n\n");
          tools_block(m.tools);
        }
        if (!m.response_format.empty()) {
          plain("\n\n");
          plain(kResponseFormatHead);
          plain(m.response_format);
        }
        return;
      case Role::kUser:
        control(kUserToken);
        blocks(m.content, /*text_only=*/false);
        return;
      case Role::kLatestReminder:
        control(kLatestReminderToken);
        blocks(m.content, /*text_only=*/true);
        return;
      case Role::kAssistant: {
        const bool answers_task = i > 0 && messages_[i - 1].task.has_value();
        if (!answers_task && keeps_reasoning(static_cast<int64_t>(i), last_user_ + 1)) {
          plain(m.reasoning);
          control(kThinkEndToken);
        }
        blocks(m.content, /*text_only=*/true);
        if (!m.tool_calls.empty()) {
          plain("\n\n");
          calls_block(m.tool_calls);
        }
        if (!m.without_eos) {
          control(kEosToken);
        }
        return;
      }
      case Role::kTool:  // merged into user messages before
        return;
    }
  }

  // What follows a message: the header of the answer, unless another message of the user's side
  // comes.
  void transition(size_t i) {
    const Message& m = messages_[i];
    if (i + 1 < messages_.size() && messages_[i + 1].role != Role::kAssistant &&
        messages_[i + 1].role != Role::kLatestReminder) {
      return;
    }
    if (m.task) {
      if (*m.task == Task::kAction) {
        control(kAssistantToken);
        control(request_.thinking ? kThinkToken : kThinkEndToken);
      }
      control(task_token(*m.task));
      out_.start = OutputStart::kContent;
    } else if (m.role == Role::kUser || (m.role == Role::kSystem && i > 0)) {
      const bool thinks = keeps_reasoning(static_cast<int64_t>(i), last_user_);
      control(kAssistantToken);
      control(thinks ? kThinkToken : kThinkEndToken);
      out_.start = thinks ? OutputStart::kReasoning : OutputStart::kContent;
    }
  }

  const ChatRequest& request_;
  const std::vector<Message>& messages_;
  bool drop_ = true;
  int64_t last_user_ = -1;
  RenderedChat out_;
};

}  // namespace

std::string RenderedChat::display() const {
  std::string text;
  for (const PromptPart& part : parts) {
    text += part.text;
  }
  return text;
}

Result<RenderedChat> render_chat(const ChatRequest& request) {
  if (request.messages.empty()) {
    return invalid("messages must not be empty");
  }
  if (request.effort < 1 || request.effort > 100) {
    return invalid("effort {} is outside 1..100", request.effort);
  }
  if (request.thinking && request.tool_choice == ToolChoice::kRequired) {
    return invalid("Thinking mode does not support this tool_choice");
  }
  CACHALOT_RETURN_IF_ERROR(check_tool_names(request.tools));
  std::vector<Message> messages = merge_tool_messages(request.messages);
  sort_tool_results(&messages);
  CACHALOT_RETURN_IF_ERROR(attach_to_system(request, &messages));
  return Renderer(request, messages).run();
}

Result<std::vector<int32_t>> encode_prompt(const Tokenizer& tokenizer, const RenderedChat& prompt) {
  std::vector<int32_t> ids;
  for (const PromptPart& part : prompt.parts) {
    if (part.control) {
      CACHALOT_TRY(const int32_t id, tokenizer.control_id(part.text));
      ids.push_back(id);
    } else {
      CACHALOT_TRY(const std::vector<int32_t> text, tokenizer.encode(part.text));
      ids.insert(ids.end(), text.begin(), text.end());
    }
  }
  return ids;
}

Result<std::vector<int32_t>> encode_chat(const Tokenizer& tokenizer, const ChatRequest& request) {
  CACHALOT_TRY(const RenderedChat prompt, render_chat(request));
  return encode_prompt(tokenizer, prompt);
}

}  // namespace cachalot::text
