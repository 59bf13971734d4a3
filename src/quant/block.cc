#include "quant/block.h"

#include <algorithm>
#include <cmath>

#include "quant/formats.h"

namespace cachalot::quant {
namespace {

// NaN if any element is NaN; +inf if any is infinite.
float block_amax(const float* x, int64_t n) {
  float amax = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float m = std::fabs(x[i]);
    amax = m > amax || std::isnan(m) ? m : amax;
    if (std::isnan(amax)) {
      return amax;
    }
  }
  return amax;
}

void set_nibble(uint8_t* codes, int64_t i, uint8_t code) {
  uint8_t& byte = codes[i / 2];
  byte = static_cast<uint8_t>((i & 1) == 0 ? code : (byte & 0x0F) | (code << 4));
}

uint8_t get_nibble(const uint8_t* codes, int64_t i) {
  return static_cast<uint8_t>((codes[i / 2] >> ((i & 1) * 4)) & 0x0F);
}

void encode_e2m1(const float* x, int64_t begin, int64_t end, float scale, uint8_t* codes) {
  for (int64_t i = begin; i < end; ++i) {
    set_nibble(codes, i, e2m1_encode(std::clamp(x[i] / scale, -kE2m1Max, kE2m1Max)));
  }
}

void decode_e2m1(const uint8_t* codes, int64_t begin, int64_t end, float scale, float* x) {
  for (int64_t i = begin; i < end; ++i) {
    x[i] = e2m1_decode(get_nibble(codes, i)) * scale;
  }
}

// A NaN scale byte decodes to NaN, whatever the codes.
float e8m0_scale(uint8_t byte) {
  return byte == 255 ? std::nanf("") : e8m0_decode(byte);
}

}  // namespace

void fp8_quantize(const float* x, int64_t n, uint8_t* codes, uint8_t* scales) {
  for (int64_t begin = 0; begin < n; begin += kFp8Block) {
    const int64_t end = std::min(n, begin + kFp8Block);
    const float amax = block_amax(x + begin, end - begin);
    uint8_t& scale_byte = scales[begin / kFp8Block];
    if (!std::isfinite(amax)) {
      scale_byte = 255;
      std::fill(codes + begin, codes + end, uint8_t{0x7F});
      continue;
    }
    scale_byte = e8m0_ceil(std::max(amax, 1e-4f) * (1.0f / 448.0f));
    const float scale = e8m0_decode(scale_byte);
    for (int64_t i = begin; i < end; ++i) {
      codes[i] = e4m3_encode(std::clamp(x[i] / scale, -kE4m3Max, kE4m3Max));
    }
  }
}

void fp4_index_quantize(const float* x, int64_t n, uint8_t* codes, uint8_t* scales) {
  for (int64_t begin = 0; begin < n; begin += kFp4IndexBlock) {
    const int64_t end = std::min(n, begin + kFp4IndexBlock);
    const float amax = block_amax(x + begin, end - begin);
    uint8_t& scale_byte = scales[begin / kFp4IndexBlock];
    if (!std::isfinite(amax)) {
      scale_byte = 255;
      std::fill(codes + begin / 2, codes + (end + 1) / 2, uint8_t{0});
      continue;
    }
    scale_byte = e8m0_ceil(std::max(amax, 6.0f * 0x1.0p-126f) * (1.0f / 6.0f));
    encode_e2m1(x, begin, end, e8m0_decode(scale_byte), codes);
  }
}

void fp4_main_quantize(const float* x, int64_t n, uint8_t* codes, uint8_t* scales) {
  for (int64_t begin = 0; begin < n; begin += kFp4MainBlock) {
    const int64_t end = std::min(n, begin + kFp4MainBlock);
    const float amax = block_amax(x + begin, end - begin);
    uint8_t& scale_byte = scales[begin / kFp4MainBlock];
    if (!std::isfinite(amax)) {
      scale_byte = 0x7F;
      std::fill(codes + begin / 2, codes + (end + 1) / 2, uint8_t{0});
      continue;
    }
    scale_byte = e4m3_encode(std::max(amax, 6.0f * 0x1.0p-9f) / 6.0f);
    encode_e2m1(x, begin, end, e4m3_decode(scale_byte), codes);
  }
}

void fp8_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = e4m3_decode(codes[i]) * e8m0_scale(scales[i / kFp8Block]);
  }
}

void fp4_index_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* x) {
  for (int64_t begin = 0; begin < n; begin += kFp4IndexBlock) {
    decode_e2m1(codes,
                begin,
                std::min(n, begin + kFp4IndexBlock),
                e8m0_scale(scales[begin / kFp4IndexBlock]),
                x);
  }
}

void fp4_main_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* x) {
  for (int64_t begin = 0; begin < n; begin += kFp4MainBlock) {
    decode_e2m1(codes,
                begin,
                std::min(n, begin + kFp4MainBlock),
                e4m3_decode(scales[begin / kFp4MainBlock]),
                x);
  }
}

}  // namespace cachalot::quant
