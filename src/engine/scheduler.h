// Which rows of which requests run in the next step, and what becomes of their results.
//
// A request waits, runs and ends. It is admitted once its worst case fits: pages are promised, not
// yet taken, so a running request never fails for want of one. A step takes one row of every
// request that decodes and up to `chunk` rows of prompts. Half of these go to the request that
// came first, half to the one with the least left, so that neither a long prompt nor a stream of
// short ones starves the other.
//
// A request with images waits apart until the vision tower has made their rows, as far as no cache
// answers them; requests that came later go on meanwhile.
//
// Every request belongs to the weights that were in use when it came. After a swap the steps of
// both versions take turns until the last request of the old one has ended.
//
// Nothing here changes a result: a row's values depend on its own request alone, wherever its
// prompt was cut, whatever ran beside it, and whether its rows were computed or found in a cache.
//
// Not thread-safe: engine.cc gives it a thread, generator.cc drives it directly.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/image_encoder.h"
#include "engine/logits.h"
#include "engine/model_instance.h"
#include "engine/runtime.h"
#include "engine/sequence.h"
#include "kvcache/tiers.h"
#include "model/observer.h"
#include "model/step.h"

namespace cachalot::engine {

class Scheduler {
 public:
  static Result<std::unique_ptr<Scheduler>> create(Runtime& runtime, const EngineOptions& options);
  ~Scheduler();

  // As Engine::submit() promises; reads nothing that changes.
  Status check(const EngineRequest& request) const;
  // Queues a checked request. Its events go to `sink` from step() and cancel().
  void add(RequestId id, EngineRequest request, EventSink sink);
  // Between steps. The last event is kCancelled; unknown ids are ignored.
  void cancel(RequestId id);
  void cancel_all();

  // Nothing runs and nothing waits.
  bool idle() const { return running_.empty() && waiting_.empty() && encoding_.empty(); }
  int64_t waiting() const { return std::ssize(waiting_) + std::ssize(encoding_); }
  // There is nothing to do until an image or a prefix is ready, time passes, or the scheduler is
  // told something new.
  bool blocked();
  // Called on another thread whenever an image or a prefix is ready. Before the first add().
  void on_ready(std::function<void()> call);

  // Ends what is out of time and admits what fits.
  void prepare();
  // Runs one step of what was admitted. With an observer every row of a prompt has logits, which
  // the observer is shown, and only one request may be here.
  void run(model::Observer* observer = nullptr);
  void step(model::Observer* observer = nullptr) {
    prepare();
    if (blocked()) {
      wait();
    }
    run(observer);
  }

  // Requests that are added from here on run on these weights, which Runtime::load() gave; those
  // that are here end on the ones they began on. An error leaves everything as it was.
  Status use(std::shared_ptr<const LoadedModel> loaded);

  EngineStats stats() const;
  const EngineOptions& options() const { return options_; }

 private:
  using SequencePtr = std::unique_ptr<Sequence>;

  // For callers without a thread of events: until an image or a prefix is ready, or a while.
  void wait();

  Scheduler(Runtime& runtime, const EngineOptions& options, std::unique_ptr<kvcache::Tiers> tiers);

  // Weights, requests and admission: scheduler.cc.
  Result<std::shared_ptr<ModelInstance>> make_instance(std::shared_ptr<const LoadedModel> loaded);
  // Null: of the weights in use.
  Result<std::shared_ptr<ModelInstance>> instance_of(
      const std::shared_ptr<const LoadedModel>& loaded);
  // Every request that is here, by where it is.
  auto queues() { return std::array{&encoding_, &waiting_, &running_}; }
  void end_expired();
  // Asks for the rows of the images that the request lacks. True: it has all of them.
  Result<bool> has_images(Sequence& sequence);
  // Takes what the stores have of a request's prompt, so that no image is encoded that it covers.
  // False: it is still being read, or was not asked for.
  Result<bool> look_up(Sequence& sequence);
  // Whether a request is to wait for what the stores have of its prompt, from now on for
  // EngineOptions::prefix_wait.
  bool awaits_prefix(Sequence& sequence) const;
  // Lets requests wait for room whose images are ready.
  void take_encoded();
  // Asks the stores for the prefixes of the requests that are next.
  void read_ahead();
  void admit();
  // The first request whose prefix is not being read.
  std::map<Sequence::Rank, SequencePtr>::iterator next_to_start();
  // Whether the worst case fits beside what is promised to others.
  bool fits(const Sequence& sequence, const Prefix& prefix) const;
  // Takes what was read of its prefix. False: there is no room now, or it awaits images.
  Result<bool> start(Sequence& sequence);
  bool preempt_below(int64_t priority);
  // Pages that a request can still need.
  int64_t pages_missing(const Sequence& sequence) const;
  int64_t pages_for(int64_t positions) const;
  // The last event of a sequence; it leaves `running_` at the end of the step.
  void finish(Sequence& sequence, Event event);
  void send(Sequence& sequence, Event event);

  // Steps: scheduler_step.cc.
  void share_chunk();
  Status reserve(Sequence& sequence, int64_t positions);
  void run(ModelInstance& instance, model::Observer* observer);
  // Gives every sequence of the instance that decodes its drafts.
  Status propose(ModelInstance& instance);
  Status run_batch(ModelInstance& instance,
                   std::span<Sequence* const> members,
                   std::span<const model::StepSequence> batch,
                   model::Observer* observer);
  // The next tokens of a sequence with drafts, from the logits of its rows. Returns how many of the
  // rows hold: that of its newest token and those of the drafts that were kept.
  int32_t judge_drafts(Sequence& sequence, const StepLogits& logits, int64_t first_row);
  // Hands out what rows [first_row, first_row + rows) of the logits say, those of the sequence's
  // last rows.
  void deliver(Sequence& sequence, const StepLogits& logits, int64_t first_row, int64_t rows);

  Runtime& runtime_;
  EngineOptions options_;
  std::mutex ready_mutex_;
  std::condition_variable ready_changed_;
  bool ready_ = false;                     // an image or a prefix, since the last wait()
  std::unique_ptr<kvcache::Tiers> tiers_;  // null: none
  std::shared_ptr<ModelInstance> current_;
  std::vector<std::weak_ptr<ModelInstance>> replaced_;  // held by their requests
  ImageEncoder encoder_;
  std::map<Sequence::Rank, SequencePtr> encoding_;  // wait for images
  std::map<Sequence::Rank, SequencePtr> waiting_;   // wait for room
  std::map<Sequence::Rank, SequencePtr> running_;
  uint64_t arrivals_ = 0;
  EngineStats stats_;
};

}  // namespace cachalot::engine
