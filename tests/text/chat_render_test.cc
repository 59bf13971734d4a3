#include <nlohmann/json.hpp>

#include "tests/text/support.h"
#include "text/chat.h"
#include "text/detokenizer.h"

namespace cachalot::text {
namespace {

using json = nlohmann::ordered_json;

RenderedChat render(const std::string& body) {
  return value_of(render_chat(value_of(parse_chat_request(body))));
}

json user_request(const std::string& text) {
  return {{"messages", {{{"role", "user"}, {"content", text}}}}};
}

// What the official encoder's rules give for these requests.
TEST(ChatRender, GoldenPrompts) {
  const std::string path = std::string(CACHALOT_SOURCE_DIR) + "/tests/golden/text/prompts.json";
  const json cases = json::parse(value_of(read_file(path)));
  EXPECT_GT(cases.size(), 50U);
  for (const json& c : cases) {
    const RenderedChat rendered = render(c["request"].dump());
    EXPECT_EQ(rendered.display(), c["prompt"].get<std::string>()) << c["name"];
    for (size_t i = 1; i < rendered.parts.size(); ++i) {
      EXPECT_TRUE(rendered.parts[i].control || rendered.parts[i - 1].control) << c["name"];
    }
    EXPECT_TRUE(encode_prompt(small_tokenizer(), rendered).ok()) << c["name"];
  }
}

TEST(ChatRender, GoldenIds) {
  SKIP_WITHOUT_REAL_TOKENIZER();
  const Ids effort = {77666, 288, 9504, 482, 28,   223, 2402, 343, 16801, 223, 19,    15, 1457,
                      14,    270, 4077, 270, 1990, 14,  270,  850, 15146, 270, 22805, 868};
  const auto with_effort = [&](Ids head, const Ids& tail) {
    head.insert(head.end(), effort.begin(), effort.end());
    head.insert(head.end(), tail.begin(), tail.end());
    return head;
  };
  const auto ids = [](const char* body) {
    return value_of(encode_chat(*real_tokenizer(), value_of(parse_chat_request(body))));
  };
  EXPECT_EQ(ids(R"({"thinking": {"type": "disabled"}, "messages": [
                    {"role": "system", "content": "S"}, {"role": "user", "content": "U"}]})"),
            (Ids{0, 128799, 53, 128803, 55, 128804, 128822}));
  EXPECT_EQ(ids(R"({"reasoning_effort": "high", "messages": [
                    {"role": "system", "content": "S"}, {"role": "user", "content": "U"}]})"),
            with_effort({0, 128799}, {53, 128803, 55, 128804, 128821}));
  EXPECT_EQ(ids(R"({"thinking": {"type": "disabled"},
                    "messages": [{"role": "user", "content": "U"}]})"),
            (Ids{0, 128803, 55, 128804, 128822}));
  EXPECT_EQ(ids(R"({"messages": [{"role": "user", "content": "U"}]})"),
            with_effort({0, 128799}, {128803, 55, 128804, 128821}));
  EXPECT_EQ(ids(R"({"thinking": {"type": "disabled"},
                    "messages": [{"role": "user", "content": ""}]})"),
            (Ids{0, 128803, 128804, 128822}));
  // A block of calls always starts with these tokens.
  const Ids call = ids(R"({"thinking": {"type": "disabled"}, "messages": [
      {"role": "user", "content": "U"},
      {"role": "assistant", "content": "x", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"k\": 1}"}}]}]})");
  const Ids expected = {0,     128803, 55,    128804, 128822, 90,    271,  30,   128825,
                        10699, 1018,   30,    128825, 34756,  2329,  1281, 72,   3816,
                        30,    128825, 10767, 2329,   1281,   77,    4,    3418, 1281,
                        19836, 3320,   19,    1718,   128825, 10767, 1018, 1718, 128825,
                        34756, 1018,   1718,  128825, 10699,  32,    1};
  EXPECT_EQ(call, expected);
}

TEST(ChatRender, ToolsBlockIsTheTrainedText) {
  ChatRequest request;
  request.thinking = false;
  request.messages.resize(1);
  request.tools = {{"f", "{tool_schemas}"}};
  const std::string prompt = value_of(render_chat(request)).display();
  const size_t begin = prompt.find("## Tools");
  const size_t end = prompt.find(kUserToken);
  const std::string block = prompt.substr(begin, end - begin);
  EXPECT_EQ(block.size(), 997U);
  EXPECT_EQ(sha256(block), "ed8774877c3b45a36654337a5036d51fe3db43cdf14c9d21ad185108fdc7784e");
  EXPECT_EQ(prompt.substr(0, begin), std::string(kBosToken) + std::string(kSystemToken) + "\n\n");
}

TEST(ChatRender, TrainedControlTokensOfTheToolsBlockAreControlTokens) {
  ChatRequest request;
  request.thinking = false;
  request.messages.resize(1);
  request.tools = {value_of(make_tool("f", "uses <think>", ""))};
  int dsml = 0;
  int think = 0;
  int think_end = 0;
  for (const PromptPart& part : value_of(render_chat(request)).parts) {
    dsml += part.control && part.text == kDsmlToken ? 1 : 0;
    think += part.control && part.text == kThinkToken ? 1 : 0;
    think_end += part.control && part.text == kThinkEndToken ? 1 : 0;
    EXPECT_FALSE(!part.control && part.text.find(kDsmlToken) != std::string::npos);
  }
  EXPECT_EQ(dsml, 9);
  EXPECT_EQ(think, 2);      // not the one of the description
  EXPECT_EQ(think_end, 3);  // two of the block, one of the answer's header
}

TEST(ChatRender, A46_EffortIsItsNumber) {
  const std::pair<const char*, int> good[] = {{"\"low\"", 50},
                                              {"\"high\"", 75},
                                              {"\"max\"", 100},
                                              {"1", 1},
                                              {"37", 37},
                                              {"100", 100},
                                              {"null", 75}};
  for (const auto& [value, expected] : good) {
    const std::string body =
        std::string(R"({"messages": [{"role": "user", "content": "U"}], "reasoning_effort": )") +
        value + "}";
    EXPECT_EQ(value_of(parse_chat_request(body)).effort, expected);
    EXPECT_NE(render(body).display().find("Reasoning Effort: " + std::to_string(expected) + " ("),
              std::string::npos);
  }
  for (const char* thinking : {"enabled", "disabled"}) {
    for (const char* value : {"0",
                              "101",
                              "\"banana\"",
                              "true",
                              "75.0",
                              "1.5",
                              "-1",
                              "\"37\"",
                              "[]",
                              "99999999999999999999"}) {
      json body = user_request("U");
      body["thinking"]["type"] = thinking;
      body["reasoning_effort"] = json::parse(value);
      const Result<ChatRequest> parsed = parse_chat_request(body.dump());
      ASSERT_FALSE(parsed.ok()) << value;
      EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
      EXPECT_EQ(parsed.status().message().substr(0, 16), "reasoning_effort");
    }
  }
  // The renderer checks requests that were built by hand, in both modes.
  for (const int32_t effort : {0, 101, -5}) {
    for (const bool thinking : {false, true}) {
      ChatRequest request;
      request.messages.resize(1);
      request.effort = effort;
      request.thinking = thinking;
      EXPECT_FALSE(render_chat(request).ok());
    }
  }
  EXPECT_FALSE(effort_of("banana").ok());
}

TEST(ChatRender, ControlStringsOfUsersStayText) {
  std::string all = std::string(kBosToken) + std::string(kEosToken) + std::string(kPadToken);
  for (const std::string_view token : kControlTokens) {
    all += token;
  }
  const json tool = {
      {"type", "function"},
      {"function", {{"name", all}, {"description", all}, {"parameters", {{all, all}}}}}};
  const json call = {{"id", "c"},
                     {"type", "function"},
                     {"function", {{"name", all}, {"arguments", json{{all, all}}.dump()}}}};
  const json body = {
      {"tools", json::array({tool})},
      {"messages",
       {{{"role", "system"}, {"content", all}, {"response_format", {{"type", all}}}},
        {{"role", "user"}, {"content", {{{"type", "text"}, {"text", all}}, {{"type", all}}}}},
        {{"role", "assistant"},
         {"content", all},
         {"reasoning_content", all},
         {"tool_calls", json::array({call})}},
        {{"role", "tool"}, {"tool_call_id", "c"}, {"content", all}},
        {{"role", "latest_reminder"}, {"content", all}}}}};
  // The same request with harmless text has the same control tokens.
  const json harmless = json::parse(replace_all(body.dump(), all, "harmless"));
  const auto controls = [](const Tokenizer& t, const Ids& ids) {
    Ids out;
    for (const int32_t id : ids) {
      if (t.is_control(id)) {
        out.push_back(id);
      }
    }
    return out;
  };
  std::vector<const Tokenizer*> tokenizers = {&small_tokenizer()};
  if (real_tokenizer() != nullptr) {
    tokenizers.push_back(real_tokenizer());
  }
  for (const Tokenizer* t : tokenizers) {
    const RenderedChat prompt = render(body.dump());
    const Ids ids = value_of(encode_prompt(*t, prompt));
    const Ids expected = value_of(encode_prompt(*t, render(harmless.dump())));
    EXPECT_EQ(controls(*t, ids), controls(*t, expected));
    EXPECT_EQ(decode(*t, ids, {.skip_control = false}), prompt.display());
  }
}

TEST(ChatRender, PlainTextRunsAcrossParts) {
  SKIP_WITHOUT_REAL_TOKENIZER();
  // ")\n\n" and the text behind it are encoded as one string.
  json body = user_request("f(x)");
  body["thinking"]["type"] = "disabled";
  body["messages"].push_back({{"role", "user"}, {"content", "\n ok"}});
  const ChatRequest request = value_of(parse_chat_request(body.dump()));
  Ids expected = {0, 128803};
  const Ids text = value_of(real_tokenizer()->encode("f(x)\n\n\n ok"));
  expected.insert(expected.end(), text.begin(), text.end());
  expected.insert(expected.end(), {128804, 128822});
  EXPECT_EQ(value_of(encode_chat(*real_tokenizer(), request)), expected);
}

TEST(ChatRender, A47_ToolsOfTheRequestJoinTheFirstSystemMessage) {
  const json tool = {{"type", "function"}, {"function", {{"name", "f"}}}};
  const json other = {{"type", "function"}, {"function", {{"name", "g"}}}};
  json body = user_request("U");
  body["tools"] = json::array({tool});
  const std::string inserted = render(body.dump()).display();
  json with_system = body;
  with_system["messages"] = {{{"role", "system"}, {"content", ""}}, body["messages"][0]};
  EXPECT_EQ(render(with_system.dump()).display(), inserted);
  json on_message = user_request("U");
  on_message["messages"] = {{{"role", "system"}, {"content", ""}, {"tools", json::array({tool})}},
                            body["messages"][0]};
  EXPECT_EQ(render(on_message.dump()).display(), inserted);
  // Both places: none is lost.
  on_message["tools"] = json::array({other});
  const std::string both = render(on_message.dump()).display();
  EXPECT_NE(both.find("\n{\"name\": \"f\"}\n{\"name\": \"g\"}\n"), std::string::npos) << both;
}

TEST(ChatRender, ForcedCalls) {
  json body = user_request("U");
  body["tools"] = {{{"type", "function"}, {"function", {{"name", "f"}}}},
                   {{"type", "function"}, {"function", {{"name", "g"}}}}};
  body["tool_choice"] = "required";
  EXPECT_EQ(render_chat(value_of(parse_chat_request(body.dump()))).status().message(),
            "Thinking mode does not support this tool_choice");
  body["thinking"]["type"] = "disabled";
  RenderedChat prompt = render(body.dump());
  const std::string forced =
      std::string(kThinkEndToken) + "\n\n<" + std::string(kDsmlToken) + " calls>\n";
  const auto ends_with = [](const std::string& text, const std::string& end) {
    return text.size() >= end.size() &&
           text.compare(text.size() - end.size(), end.size(), end) == 0;
  };
  EXPECT_TRUE(ends_with(prompt.display(), forced));
  EXPECT_EQ(prompt.start, OutputStart::kToolCalls);

  body["tool_choice"] = {{"type", "function"}, {"function", {{"name", "g"}}}};
  prompt = render(body.dump());
  EXPECT_TRUE(ends_with(prompt.display(), forced));
  EXPECT_EQ(prompt.display().find("{\"name\": \"f\"}"), std::string::npos);
  EXPECT_NE(prompt.display().find("{\"name\": \"g\"}"), std::string::npos);

  body["tool_choice"]["function"]["name"] = "h";
  EXPECT_FALSE(render_chat(value_of(parse_chat_request(body.dump()))).ok());
  body.erase("tools");
  body["tool_choice"] = "required";
  EXPECT_FALSE(render_chat(value_of(parse_chat_request(body.dump()))).ok());
}

TEST(ChatRender, OutputStart) {
  json body = user_request("U");
  EXPECT_EQ(render(body.dump()).start, OutputStart::kReasoning);
  body["messages"][0]["task"] = "title";
  EXPECT_EQ(render(body.dump()).start, OutputStart::kContent);
  body["messages"][0].erase("task");
  body["messages"].push_back({{"role", "assistant"}, {"content", "a"}, {"prefix", true}});
  EXPECT_EQ(render(body.dump()).start, OutputStart::kContinuation);
  body = user_request("U");
  body["thinking"]["type"] = "disabled";
  EXPECT_EQ(render(body.dump()).start, OutputStart::kContent);
}

TEST(ChatRender, Images) {
  const RenderedChat prompt = render(R"({"messages": [
      {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://a/1.png", "detail": "low"}},
        {"type": "text", "text": "t"},
        {"type": "image_url", "image_url": "https://a/2.png"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "tool_result", "content": [
          {"type": "image", "source": {"type": "url", "url": "https://a/4.png"}}]}]}]})");
  ASSERT_EQ(prompt.images.size(), 4U);
  EXPECT_EQ(prompt.images[0].url, "https://a/1.png");
  EXPECT_EQ(prompt.images[1].url, "https://a/2.png");
  EXPECT_EQ(prompt.images[2].url, "data:image/png;base64,AAAA");
  EXPECT_EQ(prompt.images[3].url, "https://a/4.png");
  size_t tokens = 0;
  for (const PromptPart& part : prompt.parts) {
    tokens += part.control && part.text == kImageToken ? 1 : 0;
  }
  EXPECT_EQ(tokens, 4U);
}

TEST(ChatRender, NamespacedTools) {
  const RenderedChat prompt = render(R"({
      "tools": [{"type": "function", "namespace": {"name": "files", "description": "Files."},
                 "function": {"name": "read", "description": "Reads."}},
                {"type": "function", "namespace": "net", "function": {"name": "get"}}],
      "messages": [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [
          {"id": "c", "namespace": "files", "function": {"name": "read", "arguments": "{}"}}]}]})");
  const std::string text = prompt.display();
  EXPECT_NE(text.find(R"({"name": "files::read", "description": "Files.\nReads."})"),
            std::string::npos);
  EXPECT_NE(text.find(R"({"name": "net::get"})"), std::string::npos);
  EXPECT_NE(text.find(R"( invoke name="files::read">)"), std::string::npos);
  EXPECT_FALSE(qualified_tool_name("a::b", "c").ok());
  EXPECT_FALSE(qualified_tool_name("a", "b::c").ok());
  EXPECT_EQ(split_tool_name("files::read").tool_namespace, "files");
  EXPECT_EQ(split_tool_name("files::read").name, "read");
  EXPECT_EQ(split_tool_name("read").tool_namespace, "");
  EXPECT_EQ(split_tool_name("read").name, "read");
}

TEST(ChatRender, AMissingControlTokenIsNamed) {
  const Tokenizer bare = value_of(Tokenizer::parse(byte_level_tokenizer_json(kMinByteVocab), "t"));
  const auto ids = encode_chat(bare, value_of(parse_chat_request(user_request("U").dump())));
  ASSERT_FALSE(ids.ok());
  EXPECT_EQ(ids.status().code(), Code::kNotFound);
  EXPECT_NE(ids.status().message().find(kSystemToken), std::string::npos);
}

}  // namespace
}  // namespace cachalot::text
