// An engine that says what a test wants: every request is answered with scripted tokens, on a
// thread of its own as the real one does it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/engine.h"
#include "engine/stop_matcher.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"

namespace cachalot::server {

constexpr int32_t kFirstByte = 3;  // of the byte-level tokenizer: its single bytes

class FakeEngine final : public engine::Engine {
 public:
  // The whole output of a request, EOS at its end if it has one. After the last token of a script
  // without EOS the request hangs until it is cancelled.
  using Script = std::function<std::vector<int32_t>(const engine::EngineRequest&)>;

  explicit FakeEngine(const text::Tokenizer& tokenizer)
      : tokenizer_(tokenizer), thread_([this] { run(); }) {}

  ~FakeEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // ---- what tests set and read ----

  void set_script(Script script) {
    const std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  // `text` with the spellings of control tokens, one token per byte where `bytes` is set.
  void say(const std::string& text, bool bytes = false) {
    std::vector<int32_t> ids = *tokenizer_.encode_with_specials(text);
    if (bytes) {
      std::vector<int32_t> single;
      for (const int32_t id : ids) {
        if (tokenizer_.is_control(id)) {
          single.push_back(id);
          continue;
        }
        for (const char byte : tokenizer_.token_bytes(id)) {
          single.push_back(kFirstByte + static_cast<uint8_t>(byte));
        }
      }
      ids = single;
    }
    ids.push_back(*tokenizer_.eos_id());
    set_script([ids](const engine::EngineRequest&) { return ids; });
  }
  void refuse(Status status) {
    const std::lock_guard lock(mutex_);
    refusal_ = std::move(status);
  }
  // Fails every request after this many tokens.
  void fail_after(int64_t tokens, Status status) {
    const std::lock_guard lock(mutex_);
    fail_after_ = tokens;
    failure_ = std::move(status);
  }
  void set_tokens_per_event(int64_t count) { tokens_per_event_ = count; }
  void set_cached(int64_t count) { cached_ = count; }
  int64_t cancelled() const { return cancelled_; }
  int64_t running() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(running_.size());
  }
  // Of the last request.
  std::vector<int32_t> prompt() const {
    const std::lock_guard lock(mutex_);
    return last_prompt_;
  }
  std::vector<uint64_t> seeds() const {
    const std::lock_guard lock(mutex_);
    return seeds_;
  }
  std::vector<engine::PromptImage> images() const {
    const std::lock_guard lock(mutex_);
    return last_images_;
  }
  engine::SamplingParams sampling() const {
    const std::lock_guard lock(mutex_);
    return last_sampling_;
  }
  int64_t max_tokens() const {
    const std::lock_guard lock(mutex_);
    return last_max_tokens_;
  }
  int priority() const {
    const std::lock_guard lock(mutex_);
    return last_priority_;
  }
  std::optional<std::chrono::steady_clock::time_point> deadline() const {
    const std::lock_guard lock(mutex_);
    return last_deadline_;
  }

  // ---- Engine ----

  Result<engine::RequestId> submit(engine::EngineRequest request, engine::EventSink sink) override {
    const std::lock_guard lock(mutex_);
    if (!refusal_.ok()) {
      return refusal_;
    }
    if (draining_) {
      return Status(Code::kUnavailable, "draining");
    }
    const engine::RequestId id = next_id_++;
    last_prompt_ = request.prompt;
    last_images_ = request.images;
    last_sampling_ = request.sampling;
    last_max_tokens_ = request.max_tokens;
    last_priority_ = request.priority;
    last_deadline_ = request.deadline;
    seeds_.push_back(request.sampling.seed);
    auto run = std::make_unique<Running>(request, tokenizer_);
    run->tokens = script_(request);
    run->request = std::move(request);
    run->sink = std::move(sink);
    running_[id] = std::move(run);
    changed_.notify_all();
    return id;
  }

  void cancel(engine::RequestId id) override {
    const std::lock_guard lock(mutex_);
    const auto found = running_.find(id);
    if (found != running_.end()) {
      found->second->cancelled = true;
      changed_.notify_all();
    }
  }

  std::shared_ptr<const engine::LoadedModel> weights() const override { return nullptr; }
  Status load_weights(const std::string& directory) override {
    const std::lock_guard lock(mutex_);
    if (refusal_.ok()) {
      weights_ = directory;
    }
    return refusal_;
  }

  engine::EngineStats stats() const override {
    engine::EngineStats out;
    out.running = running();
    {
      const std::lock_guard lock(mutex_);
      out.weights = weights_;
    }
    out.requests_cancelled = static_cast<uint64_t>(cancelled());
    out.prompt_tokens = 100;
    out.cached_tokens = 25;
    out.pools = {{.name = "main", .in_use = 3, .total = 10},
                 {.name = "window", .in_use = 1, .total = 4}};
    out.tiers = {{.name = "disk", .hits = 4, .faults = 1}};
    out.queue_seconds = {{0.1, 1}, {1, 2, 3}, 7.5};
    return out;
  }
  const engine::EngineOptions& options() const override { return options_; }
  bool drain(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    const bool clean = changed_.wait_for(lock, timeout, [this] { return running_.empty(); });
    for (auto& [id, run] : running_) {
      run->cancelled = true;
    }
    changed_.notify_all();
    return clean;
  }

 private:
  struct Running {
    Running(const engine::EngineRequest& r, const text::Tokenizer& tokenizer)
        : detokenizer(tokenizer), stops(r.stop) {}
    engine::EngineRequest request;
    engine::EventSink sink;
    std::vector<int32_t> tokens;
    size_t at = 0;
    int64_t emitted = 0;
    bool begun = false;
    bool cancelled = false;
    text::Detokenizer detokenizer;
    engine::StopMatcher stops;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      std::vector<engine::RequestId> ids;
      for (const auto& [id, run] : running_) {
        if (run->at < run->tokens.size() || !run->begun || run->cancelled) {
          ids.push_back(id);
        }
      }
      if (ids.empty()) {
        changed_.wait(lock);
        continue;
      }
      for (const engine::RequestId id : ids) {
        Running& run = *running_[id];
        engine::Event event = step(run);
        const engine::EventSink sink = run.sink;
        if (event.done || !event.status.ok()) {
          running_.erase(id);
          changed_.notify_all();
        }
        lock.unlock();
        sink(id, std::move(event));
        lock.lock();
      }
    }
  }

  engine::TokenOutput output(const engine::EngineRequest& request, int32_t id) const {
    engine::TokenOutput out;
    out.id = id;
    out.logprob = -0.5f;
    for (int64_t i = 0; i < request.top_logprobs; ++i) {
      out.top.emplace_back(static_cast<int32_t>((id + i) % tokenizer_.vocab_size()),
                           -0.5f - static_cast<float>(i));
    }
    return out;
  }

  engine::Event step(Running& run) {
    engine::Event event;
    if (run.cancelled) {
      ++cancelled_;
      event.status = Status(Code::kCancelled, "cancelled");
      return event;
    }
    event.first = !std::exchange(run.begun, true);
    if (event.first) {
      event.cached_tokens = cached_;
      for (size_t i = 0; run.request.prompt_logprobs && i < run.request.prompt.size(); ++i) {
        if (i == 0) {
          event.prompt.emplace_back();
        } else {
          event.prompt.emplace_back(output(run.request, run.request.prompt[i]));
        }
      }
    }
    if (run.request.max_tokens == 0) {
      event.done = true;
      return event;
    }
    for (int64_t i = 0; i < tokens_per_event_ && run.at < run.tokens.size(); ++i) {
      if (fail_after_ >= 0 && run.emitted >= fail_after_) {
        event.status = failure_;
        return event;
      }
      const Result<int32_t> drawn = constrained(run, run.tokens[run.at++]);
      if (!drawn.ok()) {
        event.status = drawn.status();
        return event;
      }
      const int32_t id = *drawn;
      const std::vector<int32_t>& stop_ids = run.request.stop_ids;
      const bool eos = id == *tokenizer_.eos_id() && !run.request.ignore_eos;
      if (eos || std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end()) {
        event.text += run.stops.push(run.detokenizer.finish()) + run.stops.finish();
        event.done = true;
        event.reason = engine::StopReason::kEos;
        return event;
      }
      event.tokens.push_back(output(run.request, id));
      ++run.emitted;
      event.text += run.stops.push(run.detokenizer.push(id));
      if (run.stops.stopped()) {
        event.done = true;
        event.reason = engine::StopReason::kStopString;
        event.stop_string = run.request.stop.front();
        return event;
      }
      const Result<bool> complete =
          run.request.constraint != nullptr ? run.request.constraint->finished() : false;
      if (!complete.ok()) {
        event.status = complete.status();
        return event;
      }
      if (*complete || run.emitted == run.request.max_tokens) {
        event.text += run.stops.push(run.detokenizer.finish()) + run.stops.finish();
        event.done = true;
        event.reason = *complete ? engine::StopReason::kConstraint : engine::StopReason::kLength;
        return event;
      }
    }
    return event;
  }

  // The scripted token if the constraint allows it, else the first that it allows.
  Result<int32_t> constrained(Running& run, int32_t wanted) const {
    engine::TokenConstraint* constraint = run.request.constraint.get();
    if (constraint == nullptr) {
      return wanted;
    }
    std::vector<uint32_t> bits;
    CACHALOT_TRY(const bool masked, constraint->fill(bits));
    if (masked) {
      const auto allowed = [&](int32_t id) {
        return (bits[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
      };
      for (int32_t id = 0; !allowed(wanted) && id < tokenizer_.vocab_size(); ++id) {
        wanted = allowed(id) ? id : wanted;
      }
      CACHALOT_CHECK(allowed(wanted), wanted);
    }
    if (wanted != *tokenizer_.eos_id()) {
      CACHALOT_TRY(const bool accepted, constraint->accept(wanted));
      CACHALOT_CHECK(accepted, wanted);
    }
    return wanted;
  }

  const text::Tokenizer& tokenizer_;
  engine::EngineOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Script script_ = [](const engine::EngineRequest&) { return std::vector<int32_t>(); };
  Status refusal_;
  std::string weights_ = "first";
  int64_t fail_after_ = -1;
  Status failure_;
  std::atomic<int64_t> tokens_per_event_ = 1;
  std::atomic<int64_t> cached_ = 0;
  std::atomic<int64_t> cancelled_ = 0;
  std::map<engine::RequestId, std::unique_ptr<Running>> running_;
  engine::RequestId next_id_ = 1;
  std::vector<int32_t> last_prompt_;
  std::vector<engine::PromptImage> last_images_;
  engine::SamplingParams last_sampling_;
  int64_t last_max_tokens_ = 0;
  int last_priority_ = 0;
  std::optional<std::chrono::steady_clock::time_point> last_deadline_;
  std::vector<uint64_t> seeds_;
  bool draining_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cachalot::server
