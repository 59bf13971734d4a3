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
//     piece    of two tokens (or the only one):
//       wgmma    rows x heads
//       4 lanes  ReLU, head weights, sum over the heads -> scores, counts, block maxima
//   block      at the end: counts -> global
//
// Slots are rows of the product and heads its columns, so a row's keys are unpacked once for all
// tokens of the block, and neither the group nor the pass changes a sum. While one warpgroup
// weighs, the tensor cores work for others: six of them with many tokens, two blocks of three with
// one. Shared: 4 KiB of queries and 8 KiB of counts per token and 51 KiB of rows, 221 KiB with 14
// tokens; 72 KiB with one, counts of candidate blocks included. Bound by issued instructions, about
// 240 per warp and tile with one token (HBM: 234 cycles per tile), and 75 per warp, tile and token
// with many (tensor cores: 64 cycles), most of which are the two that weigh a product.
// Measured on an H200, top-k included: 64 x 131072 in 267 us (2.1 TB/s of 4.2), 1 x 4096 x 131072
// in 5.9 ms (748 TFLOP/s).
#include <algorithm>
#include <limits>

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
constexpr int kMostTiles = 256;     // of a block; counts have 16 bits
constexpr int kShifts = 20;   // binades from which on a block's codes vanish beside the largest
constexpr int kHeadroom = 6;  // 6 * 2^6 is below E4M3's 448
// Of both operands, and of relu(x) = (x + |x|) / 2.
constexpr float kLate = 0x1.0p-13f;

// One token per block, or many that share keys.
template <bool kMany>
struct Shared {
  static constexpr int kWarpgroups = kMany ? 6 : 3;
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kBlocks = kMany ? 1 : 2;  // of a multiprocessor
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
  uint64_t freed[kWarpgroups][kStages];
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
__device__ __forceinline__ int contiguous_slots(const PagedRows& pages, bool restricted) {
  if (reinterpret_cast<uintptr_t>(pages.pages[0]) % 16 != 0 || pages.page_rows % kRun != 0) {
    return 0;
  }
  if (!restricted && pages.page_rows % kTileSlots == 0) {
    return kTileSlots;
  }
  return pages.page_rows % kCandidateBlock == 0 ? kCandidateBlock : kRun;
}

// The rows of one sequence, as the lanes of a copying warp see them. They look up a batch of tiles
// together, a run per lane.
struct Rows {
  uint8_t* const* pages;
  uint32_t page_rows;
  const int32_t* candidates;  // blocks that restrict the slots, or null
  int slots;
  int visible;
  int run_slots;
  bool bulk;   // runs are copied as a whole
  int stride;  // from a tile to the next one of the warpgroup

  // Tiles of a batch, the lane's tile in it, and the first slot of its run there.
  __device__ __forceinline__ int batch() const { return kWarp * run_slots / kTileSlots; }
  __device__ __forceinline__ int turn() const { return first() / kTileSlots; }
  __device__ __forceinline__ int place() const { return first() % kTileSlots; }
  // Slot of the lane's run in a batch that begins at slot `tile`.
  __device__ __forceinline__ int slot(int tile) const { return tile + turn() * stride + place(); }
  // Its candidate block, or 0.
  __device__ __forceinline__ int block(int tile) const {
    return candidates != nullptr && slot(tile) < slots ? candidates[slot(tile) / kCandidateBlock]
                                                       : 0;
  }

 private:
  __device__ __forceinline__ int first() const {
    return static_cast<int>(threadIdx.x) % kWarp * run_slots;
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
    entry = rows.candidates == nullptr ? slot : block * kCandidateBlock + slot % kCandidateBlock;
    count = slot < rows.slots && block >= 0 ? min(rows.run_slots, rows.visible - entry) : 0;
    if (count <= 0) {
      entry = -1;
      count = 0;
      return;
    }
    const uint32_t index = static_cast<uint32_t>(entry) / rows.page_rows;
    page = rows.pages[index];
    offset = (static_cast<uint32_t>(entry) - index * rows.page_rows) * uint32_t{kKeyBytes};
  }

  // A warp: the runs of tile `turn` of the batch go to shared memory.
  __device__ __forceinline__ void copy(
      const Rows& rows, int turn, uint8_t* tile, int* entries, uint64_t* arrived) const {
    uint8_t* to = tile + rows.place() * kKeyBytes;
    const bool own = rows.turn() == turn;
    if (rows.candidates != nullptr && own && rows.place() % kCandidateBlock == 0) {
      entries[rows.place() / kCandidateBlock] = entry;
    }
    const bool copies = own && count > 0;
    if (copies && !rows.bulk) {
#pragma unroll 1
      for (int i = 0; i < count * (kKeyBytes / 4); ++i) {
        const auto row = static_cast<uint32_t>(entry + i / (kKeyBytes / 4));
        reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(
            rows.pages[row / rows.page_rows] +
            row % rows.page_rows * kKeyBytes)[i % (kKeyBytes / 4)];
      }
    }
    const int bytes = rows.bulk ? rows.run_slots * kKeyBytes : 0;
    const int runs = __popc(__ballot_sync(kAllLanes, copies));
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      barrier_arrive_expect(arrived, runs * bytes);
    }
    __syncwarp();
    if (copies && rows.bulk) {
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

__device__ __forceinline__ int keep(int value) {
  asm("" : "+r"(value));
  return value;
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

// Counts a score among the 16-bit counts of its bin and the next or the last one.
__device__ __forceinline__ void count_score(uint32_t* counts, uint32_t bits) {
  const uint32_t bin = bits >> (32 - kBinBits);
  atomicAdd(&counts[bin / 2], bin % 2 == 0 ? 1u : 0x10000u);
}

// A warpgroup: scores of its tiles of the span.
template <bool kMany, bool kRestricted, bool kPublishes>
__device__ void score_tiles(
    const IndexSplit& s, Shared<kMany>& shared, int first, int tokens, int begin, int span) {
  constexpr int kStages = Shared<kMany>::kStages, kWarpgroups = Shared<kMany>::kWarpgroups;
  constexpr int kStride = kWarpgroups * kTileSlots;
  const int block_warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int warpgroup = block_warp / 4, warp = block_warp % 4;
  const Lane lane;
  const uint64_t query = wgmma_operand(shared.query[0]);
  const float scale = s.p.scale * kLate;
  uint32_t* scores = keep(s.entries.scores + int64_t{first} * s.entries.bound);
  uint32_t* block_scores = s.blocks.scores + int64_t{first} * s.blocks.bound;
  auto& rows_of = shared.rows[warpgroup];
  auto& arrived = shared.arrived[warpgroup];
  auto& freed = shared.freed[warpgroup];
  int before = 0;                             // tiles of earlier runs
  uint32_t copied = 0, stage = 0, phase = 0;  // stage and phase of the tile that is scored
  barrier_wait(&shared.queries_arrived, 0);
  for_each_run(shared, tokens, begin, span, [&](int from, int to, int slots, int end) {
    end = keep(end);
    int visible = 0;
    for (int i = from; i < to; ++i) {
      visible = max(visible, shared.visible[i]);
    }
    const PagedRows& pages = s.p.index[shared.sequence[from]];
    const int contiguous = contiguous_slots(pages, kRestricted);
    const Rows rows{.pages = pages.pages,
                    .page_rows = static_cast<uint32_t>(pages.page_rows),
                    .candidates = kRestricted
                                      ? s.p.candidates + int64_t{first + from} * s.p.candidate_width
                                      : nullptr,
                    .slots = slots,
                    .visible = visible,
                    .run_slots = max(contiguous, kRun),
                    .bulk = contiguous > 0,
                    .stride = kStride};
    const int start = begin + (warpgroup + before) % kWarpgroups * kTileSlots;
    // The first warp: the runs of the batch whose tiles are copied now, and blocks of the next one.
    Run run;
    int block = 0, turn = 0;
    const auto find = [&](int tile) {
      run.find(rows, tile, block);
      block = rows.block(tile + rows.batch() * kStride);
    };
    const auto copy = [&](int tile) {
      const uint32_t to_stage = copied % kStages;
      if (copied >= kStages) {
        barrier_wait(&freed[to_stage], static_cast<int>((copied / kStages - 1) % 2));
      }
      run.copy(
          rows, turn, rows_of[to_stage], shared.entry[warpgroup][to_stage], &arrived[to_stage]);
      ++copied;
      if (++turn == rows.batch()) {
        turn = 0;
        find(tile + kStride);
      }
    };
    if (warp == 0) {
      block = rows.block(start);
      find(start);
      for (int tile = start; tile < min(end, start + kStages * kStride); tile += kStride) {
        copy(tile);
      }
    }
    for (int tile = start; tile < end; tile += kStride) {
      barrier_wait(&arrived[stage], static_cast<int>(phase));
      Keys keys;
      keys.load(rows_of[stage], shared.table, lane, scale);
      int entry[2];
      if constexpr (kRestricted) {
        entry[0] = shared.entry[warpgroup][stage][2 * warp];
        entry[1] = shared.entry[warpgroup][stage][2 * warp + 1];
      }
      __syncwarp();
      if (threadIdx.x % kWarp == 0) {
        barrier_arrive(&freed[stage]);
      }
      const auto copy_later = [&] {
        if (warp == 0 && tile + kStages * kStride < end) {
          copy(tile + kStages * kStride);
        }
      };
      const int row_slot = tile + warp * 16 + lane.g;

      const auto weigh = [&]<int kCount>(const Piece<kCount>& piece, int m) {
        const float sum = piece.sum(&shared.weight[m][lane.t * 8], lane);
        const int own = m + Piece<kCount>::token(lane), half = Piece<kCount>::half(lane);
        const int slot = row_slot + 8 * half;
        const bool owns = kCount == 1 ? lane.t < 2 : own < to;
        const bool listed = slot < (owns ? shared.slots[own] : 0);
        uint32_t bits = ordered_bits(sum * (half == 0 ? keys.factor[0] : keys.factor[1]));
        if constexpr (kRestricted) {
          // Slots without an entry score lowest of all, below every bin that can be chosen.
          const int first_entry = half == 0 ? entry[0] : entry[1];
          bits = first_entry >= 0 && first_entry + lane.g < visible ? bits : 0;
        }
        if (listed) {
          scores[static_cast<uint32_t>(own * s.entries.bound + slot)] = bits;
          count_score(shared.count[own], bits);
        }
        if constexpr (kPublishes) {
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
      if constexpr (kMany) {
        Piece<2> piece;
        for (int m = from; m < to; m += 2) {
          wgmma_fence();
          piece.start(keys, operand_at(query, m * (kQueryBytes / 16)));
          if (m == from) {
            copy_later();
          }
          wgmma_wait<0>();
          weigh(piece, m);
        }
      } else {
        Piece<1> piece;
        piece.start(keys, query);
        copy_later();
        wgmma_wait<0>();
        weigh(piece, 0);
      }
      stage = (stage + 1) % kStages;
      phase ^= stage == 0 ? 1u : 0u;
    }
    before += (end - begin) / kTileSlots;
  });
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
  if (thread < Memory::kWarpgroups * Memory::kStages) {
    barrier_init(&shared.arrived[0][thread], 1);
    barrier_init(&shared.freed[0][thread], 4);
  }
  if (thread == 0) {
    barrier_init(&shared.queries_arrived, 1);
  }
  for (int i = thread; i < tokens * kLists * (kBins / 8); i += Memory::kThreads) {
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
  score_tiles<kMany, kRestricted, kPublishes>(s, shared, first, tokens, begin, span);
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
  if constexpr (kPublishes) {
    flush(s.blocks, shared.count[s.group]);
  }
}

template <bool kMany, bool kRestricted, bool kPublishes>
Status run(const OpContext& ctx, const IndexSplit& s) {
  using Memory = Shared<kMany>;
  static_assert(sizeof(Memory) * Memory::kBlocks <= kSharedCapacity);
  const int64_t groups = ceil_div(s.tokens, s.group), tiles = ceil_div(s.entries.bound, kTileSlots);
  // Spans of equal length that fill the device a whole number of times, in the fewest steps; a
  // block costs about as much as kBlockTiles tiles by itself.
  constexpr int64_t kAtOnce = kMultiprocessors * Memory::kBlocks, kBlockTiles = 8;
  int64_t span = 0, steps = std::numeric_limits<int64_t>::max();
  for (int64_t rounds = 1, tried = 0; tried < 8; ++rounds) {
    const int64_t spans = std::clamp<int64_t>(rounds * kAtOnce / groups, 1, tiles);
    const int64_t length = ceil_div(tiles, spans);
    if (length > kMostTiles) {
      continue;
    }
    ++tried;
    if (rounds * (length + kBlockTiles) < steps) {
      steps = rounds * (length + kBlockTiles);
      span = length;
    }
  }
  return launch(ctx,
                "index_score",
                score_kernel<kMany, kRestricted, kPublishes>,
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
  const bool publishes = s.blocks.bound > 0;
  if (s.group > 1) {
    return publishes ? run<true, false, true>(ctx, s) : run<true, false, false>(ctx, s);
  }
  if (s.p.candidates != nullptr) {
    return run<false, true, false>(ctx, s);
  }
  return publishes ? run<false, false, true>(ctx, s) : run<false, false, false>(ctx, s);
}

}  // namespace cachalot::ops::cuda
