// All state of one request: pages of the global cache, window rings, open groups, look-back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kvcache/layout.h"
#include "kvcache/page_pool.h"
#include "ops/kv.h"

namespace cachalot::kvcache {

// A page holds, for every KV source in turn, the main rows and then the index rows of page_tokens
// positions. A window state holds the rings and open groups (CacheLayout::state_bytes). Both pools
// must outlive the cache.
class SequenceCache {
 public:
  // kResourceExhausted if there is no window state left.
  static Result<std::unique_ptr<SequenceCache>> create(const CacheLayout& layout,
                                                       PagePool& pages,
                                                       PagePool& states);
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;

  // Makes room for positions [0, positions). kResourceExhausted leaves the cache as it was.
  Status reserve(int64_t positions);

  // The view that model steps run on; valid until the cache is destroyed. reserve() updates it.
  ops::SequenceView& view() { return view_; }
  const ops::SequenceView& view() const { return view_; }

  // Forgets everything and returns the pages.
  void clear();

  // Takes the compressed rows of positions [0, length) from pages of another request into an empty
  // cache: whole pages are shared, a partial last one is copied, for this request goes on writing
  // it. The view's length and window state are the caller's to set.
  Status adopt(std::span<const PageRef> pages, int64_t length);
  // Uses `page` of the same content instead of an own whole one.
  void share_page(int64_t index, const PageRef& page);
  int64_t page_count() const { return static_cast<int64_t>(pages_.size()); }
  // The page of positions [index * page_tokens, (index + 1) * page_tokens).
  const PageRef& page(int64_t index) const { return pages_[static_cast<size_t>(index)]; }

  // A copy of the window state in a page of the same pool, and back.
  Result<PageRef> copy_state() const;
  Status load_state(const PageRef& state);

  // The state as one self-contained record (magic, version, layout, checksum), and back. restore()
  // needs a cache of the same layout and replaces what it held; a damaged or foreign record is
  // kDataLoss and leaves the cache cleared.
  Result<std::string> save() const;
  Status restore(std::string_view record);

 private:
  SequenceCache(const CacheLayout& layout, PagePool& pages, PagePool& states)
      : layout_(layout), pool_(pages), states_(states) {}
  void bind_pages();
  // Calls visit(memory, bytes) for everything that a record holds behind its header and look-back,
  // in order; stops at the first error.
  template <class Visit>
  Status for_each_part(int64_t length, const Visit& visit) const;

  CacheLayout layout_;
  PagePool& pool_;
  PagePool& states_;
  std::vector<PageRef> pages_;
  // Per source: the start of its main and index rows in every page.
  std::vector<std::vector<uint8_t*>> main_pages_;
  std::vector<std::vector<uint8_t*>> index_pages_;
  PageRef state_;
  ops::SequenceView view_;
};

}  // namespace cachalot::kvcache
