#include "engine/engine.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/format.h"
#include "base/log.h"
#include "engine/prompt_images.h"
#include "engine/scheduler.h"

namespace cachalot::engine {
namespace {

// How late a request may end for want of time, or go on without its prefix, while nothing but
// images and stores is at work.
constexpr std::chrono::milliseconds kExpiryInterval{100};

// A Scheduler with a thread of its own. Everything under `mutex_` is shared with the callers;
// everything else belongs to the engine thread.
class ThreadedEngine : public Engine {
 public:
  ThreadedEngine(Runtime& runtime, std::unique_ptr<Scheduler> scheduler)
      : runtime_(runtime),
        options_(scheduler->options()),
        stats_(scheduler->stats()),
        weights_(runtime.loaded()),
        scheduler_(std::move(scheduler)) {
    scheduler_->on_ready([this] {
      {
        const std::lock_guard lock(mutex_);
        ready_ = true;
      }
      wake_.notify_one();
    });
    thread_ = std::thread([this] { run(); });
  }

  ~ThreadedEngine() override {
    {
      const std::lock_guard lock(mutex_);
      draining_ = cancelling_ = stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  Result<RequestId> submit(EngineRequest request, EventSink sink) override {
    CACHALOT_RETURN_IF_ERROR(scheduler_->check(request));
    RequestId id = 0;
    {
      const std::lock_guard lock(mutex_);
      if (draining_) {
        return error(Code::kUnavailable, "the engine takes no new requests");
      }
      // Those that the batch has room for wait, too, until the engine thread comes to them.
      const int64_t present =
          stats_.running + stats_.waiting + static_cast<int64_t>(submitted_.size());
      if (present >= options_.max_present()) {
        return error(Code::kResourceExhausted,
                     "{} requests are running or waiting, try again later",
                     present);
      }
      const int64_t bytes = engine::image_bytes(request, runtime_.config());
      int64_t taken = stats_.image_bytes;
      for (const Submission& s : submitted_) {
        taken += s.image_bytes;
      }
      if (bytes > 0 && taken + bytes > options_.image_bytes) {
        return error(Code::kResourceExhausted,
                     "the images of other requests take {} bytes of memory, try again later",
                     taken);
      }
      id = ++last_id_;
      submitted_.push_back({id, std::move(request), std::move(sink), bytes});
    }
    wake_.notify_one();
    return id;
  }

  void cancel(RequestId id) override {
    {
      const std::lock_guard lock(mutex_);
      cancelled_.push_back(id);
    }
    wake_.notify_one();
  }

  std::shared_ptr<const LoadedModel> weights() const override {
    const std::lock_guard lock(mutex_);
    return weights_;
  }

  Status load_weights(const std::string& directory) override {
    const std::unique_lock loading(loading_, std::try_to_lock);
    if (!loading.owns_lock()) {
      return error(Code::kUnavailable, "other weights are being loaded");
    }
    {
      const std::lock_guard lock(mutex_);
      if (draining_) {
        return error(Code::kUnavailable, "the engine takes no new requests");
      }
      // Three copies of the weights are more than anybody plans for.
      if (stats_.weight_versions > 1) {
        return error(Code::kUnavailable,
                     "requests still run on the weights before the present ones");
      }
    }
    const double begin = now_seconds();
    const Status status = load_and_use(directory);
    if (status.ok()) {
      log_info(
          "weights {} are in use after {:.1f} s", weights()->fingerprint(), now_seconds() - begin);
    } else {
      log_warning("the weights stay as they were: {}", status.message());
    }
    return status;
  }

  EngineStats stats() const override {
    const std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.waiting += static_cast<int64_t>(submitted_.size());
    return stats;
  }
  const EngineOptions& options() const override { return options_; }

  bool drain(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    if (empty_.wait_for(lock, timeout, [&] { return is_empty(); })) {
      return true;
    }
    cancelling_ = true;
    wake_.notify_one();
    empty_.wait(lock, [&] { return is_empty(); });
    return false;
  }

 private:
  struct Submission {
    RequestId id;
    EngineRequest request;
    EventSink sink;
    int64_t image_bytes = 0;
  };

  bool is_empty() const { return submitted_.empty() && stats_.running + stats_.waiting == 0; }

  void publish() {
    EngineStats stats = scheduler_->stats();
    const std::lock_guard lock(mutex_);
    stats_ = std::move(stats);
    if (is_empty()) {
      empty_.notify_all();
    }
  }

  Status load_and_use(const std::string& directory) {
    CACHALOT_TRY(std::shared_ptr<const LoadedModel> loaded, runtime_.load(directory));
    std::unique_lock lock(mutex_);
    next_weights_ = std::move(loaded);
    wake_.notify_one();
    swapped_.wait(lock, [&] { return next_weights_ == nullptr; });
    return swap_status_;
  }

  // On the engine thread, between steps.
  void swap_weights() {
    std::unique_lock lock(mutex_);
    if (next_weights_ == nullptr) {
      return;
    }
    // load_weights() waits, so nothing else changes it meanwhile.
    lock.unlock();
    Status status = scheduler_->use(next_weights_);
    publish();
    lock.lock();
    if (status.ok()) {
      weights_ = std::move(next_weights_);
    }
    next_weights_ = nullptr;
    swap_status_ = std::move(status);
    swapped_.notify_all();
  }

  void run() {
    bool stop = false;
    while (!stop) {
      bool cancel_all = false;
      std::deque<Submission> submitted;
      std::vector<RequestId> cancelled;
      {
        std::unique_lock lock(mutex_);
        const auto told = [&] {
          return !submitted_.empty() || !cancelled_.empty() || cancelling_ ||
                 next_weights_ != nullptr || std::exchange(ready_, false);
        };
        if (scheduler_->blocked()) {
          wake_.wait_for(lock, kExpiryInterval, told);  // requests may run out of time
        } else if (scheduler_->idle()) {
          wake_.wait(lock, told);
        }
        submitted.swap(submitted_);
        cancelled.swap(cancelled_);
        cancel_all = std::exchange(cancelling_, false);
        stop = stopping_;
        // They count as waiting until the scheduler says otherwise.
        stats_.waiting += static_cast<int64_t>(submitted.size());
        for (const Submission& s : submitted) {
          stats_.image_bytes += s.image_bytes;
        }
      }
      for (Submission& s : submitted) {
        scheduler_->add(s.id, std::move(s.request), std::move(s.sink));
      }
      for (RequestId id : cancelled) {
        scheduler_->cancel(id);
      }
      if (cancel_all) {
        scheduler_->cancel_all();
      }
      swap_weights();
      // What is admitted no longer waits, however long the step takes.
      scheduler_->prepare();
      publish();
      scheduler_->run();
      publish();
    }
  }

  Runtime& runtime_;
  EngineOptions options_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;   // the engine thread has something to do
  std::condition_variable empty_;  // all requests have ended
  std::deque<Submission> submitted_;
  std::vector<RequestId> cancelled_;
  bool ready_ = false;  // an image or a prefix
  bool draining_ = false;
  bool cancelling_ = false;
  bool stopping_ = false;
  RequestId last_id_ = 0;
  EngineStats stats_;
  std::shared_ptr<const LoadedModel> weights_;       // in use
  std::shared_ptr<const LoadedModel> next_weights_;  // until the engine thread uses them
  Status swap_status_;                               // what came of it
  std::condition_variable swapped_;
  std::mutex loading_;  // of load_weights()

  std::unique_ptr<Scheduler> scheduler_;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Engine>> Engine::start(Runtime& runtime, const EngineOptions& options) {
  CACHALOT_TRY(std::unique_ptr<Scheduler> scheduler, Scheduler::create(runtime, options));
  return std::unique_ptr<Engine>(std::make_unique<ThreadedEngine>(runtime, std::move(scheduler)));
}

}  // namespace cachalot::engine
