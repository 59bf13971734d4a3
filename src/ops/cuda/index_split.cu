// Index selection over scores in scratch: the form for the shapes of index_score.cu, whose scores
// it ranks. Tokens go in passes, as many at once as scratch has room for.
//
// in, out  as index_select.cu, and a bound of the visible entries that sizes grids and scratch
//
// score    index_score.cu: scores as ordered integers -> scratch [T, bound], counts per leading 12
//          bits -> scratch [T, 4096]; tokens that share no keys are selected from by the same
//          kernel
// collect  block = 2048 or more slots: from the counts, the bin that holds the k-th largest score;
//          slots above that bin are selected, slots in it become candidates
// finish   block = one token: the missing ones are the best candidates (exact: counts by the next
// 12
//          bits, then comparisons); ids ascending, from a bit each where 16 KiB hold those, sorted
//          otherwise
//
// A candidate source collects twice: from the entries, when the maxima of its candidate blocks are
// made and counted, and from those. Integer counters make the lists' order vary; the selected sets
// do not. Shared: 16 KiB counts (collect), at most 66 KiB (finish). Bound by the scores, then by 8
// B of scores written and read per slot.
#include <algorithm>

#include "ops/cuda/index_collect.cuh"
#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = kIndexThreads;
constexpr int kCollect = 2048;  // scores of a collect block at least
constexpr int64_t kBlocksWanted = 1056;
constexpr int64_t kMostTokens = 1024;  // of a pass

// The list is that of entries, or of candidate blocks. kMakesBlocks: it is that of entries, whose
// maxima by candidate block are written and counted on the way.
template <bool kMakesBlocks>
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const __grid_constant__ IndexSplit s, int share, bool of_blocks) {
  __shared__ int slots[kIndexWarps + 1];
  __shared__ int maxima[kMakesBlocks ? kBins : 1];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.y;
  const IndexList& list = of_blocks ? s.blocks : s.entries;
  const IndexExtent e = token_extent(s, token);
  const int begin = static_cast<int>(blockIdx.x) * share;
  const int end = min(begin + share, of_blocks ? e.blocks : e.slots);
  if (e.all || begin >= end) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kMakesBlocks) {
    for (int i = thread; i < kBins; i += kThreads) {
      maxima[i] = 0;
    }
  }
  const int bin =
      threshold_bin<kThreads>(GlobalCounts{list.histogram + token * kBins}, list.k, slots);
  collect_slots<kThreads>(
      list, token, bin, begin, end, [&](const uint4& v, uint32_t best, int slot) {
        if constexpr (kMakesBlocks) {
          // Two threads have a candidate block.
          if (slot < end && slot + 4 > end) {
            best = max(v.x, slot + 1 < end ? max(v.y, slot + 2 < end ? v.z : 0) : 0);
          }
          best = max(best, __shfl_xor_sync(kAllLanes, best, 1));
          if (thread % 2 == 0 && slot < end) {
            const int id = slot / kCandidateBlock;
            best = id == e.blocks - 1 ? 0xFFFFFFFFu : best;  // the newest entry's block
            s.blocks.scores[token * s.blocks.bound + id] = best;
            atomicAdd(&maxima[best >> (32 - kBinBits)], 1);
          }
        }
      });
  if constexpr (kMakesBlocks) {
    __syncthreads();
    for (int i = thread; i < kBins; i += kThreads) {
      if (maxima[i] != 0) {
        atomicAdd(&s.blocks.histogram[token * kBins + i], maxima[i]);
      }
    }
  }
}

// blockIdx.y: 0 entries, 1 candidate blocks.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ IndexSplit s) {
  __shared__ TopKState state;
  __shared__ int slots[kIndexWarps + 1];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  const bool of_blocks = blockIdx.y == 1;
  const IndexExtent e = token_extent(s, token);
  if (e.all) {
    write_all_slots<kThreads>(s, token, of_blocks, e);
    return;
  }
  finish_list<kThreads>(s, token, of_blocks, e, dynamic_shared(), &state, slots);
}

// Slots of a list, to a multiple of 16 bytes.
int padded(int64_t n) {
  return static_cast<int>(ceil_div(n, 4) * 4);
}
int whole_blocks(int64_t slots) {
  return static_cast<int>(ceil_div(slots, kCandidateBlock) * kCandidateBlock);
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

Status run_pass(const OpContext& ctx, const IndexSplit& s, DType act) {
  const bool publishes = s.blocks.bound > 0;
  CACHALOT_RETURN_IF_ERROR(index_scores(ctx, s, act));
  if (s.group == 1) {
    return {};
  }
  // Every block reads the counts, so a block is no smaller than fills the device.
  const auto collect = [&](auto kernel, const IndexList& list, bool of_blocks) {
    const auto share =
        whole_blocks(std::max<int64_t>(kCollect, int64_t{list.bound} * s.tokens / kBlocksWanted));
    return launch(ctx,
                  "index_collect",
                  kernel,
                  dim3(extent(ceil_div(list.bound, share)), extent(s.tokens)),
                  kThreads,
                  0,
                  s,
                  share,
                  of_blocks);
  };
  if (publishes) {
    CACHALOT_RETURN_IF_ERROR(collect(collect_kernel<true>, s.entries, false));
    CACHALOT_RETURN_IF_ERROR(collect(collect_kernel<false>, s.blocks, true));
  } else {
    CACHALOT_RETURN_IF_ERROR(collect(collect_kernel<false>, s.entries, false));
  }
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
// own, so that consumers share nothing.
int group_tokens(const IndexProblem& p, int64_t tokens, int64_t sequences) {
  const int64_t mean = tokens / std::max<int64_t>(sequences, 1);
  if (p.candidates != nullptr || mean < 2) {
    return 1;
  }
  return static_cast<int>(mean >= kIndexGroup ? kIndexGroup : kIndexGroup / mean * mean);
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
  IndexSplit s{.p = all, .group = group_tokens(all, t, args.rows.sequences)};
  const int64_t query_tokens = s.group == 1 ? 1 : 2 * s.group_pairs();  // of a group
  const int64_t token_bytes = list_bytes(slots, all.k) +
                              ceil_div(query_tokens * kQueryBytes, s.group) + 4 * all.heads + 8 +
                              (publishes ? list_bytes(blocks, all.candidate_width) : 0);
  // Arrays, each aligned.
  constexpr int64_t kSlack = 16 * 64;
  // Passes of about the same length, in whole groups.
  const auto whole = [&](int64_t tokens) { return ceil_div(tokens, s.group) * s.group; };
  const int64_t most =
      s.group == 1 ? std::min(kMostTokens, index_alone_tokens(s.p, slots)) : kMostTokens;
  int64_t pass = whole(ceil_div(t, ceil_div(t, most)));
  while (pass > s.group && ctx.scratch != nullptr &&
         !ctx.scratch->fits(pass * token_bytes + kSlack)) {
    pass = whole(pass / 2);
  }
  Scratch scratch(ctx);
  take(scratch, s.entries, pass, slots, all.k, nullptr);
  if (publishes) {
    take(scratch, s.blocks, pass, blocks, all.candidate_width, nullptr);
  }
  s.queries = scratch.array<uint8_t>(pass / s.group * query_tokens * kQueryBytes);
  s.weights = scratch.array<float>(pass * all.heads);
  s.arrivals = scratch.array<int>(2 * pass);
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
