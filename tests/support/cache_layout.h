// A layout of small caches with odd row sizes and both ratios.
#pragma once

#include <cstdint>

#include "kvcache/layout.h"

namespace cachalot::test {

inline kvcache::CacheLayout small_layout(int64_t layers, int64_t page_tokens) {
  kvcache::CacheLayout layout;
  layout.layers = layers;
  layout.window = 4;
  layout.window_row_bytes = 66;
  layout.main_row_bytes = 36;
  layout.index_row_bytes = 17;
  layout.ratios = {2, 1};
  layout.compressed_dim = 8;
  layout.lookback = 3;
  layout.page_tokens = page_tokens;
  return layout;
}

}  // namespace cachalot::test
