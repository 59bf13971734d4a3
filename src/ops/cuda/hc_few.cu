// hc_site of few tokens, in one launch whose blocks talk through memory as they go.
//
// The first blocks have a chunk of 128 columns of the four streams each:
//   16 warps   load, expand -> x_out, operand in shared memory; collapse -> mail; squares -> mail
//   per stream [72 rows of fn x 128] [128 x 8 tokens] by mma.sync; parts and streams added in
//   order -> mail
// The other T blocks have a token each, and take its mail as it comes:
//   warps 0-7  row of u: norm
//   warp 8     predictions, Sinkhorn iterations        warp 9   factor of their norm
// All sums are those of hc_mma.cu to the last bit. fn lies in shared memory as three BF16 numbers
// each (exact) before the kernel in front has ended.
//
// A word of mail is its own flag: it is stored inverted, and zero until it is there. Who takes it
// puts zero back. Blocks start in order, so that those who are waited for run.
//
// Shared: 72 KiB of fn, 16 KiB of streams, 18 KiB of sums. Bound by what comes one after the other:
// the 39 dependent divisions of the Sinkhorn iterations alone take 1.5 us. Measured on an H200,
// three runs: 5.5, 6.8 and 6.9 us for one token, 6.1 and twice 7.5 for 8.
#include "ops/cuda/hc_site.cuh"

namespace cachalot::ops::cuda::hc {
namespace {

constexpr int kMostTokens = 16;  // the rows of an operand
constexpr int kMostChunks = 40;
constexpr int kTokenThreads = kColumns / 2;
constexpr int kThreads = kExpandThreads;
constexpr int kRows = kParts * kCoefficients;  // of an operand's stream
constexpr int kRowTiles = (kRows + 15) / 16;
constexpr int kMmaTokens = 8;
constexpr int kPairColumns = kMostChunks * kColumns / 2;
constexpr int kUPieces =
    static_cast<int>(kMostChunks * kColumns + kFinishThreads * 8 - 1) / (kFinishThreads * 8);

struct Mail {
  uint32_t prediction[kMostTokens][kMostChunks][kCoefficients];
  uint32_t square[kMostTokens][kMostChunks];
  uint32_t u[kMostTokens][kPairColumns];
};
// Empty between calls, which follow each other on the device.
__device__ Mail mail;

// No result of arithmetic is the NaN whose inverse is zero.
__device__ __forceinline__ void send(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(~word) : "memory");
}
__device__ __forceinline__ void look(const uint32_t* from, uint4& v) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void look(const uint32_t* from, uint32_t& v) {
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
}
__device__ __forceinline__ bool is_there(const uint4& v) {
  return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0;
}
__device__ __forceinline__ bool is_there(uint32_t v) {
  return v != 0;
}
__device__ __forceinline__ uint4 inverted(const uint4& v) {
  return make_uint4(~v.x, ~v.y, ~v.z, ~v.w);
}
__device__ __forceinline__ uint32_t inverted(uint32_t v) {
  return ~v;
}
// Takes mail i = 0 .. kCount - 1 from place(i), null where there is none. All of it is looked at
// before any is checked: one latency, not kCount.
template <class Word, int kCount, class Place>
__device__ __forceinline__ void take(Word (&v)[kCount], const Place& place) {
  bool all;
  do {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (const uint32_t* from = place(i); from != nullptr) {
        look(from, v[i]);
      }
    }
    all = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      all = all && (place(i) == nullptr || is_there(v[i]));
    }
  } while (!all);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (uint32_t* from = place(i); from != nullptr) {
      *reinterpret_cast<Word*>(from) = Word{};
      v[i] = inverted(v[i]);
    }
  }
}

struct Shared {
  Bf16 x[kStreams][kColumns / kOperandColumns][kMostTokens][kOperandColumns];
  Predictor fn;
  Bf16 beyond[kRowTiles * 16 - kRows][kOperandColumns];  // rows that fill up the last tile of fn
  float part[kStreams][kMostTokens][kRows];
  float square[kMostTokens][kTokenThreads / 32];
};
// Of a token's block, in its place.
struct TokenShared {
  float weight[kMostChunks * kColumns];
  float slots[kFinishWarps];
  float comb[kStreams * kStreams];
  float factor;
};
static_assert(2 * sizeof(Shared) <= kSharedCapacity && sizeof(TokenShared) <= sizeof(Shared));

// Barriers of a token's block; 1 is that of norm_factor().
constexpr int kFactorBarrier = 2;

__device__ __forceinline__ void make_row(const Site& s, int64_t token, TokenShared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto column = [&](int p) { return (thread + p * kFinishThreads) * 8; };
#pragma unroll
  for (int p = 0; p < kUPieces; ++p) {
    if (column(p) < s.d) {
      float weight[8];
      s.norm.load(column(p), weight);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        shared.weight[column(p) + e] = weight[e];
      }
    }
  }
  wait_for_previous_kernels();
  allow_next_kernel();
  uint4 raw[kUPieces];
  take(raw, [&](int p) { return column(p) < s.d ? mail.u[token] + column(p) / 2 : nullptr; });
  float square = 0;
#pragma unroll
  for (int p = 0; p < kUPieces; ++p) {
    if (column(p) < s.d) {
      square = add_squares(raw[p], square);
    }
  }
  const float factor = norm_factor(s, square, shared.slots);
#pragma unroll
  for (int p = 0; p < kUPieces; ++p) {
    if (column(p) < s.d) {
      float weight[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        weight[e] = shared.weight[column(p) + e];
      }
      store_normed(s.u + token * s.d + column(p), raw[p], factor, weight);
    }
  }
}

__device__ __forceinline__ void make_coefficients(const Site& s,
                                                  int64_t token,
                                                  TokenShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunks = static_cast<int>(s.d / kColumns);
  const Affine affine(s);
  wait_for_previous_kernels();
  allow_next_kernel();
  constexpr int kMost = (kMostChunks + kGroups - 1) / kGroups;
  const auto chunk = [&](int i) { return lane / kGroup + i * kGroups; };
  uint4 v[kMost];
  take(v, [&](int i) {
    return lane < kGroups * kGroup && chunk(i) < chunks
               ? &mail.prediction[token][chunk(i)][lane % kGroup * 4]
               : nullptr;
  });
  float4 sum = {};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (lane < kGroups * kGroup && chunk(i) < chunks) {
      sum.x += __uint_as_float(v[i].x), sum.y += __uint_as_float(v[i].y);
      sum.z += __uint_as_float(v[i].z), sum.w += __uint_as_float(v[i].w);
    }
  }
  group_barrier(kFactorBarrier, 2 * 32);
  predict_token(s, token, sum, shared.factor, affine, shared.comb);
  __syncwarp();
  if (lane == 0) {
    balance_token(s, shared.comb, token);
  }
}

__device__ __forceinline__ void make_factor(const Site& s, int64_t token, TokenShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunks = static_cast<int>(s.d / kColumns);
  wait_for_previous_kernels();
  allow_next_kernel();
  uint32_t v[(kMostChunks + 31) / 32];
  take(v, [&](int i) {
    return lane + 32 * i < chunks ? &mail.square[token][lane + 32 * i] : nullptr;
  });
  float square = 0;
#pragma unroll
  for (int i = 0; i < (kMostChunks + 31) / 32; ++i) {
    if (lane + 32 * i < chunks) {
      square += __uint_as_float(v[i]);
    }
  }
  const float factor = rms_factor(warp_sum(square), kStreams * s.d, s.rms_eps);
  if (lane == 0) {
    shared.factor = factor;
  }
  group_barrier_arrive(kFactorBarrier, 2 * 32);
}

template <bool kPending>
__global__ void __launch_bounds__(kThreads, 2) few_kernel(const __grid_constant__ Site s) {
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = uniform_warp();
  const int chunks = static_cast<int>(s.d / kColumns);
  const int tokens = static_cast<int>(s.tokens), chunk = static_cast<int>(blockIdx.x);
  if (chunk >= chunks) {
    const int64_t token = chunk - chunks;
    auto& of_token = *reinterpret_cast<TokenShared*>(dynamic_shared());
    if (warp < kFinishWarps) {
      make_row(s, token, of_token);
    } else if (warp == kFinishWarps) {
      make_coefficients(s, token, of_token);
    } else if (warp == kFinishWarps + 1) {
      make_factor(s, token, of_token);
    }
    return;
  }
  load_predictor(s.fn + chunk * kColumns, s.d, shared.fn);
  wait_for_previous_kernels();
  allow_next_kernel();
  const int of_token = thread % kTokenThreads, half = of_token / 32;
  const int column = chunk * kColumns + 2 * of_token;
#pragma unroll
  for (int first = 0; first < kMostTokens; first += kThreads / kTokenThreads) {
    const int64_t token = first + thread / kTokenThreads;
    if (token >= tokens) {
      break;
    }
    uint32_t x[kStreams], y = 0;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      x[j] = *reinterpret_cast<const uint32_t*>(s.x + (token * kStreams + j) * s.d + column);
    }
    if constexpr (kPending) {
      y = *reinterpret_cast<const uint32_t*>(s.pending.y + token * s.d + column);
    }
    float c[kCoefficients];
    load_coefficients<kPending>(s, token, c);
    const Word made = expand_word<kPending>(x, y, c);
    send(&mail.u[token][column / 2], made.u);
    const int piece = of_token / 4 % 8;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      *reinterpret_cast<uint32_t*>(
          &shared.x[j][half][token][(piece ^ token % 8) * 8 + of_token % 4 * 2]) = made.x[j];
      if (s.x_out != s.x) {
        *reinterpret_cast<uint32_t*>(s.x_out + (token * kStreams + j) * s.d + column) = made.x[j];
      }
    }
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
  if (thread < tokens) {
    send(&mail.square[thread][chunk],
         __float_as_uint(shared.square[thread][0] + shared.square[thread][1]));
  }
  // A warp's scheduler is that of warp % 4: each has a stream.
  const int stream = warp % kStreams;
  const Lane of_mma;
#pragma unroll 1
  for (int rows = warp / kStreams; rows < kRowTiles; rows += kThreads / 32 / kStreams) {
#pragma unroll 1
    for (int n0 = 0; n0 < tokens; n0 += kMmaTokens) {
      constexpr int kPairs = kColumns / 32;  // of 16 columns of K
      uint32_t a[kPairs][2][4], b[kPairs][4];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int h = k / 2, first = k % 2 * 4;  // piece of the operand's row
        const int row = n0 + lane % 8, piece = first + lane / 8;
        load_matrices(b[k], &shared.x[stream][h][row][(piece ^ row % 8) * 8]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int of_fn = rows * 16 + lane % 16, piece_of_fn = first + 2 * i + lane / 16;
          load_matrices(a[k][i],
                        &shared.fn[stream][h][0][0] + of_fn * kOperandColumns +
                            (piece_of_fn ^ of_fn % 8) * 8);
        }
      }
      float acc[4] = {};
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t (&at)[4] = a[k][i];
          mma_bf16(acc, at[0], at[1], at[2], at[3], b[k][2 * i], b[k][2 * i + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = rows * 16 + of_mma.g + 8 * (i / 2);
        if (row < kRows) {
          shared.part[stream][n0 + 2 * of_mma.t + i % 2][row] = acc[i];
        }
      }
    }
  }
  __syncthreads();
  if (thread < tokens * kCoefficients) {
    const int of_row = thread % kCoefficients, row = thread / kCoefficients;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float* part = shared.part[j][row] + of_row;
      sum += part[0] + (part[kCoefficients] + part[2 * kCoefficients]);
    }
    send(&mail.prediction[row][chunk][of_row], __float_as_uint(sum));
  }
}

}  // namespace

bool few_supports(const Site& s) {
  return s.tokens <= kMostTokens && s.d <= kMostChunks * kColumns;
}

Status few(const OpContext& ctx, const Site& s) {
  return launch(ctx,
                "hc_site",
                s.pending.y == nullptr ? few_kernel<false> : few_kernel<true>,
                extent(s.d / kColumns + s.tokens),
                kThreads,
                sizeof(Shared),
                s);
}

}  // namespace cachalot::ops::cuda::hc
