// Prefixes that outlive the page pool, the engine and the machine's neighbours; and every fault of
// the stores behind it: answers are right all the same.
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "engine/prefix_cache.h"
#include "tests/engine/scheduler_bench.h"
#include "tests/engine/t1_fixture.h"
#include "tests/support/redis_server.h"

namespace cachalot::engine {
namespace {

class TiersTest : public T1Fixture {
 protected:
  static Answer cold(Runtime& runtime, const std::vector<int32_t>& prompt) {
    Bench bench(runtime, {.prefix_cache = false});
    return bench.run(request(prompt));
  }
  static kvcache::TierStats tier(const Bench& bench, const std::string& name) {
    for (const kvcache::TierStats& tier : bench.stats().tiers) {
      if (tier.name == name) {
        return tier;
      }
    }
    return {};
  }
};

// Restart, and the prefix is a hit with the bits of a cold run, in every mode that promises them.
TEST_F(TiersTest, RestartsFindPrefixesOnDisk) {
  for (Mode mode : {Mode::kExact, Mode::kHalo, Mode::kReplay}) {
    const test::TempDirectory directory;
    const EngineOptions options{.tiers = {.disk = directory.path()}};
    const auto runtime = open({.mode = mode});
    const std::vector<int32_t> prompt = tokens(200);
    const Answer expected = cold(*runtime, prompt);
    for (int run = 0; run < 3; ++run) {
      const auto fresh = open({.mode = mode});
      Bench bench(*fresh, options);
      const Answer answer = bench.run(request(prompt));
      EXPECT_EQ(answer.cached, run == 0 ? 0 : 192) << run;
      if (mode != Mode::kReplay || run == 0) {
        EXPECT_TRUE(answer.same(expected)) << run;
      }
      EXPECT_EQ(bench.stats().replayed_tokens > 0, run > 0);
      EXPECT_EQ(tier(bench, "disk").faults, 0u);
    }
  }
}

// another checkpoint on the same disk finds nothing of the first.
TEST_F(TiersTest, A27_OtherWeightsFindNothingOnDisk) {
  const test::TempDirectory directory;
  test::TempDirectory other;
  write_checkpoint(other, 5);
  const EngineOptions options{.tiers = {.disk = directory.path()}};
  {
    const auto first = open();
    Bench(*first, options).run(request(tokens(200)));
  }
  const auto second = std::move(*Runtime::open(other.path(), {.threads = 1}));
  const Answer expected = cold(*second, tokens(200));
  Bench bench(*second, options);
  const Answer answer = bench.run(request(tokens(200)));
  EXPECT_EQ(answer.cached, 0);
  EXPECT_TRUE(answer.same(expected));
}

// Damage to any file of the disk tier costs a hit, never an answer.
TEST_F(TiersTest, DamagedFilesChangeNoAnswer) {
  const test::TempDirectory directory;
  const EngineOptions options{.tiers = {.disk = directory.path()}};
  const auto runtime = open();
  const std::vector<int32_t> prompt = tokens(200);
  const Answer expected = cold(*runtime, prompt);
  for (int round = 0; round < 6; ++round) {
    for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
      if (!entry.is_regular_file() || entry.file_size() == 0) {
        continue;
      }
      if (round % 2 == 0) {
        std::filesystem::resize_file(entry.path(), entry.file_size() * 2 / 3);
      } else {
        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        for (uintmax_t at = static_cast<uintmax_t>(round); at < entry.file_size(); at += 211) {
          file.seekp(static_cast<std::streamoff>(at));
          file.put('\x33');
        }
      }
    }
    Bench bench(*runtime, options);
    EXPECT_TRUE(bench.run(request(prompt)).same(expected)) << round;
    EXPECT_TRUE(bench.run(request(prompt)).same(expected)) << round;
  }
}

// pages that left the pool come back from main memory, and the replay runs once.
TEST_F(TiersTest, A28_PagesComeBackFromMainMemory) {
  const auto runtime = open({.max_cached_tokens = 20 * kPage});
  const std::vector<int32_t> prompt = tokens(200);
  const Answer expected = cold(*runtime, prompt);
  Bench bench(*runtime, {.cached_states = 0, .tiers = {.host_bytes = 1 << 22}});
  EXPECT_TRUE(bench.run(request(prompt)).same(expected));
  for (uint64_t i = 2; i < 5; ++i) {
    bench.run(request(tokens(250, i)));
  }
  EXPECT_GT(bench.stats().evictions, 0u);
  const uint64_t before = bench.stats().replayed_tokens;
  const Answer again = bench.run(request(prompt));
  EXPECT_TRUE(again.same(expected));
  EXPECT_EQ(again.cached, 192);
  // 70 rows rebuild the windows of all ten layers of t1.
  EXPECT_EQ(bench.stats().replayed_tokens - before, 70u);
  EXPECT_GT(tier(bench, "host").hits, 0u);
}

// What a state lacks of the draft context goes with it, in the index and through the stores.
TEST_F(TiersTest, StatesKeepWhereTheirDraftContextBegins) {
  const auto runtime = open({.draft = true});
  const auto tiers =
      std::move(kvcache::Tiers::open(runtime->layout(), {.host_bytes = 1 << 24}).value());
  const auto sequence = [&] {
    return Sequence(1, request(tokens(40)), {}, {}, 6, runtime->tokenizer(), 0);
  };
  PrefixCache first(*runtime, *runtime->loaded(), {}, tiers.get());
  Sequence one = sequence();
  one.cache = std::move(runtime->make_cache().value());
  first.begin(one, 0);
  ASSERT_TRUE(one.cache->reserve(2 * kPage).ok());
  const auto runner = std::move(runtime->make_runner().value());
  const model::StepSequence step{.view = &one.cache->view(),
                                 .tokens = std::span(one.tokens).first(2 * kPage),
                                 .no_logits = true};
  ASSERT_TRUE(runner->run({&step, 1}, nullptr, false).ok());
  const int32_t rows = 2 * kPage;
  ASSERT_TRUE(runner->commit({&rows, 1}).ok());
  one.draft_from = one.stop = rows;
  first.keep(one);
  tiers->flush();
  PrefixCache second(*runtime, *runtime->loaded(), {}, tiers.get());
  for (PrefixCache* prefixes : {&first, &second}) {
    Sequence next = sequence();
    prefixes->read_ahead(next);
    tiers->flush();
    ASSERT_TRUE(prefixes->absorb(next).ok());
    const Prefix prefix = prefixes->find(next);
    EXPECT_EQ(prefix.length, rows);
    EXPECT_TRUE(prefix.state);
    next.cache = std::move(runtime->make_cache().value());
    ASSERT_TRUE(prefixes->attach(next, prefix).ok());
    EXPECT_EQ(next.draft_from, rows);
    ASSERT_TRUE(prefixes->attach(next, prefixes->cold(next)).ok());
    EXPECT_EQ(next.draft_from, 0);
  }
}

// Two engines share rows and window states through a server; when it dies they go on alone.
TEST_F(TiersTest, EnginesShareThroughRedisAndOutliveIt) {
  test::RedisServer server;
  if (!server.running()) {
    GTEST_SKIP() << "redis-server is not installed";
  }
  const auto runtime = open(), neighbour = open();
  const std::vector<int32_t> prompt = tokens(40), other = tokens(45, 2);
  const Answer expected = cold(*runtime, prompt), other_expected = cold(*runtime, other);
  const EngineOptions options{.tiers = {.redis = server.url()}};
  {
    Bench first(*runtime, options);
    EXPECT_TRUE(first.run(request(prompt)).same(expected));
  }
  Bench second(*neighbour, options);
  const Answer shared = second.run(request(prompt));
  EXPECT_TRUE(shared.same(expected));
  // With the state nothing is run again, although the prompt is too short for a replay.
  EXPECT_EQ(shared.cached, 32);
  EXPECT_EQ(second.stats().replayed_tokens, 0u);
  server.kill();
  EXPECT_TRUE(second.run(request(other)).same(other_expected));
  EXPECT_TRUE(second.run(request(other)).same(other_expected));
  EXPECT_TRUE(second.run(request(prompt)).same(expected));
  EXPECT_GT(tier(second, "redis").faults, 0u);
  // A server that was never there is no reason not to start.
  Bench third(*neighbour, options);
  EXPECT_TRUE(third.run(request(prompt)).same(expected));
}

// A request whose prefix is still being read lacks no room: nobody is preempted for it.
TEST_F(TiersTest, ASlowStorePreemptsNobody) {
  test::RedisServer server;
  if (!server.running()) {
    GTEST_SKIP() << "redis-server is not installed";
  }
  const auto runtime = open();
  const std::vector<int32_t> prompt = tokens(40);
  const Answer expected = cold(*runtime, prompt);
  Bench bench(*runtime, {.max_running = 2, .tiers = {.redis = server.url()}});
  server.freeze();
  const RequestId low = bench.add(request(tokens(9), 30));
  bench.scheduler().step();
  EngineRequest urgent = request(prompt);
  urgent.priority = 1;
  const RequestId high = bench.add(std::move(urgent));
  bench.finish();
  EXPECT_TRUE(bench.answer(low).done);
  EXPECT_TRUE(bench.answer(high).same(expected));
  EXPECT_EQ(bench.stats().preemptions, 0u);
}

// A store that does not answer delays a request by prefix_wait, which then computes; one behind it
// that wants nothing of the store, by nothing; and whoever cancels or has a deadline does not wait
// for it.
TEST_F(TiersTest, ASlowStoreDelaysARequestByItsBound) {
  test::RedisServer server;
  if (!server.running()) {
    GTEST_SKIP() << "redis-server is not installed";
  }
  const auto runtime = open();
  const Answer expected = cold(*runtime, tokens(40));
  const auto engine = std::move(Engine::start(*runtime,
                                              {.prefix_wait = std::chrono::milliseconds(600),
                                               .tiers = {.redis = server.url()}})
                                    .value());
  server.freeze();
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::pair<double, Event>> ended;
  const double begin = now_seconds();
  const auto submit = [&](const std::string& name, EngineRequest r) {
    r.max_tokens = 1;
    return engine
        ->submit(std::move(r),
                 [&, name](RequestId, Event event) {
                   const std::lock_guard lock(mutex);
                   ended[name] = {now_seconds() - begin, std::move(event)};
                   changed.notify_all();
                 })
        .value();
  };
  submit("slow", request(tokens(40)));
  const RequestId cancelled = submit("cancelled", request(tokens(50, 2)));
  EngineRequest late = request(tokens(60, 3));
  late.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  submit("late", std::move(late));
  engine->cancel(cancelled);
  submit("short", request(tokens(9, 4)));
  std::unique_lock lock(mutex);
  ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return ended.size() == 4; }));
  EXPECT_EQ(ended["cancelled"].second.status.code(), Code::kCancelled);
  EXPECT_LT(ended["cancelled"].first, 0.5);
  EXPECT_EQ(ended["late"].second.status.code(), Code::kDeadlineExceeded);
  EXPECT_LT(ended["late"].first, 0.5);
  EXPECT_TRUE(ended["short"].second.done);
  EXPECT_LT(ended["short"].first, 0.5);
  EXPECT_EQ(ended["slow"].second.tokens[0].id, expected.ids[0]);
  EXPECT_GT(ended["slow"].first, 0.5);
  EXPECT_LT(ended["slow"].first, 1.5);
}

// What is read lies in memory until its request is admitted: the last of a long queue is not asked
// for yet, and finds in the pool what those before it brought there.
TEST_F(TiersTest, FewPrefixesAreReadAhead) {
  const auto runtime = open();
  Bench bench(*runtime, {.max_running = 1, .tiers = {.host_bytes = 1 << 22}});
  std::vector<EngineRequest> requests;
  for (int i = 0; i < 12; ++i) {
    requests.push_back(request(tokens(40)));
  }
  for (const Answer& answer : bench.run_all(std::move(requests))) {
    EXPECT_TRUE(answer.done);
  }
  // The first request and the four behind it look for a page and for a state.
  EXPECT_EQ(tier(bench, "host").misses, 10u);
}

TEST_F(TiersTest, ATierThatCannotBeOpenedSaysSo) {
  const auto runtime = open();
  EXPECT_EQ(Scheduler::create(*runtime, {.tiers = {.disk = "/proc/nowhere"}}).error().code(),
            Code::kUnavailable);
  EXPECT_EQ(Scheduler::create(*runtime, {.tiers = {.redis = "nowhere"}}).error().code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace cachalot::engine
