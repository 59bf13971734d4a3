// The client of load tests against the HTTP layer with scripted answers.
#include "server/load_client.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "server/http.h"

namespace cachalot::server {
namespace {

class LoadClientTest : public testing::Test {
 protected:
  void SetUp() override {
    HttpOptions options;
    options.port = 0;
    http_ = std::move(*HttpServer::start(
        options,
        [this](HttpRequest request, std::shared_ptr<Exchange> exchange) {
          answer(std::move(request), std::move(exchange));
        },
        [](int, const std::string& message, std::string_view, std::string_view) {
          return message;
        }));
    target_ = *LoadTarget::parse("http://127.0.0.1:" + std::to_string(http_->port()));
  }

  // /echo: the body. /stream: each character of the body as an event. /stall: one event, and then
  // nothing.
  void answer(HttpRequest request, std::shared_ptr<Exchange> exchange) {
    if (request.path == "/echo") {
      exchange->respond({.status = 201, .body = request.body});
      return;
    }
    exchange->on_abort([this] { ++aborted_; });
    exchange->begin_stream({});
    for (const char c : request.body) {
      exchange->write(std::string(": a comment\n\nevent: x\ndata: ") + c + "\n\n");
    }
    if (request.path == "/stream") {
      exchange->end();
    }
  }

  std::unique_ptr<HttpServer> http_;
  LoadTarget target_;
  std::atomic<int> aborted_ = 0;
};

TEST_F(LoadClientTest, EveryAnswerIsThatOfItsRequest) {
  std::map<int64_t, std::string> sent;
  int asked = 0;
  int answered = 0;
  run_load(
      target_,
      50,
      [&](int64_t client) -> std::optional<LoadRequest> {
        if (asked == 500) {
          return std::nullopt;
        }
        sent[client] = std::to_string(++asked);
        return LoadRequest{.path = asked % 3 == 0 ? "/echo" : "/stream", .body = sent[client]};
      },
      [&](int64_t client, const LoadAnswer& answer) {
        ++answered;
        std::string got = answer.body;
        for (const LoadAnswer::Event& event : answer.events) {
          got += event.data;
        }
        EXPECT_EQ(answer.failure, "");
        EXPECT_EQ(answer.status, answer.events.empty() ? 201 : 200);
        EXPECT_EQ(got, sent[client]);
      });
  EXPECT_EQ(answered, 500);
}

TEST_F(LoadClientTest, HangingUpIsNoticed) {
  const LoadAnswer some = ask(target_, {.path = "/stall", .body = "abc", .hang_up_after = 2});
  EXPECT_TRUE(some.hung_up);
  EXPECT_GE(some.events.size(), 2u);
  EXPECT_EQ(some.events[1].data, "b");
  const LoadAnswer none = ask(target_, {.path = "/stall", .body = "a", .hang_up_after = 0});
  EXPECT_TRUE(none.hung_up);
  EXPECT_EQ(none.status, 0);
  while (aborted_ < 2) {
    std::this_thread::yield();
  }
}

TEST_F(LoadClientTest, AServerThatIsGoneIsAFailure) {
  http_->stop(std::chrono::milliseconds(0));
  EXPECT_NE(ask(target_, {.path = "/echo", .body = "x"}).failure, "");
}

TEST(LoadTarget, Urls) {
  const auto target = LoadTarget::parse("http://127.0.0.1:8000/");
  ASSERT_TRUE(target.ok());
  EXPECT_EQ(target->host, "127.0.0.1");
  EXPECT_EQ(target->port, 8000);
  for (const char* bad : {"",
                          "127.0.0.1:8000",
                          "http://127.0.0.1",
                          "http://127.0.0.1:",
                          "http://127.0.0.1:banana",
                          "http://127.0.0.1:70000",
                          "http://name:80"}) {
    EXPECT_FALSE(LoadTarget::parse(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace cachalot::server
