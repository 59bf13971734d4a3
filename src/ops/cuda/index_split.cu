// Index selection by several blocks per token: the form for few tokens over long caches. Same
// scores, same selection as index_select.cu, bit for bit.
//
// in, out  as index_select.cu, and a bound of the visible entries that sizes grids and scratch
//
// query    one block per token: queries rotated, quantized and packed as A operands     -> scratch
// score    block = 1024 slots of a token: scores as ordered integers -> scratch [T, bound]; counts
// per
//          leading 12 bits, in shared memory first, then added to the token's histogram
// collect  block = 4096 slots: from the histogram, the bin that holds the k-th largest score; slots
// above
//          that bin are selected, slots in it become candidates
// finish   block = one token: the missing ones are the best candidates (exact, device/top_k.cuh);
// ids
//          sorted ascending
//
// A candidate source runs collect and finish twice in the same launches: for entries, and for the
// maxima of its candidate blocks. Integer counters make the lists' order vary; the selected sets do
// not. Shared: 4 KiB scores and 16 KiB counts (score), 16 KiB counts (collect), at most 40 KiB
// (finish). Bound by 68 B per entry, plus 12 B of scores and ids written and read.
#include "ops/cuda/index_score.cuh"
#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = kIndexThreads;
constexpr int kSpan = 1024;     // slots of a score block
constexpr int kCollect = 4096;  // scores of a collect block
constexpr int kBinBits = 12;
constexpr int kBins = 1 << kBinBits;
constexpr int kPerThread = kBins / kThreads;
constexpr int kFinishRoom = 4096;

// A list to select from: the entries of a token, or its candidate blocks.
struct List {
  uint32_t* scores;  // [T, bound]
  int32_t* found;    // [T, k]: ids above the k-th score's bin
  int32_t* ties;     // [T, bound]: ids in that bin
  int* counters;     // [T, 2]: of found and of ties
  int* histogram;    // [T, kBins]
  int32_t* out;      // [T, k]
  int bound;
  int k;
};

struct Split {
  IndexProblem p;
  List entries;
  List blocks;        // bound 0: nothing is published
  uint32_t* queries;  // [T, tiles, 8, 32, 4]
};

// What a token has to select from.
struct Extent {
  int visible;
  int slots;   // of the entry list
  int blocks;  // candidate blocks, if the token publishes them
  bool all;    // every visible entry (and block) is selected: nothing is scored
};
__device__ __forceinline__ Extent token_extent(const Split& s, int64_t token) {
  const IndexProblem& p = s.p;
  Extent e;
  e.visible = static_cast<int>((p.position[token] + int64_t{1}) / p.ratio);
  e.slots = p.candidates == nullptr ? e.visible : p.candidate_width * p.candidate_block;
  e.blocks = s.blocks.bound > 0 ? (e.visible + p.candidate_block - 1) / p.candidate_block : 0;
  e.all = p.candidates == nullptr && e.visible <= p.k && e.blocks <= s.blocks.k;
  return e;
}

template <class Act, int kHeadTiles>
__global__ void __launch_bounds__(kThreads) query_kernel(const __grid_constant__ Split s) {
  auto* query = reinterpret_cast<float*>(dynamic_shared());  // [HI, DI]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  for (const List* list : {&s.entries, &s.blocks}) {
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
  // Warp w packs column step w of every head tile.
  const Lane lane;
  const int i = static_cast<int>(threadIdx.x) / 32;
  for (int m = 0; m < kHeadTiles; ++m) {
    uint32_t a[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      query_fragment(query, 16 * m + lane.g + 8 * r, i, lane, a[r], a[2 + r]);
    }
    reinterpret_cast<uint4*>(
        s.queries)[((token * kHeadTiles + m) * 8 + i) * 32 + threadIdx.x % 32] =
        make_uint4(a[0], a[1], a[2], a[3]);
  }
}

template <class Act, int kHeadTiles>
__global__ void __launch_bounds__(kThreads) score_kernel(const __grid_constant__ Split s) {
  __shared__ uint32_t scores[kSpan];
  __shared__ int histogram[kBins];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.y;
  const Extent e = token_extent(s, token);
  const int begin = static_cast<int>(blockIdx.x) * kSpan;
  if (e.all || begin >= e.slots) {
    return;
  }
  const int count = min(kSpan, e.slots - begin);
  const Lane lane;
  QueryFragments<kHeadTiles> fragments;
  const Act* w = static_cast<const Act*>(s.p.w) + token * s.p.heads;
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 a = reinterpret_cast<const uint4*>(
          s.queries)[((token * kHeadTiles + m) * 8 + i) * 32 + threadIdx.x % 32];
      fragments.a[m][i][0] = a.x;
      fragments.a[m][i][1] = a.y;
      fragments.a[m][i][2] = a.z;
      fragments.a[m][i][3] = a.w;
    }
    fragments.weight[m][0] = to_float(w[16 * m + lane.g]);
    fragments.weight[m][1] = to_float(w[16 * m + lane.g + 8]);
  }
  const auto clear = [&] {
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      histogram[i] = 0;
    }
  };
  const auto flush = [&](int* to) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      if (histogram[i] != 0) {
        atomicAdd(&to[i], histogram[i]);
      }
    }
  };
  clear();
  fragments.score_span(
      s.p, token, s.p.index[s.p.sequence[token]], e.visible, begin, count, lane, scores);
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    // Slots without an entry score lowest of all, below every bin that can be chosen.
    const bool present = slot_entry(s.p, token, begin + i, e.visible) >= 0;
    const uint32_t score = present ? scores[i] : 0;
    s.entries.scores[token * s.entries.bound + begin + i] = score;
    if (score > kOrderedMinusInfinity) {
      atomicAdd(&histogram[score >> (32 - kBinBits)], 1);
    }
  }
  __syncthreads();
  flush(s.entries.histogram + token * kBins);
  if (s.blocks.bound == 0) {
    return;
  }
  __syncthreads();
  clear();
  __syncthreads();
  const int width = s.p.candidate_block;
  for (int b = threadIdx.x; b * width < count; b += kThreads) {
    uint32_t best = 0;
    for (int i = 0; i < width && b * width + i < count; ++i) {
      best = max(best, scores[b * width + i]);
    }
    const int id = begin / width + b;
    best = id == e.blocks - 1 ? 0xFFFFFFFFu : best;  // the newest entry's block
    s.blocks.scores[token * s.blocks.bound + id] = best;
    if (best > kOrderedMinusInfinity) {
      atomicAdd(&histogram[best >> (32 - kBinBits)], 1);
    }
  }
  __syncthreads();
  flush(s.blocks.histogram + token * kBins);
}

// The bin of the k-th largest score, or 0 if there are no more than k. All threads.
__device__ int threshold_bin(const int* histogram, int k, int* slots) {
  // Thread i has bins kBins - 1 - kPerThread i and down.
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  int sum = 0;
  int counts[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    counts[i] = histogram[kBins - 1 - kPerThread * thread - i];
    sum += counts[i];
  }
  int before = sum;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int up = __shfl_up_sync(kAllLanes, before, step);
    before += lane >= step ? up : 0;
  }
  if (thread == 0) {
    slots[kIndexWarps] = 0;
  }
  if (lane == kWarp - 1) {
    slots[warp] = before;
  }
  __syncthreads();
  for (int w = 0; w < warp; ++w) {
    before += slots[w];
  }
  before -= sum;
  if (before < k && k <= before + sum) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (before < k && k <= before + counts[i]) {
        slots[kIndexWarps] = kBins - 1 - kPerThread * thread - i;
      }
      before += counts[i];
    }
  }
  __syncthreads();
  return slots[kIndexWarps];
}

// blockIdx.z: 0 entries, 1 candidate blocks.
__global__ void __launch_bounds__(kThreads) collect_kernel(const __grid_constant__ Split s) {
  __shared__ int slots[kIndexWarps + 1];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.y;
  const bool of_blocks = blockIdx.z == 1;
  const List& list = of_blocks ? s.blocks : s.entries;
  const Extent e = token_extent(s, token);
  const int begin = static_cast<int>(blockIdx.x) * kCollect;
  const int end = min(begin + kCollect, of_blocks ? e.blocks : e.slots);
  if (e.all || begin >= end) {
    return;
  }
  const int bin = threshold_bin(list.histogram + token * kBins, list.k, slots);
  const uint32_t* scores = list.scores + token * list.bound;
  int* counters = list.counters + 2 * token;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const uint32_t score = scores[i];
    const int at = static_cast<int>(score >> (32 - kBinBits));
    if (score <= kOrderedMinusInfinity || at < bin) {
      continue;
    }
    if (at > bin) {
      list.found[token * list.k + atomicAdd(&counters[0], 1)] = i;
    } else {
      list.ties[token * list.bound + atomicAdd(&counters[1], 1)] = i;
    }
  }
}

// Entry of a slot that is known to have one.
__device__ __forceinline__ int32_t list_id(const Split& s,
                                           int64_t token,
                                           bool of_blocks,
                                           int slot) {
  return of_blocks || s.p.candidates == nullptr ? slot : slot_entry(s.p, token, slot, 0x7FFFFFFF);
}

// blockIdx.y: 0 entries, 1 candidate blocks.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Split s) {
  __shared__ TopKState state;
  auto* memory = dynamic_shared();
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  const bool of_blocks = blockIdx.y == 1;
  const List& list = of_blocks ? s.blocks : s.entries;
  const Extent e = token_extent(s, token);
  int32_t* out = list.out + token * list.k;
  if (e.all) {
    write_all(of_blocks ? e.blocks : e.visible, out, list.k);
    return;
  }
  const int found = list.counters[2 * token], ties = list.counters[2 * token + 1];
  const int need = min(list.k - found, ties);
  const int32_t* tied = list.ties + token * list.bound;
  const uint32_t* scores = list.scores + token * list.bound;
  auto* ids = reinterpret_cast<uint32_t*>(memory);  // [power of two >= k]
  const int size = power_of_two(list.k);
  const TopK best{reinterpret_cast<uint64_t*>(memory + 4 * ((size + 1) / 2 * 2)),
                  &state,
                  need + kFinishRoom,
                  need};
  for (int i = threadIdx.x; i < found; i += kThreads) {
    ids[i] = static_cast<uint32_t>(list_id(s, token, of_blocks, list.found[token * list.k + i]));
  }
  best.reset();
  __syncthreads();
  for (int begin = 0; begin < ties; begin += kSpan) {
    for (int i = begin + static_cast<int>(threadIdx.x); i < min(begin + kSpan, ties);
         i += kThreads) {
      // The leading bits of all ties are the same.
      const int slot = tied[i];
      best.push(selection_key(scores[slot] << kBinBits, static_cast<uint32_t>(slot)), need > 0);
    }
    __syncthreads();
    best.make_room(kSpan);
  }
  best.shrink();
  for (int i = threadIdx.x; i < need; i += kThreads) {
    const auto slot = static_cast<int>(selection_id(best.buffer[i]));
    ids[found + i] = static_cast<uint32_t>(list_id(s, token, of_blocks, slot));
  }
  __syncthreads();
  sort_ascending(ids, found + need, size);
  for (int i = threadIdx.x; i < list.k; i += kThreads) {
    out[i] = i < found + need ? static_cast<int32_t>(ids[i]) : -1;
  }
}

// Slots of a list, to a multiple of 16 bytes.
int padded(int64_t n) {
  return static_cast<int>(ceil_div(n, 4) * 4);
}

void take(Scratch& scratch, List& list, int64_t tokens, int64_t slots, int k, int32_t* out) {
  list.bound = padded(slots);
  list.k = k;
  list.out = out;
  list.scores = scratch.array<uint32_t>(tokens * list.bound);
  list.ties = scratch.array<int32_t>(tokens * list.bound);
  list.found = scratch.array<int32_t>(tokens * std::max(k, 1));
  list.counters = scratch.array<int>(2 * tokens);
  list.histogram = scratch.array<int>(tokens * kBins);
}

int64_t finish_bytes(int k) {
  const int64_t size = power_of_two(k);
  return 4 * ((size + 1) / 2 * 2) + 8 * (k + int64_t{kFinishRoom});
}

template <class Act, int kHeadTiles>
Status run(OpContext& ctx, const Split& s, int64_t tokens) {
  const bool publishes = s.blocks.bound > 0;
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "index_query",
                                  query_kernel<Act, kHeadTiles>,
                                  extent(tokens),
                                  kThreads,
                                  4 * s.p.heads * s.p.dim,
                                  s));
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "index_score",
                                  score_kernel<Act, kHeadTiles>,
                                  dim3(extent(ceil_div(s.entries.bound, kSpan)), extent(tokens)),
                                  kThreads,
                                  0,
                                  s));
  CACHALOT_RETURN_IF_ERROR(
      launch(ctx,
             "index_collect",
             collect_kernel,
             dim3(extent(ceil_div(s.entries.bound, kCollect)), extent(tokens), publishes ? 2 : 1),
             kThreads,
             0,
             s));
  return launch(ctx,
                "index_finish",
                finish_kernel,
                dim3(extent(tokens), publishes ? 2 : 1),
                kThreads,
                std::max(finish_bytes(s.entries.k), finish_bytes(s.blocks.k)),
                s);
}

template <class Act>
Status run_tiles(OpContext& ctx, const Split& s, int64_t tokens, int head_tiles) {
  switch (head_tiles) {
    case 1:
      return run<Act, 1>(ctx, s, tokens);
    case 2:
      return run<Act, 2>(ctx, s, tokens);
    case 3:
      return run<Act, 3>(ctx, s, tokens);
    default:
      return run<Act, 4>(ctx, s, tokens);
  }
}

// Slots of a token's entry list that the bound allows.
int64_t entry_slots(const IndexProblem& p, int64_t bound) {
  return p.candidates == nullptr ? bound : int64_t{p.candidate_width} * p.candidate_block;
}

int64_t list_bytes(int64_t tokens, int64_t slots, int64_t k) {
  constexpr int64_t kAlign = 5 * 64;
  return tokens * (8 * padded(slots) + 4 * (k + 1) + 8 + 4 * kBins) + kAlign;
}

}  // namespace

bool index_split_supports(const OpContext& ctx, const IndexSelectArgs& args) {
  const IndexProblem p = index_problem(args);
  const int64_t t = args.rows.rows;
  const bool publishes = p.candidates_out != nullptr;
  if (args.entries_bound <= 0 || index_head_tiles(p) == 0 || p.k == 0 || ctx.scratch == nullptr ||
      t > kMaxSplitTokens || (publishes && kSpan % p.candidate_block != 0) ||
      (publishes && p.candidate_width == 0) ||
      std::max(finish_bytes(p.k), finish_bytes(p.candidate_width)) > kSharedCapacity - 4096) {
    return false;
  }
  int64_t bytes = list_bytes(t, entry_slots(p, args.entries_bound), p.k) +
                  t * index_head_tiles(p) * 8 * 32 * 16 + 64;
  if (publishes) {
    bytes += list_bytes(t, ceil_div(args.entries_bound, p.candidate_block), p.candidate_width);
  }
  return ctx.scratch->fits(bytes);
}

Status index_split(OpContext& ctx, const IndexSelectArgs& args) {
  const int64_t t = args.rows.rows;
  Scratch scratch(ctx);
  Split s{.p = index_problem(args)};
  const int head_tiles = index_head_tiles(s.p);
  take(scratch, s.entries, t, entry_slots(s.p, args.entries_bound), s.p.k, s.p.selected);
  if (s.p.candidates_out != nullptr) {
    take(scratch,
         s.blocks,
         t,
         ceil_div(args.entries_bound, s.p.candidate_block),
         s.p.candidate_width,
         s.p.candidates_out);
  }
  s.queries = scratch.array<uint32_t>(t * head_tiles * 8 * 32 * 4);
  CACHALOT_RETURN_IF_ERROR(scratch.status("index_select"));
  return with_act(args.q.dtype,
                  [&](auto act) { return run_tiles<decltype(act)>(ctx, s, t, head_tiles); });
}

}  // namespace cachalot::ops::cuda
