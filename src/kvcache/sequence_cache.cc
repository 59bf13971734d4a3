#include "kvcache/sequence_cache.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/format.h"

namespace cachalot::kvcache {
namespace {

// Record: header, then lookback, window slots in use, open groups, main and index rows per source.
// All integers little-endian.
constexpr char kMagic[8] = {'C', 'A', 'C', 'H', 'S', 'E', 'Q', '1'};

struct RecordHeader {
  char magic[8];
  uint64_t checksum;  // XXH3-64 of everything behind this field
  uint64_t bytes;     // of the whole record
  int64_t length;
  uint64_t layout_hash;
};

uint64_t layout_hash(const CacheLayout& layout) {
  std::vector<int64_t> numbers = {layout.layers,          layout.window,
                                  layout.window_row_bytes, layout.main_row_bytes,
                                  layout.index_row_bytes, layout.compressed_dim,
                                  layout.lookback};
  numbers.insert(numbers.end(), layout.ratios.begin(), layout.ratios.end());
  return XXH3_64bits(numbers.data(), numbers.size() * sizeof(int64_t));
}

uint64_t record_checksum(std::string_view record) {
  constexpr size_t kFrom = offsetof(RecordHeader, bytes);
  return XXH3_64bits(record.data() + kFrom, record.size() - kFrom);
}

}  // namespace

SequenceCache::SequenceCache(const CacheLayout& layout, PagePool& pool)
    : layout_(layout), pool_(pool) {
  CACHALOT_CHECK(pool.page_bytes() == layout.page_bytes(), pool.page_bytes(), layout.page_bytes());
  const size_t sources = layout.ratios.size();
  main_pages_.resize(sources);
  index_pages_.resize(sources);
  view_.sources.resize(sources);
  for (int64_t ratio : layout.ratios) {
    CACHALOT_CHECK(layout.page_tokens % ratio == 0, layout.page_tokens, ratio);
    open_groups_.emplace_back(ratio == 2 ? static_cast<size_t>(2 * layout.compressed_dim) : 0);
  }
  rings_.reset(new uint8_t[static_cast<size_t>(layout.window_bytes())]);
  for (int64_t layer = 0; layer < layout.layers; ++layer) {
    view_.rings.push_back(rings_.get() + layer * layout.window * layout.window_row_bytes);
  }
  clear();
}

SequenceCache::~SequenceCache() { clear(); }

void SequenceCache::clear() {
  for (uint8_t* page : pages_) {
    pool_.give_back(page);
  }
  pages_.clear();
  view_.length = 0;
  view_.lookback.assign(static_cast<size_t>(layout_.lookback), -1);
  bind_pages();
}

Status SequenceCache::reserve(int64_t positions) {
  const int64_t need = (positions + layout_.page_tokens - 1) / layout_.page_tokens;
  const size_t before = pages_.size();
  while (static_cast<int64_t>(pages_.size()) < need) {
    Result<uint8_t*> page = pool_.take();
    if (!page.ok()) {
      while (pages_.size() > before) {
        pool_.give_back(pages_.back());
        pages_.pop_back();
      }
      return page.status();
    }
    pages_.push_back(*page);
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
    for (uint8_t* page : pages_) {
      main_pages_[source].push_back(page + offset);
      index_pages_[source].push_back(page + offset + rows * layout_.main_row_bytes);
    }
    offset += rows * (layout_.main_row_bytes + layout_.index_row_bytes);
    view_.sources[source] = {
        .main = {main_pages_[source].data(), rows, layout_.main_row_bytes},
        .index = {index_pages_[source].data(), rows, layout_.index_row_bytes},
        .open_group = open_groups_[source].empty() ? nullptr : open_groups_[source].data()};
  }
}

std::string SequenceCache::save() const {
  std::string record(sizeof(RecordHeader), '\0');
  const auto append = [&](const void* data, int64_t bytes) {
    record.append(static_cast<const char*>(data), static_cast<size_t>(bytes));
  };
  append(view_.lookback.data(), layout_.lookback * 4);
  const int64_t slots = std::min(layout_.window, view_.length);
  for (const uint8_t* ring : view_.rings) {
    append(ring, slots * layout_.window_row_bytes);
  }
  for (const std::vector<float>& group : open_groups_) {
    append(group.data(), static_cast<int64_t>(group.size()) * 4);
  }
  for (size_t source = 0; source < layout_.ratios.size(); ++source) {
    for (int64_t i = 0; i < view_.length / layout_.ratios[source]; ++i) {
      append(view_.sources[source].main.row(i), layout_.main_row_bytes);
      append(view_.sources[source].index.row(i), layout_.index_row_bytes);
    }
  }
  RecordHeader header{.checksum = 0,
                      .bytes = record.size(),
                      .length = view_.length,
                      .layout_hash = layout_hash(layout_)};
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
  if (header.layout_hash != layout_hash(layout_) || header.length < 0) {
    return error(Code::kDataLoss, "cache record belongs to another model");
  }
  int64_t expected = static_cast<int64_t>(sizeof header) + layout_.lookback * 4 +
                     layout_.layers * std::min(layout_.window, header.length) *
                         layout_.window_row_bytes;
  for (size_t source = 0; source < layout_.ratios.size(); ++source) {
    expected += static_cast<int64_t>(open_groups_[source].size()) * 4 +
                header.length / layout_.ratios[source] *
                    (layout_.main_row_bytes + layout_.index_row_bytes);
  }
  if (expected != static_cast<int64_t>(record.size())) {
    return error(Code::kDataLoss, "cache record of {} bytes, expected {}", record.size(), expected);
  }
  CACHALOT_RETURN_IF_ERROR(reserve(header.length));
  const char* from = record.data() + sizeof header;
  const auto take = [&](void* data, int64_t bytes) {
    std::memcpy(data, from, static_cast<size_t>(bytes));
    from += bytes;
  };
  take(view_.lookback.data(), layout_.lookback * 4);
  for (uint8_t* ring : view_.rings) {
    take(ring, std::min(layout_.window, header.length) * layout_.window_row_bytes);
  }
  for (std::vector<float>& group : open_groups_) {
    take(group.data(), static_cast<int64_t>(group.size()) * 4);
  }
  for (size_t source = 0; source < layout_.ratios.size(); ++source) {
    for (int64_t i = 0; i < header.length / layout_.ratios[source]; ++i) {
      take(view_.sources[source].main.row(i), layout_.main_row_bytes);
      take(view_.sources[source].index.row(i), layout_.index_row_bytes);
    }
  }
  view_.length = header.length;
  return {};
}

}  // namespace cachalot::kvcache
