// Selection from scores in scratch by blocks of kThreads threads: the bin of the k-th largest
// score, the slots that reach it, and the best of those.
#pragma once

#include <algorithm>

#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {

constexpr int kFinishRoom = 4096;
constexpr int kLastRoom = 256;      // candidates that are ranked by comparing all
constexpr int kMostIdWords = 4096;  // of bits of ids

// Four counts of 32 bits in memory that other blocks have added to, from bin `first` on.
struct GlobalCounts {
  const int* histogram;
  __device__ __forceinline__ int4 four(int first) const {
    return __ldcg(reinterpret_cast<const int4*>(histogram + first));
  }
};
// Counts of 32 bits in shared memory.
struct WordCounts {
  const int* counts;
  __device__ __forceinline__ int4 four(int first) const {
    return *reinterpret_cast<const int4*>(counts + first);
  }
};
// Two counts of 16 bits in a word of shared memory.
struct SharedCounts {
  const uint32_t* counts;
  __device__ __forceinline__ int4 four(int first) const {
    const uint2 v = *reinterpret_cast<const uint2*>(counts + first / 2);
    return make_int4(static_cast<int>(v.x & 0xFFFFu),
                     static_cast<int>(v.x >> 16),
                     static_cast<int>(v.y & 0xFFFFu),
                     static_cast<int>(v.y >> 16));
  }
};

// The bin of the k-th largest score, or 0 if there are no more than k. All threads; `slots` has a
// place per warp and one more.
template <int kThreads, class Counts>
__device__ int threshold_bin(const Counts& histogram, int k, int* slots) {
  // Thread i has bins kBins - 1 - kPerThread i and down.
  constexpr int kCounting = 256, kPerThread = kBins / kCounting;
  static_assert(kThreads >= kCounting);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const bool counting = thread < kCounting;
  int sum = 0;
  int counts[kPerThread] = {};
#pragma unroll
  for (int i = 0; i < kPerThread; i += 4) {
    if (counting) {
      const int4 four = histogram.four(kBins - kPerThread * thread - i - 4);
      counts[i] = four.w;
      counts[i + 1] = four.z;
      counts[i + 2] = four.y;
      counts[i + 3] = four.x;
      sum += four.x + four.y + four.z + four.w;
    }
  }
  int before = sum;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int up = __shfl_up_sync(kAllLanes, before, step);
    before += lane >= step ? up : 0;
  }
  constexpr int kWarps = kThreads / kWarp;
  if (thread == 0) {
    slots[kWarps] = 0;
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
        slots[kWarps] = kBins - 1 - kPerThread * thread - i;
      }
      before += counts[i];
    }
  }
  __syncthreads();
  const int bin = slots[kWarps];
  __syncthreads();  // all have read before `slots` serves again
  return bin;
}

// Slots [begin, end) of a token's list: those above `bin` are found, those in it are ties.
// each_four(scores, their maximum, slot) sees all of them, four at a time.
template <int kThreads, class EachFour>
__device__ void collect_slots(
    const IndexList& list, int64_t token, int bin, int begin, int end, EachFour&& each_four) {
  constexpr int kStep = 4 * kThreads;  // scores that a block looks at together
  constexpr int kLoads = 4;            // such steps under way
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
  for (int base = begin; base < end; base += kLoads * kStep) {
    const int first = base + 4 * static_cast<int>(threadIdx.x);
    uint4 four[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int slot = first + j * kStep;
      four[j] = slot < end ? scores[slot / 4] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint4& v = four[j];
      const int slot = first + j * kStep;
      const uint32_t best = max(max(v.x, v.y), max(v.z, v.w));
      each_four(v, best, slot);
      if (best >= least) {
        take(v.x, slot);
        take(v.y, slot + 1);
        take(v.z, slot + 2);
        take(v.w, slot + 3);
      }
    }
  }
}

// Ids in shared memory: a bit each if there are few to choose from, else a list that is sorted.
template <int kThreads>
struct ChosenIds {
  static constexpr int kWarps = kThreads / kWarp;

  uint32_t* memory;  // [at least kMostIdWords, power of two >= ids]
  int words;         // of bits

  __device__ __forceinline__ bool is_set() const { return words <= kMostIdWords; }
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
  // a place per warp.
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
    for (int w = 0; w < kWarps; ++w) {
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

// The list of a token that has no more than k.
template <int kThreads>
__device__ void write_all_slots(const IndexSplit& s,
                                int64_t token,
                                bool of_blocks,
                                const IndexExtent& e) {
  const IndexList& list = of_blocks ? s.blocks : s.entries;
  const int n = of_blocks ? e.blocks : e.visible;
  for (int i = threadIdx.x; i < list.k; i += kThreads) {
    list.out[token * list.k + i] = i < n ? i : -1;
  }
}

// The k best of what was collected of a token's list, ids ascending, -1 behind. All threads;
// `memory` has finish_bytes(k), `slots` a place per warp and one more.
template <int kThreads>
__device__ void finish_list(const IndexSplit& s,
                            int64_t token,
                            bool of_blocks,
                            const IndexExtent& e,
                            uint8_t* memory,
                            TopKState* state,
                            int* slots) {
  const IndexList& list = of_blocks ? s.blocks : s.entries;
  int32_t* out = list.out + token * list.k;
  const int found = __ldcg(&list.counters[2 * token]), ties = __ldcg(&list.counters[2 * token + 1]);
  const int need = min(list.k - found, ties);
  const int32_t* tied = list.ties + token * list.bound;
  const uint32_t* scores = list.scores + token * list.bound;
  // Counts of the ties by further leading bits, then of them the keys of one bin; beside it the
  // keys of all ties, if they fit.
  auto* counts = reinterpret_cast<int*>(memory);
  auto* last = reinterpret_cast<uint64_t*>(memory);
  auto* keys = last + kBins / 2;
  const bool kept = ties <= list.k + kFinishRoom - kBins / 2;
  const ChosenIds<kThreads> ids{reinterpret_cast<uint32_t*>(memory + 8 * (list.k + kFinishRoom)),
                                ((of_blocks ? e.blocks : e.visible) + 31) / 32};
  const auto key_of = [&](int i) {
    // The leading bits of all ties are the same.
    const int slot = __ldcg(&tied[i]);
    return selection_key(__ldcg(&scores[slot]) << kBinBits, static_cast<uint32_t>(slot));
  };
  const auto bin_of = [](uint64_t key) { return static_cast<int>(key >> (64 - kBinBits)); };
  const auto choose = [&](int place, int slot) {
    ids.insert(place, static_cast<uint32_t>(list_id(s, token, of_blocks, slot)));
  };
  ids.clear();
  for (int i = threadIdx.x; i < kBins / 4; i += kThreads) {
    reinterpret_cast<int4*>(counts)[i] = make_int4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    state->above = 0;
    state->count = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < found; i += kThreads) {
    choose(i, __ldcg(&list.found[token * list.k + i]));
  }
  if (need > 0) {
    for (int i = threadIdx.x; i < ties; i += kThreads) {
      const uint64_t key = key_of(i);
      atomicAdd(&counts[bin_of(key)], 1);
      if (kept) {
        keys[i] = key;
      }
    }
    __syncthreads();
    const int bin = threshold_bin<kThreads>(WordCounts{counts}, need, slots);
    for (int i = threadIdx.x; i < ties; i += kThreads) {
      const uint64_t key = kept ? keys[i] : key_of(i);
      if (bin_of(key) > bin) {
        choose(found + atomicAdd(&state->above, 1), static_cast<int>(selection_id(key)));
      } else if (bin_of(key) == bin) {
        const int place = atomicAdd(&state->count, 1);
        if (place < kLastRoom) {
          last[place] = key;
        }
      }
    }
    __syncthreads();
    const int above = state->above, count = state->count, missing = need - above;
    if (count <= kLastRoom) {
      for (int i = threadIdx.x; i < count; i += kThreads) {
        int rank = 0;
        for (int j = 0; j < count; ++j) {
          rank += last[j] > last[i] ? 1 : 0;
        }
        if (rank < missing) {
          choose(found + above + rank, static_cast<int>(selection_id(last[i])));
        }
      }
    } else {
      constexpr int kRound = 4 * kThreads;  // candidates between two looks at the buffer
      static_assert(kRound <= kFinishRoom);
      const TopK best{last, state, missing + kFinishRoom, missing};
      __syncthreads();
      best.reset();
      __syncthreads();
      for (int begin = 0; begin < ties; begin += kRound) {
        for (int i = begin + static_cast<int>(threadIdx.x); i < min(begin + kRound, ties);
             i += kThreads) {
          const uint64_t key = key_of(i);
          best.push(key, bin_of(key) == bin);
        }
        __syncthreads();
        best.make_room(kRound);
      }
      best.shrink();
      for (int i = threadIdx.x; i < missing; i += kThreads) {
        choose(found + above + i, static_cast<int>(selection_id(best.buffer[i])));
      }
    }
  }
  __syncthreads();
  ids.write(found + need, out, list.k, slots);
}
constexpr int64_t finish_bytes(int k) {
  return 8 * (k + int64_t{kFinishRoom}) + 4 * std::max(power_of_two(k), kMostIdWords);
}

}  // namespace cachalot::ops::cuda
