// All state of one request: pages of the global cache, window rings, open groups, look-back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kvcache/layout.h"
#include "kvcache/page_pool.h"
#include "ops/kv.h"

namespace cachalot::kvcache {

// A page holds, for every KV source in turn, the main rows and then the index rows of page_tokens
// positions. The pool must outlive the cache.
class SequenceCache {
 public:
  SequenceCache(const CacheLayout& layout, PagePool& pool);
  ~SequenceCache();
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;

  // Makes room for positions [0, positions). kResourceExhausted leaves the cache as it was.
  Status reserve(int64_t positions);

  // The view that model steps run on; valid until the cache is destroyed. reserve() updates it.
  ops::SequenceView& view() { return view_; }
  const ops::SequenceView& view() const { return view_; }

  // Forgets everything and returns the pages.
  void clear();

  // The state as one self-contained record (magic, version, layout, checksum), and back. restore()
  // needs a cache of the same layout and replaces what it held; a damaged or foreign record is
  // kDataLoss and leaves the cache cleared.
  std::string save() const;
  Status restore(std::string_view record);

 private:
  void bind_pages();

  CacheLayout layout_;
  PagePool& pool_;
  std::vector<uint8_t*> pages_;
  // Per source: the start of its main and index rows in every page.
  std::vector<std::vector<uint8_t*>> main_pages_;
  std::vector<std::vector<uint8_t*>> index_pages_;
  std::unique_ptr<uint8_t[]> rings_;
  std::vector<std::vector<float>> open_groups_;  // per source; empty for ratio 1
  ops::SequenceView view_;
};

}  // namespace cachalot::kvcache
