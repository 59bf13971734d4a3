// Attention of every row of an image to all of them, per head of K.
//
// in   qkv [N, 3 H K] act: q of all heads, k, v; rope [N, K/2, 2] f32
// out  o [N, H K] act
//
// A first kernel rotates q and k into scratch, [2][H][N][K]. Then, for BF16 heads of 64, a block
// has 128 queries of a head, 16 per warp, whose scores, probabilities and outputs stay in
// registers; keys and values come in blocks of 64 through two buffers in shared memory. Other heads
// take a block of threads per query: for tests and FP32.
//
//   load 0 | load 1, S = Q K^T 0 -> maxima -> P -> O = O rescale + P V 0 | load 2, ... 1 | ...
//
// Bound: mma.sync, 4 N^2 H K operations; every key is read once per 128 queries, from L2. Measured
// on an H200, 16 heads: 1.33 ms for 8649 rows (231 TFLOP/s), 66 us for 1521 (143), with the
// rotation.
#include <cmath>
#include <type_traits>

#include "ops/cuda/device/num.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeadDim = 64;  // of the tensor-core form
constexpr int kKeys = 64;     // of a block, whose probabilities are rounded together
constexpr int kQueries = 16 * kWarps;
constexpr float kLeast = -1e30f;  // best score before the first key
constexpr float kLog2e = 1.44269504f;

struct Problem {
  const void* qkv;
  const void* rotated;
  void* o;
  int64_t rows;
  int heads, head_dim;
  float scale;
};

// Pairs (i, i + K/2) turned by their angle, then rounded. A thread per pair.
template <class Act>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(const __grid_constant__ Problem p, const float2* rope, Act* out) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t half = p.head_dim / 2, width = p.heads * 2 * half;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.rows * width) {
    return;
  }
  const int64_t i = at % half, head = at / half % p.heads, part = at / half / p.heads % 2;
  const int64_t row = at / width;
  const Act* from =
      static_cast<const Act*>(p.qkv) + (row * 3 + part) * width + head * p.head_dim + i;
  const float2 angle = rope[row * half + i];
  const float2 v = rotate_pair(to_float(from[0]), to_float(from[half]), angle.x, angle.y);
  Act* to = out + ((part * p.heads + head) * p.rows + row) * p.head_dim + i;
  to[0] = from_float<Act>(v.x);
  to[half] = from_float<Act>(v.y);
}

// Rows of 64 elements, swizzled.
using Tile = uint8_t[kKeys * kHeadDim * 2];
struct Tiles {
  Tile keys, values;
};

// Keys [first, first + 64) of a head and their values; zeros behind the last.
__device__ __forceinline__ void load_tiles(const Problem& p, int head, int64_t first, Tiles& to) {
  const auto* keys = static_cast<const Bf16*>(p.rotated) + (p.heads + head) * p.rows * kHeadDim;
  const auto* qkv = static_cast<const Bf16*>(p.qkv);
  const int64_t width = int64_t{p.heads} * kHeadDim;
#pragma unroll
  for (int i = 0; i < kKeys * 8 / kThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads, r = index / 8,
              piece = index % 8;
    const bool valid = first + r < p.rows;
    const int64_t row = valid ? first + r : 0;
    copy_async(to.keys + tile_place(r, piece), keys + row * kHeadDim + 8 * piece, valid);
    copy_async(to.values + tile_place(r, piece),
               qkv + (row * 3 + 2) * width + head * kHeadDim + 8 * piece,
               valid);
  }
  copy_async_commit();
}

__global__ void __launch_bounds__(kThreads, 2)
    attend_mma_kernel(const __grid_constant__ Problem p) {
  __shared__ __align__(128) Tiles tiles[2];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  const int g = lane / 4, t = lane % 4, head = static_cast<int>(blockIdx.y);
  const int64_t query = static_cast<int64_t>(blockIdx.x) * kQueries + warp * 16 + g;
  const int blocks = static_cast<int>(ceil_div(p.rows, kKeys));
  load_tiles(p, head, 0, tiles[0]);
  uint32_t q[kHeadDim / 16][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = query + 8 * h;
    const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const Bf16*>(p.rotated) +
                                                         (head * p.rows + row) * kHeadDim + 2 * t);
#pragma unroll
    for (int s = 0; s < kHeadDim / 16; ++s) {
      q[s][h] = row < p.rows ? from[8 * s] : 0;
      q[s][2 + h] = row < p.rows ? from[8 * s + 4] : 0;
    }
  }
  float o[kHeadDim / 8][4] = {};
  float best[2] = {kLeast, kLeast}, sum[2] = {};  // sum: of this lane's keys
  for (int b = 0; b < blocks; ++b) {
    if (b + 1 < blocks) {
      load_tiles(p, head, int64_t{b + 1} * kKeys, tiles[(b + 1) % 2]);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const Tiles& tile = tiles[b % 2];
    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        uint32_t keys[4];
        load_matrices(
            keys, tile.keys + tile_place(16 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
        mma_bf16(s[2 * j], q[k][0], q[k][1], q[k][2], q[k][3], keys[0], keys[1]);
        mma_bf16(s[2 * j + 1], q[k][0], q[k][1], q[k][2], q[k][3], keys[2], keys[3]);
      }
    }
    if (b + 1 == blocks) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (int64_t{b} * kKeys + 8 * j + 2 * t + i % 2 >= p.rows) {
            s[j][i] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -INFINITY;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        most = fmaxf(most, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      const float now = fmaxf(best[h], most * p.scale);
      const float rescale = exp2_flushed(best[h] - now);
      best[h] = now;
      sum[h] *= rescale;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[j][i] = exp2_flushed(fmaf(s[j][i], p.scale, -now));
          sum[h] += s[j][i];
          o[j][i] *= rescale;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t a0 = bf16_pair(s[2 * k][0], s[2 * k][1]);
      const uint32_t a1 = bf16_pair(s[2 * k][2], s[2 * k][3]);
      const uint32_t a2 = bf16_pair(s[2 * k + 1][0], s[2 * k + 1][1]);
      const uint32_t a3 = bf16_pair(s[2 * k + 1][2], s[2 * k + 1][3]);
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j) {
        uint32_t values[4];
        load_matrices_transposed(
            values,
            tile.values + tile_place(16 * k + lane / 8 % 2 * 8 + lane % 8, 2 * j + lane / 16));
        mma_bf16(o[2 * j], a0, a1, a2, a3, values[0], values[1]);
        mma_bf16(o[2 * j + 1], a0, a1, a2, a3, values[2], values[3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
    const int64_t row = query + 8 * h;
    if (row < p.rows) {
      auto* to = reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.o) +
                                             (row * p.heads + head) * kHeadDim + 2 * t);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        to[4 * j] = bf16_pair(o[j][2 * h] / sum[h], o[j][2 * h + 1] / sum[h]);
      }
    }
  }
}

// A block per query and head: a warp per key takes the dot product, a thread per channel the sum.
template <class Act>
__global__ void __launch_bounds__(kThreads) attend_simt_kernel(const __grid_constant__ Problem p) {
  __shared__ float scores[kKeys];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t n = p.head_dim, query = blockIdx.x, head = blockIdx.y;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const Act* rotated = static_cast<const Act*>(p.rotated);
  const Act* q = rotated + (head * p.rows + query) * n;
  const Act* keys = rotated + (p.heads + head) * p.rows * n;
  const Act* values = static_cast<const Act*>(p.qkv) + (2 * p.heads + head) * n;
  const int64_t value_step = 3 * p.heads * n;
  auto* o = reinterpret_cast<float*>(dynamic_shared());  // [K]
  for (int64_t i = thread; i < n; i += kThreads) {
    o[i] = 0;
  }
  float best = kLeast, sum = 0;
  for (int64_t begin = 0; begin < p.rows; begin += kKeys) {
    const int count = static_cast<int>(min(int64_t{kKeys}, p.rows - begin));
    for (int j = warp; j < count; j += kWarps) {
      float dot = 0;
      for (int64_t i = lane; i < n; i += kWarp) {
        dot = fmaf(to_float(q[i]), to_float(keys[(begin + j) * n + i]), dot);
      }
      dot = warp_sum(dot);
      if (lane == 0) {
        scores[j] = dot * p.scale;
      }
    }
    __syncthreads();
    float now = best;
    for (int j = 0; j < count; ++j) {
      now = fmaxf(now, scores[j]);
    }
    const float rescale = exp2f(best - now);
    best = now;
    sum *= rescale;
    for (int j = 0; j < count; ++j) {
      sum += exp2f(scores[j] - best);
    }
    for (int64_t i = thread; i < n; i += kThreads) {
      float value = o[i] * rescale;
      for (int j = 0; j < count; ++j) {
        value = fmaf(rounded<Act>(exp2f(scores[j] - best)),
                     to_float(values[(begin + j) * value_step + i]),
                     value);
      }
      o[i] = value;
    }
    __syncthreads();
  }
  Act* out = static_cast<Act*>(p.o) + (query * p.heads + head) * n;
  for (int64_t i = thread; i < n; i += kThreads) {
    out[i] = from_float<Act>(o[i] / sum);
  }
}

}  // namespace

Status dense_attend(OpContext& ctx, const DenseAttendArgs& args) {
  const int64_t n = args.o.dim(0), width = args.o.dim(1), k = width / args.heads;
  Scratch scratch(ctx);
  return with_act(args.o.dtype, [&](auto act) -> Status {
    using Act = decltype(act);
    auto* rotated = scratch.array<Act>(2 * n * width);
    CACHALOT_RETURN_IF_ERROR(scratch.status("dense_attend"));
    // Scores in powers of two.
    const Problem p{.qkv = args.qkv.data,
                    .rotated = rotated,
                    .o = args.o.data,
                    .rows = n,
                    .heads = static_cast<int>(args.heads),
                    .head_dim = static_cast<int>(k),
                    .scale = kLog2e / std::sqrt(static_cast<float>(k))};
    CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                    "dense_attend_rotate",
                                    rotate_kernel<Act>,
                                    extent(ceil_div(n * width, kThreads)),
                                    kThreads,
                                    0,
                                    p,
                                    static_cast<const float2*>(args.rope.data),
                                    rotated));
    if constexpr (std::is_same_v<Act, Bf16>) {
      if (k == kHeadDim && reinterpret_cast<uintptr_t>(args.qkv.data) % 16 == 0) {
        return launch(ctx,
                      "dense_attend",
                      attend_mma_kernel,
                      dim3(extent(ceil_div(n, kQueries)), extent(args.heads)),
                      kThreads,
                      0,
                      p);
      }
    }
    return launch(ctx,
                  "dense_attend",
                  attend_simt_kernel<Act>,
                  dim3(extent(n), extent(args.heads)),
                  kThreads,
                  k * static_cast<int64_t>(sizeof(float)),
                  p);
  });
}

}  // namespace cachalot::ops::cuda
