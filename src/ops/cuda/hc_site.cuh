// What the forms of hc_site on tensor cores share (hc_mma.cu, hc_few.cu).
#pragma once

#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/warpgroup.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/streams.cuh"

namespace cachalot::ops::cuda::hc {

constexpr int kStreams = 4;
constexpr int kCoefficients = (2 + kStreams) * kStreams;  // 24 rows of fn
constexpr int kCoefficientTiles = kCoefficients / 8;
constexpr int kParts = F32Weights::kParts;
constexpr int kColumns = 128;          // of each stream in a block: a chunk
constexpr int kOperandColumns = 64;    // of an operand's row
constexpr int kPieces = kColumns / 8;  // of 8 columns
constexpr int kExpandThreads = 512;    // of a block that lay out fn and expand
// A row of u is normalized by 256 threads; that many columns a thread has at most, in pieces of 8.
constexpr int kFinishWarps = 8;
constexpr int kFinishThreads = kFinishWarps * 32;
constexpr int kRowPieces = 4;
constexpr int64_t kMostColumns = kRowPieces * kFinishThreads * 8;

struct Site {
  const Bf16* x;
  PendingRows<Bf16> pending;
  const float* pre;
  const float* fn;
  const float* base;
  const float* scale;
  Param norm;
  float rms_eps;
  float hc_eps;
  int iters;
  int64_t tokens;
  int tile;  // tokens of one
  int64_t d;
  Bf16* x_out;
  float* pre_out;
  float* post_out;
  float* comb_out;
  Bf16* u;
  float* prediction;  // scratch [T, D / 128, 24]
  float* square;      // scratch [T, D / 128]
};

// Operands are rows of 64 elements, piece p of row r at p ^ (r % 8).
using Predictor =
    Bf16[kStreams][kColumns / kOperandColumns][kParts * kCoefficients][kOperandColumns];

// Lays out the block's columns of fn; `fn` is the first one of row 0.
__device__ __forceinline__ void load_predictor(const float* fn, int64_t d, Predictor& to) {
  constexpr int kItems = kCoefficients * kStreams * kPieces / kExpandThreads;
  static_assert(kItems * kExpandThreads == kCoefficients * kStreams * kPieces);
  uint4 v[kItems][2];
#pragma unroll
  for (int n = 0; n < kItems; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * kExpandThreads;
    const int row = i / (kStreams * kPieces), stream = i / kPieces % kStreams;
    const auto* from =
        reinterpret_cast<const uint4*>(fn + (row * kStreams + stream) * d + i % kPieces * 8);
    v[n][0] = from[0];
    v[n][1] = from[1];
  }
#pragma unroll
  for (int n = 0; n < kItems; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * kExpandThreads;
    const int row = i / (kStreams * kPieces), stream = i / kPieces % kStreams;
    const int piece = i % kPieces;
    uint32_t words[4][kParts];
    F32Weights::split(words[0], v[n][0].x, v[n][0].y);
    F32Weights::split(words[1], v[n][0].z, v[n][0].w);
    F32Weights::split(words[2], v[n][1].x, v[n][1].y);
    F32Weights::split(words[3], v[n][1].z, v[n][1].w);
#pragma unroll
    for (int q = 0; q < kParts; ++q) {
      // kCoefficients is a multiple of 8, so that the swizzle is that of `row`.
      *reinterpret_cast<uint4*>(
          &to[stream][piece / 8][q * kCoefficients + row][(piece ^ row) % 8 * 8]) =
          make_uint4(words[0][q], words[1][q], words[2][q], words[3][q]);
    }
  }
}

// What becomes of two columns of a token.
struct Word {
  uint32_t x[kStreams];
  uint32_t u;
  float square;
};

// `c` has the token's pre, post and comb.
template <bool kPending>
__device__ __forceinline__ Word expand_word(const uint32_t (&x)[kStreams],
                                            uint32_t y,
                                            const float (&c)[kCoefficients]) {
  Word out;
  float v[kStreams][2], u[2];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    out.x[j] = x[j];
    v[j][0] = low_bf16(x[j]);
    v[j][1] = high_bf16(x[j]);
  }
  if constexpr (kPending) {
    const float added[2] = {low_bf16(y), high_bf16(y)};
    float mixed[kStreams][2];
    mix_columns(v, added, c + kStreams, c + 2 * kStreams, kStreams, mixed);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      out.x[j] = bf16_pair(mixed[j][0], mixed[j][1]);
      v[j][0] = low_bf16(out.x[j]);
      v[j][1] = high_bf16(out.x[j]);
    }
  }
  out.square = 0;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    out.square = fmaf(v[j][0], v[j][0], out.square);
    out.square = fmaf(v[j][1], v[j][1], out.square);
  }
  sum_streams(v, c, kStreams, u);
  out.u = bf16_pair(u[0], u[1]);
  return out;
}

// pre, post and comb of a token.
template <bool kPending>
__device__ __forceinline__ void load_coefficients(const float* pre,
                                                  const float* post,
                                                  const float* comb,
                                                  float (&c)[kCoefficients]) {
#pragma unroll
  for (int i = 0; i < kCoefficients; i += 4) {
    if (kPending || i < kStreams) {
      const float* from = i < kStreams ? pre : i < 2 * kStreams ? post : comb + i - 2 * kStreams;
      const float4 four = *reinterpret_cast<const float4*>(from);
      c[i] = four.x, c[i + 1] = four.y, c[i + 2] = four.z, c[i + 3] = four.w;
    }
  }
}

template <bool kPending>
__device__ __forceinline__ void load_coefficients(const Site& s,
                                                  int64_t token,
                                                  float (&c)[kCoefficients]) {
  load_coefficients<kPending>(s.pre + token * kStreams,
                              s.pending.post + token * kStreams,
                              s.pending.comb + token * kStreams * kStreams,
                              c);
}

// A coefficient of lane l: that of row l of fn.
struct Affine {
  float scale = 0, base = 0;

  __device__ __forceinline__ explicit Affine(const Site& s) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kCoefficients) {
      scale = s.scale[lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2];
      base = s.base[lane];
    }
  }
};

// One warp: pre and post of a token, from sums over a part of the chunks: lanes 0 .. 29 are five
// groups of six with four coefficients each. The token's 16 values of comb before the first
// division by column sums go to `comb`.
constexpr int kGroup = kCoefficients / 4, kGroups = 32 / kGroup;
__device__ __forceinline__ void predict_token(const Site& s,
                                              int64_t token,
                                              const float4& sum,
                                              float factor,
                                              const Affine& affine,
                                              float* comb) {
  const int lane = static_cast<int>(threadIdx.x) % 32, four = lane % kGroup;
  float4 total = {};
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int from = i * kGroup + four;
    total.x += __shfl_sync(kAllLanes, sum.x, from), total.y += __shfl_sync(kAllLanes, sum.y, from);
    total.z += __shfl_sync(kAllLanes, sum.z, from), total.w += __shfl_sync(kAllLanes, sum.w, from);
  }
  const int from = lane / 4;
  const float x = __shfl_sync(kAllLanes, total.x, from), y = __shfl_sync(kAllLanes, total.y, from);
  const float z = __shfl_sync(kAllLanes, total.z, from), w = __shfl_sync(kAllLanes, total.w, from);
  const float own = lane % 4 == 0 ? x : lane % 4 == 1 ? y : lane % 4 == 2 ? z : w;
  const float value = lane < kCoefficients ? own * factor * affine.scale + affine.base : 0.0f;
  if (lane < 2 * kStreams) {
    const float gate = 1.0f / (1.0f + expf(-value));
    if (lane < kStreams) {
      s.pre_out[token * kStreams + lane] = gate + s.hc_eps;
    } else {
      s.post_out[token * kStreams + lane - kStreams] = 2.0f * gate;
    }
  }
  // The four lanes of a row of comb.
  float best = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
  const float e = expf(value - best);
  float row = e + __shfl_xor_sync(kAllLanes, e, 1);
  row += __shfl_xor_sync(kAllLanes, row, 2);
  if (lane >= 2 * kStreams && lane < kCoefficients) {
    comb[lane - 2 * kStreams] = e / row + s.hc_eps;
  }
}

// Divides by the sums of the rows (kRows) or columns, each plus eps, a normal number.
template <bool kRows>
__device__ __forceinline__ void balance(float (&c)[kStreams][kStreams], float eps) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const auto at = [&](int k) -> float& { return kRows ? c[i][k] : c[k][i]; };
    const float factor = reciprocal((at(0) + at(1)) + (at(2) + at(3)) + eps);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      at(k) *= factor;
    }
  }
}

// One thread: the Sinkhorn iterations of a token.
__device__ __forceinline__ void balance_token(const Site& s, const float* comb, int64_t token) {
  float c[kStreams][kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      c[j][k] = comb[j * kStreams + k];
    }
  }
  balance<false>(c, s.hc_eps);
#pragma unroll 1
  for (int iter = 1; iter < s.iters; ++iter) {
    balance<true>(c, s.hc_eps);
    balance<false>(c, s.hc_eps);
  }
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    *reinterpret_cast<float4*>(s.comb_out + (token * kStreams + j) * kStreams) =
        make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
  }
}

// `square` and the squares of eight columns, in order.
__device__ __forceinline__ float add_squares(const uint4& columns, float square) {
  float v[8];
  unpack_elements(columns, v);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    square = fmaf(v[e], v[e], square);
  }
  return square;
}
// Eight columns of a row of u, normalized, to `u`.
__device__ __forceinline__ void store_normed(Bf16* u,
                                             const uint4& columns,
                                             float factor,
                                             const float (&weight)[8]) {
  float v[8];
  unpack_elements(columns, v);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    v[e] = v[e] * factor * weight[e];
  }
  store_elements<8>(u, v);
}

// The factor of the norm of a row of u by kFinishThreads threads, of which each has added the
// squares of its columns, in `slots`, shared memory that is not in use. Barrier 1 of the block
// belongs to it.
__device__ __forceinline__ float norm_factor(const Site& s, float square, float* slots) {
  const int thread = static_cast<int>(threadIdx.x);
  const float own = warp_sum(square);
  if (thread % 32 == 0) {
    slots[thread / 32] = own;
  }
  group_barrier(1, kFinishThreads);
  float sum = slots[0];
#pragma unroll
  for (int w = 1; w < kFinishWarps; ++w) {
    sum += slots[w];
  }
  return rms_factor(sum, s.d, s.rms_eps);
}

// hc_site for so few tokens that one launch is best, and whether they are.
bool few_supports(const Site& s);
Status few(const OpContext& ctx, const Site& s);

}  // namespace cachalot::ops::cuda::hc
