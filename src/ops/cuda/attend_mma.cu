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
//              back and stored
//
//   unpacking  | 0 | 1 | . . | 2       | 3       | ..      shared, per key block:
//   scores         | 0   | 1   | . . . . | 2   | 3 |         K 2 x 64 KiB, P 2 x 8 KiB; Q 64 KiB:
//   values             . | 0     | 1     | . . . . | 2       210 KiB in all
//
// Few tokens: a cluster of two or four blocks per token. Each scores every second or fourth block
// of keys and sums the values of its 256 or 128 columns over all keys; for that it unpacks its
// columns of the other blocks' keys, too. The blocks tell each other the maxima of their keys, then
// P and its sums, through distributed shared memory. Every sum has the same order as in one block,
// so a row's result does not depend on the number of tokens.
//
// Codes become BF16 by bit placement and one multiplication (kernels of weights.cuh): both kinds of
// rows come out 2^-7 too small, which the score and output factors put back. Columns are kept in
// the order (0, 4, 1, 5, 2, 6, 3, 7) inside groups of eight, which unpacking nibbles yields; Q is
// stored in the same order and the output is put back.
//
// Bound: 4 * 64 * 512 * keys FLOP per token, 32 cycles of the tensor cores per key; the bytes (215
// KB per token at 640 keys) take half of that. Shared memory has 36 cycles of work per key: K is
// written once and read twice, Q read once per block of keys.
// Measured on an H200 with 128 + 512 keys: 30 to 33 us for 1 to 16 tokens, 43 for 64, 52 for 128,
// 98 for 256, 1176 for a chunk of 4096 (292 TFLOP/s, 36 % of the BF16 rate). No unit is busy: a
// profile of the form with one token per block (1180 us) had 43 % of the issue slots, 55 % of L1
// and 32 % of L2. The time is that of the roles one after the other.
#include <algorithm>

#include "ops/cuda/attend_keys.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"

namespace cachalot::ops::cuda {
namespace attention {
namespace {

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

// Probabilities of heads `head` and `head` + 8 and their sums.
__device__ __forceinline__ void exponentiate(
    const float (&s)[8][4], const float (&best)[2], int head, uint8_t* p, float* sum) {
  const Lane place;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float p0 = exp2_flushed(s[n][2 * h] - best[h]);
      const float p1 = exp2_flushed(s[n][2 * h + 1] - best[h]);
      total += p0;
      total += p1;
      *reinterpret_cast<uint32_t*>(p + tile_place(head + 8 * h, n) + 4 * place.t) =
          bf16_pair(p0, p1);
    }
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (place.t == 0) {
      sum[head + 8 * h] = total;
    }
  }
}

// A warp has 16 heads; a thread keeps the running maximum of heads g and g + 8 of them.
template <int kBlocks>
__device__ __forceinline__ void score_blocks(
    int keys, int rank, int& own_blocks, Shared<kBlocks>& shared, float (&best)[2]) {
  constexpr int kKeyStages = Shared<kBlocks>::kKeyStages;
  const Lane place;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32 * 16 + place.g;
  const int blocks = (keys + kKeyBlock - 1) / kKeyBlock;
  const uint64_t q = wgmma_operand(shared.q);
#pragma unroll 1
  for (int round = 0; round * kBlocks < blocks; ++round, ++own_blocks) {
    const int own = round * kBlocks + rank;
    [[maybe_unused]] const int stage = own_blocks % kKeyStages;
    float s[8][4];
    if constexpr (kBlocks == 1) {
      const float before[2] = {best[0], best[1]};
      barrier_wait(&shared.unpacked[stage], own_blocks / kKeyStages % 2);
      score_keys(q, wgmma_operand(shared.k[stage]), keys - own * kKeyBlock, s, best);
      exponentiate(s, best, head, shared.p[stage], shared.sum[stage]);
      if (place.t == 0) {
        shared.rescale[stage][0][head] = exp2_flushed(before[0] - best[0]);
        shared.rescale[stage][0][head + 8] = exp2_flushed(before[1] - best[1]);
      }
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.scored[stage]);
      }
    } else {
      auto& other = shared.other;
      float mine[2] = {-1e30f, -1e30f};
      if (own < blocks) {
        barrier_wait(&shared.unpacked[0], round % 2);
        score_keys(q, wgmma_operand(shared.k[0]), keys - own * kKeyBlock, s, mine);
      }
      // All blocks learn the maxima of the round.
      if (place.t < kBlocks) {
        const uint32_t to = remote_address(&other.best[round % 2][rank][head], place.t);
        remote_store(to, mine[0]);
        remote_store(to + 8 * sizeof(float), mine[1]);
      }
      __syncwarp();
      if (lane < kBlocks) {
        remote_arrive(&other.best_known, lane);
      }
      cluster_barrier_wait(&other.best_known, round % 2);
      if (round > 0) {
        cluster_barrier_wait(&other.scores_freed, (round - 1) % 2);
      }
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (round * kBlocks + j < blocks) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float next = fmaxf(best[h], other.best[round % 2][j][head + 8 * h]);
            if (place.t == 0) {
              shared.rescale[round % 2][j][head + 8 * h] = exp2_flushed(best[h] - next);
            }
            best[h] = next;
            mine[h] = j == rank ? next : mine[h];
          }
        }
      }
      if (own < blocks) {
        exponentiate(s, mine, head, shared.p[rank], shared.sum[rank]);
      }
      async_proxy_fence();
      group_barrier(kScoresStored, kGroup);
      if (threadIdx.x < kBlocks && round * kBlocks + static_cast<int>(threadIdx.x) < blocks) {
        const int j = static_cast<int>(threadIdx.x);
        if (j == rank) {
          barrier_arrive(&shared.scored[j]);
        } else {
          barrier_arrive_expect(&shared.scored[j], kTile + kHeads * sizeof(float));
        }
      }
      if (threadIdx.x < kBlocks && static_cast<int>(threadIdx.x) != rank && own < blocks) {
        const int to = static_cast<int>(threadIdx.x);
        remote_copy_bulk(shared.p[rank], kTile, &shared.scored[rank], to);
        remote_copy_bulk(shared.sum[rank], kHeads * sizeof(float), &shared.scored[rank], to);
      }
    }
  }
}

// Values
// -------------------------------------------------------------------------------------------------

// acc[i] = acc[i] * rescale + P V over all keys, for a half of the block's columns; the sums of the
// probabilities.
template <int kBlocks, int kParts, int kColumnTiles>
__device__ __forceinline__ void sum_values(int keys,
                                           int rank,
                                           int half,
                                           int& blocks,
                                           Shared<kBlocks>& shared,
                                           float (&acc)[kParts][kColumnTiles][4],
                                           float (&sum)[2]) {
  constexpr int kScoreStages = Shared<kBlocks>::kScoreStages;
  constexpr int kKeyStages = Shared<kBlocks>::kKeyStages;
  constexpr int kOwnTiles = kTiles / kBlocks;
  const Lane place;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) % kGroup / 32 * 16 + place.g;
  [[maybe_unused]] int others = 0;
#pragma unroll 1
  for (int left = keys; left > 0; left -= kKeyBlock) {
    const int b = blocks++;
    const int round = b / kBlocks, j = b % kBlocks, p_stage = b % kScoreStages;
    const uint8_t* values = shared.k[round % kKeyStages][rank * kOwnTiles];
    uint64_t* consumed = &shared.consumed[round % kKeyStages];
    if (kBlocks == 1 || j == rank) {
      barrier_wait(&shared.unpacked[round % kKeyStages], round / kKeyStages % 2);
    }
    if constexpr (kBlocks > 1) {
      if (j != rank) {
        constexpr int kStages = OtherValues<kBlocks>::kStages;
        const int stage = others % kStages;
        values = shared.other.v[stage][0];
        consumed = &shared.other.consumed[stage];
        barrier_wait(&shared.other.unpacked[stage], others / kStages % 2);
        ++others;
      }
    }
    barrier_wait(&shared.scored[p_stage], b / kScoreStages % 2);
    const float r0 = shared.rescale[round % 2][j][head];
    const float r1 = shared.rescale[round % 2][j][head + 8];
    sum[0] = fmaf(sum[0], r0, shared.sum[p_stage][head]);
    sum[1] = fmaf(sum[1], r1, shared.sum[p_stage][head + 8]);
    // Most blocks raise no maximum.
    if (__any_sync(kAllLanes, r0 != 1.0f || r1 != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          acc[i][n][0] *= r0;
          acc[i][n][1] *= r0;
          acc[i][n][2] *= r1;
          acc[i][n][3] *= r1;
        }
      }
    }
    const uint64_t p = wgmma_operand(shared.p[p_stage]);
    const uint64_t v = wgmma_operand_transposed(values + half * (kOwnTiles / 2) * kTile, kTile);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeyBlock / 16; ++c) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        wgmma_bf16_transposed(acc[i],
                              p + operand_bytes(c * 32),
                              v + operand_bytes(c * 2048 + i * (kColumnTiles / 8) * kTile));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) {
      barrier_arrive(consumed);
      if constexpr (kBlocks > 1) {
        remote_arrive(&shared.other.scores_freed, j);
      }
    }
  }
}

// Rows in and out
// ----------------------------------------------------------------------------------------

// Cosines and sines of the pairs of columns 8 piece .. 8 piece + 7 of a head.
struct Turn {
  float cosine[4], sine[4];
  bool any;

  __device__ __forceinline__ Turn(const AttendProblem& a, int64_t token, int piece) : any(false) {
    const int first_rotated = kDim - 2 * static_cast<int>(a.half);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int pair = 8 * piece + 2 * e - first_rotated;
      cosine[e] = 1;
      sine[e] = 0;
      if (pair >= 0) {
        cosine[e] = a.rope[token * a.half * 2 + pair];
        sine[e] = a.rope[token * a.half * 2 + pair + 1];
        any = true;
      }
    }
  }
  __device__ __forceinline__ void apply(float (&v)[8], float sign) const {
    if (any) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 turned = rotate_pair(v[2 * e], v[2 * e + 1], cosine[e], sign * sine[e]);
        v[2 * e] = turned.x;
        v[2 * e + 1] = turned.y;
      }
    }
  }
};

// Q, rotated and rounded, in the column order of the unpacked rows. The first kCount threads.
template <int kCount>
__device__ __forceinline__ void load_queries(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             uint8_t (&to)[kTiles][kTile]) {
  constexpr int kPieces = kDim / 8;
  constexpr int kRowStep = kCount / kPieces;  // heads that the threads pass over at once
  constexpr int kRowSteps = (kHeads + kRowStep - 1) / kRowStep;
  constexpr int kBatch = kRowSteps > 16 ? 8 : kRowSteps;  // loads under way
  static_assert(kCount % kPieces == 0 && kRowSteps % kBatch == 0);
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const auto* q = static_cast<const Bf16*>(a.q) + (token * a.heads + head0) * kDim + 8 * piece;
  const Turn turn(a, token, piece);
#pragma unroll 1
  for (int step = 0; step < kRowSteps; step += kBatch) {
    uint4 raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int head = first + (step + i) * kRowStep;
      raw[i] = head < kHeads && head0 + head < a.heads
                   ? *reinterpret_cast<const uint4*>(q + head * kDim)
                   : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int head = first + (step + i) * kRowStep;
      if (head < kHeads) {
        float v[8] = {low_bf16(raw[i].x),
                      high_bf16(raw[i].x),
                      low_bf16(raw[i].y),
                      high_bf16(raw[i].y),
                      low_bf16(raw[i].z),
                      high_bf16(raw[i].z),
                      low_bf16(raw[i].w),
                      high_bf16(raw[i].w)};
        turn.apply(v, 1.0f);
        *reinterpret_cast<uint4*>(to[piece / 8] + tile_place(head, piece % 8)) =
            make_uint4(bf16_pair(v[0], v[4]),
                       bf16_pair(v[1], v[5]),
                       bf16_pair(v[2], v[6]),
                       bf16_pair(v[3], v[7]));
      }
    }
  }
  async_proxy_fence();
}

// Fetches Q into L2 for load_queries(). The unpacking threads.
template <int kBlocks>
__device__ __forceinline__ void prefetch_queries(const AttendProblem& a, int64_t token, int head0) {
  constexpr int kLine = 128 / sizeof(Bf16);
  const auto* q = static_cast<const Bf16*>(a.q) + (token * a.heads + head0) * kDim;
  const int elements = min(kHeads, a.heads - head0) * kDim;
  for (int i = static_cast<int>(threadIdx.x - kOthers) * kLine; i < elements;
       i += Shared<kBlocks>::kUnpackers * 32 * kLine) {
    prefetch_to_l2(q + i);
  }
}

// words[i] of lane t of a quad for words[t] of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (t & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) == 0) {
        const uint32_t given = upper ? words[i] : words[i + bit];
        const uint32_t taken = __shfl_xor_sync(kAllLanes, given, bit);
        words[i] = upper ? taken : words[i];
        words[i + bit] = upper ? words[i + bit] : taken;
      }
    }
  }
}

// The sums of a warpgroup's columns, divided, rounded, rotated back and stored. `group` is the
// first group of eight columns, `head` that of the thread's two.
template <int kParts, int kColumnTiles>
__device__ __forceinline__ void store_output(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             int head,
                                             int group,
                                             const float (&acc)[kParts][kColumnTiles][4],
                                             const float (&factor)[2]) {
  const Lane place;
#pragma unroll
  for (int n = 0; n < kParts * kColumnTiles; n += 4) {
    const int own = group + n + place.t;  // that the lane stores
    const Turn turn(a, token, own);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Columns 2 t and 2 t + 1 hold channels t and t + 4 of a group.
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& columns = acc[(n + i) / kColumnTiles][(n + i) % kColumnTiles];
        words[i] = bf16_pair(columns[2 * h] * factor[h], columns[2 * h + 1] * factor[h]);
      }
      transpose_quad(words, place.t);
      uint4 out = make_uint4(__byte_perm(words[0], words[1], 0x5410),
                             __byte_perm(words[2], words[3], 0x5410),
                             __byte_perm(words[0], words[1], 0x7632),
                             __byte_perm(words[2], words[3], 0x7632));
      if (turn.any) {
        float v[8] = {low_bf16(out.x),
                      high_bf16(out.x),
                      low_bf16(out.y),
                      high_bf16(out.y),
                      low_bf16(out.z),
                      high_bf16(out.z),
                      low_bf16(out.w),
                      high_bf16(out.w)};
        turn.apply(v, -1.0f);
        out = make_uint4(bf16_pair(v[0], v[1]),
                         bf16_pair(v[2], v[3]),
                         bf16_pair(v[4], v[5]),
                         bf16_pair(v[6], v[7]));
      }
      const int row = head0 + head + 8 * h;
      if (row < a.heads) {
        auto* o = static_cast<Bf16*>(a.o) + (token * a.heads + row) * kDim + 8 * own;
        __stcg(reinterpret_cast<uint4*>(o), out);
      }
    }
  }
}

template <int kBlocks>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(Shared<kBlocks>::kThreads, 1)
    attend_kernel(const __grid_constant__ AttendProblem a) {
  auto& shared = *reinterpret_cast<Shared<kBlocks>*>(dynamic_shared());
  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<kBlocks>::kKeyStages; ++i) {
      barrier_init(&shared.unpacked[i], Shared<kBlocks>::kUnpackers);
      barrier_init(&shared.consumed[i], 8);
    }
    for (int i = 0; i < Shared<kBlocks>::kScoreStages; ++i) {
      barrier_init(&shared.scored[i], kBlocks == 1 ? 4 : 1);
    }
    if constexpr (kBlocks > 1) {
      for (int i = 0; i < OtherValues<kBlocks>::kStages; ++i) {
        barrier_init(&shared.other.unpacked[i], Shared<kBlocks>::kUnpackers);
        barrier_init(&shared.other.consumed[i], 8);
      }
      barrier_init(&shared.other.best_known, 4 * kBlocks);
      barrier_init(&shared.other.scores_freed, 8 * kBlocks);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.announced[i], 1);
      barrier_init(&shared.summed[i], 4);
      barrier_init(&shared.finished[i], 8);
    }
    async_proxy_fence();
  }
  wait_for_previous_kernels();
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  const int rank = kBlocks == 1 ? 0 : cluster_rank();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / 4;
  const int head_groups = (a.heads + kHeads - 1) / kHeads;
  const int64_t first = blockIdx.x / kBlocks, step = gridDim.x / kBlocks;
  const int64_t items = a.tokens * head_groups;
  // Roles follow each other from item to item through barriers alone; `turn` counts the items.
  int turn = 0;
  const auto phase = [&] { return turn / 2 % 2; };
  if (group == 0) {
    lower_registers<kBlocks == 1 ? 104 : 96>();
    int own_blocks = 0;
    for (int64_t item = first; item < items; item += step, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      if (turn == 0) {
        load_queries<kOthers>(a, token, head0, shared.q);
        group_barrier(kQueriesReady, kOthers);
      } else {
        load_queries<kGroup>(a, token, head0, shared.q);
        group_barrier(kQueriesRenewed, kGroup);
      }
      float best[2] = {-1e30f, -1e30f};
      barrier_wait(&shared.announced[turn % 2], phase());
      score_blocks(shared.keys[turn % 2], rank, own_blocks, shared, best);
      if (lane % 4 == 0) {
        shared.best[turn % 2][warp * 16 + lane / 4] = best[0];
        shared.best[turn % 2][warp * 16 + lane / 4 + 8] = best[1];
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.summed[turn % 2]);
      }
      group_barrier(kQueriesRenewed, kGroup);  // all warps are done with Q
    }
  } else if (group >= 3) {
    lower_registers<kBlocks == 1 ? 88 : 80>();
    RowPlaces& places = shared.places[warp - kOthers / 32];
    int own_blocks = 0;
    for (int64_t item = first; item < items; item += step, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      const QueryKeys keys = count_keys(a, token);
      __syncwarp();
      if (lane == 0) {
        find_places(a, token, keys, places);
        if (warp == kOthers / 32) {
          if (turn >= 2) {
            barrier_wait(&shared.finished[turn % 2], (turn / 2 - 1) % 2);
          }
          shared.keys[turn % 2] = keys.keys;
          barrier_arrive(&shared.announced[turn % 2]);
        }
      }
      __syncwarp();
      if (turn > 0) {
        prefetch_queries<kBlocks>(a, token, head0);
      }
      unpack_blocks(keys, places, rank, own_blocks, shared);
    }
  } else {
    raise_registers<kBlocks == 1 ? 160 : 112>();
    // One wgmma takes 128 columns, or what there is.
    constexpr int kParts = kBlocks == 1 ? 2 : 1;
    constexpr int kColumnTiles = kDim / 8 / kBlocks / 2 / kParts;
    const int head = warp % 4 * 16 + lane / 4;
    int blocks = 0;
    for (int64_t item = first; item < items; item += step, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      if (turn == 0) {
        load_queries<kOthers>(a, token, head0, shared.q);
        group_barrier(kQueriesReady, kOthers);
      }
      float acc[kParts][kColumnTiles][4] = {};
      float sum[2] = {0, 0};
      barrier_wait(&shared.announced[turn % 2], phase());
      const int keys = shared.keys[turn % 2];
      sum_values(keys, rank, group - 1, blocks, shared, acc, sum);
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
      store_output(a, token, head0, head, (2 * rank + group - 1) * kParts * kColumnTiles, acc, sum);
    }
  }
  if constexpr (kBlocks > 1) {
    cluster_sync();  // others may still tell this block of what they have consumed
  }
}

template <int kBlocks>
Status run(const OpContext& ctx, const AttendProblem& a, int64_t blocks) {
  static_assert(sizeof(Shared<kBlocks>) <= kSharedCapacity);
  return launch(ctx,
                "attend",
                attend_kernel<kBlocks>,
                dim3(extent(blocks * kBlocks)),
                Shared<kBlocks>::kThreads,
                static_cast<int64_t>(sizeof(Shared<kBlocks>)),
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
  // Few tokens: more blocks for each, as long as all clusters run at once. Blocks of a cluster
  // share a GPC, which leaves up to three of its multiprocessors without one of four: 27 clusters
  // fit wherever 132 multiprocessors lie. Many tokens: one block on each multiprocessor takes a
  // token after the other.
  const int64_t items = a.tokens * ceil_div(a.heads, attention::kHeads);
  return items <= 24   ? attention::run<4>(ctx, a, items)
         : items <= 64 ? attention::run<2>(ctx, a, items)
                       : attention::run<1>(ctx, a, std::min(items, kMultiprocessors));
}

}  // namespace cachalot::ops::cuda
