// The k best of each row of logits and its masses, for the sampler on the host.
//
// in   logits [N, V] f32, temperature [N] f32
// out  value [N, k] f32 and id [N, k] i32, best first; mass [N, 2] f32
//
// scan   block = 4096 logits of a row, in registers: the maximum of every 32 of them, and of all
//        with the masses relative to it -> scratch
// rank   block = one row: a threshold that at least k of the maxima reach, and hardly more; so k
//        logits reach it, and all that do lie in the same groups of 32. These are read again (k of
//        4040 groups), the logits that reach it sorted, and the parts' masses put together.
//
// The threshold only bounds the work: what comes out are the k largest keys of (logit, id), in
// order. Where many groups reach it, as in rows of equal logits, device/top_k.cuh drops keys as it
// goes. Sums run over a block's threads, then over the parts, so they depend on V alone.
//
// Shared, of rank: V / 4 bytes of maxima and groups (32 KiB) and 8 (k + 12288) bytes of keys. Bound
// by 4 V bytes per row: 16.7 us for 128 rows of 129,280 at a copy rate of 3.96 TB/s; a few rows by
// the latency of the second kernel: rounds of counting, two reads, and the sort. Measured on one
// H200, 2026-11-30, medians in us, rows x k: 1 x 1 14.9, 1 x 256 15.9, 64 x 256 28.4, 128 x 1 37.9,
// 128 x 256 39.7, 128 x 1024 61.5. Reading 24 groups per warp at a time instead of 8, and placing
// up to 512 keys by counting instead of exchanging them, took 256 of one row from 22 to 16 us.
#include <cfloat>

#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/top_k.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kGroup = 32;  // logits of a maximum
constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / kWarp;
constexpr int kPerThread = 16;
constexpr int kPart = kScanThreads * kPerThread;
constexpr int kRankThreads = 512;
constexpr int kRankWarps = kRankThreads / kWarp;
constexpr int kAhead = 24;                           // groups that a warp reads at a time
constexpr int kTile = kRankWarps * kAhead * kGroup;  // logits that the block does
constexpr float kLog2E = 1.44269504f;

// What the scan leaves of a part of a row.
struct Part {
  float best;
  float mass[2];  // relative to it
};

struct Problem {
  const float* logits;
  const float* temperature;
  float* value;
  int32_t* id;
  float* mass;
  float* maxima;  // [N, groups]
  Part* parts;    // [N, parts]
  int64_t v;
  int groups;
  int parts_of_row;
  int k;
};

// Factors of exponents: at temperature 1, at the row's.
__device__ __forceinline__ float mass_scale(const Problem& p, int64_t row, int which) {
  // Finite, so that it leaves 0 what it is.
  return which == 0 ? kLog2E : fminf(kLog2E / p.temperature[row], FLT_MAX);
}

template <int kVector>
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ Problem p) {
  constexpr int kLoads = kPerThread / kVector;
  constexpr int kLanes = kGroup / kVector;  // of a group
  constexpr float kNone = -INFINITY;
  __shared__ float slots[2 * kScanWarps];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = blockIdx.x / p.parts_of_row, part = blockIdx.x % p.parts_of_row;
  const float* logits = p.logits + row * p.v + part * kPart;
  const int count = static_cast<int>(min(p.v - part * kPart, int64_t{kPart}));
  float x[kLoads][kVector];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int i = (j * kScanThreads + static_cast<int>(threadIdx.x)) * kVector;
    if constexpr (kVector == 4) {
      const float4 four = i < count ? *reinterpret_cast<const float4*>(logits + i)
                                    : make_float4(kNone, kNone, kNone, kNone);
      x[j][0] = four.x, x[j][1] = four.y, x[j][2] = four.z, x[j][3] = four.w;
    } else {
      x[j][0] = i < count ? logits[i] : kNone;
    }
  }
  float best = kNone;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    float most = kNone;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      x[j][e] = fmaxf(x[j][e], kNone);  // a NaN counts as -inf
      most = fmaxf(most, x[j][e]);
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
    }
    const int i = (j * kScanThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (threadIdx.x % kLanes == 0 && i < count) {
      p.maxima[row * p.groups + (part * kPart + i) / kGroup] = most;
    }
    best = fmaxf(best, most);
  }
  best = warp_max(best);
  if (threadIdx.x % kWarp == 0) {
    slots[threadIdx.x / kWarp] = best;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kScanWarps; ++w) {
    best = fmaxf(best, slots[w]);
  }
  float mass[2] = {0, 0};
  if (isfinite(best)) {
    const float scale = mass_scale(p, row, 1);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const float below = x[j][e] - best;
        mass[0] += exp2_flushed(below * kLog2E);
        mass[1] += exp2_flushed(below * scale);
      }
    }
  } else {
    for (int i = threadIdx.x; i < count; i += kScanThreads) {
      const float equal = fmaxf(logits[i], kNone) == best ? 1.0f : 0.0f;
      mass[0] += equal;
      mass[1] += equal;
    }
  }
  block_sum(mass, slots);
  if (threadIdx.x == 0) {
    p.parts[blockIdx.x] = {best, {mass[0], mass[1]}};
  }
}

// Of one row, in shared memory: how many maxima reach each of three thresholds.
struct Counts {
  int warps[2][3][kRankWarps];

  // All threads. Calls alternate between two sets of slots: whoever writes a set again has passed
  // the barrier behind its readers.
  __device__ void sum(int (&n)[3], int round) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    auto& slots = warps[round % 2];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      n[i] = __reduce_add_sync(kAllLanes, n[i]);
      if (lane == i) {
        slots[i][threadIdx.x / kWarp] = n[i];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      n[i] = __reduce_add_sync(kAllLanes, lane < kRankWarps ? slots[i][lane] : 0);
    }
  }
};

// A threshold that k of the maxima reach, and not many more where they differ; 0, which all logits
// reach, if there are not as many. All of them are in [low, high]. All threads.
__device__ uint32_t find_threshold(
    const uint32_t* maxima, int groups, int k, uint32_t low, uint32_t high, Counts& counts) {
  if (groups < k) {
    return 0;
  }
  const int enough = k + k / 4 + kWarp;
  // Two bits at a time, below those that all have in common.
  int shift = (kWarp - __clz(static_cast<int>(low ^ high)) + 1) / 2 * 2;
  uint32_t threshold = shift == kWarp ? 0u : high >> shift << shift;
  int reached = groups;
  for (int round = 0; shift > 0 && reached > enough; ++round) {
    shift -= 2;
    int n[3] = {};
    for (int g = threadIdx.x; g < groups; g += kRankThreads) {
      const uint32_t most = maxima[g];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        n[i] += most >= threshold + (static_cast<uint32_t>(i + 1) << shift) ? 1 : 0;
      }
    }
    counts.sum(n, round);
    const int digit = n[2] >= k ? 3 : n[1] >= k ? 2 : n[0] >= k ? 1 : 0;
    reached = digit == 0 ? reached : n[digit - 1];
    threshold += static_cast<uint32_t>(digit) << shift;
  }
  return threshold;
}

// Sorts n <= kRankThreads distinct positive keys, the largest first: runs of a warp each, then the
// place of a key from how many are larger in every run. All threads, after a barrier; there are
// places for whole runs.
__device__ void sort_few(uint64_t* keys, int n) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int own = thread / kWarp, runs = (n + kWarp - 1) / kWarp;
  uint64_t key = thread < n ? keys[thread] : 0;
  if (own < runs) {
#pragma unroll
    for (int run = 2; run <= kWarp; run *= 2) {
#pragma unroll
      for (int gap = run / 2; gap > 0; gap /= 2) {
        const uint64_t other = __shfl_xor_sync(kAllLanes, key, gap);
        const bool larger = ((lane & gap) == 0) == ((lane & run) == 0 || run == kWarp);
        key = larger == (other > key) ? other : key;
      }
    }
    keys[thread] = key;
  }
  __syncthreads();
  int place = lane;
  if (own < runs) {
#pragma unroll 4
    for (int r = 0; r < runs; ++r) {
      const uint64_t* run = keys + r * kWarp;
      int larger = 0;
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2) {
        larger += run[larger + step - 1] > key ? step : 0;
      }
      larger += run[larger] > key ? 1 : 0;
      place += r == own ? 0 : larger;
    }
  }
  __syncthreads();
  if (own < runs && key != 0) {
    keys[place] = key;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kRankThreads) rank_kernel(const __grid_constant__ Problem p) {
  __shared__ TopKState state;
  __shared__ Counts counts;
  __shared__ uint32_t extremes[2][kRankWarps];
  __shared__ int found;
  const TopK top{reinterpret_cast<uint64_t*>(dynamic_shared()), &state, p.k + kTile, p.k};
  auto* maxima = reinterpret_cast<uint32_t*>(top.buffer + top.capacity);  // [groups]
  auto* chosen = reinterpret_cast<int32_t*>(maxima + p.groups);           // [groups]
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = blockIdx.x;
  uint32_t low = 0xFFFFFFFFu, high = 0;
  for (int g = threadIdx.x; g < p.groups; g += kRankThreads) {
    maxima[g] = ordered_bits(p.maxima[row * p.groups + g]);
    low = min(low, maxima[g]);
    high = max(high, maxima[g]);
  }
  low = __reduce_min_sync(kAllLanes, low);
  high = __reduce_max_sync(kAllLanes, high);
  if (lane == 0) {
    extremes[0][warp] = low;
    extremes[1][warp] = high;
  }
  if (threadIdx.x == 0) {
    found = 0;
  }
  top.reset();
  __syncthreads();
  low = __reduce_min_sync(kAllLanes, extremes[0][lane % kRankWarps]);
  high = __reduce_max_sync(kAllLanes, extremes[1][lane % kRankWarps]);
  const uint32_t threshold = find_threshold(maxima, p.groups, p.k, low, high, counts);
  for (int g = threadIdx.x; g < p.groups; g += kRankThreads) {
    if (maxima[g] >= threshold) {
      chosen[atomicAdd(&found, 1)] = g;
    }
  }
  __syncthreads();

  const float* logits = p.logits + row * p.v;
  const int v = static_cast<int>(p.v);
  for (int base = warp; base - warp < found; base += kRankWarps * kAhead) {
    int at[kAhead];  // -1: nothing
    float x[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int g = base + a * kRankWarps;
      at[a] = g < found ? chosen[g] * kGroup + lane : -1;
      at[a] = at[a] < v ? at[a] : -1;
      x[a] = at[a] >= 0 ? logits[at[a]] : 0.0f;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const uint32_t score = ordered_bits(fmaxf(x[a], -INFINITY));
      top.push(selection_key(score, static_cast<uint32_t>(at[a])),
               at[a] >= 0 && score >= threshold);
    }
    __syncthreads();
    top.make_room(kTile);
  }
  const int most = power_of_two(max(2 * p.k, kWarp));
  if (state.count > most) {
    top.shrink();
  }
  const int n = state.count;
  if (n <= kRankThreads) {
    sort_few(top.buffer, n);
  } else {
    // Complements, so that ascending order puts the best first.
    for (int i = threadIdx.x; i < n; i += kRankThreads) {
      top.buffer[i] = ~top.buffer[i];
    }
    sort_ascending(top.buffer, n, power_of_two(n));
    for (int i = threadIdx.x; i < p.k; i += kRankThreads) {
      top.buffer[i] = ~top.buffer[i];
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < p.k; i += kRankThreads) {
    const bool exists = i < n;
    const uint64_t key = exists ? top.buffer[i] : uint64_t{kOrderedMinusInfinity} << 32;
    p.value[row * p.k + i] = from_ordered_bits(static_cast<uint32_t>(key >> 32));
    p.id[row * p.k + i] = exists ? static_cast<int32_t>(selection_id(key)) : -1;
  }
  // The last two warps have the least of these.
  const int which = warp - (kRankWarps - 2);
  if (which >= 0) {
    const float best = from_ordered_bits(high);
    const float scale = mass_scale(p, row, which);
    float sum = 0;
    for (int i = lane; i < p.parts_of_row; i += kWarp) {
      const Part part = p.parts[row * p.parts_of_row + i];
      const float rescale = part.best == best ? 1.0f : exp2_flushed((part.best - best) * scale);
      sum = fmaf(which == 0 ? part.mass[0] : part.mass[1], rescale, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      p.mass[2 * row + which] = sum;
    }
  }
}

int64_t rank_bytes(int64_t groups, int64_t k) {
  return 8 * (k + kTile) + 8 * groups;
}

}  // namespace

bool top_logits_supports(const TopLogitsArgs& args) {
  constexpr int64_t kStatic = 4096;
  return rank_bytes(ceil_div(args.logits.dim(1), kGroup), args.value.dim(1)) <=
         kSharedCapacity - kStatic;
}

Status top_logits(OpContext& ctx, const TopLogitsArgs& args) {
  const int64_t n = args.logits.dim(0), v = args.logits.dim(1), k = args.value.dim(1);
  const int64_t groups = ceil_div(v, kGroup), parts = ceil_div(v, kPart);
  Scratch scratch(ctx);
  const Problem problem{.logits = args.logits.as<float>(),
                        .temperature = args.temperature.as<float>(),
                        .value = args.value.as<float>(),
                        .id = args.id.as<int32_t>(),
                        .mass = args.mass.as<float>(),
                        .maxima = scratch.array<float>(n * groups),
                        .parts = scratch.array<Part>(n * parts),
                        .v = v,
                        .groups = static_cast<int>(groups),
                        .parts_of_row = static_cast<int>(parts),
                        .k = static_cast<int>(k)};
  CACHALOT_RETURN_IF_ERROR(scratch.status("top_logits"));
  const bool vector = v % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits.data) % 16 == 0;
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "top_logits_scan",
                                  vector ? scan_kernel<4> : scan_kernel<1>,
                                  extent(n * parts),
                                  kScanThreads,
                                  0,
                                  problem));
  return launch(
      ctx, "top_logits_rank", rank_kernel, extent(n), kRankThreads, rank_bytes(groups, k), problem);
}

}  // namespace cachalot::ops::cuda
