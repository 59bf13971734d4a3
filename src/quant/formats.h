// The scalar formats of the checkpoint and the caches, exactly.
//
// E4M3 (OCP "fn"): sign, 4 exponent bits (bias 7), 3 mantissa bits; max 448; NaN = 0x7F and 0xFF.
// E2M1: codes 0..7 = {0, .5, 1, 1.5, 2, 3, 4, 6}, bit 3 = sign.
// E8M0: byte b stands for 2^(b - 127); 255 is NaN.
// Encoding rounds to nearest, ties to even, saturates, and keeps the sign of zero. A NaN input
// encodes to NaN in E4M3; E2M1 has no NaN, so callers must not pass one (the quantizers of block.h
// refuse).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace cachalot::quant {

constexpr float kE4m3Max = 448.0f;
constexpr float kE2m1Max = 6.0f;

inline float e8m0_decode(uint8_t byte) {
  // 2^-127 is a subnormal float, so byte 0 cannot be formed by shifting.
  return byte == 0 ? 0x1.0p-127f : std::bit_cast<float>(uint32_t{byte} << 23);
}

inline float e4m3_decode(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15, mantissa = code & 7;
  float magnitude;
  if (exponent == 15 && mantissa == 7) {
    magnitude = std::bit_cast<float>(uint32_t{0x7FC00000});
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1.0p-9f;
  } else {
    magnitude = std::bit_cast<float>(((exponent + 120) << 23) | (mantissa << 20));
  }
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

inline uint8_t e4m3_encode(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {
    return static_cast<uint8_t>(sign | 0x7F);
  }
  // Below 2^-6 the step is 2^-9: adding 2^14 makes the float's own rounding do the work.
  if (magnitude < 0x3C800000) {
    const float shifted = std::bit_cast<float>(magnitude) + 0x1.0p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000));
  }
  const uint32_t rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1);
  const uint32_t code = (rounded >> 20) - (120 << 3);
  return static_cast<uint8_t>(sign | (code > 0x7E ? 0x7E : code));
}

inline float e2m1_decode(uint8_t code) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kMagnitudes[code & 7];
  return (code & 8) != 0 ? -magnitude : magnitude;
}

inline uint8_t e2m1_encode(float value) {
  const uint8_t sign = std::signbit(value) ? 8 : 0;
  const float m = std::fabs(value);
  // Thresholds between neighbouring codes; a tie goes to the even code.
  const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                   (m >= 3.5f) + (m > 5.0f);
  return static_cast<uint8_t>(sign | code);
}

// The E8M0 byte of the smallest power of two that is >= t, for t > 0. The byte is clamped to [0,
// 254].
inline uint8_t e8m0_ceil(float t) {
  const uint32_t bits = std::bit_cast<uint32_t>(t);
  const uint32_t byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
  return static_cast<uint8_t>(byte > 254 ? 254 : byte);
}

}  // namespace cachalot::quant
