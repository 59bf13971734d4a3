// Attention over the window and the selected entries on tensor cores: BF16, 512-dim heads.
//
//   o_h = sum_j e^(s_j - m) v_j / (sum_j e^(s_j - m) + e^(sink_h - m)),  s_j = (RoPE(q_h) . k_j)
//   512^-1/2
//
// in   q [T, H, 512] bf16, window rows (528 B: E4M3, E8M0 per 32) and main rows (288 B: E2M1, E4M3
// per
//      16), 16-byte aligned, read as they lie in the caches; selected [T, k]; sink [H] f32
// out  o [T, H, 512] bf16, rotated back
//
// A block has 8 warps and takes kHeads (64, or 16 when there are few tokens) heads of one token.
// Blocks of 64 keys, in the model's order:
//
//   block    addresses of all keys -> shared, once
//   warp     copy of the next 8 raw rows -> shared (cp.async)   [under way during all of the below]
//   warp     unpack its 8 rows -> K as BF16 [64][512]                                     | barrier
//   warp     S = Q K^T: 32 x 32 (16 x 16) scores over half of the 512 columns             | barrier
//   4 threads per head: running maximum, probabilities rounded to BF16, FP32 sum          | barrier
//   warp     O[all heads][64 columns] = O * rescale + P V                                 | barrier
//
// Codes become BF16 by bit placement and one multiplication (kernels of weights.cuh): both kinds of
// rows come out 2^-7 too small, which the score and output factors put back. Columns are kept in
// the order (0, 4, 1, 5, 2, 6, 3, 7) inside groups of eight, which unpacking nibbles yields; Q is
// stored in the same order and the output is put back. Shared: Q 65 KiB, K 65, raw rows 33, scores
// 34, P 9 (kHeads = 64): 207 KiB; 124 KiB for 16 heads; 8 B
// per key. Bound: 4 * 64 * 512 * keys FLOP per token;
// the bytes (215 KB per token at 640 keys) are half of that. Results do not depend on kHeads: every
// sum has the same order in both.
#include "ops/cuda/attend.cuh"
#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/kernels.h"

namespace cachalot::ops::cuda {
namespace {

constexpr int kDim = 512;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kRowsPerWarp = kKeyBlock / kWarps;
constexpr int kStride = kDim + 8;            // elements of a row of Q or K: no bank conflicts
constexpr int kScoreStride = kKeyBlock + 4;  // floats
constexpr int kProbabilityStride = kKeyBlock + 8;
constexpr int kRawBytes = 528;
constexpr int kWindowPieces = 33, kMainPieces = 18;  // of 16 bytes
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kCacheScale = 128.0f;  // both row kinds unpack to 2^-7 of their value

template <int kHeads>
struct Shared {
  uint16_t q[kHeads][kStride];
  uint16_t k[kKeyBlock][kStride];
  uint8_t raw[kKeyBlock][kRawBytes];
  float score[2][kHeads][kScoreStride];  // of the two halves of the columns
  uint16_t p[kHeads][kProbabilityStride];
  float best[kHeads];  // running maximum, in units of log2
  float sum[kHeads];
  float rescale[kHeads];
};

// Finds the rows of all keys of the token: rows[i] for key i, so that the blocks' copies wait for
// no address. All threads; returns the number of keys. Rows before `window_keys` are window rows.
__device__ __forceinline__ int find_rows(const AttendProblem& a,
                                         int64_t token,
                                         const uint8_t** rows,
                                         int& window_keys) {
  const int32_t s = a.sequence[token];
  const QueryKeys keys = window_part(a, token);
  window_keys = keys.window_keys;
  for (int i = static_cast<int>(threadIdx.x); i < window_keys; i += kThreads) {
    rows[i] = window_row(a, s, keys, i);
  }
  int selected = 0;
  if (a.main != nullptr) {
    const PagedRows pages = a.main[s];
    const auto page_rows = static_cast<uint32_t>(pages.page_rows);
    for (int base = 0; base < a.width; base += kThreads) {
      const int i = base + static_cast<int>(threadIdx.x);
      const int32_t entry = i < a.width ? a.selected[token * a.width + i] : -1;
      if (entry >= 0) {
        const uint32_t page = static_cast<uint32_t>(entry) / page_rows;
        const uint32_t row = static_cast<uint32_t>(entry) - page * page_rows;
        rows[window_keys + i] = pages.pages[page] + row * pages.row_bytes;
      }
      selected += __syncthreads_count(entry >= 0);
    }
  }
  __syncthreads();
  return window_keys + selected;
}

// Starts the copies of this warp's rows of the block at `begin`.
template <int kHeads>
__device__ __forceinline__ void fetch_rows(
    const uint8_t* const* rows, int window_keys, int keys, int begin, Shared<kHeads>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int key = begin + warp * kRowsPerWarp + i;
    if (key >= keys) {
      break;
    }
    const uint8_t* from = rows[key];
    uint8_t* to = shared.raw[warp * kRowsPerWarp + i];
    const bool window = key < window_keys;
    if (window || lane < kMainPieces) {
      copy_async(to + lane * 16, from + lane * 16, true);
    }
    if (window && lane == 0) {
      copy_async(to + (kWindowPieces - 1) * 16, from + (kWindowPieces - 1) * 16, true);
    }
  }
  copy_async_commit();
}

// BF16 pairs (i, i + 4) of eight E4M3 codes; the multiplier is 2^113 times the scale.
__device__ __forceinline__ uint4 unpack_window(uint32_t low, uint32_t high, uint32_t multiplier) {
  const auto pair = [&](uint32_t selector) {
    const uint32_t w = __byte_perm(low, high, selector);  // the codes in bytes 1 and 3
    return mul_bf16x2(merge_bits(w, 0x80008000u, (w >> 4) & 0x07F007F0u), multiplier);
  };
  return make_uint4(pair(0x4404), pair(0x5515), pair(0x6626), pair(0x7737));
}

// Unpacks this warp's rows; the first `window_rows` of the block's `count` are window rows. Lane l
// has columns 16 l .. 16 l + 15.
template <int kHeads>
__device__ __forceinline__ void unpack_rows(int count, int window_rows, Shared<kHeads>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = warp * kRowsPerWarp + i;
    uint4 v[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (row < count) {
      const uint8_t* raw = shared.raw[row];
      if (row < window_rows) {
        const uint4 codes = *reinterpret_cast<const uint4*>(raw + 16 * lane);
        const uint32_t byte = raw[kDim + lane / 2];
        const uint32_t multiplier = byte == 255u ? 0x7FC07FC0u : ((byte + 113u) << 7) * 0x00010001u;
        v[0] = unpack_window(codes.x, codes.y, multiplier);
        v[1] = unpack_window(codes.z, codes.w, multiplier);
      } else {
        const uint2 codes = *reinterpret_cast<const uint2*>(raw + 8 * lane);
        const float scale = e4m3_value(raw[kDim / 2 + lane]) * 0x1.0p119f;
        const uint32_t multiplier = bf16_pair(scale, scale);
        v[0] = make_uint4(mul_bf16x2(Fp4Weights::nibbles<0>(codes.x), multiplier),
                          mul_bf16x2(Fp4Weights::nibbles<1>(codes.x), multiplier),
                          mul_bf16x2(Fp4Weights::nibbles<2>(codes.x), multiplier),
                          mul_bf16x2(Fp4Weights::nibbles<3>(codes.x), multiplier));
        v[1] = make_uint4(mul_bf16x2(Fp4Weights::nibbles<0>(codes.y), multiplier),
                          mul_bf16x2(Fp4Weights::nibbles<1>(codes.y), multiplier),
                          mul_bf16x2(Fp4Weights::nibbles<2>(codes.y), multiplier),
                          mul_bf16x2(Fp4Weights::nibbles<3>(codes.y), multiplier));
      }
    }
    // Lanes 4 .. 7 of every eight store their halves in the other order: no bank conflicts.
    const int first = lane / 4 % 2;
    auto* to = reinterpret_cast<uint4*>(&shared.k[row][16 * lane]);
    to[first] = first == 0 ? v[0] : v[1];
    to[1 - first] = first == 0 ? v[1] : v[0];
  }
}

// Scores of this warp's tile over its half of the columns.
template <int kHeads>
__device__ __forceinline__ void multiply_keys(Shared<kHeads>& shared) {
  constexpr int kMTiles = kHeads == 64 ? 2 : 1;  // of 16 heads
  constexpr int kNTiles = kHeads == 64 ? 4 : 2;  // of 8 keys
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int half = warp / 4;
  const int head0 = kHeads == 64 ? warp % 2 * 32 : 0;
  const int key0 = kHeads == 64 ? warp / 2 % 2 * 32 : warp % 4 * 16;
  float acc[kMTiles][kNTiles][4] = {};
#pragma unroll 4
  for (int c = half * (kDim / 2); c < (half + 1) * (kDim / 2); c += 16) {
    uint32_t a[kMTiles][4], b[kNTiles / 2][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      load_matrices(a[m], &shared.q[head0 + 16 * m + lane % 16][c + 8 * (lane / 16)]);
    }
#pragma unroll
    for (int n = 0; n < kNTiles / 2; ++n) {
      load_matrices(b[n],
                    &shared.k[key0 + 16 * n + lane % 8 + 8 * (lane / 16)][c + 8 * (lane / 8 % 2)]);
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        mma_bf16(acc[m][n],
                 a[m][0],
                 a[m][1],
                 a[m][2],
                 a[m][3],
                 b[n / 2][n % 2 * 2],
                 b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
  const Lane place;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared.score[half][head0 + 16 * m + place.g + 8 * (i / 2)]
                    [key0 + 8 * n + 2 * place.t + i % 2] = acc[m][n][i];
      }
    }
  }
}

// Four threads per head, 16 keys each.
template <int kHeads>
__device__ __forceinline__ void softmax_block(int count, float factor, Shared<kHeads>& shared) {
  const int head = static_cast<int>(threadIdx.x) / 4, quarter = static_cast<int>(threadIdx.x) % 4;
  if (head >= kHeads) {
    return;
  }
  float s[16];
  float best = shared.best[head];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int key = 16 * quarter + j;
    s[j] = key < count ? (shared.score[0][head][key] + shared.score[1][head][key]) * factor
                       : -INFINITY;
    best = fmaxf(best, s[j]);
  }
  best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
  best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
  const float rescale = exp2f(shared.best[head] - best);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const float p0 = exp2f(s[j] - best), p1 = exp2f(s[j + 1] - best);
    sum += p0;
    sum += p1;
    *reinterpret_cast<uint32_t*>(&shared.p[head][16 * quarter + j]) = bf16_pair(p0, p1);
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  __syncwarp();  // all quarters have read the old maximum
  if (quarter == 0) {
    shared.best[head] = best;
    shared.rescale[head] = rescale;
    shared.sum[head] = fmaf(shared.sum[head], rescale, sum);
  }
}

// acc = acc * rescale + P V for all heads and 64 columns.
template <int kHeads>
__device__ __forceinline__ void multiply_values(const Shared<kHeads>& shared,
                                                float (&acc)[kHeads / 16][8][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Lane place;
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
    const float r0 = shared.rescale[16 * m + place.g], r1 = shared.rescale[16 * m + place.g + 8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      acc[m][n][0] *= r0;
      acc[m][n][1] *= r0;
      acc[m][n][2] *= r1;
      acc[m][n][3] *= r1;
    }
  }
#pragma unroll 1
  for (int c = 0; c < kKeyBlock; c += 16) {
    uint32_t a[kHeads / 16][4];
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
      load_matrices(a[m], &shared.p[16 * m + lane % 16][c + 8 * (lane / 16)]);
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      load_matrices_transposed(
          b, &shared.k[c + lane % 8 + 8 * (lane / 8 % 2)][64 * warp + 8 * n + 8 * (lane / 16)]);
#pragma unroll
      for (int m = 0; m < kHeads / 16; ++m) {
        mma_bf16(acc[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
        mma_bf16(acc[m][n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
      }
    }
  }
}

// Q of the block's heads, rotated and rounded, in the order of the unpacked rows.
template <int kHeads>
__device__ __forceinline__ void load_queries(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             Shared<kHeads>& shared) {
  const auto* q = static_cast<const Bf16*>(a.q) + (token * a.heads + head0) * kDim;
  const float* cos_sin = a.rope + token * a.half * 2;
  const int first_rotated = kDim - 2 * static_cast<int>(a.half);
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * kDim / 8; i += kThreads) {
    const int head = i / (kDim / 8), column = i % (kDim / 8) * 8;
    float v[8];
    load_elements<8>(q + head * kDim + column, v);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int pair = column + e - first_rotated;
      if (pair >= 0) {
        const float2 turned = rotate_pair(v[e], v[e + 1], cos_sin[pair], cos_sin[pair + 1]);
        v[e] = turned.x;
        v[e + 1] = turned.y;
      }
    }
    *reinterpret_cast<uint4*>(&shared.q[head][column]) = make_uint4(
        bf16_pair(v[0], v[4]), bf16_pair(v[1], v[5]), bf16_pair(v[2], v[6]), bf16_pair(v[3], v[7]));
  }
}

// Output rows from shared.k, where they lie in natural order, rotated back.
template <int kHeads>
__device__ __forceinline__ void store_output(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             const Shared<kHeads>& shared) {
  auto* o = static_cast<Bf16*>(a.o) + (token * a.heads + head0) * kDim;
  const float* cos_sin = a.rope + token * a.half * 2;
  const int first_rotated = kDim - 2 * static_cast<int>(a.half);
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * kDim / 8; i += kThreads) {
    const int head = i / (kDim / 8), column = i % (kDim / 8) * 8;
    float v[8];
    load_elements<8>(reinterpret_cast<const Bf16*>(&shared.k[head][column]), v);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int pair = column + e - first_rotated;
      if (pair >= 0) {
        const float2 turned = rotate_pair(v[e], v[e + 1], cos_sin[pair], -cos_sin[pair + 1]);
        v[e] = turned.x;
        v[e + 1] = turned.y;
      }
    }
    store_elements<8>(o + head * kDim + column, v);
  }
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    attend_kernel(const __grid_constant__ AttendProblem a) {
  auto& shared = *reinterpret_cast<Shared<kHeads>*>(dynamic_shared());
  auto* rows = reinterpret_cast<const uint8_t**>(dynamic_shared() + sizeof(Shared<kHeads>));
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  const int head0 = static_cast<int>(blockIdx.y) * kHeads;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int window_keys;
  const int keys = find_rows(a, token, rows, window_keys);
  fetch_rows<kHeads>(rows, window_keys, keys, 0, shared);
  load_queries<kHeads>(a, token, head0, shared);
  if (threadIdx.x < kHeads) {
    shared.best[threadIdx.x] = -1e30f;
    shared.sum[threadIdx.x] = 0;
  }
  const float factor = kCacheScale * kLog2e * static_cast<float>(1.0 / sqrt(512.0));
  float acc[kHeads / 16][8][4] = {};
  for (int begin = 0; begin < keys; begin += kKeyBlock) {
    const int count = min(kKeyBlock, keys - begin);
    copy_async_wait<0>();
    __syncwarp();
    unpack_rows<kHeads>(count, window_keys - begin, shared);
    __syncwarp();
    fetch_rows<kHeads>(rows, window_keys, keys, begin + kKeyBlock, shared);
    __syncthreads();
    multiply_keys<kHeads>(shared);
    __syncthreads();
    softmax_block<kHeads>(count, factor, shared);
    __syncthreads();
    multiply_values<kHeads>(shared, acc);
    __syncthreads();
  }
  copy_async_wait<0>();
  __syncthreads();
  const Lane place;
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 16 * m + place.g + 8 * h;
      const float denominator =
          shared.sum[head] + exp2f(fmaf(a.sink[head0 + head], kLog2e, -shared.best[head]));
      // No key at all: the sums are zero, and so is the row.
      const float out = keys > 0 ? kCacheScale / denominator : 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        // Columns 2 t and 2 t + 1 hold channels t and t + 4 of the group.
        uint16_t* to = &shared.k[head][64 * warp + 8 * n + place.t];
        to[0] = bf16_bits(acc[m][n][2 * h] * out);
        to[4] = bf16_bits(acc[m][n][2 * h + 1] * out);
      }
    }
  }
  __syncthreads();
  store_output<kHeads>(a, token, head0, shared);
}

template <int kHeads>
Status run(const OpContext& ctx, const AttendProblem& a) {
  return launch(ctx,
                "attend",
                attend_kernel<kHeads>,
                dim3(extent(a.tokens), extent(a.heads / kHeads)),
                kThreads,
                static_cast<int64_t>(sizeof(Shared<kHeads>)) + 8 * (a.window + a.block + a.width),
                a);
}

constexpr int64_t kMostKeys = (kSharedCapacity - static_cast<int64_t>(sizeof(Shared<64>))) / 8;
static_assert(kMostKeys >= 2048);

}  // namespace

bool attend_mma_supports(const AttendArgs& args) {
  const int64_t h = args.sink.dim(0);
  const auto aligned = [](const TensorView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  };
  return args.q.dtype == DType::kBF16 && args.q.dim(1) == h * kDim && h % 16 == 0 &&
         args.rope.dim(1) <= kDim / 2 &&
         args.window.window + args.window.block +
                 (args.main == nullptr ? 0 : args.selected.dim(1)) <=
             kMostKeys &&
         aligned(args.q) && aligned(args.o) && aligned(args.window.fresh);
}

Status attend_mma(OpContext& ctx, const AttendArgs& args) {
  const AttendProblem a = attend_problem(args);
  // Few tokens: four blocks per token, each unpacking all rows, still finish sooner.
  constexpr int64_t kFewTokens = 33;  // 132 multiprocessors, four blocks per token
  return a.heads % 64 == 0 && a.tokens > kFewTokens ? run<64>(ctx, a) : run<16>(ctx, a);
}

}  // namespace cachalot::ops::cuda
