// The chat protocol: messages to a prompt, as the official encoder of V4.1 renders them.
//
//   CACHALOT_TRY(const ChatRequest request, parse_chat_request(body));
//   CACHALOT_TRY(const RenderedChat prompt, render_chat(request));
//   CACHALOT_TRY(const std::vector<int32_t> ids, encode_prompt(tokenizer, prompt));
//
// A prompt is a list of control tokens and plain text. Plain text never becomes a control token,
// whatever a user writes, and text that touches is encoded as one string. JSON inside prompts is
// spelled as Python's json.dumps(ensure_ascii=False) spells it, keys in their order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/json_tree.h"
#include "text/tokenizer.h"

namespace cachalot::text {

// A tool message becomes part of the user message before it, as a tool result.
enum class Role : uint8_t { kSystem, kUser, kAssistant, kTool, kLatestReminder };

// The quick-instruction tasks: the answer is a classification and has no reasoning.
enum class Task : uint8_t { kAction, kQuery, kAuthority, kDomain, kTitle, kReadUrl };

struct ImageSource {
  std::string url;    // http(s) or data URL
  std::string field;  // of the request, for messages
};

struct ContentBlock {
  enum class Type : uint8_t { kText, kImage, kToolResult, kUnsupported };

  Type type = Type::kText;
  std::string text;                  // kText: the text; kUnsupported: the name of the block's type
  ImageSource image;                 // kImage
  std::string tool_use_id;           // kToolResult
  std::vector<ContentBlock> result;  // kToolResult: blocks of the other types

  static ContentBlock of_text(std::string text);
};

struct ToolDefinition {
  std::string name;  // as the model sees it, with its namespace
  std::string json;  // the line of the tools block: the function object in Python's spelling
};

struct ToolCall {
  std::string id;
  std::string name;
  // JSON text of an object. Text that is not an object is shown to the model as one parameter named
  // "arguments", as the official encoder does.
  std::string arguments;
};

struct Message {
  Role role = Role::kUser;
  std::vector<ContentBlock> content;  // only user and tool messages may hold more than text
  std::string reasoning;              // assistant
  std::vector<ToolCall> tool_calls;   // assistant
  std::string tool_call_id;           // tool
  std::vector<ToolDefinition>
      tools;                    // rendered on system messages; on any message they keep reasoning
  std::string response_format;  // system: JSON in Python's spelling, or empty
  std::optional<Task> task;
  bool without_eos = false;  // assistant: generation continues this message
};

enum class ToolChoice : uint8_t {
  kAuto,
  kNone,      // tools are not shown
  kRequired,  // the answer starts inside a block of calls; not in thinking mode
};

struct ChatRequest {
  std::string model;
  std::vector<Message> messages;
  // Shown in the first message if that is a system message, else in an empty one put before it.
  std::vector<ToolDefinition> tools;
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string named_tool;  // kRequired: only this tool is shown; empty for all
  std::string
      response_schema;  // JSON in Python's spelling, placed as the tools are; empty for text
  bool thinking = true;
  int32_t effort = 75;        // 1..100: how thorough the reasoning should be
  bool drop_thinking = true;  // forget the reasoning of turns before the last user message
};

// 50, 75 and 100 for "low", "high" and "max". Errors: any other name.
Result<int32_t> effort_of(std::string_view name);

// Reads an OpenAI chat-completions body: model, messages, tools, tool_choice, response_format,
// reasoning_effort, thinking and chat_template_kwargs {thinking, enable_thinking, reasoning_effort,
// drop_thinking}. Other fields (sampling, streaming) are the server's and are ignored.
// reasoning_effort is an integer 1..100 or minimal, low, medium, high, xhigh, max, ultra or none;
// none turns thinking off. thinking.type overrides that, and both override chat_template_kwargs.
// Errors: kInvalidArgument naming the field, e.g. "messages[2].content[0].text must be a string".
Result<ChatRequest> parse_chat_request(std::string_view json);
// The same for a body that is parsed already; leaves `root` in an unspecified state.
Result<ChatRequest> parse_chat_request(Json& root);

// Parts that other dialects share with the chat-completions body; `path` names the value in errors.

struct Effort {
  bool thinking = true;  // false for "none"
  int32_t value = 75;
};
// An integer 1..100 or a name.
Result<Effort> read_effort(const Json& value, const std::string& path);
// The field "thinking", {"type": "enabled", "adaptive" or "disabled"}, if it is there.
Status read_thinking(const Json& root, ChatRequest* out);
// A string, or an array of blocks: text, image_url or image, tool_result.
Result<std::vector<ContentBlock>> read_content(const Json& content, const std::string& path);

// A tool from its parts. `parameters` is the JSON text of a schema object, or empty for none.
// Errors: an empty name, `parameters` that are not an object.
Result<ToolDefinition> make_tool(std::string_view name,
                                 std::string_view description,
                                 std::string_view parameters);

// The name that a tool of a namespace has in prompts: "ns::name". Errors: a part with "::" in it.
Result<std::string> qualified_tool_name(std::string_view tool_namespace, std::string_view name);

struct ToolName {
  std::string tool_namespace;  // empty without one
  std::string name;
};
// Undoes qualified_tool_name.
ToolName split_tool_name(std::string_view qualified);

// What the model's output begins with.
enum class OutputStart : uint8_t {
  kReasoning,
  kContent,
  kContinuation,  // the middle of an answer
  kToolCalls,     // the inside of a block of calls that the prompt has opened
};

struct PromptPart {
  bool control = false;
  std::string text;  // a control token's spelling, or plain text
  bool operator==(const PromptPart&) const = default;
};

struct RenderedChat {
  std::vector<PromptPart> parts;    // no two plain parts touch
  std::vector<ImageSource> images;  // in the order of the image tokens
  OutputStart start = OutputStart::kContent;

  // The prompt as one string, for people. Not to be encoded: it cannot tell a control token from
  // its spelling in a user's text.
  std::string display() const;
};

// Errors: kInvalidArgument for no messages, an effort outside 1..100 (in chat mode too), a tool
// that is named but not defined, kRequired in thinking mode, two tools of one name.
Result<RenderedChat> render_chat(const ChatRequest& request);

// Errors: kNotFound naming a control token that the tokenizer lacks.
Result<std::vector<int32_t>> encode_prompt(const Tokenizer& tokenizer, const RenderedChat& prompt);

// render_chat and encode_prompt in one.
Result<std::vector<int32_t>> encode_chat(const Tokenizer& tokenizer, const ChatRequest& request);

}  // namespace cachalot::text
