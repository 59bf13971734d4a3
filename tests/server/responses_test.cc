// POST /v1/responses over a scripted engine.
#include <algorithm>

#include "tests/server/support.h"

namespace cachalot::server {
namespace {

constexpr const char* kPath = "/v1/responses";

json request(bool thinking = false) {
  return {{"input", "hi"}, {"reasoning", {{"effort", thinking ? "high" : "none"}}}};
}

std::string call_text(const std::string& name, const std::string& key, const std::string& value) {
  const std::string d(text::kDsmlToken);
  return "\n\n<" + d + " calls>\n<" + d + " invoke name=\"" + name + "\">\n<" + d +
         " parameter name=\"" + key + "\" string=\"true\">" + value + "</" + d + " parameter>\n</" +
         d + " invoke>\n</" + d + " calls>";
}

class ResponsesTest : public ServerTest {};

TEST_F(ResponsesTest, AnswersInOnePiece) {
  engine_->say("hm</think>A whale.");
  const json answer = ask(kPath, request(true));
  EXPECT_EQ(answer["object"], "response");
  EXPECT_EQ(answer["status"], "completed");
  ASSERT_EQ(answer["output"].size(), 2);
  EXPECT_EQ(answer["output"][0]["type"], "reasoning");
  EXPECT_EQ(answer["output"][0]["content"][0]["text"], "hm");
  EXPECT_EQ(answer["output"][1]["content"][0]["text"], "A whale.");
  EXPECT_GT(answer["usage"]["output_tokens_details"]["reasoning_tokens"], 0);
  EXPECT_EQ(
      answer["usage"]["total_tokens"],
      answer["usage"]["input_tokens"].get<int>() + answer["usage"]["output_tokens"].get<int>());
  EXPECT_EQ(answer["reasoning"]["effort"], "high");
  EXPECT_EQ(answer["store"], false);
}

TEST_F(ResponsesTest, StreamIsWellFormed) {
  json body = request(true);
  body["tools"] =
      json::array({{{"type", "function"}, {"name", "f"}, {"parameters", {{"type", "object"}}}},
                   {{"type", "custom"}, {"name", "apply_patch"}},
                   {{"type", "web_search"}}});
  for (const char* tool : {"f", "apply_patch"}) {
    const bool custom = std::string(tool) == "apply_patch";
    engine_->say("hm</think>Text." + call_text(tool, custom ? "input" : "a", "*** \"x\"\n+y"));
    const std::vector<SseEvent> events = stream(kPath, body);
    EXPECT_EQ(events[0].name, "response.created");
    EXPECT_EQ(events[1].name, "response.in_progress");
    EXPECT_EQ(events.back().name, "response.completed");
    std::string reasoning, text, call;
    for (size_t i = 0; i < events.size(); ++i) {
      EXPECT_EQ(events[i].data["sequence_number"], i);
      EXPECT_EQ(events[i].data["type"], events[i].name);
      const json& data = events[i].data;
      if (events[i].name == "response.reasoning_text.delta") {
        reasoning += data["delta"].get<std::string>();
      } else if (events[i].name == "response.output_text.delta") {
        text += data["delta"].get<std::string>();
      } else if (events[i].name == (custom ? "response.custom_tool_call_input.delta"
                                           : "response.function_call_arguments.delta")) {
        call += data["delta"].get<std::string>();
      }
    }
    EXPECT_EQ(reasoning, "hm");
    EXPECT_EQ(text, "Text.");
    const json& output = events.back().data["response"]["output"];
    ASSERT_EQ(output.size(), 3);
    EXPECT_EQ(output[2]["type"], custom ? "custom_tool_call" : "function_call");
    EXPECT_EQ(output[2][custom ? "input" : "arguments"], call);
    if (custom) {
      EXPECT_EQ(call, "*** \"x\"\n+y");
    } else {
      EXPECT_EQ(json::parse(call)["a"], "*** \"x\"\n+y");
    }
    EXPECT_GT(events.back().data["response"]["usage"]["input_tokens"], 0);
    // The items of the answer are those of the answer in one piece.
    const json whole = ask(kPath, body)["output"];
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(whole[i]["type"], output[i]["type"]);
    }
    EXPECT_EQ(whole[2][custom ? "input" : "arguments"], call);
  }
}

TEST_F(ResponsesTest, ConversationsRenderAsTheyDoForTheChatDialect) {
  engine_->say("x");
  const json body = json::parse(R"({"instructions": "Be brief.", "reasoning": {"effort": "high"},
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
    "input": [
      {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
      {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me"}]},
      {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
      {"type": "function_call", "call_id": "t1", "name": "f", "arguments": "{\"a\": 1}"},
      {"type": "function_call_output", "call_id": "t1", "output": "42"}]})");
  ask(kPath, body);
  const std::vector<int32_t> responses = engine_->prompt();
  const json chat = json::parse(R"({"reasoning_effort": "high", "messages": [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"},
    {"role": "assistant", "content": "ok", "reasoning_content": "let me", "tool_calls": [
      {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
    {"role": "tool", "tool_call_id": "t1", "content": "42"}],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]})");
  ask("/v1/chat/completions", chat);
  EXPECT_EQ(responses, engine_->prompt());
}

TEST_F(ResponsesTest, IncompleteAndFailed) {
  engine_->say(std::string(50, 'x'));
  json body = request();
  body["max_output_tokens"] = 3;
  const std::vector<SseEvent> cut = stream(kPath, body);
  EXPECT_EQ(cut.back().name, "response.incomplete");
  EXPECT_EQ(cut.back().data["response"]["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(cut.back().data["response"]["output"][0]["content"][0]["text"], "xxx");
  EXPECT_EQ(cut.back().data["response"]["output"][0]["status"], "incomplete");
  EXPECT_EQ(ask(kPath, body)["output"][0]["status"], "incomplete");
  engine_->fail_after(1, Status(Code::kInternal, "it broke"));
  const std::vector<SseEvent> failed = stream(kPath, body);
  EXPECT_EQ(failed.back().name, "response.failed");
  EXPECT_EQ(failed.back().data["response"]["error"]["message"], "it broke");
}

// A client runs a call whose arguments are done.
TEST_F(ResponsesTest, ACallThatIsCutIsNotDone) {
  engine_->say(call_text("f", std::string(400, 'x'), "1"));
  json body = request();
  body["tools"] = json::parse(R"([{"type": "function", "name": "f"}])");
  const auto events = [&] { return stream(kPath, body); };
  const auto has = [](const std::vector<SseEvent>& list, const char* name) {
    return std::ranges::any_of(list, [&](const SseEvent& e) { return e.name == name; });
  };
  body["max_output_tokens"] = 200;
  const std::vector<SseEvent> cut = events();
  EXPECT_FALSE(has(cut, "response.function_call_arguments.done"));
  const json item = cut.back().data["response"]["output"][0];
  EXPECT_EQ(item["type"], "function_call");
  EXPECT_EQ(item["status"], "incomplete");
  body["max_output_tokens"] = 2000;
  const std::vector<SseEvent> whole = events();
  EXPECT_TRUE(has(whole, "response.function_call_arguments.done"));
  EXPECT_EQ(whole.back().data["response"]["output"][0]["status"], "completed");
}

TEST_F(ResponsesTest, NamespacedTools) {
  engine_->say(call_text("ns::f", "a", "1"));
  json body = request();
  body["tools"] = json::parse(
      R"([{"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}]}])");
  const json call = ask(kPath, body)["output"][0];
  EXPECT_EQ(call["name"], "f");
  EXPECT_EQ(call["namespace"], "ns");
  EXPECT_EQ(call["type"], "function_call");
  for (const SseEvent& event : stream(kPath, body)) {
    if (event.name == "response.function_call_arguments.done") {
      EXPECT_EQ(event.data["name"], "f");
    }
  }
  body["tools"][0]["tools"][0]["type"] = "custom";
  EXPECT_EQ(ask(kPath, body)["output"][0]["type"], "custom_tool_call");
}

TEST_F(ResponsesTest, WrongFieldsAreNamed) {
  engine_->say("x");
  const auto param = [&](const char* key, const json& value) {
    json body = request();
    body[key] = value;
    return ask(kPath, body, 400)["error"]["param"];
  };
  EXPECT_EQ(param("input", nullptr), "input");
  EXPECT_EQ(param("input", json::array()), "input");
  EXPECT_EQ(param("input", json::array({{{"type", "item_reference"}}})), "input[0].type");
  EXPECT_EQ(param("input", json::array({{{"role", "user"}}})), "input[0].content");
  EXPECT_EQ(param("previous_response_id", "resp_1"), "previous_response_id");
  EXPECT_EQ(param("store", true), "store");
  EXPECT_EQ(param("max_output_tokens", 0), "max_output_tokens");
  EXPECT_EQ(param("reasoning", {{"effort", "huge"}}), "reasoning.effort");
  EXPECT_EQ(param("tools", json::array({json::object()})), "tools[0].type");
  EXPECT_EQ(param("tool_choice", "maybe"), "tool_choice");
}

}  // namespace
}  // namespace cachalot::server
