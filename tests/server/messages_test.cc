// POST /v1/messages, the Anthropic dialect, over a scripted engine.
#include "tests/server/support.h"

namespace cachalot::server {
namespace {

constexpr const char* kPath = "/v1/messages";

json request(bool thinking = false) {
  return {{"model", "claude-sonnet-4-5"},
          {"max_tokens", 200},
          {"thinking", {{"type", thinking ? "enabled" : "disabled"}}},
          {"messages", {{{"role", "user"}, {"content", "hi"}}}}};
}

std::string call_text() {
  const std::string d(text::kDsmlToken);
  return "\n\n<" + d + " calls>\n<" + d + " invoke name=\"f\">\n<" + d +
         " parameter name=\"a\" string=\"false\">[1, 2]</" + d + " parameter>\n</" + d +
         " invoke>\n<" + d + " invoke name=\"g\">\n\n</" + d + " invoke>\n</" + d + " calls>";
}

json with_tools(json body) {
  body["tools"] = json::array({{{"name", "f"}, {"input_schema", {{"type", "object"}}}},
                               {{"name", "g"}, {"input_schema", {{"type", "object"}}}},
                               {{"type", "web_search_20250305"}, {"name", "web_search"}}});
  return body;
}

class MessagesTest : public ServerTest {};

TEST_F(MessagesTest, AnswersInOnePiece) {
  engine_->say("A whale.");
  engine_->set_cached(1);
  const json answer = ask(kPath, request());
  EXPECT_EQ(answer["type"], "message");
  EXPECT_EQ(answer["role"], "assistant");
  EXPECT_TRUE(answer["id"].get<std::string>().starts_with("msg_"));
  EXPECT_EQ(answer["content"], json::array({{{"type", "text"}, {"text", "A whale."}}}));
  EXPECT_EQ(answer["stop_reason"], "end_turn");
  EXPECT_EQ(answer["usage"]["cache_read_input_tokens"], 1);
  EXPECT_EQ(answer["usage"]["input_tokens"], engine_->prompt().size() - 1);
}

// A-48: blocks open and close in order, thinking has a signature, usage is there at both ends.
TEST_F(MessagesTest, A48_StreamIsWellFormed) {
  engine_->say("hm</think>Text." + call_text());
  engine_->set_cached(1);
  for (const int64_t at_once : {1, 4, 1000}) {
    engine_->set_tokens_per_event(at_once);
    const std::vector<SseEvent> events = stream(kPath, with_tools(request(true)));
    EXPECT_EQ(events.front().name, "message_start");
    EXPECT_EQ(events.front().data["message"]["usage"]["cache_read_input_tokens"], 1);
    std::vector<json> blocks;
    std::vector<std::string> texts;
    bool open = false, signed_thinking = false;
    for (const SseEvent& event : events) {
      EXPECT_EQ(json(event.name), event.data["type"]);
      if (event.name == "content_block_start") {
        EXPECT_FALSE(open);
        open = true;
        EXPECT_EQ(event.data["index"], blocks.size());
        blocks.push_back(event.data["content_block"]);
        texts.emplace_back();
      } else if (event.name == "content_block_delta") {
        EXPECT_TRUE(open);
        EXPECT_EQ(event.data["index"], blocks.size() - 1);
        const json& delta = event.data["delta"];
        if (delta["type"] == "signature_delta") {
          signed_thinking = blocks.back()["type"] == "thinking";
          continue;
        }
        const std::string key = delta["type"] == "thinking_delta" ? "thinking"
                                : delta["type"] == "text_delta"   ? "text"
                                                                  : "partial_json";
        texts.back() += delta[key].get<std::string>();
      } else if (event.name == "content_block_stop") {
        EXPECT_TRUE(open);
        open = false;
      }
    }
    EXPECT_TRUE(signed_thinking);
    ASSERT_EQ(blocks.size(), 4);
    EXPECT_EQ(blocks[0]["type"], "thinking");
    EXPECT_EQ(texts[0], "hm");
    EXPECT_EQ(texts[1], "Text.");
    EXPECT_EQ(blocks[2]["name"], "f");
    EXPECT_TRUE(blocks[2]["id"].get<std::string>().starts_with("toolu_"));
    EXPECT_EQ(json::parse(texts[2]), json::parse(R"({"a": [1, 2]})"));
    EXPECT_EQ(json::parse(texts[3]), json::object());
    const json& delta = events[events.size() - 2].data;
    EXPECT_EQ(delta["delta"]["stop_reason"], "tool_use");
    EXPECT_GT(delta["usage"]["output_tokens"], 5);
    EXPECT_EQ(events.back().name, "message_stop");

    const json whole = ask(kPath, with_tools(request(true)));
    ASSERT_EQ(whole["content"].size(), 4);
    EXPECT_TRUE(whole["content"][0].contains("signature"));
    EXPECT_EQ(whole["content"][2]["input"], json::parse(texts[2]));
    EXPECT_EQ(whole["stop_reason"], "tool_use");
  }
}

TEST_F(MessagesTest, StopReasons) {
  engine_->say("one two three");
  json body = request();
  body["stop_sequences"] = {"two"};
  json answer = ask(kPath, body);
  EXPECT_EQ(answer["stop_reason"], "stop_sequence");
  EXPECT_EQ(answer["stop_sequence"], "two");
  body["max_tokens"] = 2;
  answer = ask(kPath, body);
  EXPECT_EQ(answer["stop_reason"], "max_tokens");
  EXPECT_TRUE(answer["stop_sequence"].is_null());
}

TEST_F(MessagesTest, ConversationsRenderAsTheyDoForTheChatDialect) {
  engine_->say("x");
  json body = with_tools(request(true));
  body["system"] = json::array(
      {{{"type", "text"}, {"text", "Be brief."}, {"cache_control", {{"type", "ephemeral"}}}}});
  body["messages"] = json::parse(R"([
    {"role": "user", "content": [{"type": "text", "text": "go"}]},
    {"role": "assistant", "content": [
      {"type": "thinking", "thinking": "let me", "signature": "s"}, {"type": "text", "text": "ok"},
      {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [
      {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}], "is_error": false},
      {"type": "text", "text": "and?"}]}])");
  ask(kPath, body);
  const std::vector<int32_t> messages = engine_->prompt();
  json chat = json::parse(R"({"thinking": {"type": "enabled"}, "messages": [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"},
    {"role": "assistant", "content": "ok", "reasoning_content": "let me", "tool_calls": [
      {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
    {"role": "tool", "tool_call_id": "t1", "content": "42"}, {"role": "user", "content": "and?"}],
    "tools": [
      {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},
      {"type": "function", "function": {"name": "g", "description": "", "parameters": {"type": "object"}}}]})");
  ask("/v1/chat/completions", chat);
  EXPECT_EQ(messages, engine_->prompt());
  EXPECT_EQ(ask("/v1/messages/count_tokens", body)["input_tokens"], messages.size());
}

TEST_F(MessagesTest, AnAnswerInProgressIsContinued) {
  engine_->say(" dives");
  json body = request();
  body["messages"].push_back({{"role", "assistant"}, {"content", "The whale"}});
  EXPECT_EQ(ask(kPath, body)["content"][0]["text"], " dives");
  EXPECT_NE(engine_->prompt().back(), *tokenizer().eos_id());
}

TEST_F(MessagesTest, WrongFieldsAreNamed) {
  engine_->say("x");
  const auto error = [&](const char* key, const json& value) {
    json body = request();
    body[key] = value;
    const json got = ask(kPath, body, 400);
    EXPECT_EQ(got["type"], "error");
    EXPECT_EQ(got["error"]["type"], "invalid_request_error");
    EXPECT_EQ(got["request_id"], "req-test");
    return got["error"]["param"];
  };
  EXPECT_EQ(error("max_tokens", nullptr), "max_tokens");
  EXPECT_EQ(error("max_tokens", 0), "max_tokens");
  EXPECT_EQ(error("messages", json::array()), "messages");
  EXPECT_EQ(error("messages", json::array({{{"role", "x"}, {"content", ""}}})), "messages[0].role");
  EXPECT_EQ(error("messages",
                  json::array(
                      {{{"role", "assistant"}, {"content", json::array({{{"type", "image"}}})}}})),
            "messages[0].content[0].type");
  EXPECT_EQ(error("system", 3), "system");
  EXPECT_EQ(error("tools", json::array({json::object()})), "tools[0].name");
  EXPECT_EQ(error("tool_choice", {{"type", "maybe"}}), "tool_choice.type");
  EXPECT_EQ(error("temperature", 9), "temperature");
  EXPECT_EQ(error("output_config", {{"effort", "huge"}}), "output_config.effort");
  EXPECT_EQ(error("stop_sequences", 3), "stop_sequences");
  json body = request();
  body["model"] = "gpt-9";
  EXPECT_EQ(ask(kPath, body, 404)["error"]["type"], "not_found_error");
}

TEST_F(MessagesTest, EffortReachesThePrompt) {
  engine_->say("x");
  json body = request();
  body.erase("thinking");
  body["output_config"] = {{"effort", "max"}};
  ask(kPath, body);
  EXPECT_NE(text::decode(tokenizer(), engine_->prompt()).find("Reasoning Effort: 100"),
            std::string::npos);
}

}  // namespace
}  // namespace cachalot::server
