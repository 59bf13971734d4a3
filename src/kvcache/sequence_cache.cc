#include "kvcache/sequence_cache.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/format.h"
#include "base/math.h"

namespace cachalot::kvcache {
namespace {

// Record: header, look-back, window slots in use, then per source its open group and rows.
// All integers little-endian.
constexpr int64_t kMaxLength = int64_t{1} << 32;
constexpr char kMagic[8] = {'C', 'A', 'C', 'H', 'S', 'E', 'Q', '1'};

struct RecordHeader {
  char magic[8];
  uint64_t checksum;  // XXH3-64 of everything behind this field
  uint64_t bytes;     // of the whole record
  int64_t length;
  uint64_t layout_hash;
};

uint64_t record_checksum(std::string_view record) {
  constexpr size_t kFrom = offsetof(RecordHeader, bytes);
  return XXH3_64bits(record.data() + kFrom, record.size() - kFrom);
}

}  // namespace

Result<std::unique_ptr<SequenceCache>> SequenceCache::create(const CacheLayout& layout,
                                                             PagePool& pages,
                                                             PagePool& states) {
  CACHALOT_CHECK(pages.page_bytes() == std::max<int64_t>(layout.page_bytes(), 1),
                 pages.page_bytes(),
                 layout.page_bytes());
  CACHALOT_CHECK(
      states.page_bytes() == layout.state_bytes(), states.page_bytes(), layout.state_bytes());
  std::unique_ptr<SequenceCache> cache(new SequenceCache(layout, pages, states));
  const size_t sources = layout.ratios.size();
  cache->main_pages_.resize(sources);
  cache->index_pages_.resize(sources);
  cache->view_.sources.resize(sources);
  CACHALOT_TRY(cache->state_, states.take());
  uint8_t* const state = cache->state_.data();
  for (int64_t ring = 0; ring < layout.rings(); ++ring) {
    cache->view_.rings.push_back(state + ring * layout.window * layout.window_row_bytes);
  }
  uint8_t* const groups = state + layout.open_groups_offset();
  for (size_t source = 0; source < sources; ++source) {
    CACHALOT_CHECK(layout.page_tokens % layout.ratios[source] == 0, layout.page_tokens);
    if (layout.ratios[source] == 2) {
      cache->view_.sources[source].open_group = reinterpret_cast<float*>(
          groups + static_cast<int64_t>(source) * layout.open_group_bytes());
    }
  }
  cache->clear();
  return cache;
}

void SequenceCache::clear() {
  pages_.clear();
  view_.length = 0;
  view_.lookback.assign(static_cast<size_t>(layout_.lookback), -1);
  bind_pages();
}

Status SequenceCache::adopt(std::span<const PageRef> pages, int64_t length) {
  CACHALOT_CHECK(pages_.empty(), pages_.size());
  const int64_t whole = length / layout_.page_tokens;
  const bool partial = length % layout_.page_tokens != 0;
  CACHALOT_CHECK(static_cast<int64_t>(pages.size()) == whole + (partial ? 1 : 0), pages.size());
  PageRef copy;
  if (partial) {
    CACHALOT_TRY(copy, pool_.take());
    CACHALOT_RETURN_IF_ERROR(pool_.memory().copy(
        copy.data(), pages[static_cast<size_t>(whole)].data(), pool_.page_bytes(), nullptr));
  }
  for (int64_t i = 0; i < whole; ++i) {
    pages_.push_back(pages[static_cast<size_t>(i)].for_use());
  }
  if (partial) {
    pages_.push_back(std::move(copy));
  }
  bind_pages();
  return {};
}

void SequenceCache::share_page(int64_t index, const PageRef& page) {
  pages_[static_cast<size_t>(index)] = page.for_use();
  bind_pages();
}

Result<PageRef> SequenceCache::copy_state() const {
  CACHALOT_TRY(PageRef state, states_.take());
  CACHALOT_RETURN_IF_ERROR(
      states_.memory().copy(state.data(), state_.data(), states_.page_bytes(), nullptr));
  return state;
}

Status SequenceCache::load_state(const PageRef& state) {
  return states_.memory().copy(state_.data(), state.data(), states_.page_bytes(), nullptr);
}

Status SequenceCache::reserve(int64_t positions) {
  const int64_t need = ceil_div(positions, layout_.page_tokens);
  const size_t before = pages_.size();
  while (static_cast<int64_t>(pages_.size()) < need) {
    Result<PageRef> page = pool_.take();
    if (!page.ok()) {
      pages_.resize(before);
      return page.status();
    }
    pages_.push_back(*std::move(page));
  }
  if (pages_.size() != before) {
    bind_pages();
  }
  return {};
}

void SequenceCache::bind_pages() {
  int64_t offset = 0;
  for (size_t source = 0; source < layout_.ratios.size(); ++source) {
    const int64_t rows = layout_.page_tokens / layout_.ratios[source];
    main_pages_[source].clear();
    index_pages_[source].clear();
    for (const PageRef& page : pages_) {
      main_pages_[source].push_back(page.data() + offset);
      index_pages_[source].push_back(page.data() + offset + rows * layout_.main_row_bytes);
    }
    offset += rows * (layout_.main_row_bytes + layout_.index_row_bytes);
    ops::SourceView& view = view_.sources[source];
    view.main = {main_pages_[source].data(), rows, layout_.main_row_bytes};
    view.index = {index_pages_[source].data(), rows, layout_.index_row_bytes};
    view.page_count = static_cast<int64_t>(pages_.size());
  }
}

template <class Visit>
Status SequenceCache::for_each_part(int64_t length, const Visit& visit) const {
  const int64_t slots = std::min(layout_.window, length);
  for (uint8_t* ring : view_.rings) {
    CACHALOT_RETURN_IF_ERROR(visit(ring, slots * layout_.window_row_bytes));
  }
  for (size_t source = 0; source < layout_.ratios.size(); ++source) {
    const ops::SourceView& view = view_.sources[source];
    // Only an open group has content.
    if (view.open_group != nullptr && length % 2 == 1) {
      CACHALOT_RETURN_IF_ERROR(
          visit(reinterpret_cast<uint8_t*>(view.open_group), layout_.open_group_bytes()));
    }
    const int64_t entries = length / layout_.ratios[source];
    for (const ops::PagedRows* rows : {&view.main, &view.index}) {
      for (int64_t i = 0; i < entries; i += rows->page_rows) {
        CACHALOT_RETURN_IF_ERROR(
            visit(rows->row(i), std::min(rows->page_rows, entries - i) * rows->row_bytes));
      }
    }
  }
  return {};
}

Result<std::string> SequenceCache::save() const {
  std::string record(sizeof(RecordHeader), '\0');
  record.append(reinterpret_cast<const char*>(view_.lookback.data()),
                static_cast<size_t>(layout_.lookback) * 4);
  CACHALOT_RETURN_IF_ERROR(for_each_part(view_.length, [&](const uint8_t* memory, int64_t bytes) {
    const size_t begin = record.size();
    record.resize(begin + static_cast<size_t>(bytes));
    return pool_.memory().read(record.data() + begin, memory, bytes, nullptr);
  }));
  RecordHeader header{
      .checksum = 0, .bytes = record.size(), .length = view_.length, .layout_hash = layout_.hash()};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  std::memcpy(record.data(), &header, sizeof header);
  header.checksum = record_checksum(record);
  std::memcpy(record.data(), &header, sizeof header);
  return record;
}

Status SequenceCache::restore(std::string_view record) {
  clear();
  RecordHeader header;
  if (record.size() < sizeof header) {
    return error(Code::kDataLoss, "cache record of {} bytes is cut off", record.size());
  }
  std::memcpy(&header, record.data(), sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) {
    return error(Code::kDataLoss, "not a cache record: wrong magic");
  }
  if (header.bytes != record.size() || header.checksum != record_checksum(record)) {
    return error(Code::kDataLoss, "cache record of {} bytes is damaged", record.size());
  }
  if (header.layout_hash != layout_.hash() || header.length < 0 || header.length > kMaxLength) {
    return error(Code::kDataLoss, "cache record belongs to another model");
  }
  CACHALOT_RETURN_IF_ERROR(reserve(header.length));
  int64_t expected = static_cast<int64_t>(sizeof header) + layout_.lookback * 4;
  CACHALOT_RETURN_IF_ERROR(for_each_part(header.length, [&](uint8_t*, int64_t bytes) {
    expected += bytes;
    return Status();
  }));
  if (expected != static_cast<int64_t>(record.size())) {
    clear();
    return error(Code::kDataLoss, "cache record of {} bytes, expected {}", record.size(), expected);
  }
  const char* from = record.data() + sizeof header;
  std::memcpy(view_.lookback.data(), from, static_cast<size_t>(layout_.lookback) * 4);
  from += layout_.lookback * 4;
  CACHALOT_RETURN_IF_ERROR(for_each_part(header.length, [&](uint8_t* memory, int64_t bytes) {
    const char* part = from;
    from += bytes;
    return pool_.memory().write(memory, part, bytes, nullptr);
  }));
  view_.length = header.length;
  return {};
}

}  // namespace cachalot::kvcache
