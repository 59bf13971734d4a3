// Scheduling, caches and their invariances over a synthetic t1 checkpoint. What a request gives
// alone and cold is the definition; everything else must give the same bits.
#include "engine/scheduler.h"

#include <algorithm>
#include <thread>

#include "tests/engine/scheduler_bench.h"

namespace cachalot::engine {
namespace {

// A request of every length, each with a prompt of its own.
std::vector<EngineRequest> requests_of(const std::vector<int64_t>& lengths) {
  std::vector<EngineRequest> requests;
  for (const int64_t length : lengths) {
    requests.push_back(request(T1Fixture::tokens(length, static_cast<uint64_t>(length))));
  }
  return requests;
}

void expect_same(const std::vector<Answer>& answers,
                 const std::vector<Answer>& expected,
                 const std::vector<int64_t>& lengths,
                 int64_t chunk) {
  for (size_t i = 0; i < answers.size(); ++i) {
    EXPECT_TRUE(answers[i].same(expected[i])) << lengths[i] << " chunk " << chunk;
  }
}

class SchedulerTest : public ModeFixture {
 protected:
  static bool is_exact() { return GetParam() == Mode::kExact; }
};

// Both modes that promise the bits of a cold run through every layer.
INSTANTIATE_TEST_SUITE_P(Modes,
                         SchedulerTest,
                         testing::Values(Mode::kExact, Mode::kHalo),
                         [](const auto& mode) {
                           return mode.param == Mode::kExact ? "exact" : "halo";
                         });

TEST_P(SchedulerTest, AnyBatchAndAnyChunkGivesTheSame) {
  const auto runtime = open();
  const std::vector<int64_t> lengths = {1, 2, 15, 16, 17, 40, 33, 5};
  std::vector<Answer> expected;
  for (int64_t length : lengths) {
    expected.push_back(alone(request(tokens(length, static_cast<uint64_t>(length)))));
  }
  for (bool cache : {false, true}) {
    for (int64_t chunk : {1, 3, 16, 100}) {
      for (int64_t running : {2, 8}) {
        Bench bench(*runtime, {.chunk = chunk, .max_running = running, .prefix_cache = cache});
        expect_same(bench.run_all(requests_of(lengths)), expected, lengths, chunk);
      }
    }
  }
}

// the same prompt again gives the same; only tokens that were read count as cached.
TEST_P(SchedulerTest, A20_A25_TheSamePromptAgain) {
  const auto runtime = open();
  for (int64_t length : {1, 15, 16, 17, 24, 32, 33, 48, 100}) {
    const std::vector<int32_t> prompt = tokens(length);
    const Answer expected = alone(request(prompt));
    Bench bench(*runtime, {});
    const Answer first = bench.run(request(prompt)), second = bench.run(request(prompt)),
                 third = bench.run(request(prompt));
    EXPECT_TRUE(first.same(expected) && second.same(expected) && third.same(expected)) << length;
    EXPECT_EQ(first.cached, 0);
    EXPECT_LT(second.cached, length);
    if (is_exact()) {
      EXPECT_EQ(second.cached, (length - 1) / kPage * kPage) << length;
    }
    EXPECT_EQ(third.cached, second.cached);
    const std::vector<int32_t> longer = joined(prompt, tokens(5, 9));
    const Answer cold = alone(request(longer));
    const Answer hit = bench.run(request(longer));
    EXPECT_TRUE(hit.same(cold)) << length;
    EXPECT_EQ(hit.cached, length);
  }
}

// a hit never covers the whole prompt.
TEST_P(SchedulerTest, A23_AtLeastOneTokenRuns) {
  const auto runtime = open();
  for (int64_t length : {kPage, 2 * kPage, 4 * kPage}) {
    const Answer expected = alone(request(tokens(length)));
    Bench bench(*runtime, {});
    bench.run(request(tokens(length)));
    const Answer again = bench.run(request(tokens(length)));
    EXPECT_TRUE(again.same(expected));
    EXPECT_LT(again.cached, length);
    if (is_exact()) {
      EXPECT_GE(again.cached, length - kPage);
    }
  }
}

// a shared prefix is found at the documented granularity: two pages up to sixteen pages.
TEST_P(SchedulerTest, A24_SharedPrefixesAreFoundAtTheirGranularity) {
  const auto runtime = open();
  for (int64_t pages : {1, 2, 3, 4, 8, 15}) {
    const std::vector<int32_t> shared = tokens(pages * kPage);
    Bench bench(*runtime, {});
    bench.run(request(joined(shared, tokens(90, 2))));
    const EngineRequest other = request(joined(shared, tokens(40, 3)));
    const Answer expected = alone(request(other.prompt));
    const Answer hit = bench.run(request(other.prompt));
    EXPECT_TRUE(hit.same(expected)) << pages;
    EXPECT_GE(hit.cached, pages / 2 * 2 * kPage) << pages;
    EXPECT_LE(hit.cached, pages * kPage) << pages;
    // The end of what both share has become a place to go on from.
    const Answer third = bench.run(request(joined(shared, tokens(40, 4))));
    EXPECT_EQ(third.cached, pages * kPage) << pages;
    EXPECT_TRUE(third.same(alone(request(joined(shared, tokens(40, 4))))));
  }
}

// The next turn of a conversation finds the whole last one, output included.
TEST_P(SchedulerTest, ConversationsGoOnWhereTheyEnded) {
  const auto runtime = open();
  Bench bench(*runtime, {});
  std::vector<int32_t> history = tokens(21);
  for (uint64_t turn = 0; turn < 4; ++turn) {
    const Answer expected = alone(request(history, 9));
    const Answer answer = bench.run(request(history, 9));
    EXPECT_TRUE(answer.same(expected)) << turn;
    if (turn > 0) {
      // The last output token of the turn before was never run.
      EXPECT_EQ(answer.cached, static_cast<int64_t>(history.size()) - 7 - 1);
    }
    history = joined(joined(history, answer.ids), tokens(7, 60 + turn));
  }
}

// Two requests that went on from one state do not see each other's rows.
TEST_P(SchedulerTest, BranchesOfOneStateAreApart) {
  const auto runtime = open();
  Bench bench(*runtime, {});
  const std::vector<int32_t> base = tokens(21);
  bench.run(request(base));
  std::vector<RequestId> ids;
  std::vector<Answer> expected;
  for (uint64_t i = 0; i < 4; ++i) {
    const std::vector<int32_t> prompt = joined(base, tokens(30, 100 + i));
    expected.push_back(alone(request(prompt, 20)));
    ids.push_back(bench.add(request(prompt, 20)));
  }
  bench.finish();
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(bench.answer(ids[i]).same(expected[i])) << i;
    EXPECT_EQ(bench.answer(ids[i]).cached, 21);
  }
}

// A pool far smaller than the traffic: pages are evicted and reused, results stay.
TEST_P(SchedulerTest, EvictionChangesNothing) {
  const auto small = open({.max_cached_tokens = 10 * kPage});
  Bench bench(*small, {.chunk = 40, .max_running = 3});
  std::vector<RequestId> ids;
  std::vector<Answer> expected;
  for (uint64_t i = 0; i < 24; ++i) {
    const std::vector<int32_t> prompt =
        joined(tokens(33, 1 + i % 3), tokens(10 + static_cast<int64_t>(i), 50 + i));
    expected.push_back(alone(request(prompt)));
    ids.push_back(bench.add(request(prompt)));
  }
  bench.finish();
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(bench.answer(ids[i]).same(expected[i]))
        << i << bench.answer(ids[i]).status.message();
  }
  const EngineStats stats = bench.scheduler().stats();
  EXPECT_GT(stats.evictions, 0u);
  if (is_exact()) {
    EXPECT_GT(stats.cached_tokens, 0u);
  }
  EXPECT_EQ(stats.requests_finished, 24u);
  EXPECT_EQ(bench.pool("main").in_use, 0);
  EXPECT_EQ(bench.pool("window").in_use, 0);
}

// admission charges what is held at worst, so a prompt nearly as large as the pool runs.
TEST_P(SchedulerTest, A30_ALargePromptRunsInATightPool) {
  const auto runtime = open({.max_cached_tokens = 12 * kPage});
  const int64_t length = 10 * kPage - 4;
  const Answer expected = alone(request(tokens(length)));
  Bench bench(*runtime, {.chunk = length});
  const RequestId first = bench.add(request(tokens(length))),
                  second = bench.add(request(tokens(length, 2)));
  bench.finish();
  EXPECT_TRUE(bench.answer(first).same(expected));
  EXPECT_TRUE(bench.answer(second).done);
  // A hit whose pages fill the pool must not block itself.
  EXPECT_TRUE(bench.run(request(joined(tokens(length, 2), tokens(20)))).done);
  // What can never fit is refused at once.
  const Status status = bench.scheduler().check(request(tokens(length), 100));
  EXPECT_EQ(status.code(), Code::kOutOfRange);
}

// a cancelled request holds nothing, wherever it was.
TEST_P(SchedulerTest, A31_CancelFreesEverythingAtOnce) {
  const auto runtime = open();
  Bench bench(*runtime, {.chunk = 20, .max_running = 2});
  const RequestId decoding = bench.add(request(tokens(5), 2000));
  for (int i = 0; i < 4; ++i) {
    bench.scheduler().step();
  }
  const RequestId prefilling = bench.add(request(tokens(200, 2), 2000));
  const RequestId queued = bench.add(request(tokens(200, 3), 2000));
  bench.scheduler().step();
  EXPECT_EQ(bench.scheduler().stats().running, 2);
  EXPECT_EQ(bench.scheduler().stats().waiting, 1);
  EXPECT_GT(bench.pool("main").in_use, 0);
  for (RequestId id : {prefilling, queued, decoding}) {
    bench.scheduler().cancel(id);
    EXPECT_EQ(bench.answer(id).status.code(), Code::kCancelled);
  }
  bench.scheduler().cancel(decoding);
  EXPECT_EQ(bench.pool("main").in_use, 0);
  EXPECT_EQ(bench.pool("window").in_use, 0);
  EXPECT_TRUE(bench.scheduler().idle());
  EXPECT_EQ(bench.scheduler().stats().requests_cancelled, 3u);
  const Answer after = bench.run(request(tokens(200, 2)));
  EXPECT_TRUE(after.same(alone(request(tokens(200, 2)))));
}

TEST_P(SchedulerTest, PreemptionChangesNoResult) {
  const auto runtime = open();
  // Preempted at every point: while its prompt runs and between output tokens.
  const Answer expected = alone(request(tokens(37), 8));
  const Answer urgent_expected = alone(request(tokens(9, 5)));
  for (int steps = 0; steps < 14; ++steps) {
    Bench bench(*runtime, {.chunk = 8, .max_running = 1});
    const RequestId low = bench.add(request(tokens(37), 8));
    for (int i = 0; i < steps; ++i) {
      bench.scheduler().step();
    }
    const bool was_running = !bench.ended(low);
    EngineRequest urgent = request(tokens(9, 5));
    urgent.priority = 1;
    const RequestId high = bench.add(std::move(urgent));
    while (!bench.ended(high)) {
      bench.scheduler().step();
    }
    EXPECT_EQ(bench.ended(low), !was_running);
    bench.finish();
    EXPECT_TRUE(bench.answer(low).same(expected)) << steps;
    EXPECT_TRUE(bench.answer(high).same(urgent_expected)) << steps;
    EXPECT_EQ(bench.scheduler().stats().preemptions, steps > 0 && was_running ? 1u : 0u);
  }
}

// a request that is preempted twice in a row while drafts are verified loses no token, gets
// none twice, and never runs a placeholder.
TEST_P(SchedulerTest, A32_PreemptionBetweenDraftsLosesNoToken) {
  const auto runtime = open({.draft = true});
  const auto low_request = [] {
    EngineRequest low = request(tokens(21), 30);
    low.sampling = {.temperature = 0, .logit_bias = {{40, 30.0f}, {41, 30.0f}, {42, 30.0f}}};
    return low;
  };
  const Answer expected = alone(low_request());
  for (const int64_t drafts : {0, 1, 3}) {  // 0: as the policy advises
    for (int steps = 1; steps < 8; ++steps) {
      Bench bench(*runtime, {.max_running = 1, .speculation = {.length = drafts}});
      const RequestId low = bench.add(low_request());
      uint64_t preemptions = 0;
      for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < steps; ++i) {
          bench.scheduler().step();
        }
        preemptions += bench.ended(low) ? 0 : 1;
        EngineRequest urgent = request(tokens(9, 5), 3);
        urgent.priority = 1;
        urgent.sampling.temperature = 0;
        const RequestId high = bench.add(std::move(urgent));
        while (!bench.ended(high)) {
          bench.scheduler().step();
        }
      }
      bench.finish();
      EXPECT_TRUE(bench.answer(low).same(expected)) << drafts << " drafts, " << steps << " steps";
      EXPECT_EQ(bench.stats().preemptions, preemptions);
      if (drafts > 0) {
        EXPECT_GT(bench.stats().accepted_tokens, 0u);
        EXPECT_LT(bench.stats().accepted_tokens, bench.stats().draft_tokens);
      }
    }
  }
}

// Memory, too, is a reason to preempt.
TEST_P(SchedulerTest, AHigherPriorityTakesThePagesOfALowerOne) {
  const auto runtime = open({.max_cached_tokens = 8 * kPage});
  const Answer low_expected = alone(request(tokens(70), 20));
  Bench bench(*runtime, {.max_running = 4});
  const RequestId low = bench.add(request(tokens(70), 20));
  for (int i = 0; i < 5; ++i) {
    bench.scheduler().step();
  }
  EngineRequest urgent = request(tokens(70, 2), 20);
  urgent.priority = 3;
  const RequestId high = bench.add(std::move(urgent));
  const RequestId equal = bench.add(request(tokens(70, 3), 20));
  while (!bench.ended(high)) {
    bench.scheduler().step();
    EXPECT_FALSE(bench.ended(low));
  }
  bench.finish();
  EXPECT_TRUE(bench.answer(low).same(low_expected));
  EXPECT_TRUE(bench.answer(equal).done);
  EXPECT_EQ(bench.scheduler().stats().preemptions, 1u);
}

TEST_P(SchedulerTest, PrioritiesAndArrivalOrderTheQueue) {
  const auto runtime = open();
  Bench bench(*runtime, {.max_running = 1});
  std::vector<RequestId> ids;
  for (int priority : {0, 0, 2, 1, 2}) {
    EngineRequest r = request(tokens(4), 2);
    r.priority = priority;
    ids.push_back(bench.add(std::move(r)));
  }
  std::vector<RequestId> order;
  while (!bench.scheduler().idle()) {
    bench.scheduler().step();
    for (RequestId id : ids) {
      if (bench.ended(id) && std::find(order.begin(), order.end(), id) == order.end()) {
        order.push_back(id);
      }
    }
  }
  EXPECT_EQ(order, (std::vector<RequestId>{ids[2], ids[4], ids[3], ids[0], ids[1]}));
}

// A short prompt does not wait for a long one, and a long one goes on beside a stream of short
// ones.
TEST_P(SchedulerTest, LongAndShortPromptsShareTheChunk) {
  const auto runtime = open();
  Bench bench(*runtime, {.chunk = 16, .max_running = 8, .prefix_cache = false});
  const RequestId long_one = bench.add(request(tokens(320), 2));
  bench.scheduler().step();
  const RequestId short_one = bench.add(request(tokens(8, 2), 1));
  bench.scheduler().step();
  EXPECT_TRUE(bench.ended(short_one));
  // Half of every chunk is its own: 320 tokens take at most 40 steps.
  int steps = 2;
  for (uint64_t i = 0; !bench.ended(long_one); ++i, ++steps) {
    bench.add(request(tokens(24, 10 + i), 1));
    bench.scheduler().step();
  }
  EXPECT_LE(steps, 42);
}

// Decoding requests get their row in every step, whatever prompts wait.
TEST_P(SchedulerTest, DecodingGoesOnBesidePrompts) {
  const auto runtime = open();
  Bench bench(*runtime, {.chunk = 4, .max_running = 8});
  const RequestId decoding = bench.add(request(tokens(4), 40));
  bench.scheduler().step();
  bench.add(request(tokens(200, 2)));
  for (size_t n = 2; n < 20; ++n) {
    bench.scheduler().step();
    EXPECT_EQ(bench.answer(decoding).ids.size(), n);
    EXPECT_EQ(bench.scheduler().stats().last_batch_rows, 5);
  }
}

TEST_P(SchedulerTest, DeadlinesEndRequestsWhereverTheyAre) {
  const auto runtime = open();
  Bench bench(*runtime, {.max_running = 1});
  EngineRequest slow = request(tokens(4), 100000);
  slow.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(30);
  EngineRequest late = request(tokens(4));
  late.deadline = std::chrono::steady_clock::now();
  const RequestId running = bench.add(std::move(slow)), waiting = bench.add(std::move(late));
  bench.scheduler().step();
  EXPECT_EQ(bench.answer(waiting).status.code(), Code::kDeadlineExceeded);
  bench.finish();
  EXPECT_EQ(bench.answer(running).status.code(), Code::kDeadlineExceeded);
  EXPECT_GT(bench.answer(running).ids.size(), 0u);
  EXPECT_EQ(bench.pool("main").in_use, 0);
  EXPECT_EQ(bench.scheduler().stats().requests_failed, 2u);
}

TEST_P(SchedulerTest, PromptLogprobsAreThoseOfAScore) {
  const auto runtime = open();
  EngineRequest r = request(tokens(40));
  r.prompt_logprobs = true;
  const Answer expected = alone(std::move(r));
  ASSERT_EQ(expected.prompt.size(), 40u);
  EXPECT_FALSE(expected.prompt[0].has_value());
  Bench bench(*runtime, {.chunk = 7});
  bench.run(request(tokens(40)));
  EngineRequest again = request(tokens(40)), only = request(tokens(40), 0);
  again.prompt_logprobs = only.prompt_logprobs = true;
  const Answer scored = bench.run(std::move(again));
  EXPECT_TRUE(scored.same(expected));
  EXPECT_EQ(scored.cached, 0);
  const Answer score = bench.run(std::move(only));
  EXPECT_EQ(score.prompt, expected.prompt);
  EXPECT_TRUE(score.ids.empty());
  EXPECT_EQ(bench.scheduler().check(request(tokens(4), 0)).code(), Code::kInvalidArgument);
}

TEST_P(SchedulerTest, TheContextBoundsTheOutput) {
  const auto runtime = open();
  Bench bench(*runtime, {.max_context = 20});
  const Answer answer = bench.run(request(tokens(17), 100));
  EXPECT_EQ(answer.ids.size(), 3u);
  EXPECT_EQ(answer.reason, StopReason::kLength);
  EXPECT_TRUE(bench.scheduler().check(request(tokens(19))).ok());
  const Status status = bench.scheduler().check(request(tokens(20)));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("20"), std::string::npos);
  EXPECT_FALSE(bench.scheduler().check(request({})).ok());
  EXPECT_FALSE(bench.scheduler().check(request({3, 512})).ok());
  EXPECT_FALSE(Scheduler::create(*runtime, {.max_context = 1 << 20}).ok());
  EXPECT_FALSE(Scheduler::create(*runtime, {.chunk = 0}).ok());
}

// the same files with other weights find nothing of the first ones' caches.
TEST_P(SchedulerTest, A27_CacheKeysTellWeightsApart) {
  test::TempDirectory other;
  write_checkpoint(other, 5);
  const auto first = open(), again = open(), exact32 = open({.precision = model::Precision::kF32});
  const auto second = Runtime::open(other.path(), {.threads = 1});
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(first->loaded()->cache_key(), again->loaded()->cache_key());
  EXPECT_NE(first->loaded()->cache_key(), (*second)->loaded()->cache_key());
  EXPECT_NE(first->loaded()->cache_key(), exact32->loaded()->cache_key());
}

// Only even ids, and complete after `length` tokens.
class EvenIds : public TokenConstraint {
 public:
  explicit EvenIds(int64_t length, uint32_t word = 0x55555555u) : length_(length), word_(word) {}
  Result<bool> fill(std::vector<uint32_t>& bits) override {
    bits.assign(16, word_);
    return true;
  }
  Result<bool> accept(int32_t token) override {
    --length_;
    return token % 2 == 0;
  }
  Result<bool> finished() override { return length_ <= 0; }

 private:
  int64_t length_;
  uint32_t word_;
};

TEST_P(SchedulerTest, ConstraintsNarrowTheDraw) {
  const auto runtime = open();
  Bench bench(*runtime, {});
  for (float temperature : {0.0f, 1.0f}) {
    EngineRequest r = request(tokens(12), 50);
    r.sampling.temperature = temperature;
    r.constraint = std::make_unique<EvenIds>(9);
    const Answer answer = bench.run(std::move(r));
    EXPECT_EQ(answer.reason, StopReason::kConstraint);
    EXPECT_EQ(answer.ids.size(), 9u);
    EXPECT_TRUE(
        std::all_of(answer.ids.begin(), answer.ids.end(), [](int32_t id) { return id % 2 == 0; }));
  }
  EngineRequest odd = request(tokens(12)), none = request(tokens(12));
  odd.constraint = std::make_unique<EvenIds>(9, 0xAAAAAAAAu);
  none.constraint = std::make_unique<EvenIds>(9, 0u);
  EXPECT_EQ(bench.run(std::move(odd)).status.code(), Code::kInternal);
  EXPECT_EQ(bench.run(std::move(none)).status.code(), Code::kFailedPrecondition);
}

// Never on the thread of the steps, which a mask would hold up.
TEST_P(SchedulerTest, MasksAreFilledBesideTheSteps) {
  class Watched : public EvenIds {
   public:
    Watched() : EvenIds(9) {}
    Result<bool> fill(std::vector<uint32_t>& bits) override {
      EXPECT_NE(std::this_thread::get_id(), steps_);
      return EvenIds::fill(bits);
    }

   private:
    std::thread::id steps_ = std::this_thread::get_id();
  };
  const auto runtime = open();
  Bench bench(*runtime, {.chunk = 5});
  std::vector<EngineRequest> requests = requests_of({12, 3});
  for (EngineRequest& request : requests) {
    request.max_tokens = 50;
    request.constraint = std::make_unique<Watched>();
  }
  for (const Answer& answer : bench.run_all(std::move(requests))) {
    EXPECT_EQ(answer.reason, StopReason::kConstraint);
  }
}

TEST_P(SchedulerTest, StopStringsAreNamed) {
  const auto runtime = open();
  const Answer free = alone(request(tokens(6), 30));
  ASSERT_GT(free.text.size(), 8u);
  EngineRequest r = request(tokens(6), 30);
  r.stop = {"no such text at all", free.text.substr(5, 2)};
  const std::string expected = free.text.substr(0, free.text.find(r.stop[1]));
  Bench bench(*runtime, {});
  const Answer answer = bench.run(std::move(r));
  EXPECT_EQ(answer.reason, StopReason::kStopString);
  EXPECT_EQ(answer.text, expected);
}

// Mode replay: a hit is another approximation than a cold run, but all else holds.
class ReplayModeTest : public T1Fixture {
 protected:
  static std::unique_ptr<Runtime> open() { return T1Fixture::open({.mode = Mode::kReplay}); }
};

TEST_F(ReplayModeTest, AnyBatchAndAnyChunkGivesTheSame) {
  const auto runtime = open();
  const std::vector<int64_t> lengths = {1, 8, 9, 17, 40, 33};
  std::vector<Answer> expected;
  for (int64_t length : lengths) {
    Bench bench(*runtime, {.chunk = 4096, .max_running = 1, .prefix_cache = false});
    expected.push_back(bench.run(request(tokens(length, static_cast<uint64_t>(length)))));
  }
  for (int64_t chunk : {1, 3, 16, 100}) {
    Bench bench(*runtime, {.chunk = chunk, .prefix_cache = false});
    expect_same(bench.run_all(requests_of(lengths)), expected, lengths, chunk);
  }
}

// in mode replay: hits longer than the window are adopted, whatever is there of states,
// and the same hit gives the same.
TEST_F(ReplayModeTest, A20_A21_TheSameHitGivesTheSame) {
  const auto runtime = open();
  for (int64_t states : {0, 100}) {
    for (int64_t length : {17, 24, 33, 48, 100}) {
      Bench bench(*runtime, {.cached_states = states});
      const Answer first = bench.run(request(tokens(length))),
                   second = bench.run(request(tokens(length))),
                   third = bench.run(request(tokens(length)));
      EXPECT_EQ(first.cached, 0);
      EXPECT_EQ(second.cached, (length - 1) / kPage * kPage) << length << " " << states;
      EXPECT_TRUE(second.same(third)) << length << " " << states;
      EXPECT_EQ(third.cached, second.cached);
    }
  }
  // Pages are longer than the window here; a prompt that ends within it finds nothing.
  Bench bench(*runtime, {});
  const Answer cold = bench.run(request(tokens(8)));
  EXPECT_TRUE(bench.run(request(tokens(8))).same(cold));
}

TEST_F(ReplayModeTest, PreemptionChangesNoResult) {
  const auto runtime = open();
  Bench reference(*runtime, {.prefix_cache = false});
  const Answer expected = reference.run(request(tokens(37), 8));
  for (int steps = 1; steps < 12; ++steps) {
    Bench bench(*runtime, {.chunk = 8, .max_running = 1, .prefix_cache = false});
    const RequestId low = bench.add(request(tokens(37), 8));
    for (int i = 0; i < steps; ++i) {
      bench.scheduler().step();
    }
    EngineRequest urgent = request(tokens(9, 5));
    urgent.priority = 1;
    bench.add(std::move(urgent));
    bench.finish();
    EXPECT_TRUE(bench.answer(low).same(expected)) << steps;
  }
}

}  // namespace
}  // namespace cachalot::engine
