#include "kvcache/layout.h"

namespace cachalot::kvcache {

int64_t CacheLayout::page_bytes() const {
  int64_t bytes = 0;
  for (int64_t ratio : ratios) {
    bytes += page_tokens / ratio * (main_row_bytes + index_row_bytes);
  }
  return bytes;
}

double CacheLayout::bytes_per_token() const {
  return static_cast<double>(page_bytes()) / static_cast<double>(page_tokens);
}

}  // namespace cachalot::kvcache
