// The block quantizers of quant/block.h for registers: same scales, same codes, bit for bit.
//
// A block's amax is kept as the bits of |x|, so that NaN beats infinity beats every number. Scales
// that are powers of two divide exactly by multiplication with their reciprocal; the E4M3 scale of
// main rows needs a true division (a reciprocal moves exact ties).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/num.cuh"

namespace cachalot::ops::cuda {

constexpr uint32_t kInfinityBits = 0x7F800000u;

__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7FFFFFFFu;
}
__device__ __forceinline__ bool finite_bits(uint32_t bits) {
  return bits < kInfinityBits;
}

// 2^(byte - 127); byte 255 is NaN.
__device__ __forceinline__ float e8m0_value(uint32_t byte) {
  return byte == 255 ? __uint_as_float(0x7FC00000u)
                     : __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}
// 1 / e8m0_value(byte) for 1 <= byte <= 253.
__device__ __forceinline__ float e8m0_reciprocal(uint32_t byte) {
  return __uint_as_float((254u - byte) << 23);
}
// The byte of the smallest power of two >= t > 0.
__device__ __forceinline__ uint32_t e8m0_ceil(float t) {
  const uint32_t bits = __float_as_uint(t);
  const uint32_t byte = (bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u);
  return byte > 254u ? 254u : byte;
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  // The seven magnitude bits, placed at a float's exponent, are the value times 2^-120.
  const float v = __uint_as_float(((code & 0x80u) << 24) | ((code & 0x7Fu) << 20)) * 0x1.0p120f;
  return (code & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FC00000u) : v;
}
__device__ __forceinline__ float e2m1_value(uint32_t code) {
  // Likewise, three bits and 2^-126.
  return __uint_as_float(((code & 8u) << 28) | ((code & 7u) << 22)) * 0x1.0p126f;
}
__device__ __forceinline__ uint32_t e2m1_code(float x) {
  const float m = fabsf(x);
  // Thresholds between neighbouring codes; a tie goes to the even code.
  const uint32_t code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                        (m >= 3.5f) + (m > 5.0f);
  return code | (__float_as_uint(x) >> 31 << 3);
}
__device__ __forceinline__ float clamp_abs(float x, float limit) {
  return fminf(fmaxf(x, -limit), limit);
}

// Scale bytes from the amax bits of a block; 255 (E8M0) or 0x7F (E4M3) if it is not finite.
__device__ __forceinline__ uint32_t fp8_scale(uint32_t amax) {
  return finite_bits(amax)
             ? e8m0_ceil(__fmul_rn(fmaxf(__uint_as_float(amax), 1e-4f), 1.0f / 448.0f))
             : 255u;
}
__device__ __forceinline__ uint32_t fp4_index_scale(uint32_t amax) {
  return finite_bits(amax)
             ? e8m0_ceil(__fmul_rn(fmaxf(__uint_as_float(amax), 0x1.8p-124f), 1.0f / 6.0f))
             : 255u;
}
__device__ __forceinline__ uint32_t fp4_main_scale(uint32_t amax) {
  return finite_bits(amax)
             ? e4m3_pair(__fdiv_rn(fmaxf(__uint_as_float(amax), 0x1.8p-7f), 6.0f), 0.0f) & 0xFFu
             : 0x7Fu;
}

// Codes of elements of a block with the given scale byte; a NaN scale gives the codes of block.h.
__device__ __forceinline__ uint32_t fp8_code_pair(float a, float b, uint32_t scale) {
  if (scale == 255u) {
    return 0x7F7Fu;
  }
  const float inverse = e8m0_reciprocal(scale);
  return e4m3_pair(a * inverse, b * inverse);  // which saturates
}
__device__ __forceinline__ uint32_t fp4_index_code(float x, uint32_t scale) {
  return scale == 255u ? 0u : e2m1_code(clamp_abs(x * e8m0_reciprocal(scale), 6.0f));
}
__device__ __forceinline__ uint32_t fp4_main_code(float x, uint32_t scale) {
  return scale == 0x7Fu ? 0u : e2m1_code(clamp_abs(__fdiv_rn(x, e4m3_value(scale)), 6.0f));
}

// `x` after quantization to FP8 and back. The result is exact in BF16.
__device__ __forceinline__ void fp8_round_pair(float& a, float& b, uint32_t scale) {
  const uint32_t codes = fp8_code_pair(a, b, scale);
  const float s = e8m0_value(scale);
  a = e4m3_value(codes & 0xFFu) * s;
  b = e4m3_value(codes >> 8) * s;
}

}  // namespace cachalot::ops::cuda
