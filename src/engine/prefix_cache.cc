#include "engine/prefix_cache.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/clock.h"

namespace cachalot::engine {
namespace {

// Window states are kept at every second page of a prompt at first, then at an eighth of the
// position: a shared prefix is found at nearly its length, and a long prompt does not crowd out the
// states of others.
constexpr int64_t kLeastStatePages = 2;

bool keeps_state_after(int64_t pages) {
  const auto eighth = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(pages / 8)));
  return pages % std::max(kLeastStatePages, eighth) == 0;
}

// At least one token of a prompt is left to run, for its logits.
kvcache::PrefixContent all_but_last(const Sequence& sequence) {
  kvcache::PrefixContent content = sequence.content();
  content.tokens = content.tokens.first(content.tokens.size() - 1);
  return content;
}

}  // namespace

PrefixCache::PrefixCache(Runtime& runtime,
                         const LoadedModel& loaded,
                         const EngineOptions& options,
                         kvcache::Tiers* tiers)
    : runtime_(runtime),
      model_(loaded.model()),
      enabled_(options.prefix_cache),
      keeps_states_(options.cached_states > 0),
      page_tokens_(runtime.layout().page_tokens),
      replay_(loaded.model(), runtime.options().mode),
      index_({.page_tokens = page_tokens_,
              .max_states = options.cached_states,
              .state_ttl = static_cast<double>(options.state_ttl.count()),
              .root = loaded.cache_key()}),
      tiers_(tiers) {}

void PrefixCache::retire() {
  enabled_ = false;
  index_.clear();
}

std::vector<int32_t> PrefixCache::page_of(const kvcache::PrefixContent& content,
                                          int64_t index) const {
  return content.words(index * page_tokens_, (index + 1) * page_tokens_);
}

// What was computed before.
// ------------------------------------------------------------------------

void PrefixCache::read_ahead(Sequence& sequence) {
  if (tiers_ == nullptr || !enabled_ || sequence.request.prompt_logprobs) {
    return;
  }
  const kvcache::PrefixContent content = all_but_last(sequence);
  const auto none = [](int64_t, int64_t) { return false; };
  const auto known = static_cast<int64_t>(index_.find(content, none, now_seconds()).pages.size());
  kvcache::PrefixKey key = index_.root();
  for (int64_t i = 0; i < known; ++i) {
    key = key.then(page_of(content, i));
  }
  std::vector<std::vector<int32_t>> rest;
  for (int64_t i = known; (i + 1) * page_tokens_ <= std::ssize(content.tokens); ++i) {
    rest.push_back(page_of(content, i));
  }
  if (!rest.empty()) {
    sequence.loaded_from = known;
    sequence.load = tiers_->load(key, std::move(rest));
  }
}

Status PrefixCache::absorb(Sequence& sequence) {
  const std::shared_ptr<kvcache::Tiers::Load> load = std::exchange(sequence.load, nullptr);
  if (load == nullptr || !enabled_) {
    return {};
  }
  int64_t pages = sequence.loaded_from;
  const kvcache::Tiers::Loaded loaded = load->take();
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
      if (index_.keep_page(object.parent, object.words, *target) == nullptr) {
        return {};
      }
      ++pages;
    } else {
      index_.keep_state({.parent = object.parent,
                         .words = {},
                         .position = pages * page_tokens_,
                         .decoder_from = object.decoder_from,
                         .draft_from = object.draft_from,
                         .state = *target,
                         .tail = {}},
                        now_seconds());
    }
  }
  return {};
}

Prefix PrefixCache::cold(const Sequence& sequence) const {
  // Log-probabilities of the prompt come from running it through every layer.
  return sequence.request.prompt_logprobs ? Prefix()
                                          : Prefix{.replay = replay_.cold(sequence.prompt)};
}

Prefix PrefixCache::find(Sequence& sequence) {
  Prefix prefix = cold(sequence);
  if (!enabled_ || sequence.request.prompt_logprobs) {
    return prefix;
  }
  const auto serves = [&](int64_t position, int64_t rows_from) {
    return replay_.serves(sequence.prompt, position, rows_from);
  };
  kvcache::PrefixIndex::Match match = index_.find(all_but_last(sequence), serves, now_seconds());
  sequence.shared_prefix = static_cast<int64_t>(match.pages.size()) * page_tokens_;
  const model::Replay replay = replay_.from_rows(sequence.prompt, sequence.shared_prefix);
  const int64_t position = match.state.has_value() ? match.state->position : 0;
  if (replay.encoder_from > position) {
    // Even with the rows that run again, less is left to run than behind the state.
    return {.length = sequence.shared_prefix, .pages = std::move(match.pages), .replay = replay};
  }
  if (match.state.has_value()) {
    prefix.length = position;
    prefix.pages = std::move(match.pages);
    prefix.pages.resize(static_cast<size_t>(position / page_tokens_));
    if (match.state->tail) {
      prefix.pages.push_back(match.state->tail);
    }
    prefix.state = match.state->state;
    prefix.replay = replay_.from_state(sequence.prompt, position, match.state->decoder_from);
    // A store may say anything.
    prefix.draft_from = std::min(match.state->draft_from, position);
  }
  return prefix;
}

Status PrefixCache::attach(Sequence& sequence, const Prefix& prefix) {
  sequence.score.clear();
  sequence.cached_tokens = prefix.length;
  sequence.replay = prefix.replay;
  sequence.draft_from = prefix.draft_from;
  if (prefix.length == 0) {
    return {};
  }
  CACHALOT_RETURN_IF_ERROR(sequence.cache->adopt(prefix.pages, prefix.length));
  const int64_t from = prefix.first_row();
  if (prefix.state) {
    CACHALOT_RETURN_IF_ERROR(sequence.cache->load_state(prefix.state));
  }
  ops::SequenceView& view = sequence.cache->view();
  view.length = from;
  view.lookback = model::engram_lookback(
      model_,
      std::span<const int32_t>(sequence.tokens).first(static_cast<size_t>(from)),
      sequence.image_positions(0, from));
  return {};
}

// What is kept for others.
// -------------------------------------------------------------------------

void PrefixCache::begin(Sequence& sequence, int64_t length) const {
  sequence.keeping = enabled_;
  sequence.kept = index_.root();
  sequence.kept_pages = 0;
  for (; (sequence.kept_pages + 1) * page_tokens_ <= length; ++sequence.kept_pages) {
    sequence.kept = sequence.kept.then(page_of(sequence.content(), sequence.kept_pages));
  }
}

int64_t PrefixCache::next_stop(const Sequence& sequence) const {
  const auto end = static_cast<int64_t>(sequence.tokens.size());
  if (!sequence.keeping || !keeps_states_ || sequence.output.count() > 0) {
    return end;
  }
  // The same prompt again can go on after its last whole page at best.
  const int64_t last = (sequence.prompt - 1) / page_tokens_;
  // No earlier than behind what runs again: there the windows are full.
  const int64_t from = std::max(sequence.length(), sequence.replay.stored);
  for (int64_t pages = from / page_tokens_ + 1; pages <= last; ++pages) {
    if (keeps_state_after(pages) || pages == last ||
        pages * page_tokens_ == sequence.shared_prefix) {
      return pages * page_tokens_;
    }
  }
  return end;
}

void PrefixCache::keep(Sequence& sequence) {
  sequence.keeping = sequence.keeping && enabled_;
  while (sequence.keeping && (sequence.kept_pages + 1) * page_tokens_ <= sequence.length()) {
    const std::vector<int32_t> page = page_of(sequence.content(), sequence.kept_pages);
    const kvcache::PageRef& own = sequence.cache->page(sequence.kept_pages);
    const kvcache::PageRef* const kept = index_.keep_page(sequence.kept, page, own);
    // An earlier page has the same bits, unless a replay in mode `replay` came before it.
    const bool same = kept != nullptr && kept->same_page(own);
    sequence.keeping = same || (kept != nullptr && runtime_.options().mode != Mode::kReplay);
    if (same) {
      store(kvcache::ObjectKind::kPage, page, sequence, own);
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

void PrefixCache::keep_state(Sequence& sequence) {
  if (!sequence.keeping || !keeps_states_) {
    return;
  }
  const Result<kvcache::PageRef> state = sequence.cache->copy_state();
  if (!state.ok()) {
    return;  // no memory to spare; nothing depends on it
  }
  const int64_t whole = sequence.kept_pages * page_tokens_;
  if (sequence.length() == whole && tiers_ != nullptr && tiers_->keeps_states()) {
    store(kvcache::ObjectKind::kState, {}, sequence, *state);
  }
  index_.keep_state({.parent = sequence.kept,
                     .words = sequence.content().words(whole, sequence.length()),
                     .position = sequence.length(),
                     .decoder_from = sequence.replay.decoder_from,
                     .draft_from = sequence.draft_from,
                     .state = *state,
                     .tail = sequence.length() > whole ? sequence.cache->page(sequence.kept_pages)
                                                       : kvcache::PageRef()},
                    now_seconds());
}

// Behind the prefix `sequence.kept`.
void PrefixCache::store(kvcache::ObjectKind kind,
                        std::span<const int32_t> words,
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
    const bool is_state = kind == kvcache::ObjectKind::kState;
    tiers_->put({.kind = kind,
                 .parent = sequence.kept,
                 .words = words,
                 .decoder_from = is_state ? sequence.replay.decoder_from : 0,
                 .draft_from = is_state ? sequence.draft_from : 0,
                 .first = bytes,
                 .second = {}});
  }
}

void PrefixCache::make_room(int64_t pages) {
  while (runtime_.pages().pages_free() < pages && evict()) {
  }
}

}  // namespace cachalot::engine
