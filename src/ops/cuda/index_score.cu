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
//   warpgroup  a tile of 64 slots that has arrived; its first warp copies later ones, whose
//              addresses it looks up a batch ahead:
//     warp     16 rows of 128 codes in registers as A, by table lookup (9 instructions per 8 codes)
//     piece    of two tokens, one multiplied while the other is weighed:
//       wgmma    rows x heads
//       4 lanes  ReLU, head weights, sum over the heads -> scores, counts, block maxima
//   block      at the end: counts -> global
//
// Slots are rows of the product and heads its columns, so a row's keys are unpacked once for all
// tokens of the block, and neither the group nor the pass changes a sum. Shared: 4 KiB of queries
// and 8 KiB of counts per token and 34 KiB of rows (two tiles per warpgroup), 204 KiB with 14
// tokens; 88 KiB with one (four tiles per warpgroup, counts of blocks too). With one token a block
// is bound by issued instructions (about 250 per warp and tile, with bytes next: 234 cycles of HBM
// per tile). With 14 tokens the tensor cores take 64 cycles per tile and token and the
// instructions, most of them two per product, take 79; they overlap badly (141 measured).
// index_select in all on an H200: 367 us for 64 x 131072, 6.5 ms for 4096 tokens x 131072 (680
// TFLOP/s).
#include <algorithm>

#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kHeads = 32;
constexpr int kQueryWarps = 8;
constexpr int kTileSlots = 64;
constexpr int kRun = 4;  // slots whose rows are copied at once, at least
constexpr int kKeyBytes = 68;
constexpr int kTileBytes = kTileSlots * kKeyBytes;
constexpr int kCandidateBlock = 8;  // entries
constexpr int kMultiprocessors = 132;
constexpr int kWarpgroups = 4;   // of a block
constexpr int kMostTiles = 256;  // of a block; counts have 16 bits
constexpr int kShifts = 20;      // binades from which on a block's codes vanish beside the largest
constexpr int kHeadroom = 6;     // 6 * 2^6 is below E4M3's 448
// Of both operands, and of relu(x) = (x + |x|) / 2.
constexpr float kLate = 0x1.0p-13f;

// One token per block, or many that share keys.
template <bool kMany>
struct Shared {
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kBlocks = kMany ? 1 : 2;  // of a multiprocessor
  static constexpr bool kShares = kMany;
  static constexpr int kTokens = kMany ? kIndexGroup : 1;
  static constexpr int kStages = kMany ? 2 : 4;  // tiles of a warpgroup
  static constexpr int kHistograms = kMany ? kIndexGroup : 2;

  uint8_t query[kTokens][kQueryBytes];  // 1024-byte aligned
  uint8_t rows[kWarpgroups][kStages][kTileBytes];
  uint32_t count[kHistograms][kBins / 2];  // two 16-bit counts each
  float weight[kTokens][kHeads];
  uint2 table[kShifts];  // E4M3 bytes of the eight magnitudes
  int entry[kWarpgroups][kStages][kTileSlots / kCandidateBlock];  // first of a block, or -1
  int sequence[kTokens];
  int slots[kTokens];  // 0 if nothing is scored
  int visible[kTokens];
  int blocks[kTokens];
  uint64_t queries_arrived;
  uint64_t arrived[kWarpgroups][kStages];
};

// The scale of a block `shift` binades below its row's largest one, as 2^(headroom - shift).
__device__ __forceinline__ float shifted_scale(uint32_t shift) {
  return __uint_as_float((127 + kHeadroom - min(shift, uint32_t{kShifts - 1})) << 23);
}
__device__ __forceinline__ uint32_t e4m3_four(const float (&v)[4]) {
  return e4m3_pair(v[0], v[1]) | static_cast<uint32_t>(e4m3_pair(v[2], v[3])) << 16;
}

template <class Act>
__global__ void __launch_bounds__(kQueryWarps* kWarp)
    query_kernel(const __grid_constant__ IndexSplit s) {
  allow_next_kernel();
  wait_for_previous_kernels();
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
  uint8_t* row = s.queries + token * kQueryBytes + head * kIndexMmaDim;
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

// Slots of a tile whose rows lie behind each other, in multiples of 16 bytes: what one bulk copy
// brings. 0: rows must be copied word by word, four slots per thread.
__device__ __forceinline__ int contiguous_slots(const IndexProblem& p, const PagedRows& pages) {
  if (reinterpret_cast<uintptr_t>(pages.pages[0]) % 16 != 0 || pages.page_rows % kRun != 0) {
    return 0;
  }
  if (p.candidates == nullptr && pages.page_rows % kTileSlots == 0) {
    return kTileSlots;
  }
  return pages.page_rows % kCandidateBlock == 0 ? kCandidateBlock : kRun;
}

// The rows of one sequence, as the lanes of a copying warp see them. They look up a batch of tiles
// together, a run per lane.
struct Rows {
  const IndexProblem& p;
  const PagedRows pages;
  int64_t token;  // whose candidates restrict the slots
  int slots;
  int visible;
  int contiguous;  // contiguous_slots()
  int run_slots;
  int batch;  // tiles
  int turn;   // the lane's tile in a batch
  int place;  // first slot of the lane's run in its tile

  __device__ __forceinline__
  Rows(const IndexProblem& problem, int sequence, int64_t first_token, int slot_count, int limit)
      : p(problem),
        pages(problem.index[sequence]),
        token(first_token),
        slots(slot_count),
        visible(limit),
        contiguous(contiguous_slots(problem, pages)),
        run_slots(contiguous > 0 ? contiguous : kRun),
        batch(kWarp * run_slots / kTileSlots) {
    const int first = static_cast<int>(threadIdx.x) % kWarp * run_slots;
    turn = first / kTileSlots;
    place = first % kTileSlots;
  }

  // Slot of the lane's run in a batch that begins at slot `tile`.
  __device__ __forceinline__ int slot(int tile) const {
    return tile + turn * (kWarpgroups * kTileSlots) + place;
  }
  // Its candidate block, or 0.
  __device__ __forceinline__ int block(int tile) const {
    return p.candidates != nullptr && slot(tile) < slots
               ? p.candidates[token * p.candidate_width + slot(tile) / kCandidateBlock]
               : 0;
  }
};

// Slots whose entries follow each other. `page` is only loaded here, so that nobody waits for it.
struct Run {
  int entry = -1;       // of the first slot, or -1
  int count = 0;        // slots that have an entry; 0: none is copied
  uint32_t offset = 0;  // of the first row in its page
  const uint8_t* page = nullptr;

  __device__ __forceinline__ void find(const Rows& rows, int tile, int block) {
    const int slot = rows.slot(tile);
    entry = rows.p.candidates == nullptr ? slot : block * kCandidateBlock + slot % kCandidateBlock;
    count = slot < rows.slots && block >= 0 ? min(rows.run_slots, rows.visible - entry) : 0;
    if (count <= 0) {
      entry = -1;
      count = 0;
      return;
    }
    const auto page_rows = static_cast<uint32_t>(rows.pages.page_rows);
    const uint32_t index = static_cast<uint32_t>(entry) / page_rows;
    page = rows.pages.pages[index];
    offset = (static_cast<uint32_t>(entry) - index * page_rows) * uint32_t{kKeyBytes};
  }

  // A warp: the runs of tile `turn` of the batch go to shared memory.
  __device__ __forceinline__ void copy(
      const Rows& rows, int turn, uint8_t* tile, int* entries, uint64_t* arrived) const {
    uint8_t* to = tile + rows.place * kKeyBytes;
    const bool own = rows.turn == turn;
    if (own && rows.p.candidates != nullptr && rows.place % kCandidateBlock == 0) {
      entries[rows.place / kCandidateBlock] = entry;
    }
    const bool copies = own && count > 0;
    if (copies && rows.contiguous == 0) {
      for (int i = 0; i < count * (kKeyBytes / 4); ++i) {
        const int row = i / (kKeyBytes / 4), word = i % (kKeyBytes / 4);
        reinterpret_cast<uint32_t*>(to)[i] =
            reinterpret_cast<const uint32_t*>(rows.pages.row(entry + row))[word];
      }
    }
    const int bytes = rows.contiguous * kKeyBytes;
    const int runs = __popc(__ballot_sync(kAllLanes, copies));
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      barrier_arrive_expect(arrived, runs * bytes);
    }
    __syncwarp();
    if (copies && bytes > 0) {
      copy_bulk(to, page + offset, bytes, arrived);
    }
  }
};

// The operand `pieces` of 16 bytes behind another in the same 256 KiB of shared memory.
__device__ __forceinline__ uint64_t operand_at(uint64_t operand, int pieces) {
  const uint32_t low = static_cast<uint32_t>(operand) + static_cast<uint32_t>(pieces);
  return operand >> 32 << 32 | low;
}

// Keeps the compiler from computing a pointer to global memory again at every use.
__device__ __forceinline__ uint32_t* keep(uint32_t* pointer) {
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// A lane's two rows of a tile, 32 codes each, as operand A, and what their finished sums need.
struct Keys {
  uint32_t a[4][4];
  float factor[2];

  __device__ __forceinline__ void load(const uint8_t* rows,
                                       const uint2* table,
                                       const Lane& lane,
                                       float scale) {
    const int first = static_cast<int>(threadIdx.x) / kWarp % 4 * 16 + lane.g;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* words = reinterpret_cast<const uint32_t*>(rows + (first + 8 * r) * kKeyBytes);
      uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i] = words[4 * lane.t + i];
      }
      const uint32_t block =
          pick_bytes(words[kIndexMmaDim / 8], 0, static_cast<uint32_t>(0x4440 + lane.t));
      uint32_t most = max(block, __shfl_xor_sync(kAllLanes, block, 1));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
      const uint2 magnitudes = table[min(most - block, uint32_t{kShifts - 1})];
      factor[r] = __uint_as_float(most << 23) * scale;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Lookup by the low three bits of a nibble; the signs of even nibbles move up to those of
        // the odd ones, from where they reach the same bytes.
        const uint32_t select = codes[i] & 0x77777777u, even = codes[i] << 4;
        a[i][r] = merge_bits(pick_bytes(codes[i], even, 0x1504),
                             0x80808080u,
                             pick_bytes(magnitudes.x, magnitudes.y, select));
        a[i][2 + r] = merge_bits(pick_bytes(codes[i], even, 0x3726),
                                 0x80808080u,
                                 pick_bytes(magnitudes.x, magnitudes.y, select >> 16));
      }
    }
  }
};

// Products of a tile and kCount tokens, and their sums over heads. A lane ends with one sum: token
// t % 2 and row g + 8 (t / 2) of two tokens; row g + 8 (t % 2) of one token, lanes t and t ^ 2 the
// same.
template <int kCount>
struct Piece {
  static_assert(kCount == 1 || kCount == 2);
  float acc[kCount * kHeads / 8][4];

  static __device__ __forceinline__ int token(const Lane& lane) {
    return kCount == 2 ? lane.t % 2 : 0;
  }
  static __device__ __forceinline__ int half(const Lane& lane) {
    return kCount == 2 ? lane.t / 2 : lane.t % 2;
  }

  // `query` is the operand of the first token.
  __device__ __forceinline__ void start(const Keys& keys, uint64_t query) {
    wgmma_fp8<false>(acc, keys.a[0], query);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      wgmma_fp8<true>(acc, keys.a[i], operand_at(query, i * 2));
    }
    wgmma_commit();
  }

  // `weights` are those of the first token for lane t.
  __device__ __forceinline__ float sum(const float* weights, const Lane& lane) const {
    float sum[kCount][2];
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      const float4 w[2] = {*reinterpret_cast<const float4*>(weights + m * kHeads),
                           *reinterpret_cast<const float4*>(weights + m * kHeads + 4)};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto twice_relu = [&](int n, int e) {
          const float d = acc[m * (kHeads / 8) + n][2 * r + e];
          return d + fabsf(d);
        };
        float x = twice_relu(0, 0) * w[0].x;
        x = fmaf(twice_relu(0, 1), w[0].y, x);
        x = fmaf(twice_relu(1, 0), w[0].z, x);
        x = fmaf(twice_relu(1, 1), w[0].w, x);
        x = fmaf(twice_relu(2, 0), w[1].x, x);
        x = fmaf(twice_relu(2, 1), w[1].y, x);
        x = fmaf(twice_relu(3, 0), w[1].z, x);
        sum[m][r] = fmaf(twice_relu(3, 1), w[1].w, x);
      }
    }
    // Lanes exchange what the other keeps, so that nothing is summed twice.
    const auto exchange = [](bool upper, float low_value, float high_value, int step) {
      const float sent = upper ? low_value : high_value;
      return (upper ? high_value : low_value) + __shfl_xor_sync(kAllLanes, sent, step);
    };
    const bool odd = lane.t % 2 == 1;
    if constexpr (kCount == 2) {
      return exchange(lane.t >= 2,
                      exchange(odd, sum[0][0], sum[1][0], 1),
                      exchange(odd, sum[0][1], sum[1][1], 1),
                      2);
    } else {
      const float row = exchange(odd, sum[0][0], sum[0][1], 1);
      return row + __shfl_xor_sync(kAllLanes, row, 2);
    }
  }
};

__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  static_assert(kWarpgroups == 4);
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else if (warpgroup == 1) {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  } else if (warpgroup == 2) {
    asm volatile("bar.sync 3, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 4, 128;" ::: "memory");
  }
}

// Counts a score among the 16-bit counts of its bin and the next or the last one.
__device__ __forceinline__ void count_score(uint32_t* counts, uint32_t bits) {
  const uint32_t bin = bits >> (32 - kBinBits);
  atomicAdd(&counts[bin / 2], bin % 2 == 0 ? 1u : 0x10000u);
}

// A warpgroup: scores of its tiles of the span.
template <class Memory>
__device__ void score_tiles(
    const IndexSplit& s, Memory& shared, int first, int tokens, int begin, int span) {
  constexpr int kStages = Memory::kStages, kStride = kWarpgroups * kTileSlots;
  const int block_warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int warpgroup = block_warp / 4, warp = block_warp % 4;
  const Lane lane;
  const uint64_t query = wgmma_operand(shared.query[0]);
  const float scale = s.p.scale * kLate;
  const bool publishes = s.blocks.bound > 0;
  const bool restricted = !Memory::kShares && s.p.candidates != nullptr;
  uint32_t* scores = keep(s.entries.scores + int64_t{first} * s.entries.bound);
  uint32_t* block_scores = s.blocks.scores + int64_t{first} * s.blocks.bound;
  int before = 0;  // tiles of earlier runs
  uint32_t copied = 0, read = 0;
  barrier_wait(&shared.queries_arrived, 0);
  for_each_run(shared, tokens, begin, span, [&](int from, int to, int slots, int end) {
    int visible = 0;
    for (int i = from; i < to; ++i) {
      visible = max(visible, shared.visible[i]);
    }
    const Rows rows(s.p, shared.sequence[from], first + from, slots, visible);
    const int start = begin + (warpgroup + before) % kWarpgroups * kTileSlots;
    // The first warp: the runs of the batch whose tiles are copied now, and blocks of the next one.
    Run run;
    int block = 0, turn = 0;
    const auto find = [&](int tile) {
      run.find(rows, tile, block);
      block = rows.block(tile + rows.batch * kStride);
    };
    const auto copy = [&](int tile) {
      if (tile < end) {
        const uint32_t stage = copied % kStages;
        run.copy(rows,
                 turn,
                 shared.rows[warpgroup][stage],
                 shared.entry[warpgroup][stage],
                 &shared.arrived[warpgroup][stage]);
        ++copied;
        if (++turn == rows.batch) {
          turn = 0;
          find(tile + kStride);
        }
      }
    };
    if (warp == 0) {
      block = rows.block(start);
      find(start);
      for (int i = 0; i < kStages; ++i) {
        copy(start + i * kStride);
      }
    }
    for (int tile = start; tile < end; tile += kStride) {
      const uint32_t stage = read % kStages;
      barrier_wait(&shared.arrived[warpgroup][stage], static_cast<int>(read / kStages % 2));
      ++read;
      Keys keys;
      keys.load(shared.rows[warpgroup][stage], shared.table, lane, scale);
      int entry[2] = {0, 0};
      if (restricted) {
        entry[0] = shared.entry[warpgroup][stage][2 * warp];
        entry[1] = shared.entry[warpgroup][stage][2 * warp + 1];
      }
      warpgroup_barrier(warpgroup);  // all have their keys of this tile: its stage is free
      if (warp == 0) {
        copy(tile + kStages * kStride);
      }
      const int row_slot = tile + warp * 16 + lane.g;

      const auto weigh = [&]<int kCount>(const Piece<kCount>& piece, int m) {
        const float sum = piece.sum(&shared.weight[m][lane.t * 8], lane);
        const int own = m + Piece<kCount>::token(lane), half = Piece<kCount>::half(lane);
        const int slot = row_slot + 8 * half;
        const bool owns = kCount == 1 ? lane.t < 2 : own < to;
        const bool listed = slot < (owns ? shared.slots[own] : 0);
        uint32_t bits = ordered_bits(sum * (half == 0 ? keys.factor[0] : keys.factor[1]));
        if (restricted) {
          // Slots without an entry score lowest of all, below every bin that can be chosen.
          const int block = half == 0 ? entry[0] : entry[1];
          bits = block >= 0 && block + lane.g < shared.visible[own] ? bits : 0;
        }
        if (listed) {
          scores[static_cast<uint32_t>(own * s.entries.bound + slot)] = bits;
          count_score(shared.count[own], bits);
        }
        if (publishes) {
          uint32_t best = listed ? bits : 0;
#pragma unroll
          for (int step = 4; step < 32; step *= 2) {
            best = max(best, __shfl_xor_sync(kAllLanes, best, step));
          }
          if (listed && lane.g == 0) {
            const int id = slot / kCandidateBlock;
            best = id == shared.blocks[own] - 1 ? 0xFFFFFFFFu : best;  // the newest entry's block
            block_scores[static_cast<uint32_t>(own * s.blocks.bound + id)] = best;
            count_score(shared.count[s.group + own], best);
          }
        }
      };
      wgmma_fence(keys.a);
      if constexpr (Memory::kShares) {
        // Two pieces take turns: one is weighed while the tensor cores work on the other.
        const auto operand = [&](int m) { return operand_at(query, m * (kQueryBytes / 16)); };
        Piece<2> even, odd;
        even.start(keys, operand(from));
        for (int m = from;; m += 4) {
          if (m + 2 >= to) {
            wgmma_wait<0>();
            weigh(even, m);
            break;
          }
          odd.start(keys, operand(m + 2));
          wgmma_wait<1>();
          weigh(even, m);
          if (m + 4 >= to) {
            wgmma_wait<0>();
            weigh(odd, m + 2);
            break;
          }
          even.start(keys, operand(m + 4));
          wgmma_wait<1>();
          weigh(odd, m + 2);
        }
      } else {
        Piece<1> piece;
        piece.start(keys, query);
        wgmma_wait<0>();
        weigh(piece, 0);
      }
    }
    before += (end - begin) / kTileSlots;
  });
}

template <bool kMany>
__global__ void __launch_bounds__(Shared<kMany>::kThreads, Shared<kMany>::kBlocks)
    score_kernel(const __grid_constant__ IndexSplit s, int span) {
  using Memory = Shared<kMany>;
  auto& shared = *reinterpret_cast<Memory*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.y) * s.group,
            begin = static_cast<int>(blockIdx.x) * span;
  const int tokens = min(s.group, s.tokens - first);
  const int lists = s.blocks.bound > 0 ? 2 : 1;
  if (thread < kShifts) {
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
  if (thread < kWarpgroups * Memory::kStages) {
    barrier_init(&shared.arrived[0][thread], 1);
  }
  if (thread == 0) {
    barrier_init(&shared.queries_arrived, 1);
  }
  for (int i = thread; i < tokens * lists * (kBins / 8); i += Memory::kThreads) {
    const int list = i / (tokens * (kBins / 8)), at = i % (tokens * (kBins / 8));
    reinterpret_cast<uint4*>(shared.count[list * s.group])[at] = make_uint4(0, 0, 0, 0);
  }
  allow_next_kernel();
  wait_for_previous_kernels();
  bool scores = false;
  if (thread < tokens) {
    const IndexExtent e = token_extent(s, first + thread);
    shared.sequence[thread] = s.p.sequence[first + thread];
    shared.slots[thread] = e.all ? 0 : e.slots;
    shared.visible[thread] = e.visible;
    shared.blocks[thread] = e.blocks;
    scores = !e.all && e.slots > begin;
  }
  for (int i = thread; i < tokens * kHeads; i += Memory::kThreads) {
    shared.weight[0][i] = s.weights[first * kHeads + i];
  }
  async_proxy_fence();
  if (__syncthreads_or(scores ? 1 : 0) == 0) {
    return;
  }
  if (thread == 0) {
    barrier_arrive_expect(&shared.queries_arrived, tokens * kQueryBytes);
    copy_bulk(shared.query,
              s.queries + int64_t{first} * kQueryBytes,
              tokens * kQueryBytes,
              &shared.queries_arrived);
  }
  __syncwarp();
  score_tiles(s, shared, first, tokens, begin, span);
  __syncthreads();
  const auto flush = [&](const IndexList& list, const uint32_t* counts) {
    int* histogram = list.histogram + int64_t{first} * kBins;
    for (int i = thread; i < tokens * (kBins / 2); i += Memory::kThreads) {
      const auto low = static_cast<int>(counts[i] & 0xFFFFu);
      const auto high = static_cast<int>(counts[i] >> 16);
      if (low != 0) {
        atomicAdd(&histogram[2 * i], low);
      }
      if (high != 0) {
        atomicAdd(&histogram[2 * i + 1], high);
      }
    }
  };
  flush(s.entries, shared.count[0]);
  if (lists == 2) {
    flush(s.blocks, shared.count[s.group]);
  }
}

template <bool kMany>
Status run(const OpContext& ctx, const IndexSplit& s) {
  using Memory = Shared<kMany>;
  static_assert(sizeof(Memory) * Memory::kBlocks <= kSharedCapacity);
  const int64_t groups = ceil_div(s.tokens, s.group), tiles = ceil_div(s.entries.bound, kTileSlots);
  // Spans of equal length that fill the device a whole number of times.
  constexpr int64_t kAtOnce = int64_t{kMultiprocessors} * Memory::kBlocks;
  int64_t spans = std::clamp<int64_t>(kAtOnce / groups, 1, tiles);
  for (int64_t rounds = 2; ceil_div(tiles, spans) > kMostTiles; ++rounds) {
    spans = std::max<int64_t>(rounds * kAtOnce / groups, 1);
  }
  const int64_t span = ceil_div(tiles, spans);
  return launch(ctx,
                "index_score",
                score_kernel<kMany>,
                dim3(extent(ceil_div(tiles, span)), extent(groups)),
                Memory::kThreads,
                sizeof(Memory),
                s,
                static_cast<int>(span) * kTileSlots);
}

}  // namespace

bool index_scores_support(const IndexProblem& p) {
  const bool blocks = p.candidates != nullptr || p.candidates_out != nullptr;
  return p.heads == kHeads && p.dim == kIndexMmaDim &&
         (!blocks || p.candidate_block == kCandidateBlock);
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
  return s.group == 1 ? run<false>(ctx, s) : run<true>(ctx, s);
}

}  // namespace cachalot::ops::cuda
