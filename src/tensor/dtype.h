// Element types, and the 16-bit float that gcc 12 does not have.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace cachalot {

enum class DType : uint8_t {
  kF32,
  kBF16,
  kF8E4M3,  // OCP E4M3 "fn": max 448, no infinity, NaN = 0x7F and 0xFF
  kF8E8M0,  // the power of two 2^(byte - 127); 255 is NaN
  kI8,      // raw bytes; in a checkpoint: two packed E2M1 codes
  kU8,
  kI32,
  kI64,
};

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    default:
      return 1;
  }
}

// The safetensors spelling: "F32", "BF16", "F8_E4M3", "F8_E8M0", "I8", "U8", "I32", "I64".
std::string_view dtype_name(DType dtype);

// bfloat16: the upper half of a float. Conversion rounds to nearest, ties to even; NaN stays NaN.
struct bf16 {
  uint16_t bits;

  bf16() = default;
  explicit bf16(float value) : bits(round(value)) {}
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }

  static constexpr bf16 from_bits(uint16_t bits) {
    bf16 value;
    value.bits = bits;
    return value;
  }
  static constexpr uint16_t round(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7FFFFFFF) > 0x7F800000) {
      return static_cast<uint16_t>((u >> 16) | 0x40);
    }
    return static_cast<uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
  }
};

// `value` rounded to the nearest BF16, as a float.
inline float round_bf16(float value) {
  return static_cast<float>(bf16(value));
}

}  // namespace cachalot
