// Which prefixes of earlier requests are still in the caches, by content.
//
// Two things are kept. Pages of the global cache, each under the hash of all that stands before its
// end, so that any request with the same tokens and images shares it. And window states: what the
// window rings and open groups held at one position, without which a request cannot go on there
// exactly. A position with a state need not end a page.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcache/page_pool.h"
#include "kvcache/prefix_content.h"
#include "kvcache/prefix_key.h"

namespace cachalot::kvcache {

class PrefixIndex {
 public:
  struct Options {
    int64_t page_tokens = 0;
    int64_t max_states = 0;  // window states kept; the least recently used goes first
    double state_ttl = 0;    // seconds since the last use
    PrefixKey root;          // what all keys depend on: the model
  };

  explicit PrefixIndex(const Options& options) : options_(options) {}

  // What is known of a prompt. The references are a user's: nothing of it is evicted while they
  // live.
  struct Match {
    std::vector<PageRef> pages;  // whole pages from position 0
    // The longest usable prefix with a window state: its position, the state, and the page that
    // holds the positions behind the last whole page, if there are any.
    struct State {
      int64_t position = 0;
      int64_t decoder_from = 0;  // as given to keep_state()
      int64_t draft_from = 0;    // likewise
      PageRef state;
      PageRef tail;
    };
    std::optional<State> state;
  };
  using Usable = std::function<bool(int64_t position, int64_t decoder_from)>;

  // Looks for prefixes of `content` and marks what it returns as used at `now`. `usable` chooses
  // among states.
  Match find(const PrefixContent& content, const Usable& usable, double now);

  // Keeps the page of `words` (PrefixContent::words), a whole page that follows the prefix `parent`
  // (the root, or the key of a kept page). Its rows must be complete. Returns the page that is now
  // kept for these words: an earlier one stays. Null: `parent` is not kept, so this page could not
  // be found.
  //
  // A user of a kept page must also hold the kept pages before it, so that what is cached alone can
  // be given up from the end: whoever gets an earlier page back uses it from then on, or keeps
  // nothing more.
  const PageRef* keep_page(const PrefixKey& parent,
                           std::span<const int32_t> words,
                           const PageRef& page);

  // Keeps the window state at `position`: after the prefix `parent` and `words`, less than a page,
  // behind it. `tail` holds these (empty if there are none): its owner may go on writing rows
  // behind the position. `decoder_from` and `draft_from` are the first positions of which the rings
  // of the decoder and of the drafter have rows. False: not kept.
  struct NewState {
    PrefixKey parent;
    std::span<const int32_t> words;
    int64_t position = 0;
    int64_t decoder_from = 0;
    int64_t draft_from = 0;
    PageRef state, tail;
  };
  bool keep_state(const NewState& state, double now);

  // Gives up what was used least recently and no user holds: a page with nothing behind it, or a
  // state. False: there is nothing.
  bool evict();
  // Gives up states that nobody used for `state_ttl`.
  void expire(double now);
  void clear();

  const PrefixKey& root() const { return options_.root; }
  int64_t page_count() const { return static_cast<int64_t>(pages_.size()); }
  int64_t state_count() const { return static_cast<int64_t>(states_.size()); }
  uint64_t evictions() const { return evictions_; }

 private:
  // In the order of use; the key breaks no ties, for ticks are unique.
  using Order = std::set<std::pair<uint64_t, PrefixKey>>;

  struct Page {
    PrefixKey parent;
    std::vector<int32_t> words;  // of this page: a hash alone is not proof
    PageRef page;
    int64_t pages = 0;   // kept right behind it
    int64_t states = 0;  // kept behind it, before the next page
    uint64_t used = 0;
  };
  struct State {
    PrefixKey parent;            // the last whole page
    std::vector<int32_t> words;  // behind it
    int64_t position = 0;
    int64_t decoder_from = 0;
    int64_t draft_from = 0;
    PageRef state, tail;
    uint64_t used = 0;
    double expires = 0;
  };
  using Pages = std::unordered_map<PrefixKey, Page, PrefixKeyHash>;
  using States = std::unordered_map<PrefixKey, State, PrefixKeyHash>;

  // The keys of the kept whole pages of `content`, root first: one more than pages.
  std::vector<PrefixKey> walk(const PrefixContent& content);
  void touch(Pages::iterator page);
  void touch(States::iterator state, double now);
  bool is_kept(const PrefixKey& prefix) const;
  // Counts a page (or state) behind `parent`, or one less.
  void count(const PrefixKey& parent, int64_t Page::* counter, int64_t change);
  void drop(Pages::iterator page);
  void drop(States::iterator state);

  Options options_;
  Pages pages_;
  States states_;
  Order leaves_;       // pages behind which nothing is kept
  Order state_order_;  // all states
  int64_t root_states_ = 0;
  uint64_t tick_ = 0;
  uint64_t evictions_ = 0;
};

}  // namespace cachalot::kvcache
