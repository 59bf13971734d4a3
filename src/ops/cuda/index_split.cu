// Index selection over scores in scratch: the form for the shapes of index_score.cu, whose scores
// it ranks. Tokens go in passes, as many at once as scratch has room for.
//
// in, out  as index_select.cu, and a bound of the visible entries that sizes grids and scratch
//
// score    index_score.cu: scores as ordered integers -> scratch [T, bound], counts per leading 12
//          bits -> scratch [T, 4096]
// collect  block = 2048 or more slots: from the counts, the bin that holds the k-th largest score;
//          slots above that bin are selected, slots in it become candidates
// finish   block = one token: the missing ones are the best candidates (exact, device/top_k.cuh);
//          ids ascending, from a bit each where 4 KiB hold those, sorted otherwise
//
// A candidate source runs collect and finish twice in the same launches: for entries, and for the
// maxima of its candidate blocks. Integer counters make the lists' order vary; the selected sets do
// not. Shared: 16 KiB counts (collect), at most 56 KiB (finish). Bound by the scores, then by 12 B
// of scores and ids written and read per slot.
#include <algorithm>

#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = kIndexThreads;
constexpr int kCollectStep = 4 * kThreads;  // scores that a collect block looks at together
constexpr int kLoads = 4;                   // such steps under way
constexpr int kCollect = 2048;              // scores of a collect block at least
constexpr int64_t kBlocksWanted = 1056;
constexpr int kRound = 1024;  // candidates of a finish block between two looks at its buffer
constexpr int kPerThread = kBins / kThreads;
constexpr int kFinishRoom = 4096;
constexpr int64_t kMostTokens = 1024;  // of a pass

// The bin of the k-th largest score, or 0 if there are no more than k. All threads.
__device__ int threshold_bin(const int* histogram, int k, int* slots) {
  // Thread i has bins kBins - 1 - kPerThread i and down.
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  int sum = 0;
  int counts[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; i += 4) {
    const int4 four =
        *reinterpret_cast<const int4*>(histogram + kBins - kPerThread * thread - i - 4);
    counts[i] = four.w;
    counts[i + 1] = four.z;
    counts[i + 2] = four.y;
    counts[i + 3] = four.x;
    sum += four.x + four.y + four.z + four.w;
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
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const __grid_constant__ IndexSplit s, int share) {
  __shared__ int slots[kIndexWarps + 1];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.y;
  const bool of_blocks = blockIdx.z == 1;
  const IndexList& list = of_blocks ? s.blocks : s.entries;
  const IndexExtent e = token_extent(s, token);
  const int begin = static_cast<int>(blockIdx.x) * share;
  const int end = min(begin + share, of_blocks ? e.blocks : e.slots);
  if (e.all || begin >= end) {
    return;
  }
  const int bin = threshold_bin(list.histogram + token * kBins, list.k, slots);
  const auto* scores = reinterpret_cast<const uint4*>(list.scores + token * list.bound);
  int* counters = list.counters + 2 * token;
  const uint32_t least =
      max(static_cast<uint32_t>(bin) << (32 - kBinBits), kOrderedMinusInfinity + 1);
  const auto take = [&](uint32_t score, int slot) {
    if (score < least || slot >= end) {
      return;
    }
    if (static_cast<int>(score >> (32 - kBinBits)) > bin) {
      list.found[token * list.k + atomicAdd(&counters[0], 1)] = slot;
    } else {
      list.ties[token * list.bound + atomicAdd(&counters[1], 1)] = slot;
    }
  };
  // Few scores are taken, so four are looked at together and several fours are under way.
  for (int i = begin + 4 * static_cast<int>(threadIdx.x); i < end; i += kLoads * kCollectStep) {
    uint4 four[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int slot = i + j * kCollectStep;
      four[j] = slot < end ? scores[slot / 4] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint4& v = four[j];
      if (max(max(v.x, v.y), max(v.z, v.w)) >= least) {
        const int slot = i + j * kCollectStep;
        take(v.x, slot);
        take(v.y, slot + 1);
        take(v.z, slot + 2);
        take(v.w, slot + 3);
      }
    }
  }
}

// Ids in shared memory: a bit each if there are few to choose from, else a list that is sorted.
struct ChosenIds {
  static constexpr int kMostWords = 1024;

  uint32_t* memory;  // [at least kMostWords, power of two >= ids]
  int words;         // of bits

  __device__ __forceinline__ bool is_set() const { return words <= kMostWords; }
  // All threads; a barrier must follow before the first insertion.
  __device__ __forceinline__ void clear() const {
    for (int i = threadIdx.x; is_set() && i < words; i += kThreads) {
      memory[i] = 0;
    }
  }
  __device__ __forceinline__ void insert(int place, uint32_t id) const {
    if (is_set()) {
      atomicOr(&memory[id / 32], 1u << id % 32);
    } else {
      memory[place] = id;
    }
  }
  // All threads, after a barrier: `count` ids ascending, and -1 behind them. `slots` has
  // kIndexWarps places.
  __device__ void write(int count, int32_t* out, int width, int* slots) const {
    if (is_set()) {
      write_set(out, slots);
    } else {
      sort_ascending(memory, count, power_of_two(width));
      for (int i = threadIdx.x; i < count; i += kThreads) {
        out[i] = static_cast<int32_t>(memory[i]);
      }
    }
    for (int i = count + static_cast<int>(threadIdx.x); i < width; i += kThreads) {
      out[i] = -1;
    }
  }

 private:
  __device__ void write_set(int32_t* out, int* slots) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    // A warp has whole rows of 32 words that follow each other.
    const int share = (words + kThreads - 1) / kThreads * kWarp;
    const int begin = min(warp * share, words), end = min(begin + share, words);
    int count = 0;
    for (int i = begin + lane; i < end; i += kWarp) {
      count += __popc(memory[i]);
    }
    count = __reduce_add_sync(kAllLanes, count);
    if (lane == 0) {
      slots[warp] = count;
    }
    __syncthreads();
    int at = 0;
#pragma unroll
    for (int w = 0; w < kIndexWarps; ++w) {
      at += w < warp ? slots[w] : 0;
    }
    for (int row = begin; row < end; row += kWarp) {
      uint32_t word = row + lane < end ? memory[row + lane] : 0;
      if (__ballot_sync(kAllLanes, word != 0) == 0) {
        continue;
      }
      int to = __popc(word);
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int up = __shfl_up_sync(kAllLanes, to, step);
        to += lane >= step ? up : 0;
      }
      const int of_row = __shfl_sync(kAllLanes, to, kWarp - 1);
      to += at - __popc(word);
      for (; word != 0; word &= word - 1) {
        out[to++] = (row + lane) * 32 + __ffs(static_cast<int>(word)) - 1;
      }
      at += of_row;
    }
  }
};

// Entry of a slot that is known to have one.
__device__ __forceinline__ int32_t list_id(const IndexSplit& s,
                                           int64_t token,
                                           bool of_blocks,
                                           int slot) {
  return of_blocks || s.p.candidates == nullptr ? slot : slot_entry(s.p, token, slot, 0x7FFFFFFF);
}

// blockIdx.y: 0 entries, 1 candidate blocks.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ IndexSplit s) {
  __shared__ TopKState state;
  __shared__ int slots[kIndexWarps];
  auto* memory = dynamic_shared();
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  const bool of_blocks = blockIdx.y == 1;
  const IndexList& list = of_blocks ? s.blocks : s.entries;
  const IndexExtent e = token_extent(s, token);
  int32_t* out = list.out + token * list.k;
  if (e.all) {
    write_all(of_blocks ? e.blocks : e.visible, out, list.k);
    return;
  }
  const int found = list.counters[2 * token], ties = list.counters[2 * token + 1];
  const int need = min(list.k - found, ties);
  const int32_t* tied = list.ties + token * list.bound;
  const uint32_t* scores = list.scores + token * list.bound;
  const TopK best{reinterpret_cast<uint64_t*>(memory), &state, need + kFinishRoom, need};
  const ChosenIds ids{reinterpret_cast<uint32_t*>(memory + 8 * (list.k + kFinishRoom)),
                      ((of_blocks ? e.blocks : e.visible) + 31) / 32};
  ids.clear();
  best.reset();
  __syncthreads();
  for (int i = threadIdx.x; i < found; i += kThreads) {
    ids.insert(i,
               static_cast<uint32_t>(list_id(s, token, of_blocks, list.found[token * list.k + i])));
  }
  for (int begin = 0; begin < ties; begin += kRound) {
    for (int i = begin + static_cast<int>(threadIdx.x); i < min(begin + kRound, ties);
         i += kThreads) {
      // The leading bits of all ties are the same.
      const int slot = tied[i];
      best.push(selection_key(scores[slot] << kBinBits, static_cast<uint32_t>(slot)), need > 0);
    }
    __syncthreads();
    best.make_room(kRound);
  }
  best.shrink();
  for (int i = threadIdx.x; i < need; i += kThreads) {
    const auto slot = static_cast<int>(selection_id(best.buffer[i]));
    ids.insert(found + i, static_cast<uint32_t>(list_id(s, token, of_blocks, slot)));
  }
  __syncthreads();
  ids.write(found + need, out, list.k, slots);
}

// Slots of a list, to a multiple of 16 bytes.
int padded(int64_t n) {
  return static_cast<int>(ceil_div(n, 4) * 4);
}

void take(Scratch& scratch, IndexList& list, int64_t tokens, int64_t slots, int k, int32_t* out) {
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
  return 8 * (k + int64_t{kFinishRoom}) + 4 * std::max(power_of_two(k), ChosenIds::kMostWords);
}

Status run_pass(const OpContext& ctx, const IndexSplit& s, DType act) {
  const bool publishes = s.blocks.bound > 0;
  CACHALOT_RETURN_IF_ERROR(index_scores(ctx, s, act));
  // Every block reads the counts, so a block is no smaller than fills the device.
  const auto share =
      padded(std::max<int64_t>(kCollect, int64_t{s.entries.bound} * s.tokens / kBlocksWanted));
  CACHALOT_RETURN_IF_ERROR(
      launch(ctx,
             "index_collect",
             collect_kernel,
             dim3(extent(ceil_div(s.entries.bound, share)), extent(s.tokens), publishes ? 2 : 1),
             kThreads,
             0,
             s,
             share));
  return launch(ctx,
                "index_finish",
                finish_kernel,
                dim3(extent(s.tokens), publishes ? 2 : 1),
                kThreads,
                std::max(finish_bytes(s.entries.k), finish_bytes(s.blocks.k)),
                s);
}

// Slots of a token's entry list that the bound allows.
int64_t entry_slots(const IndexProblem& p, int64_t bound) {
  return p.candidates == nullptr ? bound : int64_t{p.candidate_width} * p.candidate_block;
}

// Scratch of one token's list.
int64_t list_bytes(int64_t slots, int64_t k) {
  return 8 * padded(slots) + 4 * (k + 1) + 8 + 4 * kBins;
}

// Tokens that a block scores: whole sequences if several fit. Every token has candidates of its
// own, so that consumers share nothing; the counts of a source's blocks take the room of half of
// the tokens.
int group_tokens(const IndexProblem& p, int64_t tokens, int64_t sequences) {
  const int64_t mean = tokens / std::max<int64_t>(sequences, 1);
  if (p.candidates != nullptr || mean < 2) {
    return 1;
  }
  const int64_t most = p.candidates_out == nullptr ? kIndexGroup : kIndexGroup / 4 * 2;
  return static_cast<int>(mean >= most ? most : most / mean * mean);
}

// The problem of the tokens from `token` on.
IndexProblem from_token(IndexProblem p, int64_t token, int64_t q_bytes, int64_t w_bytes) {
  p.position += token;
  p.sequence += token;
  p.q = static_cast<const uint8_t*>(p.q) + token * q_bytes;
  p.w = static_cast<const uint8_t*>(p.w) + token * w_bytes;
  p.rope += token * p.half * 2;
  p.candidates = p.candidates == nullptr ? nullptr : p.candidates + token * p.candidate_width;
  p.candidates_out =
      p.candidates_out == nullptr ? nullptr : p.candidates_out + token * p.candidate_width;
  p.selected += token * p.k;
  return p;
}

}  // namespace

bool index_split_supports(const IndexSelectArgs& args) {
  const IndexProblem p = index_problem(args);
  return args.entries_bound > 0 && index_scores_support(p) && p.k > 0 &&
         (p.candidates_out == nullptr || p.candidate_width > 0) &&
         std::max(finish_bytes(p.k), finish_bytes(p.candidate_width)) <= kSharedCapacity - 4096;
}

Status index_split(OpContext& ctx, const IndexSelectArgs& args) {
  const IndexProblem all = index_problem(args);
  const bool publishes = all.candidates_out != nullptr;
  const int64_t t = args.rows.rows, slots = entry_slots(all, args.entries_bound);
  const int64_t blocks = publishes ? ceil_div(args.entries_bound, all.candidate_block) : 0;
  const int64_t token_bytes = list_bytes(slots, all.k) + kQueryBytes + 4 * all.heads +
                              (publishes ? list_bytes(blocks, all.candidate_width) : 0);
  IndexSplit s{.p = all, .group = group_tokens(all, t, args.rows.sequences)};
  // A dozen arrays, each aligned.
  constexpr int64_t kSlack = 12 * 64;
  // Passes of about the same length, in whole groups.
  const auto whole = [&](int64_t tokens) { return ceil_div(tokens, s.group) * s.group; };
  int64_t pass = whole(ceil_div(t, ceil_div(t, kMostTokens)));
  while (pass > s.group && ctx.scratch != nullptr &&
         !ctx.scratch->fits(pass * token_bytes + kSlack)) {
    pass = whole(pass / 2);
  }
  Scratch scratch(ctx);
  take(scratch, s.entries, pass, slots, all.k, nullptr);
  if (publishes) {
    take(scratch, s.blocks, pass, blocks, all.candidate_width, nullptr);
  }
  s.queries = scratch.array<uint8_t>(pass * kQueryBytes);
  s.weights = scratch.array<float>(pass * all.heads);
  CACHALOT_RETURN_IF_ERROR(scratch.status("index_select"));
  for (int64_t first = 0; first < t; first += pass) {
    s.p = from_token(all,
                     first,
                     args.q.dim(1) * dtype_bytes(args.q.dtype),
                     args.w.dim(1) * dtype_bytes(args.w.dtype));
    s.tokens = static_cast<int>(std::min(pass, t - first));
    s.entries.out = s.p.selected;
    s.blocks.out = s.p.candidates_out;
    CACHALOT_RETURN_IF_ERROR(run_pass(ctx, s, args.q.dtype));
  }
  return {};
}

}  // namespace cachalot::ops::cuda
