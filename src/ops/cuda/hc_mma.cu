// One hyper-connection site for BF16 streams, M = 4: expand, predict, collapse, normalize.
//
//   v = [x_out_0 | .. | x_out_3]     m = (fn v) / rms(v)     u = norm(round(sum_j pre_j x_out_j))
//   pre = sigmoid(m scale_0 + base) + eps, post = 2 sigmoid(..), comb = sinkhorn(m scale_2 + base)
//
// in   x [T, 4, D] bf16, pending (y, post, comb) or none, pre [T, 4], fn [24, 4 D] f32, base [24],
//      scale [3], norm [D]
// out  x_out [T, 4, D], pre_out, post_out [T, 4], comb_out [T, 4, 4], u [T, D]
//
// Kernel 1: a block has 128 columns of the four streams and every n-th tile of up to 64 tokens. Its
// slice of fn lies in shared memory as three BF16 numbers each (exact), 72 columns of a product.
//   16 warps    four tokens of a tile each, in two rounds; a thread has 8 columns, while the next
//               ones are on their way to its registers and those of the next tile to L2: expand
//               -> x_out, operand in one of two buffers, sum of squares; collapse -> u, not yet
//               normalized
//   warpgroup   per stream: [64 tokens x 128] [128 x 72] by wgmma, the three parts added; the four
//               streams added in order -> scratch
// Kernel 2, blocks of 8 warps:
//   the first ceil(T / 8) blocks: a warp per token sums the partial predictions, then a thread per
//   token runs the Sinkhorn iterations; the others, three per multiprocessor at most, normalize row
//   after row of u, those written last first, with the norm's weights in registers.
// At most 16 tokens take hc_few.cu, with the same sums to the last bit: a row does not depend on
// how many there are.
//
// Shared (kernel 1): 128 KiB of streams, 72 KiB of fn, 12 KiB of coefficients. Bytes: (2 M + 2) D
// elements per token, plus 2 D for the second pass over u, 4 KB of partial sums; fn (2 MB) once per
// block. Bound by the latency of its reads (the first kernel moved 3.0 TB/s of 4.0 before the
// prefetch, with 39 % of the issue slots busy). Measured on an H200: 9.5 to 11.6 us for 64 tokens,
// 322 for 8192.
#include <cfloat>

#include "ops/cuda/hc_site.cuh"

namespace cachalot::ops::cuda {
namespace {

using namespace hc;

// Kernel 1
constexpr int kTokens = 64;  // of a tile at most: the rows of a wgmma
constexpr int kSteps = kOperandColumns / 16;
constexpr int kExpandWarps = kExpandThreads / 32;
constexpr int kThreads = kExpandThreads + 128;
constexpr int kExpandRegisters = 104, kMultiplyRegisters = 64;
constexpr int kRoundTokens = kExpandThreads / kPieces;
constexpr int kRounds = kTokens / kRoundTokens;
constexpr int kLeastTile = 16;  // tokens, unless there are fewer

constexpr int64_t kRowBlocks = 3 * kMultiprocessors;  // of finish_kernel, for rows of u
constexpr int kBuffers = 2;                           // tiles of expanded streams

struct StreamShared {
  Bf16 x[kBuffers][kStreams][kColumns / kOperandColumns][kTokens][kOperandColumns];
  Predictor fn;
  float coefficients[2][kTokens][kCoefficients];  // pre, post and comb of a tile and the next one
  uint64_t filled[kBuffers];
  uint64_t emptied[kBuffers];
};
static_assert(sizeof(StreamShared) <= kSharedCapacity);

// Eight columns of a token, as loaded.
struct Piece {
  uint4 x[kStreams];
  uint4 y;
};

template <bool kPending>
__device__ __forceinline__ Piece load_piece(const Site& s, int64_t token, int64_t column) {
  Piece raw;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    raw.x[j] = __ldcs(reinterpret_cast<const uint4*>(s.x + (token * kStreams + j) * s.d + column));
  }
  if constexpr (kPending) {
    raw.y = __ldcs(reinterpret_cast<const uint4*>(s.pending.y + token * s.d + column));
  }
  return raw;
}

struct Expanded {
  uint32_t x[kStreams][4];
  uint32_t u[4];
  float square;
};

template <bool kPending>
__device__ __forceinline__ Expanded expand(const Piece& piece, const float (&c)[kCoefficients]) {
  Expanded out;
  float square[4];
  unrolled<4>([&]<int w>() {
    const uint32_t x[kStreams] = {
        word<w>(piece.x[0]), word<w>(piece.x[1]), word<w>(piece.x[2]), word<w>(piece.x[3])};
    const Word made = expand_word<kPending>(x, word<w>(piece.y), c);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      out.x[j][w] = made.x[j];
    }
    out.u[w] = made.u;
    square[w] = made.square;
  });
  // As two steps of a sum over lanes with a word each.
  out.square = (square[0] + square[1]) + (square[2] + square[3]);
  return out;
}

__device__ __forceinline__ uint4 four_words(const uint32_t (&w)[4]) {
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// A warpgroup: the predictions of a block's tiles.
__device__ __forceinline__ void multiply_tiles(const Site& s, StreamShared& shared) {
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int64_t chunk = blockIdx.x, chunks = gridDim.x;
  int buffer = 0, phase = 0;
#pragma unroll 1
  for (int64_t tile = blockIdx.y; tile * s.tile < s.tokens; tile += gridDim.y) {
    barrier_wait(&shared.filled[buffer], phase);
    float total[kCoefficientTiles][4] = {};
#pragma unroll 1
    for (int j = 0; j < kStreams; ++j) {
      float acc[kParts * kCoefficientTiles][4];
      wgmma_fence();
#pragma unroll
      for (int h = 0; h < kColumns / kOperandColumns; ++h) {
        const uint64_t a = wgmma_operand(shared.x[buffer][j][h]);
        const uint64_t b = wgmma_operand(shared.fn[j][h]);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          if (h == 0 && k == 0) {
            wgmma_bf16<false>(acc, a, b);
          } else {
            wgmma_bf16<true>(acc, a + operand_bytes(32 * k), b + operand_bytes(32 * k));
          }
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int n = 0; n < kCoefficientTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[n][i] +=
              acc[n][i] + (acc[kCoefficientTiles + n][i] + acc[2 * kCoefficientTiles + n][i]);
        }
      }
    }
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(&shared.emptied[buffer]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int of_tile = warp * 16 + lane.g + 8 * h;
      const int64_t token = tile * s.tile + of_tile;
      if (of_tile < s.tile && token < s.tokens) {
        float* to = s.prediction + (token * chunks + chunk) * kCoefficients + 2 * lane.t;
#pragma unroll
        for (int n = 0; n < kCoefficientTiles; ++n) {
          *reinterpret_cast<float2*>(to + 8 * n) =
              make_float2(total[n][2 * h], total[n][2 * h + 1]);
        }
      }
    }
    buffer ^= 1;
    phase ^= buffer == 0 ? 1 : 0;
  }
}

// A warp's tokens of a block's tiles: x_out, operands, sums of squares, and u before its norm.
template <bool kPending>
__device__ __forceinline__ void expand_tiles(const Site& s, StreamShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t chunk = blockIdx.x, chunks = gridDim.x;
  const int n = thread / kPieces, piece = thread % kPieces;
  const int64_t column = chunk * kColumns + piece * 8, row_elements = kStreams * s.d;
  const auto token_of = [&](int64_t tile, int of_tile) {
    const int64_t token = tile * s.tile + of_tile;
    return of_tile < s.tile && token < s.tokens ? token : int64_t{-1};
  };
  const auto load = [&](int64_t tile, int round) {
    Piece raw;
    const int64_t token = token_of(tile, n + round * kRoundTokens);
    if (token >= 0) {
      raw = load_piece<kPending>(s, token, column);
    }
    return raw;
  };
  // A lane copies a sixth of what the expansion of one of the warp's four tokens needs.
  const int four = lane % (kCoefficients / 4), fetched = lane / (kCoefficients / 4);
  const int fetched_of_tile = thread / 32 * 2 + fetched % 2 + fetched / 2 * kRoundTokens;
  const auto fetch_coefficients = [&](int64_t tile, int to) {
    const int64_t token = token_of(tile, fetched_of_tile);
    if (fetched < 2 * kRounds && token >= 0 && (kPending || four == 0)) {
      const float* from = four == 0   ? s.pre + token * kStreams
                          : four == 1 ? s.pending.post + token * kStreams
                                      : s.pending.comb + (token * kStreams + four - 2) * kStreams;
      copy_async(&shared.coefficients[to][fetched_of_tile][4 * four], from, true);
    }
    copy_async_commit();
  };

  const int64_t stride = gridDim.y;
  fetch_coefficients(blockIdx.y, 0);
  Piece raw = load(blockIdx.y, 0);
  int buffer = 0, phase = 1;
#pragma unroll 1
  for (int64_t tile = blockIdx.y; tile * s.tile < s.tokens; tile += stride) {
    copy_async_wait<0>();
    __syncwarp();
    fetch_coefficients(tile + stride, buffer ^ 1);
    if (piece % 8 == 0) {
      // A lane per line of 128 bytes.
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const int64_t token = token_of(tile + stride, n + round * kRoundTokens);
        if (token >= 0) {
#pragma unroll
          for (int j = 0; j < kStreams; ++j) {
            prefetch_to_l2(s.x + token * row_elements + column + j * s.d);
          }
          if constexpr (kPending) {
            prefetch_to_l2(s.pending.y + token * s.d + column);
          }
        }
      }
    }
    barrier_wait(&shared.emptied[buffer], phase);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const Piece next = round + 1 < kRounds ? load(tile, round + 1) : load(tile + stride, 0);
      const int of_tile = n + round * kRoundTokens;
      const int64_t token = token_of(tile, of_tile);
      float square = 0;
      if (token >= 0) {
        const float* from = shared.coefficients[buffer][of_tile];
        float c[kCoefficients];
        load_coefficients<kPending>(from, from + kStreams, from + 2 * kStreams, c);
        const Expanded out = expand<kPending>(raw, c);
        square = out.square;
        Bf16* x_out = s.x_out + token * row_elements + column;
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          *reinterpret_cast<uint4*>(
              &shared.x[buffer][j][piece / 8][of_tile][(piece ^ of_tile) % 8 * 8]) =
              four_words(out.x[j]);
          if (s.x_out != s.x) {
            __stcs(reinterpret_cast<uint4*>(x_out + j * s.d), four_words(out.x[j]));
          }
        }
        __stcg(reinterpret_cast<uint4*>(s.u + token * s.d + column), four_words(out.u));
      }
#pragma unroll
      for (int step = 1; step < kPieces; step *= 2) {
        square += __shfl_xor_sync(kAllLanes, square, step);
      }
      if (piece == 0 && token >= 0) {
        s.square[token * chunks + chunk] = square;
      }
      raw = next;
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(&shared.filled[buffer]);
    }
    buffer ^= 1;
    phase ^= buffer == 0 ? 1 : 0;
  }
}

template <bool kPending>
__global__ void __launch_bounds__(kThreads, 1) stream_kernel(const __grid_constant__ Site s) {
  auto& shared = *reinterpret_cast<StreamShared*>(dynamic_shared());
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kBuffers; ++i) {
      barrier_init(&shared.filled[i], kExpandWarps);
      barrier_init(&shared.emptied[i], 4);
    }
  }
  if (warp < kExpandWarps) {
    load_predictor(s.fn + blockIdx.x * int64_t{kColumns}, s.d, shared.fn);
  }
  async_proxy_fence();
  __syncthreads();
  wait_for_previous_kernels();
  allow_next_kernel();
  if (warp < kExpandWarps) {
    raise_registers<kExpandRegisters>();
    expand_tiles<kPending>(s, shared);
  } else {
    lower_registers<kMultiplyRegisters>();
    multiply_tiles(s, shared);
  }
}

// A warp: the sums over the chunks for predict_token().
__device__ __forceinline__ void sum_and_predict(const Site& s,
                                                int64_t token,
                                                const Affine& affine,
                                                float* comb) {
  const int lane = static_cast<int>(threadIdx.x) % 32, four = lane % kGroup;
  const int chunks = static_cast<int>(s.d / kColumns);
  float4 sum = {};
  if (lane < kGroups * kGroup) {
    const float* from = s.prediction + token * chunks * kCoefficients + 4 * four;
#pragma unroll 8
    for (int c = lane / kGroup; c < chunks; c += kGroups) {
      const float4 v = *reinterpret_cast<const float4*>(from + c * kCoefficients);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
  }
  float square = 0;
  for (int c = lane; c < chunks; c += 32) {
    square += s.square[token * chunks + c];
  }
  const float factor = rms_factor(warp_sum(square), kStreams * s.d, s.rms_eps);
  predict_token(s, token, sum, factor, affine, comb);
}

// The first `predictors` blocks make the coefficients of kFinishWarps tokens each, the others rows
// of u.
__global__ void __launch_bounds__(kFinishThreads, 3)
    finish_kernel(const __grid_constant__ Site s, int predictors) {
  __shared__ float slots[2][kFinishWarps];
  __shared__ float comb[kFinishWarps][kStreams * kStreams + 1];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int block = static_cast<int>(blockIdx.x);
  allow_next_kernel();
  if (block < predictors) {
    const Affine affine(s);
    wait_for_previous_kernels();
    const int64_t token0 = int64_t{block} * kFinishWarps;
    const auto tokens = static_cast<int>(min(s.tokens - token0, int64_t{kFinishWarps}));
    if (warp < tokens) {
      sum_and_predict(s, token0 + warp, affine, comb[warp]);
    }
    __syncthreads();
    if (thread < tokens) {
      balance_token(s, comb[thread], token0 + thread);
    }
    return;
  }
  const auto column = [&](int p) { return (thread + p * kFinishThreads) * 8; };
  float weight[kRowPieces][8];
#pragma unroll
  for (int p = 0; p < kRowPieces; ++p) {
    if (column(p) < s.d) {
      s.norm.load(column(p), weight[p]);
    }
  }
  wait_for_previous_kernels();
  uint4 raw[kRowPieces];
  const auto load = [&](int64_t token) {
#pragma unroll
    for (int p = 0; p < kRowPieces; ++p) {
      if (token >= 0 && column(p) < s.d) {
        raw[p] = *reinterpret_cast<const uint4*>(s.u + token * s.d + column(p));
      }
    }
  };
  // The rows written last first.
  const int64_t stride = gridDim.x - predictors;
  int64_t token = s.tokens - 1 - (block - predictors);
  load(token);
  for (int slot = 0; token >= 0; token -= stride, slot ^= 1) {
    uint4 own[kRowPieces];
    float square = 0;
#pragma unroll
    for (int p = 0; p < kRowPieces; ++p) {
      own[p] = raw[p];
      if (column(p) < s.d) {
        square = add_squares(own[p], square);
      }
    }
    load(token - stride);
    const float factor = norm_factor(s, square, slots[slot]);
#pragma unroll
    for (int p = 0; p < kRowPieces; ++p) {
      if (column(p) < s.d) {
        store_normed(s.u + token * s.d + column(p), own[p], factor, weight[p]);
      }
    }
  }
}

}  // namespace

bool hc_site_mma_supports(const HcSiteArgs& args) {
  const auto aligned = [](const TensorView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  };
  const Pending& pending = args.pending;
  return args.x.dtype == DType::kBF16 && args.x.dim(1) == kStreams && args.hc_eps >= FLT_MIN &&
         args.x.dim(2) % kColumns == 0 && args.x.dim(2) <= kMostColumns && aligned(args.x) &&
         aligned(args.x_out) && aligned(args.u) && aligned(args.fn) && aligned(args.norm) &&
         aligned(args.pre) && aligned(args.comb_out) && aligned(pending.y) &&
         aligned(pending.post) && aligned(pending.comb);
}

Status hc_site_mma(OpContext& ctx, const HcSiteArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(2), chunks = d / kColumns;
  // Blocks of as many rows of the grid as run at once share the tokens.
  const int64_t shares = std::clamp(kMultiprocessors / chunks, int64_t{1}, ceil_div(t, kLeastTile));
  const int64_t tile = std::min<int64_t>(kTokens, ceil_div(t, shares));
  Site s{.x = static_cast<const Bf16*>(args.x.data),
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
         .tile = static_cast<int>(tile),
         .d = d,
         .x_out = static_cast<Bf16*>(args.x_out.data),
         .pre_out = args.pre_out.as<float>(),
         .post_out = args.post_out.as<float>(),
         .comb_out = args.comb_out.as<float>(),
         .u = static_cast<Bf16*>(args.u.data),
         .prediction = nullptr,
         .square = nullptr};
  if (few_supports(s)) {
    return few(ctx, s);
  }
  Scratch scratch(ctx);
  s.prediction = scratch.array<float>(t * chunks * kCoefficients);
  s.square = scratch.array<float>(t * chunks);
  CACHALOT_RETURN_IF_ERROR(scratch.status("hc_site"));
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "hc_streams",
                                  args.pending.empty() ? stream_kernel<false> : stream_kernel<true>,
                                  dim3(extent(chunks), extent(std::min(shares, ceil_div(t, tile)))),
                                  kThreads,
                                  sizeof(StreamShared),
                                  s));
  const int64_t predictors = ceil_div(t, kFinishWarps);
  return launch(ctx,
                "hc_finish",
                finish_kernel,
                extent(predictors + std::min(t, kRowBlocks)),
                kFinishThreads,
                0,
                s,
                static_cast<int>(predictors));
}

}  // namespace cachalot::ops::cuda
