#include "kvcache/page_pool.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/format.h"

namespace cachalot::kvcache {
namespace {

// Large enough that taking a page is seldom an allocation, small enough for tiny models.
constexpr int64_t kSlabBytes = int64_t{8} << 20;

}  // namespace

PagePool::PagePool(ops::Memory& memory, int64_t page_bytes, int64_t max_pages)
    : memory_(memory), page_bytes_(page_bytes), max_pages_(max_pages) {
  CACHALOT_CHECK(page_bytes > 0, page_bytes);
}

Result<PageRef> PagePool::take() {
  if (free_.empty()) {
    const auto made = static_cast<int64_t>(pages_.size());
    const int64_t count =
        std::min(max_pages_ - made, std::max<int64_t>(1, kSlabBytes / page_bytes_));
    if (count <= 0) {
      return error(Code::kResourceExhausted,
                   "all {} cache pages of {} bytes are in use",
                   max_pages_,
                   page_bytes_);
    }
    CACHALOT_TRY(ops::Buffer slab, ops::Buffer::allocate(memory_, count * page_bytes_));
    for (int64_t i = 0; i < count; ++i) {
      pages_.push_back({.pool = this, .data = slab.data() + i * page_bytes_});
    }
    for (int64_t i = 0; i < count; ++i) {
      free_.push_back(&pages_[pages_.size() - 1 - static_cast<size_t>(i)]);
    }
    slabs_.push_back(std::move(slab));
  }
  Page* page = free_.back();
  free_.pop_back();
  ++out_;
  ++cached_only_;  // until the reference below, of a user, is counted
  return PageRef(page, false);
}

void PagePool::add(Page& page, bool cached) {
  const bool cached_only = page.refs == page.cached_refs;
  ++page.refs;
  page.cached_refs += cached ? 1 : 0;
  cached_only_ -= cached_only && !cached ? 1 : 0;
}

void PagePool::remove(Page& page, bool cached) {
  CACHALOT_CHECK(page.refs > 0, page.refs);
  const bool cached_only = page.refs == page.cached_refs;
  --page.refs;
  page.cached_refs -= cached ? 1 : 0;
  cached_only_ += !cached_only && page.refs == page.cached_refs ? 1 : 0;
  if (page.refs == 0) {
    --out_;
    --cached_only_;
    free_.push_back(&page);
  }
}

PageRef::PageRef(PagePool::Page* page, bool cached) : page_(page), cached_(cached) {
  if (page_ != nullptr) {
    page_->pool->add(*page_, cached_);
  }
}

PageRef::PageRef(PageRef&& other) noexcept
    : page_(std::exchange(other.page_, nullptr)), cached_(other.cached_) {}

PageRef& PageRef::operator=(PageRef other) noexcept {
  std::swap(page_, other.page_);
  std::swap(cached_, other.cached_);
  return *this;
}

PageRef::~PageRef() {
  if (page_ != nullptr) {
    page_->pool->remove(*page_, cached_);
  }
}

}  // namespace cachalot::kvcache
