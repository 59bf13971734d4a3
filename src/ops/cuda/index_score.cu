// Index scores of many entries on tensor cores: 32 heads of 128.
//
//   S[p, j] = sum_h w_h relu(q_h . k_j) * DI^-1/2 HI^-1/2, q = FP4(RoPE(q)), in FP32
//
// in   q [T, HI * DI] act, w [T, HI] act, rope, index rows (E2M1 codes, E8M0 per 32), candidates
// out  scores as ordered integers [T, slots], and their counts per leading 12 bits [T, kBins]; the
//      same for the maxima of candidate blocks
//
// query  block = one token: queries rotated, quantized, laid out as the B operand of wgmma
// score  block = `tiles` times 64 slots of one token, or of up to four tokens of one sequence
//
//   16 threads  address of a run of rows, five tiles ahead | bulk copies four tiles ahead
//   warpgroup   the tile that has arrived, while the copies go on:
//     warp      unpack 16 rows of 128 codes in registers as A | wgmma: rows x heads of all tokens
//     4 lanes   ReLU, head weights, sum over the heads -> scores, counts, block maxima
//   block       at the end: counts -> global
//
// Slots are rows of the product and heads its columns, so a row's keys are unpacked once for all
// tokens of the block, and neither the group nor the pass changes a sum. Shared: 34 KiB of rows, 8
// KiB of queries and 8 KiB of counts per token: 51 KiB with one token, 99 KiB with four. Bound by
// 68 B per entry at one token per sequence (64 x 131072: 133 us at 4.3 TB/s), by 8192 FLOP per
// token and entry at four; close behind come the instructions that unpack (17 per 8 codes) and
// weigh (2 per product). Measured with the rest of index_select on an H200: 478 us, and 14.9 ms for
// 4096 tokens x 131072 (295 TFLOP/s).
#include <algorithm>

#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = kIndexThreads;
constexpr int kGroups = kThreads / 128;  // warpgroups
constexpr int kHeads = 32;
constexpr int kTileSlots = 64;
constexpr int kRun = 4;  // slots whose rows are copied at once, at least
constexpr int kRuns = kTileSlots / kRun;
constexpr int kStages = 4;  // tiles of rows
constexpr int kKeyBytes = 68;
constexpr int kTileBytes = kTileSlots * kKeyBytes;
constexpr int kHalfDim = kIndexMmaDim / 2;
constexpr int kCandidateBlock = 8;   // entries, if candidates are published
constexpr int kMostTiles = 64;       // of a block
constexpr int kBlocksWanted = 1056;  // eight for each of 132 multiprocessors

template <int kTokens>
struct Shared {
  static constexpr int kColumns = kHeads * kTokens;
  uint8_t query[2][kColumns * 128];  // 1024-byte aligned
  uint8_t rows[kGroups][kStages][kTileBytes];
  uint32_t count[kTokens][kBins / 2];  // two 16-bit counts each
  float weight[kColumns];
  IndexExtent extent[kTokens];
  uint64_t arrived[kGroups][kStages];
};

// Place of element (row, column) of a query half in the swizzled operand.
__device__ __forceinline__ int swizzled(int row, int column) {
  return row * kHalfDim + (column / 8 ^ row % 8) * 8 + column % 8;
}

template <class Act>
__global__ void __launch_bounds__(kThreads) query_kernel(const __grid_constant__ IndexSplit s) {
  auto* query = reinterpret_cast<float*>(dynamic_shared());  // [HI, DI]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  for (const IndexList* list : {&s.entries, &s.blocks}) {
    if (list->bound > 0) {
      for (int i = threadIdx.x; i < kBins; i += kThreads) {
        list->histogram[token * kBins + i] = 0;
      }
      if (threadIdx.x < 2) {
        list->counters[2 * token + threadIdx.x] = 0;
      }
    }
  }
  load_query<Act>(s.p, token, query);
  const int columns = s.group * kHeads, first = static_cast<int>(token % s.group) * kHeads;
  Bf16* out = s.queries + token / s.group * (2 * columns * kHalfDim);
  for (int i = threadIdx.x; i < kHeads * kIndexMmaDim; i += kThreads) {
    // K in the order in which a lane unpacks its block of 32 codes: place 16 j + 8 h + 2 t + e
    // holds column 32 t + 8 (j / 2) + 2 (j % 2) + h + 4 e.
    const int head = i / kIndexMmaDim, place = i % kIndexMmaDim;
    const int j = place / 16, h = place / 8 % 2, t = place / 2 % 4, e = place % 2;
    const float v = query[head * kIndexMmaDim + 32 * t + j / 2 * 8 + j % 2 * 2 + h + 4 * e];
    out[place / kHalfDim * (columns * kHalfDim) + swizzled(first + head, place % kHalfDim)] =
        from_float<Bf16>(v);
  }
}

// Slots of a tile whose rows lie behind each other, in multiples of 16 bytes: what one bulk copy
// brings. 0: rows must be copied word by word, four slots per thread.
__device__ __forceinline__ int contiguous_slots(const IndexProblem& p, const PagedRows& pages) {
  const auto divides = [&](int n) {
    return pages.page_rows % n == 0 && (p.candidates == nullptr || p.candidate_block % n == 0);
  };
  if (reinterpret_cast<uintptr_t>(pages.pages[0]) % 16 != 0 || !divides(kRun)) {
    return 0;
  }
  return divides(kTileSlots) ? kTileSlots : divides(2 * kRun) ? 2 * kRun : kRun;
}

// Slots whose entries follow each other.
struct Run {
  int entry;            // of the first slot
  int count;            // slots that have an entry; 0: none is copied
  const uint8_t* from;  // row of the first one
};
__device__ __forceinline__ Run find_run(const IndexProblem& p,
                                        int64_t token,
                                        const PagedRows& pages,
                                        int visible,
                                        int slot,
                                        int end,
                                        int slots) {
  Run run{.entry = 0, .count = 0, .from = nullptr};
  if (slot < end) {
    run.entry = slot_entry(p, token, slot, visible);
    run.count = run.entry < 0 ? 0 : min(slots, visible - run.entry);
  }
  if (run.count > 0) {
    const auto page_rows = static_cast<uint32_t>(pages.page_rows);
    const uint32_t page = static_cast<uint32_t>(run.entry) / page_rows;
    run.from = pages.pages[page] + (static_cast<uint32_t>(run.entry) - page * page_rows) *
                                       static_cast<uint32_t>(pages.row_bytes);
  }
  return run;
}

// One thread brings a run of `slots` rows to shared memory.
__device__ __forceinline__ void copy_run(
    const Run& run, int slots, bool whole, const PagedRows& pages, uint8_t* to, uint64_t* arrived) {
  if (run.count == 0) {
    barrier_arrive(arrived);
  } else if (whole) {
    barrier_arrive_expect(arrived, slots * kKeyBytes);
    copy_bulk(to, run.from, slots * kKeyBytes, arrived);
  } else {
#pragma unroll 1
    for (int i = 0; i < run.count * (kKeyBytes / 4); ++i) {
      const int row = i / (kKeyBytes / 4), word = i % (kKeyBytes / 4);
      reinterpret_cast<uint32_t*>(to)[i] =
          reinterpret_cast<const uint32_t*>(pages.row(run.entry + row))[word];
    }
    barrier_arrive(arrived);
  }
}

__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

// What a lane unpacks of its two rows of a tile: 32 codes each.
struct Keys {
  uint32_t codes[2][4];
  uint32_t scale[2];

  __device__ __forceinline__ void load(const uint8_t* rows, const Lane& lane) {
    const int first = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane.g;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* words = reinterpret_cast<const uint32_t*>(rows + (first + 8 * r) * kKeyBytes);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        codes[r][q] = words[4 * lane.t + q];
      }
      scale[r] = words[kIndexMmaDim / 8];
    }
  }
};

// Starts acc = 64 rows times all query columns. `query` is the operand of the first column.
template <int kColumnTiles>
__device__ __forceinline__ void multiply(const Keys& keys,
                                         uint64_t query,
                                         int half_bytes,
                                         const Lane& lane,
                                         uint32_t (&a)[8][4],
                                         float (&acc)[kColumnTiles][4]) {
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      acc[n][i] = 0;
    }
  }
  const uint32_t scale[2] = {bf16_scale(keys.scale[0], lane.t, 86),
                             bf16_scale(keys.scale[1], lane.t, 86)};
  unrolled<8>([&]<int i>() {
    constexpr int n = i % 2 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      a[i][r] = mul_bf16x2(Fp4Weights::nibbles<n>(keys.codes[r][i / 2]), scale[r]);
      a[i][2 + r] = mul_bf16x2(Fp4Weights::nibbles<n + 1>(keys.codes[r][i / 2]), scale[r]);
    }
  });
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    wgmma_bf16(acc, a[i], query + static_cast<uint64_t>((i / 4 * half_bytes + i % 4 * 32) / 16));
  }
  wgmma_commit();
}

template <class Act, int kTokens>
__global__ void __launch_bounds__(kThreads, kTokens == 1 ? 3 : 2)
    score_kernel(const __grid_constant__ IndexSplit s, int tiles) {
  using Memory = Shared<kTokens>;
  constexpr int kColumns = Memory::kColumns;
  auto& shared = *reinterpret_cast<Memory*>(dynamic_shared());
  allow_next_kernel();
  wait_for_previous_kernels();
  const IndexProblem& p = s.p;
  const int group = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const int first = group * kTokens, last = min(first + kTokens, s.tokens);
  const int begin = static_cast<int>(blockIdx.x) * tiles * kTileSlots;
  const int warpgroup = thread / 128;
  const Lane lane;

  const auto* queries = reinterpret_cast<const uint8_t*>(s.queries) +
                        static_cast<int64_t>(group) * (2 * kColumns * 128);
  for (int i = thread; i < 2 * kColumns * 8; i += kThreads) {
    copy_async(shared.query[0] + i * 16, queries + i * 16, true);
  }
  copy_async_commit();
  for (int i = thread; i < (last - first) * kHeads; i += kThreads) {
    shared.weight[i] = to_float(static_cast<const Act*>(p.w)[int64_t{first} * kHeads + i]);
  }
  if (thread < last - first) {
    shared.extent[thread] = token_extent(s, first + thread);
  }
  if (thread < kGroups * kStages) {
    barrier_init(&shared.arrived[0][thread], kRuns);
  }
  for (int i = thread; i < kTokens * (kBins / 2); i += kThreads) {
    shared.count[0][i] = 0;
  }
  copy_async_wait<0>();
  async_proxy_fence();
  __syncthreads();
  const uint64_t query = wgmma_operand(shared.query[0]);
  int copied = 0, read = 0;  // tiles of this warpgroup

  // Tokens of one sequence at a time: all of the group, as a rule.
  for (int from = 0; from < last - first;) {
    const int32_t sequence = p.sequence[first + from];
    int to = from, slots = 0, visible = 0;
    for (; to < last - first && p.sequence[first + to] == sequence; ++to) {
      slots = max(slots, shared.extent[to].all ? 0 : shared.extent[to].slots);
      visible = max(visible, shared.extent[to].visible);
    }
    const PagedRows pages = p.index[sequence];
    const int contiguous = contiguous_slots(p, pages);
    const int run_slots = contiguous > 0 ? contiguous : kRun;
    const int end = min(begin + tiles * kTileSlots, slots);
    // Tile j of this warpgroup; its thread i < kRuns has run i of every tile, if there is one.
    const auto slot0 = [&](int j) { return begin + (j * kGroups + warpgroup) * kTileSlots; };
    const int own_slot = thread % 128 * run_slots;
    Run run;
    const auto find = [&](int j) {
      if (thread % 128 < kRuns) {
        run = find_run(p,
                       first + from,
                       pages,
                       visible,
                       slot0(j) + own_slot,
                       own_slot < kTileSlots ? end : 0,
                       run_slots);
      }
    };
    const auto copy = [&](int j) {
      if (slot0(j) < end) {
        const int stage = copied++ % kStages;
        if (thread % 128 < kRuns) {
          copy_run(run,
                   run_slots,
                   contiguous > 0,
                   pages,
                   shared.rows[warpgroup][stage] + own_slot * kKeyBytes,
                   &shared.arrived[warpgroup][stage]);
        }
      }
    };
    Keys keys;
    const auto load_keys = [&](int j) {
      if (slot0(j) < end) {
        const int stage = read % kStages;
        barrier_wait(&shared.arrived[warpgroup][stage], read / kStages % 2);
        keys.load(shared.rows[warpgroup][stage], lane);
        ++read;
      }
    };
    for (int j = 0; j < kStages; ++j) {
      find(j);
      copy(j);
    }
    find(kStages);
    load_keys(0);
    for (int j = 0; slot0(j) < end; ++j) {
      uint32_t a[8][4];
      float acc[kColumns / 8][4];
      multiply(keys, query, kColumns * 128, lane, a, acc);
      warpgroup_barrier(warpgroup);  // all have their keys of this tile: its stage is free
      copy(j + kStages);
      find(j + kStages + 1);
      load_keys(j + 1);
      wgmma_wait<0>();
      float sum[kTokens][2] = {};
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
#pragma unroll
        for (int n = 0; n < kHeads / 8; ++n) {
          const float2 w =
              *reinterpret_cast<const float2*>(&shared.weight[m * kHeads + 8 * n + 2 * lane.t]);
          const float (&d)[4] = acc[m * (kHeads / 8) + n];
          sum[m][0] = fmaf(fmaxf(d[0], 0.0f), w.x, sum[m][0]);
          sum[m][0] = fmaf(fmaxf(d[1], 0.0f), w.y, sum[m][0]);
          sum[m][1] = fmaf(fmaxf(d[2], 0.0f), w.x, sum[m][1]);
          sum[m][1] = fmaf(fmaxf(d[3], 0.0f), w.y, sum[m][1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sum[m][r] += __shfl_xor_sync(kAllLanes, sum[m][r], 1);
          sum[m][r] += __shfl_xor_sync(kAllLanes, sum[m][r], 2);
        }
      }
      // A lane goes on with token t % kTokens, and with both rows g and g + 8 if there are four.
      const int m = kTokens == 1 ? 0 : lane.t;
      const IndexExtent& e = shared.extent[m];
      const bool own = m >= from && m < to && !e.all && (kTokens > 1 || lane.t < 2);
#pragma unroll
      for (int r = 0; r < (kTokens == 1 ? 1 : 2); ++r) {
        const int half = kTokens == 1 ? lane.t % 2 : r;
        const int i = thread / 32 % 4 * 16 + lane.g + 8 * half, slot = slot0(j) + i;
        float value = half == 0 ? sum[0][0] : sum[0][1];
        if constexpr (kTokens > 1) {
          const float low = lane.t % 2 == 0 ? sum[0][r] : sum[1][r];
          const float high = lane.t % 2 == 0 ? sum[2][r] : sum[3][r];
          value = lane.t < 2 ? low : high;
        }
        // Slots without an entry score lowest of all, below every bin that can be chosen.
        const bool listed = own && slot < e.slots;
        const bool present =
            listed && (p.candidates == nullptr || slot_entry(p, first, slot, e.visible) >= 0);
        const uint32_t score = present ? ordered_bits(value * (kLateScale * p.scale)) : 0;
        const int64_t token = first + m;
        if (listed) {
          s.entries.scores[token * s.entries.bound + slot] = score;
          if (score > kOrderedMinusInfinity) {
            const uint32_t bin = score >> (32 - kBinBits);
            atomicAdd(&shared.count[m][bin / 2], bin % 2 == 0 ? 1u : 0x10000u);
          }
        }
        if (s.blocks.bound > 0) {
          uint32_t best = score;
#pragma unroll
          for (int step = 4; step < 32; step *= 2) {
            best = max(best, __shfl_xor_sync(kAllLanes, best, step));
          }
          if (listed && lane.g == 0) {
            const int id = slot / kCandidateBlock;
            best = id == e.blocks - 1 ? 0xFFFFFFFFu : best;  // the newest entry's block
            s.blocks.scores[token * s.blocks.bound + id] = best;
            if (best > kOrderedMinusInfinity) {
              atomicAdd(&s.blocks.histogram[token * kBins + (best >> (32 - kBinBits))], 1);
            }
          }
        }
      }
    }
    __syncthreads();
    from = to;
  }
  for (int i = thread; i < (last - first) * kBins; i += kThreads) {
    const int n = static_cast<int>(shared.count[0][i / 2] >> (16 * (i % 2)) & 0xFFFFu);
    if (n != 0) {
      atomicAdd(&s.entries.histogram[int64_t{first} * kBins + i], n);
    }
  }
}

template <class Act, int kTokens>
Status run(const OpContext& ctx, const IndexSplit& s) {
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "index_query",
                                  query_kernel<Act>,
                                  extent(s.tokens),
                                  kThreads,
                                  4 * kHeads * kIndexMmaDim,
                                  s));
  const int64_t groups = ceil_div(s.tokens, kTokens), all = ceil_div(s.entries.bound, kTileSlots);
  const auto tiles =
      static_cast<int>(std::clamp<int64_t>(all * groups / kBlocksWanted, kGroups, kMostTiles));
  return launch(ctx,
                "index_score",
                score_kernel<Act, kTokens>,
                dim3(extent(ceil_div(all, tiles)), extent(groups)),
                kThreads,
                sizeof(Shared<kTokens>),
                s,
                tiles);
}

}  // namespace

bool index_scores_support(const IndexProblem& p) {
  return p.heads == kHeads && p.dim == kIndexMmaDim &&
         (p.candidates_out == nullptr || p.candidate_block == kCandidateBlock);
}

Status index_scores(const OpContext& ctx, const IndexSplit& s, DType act) {
  return with_act(act, [&](auto type) {
    using Act = decltype(type);
    return s.group == 1 ? run<Act, 1>(ctx, s) : run<Act, kIndexGroup>(ctx, s);
  });
}

}  // namespace cachalot::ops::cuda
