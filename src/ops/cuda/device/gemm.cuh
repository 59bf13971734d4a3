// Input rows in memory as wgmma reads them, for blocks that multiply many tokens.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

constexpr int kGemmWarps = 8;  // of a block of linear_many.cu

// Input rows of a tile as wgmma reads them, their "image": chunk after chunk, four blocks of 64
// columns in wide order (wide_place()), each [rows][64] with the pieces of eight swizzled. Where an
// element of `row` lies; `place` is its column in wide order.
__host__ __device__ constexpr int64_t image_place(int64_t rows, int64_t row, int64_t place) {
  return (place / 64 * rows + row) * 64 + (place % 64 / 8 ^ row % 8) * 8 + place % 8;
}
// Rows of the image of a tile of `count` tokens.
__host__ __device__ constexpr int64_t image_rows(int64_t count) {
  return (count + kTokenTile - 1) / kTokenTile * kTokenTile;
}

}  // namespace cachalot::ops::cuda
