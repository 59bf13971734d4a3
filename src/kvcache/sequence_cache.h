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
// positions. Pages, rings and open groups lie in the pool's memory. The pool must outlive the
// cache.
class SequenceCache {
 public:
  // kResourceExhausted if there is no memory for the window rings.
  static Result<std::unique_ptr<SequenceCache>> create(const CacheLayout& layout, PagePool& pool);
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
  Result<std::string> save() const;
  Status restore(std::string_view record);

 private:
  SequenceCache(const CacheLayout& layout, PagePool& pool) : layout_(layout), pool_(pool) {}
  void bind_pages();
  // Calls visit(memory, bytes) for everything that a record holds behind its header and look-back,
  // in order; stops at the first error.
  template <class Visit>
  Status for_each_part(int64_t length, const Visit& visit) const;

  CacheLayout layout_;
  PagePool& pool_;
  std::vector<uint8_t*> pages_;
  // Per source: the start of its main and index rows in every page.
  std::vector<std::vector<uint8_t*>> main_pages_;
  std::vector<std::vector<uint8_t*>> index_pages_;
  ops::Buffer rings_;
  ops::Buffer open_groups_;
  ops::SequenceView view_;
};

}  // namespace cachalot::kvcache
