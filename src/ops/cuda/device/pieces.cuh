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

// Largest magnitude bits of a block of 32 columns, of which each of four threads has eight.
__device__ __forceinline__ uint32_t block_magnitude(const float (&v)[8]) {
  uint32_t amax = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    amax = max(amax, magnitude_bits(v[e]));
  }
  amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  return max(amax, __shfl_xor_sync(kAllLanes, amax, 2));
}

// Eight columns of a row; the four threads of a block of 32 agree on its scale.
__device__ __forceinline__ void quantize_piece(float (&v)[8]) {
  const uint32_t scale = fp8_scale(block_magnitude(v));
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    fp8_round_pair(v[e], v[e + 1], scale);
  }
}

// Eight columns of a row as BF16 pairs in the order of a layout.
template <InputLayout kLayout>
__device__ __forceinline__ void order_piece(const float (&v)[8], uint32_t (&pairs)[4]) {
  float ordered[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    ordered[layout_slot(kLayout, e)] = v[e];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = bf16_pair(ordered[2 * i], ordered[2 * i + 1]);
  }
}

// The same of quantize_piece()'s result, without floats on the way: the codes' bits placed in BF16
// are the values times 2^-120 (device/weights.cuh), and both products are exact.
template <InputLayout kLayout>
__device__ __forceinline__ void quantize_and_order_piece(const float (&v)[8],
                                                         uint32_t (&pairs)[4]) {
  constexpr uint32_t kPlaced = 0x7B807B80u;  // 2^120
  const uint32_t scale = fp8_scale(block_magnitude(v));
  const uint32_t factor = (scale == 255u ? 0x7FC0u : scale << 7) * 0x10001u;
  float ordered[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    ordered[layout_slot(kLayout, e)] = v[e];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t codes = fp8_code_pair(ordered[2 * i], ordered[2 * i + 1], scale);
    const uint32_t placed = Fp8Weights<false>::odd(pick_bytes(codes, 0, 0x1404));
    pairs[i] = mul_bf16x2(mul_bf16x2(placed, kPlaced), factor);
  }
}

// Stores the ordered pairs of piece i (of the whole matrix) in a layout.
template <InputLayout kLayout>
__device__ __forceinline__ void store_pairs(Bf16* out, int64_t i, const uint32_t (&pairs)[4]) {
  *reinterpret_cast<uint4*>(out + i / 32 * kChunk +
                            layout_piece(kLayout, static_cast<int>(i % 32)) * 8) =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
// Stores piece i (of the whole matrix) in a layout.
template <InputLayout kLayout>
__device__ __forceinline__ void store_piece(Bf16* out, int64_t i, const float (&v)[8]) {
  uint32_t pairs[4];
  order_piece<kLayout>(v, pairs);
  store_pairs<kLayout>(out, i, pairs);
}

// Stores the ordered pairs of chunk `chunk` of row `row` in the image of a tile of `rows` rows
// (device/gemm.cuh), by a whole warp: lane l has columns 8 l .. 8 l + 7 of the chunk. The four
// lanes whose columns share 16-byte pieces of the image exchange pairs, so that each stores one of
// them.
template <InputLayout kLayout>
__device__ __forceinline__ void store_image_pairs(
    Bf16* image, int64_t rows, int64_t row, int64_t chunk, uint32_t (&pairs)[4]) {
  constexpr int kApart = kLayout == InputLayout::kFp8 ? 2 : kLayout == InputLayout::kFp4 ? 4 : 1;
  static_assert(layout_piece(kLayout, kApart) == 1 && layout_piece(kLayout, 2 * kApart) == 2);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // Pair i of lane t goes to pair t of lane i.
  const auto exchange = [&](int apart, uint32_t& low, uint32_t& high) {
    const bool upper = (lane & apart) != 0;
    const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? low : high, apart);
    low = upper ? other : low;
    high = upper ? high : other;
  };
  exchange(kApart, pairs[0], pairs[1]);
  exchange(kApart, pairs[2], pairs[3]);
  exchange(2 * kApart, pairs[0], pairs[2]);
  exchange(2 * kApart, pairs[1], pairs[3]);
  const int piece = layout_piece(kLayout, lane);
  const int64_t place = chunk * kChunk + piece / 4 * 32 + piece % 4 * 8;
  *reinterpret_cast<uint4*>(image + image_place(rows, row, place)) =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The same for piece i of the row; a warp has the pieces of a chunk.
template <InputLayout kLayout>
__device__ __forceinline__ void store_image(
    Bf16* image, int64_t rows, int64_t row, int64_t i, const float (&v)[8]) {
  uint32_t pairs[4];
  order_piece<kLayout>(v, pairs);
  store_image_pairs<kLayout>(image, rows, row, i / 32, pairs);
}

}  // namespace cachalot::ops::cuda
