// The engine's thread: submission, cancellation and draining from other threads.
#include "engine/engine.h"

#include <map>
#include <thread>

#include "tests/engine/inbox.h"
#include "tests/engine/t1_fixture.h"

namespace cachalot::engine {
namespace {

EngineRequest request(std::vector<int32_t> prompt, int64_t max_tokens) {
  return {.prompt = std::move(prompt),
          .sampling = {.temperature = 0},
          .max_tokens = max_tokens,
          .ignore_eos = true};
}

class EngineTest : public T1Fixture {
 protected:
  static std::unique_ptr<Engine> start(Runtime& runtime, const EngineOptions& options = {}) {
    return std::move(Engine::start(runtime, options).value());
  }
};

TEST_F(EngineTest, ManyClientsGetWhatTheyWouldAlone) {
  const auto runtime = open();
  std::map<int64_t, std::vector<int32_t>> expected;
  for (int64_t length = 1; length <= 5; ++length) {
    const auto engine = start(*runtime, {.max_running = 1, .prefix_cache = false});
    Inbox inbox;
    const RequestId id = *engine->submit(request(tokens(7 * length), 5), inbox.sink());
    expected[length] = inbox.wait(id).first;
    EXPECT_EQ(expected[length].size(), 5u);
  }
  const auto engine = start(*runtime, {.chunk = 32, .max_running = 6});
  std::vector<std::thread> clients;
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&, client] {
      Inbox inbox;
      for (int i = 0; i < 12; ++i) {
        const int64_t length = 1 + (client + i) % 5;
        const Result<RequestId> id =
            engine->submit(request(tokens(7 * length), i % 4 == 3 ? 100000 : 5), inbox.sink());
        ASSERT_TRUE(id.ok());
        if (i % 4 == 3) {
          inbox.wait_for_tokens(*id, 2);
          engine->cancel(*id);
          EXPECT_EQ(inbox.wait(*id).second.code(), Code::kCancelled);
        } else {
          EXPECT_EQ(inbox.wait(*id).first, expected[length]);
        }
      }
    });
  }
  for (std::thread& client : clients) {
    client.join();
  }
  EXPECT_TRUE(engine->drain(std::chrono::seconds(60)));
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.requests_finished, 36u);
  EXPECT_EQ(stats.requests_cancelled, 12u);
  EXPECT_EQ(stats.running + stats.waiting, 0);
  for (const PoolStats& pool : stats.pools) {
    EXPECT_EQ(pool.in_use, 0) << pool.name;
  }
}

TEST_F(EngineTest, StepsOnSeveralThreadsGiveTheSame) {
  const auto outputs = [](int threads) {
    const auto runtime = open({.threads = threads});
    const auto engine = start(*runtime, {.chunk = 24, .max_running = 3});
    Inbox inbox;
    std::vector<RequestId> ids;
    for (int64_t length : {40, 3, 17}) {
      ids.push_back(*engine->submit(request(tokens(length, 3), 6), inbox.sink()));
    }
    std::vector<std::vector<int32_t>> out;
    for (const RequestId id : ids) {
      out.push_back(inbox.wait(id).first);
    }
    return out;
  };
  EXPECT_EQ(outputs(3), outputs(1));
}

TEST_F(EngineTest, TheQueueIsBounded) {
  const auto runtime = open();
  const auto engine = start(*runtime, {.max_running = 1, .max_waiting = 2});
  Inbox inbox;
  const RequestId running = *engine->submit(request(tokens(4), 16000), inbox.sink());
  inbox.wait_for_tokens(running, 1);
  const RequestId second = *engine->submit(request(tokens(4), 2), inbox.sink());
  const RequestId third = *engine->submit(request(tokens(4), 2), inbox.sink());
  EXPECT_EQ(engine->submit(request(tokens(4), 2), inbox.sink()).error().code(),
            Code::kResourceExhausted);
  EXPECT_EQ(engine->submit(request({}, 2), inbox.sink()).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(engine->stats().waiting, 2);
  engine->cancel(running);
  engine->cancel(999);
  EXPECT_TRUE(inbox.wait(second).second.ok());
  EXPECT_TRUE(inbox.wait(third).second.ok());
}

// A burst is not refused for coming faster than the engine thread looks.
TEST_F(EngineTest, AnIdleEngineTakesWhatItHasRoomFor) {
  const auto runtime = open();
  Inbox inbox;
  const auto engine = start(*runtime, {.max_running = 6, .max_waiting = 1});
  for (int i = 0; i < 7; ++i) {
    EXPECT_TRUE(engine->submit(request(tokens(4), 16000), inbox.sink()).ok()) << i;
  }
  EXPECT_EQ(engine->submit(request(tokens(4), 2), inbox.sink()).error().code(),
            Code::kResourceExhausted);
}

TEST_F(EngineTest, DrainingRefusesAndThenCancels) {
  const auto runtime = open();
  const auto engine = start(*runtime);
  Inbox inbox;
  const RequestId quick = *engine->submit(request(tokens(4), 2), inbox.sink());
  const RequestId endless = *engine->submit(request(tokens(4), 16000), inbox.sink());
  EXPECT_FALSE(engine->drain(std::chrono::milliseconds(50)));
  EXPECT_TRUE(inbox.wait(quick).second.ok());
  EXPECT_EQ(inbox.wait(endless).second.code(), Code::kCancelled);
  EXPECT_EQ(engine->submit(request(tokens(4), 2), inbox.sink()).error().code(), Code::kUnavailable);
  EXPECT_TRUE(engine->drain(std::chrono::milliseconds(0)));
}

TEST_F(EngineTest, DestructionCancelsWhatIsLeft) {
  const auto runtime = open();
  Inbox inbox;
  RequestId id = 0;
  {
    const auto engine = start(*runtime);
    id = *engine->submit(request(tokens(4), 16000), inbox.sink());
  }
  EXPECT_EQ(inbox.wait(id).second.code(), Code::kCancelled);
  EXPECT_EQ(runtime->pages().pages_in_use(), 0);
}

}  // namespace
}  // namespace cachalot::engine
