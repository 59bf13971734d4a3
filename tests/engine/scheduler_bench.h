// Drives a scheduler and collects what its requests give.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/scheduler.h"
#include "tests/engine/t1_fixture.h"

namespace cachalot::engine {

inline constexpr int64_t kPage = 16;  // of t1

// What a request gave.
struct Answer {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::string text;
  std::vector<std::optional<float>> prompt;
  int64_t cached = -1;
  bool done = false;
  StopReason reason = StopReason::kLength;
  Status status;

  bool same(const Answer& other) const {
    return ids == other.ids && logprobs == other.logprobs && text == other.text &&
           prompt == other.prompt && reason == other.reason && done && other.done;
  }
};

// A scheduler and the answers of its requests.
class Bench {
 public:
  Bench(Runtime& runtime, const EngineOptions& options)
      : scheduler_(std::move(Scheduler::create(runtime, options).value())) {}

  RequestId add(EngineRequest request) {
    EXPECT_TRUE(scheduler_->check(request).ok()) << scheduler_->check(request).message();
    const RequestId id = ++last_;
    scheduler_->add(id, std::move(request), [this](RequestId request_id, Event event) {
      Answer& answer = answers_[request_id];
      EXPECT_FALSE(answer.done || !answer.status.ok()) << "an event behind the last one";
      EXPECT_EQ(event.first, answer.cached < 0);
      if (event.first) {
        answer.cached = event.cached_tokens;
        for (const auto& token : event.prompt) {
          answer.prompt.push_back(token.has_value() ? std::optional(token->logprob) : std::nullopt);
        }
      }
      for (const TokenOutput& token : event.tokens) {
        answer.ids.push_back(token.id);
        answer.logprobs.push_back(token.logprob);
      }
      answer.text += event.text;
      answer.done = event.done;
      answer.reason = event.reason;
      answer.status = event.status;
    });
    return id;
  }

  const Answer& run(EngineRequest request) {
    const RequestId id = add(std::move(request));
    finish();
    return answers_[id];
  }
  // All together; the answers in their order.
  std::vector<Answer> run_all(std::vector<EngineRequest> requests) {
    std::vector<RequestId> ids;
    for (EngineRequest& request : requests) {
      ids.push_back(add(std::move(request)));
    }
    finish();
    std::vector<Answer> answers;
    for (const RequestId id : ids) {
      answers.push_back(answers_[id]);
    }
    return answers;
  }
  void finish() {
    while (!scheduler_->idle()) {
      scheduler_->step();
    }
  }
  bool ended(RequestId id) { return answers_[id].done || !answers_[id].status.ok(); }

  Scheduler& scheduler() { return *scheduler_; }
  EngineStats stats() const { return scheduler_->stats(); }
  const Answer& answer(RequestId id) { return answers_[id]; }
  PoolStats pool(const std::string& name) const {
    for (const PoolStats& pool : scheduler_->stats().pools) {
      if (pool.name == name) {
        return pool;
      }
    }
    return {};
  }

 private:
  std::map<RequestId, Answer> answers_;
  RequestId last_ = 0;
  std::unique_ptr<Scheduler> scheduler_;
};

// A checkpoint whose runtimes are opened in the mode of the test, and the answers in mode exact.
class ModeFixture : public T1Fixture, public testing::WithParamInterface<Mode> {
 protected:
  static void TearDownTestSuite() {
    exact_.reset();
    T1Fixture::TearDownTestSuite();
  }

  static std::unique_ptr<Runtime> open(RuntimeOptions options = {}) {
    options.mode = GetParam();
    return T1Fixture::open(options);
  }
  static Runtime& exact() {
    if (exact_ == nullptr) {
      exact_ = T1Fixture::open();
    }
    return *exact_;
  }
  // The definition: alone, in one chunk, through every layer, no cache.
  static Answer alone(EngineRequest r) {
    Bench bench(exact(), {.chunk = 4096, .max_running = 1, .prefix_cache = false});
    const Answer answer = bench.run(std::move(r));
    EXPECT_TRUE(answer.done) << answer.status.message();
    return answer;
  }

 private:
  static inline std::unique_ptr<Runtime> exact_;
};

inline EngineRequest request(std::vector<int32_t> prompt, int64_t max_tokens = 6) {
  return {.prompt = std::move(prompt),
          .sampling = {.temperature = 0.8f, .seed = 11},
          .max_tokens = max_tokens,
          .ignore_eos = true,
          .logprobs = true};
}

inline std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace cachalot::engine
