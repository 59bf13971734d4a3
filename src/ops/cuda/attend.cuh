// What the attention kernels share: the keys of a query.
#pragma once

#include "ops/cuda/launch.cuh"
#include "ops/kv.h"
#include "ops/ops.h"

namespace cachalot::ops::cuda {

constexpr int kKeyBlock = 64;  // keys whose probabilities are rounded against one running maximum

// AttendArgs for device code.
struct AttendProblem {
  const int32_t* position;
  const int32_t* sequence;
  const int32_t* row_begin;
  const int32_t* start;
  const int32_t* floor;
  const uint8_t* fresh;
  uint8_t* const* rings;
  const PagedRows* main;    // null: window only
  const int32_t* selected;  // [T, width]
  const float* rope;        // [T, half, 2]
  const float* sink;        // [H]
  const void* q;            // [T, H, K] act
  void* o;                  // [T, H, K] act
  int64_t window;
  int64_t block;  // rows of a draft block, or 0
  int64_t window_row_bytes;
  int64_t width;
  int64_t half;
  int64_t tokens;
  int heads;
  int head_dim;
};

AttendProblem attend_problem(const AttendArgs& args);

// attend_mma() with several blocks per token, and whether there are few enough tokens and keys.
bool attend_few_fits(const AttendProblem& a);
Status attend_few(const OpContext& ctx, const AttendProblem& a);
// The same for more tokens, as long as a block per token leaves half of the multiprocessors idle.
bool attend_split_fits(const AttendProblem& a);
Status attend_split(const OpContext& ctx, const AttendProblem& a);

// The keys of one query: first the visible window positions, then the selected entries.
struct QueryKeys {
  int64_t first_position;  // of the window part
  int window_keys;
  int keys;
};

// The window part alone; `keys` is then that part's number.
__device__ __forceinline__ QueryKeys window_part(const AttendProblem& a, int64_t token) {
  const int32_t s = a.sequence[token];
  const WindowRange seen =
      window_range(a.window, a.block, a.floor[s], a.start[s], a.position[token]);
  const int count = static_cast<int>(max(seen.last - seen.first + 1, int64_t{0}));
  return {seen.first, count, count};
}

// All threads of the block call it.
__device__ __forceinline__ QueryKeys query_keys(const AttendProblem& a, int64_t token) {
  QueryKeys keys = window_part(a, token);
  // Ids are ascending with -1 behind them.
  int selected = 0;
  if (a.main != nullptr) {
    for (int64_t base = 0; base < a.width; base += blockDim.x) {
      const int64_t i = base + threadIdx.x;
      selected += __syncthreads_count(i < a.width && a.selected[token * a.width + i] >= 0);
    }
  }
  keys.keys += selected;
  return keys;
}

// Where window key i of a query lies.
__device__ __forceinline__ const uint8_t* window_row(const AttendProblem& a,
                                                     int32_t sequence,
                                                     const QueryKeys& keys,
                                                     int i) {
  const int64_t position = keys.first_position + i, start = a.start[sequence];
  return position >= start
             ? a.fresh + (a.row_begin[sequence] + position - start) * a.window_row_bytes
             : a.rings[sequence] + static_cast<uint32_t>(position) %
                                       static_cast<uint32_t>(a.window) * a.window_row_bytes;
}

// Where key i of a query lies; `is_window` tells its format.
__device__ __forceinline__ const uint8_t* key_row(
    const AttendProblem& a, int64_t token, const QueryKeys& keys, int i, bool& is_window) {
  const int32_t s = a.sequence[token];
  is_window = i < keys.window_keys;
  return is_window ? window_row(a, s, keys, i)
                   : a.main[s].row(a.selected[token * a.width + i - keys.window_keys]);
}

}  // namespace cachalot::ops::cuda
