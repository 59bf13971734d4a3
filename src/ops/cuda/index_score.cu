// Index scores of many entries on tensor cores: 32 heads of 128.
//
//   S[p, j] = sum_h w_h relu(q_h . k_j) * DI^-1/2 HI^-1/2, q = FP4(RoPE(q))
//
// in   q [T, HI * DI] act, w [T, HI] act, rope, index rows (E2M1 codes, E8M0 per 32), candidates
// out  scores as ordered integers [T, slots], and their counts per leading 12 bits [T, kBins]; the
//      same for the maxima of candidate blocks
//
// Both operands are E4M3: a row's codes times 2^6, those of blocks with a smaller scale shifted
// down to the row's largest one. That is exact for 14 binades; below, codes are rounded at 2^-16 of
// the largest scale. The row's power of two goes to the head weight (queries) and to the finished
// sum (keys). A step of the tensor cores sums 32 products and the sum so far with about 13 bits
// behind the largest one's leading bit. Products are multiples of 2^(-2 - d) in units of the
// largest scales, d binades between the blocks' scales in both rows together, so a dot product is
// exact while its sums stay below 2^(12 - d) such units.
//
// query  warp = one head: rotated, quantized, laid out as the B operand of wgmma
// score  block = a span of slots of one token, or of up to 14 consecutive tokens
//
//   warpgroup  a tile of 64 slots, or two of them:
//     warp     copies its 16 rows of later ones, whose addresses it looks up a batch ahead; 16 rows
//              of 128 codes in registers as A, by table lookup (9 instructions per 8 codes)
//     piece    of two tokens (or the only one):
//       wgmma    rows x heads
//       4 lanes  ReLU, head weights, sum over the heads -> scores, counts, block maxima
//   block      of many tokens, at the end: counts -> global
//   block      of one: counts -> global, waits for the token's other blocks, collects what reaches
//              the bin of the k-th score; one of them finishes the list (index_collect.cuh)
//
// Slots are rows of the product and heads its columns, so a row's keys are unpacked once for all
// tokens of the block, and neither the group nor the pass changes a sum. While a warpgroup weighs
// one piece (or unpacks a tile), the tensor cores work for its other one. A pair's operand has its
// rows arranged so that lanes exchange sums without choosing. The blocks of a token wait for each
// other and so must run at the same time, which a pass of few tokens ensures; a device runs one
// such kernel at a time. Every warp copies, as the warps of one scheduler would hold up the others.
//
// Shared: 4 KiB of queries and 8 KiB of counts per token and 34 KiB of rows, 204 KiB with 14
// tokens; with one 55 KiB, or what finishing takes. Measured on an H200, top-k included: 64 x
// 131072 in 239 us (138 to read the keys, 205 to score them), 1 x 4096 x 131072 in 5.7 ms (4.8 of
// them scores). Bound with one token by the latency of four dependent products, with many by
// products (64 cycles per tile and token) and sums, which hardly overlap.
#include <algorithm>
#include <limits>

#include "ops/cuda/index_collect.cuh"
#include "ops/cuda/index_rows.cuh"
#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kHeads = kIndexHeads;
constexpr int kQueryWarps = 8;

// One token per block, or many that share keys.
template <bool kMany>
struct Shared {
  static constexpr int kWarpgroups = kMany ? 4 : 2;
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kWarps = kWarpgroups * 4;
  static constexpr int kBlocks = kMany ? 1 : 2;  // of a multiprocessor
  static constexpr int kTokens = kMany ? kIndexGroup : 1;
  // A warpgroup takes so many tiles together, and a warp copies its rows of them.
  static constexpr int kStepTiles = kMany ? 1 : 2;
  static constexpr int kStepSlots = kStepTiles * kTileSlots;
  static constexpr int kWarpSlots = kStepTiles * kTileWarpSlots;
  static constexpr int kWarpBytes = kWarpSlots * kKeyBytes;
  static constexpr int kMostSteps = 0xFFFF / kStepSlots;  // of a block; counts have 16 bits
  static constexpr int kStages = 2;                       // steps of a warpgroup
  static constexpr int kHistograms = kMany ? kIndexGroup : 2;

  uint8_t query[kTokens][kQueryBytes];  // 1024-byte aligned
  uint8_t rows[kWarps][kStages][kWarpBytes];
  uint32_t count[kHistograms][kBins / 2];  // two 16-bit counts each
  alignas(16) float weight[kTokens][kHeads];
  uint2 table[kShifts];                                      // E4M3 bytes of the eight magnitudes
  int entry[kWarps][kStages][kWarpSlots / kCandidateBlock];  // first of a block, or -1
  int sequence[kTokens];
  int slots[kTokens];  // 0 if nothing is scored
  int visible[kTokens];
  int blocks[kTokens];
  uint64_t queries_arrived;
  uint64_t arrived[kWarps][kStages];
};

// Row of a head in the operands of the pass. Groups hold pairs of tokens, whose rows are arranged
// so that the first 32 products of a lane's row are those of token t % 2 of the pair.
__device__ __forceinline__ int64_t query_row(const IndexSplit& s, int64_t token, int head) {
  if (s.group == 1) {
    return token * kHeads + head;
  }
  const int64_t group = token / s.group;
  const auto own = static_cast<int>(token - group * s.group);
  const int swapped = (own ^ head / 2) % 2;  // head 8 n + 2 t + e
  return (group * s.group_pairs() + own / 2) * (2 * kHeads) + swapped * kHeads + head;
}

template <class Act>
__global__ void __launch_bounds__(kQueryWarps* kWarp)
    query_kernel(const __grid_constant__ IndexSplit s) {
  // What the next kernel reads before it waits is known by now.
  wait_for_previous_kernels();
  allow_next_kernel();
  const IndexProblem& p = s.p;
  const int64_t token = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int part = static_cast<int>(blockIdx.y);
  for (const IndexList* list : {&s.entries, &s.blocks}) {
    if (list->bound > 0) {
      for (int i = part * kQueryWarps * kWarp + thread; i < kBins / 4;
           i += static_cast<int>(gridDim.y) * kQueryWarps * kWarp) {
        reinterpret_cast<int4*>(list->histogram + token * kBins)[i] = make_int4(0, 0, 0, 0);
      }
      if (part == 0 && thread < 2) {
        list->counters[2 * token + thread] = 0;
      }
    }
  }
  if (part == 0 && thread < 2) {
    s.arrivals[2 * token + thread] = 0;
  }
  // A lane has four columns, eight lanes a quantization block.
  const int head = part * kQueryWarps + thread / kWarp, column = 4 * lane;
  const Act* q = static_cast<const Act*>(p.q) + (token * kHeads + head) * kIndexMmaDim + column;
  const int tail = kIndexMmaDim - 2 * static_cast<int>(p.half);
  const float* cos_sin = p.rope + token * p.half * 2;
  float v[4];
  uint32_t amax = 0;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    v[e] = to_float(q[e]);
    v[e + 1] = to_float(q[e + 1]);
    const int pair = column + e - tail;
    if (pair >= 0) {
      const float2 turned = rotate_pair(v[e], v[e + 1], cos_sin[pair], cos_sin[pair + 1]);
      v[e] = rounded<Act>(turned.x);
      v[e + 1] = rounded<Act>(turned.y);
    }
    amax = max(amax, max(magnitude_bits(v[e]), magnitude_bits(v[e + 1])));
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, step));
  }
  const uint32_t scale = fp4_index_scale(amax);
  uint32_t most = max(scale, __shfl_xor_sync(kAllLanes, scale, 8));
  most = max(most, __shfl_xor_sync(kAllLanes, most, 16));
#pragma unroll
  for (float& x : v) {
    x = e2m1_value(fp4_index_code(x, scale)) * shifted_scale(most - scale);
  }
  // K in the order in which a lane unpacks its block of 32 codes: place 32 i + 16 h + 4 t + e holds
  // column 32 t + 8 i + 4 h + e. Pieces of 16 bytes are swizzled.
  uint8_t* row = s.queries + query_row(s, token, head) * kIndexMmaDim;
  *reinterpret_cast<uint32_t*>(row + (lane % 8 ^ head % 8) * 16 + lane / 8 * 4) = e4m3_four(v);
  if (lane == 0) {
    // Lane t of four weighs the heads 8 n + 2 t + e, in the order of n and e.
    s.weights[token * kHeads + head % 8 / 2 * 8 + head / 8 * 2 + head % 2] =
        to_float(static_cast<const Act*>(p.w)[token * kHeads + head]) * e8m0_value(most);
  }
}

// Calls body(from, to, slots, end) for the tokens [from, to) of one sequence that have something to
// score in this block's span, tiles from `begin` to before `end`.
template <class Memory, class Body>
__device__ __forceinline__ void for_each_run(
    const Memory& shared, int tokens, int begin, int span, Body&& body) {
  if constexpr (Memory::kTokens == 1) {
    tokens = 1;
  }
  for (int from = 0, to; from < tokens; from = to) {
    int slots = shared.slots[from];
    for (to = from + 1; to < tokens && shared.sequence[to] == shared.sequence[from]; ++to) {
      slots = max(slots, shared.slots[to]);
    }
    if (slots > begin) {
      body(from, to, slots, min(slots, begin + span));
    }
  }
}

// Counts a score among the 16-bit counts of its bin and the next or the last one.
__device__ __forceinline__ void count_score(uint32_t* counts, uint32_t bits) {
  const uint32_t bin = bits >> (32 - kBinBits);
  atomicAdd(&counts[bin / 2], bin % 2 == 0 ? 1u : 0x10000u);
}

// All warps: the operands and weights of the block's tokens.
template <class Memory>
__device__ __forceinline__ void receive_queries(const IndexSplit& s,
                                                Memory& shared,
                                                int first,
                                                int tokens) {
  if (threadIdx.x == 0) {
    const bool pairs = Memory::kTokens > 1;
    const int bytes = (pairs ? (tokens + 1) / 2 * 2 : 1) * kQueryBytes;
    const int weights = tokens * kHeads * static_cast<int>(sizeof(float));
    const int64_t before = pairs ? int64_t{blockIdx.y} * 2 * s.group_pairs() : first;
    barrier_arrive_expect(&shared.queries_arrived, bytes + weights);
    copy_bulk(shared.query, s.queries + before * kQueryBytes, bytes, &shared.queries_arrived);
    copy_bulk(shared.weight, s.weights + first * kHeads, weights, &shared.queries_arrived);
  }
  __syncwarp();
  barrier_wait(&shared.queries_arrived, 0);
}

// A warpgroup: scores of its tiles of the span.
template <bool kMany, bool kRestricted, bool kPublishes>
__device__ void score_tiles(
    const IndexSplit& s, Shared<kMany>& shared, int first, int tokens, int begin, int span) {
  using Memory = Shared<kMany>;
  constexpr int kStages = Memory::kStages, kWarpgroups = Memory::kWarpgroups,
                kStepTiles = Memory::kStepTiles, kStepSlots = Memory::kStepSlots,
                kWarpSlots = Memory::kWarpSlots, kStride = kWarpgroups * kStepSlots;
  const int block_warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int warpgroup = block_warp / 4, warp = block_warp % 4;
  const Lane lane;
  // A lane ends with one sum: of one token, or of token t % 2 of two, and of row g + 8 half.
  const int odd = lane.t % 2, half = kMany ? lane.t / 2 : odd;
  const uint64_t query = wgmma_operand(shared.query[0]);
  const float scale = s.p.scale * kLate;
  uint32_t* scores = keep(s.entries.scores + int64_t{first} * s.entries.bound);
  uint32_t* block_scores = s.blocks.scores + int64_t{first} * s.blocks.bound;
  auto& rows_of = shared.rows[block_warp];
  auto& entry_of = shared.entry[block_warp];
  auto& arrived = shared.arrived[block_warp];
  const uint32_t first_row = keep(shared_address(rows_of[0] + lane.g * kKeyBytes)),
                 table = shared_address(shared.table);
  int before = 0;                 // tiles of earlier runs
  uint32_t stage = 0, phase = 0;  // of the tile that is scored
  bool has_queries = false;
  float4 w[2];
  for_each_run(shared, tokens, begin, span, [&](int from, int to, int slots, int end) {
    end = keep(end);
    int visible = 0, least = slots;
    for (int i = from; i < to; ++i) {
      visible = max(visible, shared.visible[i]);
      least = min(least, shared.slots[i]);
    }
    const PagedRows& pages = s.p.index[shared.sequence[from]];
    const int contiguous = contiguous_slots<kWarpSlots>(pages, kRestricted);
    const IndexRows<kWarpSlots> rows{
        .pages = pages.pages,
        .page_rows = static_cast<uint32_t>(pages.page_rows),
        .candidates =
            kRestricted ? s.p.candidates + int64_t{first + from} * s.p.candidate_width : nullptr,
        .slots = slots,
        .visible = visible,
        .run_slots = max(contiguous, kRun),
        .bulk = contiguous > 0,
        .stride = kStride};
    const int start = begin + (warpgroup + before) % kWarpgroups * kStepSlots + warp * kWarpSlots;
    // The runs of the batch whose tiles are copied now, and blocks of the next one.
    IndexRun run;
    int block = rows.block(start), turn = 0;
    const auto find = [&](int tile) {
      run.find(rows, tile, block);
      block = rows.block(tile + rows.batch() * kStride);
    };
    const auto copy = [&](int tile, uint32_t to_stage) {
      run.copy(rows, turn, rows_of[to_stage], entry_of[to_stage], &arrived[to_stage]);
      if (++turn == rows.batch()) {
        turn = 0;
        find(tile + kStride);
      }
    };
    find(start);
    const int last = end + warp * kWarpSlots;  // as `step`, where the warp's slots begin
#pragma unroll 1
    for (int i = 0; i < kStages && start + i * kStride < last; ++i) {
      copy(start + i * kStride, (stage + i) % kStages);
    }
    if (!has_queries) {
      // Earlier kernels than the one that prepares the queries have ended before this one began.
      wait_for_previous_kernels();
      receive_queries(s, shared, first, tokens);
      if constexpr (!kMany) {
        load_weights(&shared.weight[0][lane.t * 8], w);
      }
      has_queries = true;
    }
    const auto load_keys = [&](IndexKeys& keys, int tile) {
      keys.load(first_row + stage * Memory::kWarpBytes + tile * (kTileWarpSlots * kKeyBytes),
                table,
                lane,
                scale);
      wgmma_fence(keys.a);
    };
    // After all lanes have loaded the step's rows.
    const auto copy_later = [&](int step) {
      __syncwarp();
      if (step + kStages * kStride < last) {
        copy(step + kStages * kStride, stage);
      }
    };
    // Of tokens from..to, in pairs; a lane's slot is `slot`.
    const auto score_many = [&](int step) {
      IndexKeys keys;
      load_keys(keys, 0);
      const float factor = half == 0 ? keys.factor[0] : keys.factor[1];
      const int slot = step + lane.g + 8 * half;
      // Pairs begin at even tokens of the block.
      int m = from / 2 * 2;
      uint32_t* to_scores = scores + int64_t{m + odd} * s.entries.bound + slot;
      uint32_t* counts = shared.count[m + odd];
      const float* weights = &shared.weight[m][lane.t * 8];
      IndexPiece<2> piece[2];
      const auto begin_piece = [&](IndexPiece<2>& p, int pair) {
        wgmma_fence();
        p.start(keys, operand_at(query, pair * (kQueryBytes / 16)));
      };
      const auto weigh = [&]<bool kWhole>(IndexPiece<2>& p) {
        p.finish();
        float own[2], others[2];
        load_weights(weights + odd * kHeads, w);
        weigh_heads<0>(p.acc, w, own);
        load_weights(weights + (1 - odd) * kHeads, w);
        weigh_heads<kHeads / 8>(p.acc, w, others);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          own[r] += __shfl_xor_sync(kAllLanes, others[r], 1);
        }
        const uint32_t bits = ordered_bits(exchange(half == 1, own[0], own[1], 2) * factor);
        bool listed = true;
        if constexpr (!kWhole) {
          listed = m + odd >= from && m + odd < to && slot < shared.slots[m + odd];
        }
        if (listed) {
          *to_scores = bits;
          count_score(counts, bits);
        }
        m += 2;
        to_scores += 2 * s.entries.bound;
        counts += 2 * (kBins / 2);
        weights += 2 * kHeads;
      };
      piece[0].start(keys, operand_at(query, m * (kQueryBytes / 16)));
      copy_later(step);
      if (step - warp * kWarpSlots + kStepSlots <= least && from % 2 == 0 && to % 2 == 0) {
        // While a piece is weighed, the tensor cores work for the next one.
        while (m + 4 < to) {
          begin_piece(piece[1], m + 2);
          wgmma_wait<1>();
          weigh.template operator()<true>(piece[0]);
          begin_piece(piece[0], m + 2);
          wgmma_wait<1>();
          weigh.template operator()<true>(piece[1]);
        }
        if (m + 2 < to) {
          begin_piece(piece[1], m + 2);
          wgmma_wait<1>();
          weigh.template operator()<true>(piece[0]);
          wgmma_wait<0>();
          weigh.template operator()<true>(piece[1]);
        } else {
          wgmma_wait<0>();
          weigh.template operator()<true>(piece[0]);
        }
      } else {
        for (;;) {
          wgmma_wait<0>();
          weigh.template operator()<false>(piece[0]);
          if (m >= to) {
            break;
          }
          begin_piece(piece[0], m);
        }
      }
    };
    // Of one token: the tensor cores work for a tile while another is unpacked or weighed.
    const auto score_alone = [&](int step) {
      IndexKeys keys[kStepTiles];
      IndexPiece<1> piece[kStepTiles];
      bool has_entry[kStepTiles];
#pragma unroll
      for (int tile = 0; tile < kStepTiles; ++tile) {
        load_keys(keys[tile], tile);
        has_entry[tile] = true;
        if constexpr (kRestricted) {
          const int first_entry = entry_of[stage][2 * tile + half];
          has_entry[tile] = first_entry >= 0 && first_entry + lane.g < visible;
        }
        piece[tile].start(keys[tile], query);
      }
      copy_later(step);
      const auto weigh = [&](int tile) {
        piece[tile].finish();
        float sum[2];
        weigh_heads<0>(piece[tile].acc, w, sum);
        float row = exchange(odd == 1, sum[0], sum[1], 1);
        row += __shfl_xor_sync(kAllLanes, row, 2);
        const float factor = half == 0 ? keys[tile].factor[0] : keys[tile].factor[1];
        const int slot = step + tile * kTileWarpSlots + lane.g + 8 * half;
        // Slots without an entry score lowest of all, below every bin that can be chosen.
        const uint32_t bits = has_entry[tile] ? ordered_bits(row * factor) : 0;
        const bool listed = lane.t < 2 && slot < slots;
        if (listed) {
          scores[slot] = bits;
          count_score(shared.count[0], bits);
        }
        if constexpr (kPublishes) {
          uint32_t best = listed ? bits : 0;
#pragma unroll
          for (int lanes = 4; lanes < 32; lanes *= 2) {
            best = max(best, __shfl_xor_sync(kAllLanes, best, lanes));
          }
          if (listed && lane.g == 0) {
            const int id = slot / kCandidateBlock;
            best = id == shared.blocks[0] - 1 ? 0xFFFFFFFFu : best;  // the newest entry's block
            block_scores[id] = best;
            count_score(shared.count[1], best);
          }
        }
      };
      static_assert(kMany || kStepTiles == 2);
      wgmma_wait<1>();
      weigh(0);
      wgmma_wait<0>();
      weigh(kStepTiles - 1);
    };
    for (int step = start; step < last; step += kStride) {
      barrier_wait(&arrived[stage], static_cast<int>(phase));
      if constexpr (kMany) {
        score_many(step);
      } else {
        score_alone(step);
      }
      stage = (stage + 1) % kStages;
      phase ^= stage == 0 ? 1u : 0u;
    }
    before += (end - begin) / kStepSlots;
  });
}

// Adds a block's counts of `tokens` tokens from `first` on to those of the whole list.
template <int kThreads>
__device__ __forceinline__ void flush_counts(const IndexList& list,
                                             int first,
                                             int tokens,
                                             const uint32_t* counts) {
  int* histogram = list.histogram + int64_t{first} * kBins;
  for (int i = threadIdx.x; i < tokens * (kBins / 2); i += kThreads) {
    const auto low = static_cast<int>(counts[i] & 0xFFFFu);
    const auto high = static_cast<int>(counts[i] >> 16);
    if (low != 0) {
      atomicAdd(&histogram[2 * i], low);
    }
    if (high != 0) {
      atomicAdd(&histogram[2 * i + 1], high);
    }
  }
}

// All threads: counts this block, whose writes so far the blocks see that wait until `blocks` have
// arrived. They all run at the same time.
__device__ __forceinline__ void arrive(int* arrivals) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(arrivals) : "memory");
  }
}
__device__ __forceinline__ void wait_for_arrivals(const int* arrivals, int blocks) {
  if (threadIdx.x == 0) {
    int there = 0;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(arrivals) : "memory");
    } while (there < blocks);
  }
  __syncthreads();
}

// The selection of a token by the blocks that have scored it: `begin` is this one's first slot, and
// a block has `span` of them.
template <bool kPublishes>
__device__ void select_scored(const IndexSplit& s,
                              Shared<false>& shared,
                              int token,
                              const IndexExtent& e,
                              int begin,
                              int span) {
  constexpr int kThreads = Shared<false>::kThreads, kLists = kPublishes ? 2 : 1;
  __shared__ TopKState state;
  __shared__ int slots[kThreads / kWarp + 1];
  const int blocks = (e.slots + span - 1) / span, block = begin / span;
  int* arrivals = s.arrivals + 2 * token;
  if (blocks > 1) {
#pragma unroll
    for (int l = 0; l < kLists; ++l) {
      flush_counts<kThreads>(l == 0 ? s.entries : s.blocks, token, 1, shared.count[l]);
    }
    arrive(&arrivals[0]);
    wait_for_arrivals(&arrivals[0], blocks);
  }
#pragma unroll
  for (int l = 0; l < kLists; ++l) {
    const IndexList& list = l == 0 ? s.entries : s.blocks;
    const int bin = blocks > 1
                        ? threshold_bin<kThreads>(
                              GlobalCounts{list.histogram + int64_t{token} * kBins}, list.k, slots)
                        : threshold_bin<kThreads>(SharedCounts{shared.count[l]}, list.k, slots);
    const int unit = l == 0 ? 1 : kCandidateBlock;
    collect_slots<kThreads>(list,
                            token,
                            bin,
                            begin / unit,
                            min((begin + span) / unit, l == 0 ? e.slots : e.blocks),
                            [](const uint4&, uint32_t, int) {});
  }
  arrive(&arrivals[1]);
#pragma unroll
  for (int l = 0; l < kLists; ++l) {
    if (block == min(l, blocks - 1)) {
      wait_for_arrivals(&arrivals[1], blocks);
      finish_list<kThreads>(s, token, l == 1, e, dynamic_shared(), &state, slots);
      __syncthreads();
    }
  }
}

template <bool kMany, bool kRestricted, bool kPublishes>
__global__ void __launch_bounds__(Shared<kMany>::kThreads, Shared<kMany>::kBlocks)
    score_kernel(const __grid_constant__ IndexSplit s, int span) {
  using Memory = Shared<kMany>;
  auto& shared = *reinterpret_cast<Memory*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.y) * s.group,
            begin = static_cast<int>(blockIdx.x) * span;
  const int tokens = min(s.group, s.tokens - first);
  constexpr int kLists = kPublishes ? 2 : 1;
  if (thread < static_cast<int>(kShifts)) {
    const auto four = [&](uint32_t code) {
      float v[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        v[i] = e2m1_value(code + i) * shifted_scale(static_cast<uint32_t>(thread));
      }
      return e4m3_four(v);
    };
    shared.table[thread] = make_uint2(four(0), four(4));
  }
  if (thread < Memory::kWarps * Memory::kStages) {
    barrier_init(&shared.arrived[0][thread], Memory::kWarpSlots / kRun);
  }
  if (thread == 0) {
    barrier_init(&shared.queries_arrived, 1);
  }
  for (int i = thread; i < tokens * kLists * (kBins / 8); i += Memory::kThreads) {
    const int list = i / (tokens * (kBins / 8)), at = i % (tokens * (kBins / 8));
    reinterpret_cast<uint4*>(shared.count[list * s.group])[at] = make_uint4(0, 0, 0, 0);
  }
  allow_next_kernel();
  bool scores = false;
  if (thread < tokens) {
    const IndexExtent e = token_extent(s, first + thread);
    shared.sequence[thread] = s.p.sequence[first + thread];
    shared.slots[thread] = e.all ? 0 : e.slots;
    shared.visible[thread] = e.visible;
    shared.blocks[thread] = e.blocks;
    scores = !e.all && e.slots > begin;
  }
  async_proxy_fence();
  if (__syncthreads_or(scores ? 1 : 0) == 0) {
    wait_for_previous_kernels();
    if constexpr (!kMany) {
      const IndexExtent e = token_extent(s, first);
      if (e.all && begin == 0) {
#pragma unroll
        for (int l = 0; l < kLists; ++l) {
          write_all_slots<Memory::kThreads>(s, first, l == 1, e);
        }
      }
    }
    return;
  }
  score_tiles<kMany, kRestricted, kPublishes>(s, shared, first, tokens, begin, span);
  __syncthreads();
  if constexpr (kMany) {
    flush_counts<Memory::kThreads>(s.entries, first, tokens, shared.count[0]);
  } else {
    select_scored<kPublishes>(s, shared, first, token_extent(s, first), begin, span);
  }
}

// Of a block of one token. The selection's memory takes the place of what the scores needed.
int64_t alone_bytes(int k, int blocks) {
  return std::max<int64_t>(sizeof(Shared<false>), std::max(finish_bytes(k), finish_bytes(blocks)));
}
// How many of them certainly run at the same time.
int64_t resident_blocks(int k, int blocks) {
  constexpr int64_t kOther = 4096;  // shared memory that a block has besides
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess) {
    return 1;
  }
  const bool two = 2 * (alone_bytes(k, blocks) + kOther) <= kSharedCapacity;
  return int64_t{multiprocessors} * (two ? Shared<false>::kBlocks : 1);
}

template <bool kMany, bool kRestricted, bool kPublishes>
Status run(const OpContext& ctx, const IndexSplit& s) {
  using Memory = Shared<kMany>;
  static_assert(sizeof(Memory) * Memory::kBlocks <= kSharedCapacity);
  const int64_t groups = ceil_div(s.tokens, s.group),
                steps = ceil_div(s.entries.bound, Memory::kStepSlots);
  int64_t span = 0;
  if constexpr (kMany) {
    // Spans of equal length that fill the device a whole number of times, in the fewest steps; a
    // block costs about as much as kBlockSteps steps by itself.
    constexpr int64_t kBlockSteps = 4;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t rounds = 1, tried = 0; tried < 8; ++rounds) {
      const int64_t spans = std::clamp<int64_t>(rounds * kMultiprocessors / groups, 1, steps);
      const int64_t length = ceil_div(steps, spans);
      if (length > Memory::kMostSteps) {
        continue;
      }
      ++tried;
      if (rounds * (length + kBlockSteps) < least) {
        least = rounds * (length + kBlockSteps);
        span = length;
      }
    }
  } else {
    // A token's blocks wait for each other, so that all run at the same time.
    span = ceil_div(
        steps, std::clamp<int64_t>(resident_blocks(s.entries.k, s.blocks.k) / groups, 1, steps));
  }
  return launch(ctx,
                "index_score",
                score_kernel<kMany, kRestricted, kPublishes>,
                dim3(extent(ceil_div(steps, span)), extent(groups)),
                Memory::kThreads,
                kMany ? int64_t{sizeof(Memory)} : alone_bytes(s.entries.k, s.blocks.k),
                s,
                static_cast<int>(span) * Memory::kStepSlots);
}

}  // namespace

bool index_scores_support(const IndexProblem& p) {
  const bool blocks = p.candidates != nullptr || p.candidates_out != nullptr;
  return p.heads == kHeads && p.dim == kIndexMmaDim &&
         (!blocks || p.candidate_block == kCandidateBlock);
}

int64_t index_alone_tokens(const IndexProblem& p, int64_t slots) {
  const int64_t blocks =
      ceil_div(slots, Shared<false>::kMostSteps * Shared<false>::kStepSlots);  // of a token
  if (blocks <= 1) {
    return std::numeric_limits<int64_t>::max();
  }
  return std::max<int64_t>(
      resident_blocks(p.k, p.candidates_out == nullptr ? 0 : p.candidate_width) / blocks, 1);
}

Status index_scores(const OpContext& ctx, const IndexSplit& s, DType act) {
  CACHALOT_RETURN_IF_ERROR(with_act(act, [&](auto type) {
    return launch(ctx,
                  "index_query",
                  query_kernel<decltype(type)>,
                  dim3(extent(s.tokens), kHeads / kQueryWarps),
                  kQueryWarps * kWarp,
                  0,
                  s);
  }));
  if (s.group > 1) {
    return run<true, false, false>(ctx, s);
  }
  if (s.p.candidates != nullptr) {
    return run<false, true, false>(ctx, s);
  }
  return s.blocks.bound > 0 ? run<false, false, true>(ctx, s) : run<false, false, false>(ctx, s);
}

}  // namespace cachalot::ops::cuda
