// Attention over the window and the selected entries on tensor cores: BF16, 512-dim heads.
//
//   o_h = sum_j e^(s_j - m) v_j / (sum_j e^(s_j - m) + e^(sink_h - m)),  s_j = (RoPE(q_h) . k_j)
//   512^-1/2
//
// in   q [T, H, 512] bf16, window rows (528 B: E4M3, E8M0 per 32) and main rows (288 B: E2M1, E4M3
//      per 16), 16-byte aligned, read as they lie in the caches; selected [T, k]; sink [H] f32
// out  o [T, H, 512] bf16, rotated back
//
// A block takes all 64 heads (the M of wgmma) of a token; heads past H are zeros. Its warpgroups
// have roles and run by themselves through blocks of 64 keys, in the model's order, and from token
// to token:
//
//   unpacking  rows -> registers, one pass (8 keys a warp) ahead -> K as BF16 [512 / 64][64][64],
//              swizzled, for both products: B with K inside a row, and B whose rows are keys
//   scores     S = Q K^T (two sums of 256 columns) -> running maximum -> P rounded to BF16
//   values, 2  O[64][256 columns] = O * rescale + P V, O in registers; at the end divided, rotated
//              back and stored; one of their warps tells all roles the keys of the next token
//
//   unpacking  | 0 | 1 | . . | 2       | 3       | ..      shared, per key block:
//   scores         | 0   | 1   | . . . . | 2   | 3 |         K 2 x 64 KiB, P 2 x 8 KiB; Q 64 KiB,
//   values             . | 0     | 1     | . . . . | 2       outputs 16 KiB: 226 KiB in all
//
// Few tokens with at most 640 keys: attend_few.cu and attend_split.cu, with the same bits. A row's
// result does not depend on the number of tokens.
//
// Codes become BF16 by bit placement and one multiplication (kernels of weights.cuh): both kinds of
// rows come out 2^-7 too small, which the score and output factors put back. Columns are kept in
// the order (0, 4, 1, 5, 2, 6, 3, 7) inside groups of eight, which unpacking nibbles yields; Q is
// stored in the same order and the output is put back.
//
// Bound: 4 * 64 * 512 * keys FLOP per token, 32 cycles of the tensor cores per key; the bytes (215
// KB per token at 640 keys) take half of that. Shared memory has 36 cycles of work per key: K is
// written once and read twice, Q read once per block of keys.
// Measured on an H200 with 128 + 512 keys: 39 us for 128 tokens, 72 for 256, 931 for a chunk of
// 4096 (369 TFLOP/s, 48 % of the BF16 rate); docs/benchmarks.md says what bounds it.
#include <algorithm>

#include "ops/cuda/attend_keys.cuh"
#include "ops/cuda/kernels.h"

namespace cachalot::ops::cuda {
namespace attention {
namespace {

constexpr int kAnnouncer = 4;  // warp
// One wgmma of values takes 128 columns.
constexpr int kParts = 2, kColumnTiles = kDim / 8 / 2 / kParts;

// Scores and probabilities
// ----------------------------------------------------------------------------------------

// s = Q K^T over columns 256 half .. 256 half + 255.
__device__ __forceinline__ void multiply_keys(uint64_t q, uint64_t k, int half, float (&s)[8][4]) {
  const auto at = [&](int c) { return operand_bytes((4 * half + c / 4) * kTile + c % 4 * 32); };
  wgmma_bf16<false>(s, q + at(0), k + at(0));
#pragma unroll
  for (int c = 1; c < 16; ++c) {
    wgmma_bf16<true>(s, q + at(c), k + at(c));
  }
}

// Scores of a block of keys, in units of log2, minus infinity past `count`; maxima of a thread's
// heads.
__device__ __forceinline__ void score_keys(
    uint64_t q, uint64_t k, int count, float (&s)[8][4], float (&best)[2]) {
  constexpr float kScale = kCacheScale * kLog2e * 0.04419417382415922f;  // 512^-1/2
  const Lane place;
  float upper[8][4];
  wgmma_fence();
  multiply_keys(q, k, 0, s);
  multiply_keys(q, k, 1, upper);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * n + 2 * place.t + i % 2;
      s[n][i] = key < count ? (s[n][i] + upper[n][i]) * kScale : -INFINITY;
      best[i / 2] = fmaxf(best[i / 2], s[n][i]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    best[h] = fmaxf(best[h], __shfl_xor_sync(kAllLanes, best[h], 1));
    best[h] = fmaxf(best[h], __shfl_xor_sync(kAllLanes, best[h], 2));
  }
}

// The scores of a token, from block of keys `blocks` of all tokens on. A warp has 16 heads; a
// thread keeps the running maximum of heads g and g + 8 of them.
__device__ __forceinline__ void score_blocks(int keys,
                                             int& blocks,
                                             Shared& shared,
                                             float (&best)[2]) {
  const Lane place;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32 * 16 + place.g;
  const uint64_t q = wgmma_operand(shared.q);
#pragma unroll 1
  for (int left = keys; left > 0; left -= kKeyBlock, ++blocks) {
    const int stage = blocks % kStages;
    const float before[2] = {best[0], best[1]};
    float s[8][4];
    barrier_wait(&shared.unpacked[stage], blocks / kStages % 2);
    score_keys(q, wgmma_operand(shared.k[stage]), left, s, best);
    exponentiate(s, best, head, shared.p[stage], shared.sum[stage]);
    if (place.t == 0) {
      shared.rescale[stage][head] = exp2_flushed(before[0] - best[0]);
      shared.rescale[stage][head + 8] = exp2_flushed(before[1] - best[1]);
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(&shared.scored[stage]);
    }
  }
}

// Values
// -------------------------------------------------------------------------------------------------

// acc[i] = acc[i] * rescale + P V over all keys of a token, for a half of the columns; the sums of
// the probabilities. `blocks` as in score_blocks().
__device__ __forceinline__ void sum_values(int keys,
                                           int half,
                                           int& blocks,
                                           Shared& shared,
                                           float (&acc)[kParts * kColumnTiles][4],
                                           float (&sum)[2]) {
  const Lane place;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) % kGroup / 32 * 16 + place.g;
#pragma unroll 1
  for (int left = keys; left > 0; left -= kKeyBlock, ++blocks) {
    const int stage = blocks % kStages;
    barrier_wait(&shared.unpacked[stage], blocks / kStages % 2);
    barrier_wait(&shared.scored[stage], blocks / kStages % 2);
    const float r0 = shared.rescale[stage][head], r1 = shared.rescale[stage][head + 8];
    sum[0] = fmaf(sum[0], r0, shared.sum[stage][head]);
    sum[1] = fmaf(sum[1], r1, shared.sum[stage][head + 8]);
    rescale_sums(acc, r0, r1);
    const uint64_t p = wgmma_operand(shared.p[stage]);
    const uint64_t v = wgmma_operand_transposed(shared.k[stage][half * (kTiles / 2)], kTile);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeyBlock / 16; ++c) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        wgmma_bf16_transposed(reinterpret_cast<float (&)[kColumnTiles][4]>(acc[i * kColumnTiles]),
                              p + operand_bytes(c * 32),
                              v + operand_bytes(c * 2048 + i * (kColumnTiles / 8) * kTile));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) {
      barrier_arrive(&shared.consumed[stage]);
    }
  }
}

// Rows in and out
// ----------------------------------------------------------------------------------------

// Q, rotated and rounded, in the column order of the unpacked rows. The group of scores.
__device__ __forceinline__ void load_queries(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             uint8_t (&to)[kTiles][kTile]) {
  constexpr int kPieces = kDim / 8;
  constexpr int kRowStep = kGroup / kPieces;  // heads that the threads pass over at once
  constexpr int kBatch = 16;                  // loads under way
  static_assert(8 % kRowStep == 0 && kHeads / kRowStep % kBatch == 0);
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const int left = a.heads - head0 - first;
  const auto* q =
      static_cast<const Bf16*>(a.q) + (token * a.heads + head0 + first) * kDim + 8 * piece;
  const Turn turn(a, token, piece);
#pragma unroll 1
  for (int step = 0; step < kHeads / kRowStep; step += kBatch) {
    uint4 raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      raw[i] = (step + i) * kRowStep < left
                   ? *reinterpret_cast<const uint4*>(q + (step + i) * kRowStep * kDim)
                   : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // Rows that are kRowStep i apart have their pieces swizzled by that much more.
      store_piece_at(to[piece / 8] + (step + i) * kRowStep * 128,
                     tile_place(first, piece % 8),
                     i * kRowStep % 8,
                     turned_piece(raw[i], turn));
    }
  }
  async_proxy_fence();
}

// Fetches Q into L2 for load_queries(). The unpacking threads.
__device__ __forceinline__ void prefetch_queries(const AttendProblem& a, int64_t token, int head0) {
  constexpr int kLine = 128 / sizeof(Bf16);
  const auto* q = static_cast<const Bf16*>(a.q) + (token * a.heads + head0) * kDim;
  const int elements = min(kHeads, a.heads - head0) * kDim;
  for (int i = static_cast<int>(threadIdx.x - kOthers) * kLine; i < elements;
       i += kUnpackers * 32 * kLine) {
    prefetch_to_l2(q + i);
  }
}

// Tells all roles the keys of the token of turn `turn`. One warp, a turn ahead.
__device__ __forceinline__ void announce(const AttendProblem& a,
                                         int64_t token,
                                         int turn,
                                         Shared& shared) {
  const QueryKeys keys = count_keys(a, token);
  if (threadIdx.x % 32 == 0) {
    if (turn >= 2) {
      barrier_wait(&shared.finished[turn % 2], (turn / 2 - 1) % 2);
    }
    find_places(a, token, keys, shared.places[turn % 2]);
    shared.keys[turn % 2] = keys;
    barrier_arrive(&shared.announced[turn % 2]);
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kThreads, 1)
    attend_kernel(const __grid_constant__ AttendProblem a) {
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.unpacked[i], kUnpackers);
      barrier_init(&shared.consumed[i], 8);
      barrier_init(&shared.scored[i], 4);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.announced[i], 1);
      barrier_init(&shared.summed[i], kGroup / 4);
      barrier_init(&shared.finished[i], 8 + kUnpackers);
    }
    async_proxy_fence();
  }
  wait_for_previous_kernels();
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / 4;
  const int head_groups = (a.heads + kHeads - 1) / kHeads;
  const int64_t items = a.tokens * head_groups;
  // Roles follow each other from item to item through barriers alone; `turn` counts the items,
  // `blocks` their blocks of keys.
  int turn = 0, blocks = 0;
  const auto phase = [&] { return turn / 2 % 2; };
  if (group == 0) {
    lower_registers<104>();
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      load_queries(a, token, head0, shared.q);
      group_barrier(kQueriesReady, kGroup);
      float best[2] = {-1e30f, -1e30f};
      barrier_wait(&shared.announced[turn % 2], phase());
      score_blocks(shared.keys[turn % 2].keys, blocks, shared, best);
      if (lane % 4 == 0) {
        shared.best[turn % 2][warp * 16 + lane / 4] = best[0];
        shared.best[turn % 2][warp * 16 + lane / 4 + 8] = best[1];
        barrier_arrive(&shared.summed[turn % 2]);
      }
      group_barrier(kQueriesReady, kGroup);  // all warps are done with Q
    }
  } else if (group >= 3) {
    lower_registers<88>();
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      barrier_wait(&shared.announced[turn % 2], phase());
      if (turn > 0) {
        prefetch_queries(a, token, head0);
      }
      const QueryKeys keys = shared.keys[turn % 2];
      unpack_blocks(keys, shared.places[turn % 2], blocks, shared);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.finished[turn % 2]);
      }
    }
  } else {
    raise_registers<160>();
    const int head = warp % 4 * 16 + lane / 4;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      if (warp == kAnnouncer) {
        if (turn == 0) {
          announce(a, token, 0, shared);
        }
        if (item + gridDim.x < items) {
          announce(a, (item + gridDim.x) / head_groups, turn + 1, shared);
        }
      }
      float acc[kParts * kColumnTiles][4] = {};
      float sum[2] = {0, 0};
      barrier_wait(&shared.announced[turn % 2], phase());
      const int keys = shared.keys[turn % 2].keys;
      sum_values(keys, group - 1, blocks, shared, acc, sum);
      barrier_wait(&shared.summed[turn % 2], phase());
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = head0 + head + 8 * h;
        const float sink = row < a.heads ? a.sink[row] : 0.0f;
        const float denominator =
            sum[h] + exp2f(fmaf(sink, kLog2e, -shared.best[turn % 2][head + 8 * h]));
        // No key at all: the sums are zero, and so is the row.
        sum[h] = keys > 0 ? kCacheScale / denominator : 0.0f;
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.finished[turn % 2]);
      }
      store_output<kDim / 2>(a,
                             token,
                             head0 + warp % 4 * 16,
                             (group - 1) * (kDim / 16),
                             acc,
                             sum,
                             shared.output[warp - 4]);
    }
  }
}

Status run(const OpContext& ctx, const AttendProblem& a) {
  static_assert(sizeof(Shared) <= kSharedCapacity);
  const int64_t items = a.tokens * ceil_div(a.heads, kHeads);
  return launch(ctx,
                "attend",
                attend_kernel,
                dim3(extent(std::min(items, kMultiprocessors))),
                kThreads,
                static_cast<int64_t>(sizeof(Shared)),
                a);
}

}  // namespace
}  // namespace attention

bool attend_mma_supports(const AttendArgs& args) {
  const int64_t h = args.sink.dim(0);
  const auto aligned = [](const TensorView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  };
  return args.q.dtype == DType::kBF16 && args.q.dim(1) == h * attention::kDim &&
         args.rope.dim(1) <= attention::kDim / 2 && aligned(args.q) && aligned(args.o) &&
         aligned(args.window.fresh);
}

Status attend_mma(OpContext& ctx, const AttendArgs& args) {
  const AttendProblem a = attend_problem(args);
  if (attend_few_fits(a)) {
    return attend_few(ctx, a);
  }
  return attend_split_fits(a) ? attend_split(ctx, a) : attention::run(ctx, a);
}

}  // namespace cachalot::ops::cuda
