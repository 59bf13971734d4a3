// Pages of equal size from large slabs.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "ops/memory.h"

namespace cachalot::kvcache {

// Hands out pages of `page_bytes` of a backend's memory and takes them back; at most `max_pages`
// exist at once. Not thread-safe: one owner.
class PagePool {
 public:
  PagePool(ops::Memory& memory, int64_t page_bytes, int64_t max_pages);

  // kResourceExhausted if all pages are out.
  Result<uint8_t*> take();
  void give_back(uint8_t* page);

  ops::Memory& memory() const { return memory_; }
  int64_t page_bytes() const { return page_bytes_; }
  int64_t pages_in_use() const { return in_use_; }
  int64_t max_pages() const { return max_pages_; }

 private:
  ops::Memory& memory_;
  int64_t page_bytes_;
  int64_t max_pages_;
  int64_t in_use_ = 0;
  int64_t made_ = 0;
  std::vector<ops::Buffer> slabs_;
  std::vector<uint8_t*> free_;
};

}  // namespace cachalot::kvcache
