// The shape of one request's caches.
#pragma once

#include <cstdint>
#include <vector>

namespace cachalot::kvcache {

// Bytes and rows of every cache kind of one model, filled in from its config by whoever binds the
// two.
struct CacheLayout {
  int64_t layers = 0;        // backbone layers, each with a window ring
  int64_t draft_stages = 0;  // of the drafter, each with a ring; 0: nothing is drafted
  int64_t window = 0;        // slots of a ring
  int64_t window_row_bytes = 0;
  int64_t main_row_bytes = 0;
  int64_t index_row_bytes = 0;
  std::vector<int64_t> ratios;  // compression ratio of every KV source
  int64_t compressed_dim = 0;   // channels of an open group's kv and gate
  int64_t lookback = 0;         // Engram classes kept, N - 1 (0 without Engram)
  int64_t page_tokens = 128;    // positions per page of the global cache; a multiple of every ratio

  bool operator==(const CacheLayout&) const = default;

  // Bytes of all sources for one page of positions.
  int64_t page_bytes() const;
  // Global cache bytes per position: 890 for the released model.
  double bytes_per_token() const;
  int64_t rings() const { return layers + draft_stages; }
  // Hash of everything that gives the bytes of a request's caches their meaning, whatever the
  // pages.
  uint64_t hash() const;

  // Window rings of one request.
  int64_t window_bytes() const { return rings() * window * window_row_bytes; }
  // A window state: all rings, then the open group of every source; both parts end at multiples of
  // 64 bytes.
  int64_t open_groups_offset() const { return (window_bytes() + 63) / 64 * 64; }
  int64_t open_group_bytes() const { return 2 * compressed_dim * 4; }
  int64_t state_bytes() const {
    const auto sources = static_cast<int64_t>(ratios.size());
    return open_groups_offset() + (sources * open_group_bytes() + 63) / 64 * 64;
  }
};

}  // namespace cachalot::kvcache
