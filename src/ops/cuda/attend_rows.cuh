// What the attention kernels that split a token among a cluster (attend_few.cu, attend_split.cu)
// share: where the rows of a token's keys lie.
#pragma once

#include "ops/cuda/attend.cuh"

namespace cachalot::ops::cuda::attention {

// Keys that a token may have.
inline int64_t most_keys(const AttendProblem& a) {
  return a.window + a.block + a.width;
}

// Where a token's rows may lie. No kernel writes what this reads, so that it is there before
// wait_for_previous_kernels().
struct Places {
  PagedRows main;
  const uint8_t* ring;
  const uint8_t* fresh;
  uint32_t window, window_bytes;
  int first, start;  // positions: of the first window key, of the step
  int window_keys;

  __device__ __forceinline__ Places(const AttendProblem& a, int64_t token)
      : window(static_cast<uint32_t>(a.window)),
        window_bytes(static_cast<uint32_t>(a.window_row_bytes)) {
    const int32_t s = a.sequence[token];
    if (a.main != nullptr) {
      main = a.main[s];
    }
    start = a.start[s];
    ring = a.rings[s];
    fresh = a.fresh + a.row_begin[s] * a.window_row_bytes;
    const QueryKeys keys = window_part(a, token);
    first = static_cast<int>(keys.first_position);
    window_keys = keys.window_keys;
  }
  // The row of window key `key`.
  __device__ __forceinline__ const uint8_t* window_row(int key) const {
    const int position = first + key;
    const bool is_fresh = position >= start;
    const uint32_t row = is_fresh ? static_cast<uint32_t>(position - start)
                                  : static_cast<uint32_t>(position) % window;
    return (is_fresh ? fresh : ring) + row * window_bytes;
  }
  // The row of a selected entry.
  __device__ __forceinline__ const uint8_t* main_row(uint32_t entry) const {
    const auto page_rows = static_cast<uint32_t>(main.page_rows);
    const uint32_t page = entry / page_rows;
    return main.pages[page] + (entry - page * page_rows) * static_cast<uint32_t>(main.row_bytes);
  }
};

}  // namespace cachalot::ops::cuda::attention
