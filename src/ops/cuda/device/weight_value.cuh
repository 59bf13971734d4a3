// Single weight elements, for kernels that do not use the tensor-core fragments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/num.cuh"
#include "ops/cuda/device/quantize.cuh"

namespace cachalot::ops::cuda {

enum class Storage : uint8_t { kF32, kBf16, kFp8Block, kFp4Row };

// Element [row, k] of a matrix with `in` columns.
template <Storage kStorage>
__device__ __forceinline__ float weight_value(
    const void* values, const uint8_t* scales, int64_t row, int64_t k, int64_t in) {
  if constexpr (kStorage == Storage::kF32) {
    return static_cast<const float*>(values)[row * in + k];
  } else if constexpr (kStorage == Storage::kBf16) {
    return to_float(static_cast<const Bf16*>(values)[row * in + k]);
  } else if constexpr (kStorage == Storage::kFp8Block) {
    return e4m3_value(static_cast<const uint8_t*>(values)[row * in + k]) *
           e8m0_value(scales[row / 32 * ((in + 31) / 32) + k / 32]);
  } else {
    const uint32_t byte = static_cast<const uint8_t*>(values)[row * (in / 2) + k / 2];
    return e2m1_value((byte >> (4 * (k % 2))) & 15u) *
           e8m0_value(scales[row * ((in + 31) / 32) + k / 32]);
  }
}

}  // namespace cachalot::ops::cuda
