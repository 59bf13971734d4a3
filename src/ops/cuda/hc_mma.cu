// One hyper-connection site for BF16 streams, M = 4: expand, predict, collapse, normalize.
//
//   v = [x_out_0 | .. | x_out_3]     m = (fn v) / rms(v)     u = norm(round(sum_j pre_j x_out_j))
//   pre = sigmoid(m scale_0 + base) + eps, post = 2 sigmoid(..), comb = sinkhorn(m scale_2 + base)
//
// in   x [T, 4, D] bf16, pending (y, post, comb) or none, pre [T, 4], fn [24, 4 D] f32, base [24],
//      scale [3], norm [D]
// out  x_out [T, 4, D], pre_out, post_out [T, 4], comb_out [T, 4, 4], u [T, D]
//
// Kernel 1, one block per 256 columns of D and 8 kTiles tokens, 8 warps = 4 streams x 2 row tiles:
//   expand 256 columns of the four streams -> x_out, shared; collapse -> u (not yet normalized)
//   warp: rows [16 tile, +16) of fn times its stream's columns, fn as three BF16 numbers (exact)
//   partial predictions and sums of squares -> scratch
// Kernel 2, blocks of 8 warps:
//   the first ceil(T / 8) blocks: one warp per token sums the partials, then 20 Sinkhorn iterations
//   on 16 lanes; the other T blocks normalize one row of u each. Both kinds run at the same time.
// Shared (kernel 1): 4 streams x 8 kTiles tokens x 576 B = 18 KiB kTiles; 8 warps x 8 (kTiles = 1)
// or 3 stages of 2 KiB of fn; 5 KiB kTiles of partial sums. Bytes: (2 M + 2) D elements per token,
// plus 2 D for the second pass over u; fn (2 MB) once per token block. Bound by bytes from about 64
// tokens on, by latency below.
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/streams.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kStreams = 4;
constexpr int kCoefficients = (2 + kStreams) * kStreams;  // 24 rows of fn
constexpr int kRowTiles = 2;
constexpr int kWarps = kStreams * kRowTiles;
constexpr int kThreads = kWarps * 32;
constexpr int kRowElements =
    kChunk + 32;  // of a token's columns in shared memory: no bank conflicts
constexpr int kTokenPad = 20;

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
  int64_t d;
  Bf16* x_out;
  float* pre_out;
  float* post_out;
  float* comb_out;
  Bf16* u;
  float* prediction;  // scratch [T, D / 256, 24]
  float* square;      // scratch [T, D / 256]
};

template <int kTiles>
struct StreamShared {
  static constexpr int kStages = kTiles == 1 ? 8 : 3;
  using Ring = WeightRing<F32Weights, kStages>;
  static constexpr int kColumnBytes = kStreams * kTiles * kTokenTile * kRowElements * 2;
  static constexpr int kBytes = kColumnBytes + kWarps * Ring::kBytes;
};

template <int kTiles>
__global__ void __launch_bounds__(kThreads) stream_kernel(const __grid_constant__ Site s) {
  using Shared = StreamShared<kTiles>;
  constexpr int kTokens = kTiles * kTokenTile;
  __shared__ float part[kStreams][kRowTiles][kTiles][kTokenTile][kTokenPad];
  auto* columns = reinterpret_cast<uint16_t*>(dynamic_shared());  // [stream][token][kRowElements]
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int stream = warp / kRowTiles, row_tile = warp % kRowTiles;
  const int64_t chunk = blockIdx.x, chunks = gridDim.x, i0 = chunk * kChunk;
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * kTokens;

  // The warp's columns of fn, addressed from its own first one.
  const TileRows rows =
      tile_rows<F32Weights>(reinterpret_cast<const uint8_t*>(s.fn + stream * s.d + i0),
                            nullptr,
                            row_tile * kTileRows,
                            kCoefficients,
                            kStreams * s.d,
                            lane);
  typename Shared::Ring ring(dynamic_shared() + Shared::kColumnBytes + warp * Shared::Ring::kBytes,
                             rows,
                             kChunk / F32Weights::kStep);
  wait_for_previous_kernels();
  allow_next_kernel();

  // Warp w takes tokens w, w + 8, ..; lane l the columns 8 l .. 8 l + 7.
  for (int n = warp; n < kTokens && token0 + n < s.tokens; n += kWarps) {
    const int64_t token = token0 + n;
    const int64_t i = i0 + 8 * (threadIdx.x % 32);
    float v[kStreams][8];
    expand_columns<Bf16, kStreams, 8>(
        s.x + token * kStreams * s.d, s.pending.row(token, kStreams, s.d), kStreams, s.d, i, v);
    float square = 0;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      auto* to = reinterpret_cast<Bf16*>(columns + (j * kTokens + n) * kRowElements) +
                 8 * (threadIdx.x % 32);
      store_elements<8>(to, v[j]);
      if (s.x_out != s.x) {
        store_elements<8>(s.x_out + (token * kStreams + j) * s.d + i, v[j]);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        square = fmaf(v[j][e], v[j][e], square);
      }
    }
    float u[8];
    collapse_columns<Bf16, kStreams, 8>(v, s.pre + token * kStreams, kStreams, u);
    store_elements<8>(s.u + token * s.d + i, u);
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) {
      s.square[token * chunks + chunk] = square;
    }
  }
  __syncthreads();

  const uint16_t* own = columns + stream * kTokens * kRowElements + 8 * lane.t;
  float sum[kTiles][4] = {};
#pragma unroll 1
  for (int k = 0; k < kChunk; k += F32Weights::kStep) {
    F32Weights::Raw raw;
    ring.wait();
    ring.advance();
    ring.template read<0>(raw);
    multiply_group<F32Weights, kTiles>(
        raw,
        [&](int n, int p) {
          return *reinterpret_cast<const uint4*>(own + (n * kTokenTile + lane.g) * kRowElements +
                                                 k + 32 * p);
        },
        lane,
        sum);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      part[stream][row_tile][n][2 * lane.t + i % 2][lane.g + 8 * (i / 2)] = sum[n][i];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kCoefficients; i += kThreads) {
    const int n = i / kCoefficients, r = i % kCoefficients;
    if (token0 + n < s.tokens) {
      float value = 0;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        value += part[j][r / kTileRows][n / kTokenTile][n % kTokenTile][r % kTileRows];
      }
      s.prediction[((token0 + n) * chunks + chunk) * kCoefficients + r] = value;
    }
  }
}

// Sums of `c` over the lanes that share a row (lanes 4 j ..) or a column (lanes k, k + 4, ..).
__device__ __forceinline__ float row_sum(float c) {
  c += __shfl_xor_sync(kAllLanes, c, 1);
  return c + __shfl_xor_sync(kAllLanes, c, 2);
}
__device__ __forceinline__ float column_sum(float c) {
  c += __shfl_xor_sync(kAllLanes, c, 4);
  return c + __shfl_xor_sync(kAllLanes, c, 8);
}

// One warp; lanes 16 j + .. repeat the work of lanes 0 .. 15, which hold comb row by row.
__device__ void predict_token(const Site& s, int64_t token) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t chunks = s.d / kChunk;
  float sum = 0, square = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    sum += lane < kCoefficients ? s.prediction[(token * chunks + c) * kCoefficients + lane] : 0.0f;
    square += s.square[token * chunks + c];
  }
  const int kind = lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2;
  const float value =
      lane < kCoefficients
          ? sum * rms_factor(square, kStreams * s.d, s.rms_eps) * s.scale[kind] + s.base[lane]
          : 0.0f;
  if (lane < 2 * kStreams) {
    const float gate = 1.0f / (1.0f + expf(-value));
    if (lane < kStreams) {
      s.pre_out[token * kStreams + lane] = gate + s.hc_eps;
    } else {
      s.post_out[token * kStreams + lane - kStreams] = 2.0f * gate;
    }
  }
  float c = __shfl_sync(kAllLanes, value, 2 * kStreams + lane % 16);
  float best = fmaxf(c, __shfl_xor_sync(kAllLanes, c, 1));
  best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
  c = expf(c - best);
  c = c / row_sum(c) + s.hc_eps;
  c = __fdividef(c, column_sum(c) + s.hc_eps);
  for (int iter = 1; iter < s.iters; ++iter) {
    c = __fdividef(c, row_sum(c) + s.hc_eps);
    c = __fdividef(c, column_sum(c) + s.hc_eps);
  }
  if (lane < kStreams * kStreams) {
    s.comb_out[token * kStreams * kStreams + lane] = c;
  }
}

__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Site s) {
  __shared__ float slots[kWarps];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t predictors = (s.tokens + kWarps - 1) / kWarps;
  if (blockIdx.x < predictors) {
    const int64_t token = blockIdx.x * kWarps + threadIdx.x / 32;
    if (token < s.tokens) {
      predict_token(s, token);
    }
    return;
  }
  Bf16* u = s.u + (blockIdx.x - predictors) * s.d;
  float square = 0;
  for (int64_t i = threadIdx.x * 8; i < s.d; i += kThreads * 8) {
    float v[8];
    load_elements<8>(u + i, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      square = fmaf(v[e], v[e], square);
    }
  }
  const float factor = rms_factor(block_sum(square, slots), s.d, s.rms_eps);
  for (int64_t i = threadIdx.x * 8; i < s.d; i += kThreads * 8) {
    float v[8];
    load_elements<8>(u + i, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      v[e] = v[e] * factor * s.norm[i + e];
    }
    store_elements<8>(u + i, v);
  }
}

template <int kTiles>
Status launch_streams(const OpContext& ctx, const Site& s) {
  constexpr int64_t kTokens = kTiles * kTokenTile;
  return launch(ctx,
                "hc_streams",
                stream_kernel<kTiles>,
                dim3(extent(s.d / kChunk), extent(ceil_div(s.tokens, kTokens))),
                kThreads,
                StreamShared<kTiles>::kBytes,
                s);
}

}  // namespace

bool hc_site_mma_supports(const HcSiteArgs& args) {
  const auto aligned = [](const TensorView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  };
  return args.x.dtype == DType::kBF16 && args.x.dim(1) == kStreams && args.x.dim(2) % kChunk == 0 &&
         aligned(args.x) && aligned(args.x_out) && aligned(args.u) && aligned(args.fn) &&
         aligned(args.pending.y);
}

Status hc_site_mma(OpContext& ctx, const HcSiteArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(2), chunks = d / kChunk;
  Scratch scratch(ctx);
  const Site s{.x = static_cast<const Bf16*>(args.x.data),
               .pending = pending_rows<Bf16>(args.pending),
               .pre = args.pre.as<float>(),
               .fn = args.fn.as<float>(),
               .base = args.base.as<float>(),
               .scale = args.scale.as<float>(),
               .norm = param(args.norm),
               .rms_eps = args.rms_eps,
               .hc_eps = args.hc_eps,
               .iters = args.sinkhorn_iters,
               .tokens = t,
               .d = d,
               .x_out = static_cast<Bf16*>(args.x_out.data),
               .pre_out = args.pre_out.as<float>(),
               .post_out = args.post_out.as<float>(),
               .comb_out = args.comb_out.as<float>(),
               .u = static_cast<Bf16*>(args.u.data),
               .prediction = scratch.array<float>(t * chunks * kCoefficients),
               .square = scratch.array<float>(t * chunks)};
  CACHALOT_RETURN_IF_ERROR(scratch.status("hc_site"));
  CACHALOT_RETURN_IF_ERROR(t <= kTokenTile ? launch_streams<1>(ctx, s) : launch_streams<4>(ctx, s));
  return launch(ctx, "hc_finish", finish_kernel, extent(ceil_div(t, kWarps) + t), kThreads, 0, s);
}

}  // namespace cachalot::ops::cuda
