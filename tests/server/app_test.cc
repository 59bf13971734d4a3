// Routes, keys, states, errors: what does not depend on a dialect.
#include "server/request_id.h"
#include "tests/server/support.h"

namespace cachalot::server {
namespace {

class AppTest : public ServerTest {};

class KeyTest : public ServerTest {
 protected:
  KeyTest() : ServerTest(AppOptions{{"secret", "other"}}) {}
};

TEST_F(AppTest, Endpoints) {
  engine_->say("x");
  for (const char* path :
       {"/health", "/ready", "/metrics", "/v1/models", "/models", "/stats", "/"}) {
    EXPECT_EQ(send("GET", path)->wait().status, 200) << path;
  }
  const json models = json::parse(send("GET", "/v1/models")->wait().body);
  EXPECT_EQ(models["data"][0]["id"], "test-model");
  EXPECT_EQ(models["data"][0]["context_length"], 4096);
  EXPECT_EQ(models["data"][0]["input_modalities"], json::array({"text"}));
  EXPECT_EQ(json::parse(send("GET", "/v1/models/other-name")->wait().body)["id"], "other-name");
  EXPECT_EQ(send("GET", "/v1/models/gpt-9")->wait().status, 404);
  for (const char* path : {"/v1/chat/completions", "/chat/completions", "/beta/chat/completions"}) {
    ask(path, {{"messages", {{{"role", "user"}, {"content", "hi"}}}}});
  }
  const json body = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"max_tokens", 5}};
  ask("/anthropic/v1/messages", body);
  ask("/responses", {{"input", "hi"}});
}

TEST_F(AppTest, UnknownEndpointsAndMethods) {
  for (const char* path : {"/nothing", "/v1", "/v1/", "/v1/chat", "//", "/../etc/passwd", ""}) {
    const HttpResponse response = send("GET", path)->wait();
    EXPECT_EQ(response.status, 404) << path;
    EXPECT_EQ(json::parse(response.body)["error"]["code"], "unknown_endpoint");
  }
  const std::tuple<const char*, const char*, const char*> others[] = {
      {"GET", "/v1/chat/completions", "POST"},
      {"HEAD", "/v1/messages", "POST"},
      {"DELETE", "/health", "GET, HEAD"},
      {"POST", "/v1/models/test-model", "GET, HEAD"}};
  for (const auto& [method, path, allowed] : others) {
    const HttpResponse response = send(method, path)->wait();
    EXPECT_EQ(response.status, 405) << path;
    EXPECT_EQ(response.headers, (decltype(response.headers){{"allow", allowed}})) << path;
  }
  EXPECT_EQ(send("HEAD", "/health")->wait().status, 200);
}

// A request that the HTTP layer refuses before it is read.
TEST_F(AppTest, UnreadRequestsAreRefusedInTheDialectOfTheirPath) {
  const json open = json::parse(App::unread_error(413, "too large", "/v1/chat/completions", "r"));
  EXPECT_EQ(open["error"]["type"], "invalid_request_error");
  EXPECT_FALSE(open.contains("request_id"));
  const json other =
      json::parse(App::unread_error(413, "too large", "/anthropic/v1/messages", "r"));
  EXPECT_EQ(other["type"], "error");
  EXPECT_EQ(other["error"]["type"], "request_too_large");
  EXPECT_EQ(other["request_id"], "r");
}

// Longer than the context by its bytes alone: refused before it is tokenized.
TEST_F(AppTest, TooManyBytesAreTooManyTokens) {
  const std::string text(static_cast<size_t>(model_.context * tokenizer().longest_token() + 1),
                         'x');
  const json chat = {{"messages", {{{"role", "user"}, {"content", text}}}}};
  const std::tuple<const char*, json, const char*> requests[] = {
      {"/v1/completions", {{"prompt", text}}, "prompt"},
      {"/v1/chat/completions", chat, "messages"},
      {"/v1/responses", {{"input", text}}, "input"}};
  for (const auto& [path, body, param] : requests) {
    const json error = ask(path, body, 400)["error"];
    EXPECT_EQ(error["code"], "context_length_exceeded") << path;
    EXPECT_EQ(error["param"], param) << path;
    EXPECT_NE(std::string(error["message"]).find("at least"), std::string::npos) << error;
  }
}

// Bodies of all kinds that are not requests: an error each, for the reason that is meant, and the
// server goes on.
TEST_F(AppTest, A71_HostileBodies) {
  engine_->say("x");
  std::vector<std::pair<std::string, std::string>> bodies = {
      {"", "column 1: syntax error while parsing value - unexpected end of input"},
      {"null", "must be an object, not null"},
      {"3", "must be an object, not a number"},
      {"\"x\"", "must be an object, not a string"},
      {"[]", "must be an object, not an array"},
      {"{", "column 2: syntax error while parsing object key - unexpected end of input"},
      {"{\"a\":1,}", "column 8: syntax error while parsing object key - unexpected '}'"},
      {"{\"messages\": NaN}", "column 14: syntax error while parsing value - invalid literal"},
      {"\xff\xfe{}", "column 1: syntax error while parsing value - invalid literal"},
      {"{\"messages\":[{\"role\":\"user\",\"content\":\"\xc3\x28\"}]}", "ill-formed UTF-8"},
      {"{\"n\": 1e999}", "number overflow parsing '1e999'"},
      {std::string(1000, '\0'), "column 1: syntax error while parsing value"},
      {"{\"seed\": " + std::string(100000, '9') + "}", "number overflow parsing '999"}};
  for (const size_t depth : {64, 1000, 10000, 1000000}) {
    for (const char* key : {"messages", "unknown"}) {
      bodies.emplace_back("{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"" +
                              std::string(key) + "\":" + std::string(depth, '[') +
                              std::string(depth, ']') + "}",
                          "nested more than 64 deep");
    }
    std::string objects;
    for (size_t i = 0; i <= depth; ++i) {
      objects += "{\"a\":";
    }
    bodies.emplace_back(std::move(objects), "nested more than 64 deep");
  }
  const auto refuse = [&](const char* path, const std::string& body, const std::string& reason) {
    const HttpResponse response = send("POST", path, body)->wait();
    EXPECT_EQ(response.status, 400) << path << " " << body.substr(0, 80);
    const json error = json::parse(response.body)["error"];
    const std::string message = error["message"];
    EXPECT_NE(message.find(reason), std::string::npos)
        << path << " " << body.substr(0, 80) << ": " << message;
    EXPECT_LT(message.size(), 1100);
    EXPECT_EQ(error["type"], "invalid_request_error");
  };
  for (const char* path : {"/v1/chat/completions",
                           "/v1/completions",
                           "/v1/messages",
                           "/v1/responses",
                           "/v1/messages/count_tokens",
                           "/tokenize",
                           "/detokenize"}) {
    for (const auto& [body, reason] : bodies) {
      refuse(path, body, reason);
    }
  }
  // Of a repeated key the last value counts.
  for (const char* path :
       {"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"}) {
    refuse(path, "{\"messages\":[],\"messages\":3}", "messages must be an array, not a number");
  }
  EXPECT_TRUE(engine_->seeds().empty());
  ask("/v1/completions", {{"prompt", "x"}});
}

TEST_F(AppTest, A72_ControlSpellingsOfUsersStayText) {
  engine_->say("x");
  std::string all;
  for (const std::string_view token : text::kControlTokens) {
    all += token;
  }
  all += std::string(text::kBosToken) + std::string(text::kEosToken);
  const json messages = {{{"role", "system"}, {"content", all}},
                         {{"role", "user"}, {"content", all}}};
  json body = {{"messages", messages}, {"thinking", {{"type", "disabled"}}}};
  ask("/v1/chat/completions", body);
  int controls = 0;
  for (const int32_t id : engine_->prompt()) {
    controls += tokenizer().is_control(id) ? 1 : 0;
  }
  EXPECT_EQ(controls, 5);  // BOS, System, User, Assistant, </think>
}

TEST_F(AppTest, TokenizeAndBack) {
  const json ids = ask("/tokenize", {{"text", "a whale \U0001F40B"}});
  EXPECT_EQ(ids["text"], "a whale \U0001F40B");
  EXPECT_EQ(ids["count"], ids["token_ids"].size());
  EXPECT_EQ(ask("/detokenize", {{"token_ids", ids["token_ids"]}})["text"], "a whale \U0001F40B");
  const json chat = ask("/tokenize", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}});
  EXPECT_EQ(chat["token_ids"][0], *tokenizer().bos_id());
  EXPECT_EQ(ask("/tokenize", json::object(), 400)["error"]["param"], "text");
  EXPECT_EQ(ask("/tokenize", {{"text", 3}}, 400)["error"]["param"], "text");
  EXPECT_EQ(ask("/detokenize", {{"token_ids", {512}}}, 400)["error"]["param"], "token_ids");
  EXPECT_EQ(ask("/detokenize", {{"token_ids", "x"}}, 400)["error"]["param"], "token_ids");
}

TEST_F(AppTest, MetricsHaveTheNamesOfTheContract) {
  engine_->say("x");
  ask("/v1/completions", {{"prompt", "x"}});
  call("/v1/completions", json::object());
  send("GET", "/no-such-path")->wait();
  const std::string text = send("GET", "/metrics")->wait().body;
  for (const char* name : {"cachalot_requests_total{endpoint=\"/completions\",status=\"200\"} 1",
                           "cachalot_requests_total{endpoint=\"/completions\",status=\"400\"} 1",
                           "cachalot_requests_total{endpoint=\"unknown\",status=\"404\"} 1",
                           "cachalot_running ",
                           "cachalot_waiting ",
                           "cachalot_prompt_tokens_total 100",
                           "cachalot_cached_tokens_total 25",
                           "cachalot_generated_tokens_total ",
                           "cachalot_draft_tokens_total ",
                           "cachalot_accepted_tokens_total ",
                           "cachalot_cache_pages_in_use{pool=\"main\"} 3",
                           "cachalot_cache_pages_total{pool=\"window\"} 4",
                           "cachalot_tier_hits_total{tier=\"disk\"} 4",
                           "cachalot_tier_faults_total{tier=\"disk\"} 1",
                           "cachalot_queue_seconds_bucket{le=\"0.1\"} 1",
                           "cachalot_queue_seconds_bucket{le=\"1\"} 3",
                           "cachalot_queue_seconds_bucket{le=\"+Inf\"} 6",
                           "cachalot_queue_seconds_sum 7.5",
                           "cachalot_first_token_seconds_count ",
                           "cachalot_inter_token_seconds_count "}) {
    EXPECT_NE(text.find(name), std::string::npos) << name << "\n" << text;
  }
}

// A body of each dialect that asks for one short answer.
const std::vector<std::pair<const char*, json>> kDialectBodies = {
    {"/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}}},
    {"/v1/completions", {{"prompt", "hi"}}},
    {"/v1/messages", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"max_tokens", 5}}},
    {"/v1/responses", {{"input", "hi"}}},
};

double seconds_left(const FakeEngine& engine) {
  return std::chrono::duration<double>(engine.deadline().value() - std::chrono::steady_clock::now())
      .count();
}

TEST_F(AppTest, PrioritiesAndTimeoutsReachTheEngine) {
  engine_->say("x");
  for (const auto& [path, plain] : kDialectBodies) {
    ask(path, plain);
    EXPECT_EQ(engine_->priority(), 0) << path;
    EXPECT_FALSE(engine_->deadline().has_value()) << path;
    json body = plain;
    body["priority"] = -7;
    body["timeout"] = 500.5;
    ask(path, body);
    EXPECT_EQ(engine_->priority(), -7) << path;
    EXPECT_LE(seconds_left(*engine_), 500.5) << path;
    EXPECT_GT(seconds_left(*engine_), 400) << path;
    for (const auto& [field, values] :
         {std::pair("priority", json{1001, 0.5, "high"}), std::pair("timeout", json{0, -1, "1"})}) {
      for (const json& value : values) {
        json bad = plain;
        bad[field] = value;
        const json error = ask(path, bad, 400)["error"];
        EXPECT_EQ(error["param"], field) << path << value;
      }
    }
  }
}

class TimeoutTest : public ServerTest {
 protected:
  TimeoutTest() : ServerTest(AppOptions{.request_timeout = 100}) {}
};

TEST_F(TimeoutTest, TheServersLimitHoldsForEveryRequest) {
  engine_->say("x");
  for (const auto& [path, plain] : kDialectBodies) {
    json body = plain;
    ask(path, body);
    EXPECT_LE(seconds_left(*engine_), 100) << path;
    body["timeout"] = 500;
    ask(path, body);
    EXPECT_LE(seconds_left(*engine_), 100) << path;
    body["timeout"] = 50;
    ask(path, body);
    EXPECT_LE(seconds_left(*engine_), 50) << path;
  }
}

TEST_F(AppTest, BeforeAndAfterService) {
  App loading{AppOptions{}};
  const auto status = [&](App& app, const char* method, const char* path) {
    const auto exchange = exchanges_.emplace_back(std::make_shared<TestExchange>());
    app.handle({method, path, {}, "{\"prompt\": \"x\"}", "r"}, exchange);
    return exchange->wait().status;
  };
  EXPECT_EQ(status(loading, "GET", "/health"), 200);
  EXPECT_EQ(status(loading, "GET", "/ready"), 503);
  EXPECT_EQ(status(loading, "GET", "/metrics"), 200);
  EXPECT_EQ(status(loading, "GET", "/stats"), 200);
  for (const char* path : {"/v1/completions", "/v1/messages", "/tokenize", "/detokenize"}) {
    EXPECT_EQ(status(loading, "POST", path), 503) << path;
  }
  app_.drain();
  EXPECT_EQ(status(app_, "GET", "/ready"), 503);
  EXPECT_EQ(status(app_, "POST", "/v1/completions"), 503);
}

TEST_F(AppTest, PagesOfOtherOriginsAreRefused) {
  engine_->say("x");
  const std::string body = "{\"prompt\": \"x\"}";
  const auto status = [&](const char* origin) {
    return send("POST", "/v1/completions", body, {{"host", "127.0.0.1:8000"}, {"origin", origin}})
        ->wait()
        .status;
  };
  EXPECT_EQ(status("http://127.0.0.1:8000"), 200);
  EXPECT_EQ(status("https://evil.example"), 403);
  EXPECT_EQ(status("http://127.0.0.1:8001"), 403);
}

TEST_F(KeyTest, KeysOpenTheDoor) {
  engine_->say("x");
  const auto status = [&](const char* name, const char* value) {
    return send("POST", "/v1/completions", "{\"prompt\": \"x\"}", {{name, value}})->wait().status;
  };
  EXPECT_EQ(status("authorization", "Bearer secret"), 200);
  EXPECT_EQ(status("authorization", "bearer other"), 200);
  EXPECT_EQ(status("x-api-key", "other"), 200);
  for (const char* wrong :
       {"", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "secret", "Basic secret"}) {
    EXPECT_EQ(status("authorization", wrong), 401) << wrong;
  }
  EXPECT_EQ(send("GET", "/v1/models")->wait().status, 401);
  EXPECT_EQ(send("GET", "/stats")->wait().status, 401);
  for (const char* open : {"/health", "/ready", "/metrics", "/"}) {
    EXPECT_EQ(send("GET", open)->wait().status, 200) << open;
  }
}

class EmptyKeyTest : public ServerTest {
 protected:
  EmptyKeyTest() : ServerTest(AppOptions{{""}}) {}
};

TEST_F(EmptyKeyTest, NoKeyIsNotTheEmptyKey) {
  EXPECT_EQ(send("GET", "/v1/models")->wait().status, 401);
  EXPECT_EQ(send("GET", "/v1/models", "", {{"x-api-key", ""}})->wait().status, 401);
}

// Whoever swaps weights names directories of the machine: never open to everyone.
TEST_F(KeyTest, SwappingWeightsNeedsAKey) {
  const auto swap = [&](const char* body, const char* key) {
    return send("POST", "/update_weights_from_disk", body, {{"x-api-key", key}})->wait();
  };
  const char* const good = R"({"model_path": "/somewhere"})";
  EXPECT_EQ(swap(good, "wrong").status, 401);
  const HttpResponse answer = swap(good, "secret");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(json::parse(answer.body)["weight_version"], "/somewhere");
  for (const auto& [body, field] :
       {std::pair("{}", "model_path"),
        std::pair(R"({"model_path": 1})", "model_path"),
        std::pair(R"({"model_path": "/x", "abort_all_requests": true})", "abort_all_requests")}) {
    const HttpResponse refusal = swap(body, "secret");
    EXPECT_EQ(refusal.status, 400);
    EXPECT_EQ(json::parse(refusal.body)["error"]["param"], field);
  }
  engine_->refuse(Status(Code::kDataLoss, "'/somewhere/x' ends early"));
  const HttpResponse refusal = swap(good, "secret");
  EXPECT_EQ(refusal.status, 400);
  EXPECT_EQ(json::parse(refusal.body)["error"]["code"], "weights_refused");
  engine_->refuse(Status(Code::kUnavailable, "other weights are being loaded"));
  EXPECT_EQ(swap(good, "secret").status, 503);
}

TEST_F(AppTest, WithoutKeysNobodySwapsWeights) {
  const auto answer = send("POST", "/update_weights_from_disk", R"({"model_path": "/x"})")->wait();
  EXPECT_EQ(answer.status, 403);
  EXPECT_NE(answer.body.find("--admin-key"), std::string::npos) << answer.body;
}

TEST(RequestId, KeepsWhatIsSafe) {
  EXPECT_EQ(request_id("abc-1"), "abc-1");
  for (const std::string& bad : {std::string(),
                                 std::string("a b"),
                                 std::string("a\r\nb"),
                                 std::string(129, 'x'),
                                 std::string("\xff")}) {
    EXPECT_TRUE(request_id(bad).starts_with("req-"));
  }
  EXPECT_NE(request_id(""), request_id(""));
}

TEST(Page, NeedsNothingButItself) {
  const std::string_view page = page_html();
  EXPECT_NE(page.find("<!DOCTYPE html>"), std::string_view::npos);
  EXPECT_EQ(page.find("http://"), std::string_view::npos);
  EXPECT_EQ(page.find("https://"), std::string_view::npos);
}

}  // namespace
}  // namespace cachalot::server
