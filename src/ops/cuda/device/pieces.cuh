// Input rows in pieces of eight columns: quantization, and the column order of the weight
// fragments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

// Eight columns of a row; the four threads of a block of 32 agree on its scale.
__device__ __forceinline__ void quantize_piece(float (&v)[8]) {
  uint32_t amax = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    amax = max(amax, magnitude_bits(v[e]));
  }
  amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 2));
  const uint32_t scale = fp8_scale(amax);
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    fp8_round_pair(v[e], v[e + 1], scale);
  }
}

// Stores piece i (of the whole matrix) in a layout.
template <InputLayout kLayout>
__device__ __forceinline__ void store_piece(Bf16* out, int64_t i, const float (&v)[8]) {
  float ordered[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    ordered[layout_slot(kLayout, e)] = v[e];
  }
  store_elements<8>(out + i / 32 * kChunk + layout_piece(kLayout, static_cast<int>(i % 32)) * 8,
                    ordered);
}

// Stores piece i of row `row` in the image of a tile of `rows` rows (device/gemm.cuh).
template <InputLayout kLayout>
__device__ __forceinline__ void store_image(
    Bf16* image, int64_t rows, int64_t row, int64_t i, const float (&v)[8]) {
  float ordered[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    ordered[layout_slot(kLayout, e)] = v[e];
  }
  const int piece = layout_piece(kLayout, static_cast<int>(i % 32));
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int64_t place = i / 32 * kChunk + wide_place(piece * 8 + e);
    *reinterpret_cast<uint32_t*>(image + image_place(rows, row, place)) =
        bf16_pair(ordered[e], ordered[e + 1]);
  }
}

}  // namespace cachalot::ops::cuda
