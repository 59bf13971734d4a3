// What of a request was computed before, and what of it is kept for others: the prefix index in
// front of the page pools, and the stores behind them (docs/caching.md).
//
// Not thread-safe: the scheduler's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/replay.h"
#include "engine/runtime.h"
#include "engine/sequence.h"
#include "kvcache/prefix_index.h"
#include "kvcache/tiers.h"

namespace cachalot::engine {

// What a request goes on from: the compressed rows of [0, length), and the window state there or a
// replay that rebuilds it.
struct Prefix {
  int64_t length = 0;
  std::vector<kvcache::PageRef> pages;
  kvcache::PageRef state;
  model::Replay replay;
  int64_t draft_from = 0;  // StepSequence::draft_from

  // The first position that runs.
  int64_t first_row() const { return length == 0 ? 0 : state ? length : replay.encoder_from; }
};

class PrefixCache {
 public:
  // Of requests that run on `loaded`. All references (null tiers: no stores) must outlive it.
  PrefixCache(Runtime& runtime,
              const LoadedModel& loaded,
              const EngineOptions& options,
              kvcache::Tiers* tiers);
  // Gives up all that no request holds and keeps nothing more: other weights serve from now on.
  void retire();

  // Starts to read what the stores have of a waiting request's prompt and the page pool has not.
  void read_ahead(Sequence& sequence);
  // Takes what was read so far into the pools, as far as there is room, and has no more read.
  // Nothing to be done without a read_ahead().
  Status absorb(Sequence& sequence);

  // The longest known prefix that serves the request, and the request without any.
  Prefix find(Sequence& sequence);
  Prefix cold(const Sequence& sequence) const;
  // Makes the empty cache of a request that starts (again) one that holds the prefix.
  Status attach(Sequence& sequence, const Prefix& prefix);
  // The request's pages up to `length` are those of the index, later ones are to be kept.
  void begin(Sequence& sequence, int64_t length) const;

  // The next position at which a chunk of the sequence must end: where its window state is kept, or
  // its last token.
  int64_t next_stop(const Sequence& sequence) const;
  // Keeps the pages that the last step completed, and the window state if the chunk ended at its
  // stop.
  void keep(Sequence& sequence);
  void keep_state(Sequence& sequence);

  // Gives up what was used least recently and no request holds. False: there is nothing.
  bool evict() { return index_.evict(); }
  // Gives up cached pages until `pages` are free, as far as that goes.
  void make_room(int64_t pages);
  // Gives up window states that are out of time.
  void expire(double now) { index_.expire(now); }
  uint64_t evictions() const { return index_.evictions(); }

 private:
  // The words of a whole page.
  std::vector<int32_t> page_of(const kvcache::PrefixContent& content, int64_t index) const;
  void store(kvcache::ObjectKind kind,
             std::span<const int32_t> words,
             const Sequence& sequence,
             const kvcache::PageRef& content);

  Runtime& runtime_;
  const model::Model& model_;
  bool enabled_;
  bool keeps_states_;
  int64_t page_tokens_;
  ReplayPolicy replay_;
  kvcache::PrefixIndex index_;
  kvcache::Tiers* tiers_;
};

}  // namespace cachalot::engine
