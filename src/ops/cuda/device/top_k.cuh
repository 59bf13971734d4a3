// Exact selection of the k largest of a stream of distinct 64-bit keys by one block.
//
// Keys above a threshold collect in a buffer in shared memory. When it fills up, a radix select
// finds the k-th largest, the others are dropped and the threshold rises. The outcome does not
// depend on the order of arrival. Buffers cannot overflow: a tile is pushed only if a whole tile
// fits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/reduce.cuh"

namespace cachalot::ops::cuda {

// Orders floats as unsigned integers; -0 equals +0.
__device__ __forceinline__ uint32_t ordered_bits(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
constexpr uint32_t kOrderedMinusInfinity = 0x007FFFFFu;
__device__ __forceinline__ float from_ordered_bits(uint32_t ordered) {
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered & 0x7FFFFFFFu : ~ordered);
}

// The larger score wins, then the lower id.
__device__ __forceinline__ uint64_t selection_key(uint32_t score, uint32_t id) {
  return static_cast<uint64_t>(score) << 32 | (0xFFFFFFFFu - id);
}
__device__ __forceinline__ uint32_t selection_id(uint64_t key) {
  return 0xFFFFFFFFu - static_cast<uint32_t>(key);
}

// Shared-memory variables of one TopK.
struct TopKState {
  int count;
  int found;           // digit of the radix pass
  int above;           // keys above that digit
  uint64_t threshold;  // keys must be larger
  int histogram[256];
};

struct TopK {
  uint64_t* buffer;  // shared [capacity]
  TopKState* state;  // shared
  int capacity;
  int k;

  // All threads; a barrier must follow before the first push.
  __device__ __forceinline__ void reset() const {
    if (threadIdx.x == 0) {
      state->count = 0;
      state->threshold = 0;
    }
  }
  // Any thread, between barriers; `valid` false pushes nothing.
  __device__ __forceinline__ void push(uint64_t key, bool valid) const {
    if (valid && key > state->threshold) {
      buffer[atomicAdd(&state->count, 1)] = key;
    }
  }
  // All threads, after a barrier: makes room for `tile` more keys.
  __device__ void make_room(int tile) const {
    const bool full = state->count + tile > capacity;
    __syncthreads();  // all must have looked before the next push
    if (full) {
      shrink();
    }
  }

  // All threads, after a barrier: leaves the k largest keys (or all, if there are fewer) in
  // buffer[0, count), in no particular order.
  __device__ void shrink() const {
    const int n = state->count;
    if (n <= k) {
      return;
    }
    uint64_t prefix = 0;  // the digits of the k-th largest key that are known
    int need = k, shift = 56;
    for (;; shift -= 8) {
      for (int i = threadIdx.x; i < 256; i += blockDim.x) {
        state->histogram[i] = 0;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const uint64_t key = buffer[i];
        if (shift == 56 || key >> (shift + 8) == prefix) {
          atomicAdd(&state->histogram[static_cast<int>(key >> shift) & 255], 1);
        }
      }
      __syncthreads();
      if (threadIdx.x < kWarp) {
        find_digit(need);
      }
      __syncthreads();
      need -= state->above;
      prefix = prefix << 8 | static_cast<uint64_t>(state->found);
      const bool exact = state->histogram[state->found] == need;
      __syncthreads();
      if (exact || shift == 0) {
        break;
      }
    }
    // Keep every key whose leading digits are at least the prefix: exactly k of them.
    keep(n, prefix << shift);
  }

 private:
  // One warp: the digit of the need-th largest key, and how many keys are above it.
  __device__ void find_digit(int need) const {
    const int lane = static_cast<int>(threadIdx.x);
    // Lane l has digits 255 - 8 l down to 248 - 8 l.
    int sum = 0;
    for (int i = 0; i < 8; ++i) {
      sum += state->histogram[255 - 8 * lane - i];
    }
    int before = sum;
    for (int step = 1; step < kWarp; step *= 2) {
      const int up = __shfl_up_sync(kAllLanes, before, step);
      before += lane >= step ? up : 0;
    }
    before -= sum;
    if (before < need && need <= before + sum) {
      int digit = 255 - 8 * lane;
      while (before + state->histogram[digit] < need) {
        before += state->histogram[digit--];
      }
      state->found = digit;
      state->above = before;
    }
  }

  __device__ void keep(int n, uint64_t least) const {
    if (threadIdx.x == 0) {
      state->count = 0;
    }
    // Writes never pass the tile being read, so the buffer can be compacted in place.
    for (int base = 0; base < n; base += static_cast<int>(blockDim.x)) {
      const int i = base + static_cast<int>(threadIdx.x);
      const uint64_t key = i < n ? buffer[i] : 0;
      __syncthreads();
      if (i < n && key >= least) {
        buffer[atomicAdd(&state->count, 1)] = key;
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      state->threshold = least - 1;
    }
    __syncthreads();
  }
};

__host__ __device__ constexpr int power_of_two(int n) {
  int size = 1;
  while (size < n) {
    size *= 2;
  }
  return size;
}

// Sorts n <= size unsigned values in shared memory in ascending order; size is a power of two and
// there are that many places. All threads.
template <class T>
__device__ void sort_ascending(T* values, int n, int size) {
  for (int i = n + static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
    values[i] = ~T{0};
  }
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int gap = run / 2; gap > 0; gap /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += static_cast<int>(blockDim.x)) {
        const int low = 2 * i - (i & (gap - 1)), high = low + gap;
        const bool ascending = (low & run) == 0;
        const T a = values[low], b = values[high];
        if ((a > b) == ascending) {
          values[low] = b;
          values[high] = a;
        }
      }
      // Pairs up to 32 apart stay within the 64 values of one warp; the next step's are gap / 2
      // apart, or `run` after 1.
      if (gap > kWarp || (gap == 1 && run > kWarp)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

}  // namespace cachalot::ops::cuda
