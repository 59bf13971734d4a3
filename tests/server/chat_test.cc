// POST /v1/chat/completions over a scripted engine.
#include <set>

#include "tests/server/support.h"

namespace cachalot::server {
namespace {

constexpr const char* kPath = "/v1/chat/completions";

json request(bool thinking = false) {
  return {{"messages", {{{"role", "user"}, {"content", "hi"}}}},
          {"thinking", {{"type", thinking ? "enabled" : "disabled"}}}};
}

json tool(const std::string& name) {
  return {{"type", "function"},
          {"function",
           {{"name", name},
            {"parameters",
             {{"type", "object"},
              {"properties", {{"city", {{"type", "string"}}}, {"days", {{"type", "integer"}}}}},
              {"required", {"city"}}}}}}};
}

// The trained markup of one call.
std::string call_text(const std::string& name, const std::string& city, const std::string& days) {
  const std::string d(text::kDsmlToken);
  return "<" + d + " invoke name=\"" + name + "\">\n<" + d +
         " parameter name=\"city\" string=\"true\">" + city + "</" + d + " parameter>\n<" + d +
         " parameter name=\"days\" string=\"false\">" + days + "</" + d + " parameter>\n</" + d +
         " invoke>\n";
}
std::string block_text(const std::string& calls) {
  const std::string d(text::kDsmlToken);
  return "\n\n<" + d + " calls>\n" + calls + "</" + d + " calls>";
}

// What a client puts together from the chunks of a stream.
struct Assembled {
  std::string reasoning, content, finish;
  std::vector<json> calls;
  std::vector<int32_t> ids;
  json usage;
};

Assembled assemble(const std::vector<SseEvent>& events, int64_t choice = 0) {
  Assembled out;
  for (const SseEvent& event : events) {
    if (event.data.is_null()) {
      continue;
    }
    EXPECT_EQ(event.data["object"], "chat.completion.chunk");
    if (event.data.contains("usage") && !event.data["usage"].is_null()) {
      out.usage = event.data["usage"];
    }
    for (const json& c : event.data["choices"]) {
      if (c["index"] != choice) {
        continue;
      }
      const json& delta = c["delta"];
      out.reasoning +=
          delta.contains("reasoning_content") ? delta["reasoning_content"].get<std::string>() : "";
      if (delta.contains("content") && delta["content"].is_string()) {
        out.content += delta["content"].get<std::string>();
      }
      if (delta.contains("tool_calls")) {
        for (const json& call : delta["tool_calls"]) {
          const auto index = call["index"].get<size_t>();
          if (call.contains("id")) {
            EXPECT_EQ(index, out.calls.size());
            EXPECT_EQ(call["function"]["arguments"], "");
            out.calls.push_back(call);
          } else {
            std::string arguments = out.calls.at(index)["function"]["arguments"];
            arguments += call["function"]["arguments"].get<std::string>();
            out.calls.at(index)["function"]["arguments"] = arguments;
          }
        }
      }
      if (c.contains("token_ids")) {
        for (const json& id : c["token_ids"]) {
          out.ids.push_back(id);
        }
      }
      if (c["finish_reason"].is_string()) {
        EXPECT_EQ(out.finish, "");
        out.finish = c["finish_reason"];
      }
    }
  }
  return out;
}

class ChatTest : public ServerTest {};

TEST_F(ChatTest, AnswersInOnePiece) {
  engine_->say("A whale.");
  const json answer = ask(kPath, request());
  EXPECT_EQ(answer["object"], "chat.completion");
  EXPECT_EQ(answer["model"], "test-model");
  const json& choice = answer["choices"][0];
  EXPECT_EQ(choice["message"], (json{{"role", "assistant"}, {"content", "A whale."}}));
  EXPECT_EQ(choice["finish_reason"], "stop");
  const json& usage = answer["usage"];
  EXPECT_EQ(usage["prompt_tokens"], engine_->prompt().size());
  EXPECT_EQ(usage["total_tokens"],
            usage["prompt_tokens"].get<int>() + usage["completion_tokens"].get<int>());
}

TEST_F(ChatTest, SeparatesReasoningInOnePieceAndStreamed) {
  engine_->say("\nlet me see\n</think>\n\nA whale.");
  const json answer = ask(kPath, request(true));
  EXPECT_EQ(answer["choices"][0]["message"]["reasoning_content"], "let me see");
  EXPECT_EQ(answer["choices"][0]["message"]["content"], "A whale.");
  EXPECT_GT(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 5);

  const std::vector<SseEvent> events = stream(kPath, request(true));
  EXPECT_EQ(events[0].data["choices"][0]["delta"]["role"], "assistant");
  EXPECT_EQ(events[0].data["choices"][0]["delta"]["reasoning_content"], "");
  EXPECT_TRUE(events.back().data.is_null()) << "the stream ends with [DONE]";
  const Assembled whole = assemble(events);
  EXPECT_EQ(whole.reasoning, "let me see");
  EXPECT_EQ(whole.content, "A whale.");
  EXPECT_EQ(whole.finish, "stop");
  EXPECT_EQ(whole.usage["completion_tokens"], answer["usage"]["completion_tokens"]);
}

TEST_F(ChatTest, A45_ReasoningThatNeverEnds) {
  engine_->say("only thoughts");
  const json answer = ask(kPath, request(true));
  EXPECT_EQ(answer["choices"][0]["message"]["reasoning_content"], "only thoughts");
  EXPECT_EQ(answer["choices"][0]["message"]["content"], "");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
}

TEST_F(ChatTest, UsageWhereAskedFor) {
  engine_->say("abc");
  json body = request();
  body["stream_options"] = {{"include_usage", true}};
  const std::vector<SseEvent> events = stream(kPath, body);
  const json& last = events[events.size() - 2].data;
  EXPECT_TRUE(last["choices"].empty());
  EXPECT_GT(last["usage"]["completion_tokens"], 0);
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    EXPECT_TRUE(events[i].data["usage"].is_null());
  }
}

// the same calls whatever the tokens and however many come at once.
TEST_F(ChatTest, A40_ToolCallsDoNotDependOnHowTheyArrive) {
  const std::string city = "S\u00E3o \"Paulo\"\n\U0001F40B 2>&1 </";
  const std::string script =
      "Looking." + block_text(call_text("weather", city, "3") + call_text("weather", "x", "null"));
  json body = request();
  body["tools"] = json::array({tool("weather")});
  for (const bool bytes : {false, true}) {
    for (const int64_t at_once : {1, 2, 3, 5, 1000}) {
      engine_->say(script, bytes);
      engine_->set_tokens_per_event(at_once);
      const Assembled got = assemble(stream(kPath, body));
      EXPECT_EQ(got.content, "Looking.");
      EXPECT_EQ(got.finish, "tool_calls");
      ASSERT_EQ(got.calls.size(), 2);
      EXPECT_EQ(got.calls[0]["type"], "function");
      EXPECT_EQ(got.calls[0]["function"]["name"], "weather");
      const json arguments = json::parse(got.calls[0]["function"]["arguments"].get<std::string>());
      EXPECT_EQ(arguments["city"], city);
      EXPECT_EQ(arguments["days"], 3);
      EXPECT_NE(got.calls[0]["id"], got.calls[1]["id"]);

      const json whole = ask(kPath, body)["choices"][0];
      EXPECT_EQ(whole["finish_reason"], "tool_calls");
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(whole["message"]["tool_calls"][i]["function"], got.calls[i]["function"]);
      }
    }
  }
}

TEST_F(ChatTest, A42_TypesComeFromTheStringAttributeAlone) {
  const std::string d(text::kDsmlToken);
  std::string parameters;
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, std::string>>{{"a", "true"},
                                                        {"b", "3"},
                                                        {"c", "3.0"},
                                                        {"d", "null"},
                                                        {"e", "[1]"},
                                                        {"f", "{\"a\": 1}"}}) {
    for (const char* string : {"true", "false"}) {
      parameters += "<" + d + " parameter name=\"" + key + string + "\" string=\"" + string +
                    "\">" + value + "</" + d + " parameter>\n";
    }
  }
  engine_->say(
      block_text("<" + d + " invoke name=\"f\">\n" + parameters + "</" + d + " invoke>\n"));
  json body = request();
  body["tools"] = json::array({tool("f")});
  const Assembled got = assemble(stream(kPath, body));
  const json arguments = json::parse(got.calls.at(0)["function"]["arguments"].get<std::string>());
  EXPECT_EQ(arguments["atrue"], "true");
  EXPECT_EQ(arguments["afalse"], true);
  EXPECT_EQ(arguments["ctrue"], "3.0");
  EXPECT_EQ(arguments["cfalse"], 3.0);
  EXPECT_TRUE(arguments["dfalse"].is_null());
  EXPECT_EQ(arguments["efalse"], json({1}));
  EXPECT_EQ(arguments["ftrue"], "{\"a\": 1}");
}

TEST_F(ChatTest, A43_ArgumentsArriveAsTheyAreWritten) {
  engine_->say(block_text(call_text("f", std::string(400, 'x'), "1")), true);
  json body = request();
  body["tools"] = json::array({tool("f")});
  int deltas = 0;
  for (const SseEvent& event : stream(kPath, body)) {
    deltas +=
        event.data.is_object() && event.data["choices"][0]["delta"].contains("tool_calls") ? 1 : 0;
  }
  EXPECT_GT(deltas, 200);
}

TEST_F(ChatTest, A44_CharactersAreWholeWhateverTheTokens) {
  const std::string whale = "\U0001F40B\u00E9";
  std::vector<int32_t> ids;
  for (const char byte : whale + whale.substr(0, 2)) {
    ids.push_back(kFirstByte + static_cast<uint8_t>(byte));
  }
  ids.push_back(*tokenizer().eos_id());
  engine_->set_script([ids](const auto&) { return ids; });
  EXPECT_EQ(assemble(stream(kPath, request())).content, whale + "\uFFFD");
  EXPECT_EQ(ask(kPath, request())["choices"][0]["message"]["content"], whale + "\uFFFD");
}

TEST_F(ChatTest, OneCallWhereParallelCallsAreOff) {
  engine_->say(block_text(call_text("f", "a", "1") + call_text("f", "b", "2")));
  json body = request();
  body["tools"] = json::array({tool("f")});
  body["parallel_tool_calls"] = false;
  const json choice = ask(kPath, body)["choices"][0];
  EXPECT_EQ(choice["message"]["tool_calls"].size(), 1);
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
}

TEST_F(ChatTest, TextAfterTheCallsEndsTheRequest) {
  engine_->say(block_text(call_text("f", "a", "1")) + std::string(500, 'z'));
  json body = request();
  body["tools"] = json::array({tool("f")});
  const json choice = ask(kPath, body)["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_TRUE(choice["message"]["content"].is_null());
}

TEST_F(ChatTest, WithoutToolsMarkupIsNotParsed) {
  engine_->say(block_text(call_text("f", "a", "1")));
  const json choice = ask(kPath, request())["choices"][0];
  EXPECT_FALSE(choice["message"].contains("tool_calls"));
  EXPECT_EQ(choice["finish_reason"], "stop");
}

TEST_F(ChatTest, StopStringsEndTheAnswerButNotTheReasoning) {
  engine_->say("think STOP on</think>answer STOP more");
  json body = request(true);
  body["stop"] = "STOP";
  for (const bool streamed : {false, true}) {
    const Assembled got = streamed ? assemble(stream(kPath, body)) : Assembled();
    const json message = ask(kPath, body)["choices"][0]["message"];
    EXPECT_EQ(message["reasoning_content"], "think STOP on");
    EXPECT_EQ(message["content"], "answer ");
    if (streamed) {
      EXPECT_EQ(got.content, "answer ");
      EXPECT_EQ(got.finish, "stop");
    }
  }
}

TEST_F(ChatTest, LengthAndContext) {
  engine_->say(std::string(50, 'x'));
  json body = request();
  body["max_tokens"] = 7;
  const json answer = ask(kPath, body);
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(answer["usage"]["completion_tokens"], 7);
  // A wish beyond the context ends with it.
  body["max_tokens"] = 1'000'000;
  ask(kPath, body);
  EXPECT_EQ(engine_->max_tokens(), 4096 - static_cast<int64_t>(engine_->prompt().size()));
  body["messages"][0]["content"] = std::string(5000, 'q');
  const json error = ask(kPath, body, 400)["error"];
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_EQ(error["param"], "messages");
  EXPECT_NE(error["message"].get<std::string>().find("4096"), std::string::npos);
}

TEST_F(ChatTest, A49_Logprobs) {
  engine_->say("ab");
  json body = request();
  const auto content = [&] { return ask(kPath, body)["choices"][0]["logprobs"]; };
  EXPECT_TRUE(content().is_null());
  body["logprobs"] = true;
  EXPECT_EQ(content()["content"].size(), 2);
  EXPECT_TRUE(content()["content"][0]["top_logprobs"].empty());
  EXPECT_EQ(content()["content"][0]["logprob"], -0.5);
  EXPECT_EQ(content()["content"][0]["token"], "a");
  EXPECT_EQ(content()["content"][0]["bytes"], json({97}));
  for (const int top : {0, 1, 20}) {
    body["top_logprobs"] = top;
    EXPECT_EQ(content()["content"][0]["top_logprobs"].size(), top);
  }
  body["top_logprobs"] = 21;
  EXPECT_EQ(ask(kPath, body, 400)["error"]["param"], "top_logprobs");
  body["logprobs"] = false;
  body["top_logprobs"] = 2;
  EXPECT_EQ(ask(kPath, body, 400)["error"]["param"], "top_logprobs");
}

TEST_F(ChatTest, LogprobsOfReasoningAreApart) {
  engine_->say("t</think>a");
  json body = request(true);
  body["logprobs"] = true;
  const json logprobs = ask(kPath, body)["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["reasoning_content"].size(), 2);  // "t" and the token that ends it
  EXPECT_EQ(logprobs["content"].size(), 1);
}

TEST_F(ChatTest, TokenIds) {
  engine_->say("a</think>bc");
  json body = request(true);
  body["return_token_ids"] = true;
  const json answer = ask(kPath, body);
  EXPECT_EQ(answer["prompt_token_ids"], json(engine_->prompt()));
  EXPECT_EQ(answer["choices"][0]["token_ids"].size(), answer["usage"]["completion_tokens"]);
  EXPECT_EQ(json(assemble(stream(kPath, body)).ids), answer["choices"][0]["token_ids"]);
}

TEST_F(ChatTest, A50_SeededChoicesDiffer) {
  engine_->say("x");
  json body = request();
  body["n"] = 4;
  body["seed"] = 7;
  const json answer = ask(kPath, body);
  ASSERT_EQ(answer["choices"].size(), 4);
  ask(kPath, body);
  std::vector<uint64_t> seeds = engine_->seeds();
  ASSERT_EQ(seeds.size(), 8);
  EXPECT_EQ(seeds[0], 7);
  EXPECT_EQ(std::vector(seeds.begin(), seeds.begin() + 4),
            std::vector(seeds.begin() + 4, seeds.end()));
  EXPECT_EQ(std::set(seeds.begin(), seeds.end()).size(), 4);
  // The prompt counts once.
  EXPECT_EQ(answer["usage"]["prompt_tokens"], engine_->prompt().size());
  const std::vector<SseEvent> events = stream(kPath, body);
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(assemble(events, i).content, "x");
    EXPECT_EQ(assemble(events, i).finish, "stop");
  }
}

TEST_F(ChatTest, SamplingFieldsReachTheEngine) {
  engine_->say("x");
  json body = request();
  body.update({{"temperature", 0.5},
               {"top_p", 0.25},
               {"top_k", 3},
               {"min_p", 0.1},
               {"frequency_penalty", 1.5},
               {"presence_penalty", -1},
               {"repetition_penalty", 1.1},
               {"seed", 9},
               {"logit_bias", {{"5", 2}, {"6", -100}}}});
  ask(kPath, body);
  const engine::SamplingParams p = engine_->sampling();
  EXPECT_EQ(p.temperature, 0.5f);
  EXPECT_EQ(p.top_p, 0.25f);
  EXPECT_EQ(p.top_k, 3);
  EXPECT_EQ(p.min_p, 0.1f);
  EXPECT_EQ(p.frequency_penalty, 1.5f);
  EXPECT_EQ(p.presence_penalty, -1.0f);
  EXPECT_EQ(p.repetition_penalty, 1.1f);
  EXPECT_EQ(p.seed, 9);
  EXPECT_EQ(p.logit_bias, (std::map<int32_t, float>{{5, 2.0f}, {6, -100.0f}}));
}

TEST_F(ChatTest, EosCanBeIgnored) {
  const int32_t eos = *tokenizer().eos_id();
  engine_->set_script([eos](const auto&) {
    return std::vector<int32_t>{kFirstByte + 'a', eos, kFirstByte + 'b', eos, kFirstByte + 'c'};
  });
  json body = request();
  body["ignore_eos"] = true;
  body["max_tokens"] = 4;
  const json answer = ask(kPath, body);
  EXPECT_EQ(answer["choices"][0]["message"]["content"], "ab");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(answer["usage"]["completion_tokens"], 4);
}

TEST_F(ChatTest, PrefixCompletion) {
  engine_->say(" dives.");
  json body = request();
  body["messages"].push_back({{"role", "assistant"}, {"content", "The whale"}, {"prefix", true}});
  EXPECT_EQ(ask("/beta/chat/completions", body)["choices"][0]["message"]["content"], " dives.");
  EXPECT_NE(engine_->prompt().back(), *tokenizer().eos_id());
}

// Every field that is wrong is named, with 400, and nothing reaches the engine.
TEST_F(ChatTest, WrongFieldsAreNamed) {
  engine_->say("x");
  const std::vector<std::tuple<const char*, json, const char*>> cases = {
      {"temperature", 2.5, "temperature"},
      {"temperature", "hot", "temperature"},
      {"temperature", json::array(), "temperature"},
      {"top_p", 0, "top_p"},
      {"top_p", 1.5, "top_p"},
      {"n", 0, "n"},
      {"n", 1.5, "n"},
      {"n", 1000000, "n"},
      {"max_tokens", -1, "max_tokens"},
      {"max_tokens", 0, "max_tokens"},
      {"max_tokens", 1e30, "max_tokens"},
      {"max_completion_tokens", "x", "max_completion_tokens"},
      {"seed", -1, "seed"},
      {"seed", 1e25, "seed"},
      {"stop", 3, "stop"},
      {"stop", {"a", 3}, "stop[1]"},
      {"stop", std::vector<std::string>(17, "x"), "stop"},
      {"stream", "yes", "stream"},
      {"stream_options", {{"include_usage", true}}, "stream_options"},
      {"logit_bias", {{"x", 1}}, "logit_bias"},
      {"logit_bias", {{"5", "x"}}, "logit_bias.5"},
      {"logit_bias", {{"5", 101}}, "logit_bias"},
      {"logit_bias", {{"512", 1}}, "logit_bias"},
      {"stop_token_ids", {512}, "stop_token_ids"},
      {"stop_token_ids", {-1}, "stop_token_ids[0]"},
      {"stop_token_ids", {int64_t{1} << 40}, "stop_token_ids[0]"},
      {"frequency_penalty", 3, "frequency_penalty"},
      {"messages", json::array(), "messages"},
      {"messages", "hi", "messages"},
      {"messages", {{{"role", "pirate"}, {"content", ""}}}, "messages[0].role"},
      {"messages", {{{"role", "user"}, {"content", 3}}}, "messages[0].content"},
      {"tools", {{{"type", "function"}}}, "tools[0].function"},
      {"tool_choice", "sometimes", "tool_choice"},
      {"tool_choice", "required", "tool_choice"},
      {"response_format", {{"type", "xml"}}, "response_format.type"},
      {"response_format", {{"type", "json_schema"}}, "response_format.json_schema.schema"},
      {"reasoning_effort", "banana", "reasoning_effort"},
      {"reasoning_effort", 0, "reasoning_effort"},
      {"reasoning_effort", 101, "reasoning_effort"},
      {"thinking", {{"type", "sometimes"}}, "thinking.type"},
      {"min_tokens", 20, "min_tokens"},
      {"functions", json::array({json::object()}), "functions"},
      {"model", 3, "model"},
      {"structured_outputs", {{"regex", "a"}, {"choice", {"b"}}}, "structured_outputs"},
      {"structured_outputs", json::object(), "structured_outputs"},
      {"structured_outputs", {{"choice", {1}}}, "structured_outputs.choice[0]"},
  };
  for (const auto& [key, value, param] : cases) {
    json body = request();
    body[key] = value;
    const json error = ask(kPath, body, 400)["error"];
    EXPECT_EQ(error["param"], param) << error;
    EXPECT_EQ(error["type"], "invalid_request_error");
  }
  EXPECT_TRUE(engine_->seeds().empty());
}

TEST_F(ChatTest, FieldsThatClientsSendAreTolerated) {
  engine_->say("x");
  json body = request();
  body.update({{"user", "u"},
               {"metadata", json::object()},
               {"service_tier", "auto"},
               {"stop", nullptr},
               {"n", nullptr},
               {"max_tokens", nullptr},
               {"unknown", {1, {{"a", nullptr}}}},
               {"min_tokens", 0},
               {"store", false},
               {"stream", false},
               {"temperature", nullptr},
               {"tools", json::array()},
               {"best_of", 1},
               {"tool_choice", "auto"}});
  ask(kPath, body);
}

TEST_F(ChatTest, UnknownModel) {
  engine_->say("x");
  json body = request();
  for (const char* name : {"test-model", "other-name"}) {
    body["model"] = name;
    ask(kPath, body);
  }
  body["model"] = "gpt-9";
  EXPECT_EQ(ask(kPath, body, 404)["error"]["param"], "model");
}

TEST_F(ChatTest, ToolResultsMustMatchTheCalls) {
  engine_->say("x");
  const json tool_call = {
      {"id", "c1"}, {"type", "function"}, {"function", {{"name", "f"}, {"arguments", "{}"}}}};
  const json assistant = {
      {"role", "assistant"}, {"content", nullptr}, {"tool_calls", json::array({tool_call})}};
  const json result = {{"role", "tool"}, {"tool_call_id", "c1"}, {"content", "1"}};
  const json user = {{"role", "user"}, {"content", "go"}};
  json other = result;
  other["tool_call_id"] = "c2";
  const auto status = [&](const json& messages) {
    json body = request();
    body["messages"] = messages;
    return call(kPath, body).status;
  };
  EXPECT_EQ(status({user, assistant, result}), 200);
  EXPECT_EQ(status({user, assistant, user}), 400);
  EXPECT_EQ(status({user, assistant}), 400);
  EXPECT_EQ(status({user, assistant, other}), 400);
  EXPECT_EQ(status({user, assistant, result, result}), 400);
  EXPECT_EQ(status({user, result}), 400);
}

// a forced choice is honoured, with thinking too.
TEST_F(ChatTest, A52_ForcedCalls) {
  if (grammar() == nullptr) {
    GTEST_SKIP() << "no grammar core in this build";
  }
  for (const bool thinking : {false, true}) {
    for (const json& choice :
         {json("required"), json{{"type", "function"}, {"function", {{"name", "f"}}}}}) {
      // What the model would like to say is not a call; the grammar makes it one.
      std::vector<int32_t> ids;
      if (thinking) {
        ids = *tokenizer().encode_with_specials("I had better not.</think>");
      }
      for (int i = 0; i < 1500; ++i) {
        ids.push_back(kFirstByte + '1');
      }
      engine_->set_script([ids](const auto&) { return ids; });
      json body = request(thinking);
      body["tools"] = {tool("f"), tool("g")};
      body["tools"][0]["function"]["parameters"] = {
          {"type", "object"},
          {"properties", {{"days", {{"enum", {11, 12}}}}}},
          {"required", {"days"}}};
      body["tools"][1]["function"]["parameters"] = body["tools"][0]["function"]["parameters"];
      body["tool_choice"] = choice;
      body["parallel_tool_calls"] = false;
      const json got = ask(kPath, body)["choices"][0];
      EXPECT_EQ(got["finish_reason"], "tool_calls") << got;
      ASSERT_EQ(got["message"]["tool_calls"].size(), 1);
      EXPECT_EQ(
          json::parse(got["message"]["tool_calls"][0]["function"]["arguments"].get<std::string>()),
          (json{{"days", 11}}));
      EXPECT_EQ(got["message"]["tool_calls"][0]["function"]["name"], "f");
      if (thinking) {
        EXPECT_EQ(got["message"]["reasoning_content"], "I had better not.");
      }
    }
  }
}

TEST_F(ChatTest, StructuredOutput) {
  if (grammar() == nullptr) {
    GTEST_SKIP() << "no grammar core in this build";
  }
  const json schema = {{"name", "n"}, {"schema", {{"const", 5}}}};
  const std::vector<std::tuple<std::string, json, std::string>> cases = {
      {"structured_outputs", {{"choice", {"whale", "shark"}}}, "whale"},
      {"structured_outputs", {{"regex", "[a-c]{3}"}}, "aaa"},
      {"structured_outputs", {{"grammar", "root ::= \"x\" \"y\"+ \"z\""}}, ""},
      {"response_format", {{"type", "json_schema"}, {"json_schema", schema}}, "5"},
  };
  for (const auto& [field, value, expected] : cases) {
    engine_->say("wwhale" + std::string(100, 'a'), true);
    json body = request();
    body[field] = value;
    body["max_tokens"] = 20;
    const json choice = ask(kPath, body)["choices"][0];
    const std::string content = choice["message"]["content"];
    if (!expected.empty()) {
      EXPECT_EQ(content, expected);
      EXPECT_EQ(choice["finish_reason"], "stop");
    } else {
      EXPECT_EQ(content.substr(0, 2), "xy");
    }
  }
  json body = request();
  body["structured_outputs"] = {{"regex", "("}};
  EXPECT_EQ(ask(kPath, body, 400)["error"]["param"], "structured_outputs");
  // What allows nothing is refused before it waits for the engine.
  body["structured_outputs"] = {{"grammar", "root ::= root \"a\""}};
  EXPECT_EQ(ask(kPath, body, 400)["error"]["param"], "structured_outputs");
}

TEST_F(ChatTest, GrammarsThatTakeTooMuchWorkEndTheirRequest) {
  if (grammar() == nullptr) {
    GTEST_SKIP() << "no grammar core in this build";
  }
  engine_->say(std::string(2000, 'a'), true);
  json body = request();
  body["structured_outputs"] = {{"regex", "((a*)*b*)*((a|aa|aaa)*)*c"}};
  body["max_tokens"] = 2000;
  const std::string message = ask(kPath, body, 400)["error"]["message"];
  EXPECT_NE(message.find("structured_outputs: the grammar is too ambiguous"), std::string::npos)
      << message;
  body["stream"] = true;
  const std::vector<SseEvent> events = stream(kPath, body);
  ASSERT_GT(events.size(), 2u);
  EXPECT_EQ(events.back().data["error"]["type"], "invalid_request_error");
}

TEST_F(ChatTest, WithoutTheGrammarCoreStructureIsRefused) {
  model_.grammar = nullptr;
  json body = request();
  body["response_format"] = {{"type", "json_object"}};
  const json error = ask(kPath, body, 400)["error"];
  EXPECT_EQ(error["param"], "response_format");
  EXPECT_EQ(error["code"], "unsupported");
}

TEST_F(ChatTest, EngineRefusalsBecomeStatuses) {
  engine_->say("x");
  engine_->refuse(Status(Code::kResourceExhausted, "the queue is full"));
  const HttpResponse full = call(kPath, request());
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.headers.at(0).first, "retry-after");
  engine_->refuse(Status(Code::kUnavailable, "draining"));
  json body = request();
  body["stream"] = true;
  EXPECT_EQ(call(kPath, body).status, 503);
}

TEST_F(ChatTest, FailuresOfARunningRequest) {
  engine_->say("some text");
  engine_->fail_after(3, Status(Code::kInternal, "it broke"));
  EXPECT_EQ(ask(kPath, request(), 500)["error"]["message"], "it broke");
  const std::vector<SseEvent> events = stream(kPath, request());
  EXPECT_EQ(events.back().data["error"]["message"], "it broke") << "no [DONE] after a failure";
}

TEST_F(ChatTest, A31_ClientsThatLeaveFreeTheirRequest) {
  engine_->set_script([](const auto&) { return std::vector<int32_t>{kFirstByte + 'a'}; });
  for (const bool streamed : {false, true}) {
    json body = request();
    body["stream"] = streamed;
    body["n"] = 2;
    const auto exchange = send("POST", kPath, body.dump());
    for (int i = 0; i < 1000 && engine_->running() < 2; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(engine_->running(), 2);
    exchange->abort();
    for (int i = 0; i < 1000 && engine_->running() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(engine_->running(), 0);
  }
  EXPECT_EQ(engine_->cancelled(), 4);
}

}  // namespace
}  // namespace cachalot::server
