// Block-wide reductions whose order depends on the block size alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cachalot::ops::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(kAllLanes, v, offset);
  }
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, offset));
  }
  return v;
}

// Sums of kCount values over all threads of a one-dimensional block of whole warps; every thread
// gets the result. `slots` is shared memory for kCount floats per warp; the first barrier inside
// protects its earlier use.
template <int kCount>
__device__ __forceinline__ void block_sum(float (&v)[kCount], float* slots) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = warp_sum(v[i]);
  }
  __syncthreads();
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      slots[warp * kCount + i] = v[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float sum = slots[i];
    for (int w = 1; w < warps; ++w) {
      sum += slots[w * kCount + i];
    }
    v[i] = sum;
  }
}
__device__ __forceinline__ float block_sum(float v, float* slots) {
  float values[1] = {v};
  block_sum(values, slots);
  return values[0];
}

}  // namespace cachalot::ops::cuda
