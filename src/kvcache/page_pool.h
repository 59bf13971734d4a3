// Pages of equal size from large slabs, shared by reference.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/status.h"
#include "ops/memory.h"

namespace cachalot::kvcache {

class PageRef;

// Hands out pages of `page_bytes` of a backend's memory; at most `max_pages` exist at once. A page
// returns when its last reference goes; the pool must outlive them. Not thread-safe: one owner.
//
// References are of two kinds: those of users, and those of a cache that keeps pages for later
// users and gives them up under pressure.
class PagePool {
 public:
  PagePool(ops::Memory& memory, int64_t page_bytes, int64_t max_pages);

  // kResourceExhausted if all pages are out.
  Result<PageRef> take();

  ops::Memory& memory() const { return memory_; }
  int64_t page_bytes() const { return page_bytes_; }
  int64_t max_pages() const { return max_pages_; }
  // Pages that a user holds.
  int64_t pages_in_use() const { return out_ - cached_only_; }
  // Pages that a cache alone holds.
  int64_t pages_cached() const { return cached_only_; }
  // Pages that take() can hand out before a cache gives any up.
  int64_t pages_free() const { return max_pages_ - out_; }

 private:
  friend class PageRef;
  struct Page {
    PagePool* pool = nullptr;
    uint8_t* data = nullptr;
    int64_t refs = 0;         // of both kinds
    int64_t cached_refs = 0;  // of caches
  };
  void add(Page& page, bool cached);
  void remove(Page& page, bool cached);

  ops::Memory& memory_;
  int64_t page_bytes_;
  int64_t max_pages_;
  int64_t out_ = 0;          // pages with a reference
  int64_t cached_only_ = 0;  // of these, without a user's reference
  std::vector<ops::Buffer> slabs_;
  std::deque<Page> pages_;  // addresses are stable
  std::vector<Page*> free_;
};

// A reference to a page; copies share it. A default-constructed one refers to nothing.
class PageRef {
 public:
  PageRef() = default;
  PageRef(const PageRef& other) : PageRef(other.page_, other.cached_) {}
  PageRef(PageRef&& other) noexcept;
  PageRef& operator=(PageRef other) noexcept;
  ~PageRef();

  // A further reference to the same page, of a user or of a cache.
  PageRef for_use() const { return {page_, false}; }
  PageRef for_cache() const { return {page_, true}; }

  bool same_page(const PageRef& other) const { return page_ == other.page_; }
  explicit operator bool() const { return page_ != nullptr; }
  uint8_t* data() const { return page_->data; }
  // Whether caches alone hold the page.
  bool only_cached() const { return page_->refs == page_->cached_refs; }

 private:
  friend class PagePool;
  PageRef(PagePool::Page* page, bool cached);

  PagePool::Page* page_ = nullptr;
  bool cached_ = false;
};

}  // namespace cachalot::kvcache
