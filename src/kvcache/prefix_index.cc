#include "kvcache/prefix_index.h"

#include <algorithm>

#include "base/check.h"

namespace cachalot::kvcache {
namespace {

bool equal(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

std::vector<PrefixKey> PrefixIndex::walk(const PrefixContent& content) {
  std::vector<PrefixKey> keys = {options_.root};
  const int64_t size = options_.page_tokens;
  const auto end = static_cast<int64_t>(content.tokens.size());
  for (int64_t begin = 0; begin + size <= end; begin += size) {
    const std::vector<int32_t> page = content.words(begin, begin + size);
    const PrefixKey key = keys.back().then(page);
    const auto found = pages_.find(key);
    if (found == pages_.end() || found->second.parent != keys.back() ||
        !equal(found->second.words, page)) {
      break;
    }
    keys.push_back(key);
  }
  return keys;
}

PrefixIndex::Match PrefixIndex::find(const PrefixContent& content,
                                     const Usable& usable,
                                     double now) {
  expire(now);
  Match match;
  const std::vector<PrefixKey> keys = walk(content);
  for (size_t i = 1; i < keys.size(); ++i) {
    const auto page = pages_.find(keys[i]);
    touch(page);
    match.pages.push_back(page->second.page.for_use());
  }
  // From the longest prefix to the shortest: behind the last kept page, then page by page back.
  const int64_t size = options_.page_tokens;
  const auto end = static_cast<int64_t>(content.tokens.size());
  for (size_t i = keys.size(); i-- > 0;) {
    if ((i == 0 ? root_states_ : pages_.at(keys[i]).states) == 0) {
      continue;
    }
    const int64_t begin = static_cast<int64_t>(i) * size;
    for (int64_t n = std::min(size - 1, end - begin); n >= 0; --n) {
      const std::vector<int32_t> rest = content.words(begin, begin + n);
      const auto found = states_.find(keys[i].then(rest));
      if (found == states_.end()) {
        continue;
      }
      const State& state = found->second;
      if (state.parent == keys[i] && equal(state.words, rest) &&
          usable(state.position, state.decoder_from)) {
        touch(found, now);
        match.state = {.position = state.position,
                       .decoder_from = state.decoder_from,
                       .draft_from = state.draft_from,
                       .state = state.state.for_use(),
                       .tail = state.tail.for_use()};
        return match;
      }
    }
  }
  return match;
}

const PageRef* PrefixIndex::keep_page(const PrefixKey& parent,
                                      std::span<const int32_t> words,
                                      const PageRef& page) {
  CACHALOT_CHECK(static_cast<int64_t>(words.size()) >= options_.page_tokens, words.size());
  if (!is_kept(parent)) {
    return nullptr;
  }
  const auto [made, fresh] = pages_.try_emplace(parent.then(words));
  if (!fresh) {
    const bool same = made->second.parent == parent && equal(made->second.words, words);
    return same ? &made->second.page : nullptr;  // another prefix of the same hash is in the way
  }
  made->second.parent = parent;
  made->second.words.assign(words.begin(), words.end());
  made->second.page = page.for_cache();
  made->second.used = ++tick_;
  leaves_.emplace(made->second.used, made->first);
  count(parent, &Page::pages, 1);
  return &made->second.page;
}

bool PrefixIndex::keep_state(const NewState& state, double now) {
  CACHALOT_CHECK(state.words.empty() == !state.tail, state.words.size());
  if (options_.max_states == 0 || !is_kept(state.parent)) {
    return false;
  }
  const auto [made, fresh] = states_.try_emplace(state.parent.then(state.words));
  State& entry = made->second;
  if (!fresh) {
    if (entry.parent != state.parent || !equal(entry.words, state.words)) {
      return false;
    }
    // The one that is there serves as well, unless it lacks rows that this one has; those of the
    // decoder count first.
    if (std::pair(state.decoder_from, state.draft_from) <
        std::pair(entry.decoder_from, entry.draft_from)) {
      entry.decoder_from = state.decoder_from;
      entry.draft_from = state.draft_from;
      entry.state = state.state.for_cache();
    }
    touch(made, now);
    return true;
  }
  entry = {.parent = state.parent,
           .words = {state.words.begin(), state.words.end()},
           .position = state.position,
           .decoder_from = state.decoder_from,
           .draft_from = state.draft_from,
           .state = state.state.for_cache(),
           .tail = state.tail.for_cache(),
           .used = ++tick_,
           .expires = now + options_.state_ttl};
  state_order_.emplace(entry.used, made->first);
  count(state.parent, &Page::states, 1);
  if (state_count() > options_.max_states) {
    drop(states_.find(state_order_.begin()->second));
    ++evictions_;
  }
  return true;
}

bool PrefixIndex::evict() {
  // Pages behind which something is kept are not in `leaves_`; pages that a user holds stay.
  const auto leaf = std::find_if(leaves_.begin(), leaves_.end(), [&](const auto& entry) {
    return pages_.at(entry.second).page.only_cached();
  });
  const bool has_state = !state_order_.empty();
  if (leaf != leaves_.end() && (!has_state || leaf->first < state_order_.begin()->first)) {
    drop(pages_.find(leaf->second));
  } else if (has_state) {
    drop(states_.find(state_order_.begin()->second));
  } else {
    return false;
  }
  ++evictions_;
  return true;
}

void PrefixIndex::expire(double now) {
  while (!state_order_.empty()) {
    const auto oldest = states_.find(state_order_.begin()->second);
    if (oldest->second.expires > now) {
      return;
    }
    drop(oldest);
  }
}

void PrefixIndex::clear() {
  pages_.clear();
  states_.clear();
  leaves_.clear();
  state_order_.clear();
  root_states_ = 0;
}

void PrefixIndex::touch(Pages::iterator page) {
  const bool leaf = leaves_.erase({page->second.used, page->first}) > 0;
  page->second.used = ++tick_;
  if (leaf) {
    leaves_.emplace(page->second.used, page->first);
  }
}

void PrefixIndex::touch(States::iterator state, double now) {
  state_order_.erase({state->second.used, state->first});
  state->second.used = ++tick_;
  state->second.expires = now + options_.state_ttl;
  state_order_.emplace(state->second.used, state->first);
}

bool PrefixIndex::is_kept(const PrefixKey& prefix) const {
  return prefix == options_.root || pages_.contains(prefix);
}

void PrefixIndex::count(const PrefixKey& parent, int64_t Page::* counter, int64_t change) {
  if (parent == options_.root) {
    root_states_ += counter == &Page::states ? change : 0;
    return;
  }
  Page& page = pages_.at(parent);
  page.*counter += change;
  if (page.pages + page.states == 0) {
    leaves_.emplace(page.used, parent);
  } else {
    leaves_.erase({page.used, parent});
  }
}

void PrefixIndex::drop(Pages::iterator page) {
  CACHALOT_CHECK(page->second.pages + page->second.states == 0, page->second.pages);
  leaves_.erase({page->second.used, page->first});
  const PrefixKey parent = page->second.parent;
  pages_.erase(page);
  count(parent, &Page::pages, -1);
}

void PrefixIndex::drop(States::iterator state) {
  state_order_.erase({state->second.used, state->first});
  const PrefixKey parent = state->second.parent;
  states_.erase(state);
  count(parent, &Page::states, -1);
}

}  // namespace cachalot::kvcache
