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
// At most 8 tokens take a form of it that has two columns per thread and multiplies with mma.sync.
// All sums are the same to the last bit, so a row does not depend on how many there are.
// Kernel 2, blocks of 8 warps:
//   the first ceil(T / 8) blocks: a warp per token sums the partial predictions, then a thread per
//   token runs the Sinkhorn iterations; the other T blocks normalize a row of u each, those written
//   last first.
// Shared (kernel 1): 128 KiB of streams, 72 KiB of fn, 12 KiB of coefficients. Bytes: (2 M + 2) D
// elements per token, plus 2 D for the second pass over u, 4 KB of partial sums; fn (2 MB) once per
// block. Bound by the latency of its reads with many tokens (the first kernel moved 3.0 TB/s of 4.0
// before the prefetch, with 39 % of the issue slots busy), by that of two launches with few.
// Measured on an H200: 7.3 us for one token, 8.0 for 8, 11.9 for 64, 324 for 8192.
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/warpgroup.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/streams.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kStreams = 4;
constexpr int kCoefficients = (2 + kStreams) * kStreams;  // 24 rows of fn
constexpr int kCoefficientTiles = kCoefficients / 8;
constexpr int kParts = F32Weights::kParts;

// Kernel 1
constexpr int kTokens = 64;          // of a tile at most: the rows of a wgmma
constexpr int kColumns = 128;        // of each stream in a block
constexpr int kOperandColumns = 64;  // of an operand's row
constexpr int kSteps = kOperandColumns / 16;
constexpr int kExpandWarps = 16;
constexpr int kExpandThreads = kExpandWarps * 32;
constexpr int kThreads = kExpandThreads + 128;
constexpr int kExpandRegisters = 104, kMultiplyRegisters = 64;
constexpr int kPieces = kColumns / 8;  // of 8 columns; a thread has one of a token at a time
constexpr int kRoundTokens = kExpandThreads / kPieces;
constexpr int kRounds = kTokens / kRoundTokens;
constexpr int kLeastTile = 16;  // tokens, unless there are fewer

// Kernel 1 for few tokens
constexpr int kFewTokens = 8;
constexpr int kFewRows = 16;  // of an mma
constexpr int kTokenThreads = kColumns / 2;
constexpr int kFewThreads = kFewTokens * kTokenThreads;

// Kernel 2
constexpr int kFinishWarps = 8;
constexpr int kFinishThreads = kFinishWarps * 32;
constexpr int kRowPieces = 4;  // of 8 columns of u that a thread holds
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

constexpr int kBuffers = 2;  // tiles of expanded streams

// Operands are rows of 64 elements, piece p of row r at p ^ (r % 8).
using Predictor =
    Bf16[kStreams][kColumns / kOperandColumns][kParts * kCoefficients][kOperandColumns];
struct StreamShared {
  Bf16 x[kBuffers][kStreams][kColumns / kOperandColumns][kTokens][kOperandColumns];
  Predictor fn;
  float coefficients[2][kTokens][kCoefficients];  // pre, post and comb of a tile and the next one
  uint64_t filled[kBuffers];
  uint64_t emptied[kBuffers];
};
static_assert(sizeof(StreamShared) <= kSharedCapacity);

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

// Eight columns of a token, as loaded.
struct Piece {
  uint4 x[kStreams];
  uint4 y;
};

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

struct Expanded {
  uint32_t x[kStreams][4];
  uint32_t u[4];
  float square;
};

// `coefficients` are the token's pre, post and comb.
template <bool kPending>
__device__ __forceinline__ Expanded expand(const Piece& piece, const float* coefficients) {
  float c[kCoefficients];
  load_coefficients<kPending>(
      coefficients, coefficients + kStreams, coefficients + 2 * kStreams, c);
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
      const Bf16* x = s.x + token * row_elements + column;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        raw.x[j] = __ldcs(reinterpret_cast<const uint4*>(x + j * s.d));
      }
      if constexpr (kPending) {
        raw.y = __ldcs(reinterpret_cast<const uint4*>(s.pending.y + token * s.d + column));
      }
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
        const Expanded out = expand<kPending>(raw, shared.coefficients[buffer][of_tile]);
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

struct FewShared {
  Bf16 x[kStreams][kColumns / kOperandColumns][kFewRows][kOperandColumns];
  Predictor fn;
  float part[kStreams][kFewRows][kCoefficients];
  float square[kFewTokens][kTokenThreads / 32];
};

// Kernel 1 for at most kFewTokens tokens: a thread has two columns of a token, a warp 8 predictions
// of one stream. The sums are those of stream_kernel() to the last bit.
template <bool kPending>
__global__ void __launch_bounds__(kFewThreads, 1) few_kernel(const __grid_constant__ Site s) {
  static_assert(kFewThreads == kExpandThreads);  // of load_predictor()
  auto& shared = *reinterpret_cast<FewShared*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t chunk = blockIdx.x, chunks = gridDim.x;
  load_predictor(s.fn + chunk * kColumns, s.d, shared.fn);
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t token = thread / kTokenThreads;
  const int of_token = thread % kTokenThreads, half = of_token / 32;
  const int64_t column = chunk * kColumns + 2 * of_token;
  if (token < s.tokens) {
    uint32_t x[kStreams], y = 0;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      x[j] = *reinterpret_cast<const uint32_t*>(s.x + (token * kStreams + j) * s.d + column);
    }
    if constexpr (kPending) {
      y = *reinterpret_cast<const uint32_t*>(s.pending.y + token * s.d + column);
    }
    float c[kCoefficients];
    load_coefficients<kPending>(s.pre + token * kStreams,
                                s.pending.post + token * kStreams,
                                s.pending.comb + token * kStreams * kStreams,
                                c);
    const Word made = expand_word<kPending>(x, y, c);
    const int piece = of_token / 4 % 8;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      *reinterpret_cast<uint32_t*>(
          &shared.x[j][half][token][(piece ^ static_cast<int>(token)) * 8 + of_token % 4 * 2]) =
          made.x[j];
      if (s.x_out != s.x) {
        *reinterpret_cast<uint32_t*>(s.x_out + (token * kStreams + j) * s.d + column) = made.x[j];
      }
    }
    *reinterpret_cast<uint32_t*>(s.u + token * s.d + column) = made.u;
    float square = made.square;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      square += __shfl_xor_sync(kAllLanes, square, step);
    }
    if (lane == 0) {
      shared.square[token][half] = square;
    }
  }
  __syncthreads();
  const int stream = warp / 4, tile = warp % 4;
  if (tile < kCoefficientTiles) {
    float acc[kParts][4] = {};
#pragma unroll
    for (int k = 0; k < kColumns / 32; ++k) {
      const int h = k / 2, first = k % 2 * 4;  // piece of the operand's row
      uint32_t a[2][4], b[kParts][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane % kFewRows, piece = first + 2 * i + lane / kFewRows;
        load_matrices(a[i], &shared.x[stream][h][row][(piece ^ row % 8) * 8]);
      }
#pragma unroll
      for (int q = 0; q < kParts; ++q) {
        const int row = lane % 8, piece = first + lane / 8;
        load_matrices(b[q],
                      &shared.fn[stream][h][q * kCoefficients + tile * 8 + row][(piece ^ row) * 8]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int q = 0; q < kParts; ++q) {
          mma_bf16(acc[q], a[i][0], a[i][1], a[i][2], a[i][3], b[q][2 * i], b[q][2 * i + 1]);
        }
      }
    }
    const Lane of_mma;
    *reinterpret_cast<float2*>(&shared.part[stream][of_mma.g][tile * 8 + 2 * of_mma.t]) =
        make_float2(acc[0][0] + (acc[1][0] + acc[2][0]), acc[0][1] + (acc[1][1] + acc[2][1]));
  }
  __syncthreads();
  if (thread < s.tokens * kCoefficients) {
    const int of_row = thread % kCoefficients, row = thread / kCoefficients;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      sum += shared.part[j][row][of_row];
    }
    s.prediction[(row * chunks + chunk) * kCoefficients + of_row] = sum;
  }
  if (thread < s.tokens) {
    s.square[thread * chunks + chunk] = shared.square[thread][0] + shared.square[thread][1];
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

__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ Site s) {
  __shared__ float slots[kFinishWarps];
  __shared__ float comb[kFinishWarps][kStreams * kStreams + 1];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t predictors = (s.tokens + kFinishWarps - 1) / kFinishWarps;
  if (blockIdx.x < predictors) {
    const int64_t token0 = blockIdx.x * kFinishWarps;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (token0 + warp < s.tokens) {
      predict_token(s, token0 + warp, comb[warp]);
    }
    __syncthreads();
    if (threadIdx.x < kFinishWarps && token0 + threadIdx.x < s.tokens) {
      balance_token(s, comb[threadIdx.x], token0 + threadIdx.x);
    }
    return;
  }
  // The rows written last first.
  Bf16* u = s.u + (s.tokens - 1 - (blockIdx.x - predictors)) * s.d;
  const int64_t i0 = threadIdx.x * 8;
  float v[kRowPieces][8];
  float square = 0;
#pragma unroll
  for (int p = 0; p < kRowPieces; ++p) {
    const int64_t i = i0 + p * (kFinishThreads * 8);
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
    const int64_t i = i0 + p * (kFinishThreads * 8);
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
  // Blocks of as many rows of the grid as run at once share the tokens.
  const int64_t shares = std::clamp(kMultiprocessors / chunks, int64_t{1}, ceil_div(t, kLeastTile));
  const int64_t tile = std::min<int64_t>(kTokens, ceil_div(t, shares));
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
               .tile = static_cast<int>(tile),
               .d = d,
               .x_out = static_cast<Bf16*>(args.x_out.data),
               .pre_out = args.pre_out.as<float>(),
               .post_out = args.post_out.as<float>(),
               .comb_out = args.comb_out.as<float>(),
               .u = static_cast<Bf16*>(args.u.data),
               .prediction = scratch.array<float>(t * chunks * kCoefficients),
               .square = scratch.array<float>(t * chunks)};
  CACHALOT_RETURN_IF_ERROR(scratch.status("hc_site"));
  const bool few = t <= kFewTokens, pending = !args.pending.empty();
  CACHALOT_RETURN_IF_ERROR(
      few ? launch(ctx,
                   "hc_streams",
                   pending ? few_kernel<true> : few_kernel<false>,
                   extent(chunks),
                   kFewThreads,
                   sizeof(FewShared),
                   s)
          : launch(ctx,
                   "hc_streams",
                   pending ? stream_kernel<true> : stream_kernel<false>,
                   dim3(extent(chunks), extent(std::min(shares, ceil_div(t, tile)))),
                   kThreads,
                   sizeof(StreamShared),
                   s));
  return launch(
      ctx, "hc_finish", finish_kernel, extent(ceil_div(t, kFinishWarps) + t), kFinishThreads, 0, s);
}

}  // namespace cachalot::ops::cuda
