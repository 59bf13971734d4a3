// What the index-selection kernels share: scores of entries.
#pragma once

#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/top_k.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/ops.h"

namespace cachalot::ops::cuda {

constexpr int kIndexWarps = 8;
constexpr int kIndexThreads = kIndexWarps * 32;
constexpr int kIndexMmaDim = 128;

struct IndexProblem {
  const int32_t* position;
  const int32_t* sequence;
  const void* q;
  const void* w;
  const float* rope;
  const PagedRows* index;
  const int32_t* candidates;  // null: every visible entry competes
  int32_t* candidates_out;    // null: none are published
  int32_t* selected;
  int64_t ratio;
  int64_t half;
  int heads;
  int dim;
  int k;
  int candidate_width;
  int candidate_block;
  float scale;
};

IndexProblem index_problem(const IndexSelectArgs& args);

// Rotates, rounds and quantizes the token's queries into shared memory.
template <class Act>
__device__ __forceinline__ void load_query(const IndexProblem& p, int64_t token, float* query) {
  const Act* q = static_cast<const Act*>(p.q) + token * p.heads * p.dim;
  const int tail = p.dim - 2 * static_cast<int>(p.half);
  const float* cos_sin = p.rope + token * p.half * 2;
  for (int i = threadIdx.x; i < p.heads * p.dim; i += kIndexThreads) {
    const int column = i % p.dim;
    float v = to_float(q[i]);
    if (column >= tail) {
      const int pair = (column - tail) / 2 * 2;
      const int first = i - (column - tail) % 2;
      const float2 turned =
          rotate_pair(to_float(q[first]), to_float(q[first + 1]), cos_sin[pair], cos_sin[pair + 1]);
      v = rounded<Act>((column - tail) % 2 == 0 ? turned.x : turned.y);
    }
    query[i] = v;
  }
  __syncthreads();
  // A warp per quantization block, a lane per value.
  const int blocks = (p.dim + 31) / 32, lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int b = static_cast<int>(threadIdx.x) / kWarp; b < p.heads * blocks; b += kIndexWarps) {
    const int column = b % blocks * 32 + lane;
    float* value = query + b / blocks * p.dim + column;
    const float v = column < p.dim ? *value : 0.0f;
    const uint32_t scale = fp4_index_scale(__reduce_max_sync(kAllLanes, magnitude_bits(v)));
    if (column < p.dim) {
      *value = e2m1_value(fp4_index_code(v, scale)) * e8m0_value(scale);
    }
  }
  __syncthreads();
}

// Entry of slot i of a token's list; -1: none. Without candidates a slot is an entry.
__device__ __forceinline__ int slot_entry(const IndexProblem& p,
                                          int64_t token,
                                          int i,
                                          int visible) {
  if (p.candidates == nullptr) {
    return i < visible ? i : -1;
  }
  const int block = p.candidates[token * p.candidate_width + i / p.candidate_block];
  const int entry = block * p.candidate_block + i % p.candidate_block;
  return block >= 0 && entry < visible ? entry : -1;
}

__device__ __forceinline__ float score_thread(const IndexProblem& p,
                                              const float* query,
                                              const float* weights,
                                              const uint8_t* row) {
  const uint8_t* scales = row + (p.dim + 1) / 2;
  float sum = 0;
  for (int h = 0; h < p.heads; ++h) {
    float dot = 0;
    for (int i = 0; i < p.dim; ++i) {
      const float key =
          e2m1_value((row[i / 2] >> (4 * (i % 2))) & 15u) * e8m0_value(scales[i / 32]);
      dot = fmaf(query[h * p.dim + i], key, dot);
    }
    sum = fmaf(fmaxf(dot, 0.0f), weights[h], sum);
  }
  return sum * p.scale;
}

// Writes the ids of a finished TopK, ascending, and -1 behind them.
__device__ inline void write_ids(const TopK& top, int32_t* out, int width) {
  top.shrink();
  const int n = top.state->count;
  auto* ids = reinterpret_cast<uint32_t*>(top.buffer);
  // The ids take half the place of the keys: move them front to back, a tile at a time.
  for (int base = 0; base < n; base += kIndexThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const uint32_t id = i < n ? selection_id(top.buffer[i]) : 0;
    __syncthreads();
    if (i < n) {
      ids[i] = id;
    }
    __syncthreads();
  }
  sort_ascending(ids, n, power_of_two(max(n, 1)));
  for (int i = threadIdx.x; i < width; i += kIndexThreads) {
    out[i] = i < n ? static_cast<int32_t>(ids[i]) : -1;
  }
}

__device__ inline void write_all(int n, int32_t* out, int width) {
  for (int i = threadIdx.x; i < width; i += kIndexThreads) {
    out[i] = i < n ? i : -1;
  }
}

}  // namespace cachalot::ops::cuda
