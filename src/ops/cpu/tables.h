// Decoding tables of the block formats.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace cachalot::ops::cpu {

// The BF16 patterns of the 16 E2M1 codes times one power of two, split into bytes for byte
// shuffles.
struct Fp4Patterns {
  alignas(16) uint8_t high[16];
  alignas(16) uint8_t low[16];
};

// BF16 bits of magnitude code `code` times 2^(scale - 127); exact, down to BF16's subnormals.
constexpr uint32_t fp4_pattern(uint32_t code, uint32_t scale) {
  if (scale == 255) {
    return 0x7FC0;
  }
  if (code == 0) {
    return 0;
  }
  // Codes 1 .. 7 are 2^-1 {1}, 2^0 {1, 1.5}, 2^1 {1, 1.5}, 2^2 {1, 1.5}.
  const int exponent = static_cast<int>(scale) + static_cast<int>(code / 2) - 1;
  const uint32_t significand = code > 1 && (code & 1) != 0 ? 0xC0 : 0x80;
  if (exponent >= 255) {
    return 0x7F80;
  }
  if (exponent <= 0) {
    return significand >> (1 - exponent);
  }
  return static_cast<uint32_t>(exponent) << 7 | (significand & 0x7F);
}

constexpr std::array<Fp4Patterns, 256> make_fp4_patterns() {
  std::array<Fp4Patterns, 256> table{};
  for (uint32_t scale = 0; scale < 256; ++scale) {
    for (uint32_t code = 0; code < 16; ++code) {
      const uint32_t pattern = fp4_pattern(code & 7, scale) | (code & 8) << 12;
      table[scale].high[code] = static_cast<uint8_t>(pattern >> 8);
      table[scale].low[code] = static_cast<uint8_t>(pattern);
    }
  }
  return table;
}
inline constexpr std::array<Fp4Patterns, 256> kFp4Patterns = make_fp4_patterns();

// 2^(scale - 127 + 8); from byte 247 on infinite: such a scale is far outside of any real weight.
constexpr std::array<float, 256> make_e8m0_times_256() {
  std::array<float, 256> table{};
  for (uint32_t scale = 0; scale < 256; ++scale) {
    table[scale] = std::bit_cast<float>((scale < 247 ? scale + 8 : 255u) << 23);
  }
  table[255] = std::bit_cast<float>(0x7FC00000u);
  return table;
}
inline constexpr std::array<float, 256> kE8m0Times256 = make_e8m0_times_256();

// 2^(scale - 127 + 60); infinite for scales from 2^68 on.
constexpr std::array<float, 256> make_e8m0_times_2p60() {
  std::array<float, 256> table{};
  for (uint32_t scale = 0; scale < 256; ++scale) {
    table[scale] = std::bit_cast<float>((scale < 195 ? scale + 60 : 255u) << 23);
  }
  table[255] = std::bit_cast<float>(0x7FC00000u);
  return table;
}
inline constexpr std::array<float, 256> kE8m0Times2p60 = make_e8m0_times_2p60();

// E4M3 codes as floats.
constexpr std::array<float, 256> make_e4m3() {
  std::array<float, 256> table{};
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1.0p-9f
                                    : std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
    if ((code & 0x7F) == 0x7F) {
      magnitude = std::bit_cast<float>(0x7FC00000u);
    }
    table[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  return table;
}
inline constexpr std::array<float, 256> kE4m3 = make_e4m3();

}  // namespace cachalot::ops::cpu
