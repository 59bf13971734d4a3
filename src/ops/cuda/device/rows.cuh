// Cache rows: norm, rotation, and packing of one row held in shared memory by one block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/num.cuh"
#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/reduce.cuh"

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

// Bits of the largest magnitude of row[begin, end).
__device__ __forceinline__ uint32_t row_amax(const float* row, int64_t begin, int64_t end) {
  uint32_t amax = 0;
  for (int64_t i = begin; i < end; ++i) {
    amax = max(amax, magnitude_bits(row[i]));
  }
  return amax;
}

enum class RowFormat { kWindow, kMain, kIndex };

// Writes the cache row of `row` (n values in shared memory) in the layout of quant/block.h. One
// thread per scale block: rows are short, and their blocks many.
template <RowFormat kFormat>
__device__ void encode_row(const float* row, int64_t n, uint8_t* out) {
  constexpr int64_t kBlock = kFormat == RowFormat::kMain ? 16 : 32;
  uint8_t* scales = out + (kFormat == RowFormat::kWindow ? n : (n + 1) / 2);
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  for (int64_t b = threadIdx.x; b < blocks; b += blockDim.x) {
    const int64_t begin = b * kBlock, end = min(n, begin + kBlock);
    const uint32_t amax = row_amax(row, begin, end);
    const uint32_t scale = kFormat == RowFormat::kWindow ? fp8_scale(amax)
                           : kFormat == RowFormat::kMain ? fp4_main_scale(amax)
                                                         : fp4_index_scale(amax);
    scales[b] = static_cast<uint8_t>(scale);
    for (int64_t i = begin; i < end; i += 2) {
      const float low = row[i], high = i + 1 < end ? row[i + 1] : 0.0f;
      if constexpr (kFormat == RowFormat::kWindow) {
        const uint32_t codes = fp8_code_pair(low, high, scale);
        out[i] = static_cast<uint8_t>(codes);
        if (i + 1 < end) {
          out[i + 1] = static_cast<uint8_t>(codes >> 8);
        }
      } else if constexpr (kFormat == RowFormat::kMain) {
        out[i / 2] =
            static_cast<uint8_t>(fp4_main_code(low, scale) | fp4_main_code(high, scale) << 4);
      } else {
        out[i / 2] =
            static_cast<uint8_t>(fp4_index_code(low, scale) | fp4_index_code(high, scale) << 4);
      }
    }
  }
}

}  // namespace cachalot::ops::cuda
