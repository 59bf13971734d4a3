// One hyper-connection site for BF16 streams, M = 4: expand, predict, collapse, normalize.
//
//   v = [x_out_0 | .. | x_out_3]     m = (fn v) / rms(v)     u = norm(round(sum_j pre_j x_out_j))
//   pre = sigmoid(m scale_0 + base) + eps, post = 2 sigmoid(..), comb = sinkhorn(m scale_2 + base)
//
// in   x [T, 4, D] bf16, pending (y, post, comb) or none, pre [T, 4], fn [24, 4 D] f32, base [24],
//      scale [3], norm [D]
// out  x_out [T, 4, D], pre_out, post_out [T, 4], comb_out [T, 4, 4], u [T, D]
//
// Kernel 1: a block has 128 columns of the four streams and every n-th tile of 16 tokens. Its 8
// warps keep their 64 columns of one stream's fn in registers, as three BF16 numbers each (exact):
//   ring of 3 stages, filled by cp.async  x, y, coefficients of a tile
//   expand in place, thread by thread     -> x_out, sum of squares; collapse -> u, not yet
//   normalized warp: [16 tokens x 64] [64 x 24]      -> shared, added over the warps -> scratch
// Kernel 2, blocks of 8 warps:
//   the first ceil(T / 8) blocks: a warp per token sums the partial predictions, then a thread per
//   token runs the Sinkhorn iterations; the other T blocks normalize a row of u each.
// Shared (kernel 1): 3 stages of 25.5 KiB, 12 KiB of partial sums. Bytes: (2 M + 2) D elements per
// token, plus 2 D for the second pass over u, 4 KB of partial sums; fn (2 MB) once per block. Bound
// by bytes and issue slots from about 64 tokens on, by latency below. Measured on an H200: 7.6 us
// for one token, 480 for 8192.
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/streams.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kStreams = 4;
constexpr int kCoefficients = (2 + kStreams) * kStreams;  // 24 rows of fn
constexpr int kCoefficientTiles = kCoefficients / 8;
constexpr int kTokens = 16;           // of a tile: the rows of an mma
constexpr int kColumns = 128;         // of each stream in a block
constexpr int kWarps = kStreams * 2;  // a warp has half the columns of a stream
constexpr int kWarpColumns = kColumns / 2;
constexpr int kThreads = kWarps * 32;
constexpr int kPieces = kColumns / 8;        // of 8 columns; a thread has one of one token
constexpr int kRowElements = kColumns + 32;  // of a token in shared memory: no bank conflicts
constexpr int kStages = 3;
constexpr int64_t kMostBlocks = 2 * kMultiprocessors;
constexpr int kRowPieces = 4;  // of 8 columns of u that a thread of kernel 2 holds
constexpr int64_t kMostColumns = kRowPieces * kThreads * 8;
static_assert(kTokens * kPieces == kThreads);

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
  float* prediction;  // scratch [T, D / 128, 24]
  float* square;      // scratch [T, D / 128]
};

struct Stage {
  Bf16 x[kStreams][kTokens][kRowElements];
  Bf16 y[kTokens][kColumns];
  float pre[kTokens][kStreams], post[kTokens][kStreams], comb[kTokens][kStreams * kStreams];
};

struct StreamShared {
  Stage stage[kStages];
  float part[kWarps][kTokens][kCoefficients];
};

// A warp's columns of fn as B operands. The 16 columns of an mma are chosen so that a lane's pieces
// of fn and of the streams are 8 contiguous columns for two of them.
struct Predictor {
  static constexpr int kParts = F32Weights::kParts;
  uint32_t b[kWarpColumns / 32][2][kCoefficientTiles][kParts][2];

  // `fn`: the warp's first column of row 0.
  __device__ __forceinline__ Predictor(const float* fn, int64_t row_stride, const Lane& lane) {
#pragma unroll
    for (int p = 0; p < kWarpColumns / 32; ++p) {
#pragma unroll
      for (int n = 0; n < kCoefficientTiles; ++n) {
        const float* from = fn + (n * 8 + lane.g) * row_stride + 32 * p + 8 * lane.t;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 v = *reinterpret_cast<const uint4*>(from + 4 * i);
          uint32_t low[kParts], high[kParts];
          F32Weights::split(low, v.x, v.y);
          F32Weights::split(high, v.z, v.w);
#pragma unroll
          for (int q = 0; q < kParts; ++q) {
            b[p][i][n][q][0] = low[q];
            b[p][i][n][q][1] = high[q];
          }
        }
      }
    }
  }

  // Predictions of 16 tokens from the warp's columns; `rows` is its first column of token 0.
  __device__ __forceinline__ void run(const Bf16* rows,
                                      const Lane& lane,
                                      float (&sum)[kCoefficientTiles][4]) const {
#pragma unroll
    for (int p = 0; p < kWarpColumns / 32; ++p) {
      const Bf16* from = rows + lane.g * kRowElements + 32 * p + 8 * lane.t;
      const uint4 low = *reinterpret_cast<const uint4*>(from);
      const uint4 high = *reinterpret_cast<const uint4*>(from + 8 * kRowElements);
#pragma unroll
      for (int q = 0; q < kParts; ++q) {
#pragma unroll
        for (int n = 0; n < kCoefficientTiles; ++n) {
          const auto& first = b[p][0][n][q];
          mma_bf16(sum[n], low.x, high.x, low.y, high.y, first[0], first[1]);
        }
      }
#pragma unroll
      for (int q = 0; q < kParts; ++q) {
#pragma unroll
        for (int n = 0; n < kCoefficientTiles; ++n) {
          const auto& second = b[p][1][n][q];
          mma_bf16(sum[n], low.z, high.z, low.w, high.w, second[0], second[1]);
        }
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads, 2) stream_kernel(const __grid_constant__ Site s) {
  auto& shared = *reinterpret_cast<StreamShared*>(dynamic_shared());
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t chunk = blockIdx.x, chunks = gridDim.x, i0 = chunk * kColumns;
  const int stream = warp / 2, first = warp % 2 * kWarpColumns;
  const Predictor predictor(s.fn + stream * s.d + i0 + first, kStreams * s.d, lane);
  wait_for_previous_kernels();
  allow_next_kernel();

  const int n = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces, c = piece * 8;
  const bool pending = s.pending.y != nullptr;
  // The thread's own piece of a tile, and a share of what the 16 threads of the token need.
  const auto fetch = [&](int64_t tile, Stage& to) {
    const int64_t token = tile * kTokens + n;
    if (token < s.tokens) {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        copy_async(&to.x[j][n][c], s.x + (token * kStreams + j) * s.d + i0 + c, true);
      }
      if (piece == 0) {
        copy_async(to.pre[n], s.pre + token * kStreams, true);
      }
      if (pending) {
        const PendingRow<Bf16> row = s.pending.row(token, kStreams, s.d);
        copy_async(&to.y[n][c], row.y + i0 + c, true);
        if (piece == 1) {
          copy_async(to.post[n], row.post, true);
        } else if (piece >= 2 && piece < 2 + kStreams) {
          copy_async(&to.comb[n][(piece - 2) * 4], row.comb + (piece - 2) * 4, true);
        }
      }
    }
    copy_async_commit();
  };
  const int64_t stride = gridDim.y;
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    fetch(blockIdx.y + i * stride, shared.stage[i]);
  }
  int at = 0;
  for (int64_t token0 = blockIdx.y * int64_t{kTokens}; token0 < s.tokens;
       token0 += stride * kTokens) {
    Stage& stage = shared.stage[at];
    const int64_t token = token0 + n;
    copy_async_wait<kStages - 1>();
    __syncwarp();
    float square = 0;
    if (token < s.tokens) {
      constexpr int64_t kStreamElements = kTokens * kRowElements;
      float v[kStreams][8], u[8];
      const PendingRow<Bf16> row =
          pending ? PendingRow<Bf16>{&stage.y[n][c], stage.post[n], stage.comb[n]}
                  : PendingRow<Bf16>{};
      // The row of y begins at this thread's piece, as that of x does.
      expand_columns<Bf16, kStreams, 8>(&stage.x[0][n][c], row, kStreams, kStreamElements, 0, v);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        if (pending) {
          store_elements<8>(&stage.x[j][n][c], v[j]);
        }
        if (s.x_out != s.x) {
          store_elements<8>(s.x_out + (token * kStreams + j) * s.d + i0 + c, v[j]);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          square = fmaf(v[j][e], v[j][e], square);
        }
      }
      collapse_columns<Bf16, kStreams, 8>(v, stage.pre[n], kStreams, u);
      store_elements<8>(s.u + token * s.d + i0 + c, u);
    }
#pragma unroll
    for (int step = 1; step < kPieces; step *= 2) {
      square += __shfl_xor_sync(kAllLanes, square, step);
    }
    if (piece == 0 && token < s.tokens) {
      s.square[token * chunks + chunk] = square;
    }
    __syncthreads();

    float sum[kCoefficientTiles][4] = {};
    predictor.run(&stage.x[stream][0][first], lane, sum);
#pragma unroll
    for (int i = 0; i < kCoefficientTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(&shared.part[warp][lane.g + 8 * h][i * 8 + 2 * lane.t]) =
            make_float2(sum[i][2 * h], sum[i][2 * h + 1]);
      }
    }
    __syncthreads();
    fetch(token0 / kTokens + kStages * stride, stage);
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kCoefficients; i += kThreads) {
      const int64_t of = token0 + i / kCoefficients;
      if (of < s.tokens) {
        float value = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          value += (&shared.part[w][0][0])[i];
        }
        s.prediction[(of * chunks + chunk) * kCoefficients + i % kCoefficients] = value;
      }
    }
    at = at + 1 == kStages ? 0 : at + 1;
  }
}

// One warp: pre and post of a token; its 16 values of comb before the first division by column sums
// go to `comb`. Coefficient l is lane l's; five groups of six lanes add the chunks, four
// coefficients each.
__device__ void predict_token(const Site& s, int64_t token, float* comb) {
  constexpr int kGroup = kCoefficients / 4, kGroups = 32 / kGroup;
  const int lane = static_cast<int>(threadIdx.x) % 32, four = lane % kGroup;
  const int64_t chunks = s.d / kColumns;
  float4 sum = {};
  if (lane < kGroups * kGroup) {
#pragma unroll 8
    for (int64_t c = lane / kGroup; c < chunks; c += kGroups) {
      const float4 v = *reinterpret_cast<const float4*>(
          s.prediction + (token * chunks + c) * kCoefficients + 4 * four);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
  }
  float square = 0;
  for (int64_t c = lane; c < chunks; c += 32) {
    square += s.square[token * chunks + c];
  }
  square = warp_sum(square);
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
  const int kind = lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2;
  const float value =
      lane < kCoefficients
          ? own * rms_factor(square, kStreams * s.d, s.rms_eps) * s.scale[kind] + s.base[lane]
          : 0.0f;
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

// Divides by the sums of the rows (kRows) or columns, each plus eps.
template <bool kRows>
__device__ __forceinline__ void balance(float (&c)[kStreams][kStreams], float eps) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const auto at = [&](int k) -> float& { return kRows ? c[i][k] : c[k][i]; };
    const float factor = __fdividef(1.0f, (at(0) + at(1)) + (at(2) + at(3)) + eps);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      at(k) *= factor;
    }
  }
}

// One thread: the Sinkhorn iterations of a token.
__device__ void balance_token(const Site& s, const float* comb, int64_t token) {
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

__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Site s) {
  __shared__ float slots[kWarps];
  __shared__ float comb[kWarps][kStreams * kStreams + 1];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t predictors = (s.tokens + kWarps - 1) / kWarps;
  if (blockIdx.x < predictors) {
    const int64_t token0 = blockIdx.x * kWarps;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (token0 + warp < s.tokens) {
      predict_token(s, token0 + warp, comb[warp]);
    }
    __syncthreads();
    if (threadIdx.x < kWarps && token0 + threadIdx.x < s.tokens) {
      balance_token(s, comb[threadIdx.x], token0 + threadIdx.x);
    }
    return;
  }
  Bf16* u = s.u + (blockIdx.x - predictors) * s.d;
  const int64_t i0 = threadIdx.x * 8;
  float v[kRowPieces][8];
  float square = 0;
#pragma unroll
  for (int p = 0; p < kRowPieces; ++p) {
    const int64_t i = i0 + p * (kThreads * 8);
    if (i < s.d) {
      load_elements<8>(u + i, v[p]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        square = fmaf(v[p][e], v[p][e], square);
      }
    }
  }
  const float factor = rms_factor(block_sum(square, slots), s.d, s.rms_eps);
#pragma unroll
  for (int p = 0; p < kRowPieces; ++p) {
    const int64_t i = i0 + p * (kThreads * 8);
    if (i < s.d) {
      float weight[8];
      s.norm.load(i, weight);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        v[p][e] = v[p][e] * factor * weight[e];
      }
      store_elements<8>(u + i, v[p]);
    }
  }
}

}  // namespace

bool hc_site_mma_supports(const HcSiteArgs& args) {
  const auto aligned = [](const TensorView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  };
  const Pending& pending = args.pending;
  return args.x.dtype == DType::kBF16 && args.x.dim(1) == kStreams &&
         args.x.dim(2) % kColumns == 0 && args.x.dim(2) <= kMostColumns && aligned(args.x) &&
         aligned(args.x_out) && aligned(args.u) && aligned(args.fn) && aligned(args.norm) &&
         aligned(args.pre) && aligned(args.comb_out) && aligned(pending.y) &&
         aligned(pending.post) && aligned(pending.comb);
}

Status hc_site_mma(OpContext& ctx, const HcSiteArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(2), chunks = d / kColumns;
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
  CACHALOT_RETURN_IF_ERROR(
      launch(ctx,
             "hc_streams",
             stream_kernel,
             dim3(extent(chunks),
                  extent(std::clamp(kMostBlocks / chunks, int64_t{1}, ceil_div(t, kTokens)))),
             kThreads,
             sizeof(StreamShared),
             s));
  return launch(ctx, "hc_finish", finish_kernel, extent(ceil_div(t, kWarps) + t), kThreads, 0, s);
}

}  // namespace cachalot::ops::cuda
