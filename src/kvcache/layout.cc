#include "kvcache/layout.h"

#include <xxhash.h>

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

uint64_t CacheLayout::hash() const {
  std::vector<int64_t> numbers = {layers,
                                  draft_stages,
                                  window,
                                  window_row_bytes,
                                  main_row_bytes,
                                  index_row_bytes,
                                  compressed_dim,
                                  lookback};
  numbers.insert(numbers.end(), ratios.begin(), ratios.end());
  return XXH3_64bits(numbers.data(), numbers.size() * sizeof(int64_t));
}

}  // namespace cachalot::kvcache
