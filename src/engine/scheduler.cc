#include "engine/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/clock.h"
#include "base/format.h"
#include "base/math.h"
#include "engine/prompt_images.h"

namespace cachalot::engine {
namespace {

// Waiting requests whose prefixes are read from the stores: enough to have the next ones there in
// time, and few, for what was read lies in memory until they are admitted.
constexpr int kReadAhead = 4;
// How late a caller without a thread of events sees that time has passed.
constexpr std::chrono::milliseconds kPatience{100};

}  // namespace

Scheduler::Scheduler(Runtime& runtime,
                     const EngineOptions& options,
                     std::unique_ptr<kvcache::Tiers> tiers)
    : runtime_(runtime), options_(options), tiers_(std::move(tiers)), encoder_(runtime.options()) {
  stats_.queue_seconds = Histogram::of_latencies();
  stats_.first_token_seconds = Histogram::of_latencies();
  stats_.inter_token_seconds = Histogram::of_latencies();
}

Scheduler::~Scheduler() = default;

Result<std::unique_ptr<Scheduler>> Scheduler::create(Runtime& runtime,
                                                     const EngineOptions& options) {
  if (options.chunk < 1 || options.max_running < 1 || options.max_waiting < 1) {
    return invalid("chunk {}, max_running {} and max_waiting {} must be at least 1",
                   options.chunk,
                   options.max_running,
                   options.max_waiting);
  }
  const int64_t context = runtime.config().max_position_embeddings;
  if (options.max_context < 0 || options.max_context > context) {
    return invalid("max_context is {}, the model's context is {}", options.max_context, context);
  }
  EngineOptions resolved = options;
  resolved.max_context = options.max_context == 0 ? context : options.max_context;
  std::unique_ptr<kvcache::Tiers> tiers;
  if (options.tiers.any() && options.prefix_cache) {
    CACHALOT_TRY(tiers, kvcache::Tiers::open(runtime.layout(), options.tiers));
  }
  std::unique_ptr<Scheduler> scheduler(new Scheduler(runtime, resolved, std::move(tiers)));
  scheduler->on_ready(nullptr);
  CACHALOT_TRY(scheduler->current_, scheduler->make_instance(runtime.loaded()));
  if (scheduler->current_->speculator != nullptr) {
    CACHALOT_TRY(const std::unique_ptr<kvcache::SequenceCache> cache, runtime.make_cache());
    const int64_t block = 1 + runtime.config().dspark_block_size;
    const int64_t pages = std::min(runtime.pages().max_pages(), resolved.max_context);
    const int64_t most_rows = std::min({resolved.max_running * block,
                                        std::max(resolved.chunk, block),
                                        resolved.max_context,
                                        pages * runtime.layout().page_tokens});
    CACHALOT_RETURN_IF_ERROR(scheduler->current_->speculator->calibrate(
        *scheduler->current_->runner, *cache, most_rows));
  }
  return scheduler;
}

// Weights. ----------------------------------------------------------------------------------------

Result<std::shared_ptr<ModelInstance>> Scheduler::make_instance(
    std::shared_ptr<const LoadedModel> loaded) {
  auto instance = std::make_shared<ModelInstance>(
      std::move(loaded), runtime_, options_, tiers_.get(), encoder_);
  CACHALOT_TRY(instance->runner, runtime_.make_runner(*instance->loaded));
  if (!instance->loaded->model().draft.empty()) {
    instance->speculator = std::make_unique<Speculator>(instance->loaded->model().config,
                                                        options_.speculation,
                                                        instance->loaded->draft_temperatures());
  }
  return instance;
}

Status Scheduler::use(std::shared_ptr<const LoadedModel> loaded) {
  CACHALOT_TRY(std::shared_ptr<ModelInstance> next, make_instance(std::move(loaded)));
  if (next->speculator != nullptr) {
    next->speculator->policy().learn_costs(current_->speculator->policy());
  }
  stats_.evictions += current_->prefixes.evictions();
  stats_.images_reused += current_->images.reused();
  ++stats_.weight_swaps;
  current_->retire();
  replaced_.push_back(std::exchange(current_, std::move(next)));
  runtime_.use(current_->loaded);
  return {};
}

Result<std::shared_ptr<ModelInstance>> Scheduler::instance_of(
    const std::shared_ptr<const LoadedModel>& loaded) {
  if (loaded == nullptr || loaded == current_->loaded) {
    return current_;
  }
  for (const std::weak_ptr<ModelInstance>& weak : replaced_) {
    if (std::shared_ptr<ModelInstance> instance = weak.lock();
        instance != nullptr && instance->loaded == loaded) {
      return instance;
    }
  }
  // Replaced, and all others of its requests have ended.
  CACHALOT_TRY(std::shared_ptr<ModelInstance> instance, make_instance(loaded));
  instance->retire();
  replaced_.push_back(instance);
  return instance;
}

// Requests. ---------------------------------------------------------------------------------------

Status Scheduler::check(const EngineRequest& request) const {
  const int64_t vocab = runtime_.config().vocab_size;
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) {
    return invalid("prompt has no tokens");
  }
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= vocab) {
      return invalid("prompt[{}] is token {}, the vocabulary has {}", i, request.prompt[i], vocab);
    }
  }
  if (request.max_tokens < (request.prompt_logprobs ? 0 : 1)) {
    return invalid("max_tokens is {}, must be at least 1", request.max_tokens);
  }
  if (request.top_logprobs < 0 || request.top_logprobs > vocab) {
    return invalid("top_logprobs is {}, must be in [0, {}]", request.top_logprobs, vocab);
  }
  CACHALOT_RETURN_IF_ERROR(check_images(request, runtime_.config(), options_.image_bytes));
  CACHALOT_RETURN_IF_ERROR(validate(request.sampling, vocab));
  const int64_t least = prompt + std::min<int64_t>(request.max_tokens, 1);
  if (least > options_.max_context) {
    return invalid("prompt has {} tokens, the context holds {} with at least one of output",
                   prompt,
                   options_.max_context);
  }
  const int64_t output = std::min(request.max_tokens, options_.max_context - prompt);
  const int64_t pages = pages_for(prompt + std::max<int64_t>(output, 1) - 1);
  if (pages > runtime_.pages().max_pages()) {
    return error(Code::kOutOfRange,
                 "prompt of {} and max_tokens {} can need {} cache pages, there are {}",
                 prompt,
                 request.max_tokens,
                 pages,
                 runtime_.pages().max_pages());
  }
  return {};
}

void Scheduler::add(RequestId id, EngineRequest request, EventSink sink) {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t max_tokens = std::min(request.max_tokens, options_.max_context - prompt);
  const Sequence::Rank rank{-static_cast<int64_t>(request.priority), arrivals_++};
  auto sequence = std::make_unique<Sequence>(id,
                                             std::move(request),
                                             std::move(sink),
                                             rank,
                                             max_tokens,
                                             runtime_.tokenizer(),
                                             runtime_.config().eos_token_id);
  Result<std::shared_ptr<ModelInstance>> instance =
      instance_of(std::exchange(sequence->request.weights, nullptr));
  if (!instance.ok()) {
    finish(*sequence, {.status = instance.status()});
    return;
  }
  sequence->instance = *std::move(instance);
  if (sequence->images.empty()) {
    waiting_.emplace(rank, std::move(sequence));
    return;
  }
  sequence->image_bytes = image_bytes(sequence->request, runtime_.config());
  sequence->first_row = sequence->instance->prefixes.find(*sequence).first_row();
  encoding_.emplace(rank, std::move(sequence));
}

void Scheduler::cancel(RequestId id) {
  for (auto* queue : queues()) {
    for (auto entry = queue->begin(); entry != queue->end(); ++entry) {
      if (entry->second->id == id) {
        finish(*entry->second, {.status = error(Code::kCancelled, "the request was cancelled")});
        queue->erase(entry);
        return;
      }
    }
  }
}

void Scheduler::cancel_all() {
  for (auto* queue : queues()) {
    for (const auto& [rank, sequence] : *queue) {
      finish(*sequence, {.status = error(Code::kCancelled, "the engine stops")});
    }
    queue->clear();
  }
}

void Scheduler::end_expired() {
  const auto now = std::chrono::steady_clock::now();
  for (auto* queue : queues()) {
    std::erase_if(*queue, [&](const auto& entry) {
      Sequence& sequence = *entry.second;
      if (!sequence.request.deadline.has_value() || *sequence.request.deadline > now) {
        return false;
      }
      finish(sequence, {.status = error(Code::kDeadlineExceeded, "the request ran out of time")});
      return true;
    });
  }
}

void Scheduler::finish(Sequence& sequence, Event event) {
  ++(event.status.ok()                         ? stats_.requests_finished
     : event.status.code() == Code::kCancelled ? stats_.requests_cancelled
                                               : stats_.requests_failed);
  sequence.ended = true;
  send(sequence, std::move(event));
}

void Scheduler::send(Sequence& sequence, Event event) {
  if (!sequence.first_sent) {
    sequence.first_sent = true;
    event.first = true;
    event.cached_tokens = sequence.cached_tokens;
    event.queue_seconds = sequence.queue_seconds;
    event.prompt = std::move(sequence.score);
  }
  sequence.sink(sequence.id, std::move(event));
}

void Scheduler::prepare() {
  end_expired();
  current_->prefixes.expire(now_seconds());
  std::erase_if(replaced_, [](const auto& instance) { return instance.expired(); });
  take_encoded();
  admit();
}

// Images. -----------------------------------------------------------------------------------------

Result<bool> Scheduler::has_images(Sequence& sequence) {
  bool ready = true;
  for (size_t i = 0; i < sequence.images.size(); ++i) {
    if (sequence.images[i].end <= sequence.first_row) {
      continue;
    }
    std::shared_ptr<const EncodedImage>& encoded = sequence.encoded[i];
    if (encoded == nullptr) {
      encoded = sequence.instance->images.get(sequence.instance->loaded,
                                              sequence.request.images[i].picture);
    }
    if (!encoded->ready()) {
      ready = false;
    } else {
      CACHALOT_RETURN_IF_ERROR(encoded->rows().status());
      sequence.instance->images.keep(encoded);
    }
  }
  return ready;
}

Result<bool> Scheduler::look_up(Sequence& sequence) {
  if (sequence.load == nullptr) {
    return sequence.read;
  }
  if (awaits_prefix(sequence)) {
    return false;
  }
  PrefixCache& prefixes = sequence.instance->prefixes;
  CACHALOT_RETURN_IF_ERROR(prefixes.absorb(sequence));
  sequence.first_row = prefixes.find(sequence).first_row();
  return true;
}

void Scheduler::take_encoded() {
  int reading = 0;
  for (auto next = encoding_.begin(); next != encoding_.end();) {
    const auto entry = next++;
    Sequence& sequence = *entry->second;
    if (!sequence.read && reading < kReadAhead) {
      sequence.read = true;
      sequence.instance->prefixes.read_ahead(sequence);
    }
    Result<bool> ready = look_up(sequence);
    reading += sequence.load != nullptr ? 1 : 0;
    if (ready.ok() && *ready) {
      ready = has_images(sequence);
    }
    if (!ready.ok()) {
      finish(*entry->second, {.status = ready.status()});
      encoding_.erase(entry);
    } else if (*ready) {
      entry->second->awaits_images = false;
      waiting_.insert(encoding_.extract(entry));
    }
  }
}

// Admission. --------------------------------------------------------------------------------------

int64_t Scheduler::pages_for(int64_t positions) const {
  return ceil_div(positions, runtime_.layout().page_tokens);
}

int64_t Scheduler::pages_missing(const Sequence& sequence) const {
  return pages_for(sequence.most_positions()) - sequence.cache->page_count();
}

void Scheduler::read_ahead() {
  int left = kReadAhead;
  for (auto next = waiting_.begin(); next != waiting_.end() && left > 0; ++next, --left) {
    Sequence& sequence = *next->second;
    if (!std::exchange(sequence.read, true)) {
      sequence.instance->prefixes.read_ahead(sequence);
    }
  }
}

bool Scheduler::awaits_prefix(Sequence& sequence) const {
  if (sequence.load == nullptr || sequence.load->ready()) {
    return false;
  }
  const double now = now_seconds();
  if (sequence.load_awaited == 0) {
    sequence.load_awaited = now;
  }
  return now - sequence.load_awaited < std::chrono::duration<double>(options_.prefix_wait).count();
}

std::map<Sequence::Rank, Scheduler::SequencePtr>::iterator Scheduler::next_to_start() {
  // Room is not what those before it lack. Those behind were not read ahead.
  int left = kReadAhead;
  for (auto next = waiting_.begin(); next != waiting_.end() && left > 0; ++next, --left) {
    if (!awaits_prefix(*next->second)) {
      return next;
    }
  }
  return waiting_.end();
}

bool Scheduler::blocked() {
  return running_.empty() && !idle() && next_to_start() == waiting_.end();
}

void Scheduler::on_ready(std::function<void()> call) {
  const auto tell = [this, call = std::move(call)] {
    {
      const std::lock_guard lock(ready_mutex_);
      ready_ = true;
    }
    ready_changed_.notify_one();
    if (call) {
      call();
    }
  };
  encoder_.on_ready(tell);
  if (tiers_ != nullptr) {
    tiers_->on_loaded(tell);
  }
}

void Scheduler::wait() {
  std::unique_lock lock(ready_mutex_);
  ready_changed_.wait_for(lock, kPatience, [this] { return std::exchange(ready_, false); });
}

void Scheduler::admit() {
  while (!waiting_.empty()) {
    read_ahead();
    const auto next = next_to_start();
    if (next == waiting_.end()) {
      return;
    }
    Sequence& sequence = *next->second;
    bool started = false;
    if (static_cast<int64_t>(running_.size()) < options_.max_running) {
      const Result<bool> result = start(sequence);
      if (!result.ok()) {
        finish(sequence, {.status = result.status()});
        waiting_.erase(next);
        continue;
      }
      started = *result;
    }
    if (sequence.awaits_images) {
      encoding_.insert(waiting_.extract(next));
      continue;
    }
    if (started) {
      auto node = waiting_.extract(next);
      running_.insert(std::move(node));
    } else if (!preempt_below(sequence.request.priority)) {
      // No later request overtakes it, or a large one would wait for ever.
      return;
    }
  }
}

bool Scheduler::fits(const Sequence& sequence, const Prefix& prefix) const {
  int64_t promised =
      pages_for(sequence.most_positions()) - prefix.length / runtime_.layout().page_tokens;
  for (const auto& [rank, other] : running_) {
    promised += pages_missing(*other);
  }
  const kvcache::PagePool& pool = runtime_.pages();
  return pool.pages_free() >= promised - pool.pages_cached();
}

Result<bool> Scheduler::start(Sequence& sequence) {
  const bool resumed = !sequence.saved.empty();
  PrefixCache& prefixes = sequence.instance->prefixes;
  CACHALOT_RETURN_IF_ERROR(prefixes.absorb(sequence));
  Prefix prefix = resumed ? Prefix() : prefixes.find(sequence);
  if (!fits(sequence, prefix)) {
    if (!running_.empty()) {
      return false;
    }
    // What the hit pins is what is missing.
    prefix = prefixes.cold(sequence);
  }
  if (!resumed) {
    // Of what was found at first something may be gone.
    sequence.first_row = prefix.first_row();
    CACHALOT_TRY(const bool shown, has_images(sequence));
    sequence.awaits_images = !shown;
    if (!shown) {
      return false;
    }
  }
  // A partly filled last page is copied, a preempted request brings all of its pages.
  current_->prefixes.make_room(resumed ? pages_for(sequence.most_positions()) : 1);
  Result<std::unique_ptr<kvcache::SequenceCache>> cache = runtime_.make_cache();
  if (!cache.ok()) {
    // Memory itself is short: wait for the others.
    return running_.empty() ? Result<bool>(cache.status()) : Result<bool>(false);
  }
  sequence.cache = *std::move(cache);
  prefixes.begin(sequence, prefix.length);
  Status status =
      resumed ? sequence.cache->restore(sequence.saved) : prefixes.attach(sequence, prefix);
  if (!status.ok()) {
    sequence.cache.reset();
    return status;
  }
  if (!resumed) {
    stats_.replayed_tokens += static_cast<uint64_t>(prefix.length - sequence.length());
  }
  sequence.saved.clear();
  if (!sequence.started) {
    sequence.started = true;
    sequence.queue_seconds = now_seconds() - sequence.submitted;
    stats_.queue_seconds.record(sequence.queue_seconds);
  }
  return true;
}

bool Scheduler::preempt_below(int64_t priority) {
  // The lowest priority, and of that the latest arrival.
  const auto victim = running_.empty() ? running_.end() : std::prev(running_.end());
  if (victim == running_.end() || victim->second->request.priority >= priority) {
    return false;
  }
  Sequence& sequence = *victim->second;
  if (sequence.output.count() > 0) {
    // Whatever the caches hold later, it goes on from exactly this state.
    Result<std::string> saved = sequence.cache->save();
    if (!saved.ok()) {
      finish(sequence, {.status = saved.status()});
      running_.erase(victim);
      return true;
    }
    sequence.saved = *std::move(saved);
  }
  // Nothing of a prompt was sent yet: it starts again, with the prefix cache's help.
  sequence.cache.reset();
  ++stats_.preemptions;
  auto node = running_.extract(victim);
  waiting_.insert(std::move(node));
  return true;
}

EngineStats Scheduler::stats() const {
  EngineStats stats = stats_;
  stats.running = static_cast<int64_t>(running_.size());
  stats.waiting = waiting();
  stats.evictions += current_->prefixes.evictions();
  stats.images_reused += current_->images.reused();
  stats.image_seconds = encoder_.seconds();
  for (const auto* queue : {&encoding_, &waiting_, &running_}) {
    for (const auto& [rank, sequence] : *queue) {
      stats.image_bytes += sequence->image_bytes;
    }
  }
  stats.weights = current_->loaded->fingerprint();
  stats.weight_versions =
      1 + std::count_if(replaced_.begin(), replaced_.end(), [](const auto& instance) {
        return !instance.expired();
      });
  if (tiers_ != nullptr) {
    stats.tiers = tiers_->stats();
  }
  const auto pool = [&](const char* name, const kvcache::PagePool& pages, int64_t total) {
    stats.pools.push_back({.name = name,
                           .in_use = pages.pages_in_use(),
                           .cached = pages.pages_cached(),
                           .total = total});
  };
  const int64_t pages = runtime_.pages().max_pages();
  pool("main", runtime_.pages(), pages == std::numeric_limits<int64_t>::max() ? 0 : pages);
  pool("window", runtime_.states(), options_.max_running + options_.cached_states);
  return stats;
}

}  // namespace cachalot::engine
