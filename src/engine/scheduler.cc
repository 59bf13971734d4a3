#include "engine/scheduler.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/format.h"

namespace cachalot::engine {
namespace {

using Clock = std::chrono::steady_clock;

// Window states are kept at every second page of a prompt at first, then at an eighth of the
// position: a shared prefix is found at nearly its length, and a long prompt does not crowd out the
// states of others.
constexpr int64_t kLeastStatePages = 2;

bool keeps_state_after(int64_t pages) {
  const auto eighth = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(pages / 8)));
  return pages % std::max(kLeastStatePages, eighth) == 0;
}

Histogram make_histogram() {
  Histogram histogram;
  // 1 ms to 1000 s, three per decade.
  for (double decade = 1e-3; decade < 1e3; decade *= 10) {
    for (double step : {1.0, 2.0, 5.0}) {
      histogram.bounds.push_back(decade * step);
    }
  }
  histogram.counts.resize(histogram.bounds.size() + 1);
  return histogram;
}

void record(Histogram& histogram, double seconds) {
  const auto bound = std::lower_bound(histogram.bounds.begin(), histogram.bounds.end(), seconds);
  ++histogram.counts[static_cast<size_t>(bound - histogram.bounds.begin())];
  histogram.sum += seconds;
}

// Shows a draft block behind `anchor` and the best tokens of its positions.
Status visit_drafts(model::StepRunner& runner,
                    const model::StepSequence& anchor,
                    int64_t block,
                    model::Observer& observer) {
  CACHALOT_RETURN_IF_ERROR(runner.draft({&anchor, 1}, &observer));
  const auto first = static_cast<int32_t>(anchor.view->length);
  const model::ObservedRows where{.row_begin = {}, .start = {&first, 1}};
  int32_t previous = anchor.tokens[0];
  std::vector<int32_t> best;
  std::vector<float> confidence;
  for (int64_t k = 0; k < block; ++k) {
    CACHALOT_TRY(const model::DraftLogits next, runner.next_draft({&previous, 1}));
    const float temperature = 1.0f;
    CACHALOT_TRY(const model::TopLogits top, runner.top_logits(next.logits, 1, {&temperature, 1}));
    CACHALOT_TRY(const TensorView logits, runner.on_host(next.logits));
    observer.visit("mtp.logits", logits, where);
    confidence.push_back(next.confidence.as<float>()[0]);
    previous = top.id.as<int32_t>()[0];
    best.push_back(previous);
  }
  observer.visit("mtp.confidence", {confidence.data(), DType::kF32, {1, block}}, where);
  observer.visit("mtp.tokens", {best.data(), DType::kI32, {1, block}}, where);
  return {};
}

std::span<const int32_t> page_of(std::span<const int32_t> tokens,
                                 int64_t index,
                                 int64_t page_tokens) {
  return tokens.subspan(static_cast<size_t>(index * page_tokens), static_cast<size_t>(page_tokens));
}

}  // namespace

struct Scheduler::Sequence {
  Sequence(RequestId id_,
           EngineRequest request_,
           EventSink sink_,
           Rank rank_,
           int64_t max_tokens_,
           const text::Tokenizer& tokenizer,
           int64_t eos)
      : id(id_),
        request(std::move(request_)),
        sink(std::move(sink_)),
        rank(rank_),
        prompt(static_cast<int64_t>(request.prompt.size())),
        max_tokens(max_tokens_),
        output(request, tokenizer, max_tokens, static_cast<int32_t>(eos)),
        submitted(now_seconds()),
        tokens(std::move(request.prompt)) {}

  RequestId id;
  EngineRequest request;
  EventSink sink;
  Rank rank;
  int64_t prompt;      // tokens of the prompt
  int64_t max_tokens;  // of output, as far as the context allows
  Output output;
  double submitted;

  std::vector<int32_t> tokens;                    // the prompt and the output so far
  std::vector<std::optional<TokenOutput>> score;  // of the prompt, where asked for
  std::unique_ptr<kvcache::SequenceCache> cache;  // while running
  std::string saved;                              // of a request preempted between output tokens
  int64_t cached_tokens = 0;
  model::Replay replay;
  std::shared_ptr<const kvcache::Tiers::Load> load;  // of its prefix, until it was absorbed
  int64_t loaded_from = 0;                           // the first page that it looks for

  // What of it is in the prefix index: the key of the first `kept_pages` pages. `keeping` is false
  // once a page could not be kept.
  kvcache::PrefixKey kept;
  int64_t kept_pages = 0;
  bool keeping = false;
  // The longest prefix in the index, where others will want to go on.
  int64_t shared_prefix = 0;

  Proposal drafts;                 // of the next step, behind the newest token
  std::vector<int32_t> draft_row;  // that token and its drafts, the rows of that step
  Event drafted;                   // what they gave
  int64_t rows = 0;                // of the next step
  int64_t stop = 0;                // where its chunk must end at the latest
  bool started = false;
  bool first_sent = false;
  bool ended = false;
  double queue_seconds = 0;
  double last_token = 0;

  int64_t length() const { return cache->view().length; }
  int64_t left() const { return static_cast<int64_t>(tokens.size()) - length(); }
  bool decodes() const { return output.count() > 0 && left() == 1; }
  // Positions that it can come to hold: the last output token is never run.
  int64_t most_positions() const { return prompt + std::max<int64_t>(max_tokens, 1) - 1; }
};

Scheduler::Scheduler(Runtime& runtime, const EngineOptions& options)
    : runtime_(runtime),
      options_(options),
      prefixes_({.page_tokens = runtime.layout().page_tokens,
                 .max_states = options.cached_states,
                 .state_ttl = static_cast<double>(options.state_ttl.count()),
                 .root = runtime.cache_key()}),
      replay_(runtime.model(), runtime.options().mode) {
  stats_.queue_seconds = make_histogram();
  stats_.first_token_seconds = make_histogram();
  stats_.inter_token_seconds = make_histogram();
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
  const int64_t context = runtime.model().config.max_position_embeddings;
  if (options.max_context < 0 || options.max_context > context) {
    return invalid("max_context is {}, the model's context is {}", options.max_context, context);
  }
  EngineOptions resolved = options;
  resolved.max_context = options.max_context == 0 ? context : options.max_context;
  std::unique_ptr<Scheduler> scheduler(new Scheduler(runtime, resolved));
  CACHALOT_TRY(scheduler->runner_, runtime.make_runner());
  if (!runtime.model().draft.empty()) {
    scheduler->speculator_ =
        std::make_unique<Speculator>(runtime.model().config, options.speculation);
    CACHALOT_TRY(const std::unique_ptr<kvcache::SequenceCache> cache, runtime.make_cache());
    CACHALOT_RETURN_IF_ERROR(scheduler->speculator_->calibrate(*scheduler->runner_, *cache));
  }
  if (options.tiers.any() && options.prefix_cache) {
    CACHALOT_TRY(scheduler->tiers_, kvcache::Tiers::open(runtime.layout(), options.tiers));
  }
  return scheduler;
}

// Requests. ---------------------------------------------------------------------------------------

Status Scheduler::check(const EngineRequest& request) const {
  const int64_t vocab = runtime_.model().config.vocab_size;
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
  const Rank rank{-static_cast<int64_t>(request.priority), arrivals_++};
  auto sequence = std::make_unique<Sequence>(id,
                                             std::move(request),
                                             std::move(sink),
                                             rank,
                                             max_tokens,
                                             runtime_.tokenizer(),
                                             runtime_.model().config.eos_token_id);
  if (tiers_ != nullptr && !sequence->request.prompt_logprobs) {
    read_ahead(*sequence);
  }
  waiting_.emplace(rank, std::move(sequence));
}

void Scheduler::cancel(RequestId id) {
  for (auto* queue : {&waiting_, &running_}) {
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
  for (auto* queue : {&waiting_, &running_}) {
    for (const auto& [rank, sequence] : *queue) {
      finish(*sequence, {.status = error(Code::kCancelled, "the engine stops")});
    }
    queue->clear();
  }
}

void Scheduler::end_expired() {
  const Clock::time_point now = Clock::now();
  for (auto* queue : {&waiting_, &running_}) {
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

// Admission. --------------------------------------------------------------------------------------

int64_t Scheduler::pages_for(int64_t positions) const {
  const int64_t page = runtime_.layout().page_tokens;
  return (positions + page - 1) / page;
}

int64_t Scheduler::pages_missing(const Sequence& sequence) const {
  return pages_for(sequence.most_positions()) - sequence.cache->page_count();
}

void Scheduler::admit() {
  while (!waiting_.empty()) {
    const auto next = waiting_.begin();
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
    if (started) {
      auto node = waiting_.extract(next);
      running_.insert(std::move(node));
    } else if (!preempt_below(sequence.request.priority)) {
      // No later request overtakes it, or a large one would wait for ever.
      return;
    }
  }
}

Scheduler::Prefix Scheduler::find_prefix(Sequence& sequence) {
  // Log-probabilities of the prompt come from running it, through every layer.
  if (sequence.request.prompt_logprobs) {
    return {};
  }
  Prefix prefix{.replay = replay_.cold(sequence.prompt)};
  if (!options_.prefix_cache) {
    return prefix;
  }
  // At least one token is left to run, for its logits.
  const std::span<const int32_t> tokens(sequence.tokens.data(), sequence.tokens.size() - 1);
  const auto serves = [&](int64_t position, int64_t rows_from) {
    return replay_.serves(sequence.prompt, position, rows_from);
  };
  kvcache::PrefixIndex::Match match = prefixes_.find(tokens, serves, now_seconds());
  const int64_t page_tokens = runtime_.layout().page_tokens;
  sequence.shared_prefix = static_cast<int64_t>(match.pages.size()) * page_tokens;
  const model::Replay replay = replay_.from_rows(sequence.prompt, sequence.shared_prefix);
  const int64_t position = match.state.has_value() ? match.state->position : 0;
  if (replay.encoder_from > position) {
    // Even with the rows that run again, less is left to run than behind the state.
    return {.length = sequence.shared_prefix, .pages = std::move(match.pages), .replay = replay};
  }
  if (match.state.has_value()) {
    prefix.length = position;
    prefix.pages = std::move(match.pages);
    prefix.pages.resize(static_cast<size_t>(position / page_tokens));
    if (match.state->tail) {
      prefix.pages.push_back(match.state->tail);
    }
    prefix.state = match.state->state;
    prefix.replay = replay_.from_state(sequence.prompt, position, match.state->decoder_from);
  }
  return prefix;
}

Status Scheduler::attach(Sequence& sequence, const Prefix& prefix) {
  sequence.score.clear();
  sequence.cached_tokens = prefix.length;
  sequence.replay = prefix.replay;
  if (prefix.length == 0) {
    return {};
  }
  CACHALOT_RETURN_IF_ERROR(sequence.cache->adopt(prefix.pages, prefix.length));
  int64_t from = prefix.replay.encoder_from;
  if (prefix.state) {
    CACHALOT_RETURN_IF_ERROR(sequence.cache->load_state(prefix.state));
    from = prefix.length;
  }
  ops::SequenceView& view = sequence.cache->view();
  view.length = from;
  view.lookback = model::engram_lookback(
      runtime_.model(), std::span<const int32_t>(sequence.tokens).first(static_cast<size_t>(from)));
  stats_.replayed_tokens += static_cast<uint64_t>(prefix.length - from);
  return {};
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
  if (sequence.load != nullptr) {
    if (!sequence.load->ready() && !running_.empty()) {
      return false;
    }
    CACHALOT_RETURN_IF_ERROR(absorb(sequence.load->wait(), sequence.loaded_from));
    sequence.load.reset();
  }
  Prefix prefix = resumed ? Prefix() : find_prefix(sequence);
  if (!fits(sequence, prefix)) {
    if (!running_.empty()) {
      return false;
    }
    // What the hit pins is what is missing.
    prefix = {.replay = replay_.cold(sequence.prompt)};
  }
  const int64_t page_tokens = runtime_.layout().page_tokens;
  // A partly filled last page is copied, a preempted request brings all of its pages.
  make_room(resumed ? pages_for(sequence.most_positions()) : 1);
  Result<std::unique_ptr<kvcache::SequenceCache>> cache = runtime_.make_cache();
  if (!cache.ok()) {
    // Memory itself is short: wait for the others.
    return running_.empty() ? Result<bool>(cache.status()) : Result<bool>(false);
  }
  sequence.cache = *std::move(cache);
  sequence.keeping = options_.prefix_cache;
  sequence.kept = prefixes_.root();
  sequence.kept_pages = 0;
  for (; (sequence.kept_pages + 1) * page_tokens <= prefix.length; ++sequence.kept_pages) {
    sequence.kept = sequence.kept.then(page_of(sequence.tokens, sequence.kept_pages, page_tokens));
  }
  Status status = resumed ? sequence.cache->restore(sequence.saved) : attach(sequence, prefix);
  if (!status.ok()) {
    sequence.cache.reset();
    return status;
  }
  sequence.saved.clear();
  if (!sequence.started) {
    sequence.started = true;
    sequence.queue_seconds = now_seconds() - sequence.submitted;
    record(stats_.queue_seconds, sequence.queue_seconds);
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

void Scheduler::make_room(int64_t pages) {
  while (runtime_.pages().pages_free() < pages && prefixes_.evict()) {
  }
}

// Steps. ------------------------------------------------------------------------------------------

void Scheduler::prepare() {
  end_expired();
  prefixes_.expire(now_seconds());
  admit();
}

int64_t Scheduler::next_stop(const Sequence& sequence) const {
  const auto end = static_cast<int64_t>(sequence.tokens.size());
  if (!sequence.keeping || options_.cached_states == 0 || sequence.output.count() > 0) {
    return end;
  }
  const int64_t page_tokens = runtime_.layout().page_tokens;
  // The same prompt again can go on after its last whole page at best.
  const int64_t last = (sequence.prompt - 1) / page_tokens;
  // No earlier than behind what runs again: there the windows are full.
  const int64_t from = std::max(sequence.length(), sequence.replay.stored);
  for (int64_t pages = from / page_tokens + 1; pages <= last; ++pages) {
    if (keeps_state_after(pages) || pages == last ||
        pages * page_tokens == sequence.shared_prefix) {
      return pages * page_tokens;
    }
  }
  return end;
}

void Scheduler::share_chunk() {
  std::vector<Sequence*> prompts;  // in the order of rank
  for (const auto& [rank, sequence] : running_) {
    sequence->rows = sequence->decodes() ? 1 : 0;
    if (!sequence->decodes()) {
      sequence->stop = next_stop(*sequence);
      prompts.push_back(sequence.get());
    }
  }
  int64_t left = options_.chunk;
  const auto give = [&](const std::vector<Sequence*>& order, int64_t rows) {
    for (Sequence* sequence : order) {
      const int64_t wanted = sequence->stop - sequence->length() - sequence->rows;
      const int64_t n = std::min(rows, wanted);
      sequence->rows += n;
      rows -= n;
      left -= n;
    }
  };
  std::vector<Sequence*> shortest = prompts;
  std::stable_sort(shortest.begin(), shortest.end(), [](const Sequence* a, const Sequence* b) {
    return std::pair(a->rank.first, a->left()) < std::pair(b->rank.first, b->left());
  });
  give(prompts, (left + 1) / 2);
  give(shortest, left);
}

Status Scheduler::reserve(Sequence& sequence, int64_t positions) {
  make_room(pages_for(positions) - sequence.cache->page_count());
  for (;;) {
    Status status = sequence.cache->reserve(positions);
    // A pool without bound ends where memory does.
    if (status.code() != Code::kResourceExhausted || !prefixes_.evict()) {
      return status;
    }
  }
}

Status Scheduler::propose() {
  std::vector<Speculator::Member> members;
  std::vector<Sequence*> decoding;
  for (const auto& [rank, sequence] : running_) {
    if (sequence->decodes()) {
      members.push_back({.view = &sequence->cache->view(),
                         .anchor = sequence->tokens.back(),
                         .sampler = &sequence->output.sampler(),
                         // Admission has promised room for no more.
                         .most = sequence->most_positions() - sequence->length() - 1,
                         .replay = sequence->replay});
      decoding.push_back(sequence.get());
    }
  }
  if (members.empty()) {
    return {};
  }
  CACHALOT_TRY(std::vector<Proposal> proposals, speculator_->propose(*runner_, members));
  for (size_t i = 0; i < decoding.size(); ++i) {
    Sequence& sequence = *decoding[i];
    sequence.drafts = std::move(proposals[i]);
    sequence.draft_row.assign(1, sequence.tokens.back());
    for (const Draft& draft : sequence.drafts) {
      sequence.draft_row.push_back(draft.token);
    }
    sequence.rows = static_cast<int64_t>(sequence.draft_row.size());
  }
  return {};
}

void Scheduler::run(model::Observer* observer) {
  share_chunk();
  // Rejected rows have no place in what an observer sees: nothing is drafted for one.
  Status outcome = speculator_ == nullptr || observer != nullptr ? Status() : propose();
  std::vector<Sequence*> members;
  std::vector<model::StepSequence> batch;
  for (const auto& [rank, sequence] : running_) {
    if (sequence->rows == 0) {
      continue;
    }
    const int64_t end = sequence->length() + sequence->rows;
    if (Status status = reserve(*sequence, end); !status.ok()) {
      finish(*sequence, {.status = std::move(status)});
      continue;
    }
    const std::span<const int32_t> tokens(sequence->tokens);
    const bool drafted = !sequence->drafts.empty();
    const bool scored = observer != nullptr || (sequence->request.prompt_logprobs &&
                                                sequence->length() < sequence->prompt);
    batch.push_back({.view = &sequence->cache->view(),
                     .tokens = drafted ? std::span<const int32_t>(sequence->draft_row)
                                       : tokens.subspan(static_cast<size_t>(sequence->length()),
                                                        static_cast<size_t>(sequence->rows)),
                     .all_logits = scored || drafted,
                     .no_logits = !scored && end < static_cast<int64_t>(tokens.size()),
                     .replay = sequence->replay});
    members.push_back(sequence.get());
  }
  if (outcome.ok() && !members.empty()) {
    outcome = run_batch(members, batch, observer);
  }
  if (!outcome.ok()) {
    for (Sequence* sequence : members) {
      finish(*sequence, {.status = outcome});
    }
  }
  std::erase_if(running_, [](const auto& entry) { return entry.second->ended; });
}

Status Scheduler::run_batch(std::span<Sequence* const> members,
                            std::span<const model::StepSequence> batch,
                            model::Observer* observer) {
  std::vector<int64_t> first_row, logit_rows;  // of each member's logits
  std::vector<float> temperature;              // of each of these rows
  int64_t wanted = 1;
  for (size_t i = 0; i < members.size(); ++i) {
    const Sequence& sequence = *members[i];
    const int64_t decoder_rows = std::clamp<int64_t>(
        sequence.length() + sequence.rows - sequence.replay.decoder_from, 0, sequence.rows);
    first_row.push_back(static_cast<int64_t>(temperature.size()));
    logit_rows.push_back(batch[i].no_logits ? 0 : batch[i].all_logits ? decoder_rows : 1);
    temperature.insert(temperature.end(),
                       static_cast<size_t>(logit_rows.back()),
                       sequence.output.sampler().temperature());
    wanted = std::max(wanted, sequence.output.wanted());
  }
  const double begin = now_seconds();
  CACHALOT_TRY(const TensorView rows, runner_->run(batch, observer));
  CACHALOT_TRY(const StepLogits logits, StepLogits::read(*runner_, rows, wanted, temperature));
  const double seconds = now_seconds() - begin;
  if (observer != nullptr) {
    CACHALOT_CHECK(members.size() == 1, members.size());
    const auto start =
        static_cast<int32_t>(std::max(members[0]->length(), members[0]->replay.decoder_from));
    CACHALOT_TRY(const TensorView seen, runner_->on_host(rows));
    observer->visit("logits", seen, {.row_begin = {}, .start = {&start, 1}});
  }
  std::vector<int32_t> accepted;
  int64_t decoding = 0, decode_rows = 0, decoded = 0;
  stats_.last_batch_rows = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    Sequence& sequence = *members[i];
    stats_.last_batch_rows += sequence.rows;
    const bool decodes = sequence.decodes();
    accepted.push_back(sequence.drafts.empty() ? static_cast<int32_t>(sequence.rows)
                                               : judge_drafts(sequence, logits, first_row[i]));
    if (decodes) {
      ++decoding;
      decode_rows += sequence.rows;
      decoded += accepted.back();
    }
  }
  if (speculator_ != nullptr && observer == nullptr && decoding > 0) {
    if (decode_rows == stats_.last_batch_rows) {
      speculator_->policy().record_step(decode_rows, seconds);
    }
    if (speculator_->drafted()) {
      speculator_->policy().record_outcome(decoding, decode_rows, decoded);
    }
  }
  CACHALOT_RETURN_IF_ERROR(runner_->commit(accepted));
  for (size_t i = 0; i < members.size(); ++i) {
    keep(*members[i]);
    deliver(*members[i], logits, first_row[i], logit_rows[i]);
  }
  if (observer != nullptr && speculator_ != nullptr && members[0]->left() > 0) {
    const Sequence& sequence = *members[0];
    const int32_t& next = sequence.tokens[static_cast<size_t>(sequence.length())];
    return visit_drafts(
        *runner_,
        {.view = &sequence.cache->view(), .tokens = {&next, 1}, .replay = sequence.replay},
        runtime_.model().config.dspark_block_size,
        *observer);
  }
  return {};
}

int32_t Scheduler::judge_drafts(Sequence& sequence, const StepLogits& logits, int64_t first_row) {
  const Proposal drafts = std::exchange(sequence.drafts, {});
  Event& event = sequence.drafted;
  event = {.draft_tokens = static_cast<int64_t>(drafts.size())};
  size_t kept = 0;
  for (;;) {
    const bool held = sequence.output.next(logits,
                                           first_row + static_cast<int64_t>(kept),
                                           event,
                                           kept < drafts.size() ? &drafts[kept] : nullptr);
    event.accepted_tokens += held ? 1 : 0;
    if (!held || event.done || !event.status.ok()) {
      break;
    }
    ++kept;
  }
  stats_.draft_tokens += static_cast<uint64_t>(event.draft_tokens);
  stats_.accepted_tokens += static_cast<uint64_t>(event.accepted_tokens);
  for (const TokenOutput& token : event.tokens) {
    sequence.tokens.push_back(token.id);
  }
  return static_cast<int32_t>(1 + kept);
}

void Scheduler::deliver(Sequence& sequence,
                        const StepLogits& logits,
                        int64_t first_row,
                        int64_t rows) {
  if (sequence.request.prompt_logprobs && sequence.output.count() == 0) {
    sequence.score.resize(static_cast<size_t>(sequence.prompt));
    // The row of position p predicts the token of p + 1.
    const int64_t from = sequence.length() - sequence.rows + 1;
    for (int64_t i = 0; i < rows && from + i < sequence.prompt; ++i) {
      const auto predicted = static_cast<size_t>(from + i);
      const auto score = logits.decide(first_row + i, [&](const LogitsRow& row) {
        return token_output(row, sequence.tokens[predicted], sequence.request.top_logprobs);
      });
      if (!score.ok()) {
        finish(sequence, {.status = score.status()});
        return;
      }
      sequence.score[predicted] = score->value();
    }
  }
  const bool drafted = sequence.drafted.draft_tokens > 0;
  if (!drafted && sequence.left() > 0) {
    return;
  }
  const double now = now_seconds();
  if (sequence.output.count() == 0) {
    stats_.prompt_tokens += static_cast<uint64_t>(sequence.prompt);
    stats_.cached_tokens += static_cast<uint64_t>(sequence.cached_tokens);
    record(stats_.first_token_seconds, now - sequence.submitted);
  } else {
    record(stats_.inter_token_seconds, now - sequence.last_token);
  }
  sequence.last_token = now;
  Event event = std::exchange(sequence.drafted, {});
  if (!drafted) {
    if (sequence.max_tokens == 0) {
      event.done = true;
    } else {
      sequence.output.next(logits, first_row + rows - 1, event);
    }
    for (const TokenOutput& token : event.tokens) {
      sequence.tokens.push_back(token.id);
    }
  }
  stats_.generated_tokens += event.tokens.size();
  if (event.done || !event.status.ok()) {
    if (event.done && sequence.output.count() > 0) {
      keep_state(sequence);
    }
    finish(sequence, std::move(event));
  } else {
    send(sequence, std::move(event));
  }
}

// Prefixes for later requests. --------------------------------------------------------------------

void Scheduler::keep(Sequence& sequence) {
  const int64_t page_tokens = runtime_.layout().page_tokens;
  while (sequence.keeping && (sequence.kept_pages + 1) * page_tokens <= sequence.length()) {
    const std::span<const int32_t> page =
        page_of(sequence.tokens, sequence.kept_pages, page_tokens);
    const kvcache::PageRef& own = sequence.cache->page(sequence.kept_pages);
    const kvcache::PageRef* const kept = prefixes_.keep_page(sequence.kept, page, own);
    // An earlier page has the same bits, unless a replay in mode `replay` came before it.
    const bool same = kept != nullptr && kept->same_page(own);
    sequence.keeping = same || (kept != nullptr && runtime_.options().mode != Mode::kReplay);
    if (same) {
      store(kvcache::ObjectKind::kPage, sequence.kept, page, sequence, own);
    } else if (sequence.keeping) {
      sequence.cache->share_page(sequence.kept_pages, *kept);
    }
    sequence.kept = sequence.kept.then(page);
    ++sequence.kept_pages;
  }
  if (sequence.output.count() == 0 && sequence.length() == sequence.stop) {
    keep_state(sequence);
  }
}

void Scheduler::keep_state(Sequence& sequence) {
  if (!sequence.keeping || options_.cached_states == 0) {
    return;
  }
  const Result<kvcache::PageRef> state = sequence.cache->copy_state();
  if (!state.ok()) {
    return;  // no memory to spare; nothing depends on it
  }
  const int64_t whole = sequence.kept_pages * runtime_.layout().page_tokens;
  if (sequence.length() == whole && tiers_ != nullptr && tiers_->keeps_states()) {
    store(kvcache::ObjectKind::kState, sequence.kept, {}, sequence, *state);
  }
  const std::span<const int32_t> tokens(sequence.tokens);
  prefixes_.keep_state(
      {.parent = sequence.kept,
       .tokens = tokens.subspan(static_cast<size_t>(whole),
                                static_cast<size_t>(sequence.length() - whole)),
       .position = sequence.length(),
       .decoder_from = sequence.replay.decoder_from,
       .state = *state,
       .tail = sequence.length() > whole ? sequence.cache->page(sequence.kept_pages)
                                         : kvcache::PageRef()},
      now_seconds());
}

void Scheduler::store(kvcache::ObjectKind kind,
                      const kvcache::PrefixKey& parent,
                      std::span<const int32_t> tokens,
                      const Sequence& sequence,
                      const kvcache::PageRef& content) {
  if (tiers_ == nullptr) {
    return;
  }
  const kvcache::CacheLayout& layout = runtime_.layout();
  std::vector<uint8_t> bytes(static_cast<size_t>(
      kind == kvcache::ObjectKind::kPage ? layout.page_bytes() : layout.state_bytes()));
  const Status status = runtime_.pages().memory().read(
      bytes.data(), content.data(), static_cast<int64_t>(bytes.size()), nullptr);
  if (status.ok()) {
    tiers_->put(
        {.kind = kind,
         .parent = parent,
         .tokens = tokens,
         .decoder_from = kind == kvcache::ObjectKind::kState ? sequence.replay.decoder_from : 0,
         .first = bytes,
         .second = {}});
  }
}

void Scheduler::read_ahead(Sequence& sequence) {
  const int64_t page_tokens = runtime_.layout().page_tokens;
  const std::span<const int32_t> tokens(sequence.tokens.data(), sequence.tokens.size() - 1);
  const auto none = [](int64_t, int64_t) { return false; };
  const auto known = static_cast<int64_t>(prefixes_.find(tokens, none, now_seconds()).pages.size());
  kvcache::PrefixKey key = prefixes_.root();
  for (int64_t i = 0; i < known; ++i) {
    key = key.then(page_of(tokens, i, page_tokens));
  }
  const std::span<const int32_t> rest = tokens.subspan(static_cast<size_t>(known * page_tokens));
  if (static_cast<int64_t>(rest.size()) >= page_tokens) {
    sequence.loaded_from = known;
    sequence.load = tiers_->load(key, {rest.begin(), rest.end()});
  }
}

Status Scheduler::absorb(const kvcache::Tiers::Loaded& loaded, int64_t first_page) {
  int64_t pages = first_page;
  for (const kvcache::Tiers::Loaded::Item& item : loaded.items) {
    const kvcache::Object& object = item.object;
    const bool is_page = object.kind == kvcache::ObjectKind::kPage;
    kvcache::PagePool& pool = is_page ? runtime_.pages() : runtime_.states();
    if (is_page) {
      make_room(1);
    }
    const Result<kvcache::PageRef> target = pool.take();
    if (!target.ok()) {
      return {};  // the rest runs as if it had not been found
    }
    CACHALOT_RETURN_IF_ERROR(pool.memory().write(
        target->data(), object.first.data(), static_cast<int64_t>(object.first.size()), nullptr));
    if (is_page) {
      if (prefixes_.keep_page(object.parent, object.tokens, *target) == nullptr) {
        return {};
      }
      ++pages;
    } else {
      prefixes_.keep_state({.parent = object.parent,
                            .tokens = {},
                            .position = pages * runtime_.layout().page_tokens,
                            .decoder_from = object.decoder_from,
                            .state = *target,
                            .tail = {}},
                           now_seconds());
    }
  }
  return {};
}

EngineStats Scheduler::stats() const {
  EngineStats stats = stats_;
  stats.running = static_cast<int64_t>(running_.size());
  stats.waiting = waiting();
  stats.evictions = prefixes_.evictions();
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
