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

Result<uint8_t*> PagePool::take() {
  if (free_.empty()) {
    const int64_t count =
        std::min(max_pages_ - made_, std::max<int64_t>(1, kSlabBytes / page_bytes_));
    if (count <= 0) {
      return error(Code::kResourceExhausted,
                   "all {} cache pages of {} bytes are in use",
                   max_pages_,
                   page_bytes_);
    }
    CACHALOT_TRY(ops::Buffer slab, ops::Buffer::allocate(memory_, count * page_bytes_));
    for (int64_t i = count - 1; i >= 0; --i) {
      free_.push_back(slab.data() + i * page_bytes_);
    }
    slabs_.push_back(std::move(slab));
    made_ += count;
  }
  uint8_t* page = free_.back();
  free_.pop_back();
  ++in_use_;
  return page;
}

void PagePool::give_back(uint8_t* page) {
  CACHALOT_CHECK(in_use_ > 0, in_use_);
  free_.push_back(page);
  --in_use_;
}

}  // namespace cachalot::kvcache
