#include <nlohmann/json.hpp>

#include "tests/text/support.h"
#include "text/chat.h"

namespace cachalot::text {
namespace {

using nlohmann::json;

std::string error_of(const std::string& body) {
  const Result<ChatRequest> parsed = parse_chat_request(body);
  if (parsed.ok()) {
    return "no error";
  }
  EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
  return parsed.status().message();
}

constexpr const char* kGood = R"({
  "model": "m", "stream": true, "temperature": 0.5, "unknown": {"x": [1]},
  "messages": [
    {"role": "system", "content": "S", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "U"}]},
    {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
      {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"}],
  "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
  "tool_choice": "auto", "response_format": {"type": "text"}, "reasoning_effort": "max",
  "thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": false}})";

TEST(ChatRequest, ReadsAllFields) {
  const ChatRequest r = value_of(parse_chat_request(kGood));
  EXPECT_EQ(r.model, "m");
  ASSERT_EQ(r.messages.size(), 4U);
  EXPECT_EQ(r.messages[0].role, Role::kSystem);
  EXPECT_EQ(r.messages[1].content[0].text, "U");
  EXPECT_EQ(r.messages[2].reasoning, "r");
  EXPECT_EQ(r.messages[2].tool_calls[0].id, "c1");
  EXPECT_EQ(r.messages[2].tool_calls[0].arguments, "{}");
  EXPECT_EQ(r.messages[3].tool_call_id, "c1");
  EXPECT_EQ(r.tools[0].name, "f");
  EXPECT_EQ(r.tools[0].json, R"({"name": "f", "parameters": {"type": "object"}})");
  EXPECT_EQ(r.tool_choice, ToolChoice::kAuto);
  EXPECT_EQ(r.effort, 100);
  EXPECT_TRUE(r.thinking);
  EXPECT_TRUE(r.drop_thinking);
}

TEST(ChatRequest, WhoDecidesAboutThinking) {
  const auto thinking = [](json extra) {
    extra["messages"] = {{{"role", "user"}, {"content", "U"}}};
    return value_of(parse_chat_request(extra.dump())).thinking;
  };
  const json off = {{"type", "disabled"}};
  const json on = {{"type", "enabled"}};
  EXPECT_TRUE(thinking(json::object()));
  EXPECT_FALSE(thinking({{"thinking", off}}));
  EXPECT_FALSE(thinking({{"reasoning_effort", "none"}}));
  EXPECT_TRUE(thinking({{"reasoning_effort", "none"}, {"thinking", on}}));
  EXPECT_FALSE(thinking({{"chat_template_kwargs", {{"thinking", false}}}}));
  EXPECT_FALSE(thinking({{"chat_template_kwargs", {{"enable_thinking", false}}}}));
  EXPECT_TRUE(thinking({{"chat_template_kwargs", {{"enable_thinking", false}}}, {"thinking", on}}));
  EXPECT_FALSE(thinking({{"chat_template_kwargs", {{"reasoning_effort", "none"}}}}));
}

TEST(ChatRequest, WhoDecidesAboutEffort) {
  const auto effort = [](const char* extra) {
    json body = json::parse(extra);
    body["messages"] = {{{"role", "user"}, {"content", "U"}}};
    return value_of(parse_chat_request(body.dump())).effort;
  };
  EXPECT_EQ(effort("{}"), 75);
  EXPECT_EQ(effort(R"({"chat_template_kwargs": {"reasoning_effort": 37}})"), 37);
  EXPECT_EQ(effort(R"({"reasoning_effort": 5, "chat_template_kwargs": {"reasoning_effort": 37}})"),
            5);
  EXPECT_EQ(effort(R"({"reasoning_effort": "minimal"})"), 50);
  EXPECT_EQ(effort(R"({"reasoning_effort": "medium"})"), 75);
  EXPECT_EQ(effort(R"({"reasoning_effort": "xhigh"})"), 75);
  EXPECT_EQ(effort(R"({"reasoning_effort": "ultra"})"), 100);
}

TEST(ChatRequest, ArgumentsAsAnObject) {
  json body = json::parse(kGood);
  body["messages"][2]["tool_calls"][0]["function"]["arguments"] = {{"a", 1.0}};
  EXPECT_EQ(value_of(parse_chat_request(body.dump())).messages[2].tool_calls[0].arguments,
            R"({"a": 1.0})");
}

// A wrong value anywhere is an error that starts with the field.
TEST(ChatRequest, WrongTypesNameTheField) {
  struct Case {
    const char* pointer;
    const char* value;
    const char* field;
  };
  const Case cases[] = {
      {"", "[]", "request body"},
      {"/model", "3", "model"},
      {"/messages", "null", "messages"},
      {"/messages", "[]", "messages"},
      {"/messages", "{}", "messages"},
      {"/messages", "\"hi\"", "messages"},
      {"/messages/1", "\"hi\"", "messages[1]"},
      {"/messages/1/role", "null", "messages[1].role"},
      {"/messages/1/role", "7", "messages[1].role"},
      {"/messages/1/role", "\"developer\"", "messages[1].role"},
      {"/messages/1/content", "null", "messages[1].content"},
      {"/messages/1/content", "3", "messages[1].content"},
      {"/messages/1/content/0", "\"x\"", "messages[1].content[0]"},
      {"/messages/1/content/0/type", "null", "messages[1].content[0].type"},
      {"/messages/1/content/0/text", "null", "messages[1].content[0].text"},
      {"/messages/1/content/0/text", "{}", "messages[1].content[0].text"},
      {"/messages/1/content/0", R"({"type": "image_url"})", "messages[1].content[0]"},
      {"/messages/1/content/0",
       R"({"type": "image_url", "image_url": 3})",
       "messages[1].content[0].image_url"},
      {"/messages/1/content/0",
       R"({"type": "image", "source": {"data": 1}})",
       "messages[1].content[0].source"},
      {"/messages/1/content/0",
       R"({"type": "tool_result", "content": [{"type": "text"}]})",
       "messages[1].content[0].content[0].text"},
      {"/messages/1/task", "\"sing\"", "messages[1].task"},
      {"/messages/1/task", "1", "messages[1].task"},
      {"/messages/0/tools", "{}", "messages[0].tools"},
      {"/messages/0/tools", "[{}]", "messages[0].tools[0].function"},
      {"/messages/0/response_format", "\"json\"", "messages[0].response_format"},
      {"/messages/2/reasoning_content", "[]", "messages[2].reasoning_content"},
      {"/messages/2/prefix", "1", "messages[2].prefix"},
      {"/messages/2/prefix", "true", "messages[2].prefix"},
      {"/messages/2/wo_eos", "\"x\"", "messages[2].wo_eos"},
      {"/messages/2/tool_calls", "{}", "messages[2].tool_calls"},
      {"/messages/2/tool_calls/0", "3", "messages[2].tool_calls[0]"},
      {"/messages/2/tool_calls/0/id", "3", "messages[2].tool_calls[0].id"},
      {"/messages/2/tool_calls/0/type", "\"custom\"", "messages[2].tool_calls[0].type"},
      {"/messages/2/tool_calls/0/function", "null", "messages[2].tool_calls[0].function"},
      {"/messages/2/tool_calls/0/function/name", "null", "messages[2].tool_calls[0].function.name"},
      {"/messages/2/tool_calls/0/function/arguments",
       "[1]",
       "messages[2].tool_calls[0].function.arguments"},
      {"/messages/3/tool_call_id", "{}", "messages[3].tool_call_id"},
      {"/tools", "{}", "tools"},
      {"/tools/0", "1", "tools[0]"},
      {"/tools/0/type", "\"retrieval\"", "tools[0].type"},
      {"/tools/0/function/name", "\"\"", "tools[0].function.name"},
      {"/tools/0/function/name", "[]", "tools[0].function.name"},
      {"/tools/0/function/description", "1", "tools[0].function.description"},
      {"/tools/0/function/parameters", "\"{}\"", "tools[0].function.parameters"},
      {"/tools/0/namespace", "3", "tools[0].namespace"},
      {"/tools/0/namespace", "\"a::b\"", "tools[0]"},
      {"/tools/0/namespace", "{}", "tools[0].namespace.name"},
      {"/tool_choice", "3", "tool_choice"},
      {"/tool_choice", "\"maybe\"", "tool_choice"},
      {"/tool_choice", "{}", "tool_choice.function"},
      {"/response_format", "\"json\"", "response_format"},
      {"/response_format", "{}", "response_format.type"},
      {"/response_format", R"({"type": "regex"})", "response_format.type"},
      {"/response_format", R"({"type": "json_schema"})", "response_format.json_schema"},
      {"/response_format",
       R"({"type": "json_schema", "json_schema": {"schema": 1}})",
       "response_format.json_schema.schema"},
      {"/thinking", "true", "thinking"},
      {"/thinking", "{}", "thinking.type"},
      {"/thinking/type", "\"sometimes\"", "thinking.type"},
      {"/chat_template_kwargs", "3", "chat_template_kwargs"},
      {"/chat_template_kwargs/thinking", "\"no\"", "chat_template_kwargs.thinking"},
      {"/chat_template_kwargs",
       R"({"enable_thinking": 1})",
       "chat_template_kwargs.enable_thinking"},
      {"/chat_template_kwargs",
       R"({"reasoning_effort": 0})",
       "chat_template_kwargs.reasoning_effort"},
  };
  for (const Case& c : cases) {
    json body = json::parse(kGood);
    body[json::json_pointer(c.pointer)] = json::parse(c.value);
    const std::string message = error_of(body.dump());
    EXPECT_EQ(message.substr(0, std::string(c.field).size()), c.field)
        << c.pointer << " = " << c.value << " gave " << message;
  }
  EXPECT_EQ(error_of("{\"messages\":").substr(0, 14), "request body: ");
}

TEST(ChatRequest, RepeatedToolNames) {
  json body = json::parse(kGood);
  body["tools"].push_back(body["tools"][0]);
  EXPECT_FALSE(render_chat(value_of(parse_chat_request(body.dump()))).ok());
}

TEST(ChatRequest, DeepNestingIsAnError) {
  for (const size_t depth : {64, 1'000, 10'000, 1'000'000}) {
    const std::string deep = std::string(depth, '[') + std::string(depth, ']');
    const std::string message = R"({"role": "user", "content": "U"})";
    for (const std::string& body :
         {R"({"messages": [)" + message + R"(], "unknown": )" + deep + "}",
          R"({"messages": )" + deep + "}",
          R"({"messages": [)" + message + R"(], "tools": [{"function": {"name": "f", "x": )" +
              deep + "}}]}"}) {
      EXPECT_NE(error_of(body).find("nested"), std::string::npos);
    }
  }
  // The arguments of an earlier call are text to us: too deep ones are shown as they are.
  const std::string deep = std::string(10'000, '[') + std::string(10'000, ']');
  json body = json::parse(kGood);
  body["messages"][2]["tool_calls"][0]["function"]["arguments"] = R"({"a": )" + deep + "}";
  const std::string prompt =
      value_of(render_chat(value_of(parse_chat_request(body.dump())))).display();
  EXPECT_NE(prompt.find("name=\"arguments\" string=\"true\">{\"a\": [[["), std::string::npos);
}

TEST(ChatRequest, MakeTool) {
  const ToolDefinition tool =
      value_of(make_tool("f", "d\u00E9", R"({"type":"object","x":1.0,"y":[]})"));
  EXPECT_EQ(tool.json,
            "{\"name\": \"f\", \"description\": \"d\u00E9\", \"parameters\": "
            "{\"type\": \"object\", \"x\": 1.0, \"y\": []}}");
  EXPECT_EQ(value_of(make_tool("f", "", "")).json, R"({"name": "f", "description": ""})");
  EXPECT_FALSE(make_tool("", "", "").ok());
  EXPECT_FALSE(make_tool("f", "", "[]").ok());
  EXPECT_FALSE(make_tool("f", "", "{").ok());
}

}  // namespace
}  // namespace cachalot::text
