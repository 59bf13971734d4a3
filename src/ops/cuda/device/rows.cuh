// Cache rows: norm, rotation, and packing of one row held in shared memory by one block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/num.cuh"
#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/warpgroup.cuh"

namespace cachalot::ops::cuda {

// (a, b) turned by the angle with the given cosine and sine.
__device__ __forceinline__ float2 rotate_pair(float a, float b, float c, float s) {
  return make_float2(fmaf(a, c, -(b * s)), fmaf(a, s, b * c));
}

// The factor of RMSNorm from a sum of squares.
__device__ __forceinline__ float rms_factor(float square_sum, int64_t n, float eps) {
  return static_cast<float>(1.0 /
                            sqrt(static_cast<double>(square_sum) / static_cast<double>(n) + eps));
}

// Brings the weight of a norm of n values from memory to L2. All threads of the block call it,
// before they wait for previous kernels.
__device__ __forceinline__ void prefetch_norm(const Param& weight, int64_t n) {
  constexpr int64_t kLine = 128;
  const int64_t bytes = n * (weight.is_bf16 ? 2 : 4);
  for (int64_t i = threadIdx.x * kLine; i < bytes; i += blockDim.x * kLine) {
    prefetch_to_l2(static_cast<const uint8_t*>(weight.data) + i);
  }
}

// row[i] = norm(x)[i], rounded to T. `slots` as for block_sum(). All threads must call it.
template <class T>
__device__ void norm_row(
    const T* x, int64_t n, const Param& weight, float eps, float* row, float* slots) {
  float square = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const float v = to_float(x[i]);
    square = fmaf(v, v, square);
  }
  const float factor = rms_factor(block_sum(square, slots), n, eps);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    row[i] = rounded<T>(to_float(x[i]) * factor * weight[i]);
  }
  __syncthreads();
}

// Rotates the last 2 * half values of `row` in place and rounds them to T.
template <class T>
__device__ void rotate_row(float* row, int64_t n, const float* cos_sin, int64_t half) {
  float* tail = row + n - 2 * half;
  for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
    const float2 v = rotate_pair(tail[2 * i], tail[2 * i + 1], cos_sin[2 * i], cos_sin[2 * i + 1]);
    tail[2 * i] = rounded<T>(v.x);
    tail[2 * i + 1] = rounded<T>(v.y);
  }
  __syncthreads();
}

enum class RowFormat { kWindow, kMain, kIndex };

// Writes the cache row of `row` (n values in shared memory) in the layout of quant/block.h. A warp
// takes 32 values at a time, lane by lane; all warps of the block call it.
template <RowFormat kFormat>
__device__ void encode_row(const float* row, int64_t n, uint8_t* out) {
  constexpr int kBlock = kFormat == RowFormat::kMain ? 16 : 32;
  uint8_t* scales = out + (kFormat == RowFormat::kWindow ? n : (n + 1) / 2);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t first = threadIdx.x / kWarp * kWarp; first < n; first += blockDim.x) {
    const int64_t i = first + lane;
    const float v = i < n ? row[i] : 0.0f;
    uint32_t amax = magnitude_bits(v);
#pragma unroll
    for (int step = 1; step < kBlock; step *= 2) {
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, step));
    }
    const uint32_t scale = kFormat == RowFormat::kWindow ? fp8_scale(amax)
                           : kFormat == RowFormat::kMain ? fp4_main_scale(amax)
                                                         : fp4_index_scale(amax);
    if (lane % kBlock == 0 && i < n) {
      scales[i / kBlock] = static_cast<uint8_t>(scale);
    }
    if constexpr (kFormat == RowFormat::kWindow) {
      if (i < n) {
        out[i] = static_cast<uint8_t>(fp8_code_pair(v, 0.0f, scale));
      }
    } else {
      const uint32_t code =
          kFormat == RowFormat::kMain ? fp4_main_code(v, scale) : fp4_index_code(v, scale);
      const uint32_t next = __shfl_down_sync(kAllLanes, code, 1);
      if (lane % 2 == 0 && i < n) {
        out[i / 2] = static_cast<uint8_t>(code | next << 4);
      }
    }
  }
}

}  // namespace cachalot::ops::cuda
