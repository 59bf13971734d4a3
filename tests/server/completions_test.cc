// POST /v1/completions over a scripted engine.
#include "tests/server/support.h"

namespace cachalot::server {
namespace {

constexpr const char* kPath = "/v1/completions";

class CompletionsTest : public ServerTest {};

TEST_F(CompletionsTest, TextPromptsBeginWithBos) {
  engine_->say(" dives");
  const json answer = ask(kPath, {{"prompt", "The whale"}, {"max_tokens", 20}});
  EXPECT_EQ(answer["object"], "text_completion");
  EXPECT_EQ(answer["choices"][0]["text"], " dives");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(engine_->prompt().front(), *tokenizer().bos_id());
  ask(kPath, {{"prompt", "The whale"}, {"add_special_tokens", false}});
  EXPECT_NE(engine_->prompt().front(), *tokenizer().bos_id());
}

TEST_F(CompletionsTest, TokenPromptsAreTakenAsTheyAre) {
  engine_->say("x");
  const json answer = ask(kPath, {{"prompt", {5, 6, 7}}, {"return_token_ids", true}});
  EXPECT_EQ(engine_->prompt(), (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(answer["choices"][0]["prompt_token_ids"], json({5, 6, 7}));
  EXPECT_EQ(answer["choices"][0]["token_ids"].size(), 1);
  EXPECT_EQ(answer["usage"]["prompt_tokens"], 3);
}

TEST_F(CompletionsTest, ControlSpellingsInTextAreText) {
  engine_->say("x");
  ask(kPath, {{"prompt", std::string(text::kEosToken)}});
  const std::vector<int32_t> ids = engine_->prompt();
  for (size_t i = 1; i < ids.size(); ++i) {
    EXPECT_FALSE(tokenizer().is_control(ids[i]));
  }
}

TEST_F(CompletionsTest, SeveralPromptsAndChoices) {
  engine_->set_script([](const engine::EngineRequest& request) {
    return std::vector<int32_t>{request.prompt.back(), 1};
  });
  const json prompts = json::array({json{10, 11}, json{20, 21}});
  const json answer = ask(kPath, {{"prompt", prompts}, {"n", 2}});
  ASSERT_EQ(answer["choices"].size(), 4);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(answer["choices"][i]["index"], i);
    const int32_t last = i < 2 ? 11 : 21;
    EXPECT_EQ(answer["choices"][i]["text"], std::string(tokenizer().token_bytes(last)));
  }
  EXPECT_EQ(answer["usage"]["prompt_tokens"], 4);
  EXPECT_EQ(answer["usage"]["completion_tokens"], 4);
}

TEST_F(CompletionsTest, MoreAnswersThanTheServerEverTakesAreAnError) {
  engine_->say("x");
  const json prompts(20, "x");
  const json error = ask(kPath, {{"prompt", prompts}, {"n", 100}}, 400)["error"];
  EXPECT_EQ(error["param"], "prompt");
  EXPECT_NE(error["message"].get<std::string>().find("2000 answers"), std::string::npos) << error;
  EXPECT_TRUE(engine_->seeds().empty());
}

TEST_F(CompletionsTest, StopStringsAreCutOff) {
  engine_->say("one two three");
  const json answer = ask(kPath, {{"prompt", "x"}, {"stop", {"two", "zzz"}}, {"max_tokens", 100}});
  EXPECT_EQ(answer["choices"][0]["text"], "one ");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(answer["choices"][0]["stop_reason"], "two");
}

TEST_F(CompletionsTest, DefaultLengthIsSixteen) {
  engine_->say(std::string(50, 'x'));
  EXPECT_EQ(ask(kPath, {{"prompt", "x"}})["usage"]["completion_tokens"], 16);
}

TEST_F(CompletionsTest, A49_Logprobs) {
  engine_->say("ab");
  const auto logprobs = [&](const json& value) {
    return ask(kPath, {{"prompt", "x"}, {"logprobs", value}})["choices"][0]["logprobs"];
  };
  EXPECT_TRUE(logprobs(nullptr).is_null());
  const json none = logprobs(0);
  EXPECT_EQ(none["tokens"], json({"a", "b"}));
  EXPECT_EQ(none["token_logprobs"], json({-0.5, -0.5}));
  EXPECT_TRUE(none["top_logprobs"][0].empty());
  EXPECT_EQ(none["text_offset"], json({0, 1}));
  EXPECT_EQ(logprobs(3)["top_logprobs"][0].size(), 3);
  EXPECT_EQ(ask(kPath, {{"prompt", "x"}, {"logprobs", 21}}, 400)["error"]["param"], "logprobs");
}

TEST_F(CompletionsTest, PartsOfCharactersAreSpelledAsBytes) {
  engine_->say("\u00E9", true);
  const json got = ask(kPath, {{"prompt", "x"}, {"logprobs", 0}})["choices"][0]["logprobs"];
  EXPECT_EQ(got["tokens"], json({"bytes:\\xc3", "bytes:\\xa9"}));
}

TEST_F(CompletionsTest, EchoScoresThePrompt) {
  engine_->say("!");
  const json prompt = {10, 11, 12};
  for (const int max_tokens : {0, 1}) {
    const json choice = ask(kPath,
                            {{"prompt", prompt},
                             {"echo", true},
                             {"logprobs", 1},
                             {"max_tokens", max_tokens}})["choices"][0];
    const json& logprobs = choice["logprobs"];
    const size_t expected = 3 + static_cast<size_t>(max_tokens);
    EXPECT_EQ(logprobs["tokens"].size(), expected);
    EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
    EXPECT_EQ(logprobs["token_logprobs"][1], -0.5);
    EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
    EXPECT_EQ(logprobs["top_logprobs"][1].size(), 1);
    std::string text;
    for (const json& token : logprobs["tokens"]) {
      text += token.get<std::string>();
    }
    EXPECT_EQ(choice["text"], text);
    EXPECT_EQ(choice["finish_reason"], "length");
  }
  // The BOS that the server adds is not echoed.
  const json choice = ask(
      kPath, {{"prompt", "ab"}, {"echo", true}, {"logprobs", 0}, {"max_tokens", 0}})["choices"][0];
  EXPECT_EQ(choice["text"], "ab");
  EXPECT_EQ(choice["logprobs"]["token_logprobs"][0], -0.5);
  EXPECT_EQ(ask(kPath, {{"prompt", "x"}, {"max_tokens", 0}}, 400)["error"]["param"], "max_tokens");
}

TEST_F(CompletionsTest, Streaming) {
  engine_->say("abc");
  const std::vector<SseEvent> events =
      stream(kPath, {{"prompt", "x"}, {"logprobs", 1}, {"echo", true}});
  std::string text;
  size_t tokens = 0;
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    const json& choice = events[i].data["choices"][0];
    text += choice["text"].get<std::string>();
    tokens += choice["logprobs"]["tokens"].size();
  }
  EXPECT_EQ(text, "xabc");
  EXPECT_EQ(tokens, 4);
  const json& last = events[events.size() - 2].data;
  EXPECT_EQ(last["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(last["usage"]["completion_tokens"], 3);
  EXPECT_TRUE(events.back().data.is_null());
}

TEST_F(CompletionsTest, FillInTheMiddle) {
  engine_->say("x");
  ask("/beta/completions", {{"prompt", "a"}, {"suffix", "b"}});
  const std::vector<int32_t> ids = engine_->prompt();
  ASSERT_EQ(ids.size(), 6);
  EXPECT_EQ(ids[1], *tokenizer().id_of(text::kFimBeginToken));
  EXPECT_EQ(ids[3], *tokenizer().id_of(text::kFimHoleToken));
  EXPECT_EQ(ids[5], *tokenizer().id_of(text::kFimEndToken));
}

TEST_F(CompletionsTest, A34_A51_IdsOutsideOfTheVocabulary) {
  engine_->say("x");
  for (const json& bad : {json(-1),
                          json(512),
                          json(517),
                          json((int64_t{1} << 31) - 1),
                          json(int64_t{1} << 40),
                          json(1.5),
                          json("5"),
                          json(nullptr)}) {
    json body = {{"prompt", json::array({5, bad})}};
    const json error = ask(kPath, body, 400)["error"];
    EXPECT_TRUE(error["param"].get<std::string>().starts_with("prompt")) << error;
    body = {{"prompt", "x"}, {"stop_token_ids", json::array({bad})}};
    ask(kPath, body, 400);
  }
  EXPECT_TRUE(engine_->seeds().empty());
}

TEST_F(CompletionsTest, WrongPromptsAreNamed) {
  engine_->say("x");
  for (const json& body : {json::object(),
                           json{{"prompt", 3}},
                           json{{"prompt", json::object()}},
                           json{{"prompt", json::array({"a", 3})}},
                           json{{"prompt", json::array()}},
                           json{{"prompt", nullptr}}}) {
    const json error = ask(kPath, body, 400)["error"];
    EXPECT_TRUE(error["param"].get<std::string>().starts_with("prompt")) << error;
  }
}

TEST_F(CompletionsTest, A25_CachedTokensAreReported) {
  engine_->say("x");
  engine_->set_cached(2);
  const json usage = ask(kPath, {{"prompt", {5, 6, 7}}})["usage"];
  EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], 2);
  EXPECT_EQ(usage["prompt_cache_hit_tokens"], 2);
  EXPECT_EQ(usage["prompt_cache_miss_tokens"], 1);
}

}  // namespace
}  // namespace cachalot::server
