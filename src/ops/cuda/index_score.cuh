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

// Tiles of 16 heads that the tensor-core form takes; 0: the shape has only the form by elements.
inline int index_head_tiles(const IndexProblem& p) {
  return p.dim == kIndexMmaDim && p.heads % 16 == 0 && p.heads <= 64 ? p.heads / 16 : 0;
}

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

// Columns of one head in step i (0..7) of the mma chain, for lane quarter t: 32 t + 8 (i / 2) +
// {n, n + 4} in `first`, {n + 1, n + 5} in `second`, n = 2 (i % 2): the order in which nibbles
// unpack.
__device__ __forceinline__ void query_fragment(
    const float* query, int head, int i, const Lane& lane, uint32_t& first, uint32_t& second) {
  const float* c = query + head * kIndexMmaDim + 32 * lane.t + i / 2 * 8 + i % 2 * 2;
  first = bf16_pair(c[0], c[4]);
  second = bf16_pair(c[1], c[5]);
}

// Queries as A operands: tile m holds heads 16 m .. 16 m + 15.
template <int kHeadTiles>
struct QueryFragments {
  uint32_t a[kHeadTiles][8][4];
  float weight[kHeadTiles][2];

  __device__ __forceinline__ void load(const float* query, const float* weights, const Lane& lane) {
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = 16 * m + lane.g + 8 * r;
        weight[m][r] = weights[head];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          query_fragment(query, head, i, lane, a[m][i][r], a[m][i][2 + r]);
        }
      }
    }
  }

  // Scores of eight entries; `row` is that of entry g, null if there is none. The result is valid
  // in lanes 0 .. 3 (g = 0): entries 2 t and 2 t + 1.
  __device__ __forceinline__ float2 scores(const uint8_t* row, const Lane& lane) const {
    uint32_t codes[4] = {}, scale = 0;
    if (row != nullptr) {
      const auto* words = reinterpret_cast<const uint32_t*>(row);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        codes[q] = words[4 * lane.t + q];
      }
      scale = bf16_scale(words[kIndexMmaDim / 8], lane.t, 86);
    }
    float acc[kHeadTiles][4] = {};
    unrolled<8>([&]<int i>() {
      const uint32_t b0 = mul_bf16x2(Fp4Weights::nibbles<i % 2 * 2>(codes[i / 2]), scale);
      const uint32_t b1 = mul_bf16x2(Fp4Weights::nibbles<i % 2 * 2 + 1>(codes[i / 2]), scale);
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        mma_bf16(acc[m], a[m][i][0], a[m][i][1], a[m][i][2], a[m][i][3], b0, b1);
      }
    });
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum.x = fmaf(fmaxf(acc[m][2 * r], 0.0f), weight[m][r], sum.x);
        sum.y = fmaf(fmaxf(acc[m][2 * r + 1], 0.0f), weight[m][r], sum.y);
      }
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, step);
      sum.y += __shfl_xor_sync(kAllLanes, sum.y, step);
    }
    return sum;
  }

  // Ordered scores of the slots [begin, begin + count) of a token, by all warps of the block.
  __device__ __forceinline__ void score_span(const IndexProblem& p,
                                             int64_t token,
                                             const PagedRows& pages,
                                             int visible,
                                             int begin,
                                             int count,
                                             const Lane& lane,
                                             uint32_t* out) const {
    const float scale = kLateScale * p.scale;
    for (int i = static_cast<int>(threadIdx.x) / 32 * 8; i < count; i += kIndexWarps * 8) {
      const int slot = i + lane.g;
      const int entry = slot < count ? slot_entry(p, token, begin + slot, visible) : -1;
      const float2 s = scores(entry < 0 ? nullptr : pages.row(entry), lane);
      if (lane.g == 0) {
        out[i + 2 * lane.t] = ordered_bits(s.x * scale);
        out[i + 2 * lane.t + 1] = ordered_bits(s.y * scale);
      }
    }
  }
};

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
