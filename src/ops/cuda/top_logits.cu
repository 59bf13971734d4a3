// The k best of each row of logits and its masses, for the sampler on the host.
//
// in   logits [N, V] f32, temperature [N] f32
// out  value [N, k] f32 and id [N, k] i32, best first; mass [N, 2] f32
//
// One cluster of 8 blocks per row, one pass over device memory: a block holds an eighth of the row
// in shared memory. The k-th largest of the 4096 threads' maxima has k logits at or above it, and
// for logits in no particular order hardly more; these few go to the first block, which sorts them.
// Where ties or order make them too many, the threshold is raised bit by bit until they fit: slow
// (about 1 us a bit), exact, and met by rows of equal logits only. Everything counts and compares
// keys of (logit, id), so the outcome does not depend on the order of arrival; sums run over a
// block's threads, then over the blocks, so they depend on V alone.
//
// Shared: V / 2 bytes of logits (64.6 KB) and 18 KiB; two blocks run on an SM. Bound by 4 V bytes
// per row: 0.12 us, 15 us for 128 rows of 129,280 at 4.3 TB/s; a single row by its three cluster
// barriers, about 20 counting rounds and the sort. Not measured yet.
#include <cooperative_groups.h>

#include <limits>

#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/top_k.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8;  // of a row
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRoom = 2048;  // keys that the first block can sort
static_assert(kRoom >= kMostTopLogits && kBlocks * kThreads >= kMostTopLogits);
constexpr float kLog2E = 1.44269504f;

struct Problem {
  const float* logits;
  const float* temperature;
  float* value;
  int32_t* id;
  float* mass;
  int64_t v;
  int chunk;  // logits of a block, a multiple of 4
  int k;
};

// Sums of integers over the block, and over the cluster. Two sets of slots in turn let one barrier
// do per sum: whoever writes a set again has passed the barrier behind its readers.
struct Counter {
  int warps[2][kWarps];
  int blocks[2];

  // All threads of the block; `round` counts the calls of both functions.
  __device__ int of_block(int n, int round) {
    int* slots = warps[round % 2];
    n = __reduce_add_sync(kAllLanes, n);
    if (threadIdx.x % kWarp == 0) {
      slots[threadIdx.x / kWarp] = n;
    }
    __syncthreads();
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += slots[w];
    }
    return sum;
  }
  // All threads of the cluster: the sum, and that of the blocks before this one.
  struct Sums {
    int all;
    int before;
  };
  __device__ Sums of_cluster(int n, int round) {
    const cg::cluster_group cluster = cg::this_cluster();
    n = of_block(n, round);
    if (threadIdx.x == 0) {
      blocks[round % 2] = n;
    }
    cluster.sync();
    Sums sums{0, 0};
    const int rank = static_cast<int>(cluster.block_rank());
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int count = *cluster.map_shared_rank(&blocks[round % 2], b);
      sums.before += b < rank ? count : 0;
      sums.all += count;
    }
    return sums;
  }
};

__device__ __forceinline__ float canonical(float logit) {
  return logit == logit ? logit + 0.0f : __uint_as_float(0xFF800000u);
}

// Loads `count` logits; returns the largest of this thread's as ordered bits, 0 if it has none.
template <int kVector>
__device__ __forceinline__ uint32_t load_chunk(const float* logits, int count, float* values) {
  constexpr int kAhead = 8;
  uint32_t most = 0;
  for (int base = static_cast<int>(threadIdx.x) * kVector; base < count;
       base += kAhead * kThreads * kVector) {
    float v[kAhead][kVector];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = base + j * kThreads * kVector;
      if (i < count) {
        if constexpr (kVector == 4) {
          const float4 four = __ldcs(reinterpret_cast<const float4*>(logits + i));
          v[j][0] = four.x, v[j][1] = four.y, v[j][2] = four.z, v[j][3] = four.w;
        } else {
          v[j][0] = __ldcs(logits + i);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = base + j * kThreads * kVector;
      if (i < count) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          v[j][e] = canonical(v[j][e]);
          most = max(most, ordered_bits(v[j][e]));
        }
        if constexpr (kVector == 4) {
          *reinterpret_cast<float4*>(values + i) = make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
        } else {
          values[i] = v[j][0];
        }
      }
    }
  }
  return most;
}

template <int kVector>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 2)
    top_logits_kernel(const __grid_constant__ Problem p) {
  __shared__ uint32_t maxima[kThreads];
  __shared__ float slots[2 * kWarps];
  __shared__ float masses[kBlocks][2];  // of the first block: what all blocks found
  __shared__ Counter counter;
  __shared__ int cursor;
  auto* keys = reinterpret_cast<uint64_t*>(dynamic_shared());  // [kRoom]
  auto* values = reinterpret_cast<float*>(keys + kRoom);       // [chunk]
  allow_next_kernel();
  wait_for_previous_kernels();
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int64_t row = blockIdx.x / kBlocks, begin = int64_t{rank} * p.chunk;
  const int count = static_cast<int>(max(min(p.v - begin, int64_t{p.chunk}), int64_t{0}));
  if (threadIdx.x == 0) {
    cursor = 0;
  }
  maxima[threadIdx.x] = load_chunk<kVector>(p.logits + row * p.v + begin, count, values);
  cluster.sync();

  // The k-th largest maximum of a thread, or 0 if fewer threads have one. Every block finds it for
  // itself: thread t looks at thread t of every block.
  uint32_t most[kBlocks];
  uint32_t best = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    most[b] = cluster.map_shared_rank(maxima, b)[threadIdx.x];
    best = max(best, most[b]);
  }
  int round = 0;
  uint32_t threshold = 0;
  int reached = kBlocks * kThreads;
  for (int bit = 31; bit >= 0 && reached > p.k; --bit) {
    const uint32_t next = threshold | 1u << bit;
    int n = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      n += most[b] >= next ? 1 : 0;
    }
    n = counter.of_block(n, round++);
    if (n >= p.k) {
      threshold = next;
      reached = n;
    }
  }

  // The row's best logit, then the masses of this block's part.
  best = __reduce_max_sync(kAllLanes, best);
  if (threadIdx.x % kWarp == 0) {
    slots[threadIdx.x / kWarp] = __uint_as_float(best);
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    best = max(best, __float_as_uint(slots[w]));
  }
  const float best_logit = from_ordered_bits(best);
  const float scale = kLog2E / p.temperature[row];
  float mass[2] = {0, 0};
  int above = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float logit = values[i];
    const float below = logit - best_logit;
    mass[0] += logit == best_logit ? 1.0f : exp2f(below * kLog2E);
    mass[1] += logit == best_logit ? 1.0f : exp2f(below * scale);
    above += ordered_bits(logit) >= threshold ? 1 : 0;
  }
  block_sum(mass, slots);
  if (threadIdx.x == 0) {
    float* found = cluster.map_shared_rank(&masses[0][0], 0) + 2 * rank;
    found[0] = mass[0];
    found[1] = mass[1];
  }

  // The smallest key that goes to the first block.
  uint64_t least = static_cast<uint64_t>(threshold) << 32;
  Counter::Sums chosen = counter.of_cluster(above, round++);
  const auto key_of = [&](int i) {
    return selection_key(ordered_bits(values[i]), static_cast<uint32_t>(begin + i));
  };
  if (chosen.all > kRoom) {
    least = 0;
    for (int bit = 63; bit >= 0 && chosen.all > kRoom; --bit) {
      const uint64_t next = least | uint64_t{1} << bit;
      int n = 0;
      for (int i = threadIdx.x; i < count; i += kThreads) {
        n += key_of(i) >= next ? 1 : 0;
      }
      const Counter::Sums sums = counter.of_cluster(n, round++);
      if (sums.all >= p.k) {
        least = next;
        chosen = sums;
      }
    }
  }
  uint64_t* target = cluster.map_shared_rank(keys, 0);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t key = key_of(i);
    if (key >= least) {
      // Complements, so that ascending order puts the best first.
      target[chosen.before + atomicAdd(&cursor, 1)] = ~key;
    }
  }
  cluster.sync();
  if (rank != 0) {
    return;
  }
  sort_ascending(keys, chosen.all, power_of_two(max(chosen.all, 1)));
  for (int i = threadIdx.x; i < p.k; i += kThreads) {
    const bool exists = i < chosen.all;
    const uint64_t key = exists ? ~keys[i] : uint64_t{kOrderedMinusInfinity} << 32;
    p.value[row * p.k + i] = from_ordered_bits(static_cast<uint32_t>(key >> 32));
    p.id[row * p.k + i] = exists ? static_cast<int32_t>(selection_id(key)) : -1;
  }
  if (threadIdx.x < 2) {
    float sum = 0;
    for (int b = 0; b < kBlocks; ++b) {
      sum += masses[b][threadIdx.x];
    }
    p.mass[2 * row + threadIdx.x] = sum;
  }
}

int64_t chunk_of(int64_t v) {
  return ceil_div(v, kBlocks * 4) * 4;
}

int64_t shared_bytes(int64_t v) {
  return kRoom * static_cast<int64_t>(sizeof(uint64_t)) + 4 * chunk_of(v);
}

}  // namespace

bool top_logits_supports(const TopLogitsArgs& args) {
  constexpr int64_t kStatic = 4096;
  return shared_bytes(args.logits.dim(1)) <= kSharedCapacity - kStatic;
}

Status top_logits(OpContext& ctx, const TopLogitsArgs& args) {
  const int64_t n = args.logits.dim(0), v = args.logits.dim(1);
  const bool vector = v % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits.data) % 16 == 0;
  return launch(ctx,
                "top_logits",
                vector ? top_logits_kernel<4> : top_logits_kernel<1>,
                extent(n * kBlocks),
                kThreads,
                shared_bytes(v),
                Problem{.logits = args.logits.as<float>(),
                        .temperature = args.temperature.as<float>(),
                        .value = args.value.as<float>(),
                        .id = args.id.as<int32_t>(),
                        .mass = args.mass.as<float>(),
                        .v = v,
                        .chunk = static_cast<int>(chunk_of(v)),
                        .k = static_cast<int>(args.value.dim(1))});
}

}  // namespace cachalot::ops::cuda
