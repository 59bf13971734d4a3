// Index selection in passes over scores in scratch: what its kernels share.
#pragma once

#include "ops/cuda/index.cuh"

namespace cachalot::ops::cuda {

constexpr int kBinBits = 12;  // leading bits of a score that the histograms tell apart
constexpr int kBins = 1 << kBinBits;
// Most tokens of a block of the score kernel; those of one sequence share its unpacked keys.
constexpr int kIndexGroup = 14;
constexpr int kCandidateBlock = 8;              // entries, of the shapes that run here
constexpr int kQueryBytes = 32 * kIndexMmaDim;  // E4M3 codes of a token's queries

// A list to select from: the entries of a token, or its candidate blocks.
struct IndexList {
  uint32_t* scores;  // [T, bound]
  int32_t* found;    // [T, k]: ids above the k-th score's bin
  int32_t* ties;     // [T, bound]: ids in that bin
  int* counters;     // [T, 2]: of found and of ties
  int* histogram;    // [T, kBins]
  int32_t* out;      // [T, k]
  int bound;
  int k;
};

// The tokens of one pass; `p` begins at the first of them.
struct IndexSplit {
  IndexProblem p;
  IndexList entries;
  IndexList blocks;  // bound 0: nothing is published
  uint8_t* queries;  // [T, HI, DI] E4M3 codes, swizzled: the B operands of wgmma
  float* weights;    // [T, HI] head weights times the scales of the queries
  int* arrivals;     // [T, 2] blocks of a token that have counted, and that have collected
  int tokens;
  int group;  // consecutive tokens that one block scores

  // Of a group, the last of which may lack a token. Queries lie in whole pairs.
  __host__ __device__ int group_pairs() const { return (group + 1) / 2; }
};

// What a token has to select from.
struct IndexExtent {
  int visible;
  int slots;   // of the entry list
  int blocks;  // candidate blocks, if the token publishes them
  bool all;    // every visible entry (and block) is selected: nothing is scored
};
__device__ __forceinline__ IndexExtent token_extent(const IndexSplit& s, int64_t token) {
  const IndexProblem& p = s.p;
  IndexExtent e;
  e.visible = static_cast<int>((static_cast<uint32_t>(p.position[token]) + 1) /
                               static_cast<uint32_t>(p.ratio));
  e.slots = p.candidates == nullptr ? e.visible : p.candidate_width * p.candidate_block;
  e.blocks = s.blocks.bound > 0 ? (e.visible + p.candidate_block - 1) / p.candidate_block : 0;
  e.all = p.candidates == nullptr && e.visible <= p.k && e.blocks <= s.blocks.k;
  return e;
}

// Whether index_scores() takes these heads, this dim and these candidate blocks.
bool index_scores_support(const IndexProblem& p);
// Fills the scores and the histogram of the entries; groups of one token are selected from, too.
Status index_scores(const OpContext& ctx, const IndexSplit& s, DType act);
// Most tokens of a pass whose groups have one token, for lists of so many slots.
int64_t index_alone_tokens(const IndexProblem& p, int64_t slots);

// Whether index_split() takes these args: it needs a bound of the entries.
bool index_split_supports(const IndexSelectArgs& args);
Status index_split(OpContext& ctx, const IndexSelectArgs& args);

}  // namespace cachalot::ops::cuda
