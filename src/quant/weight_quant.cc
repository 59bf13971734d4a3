#include "quant/weight_quant.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "quant/formats.h"

namespace cachalot::quant {
namespace {

constexpr uint8_t kOneByte = 127;  // E8M0 of 1

float amax_of(const float* w, int64_t n, float amax) {
  for (int64_t i = 0; i < n; ++i) {
    amax = std::max(amax, std::fabs(w[i]));
  }
  return amax;
}

uint8_t scale_byte(float amax, float largest) {
  CACHALOT_DCHECK(std::isfinite(amax), amax);
  return amax == 0 ? kOneByte : e8m0_ceil(amax / largest);
}

// 2^(127 - byte). Multiplying by it is as exact as dividing by the scale. Bytes above 253 do not
// occur: amax / 6 is below 2^126.
float inverse_scale(uint8_t byte) {
  return e8m0_decode(static_cast<uint8_t>(254 - byte));
}

// Blocks of block_rows x 32.
void fp8_quantize_blocks(const float* w,
                         int64_t rows,
                         int64_t columns,
                         int64_t block_rows,
                         uint8_t* codes,
                         uint8_t* scales) {
  for (int64_t row = 0; row < rows; row += block_rows) {
    const int64_t row_end = std::min(rows, row + block_rows);
    for (int64_t column = 0; column < columns; column += kWeightBlock) {
      const int64_t width = std::min(columns, column + kWeightBlock) - column;
      float amax = 0;
      for (int64_t r = row; r < row_end; ++r) {
        amax = amax_of(w + r * columns + column, width, amax);
      }
      const uint8_t byte = scale_byte(amax, kE4m3Max);
      *scales++ = byte;
      const float inverse = inverse_scale(byte);
      for (int64_t r = row; r < row_end; ++r) {
        for (int64_t i = r * columns + column; i < r * columns + column + width; ++i) {
          codes[i] = e4m3_encode(w[i] * inverse);
        }
      }
    }
  }
}

void fp8_dequantize_blocks(const uint8_t* codes,
                           const uint8_t* scales,
                           int64_t rows,
                           int64_t columns,
                           int64_t block_rows,
                           float* w) {
  const int64_t blocks = (columns + kWeightBlock - 1) / kWeightBlock;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      w[r * columns + c] = e4m3_decode(codes[r * columns + c]) *
                           e8m0_decode(scales[r / block_rows * blocks + c / kWeightBlock]);
    }
  }
}

}  // namespace

void fp8_tile_quantize(
    const float* w, int64_t rows, int64_t columns, uint8_t* codes, uint8_t* scales) {
  fp8_quantize_blocks(w, rows, columns, kWeightBlock, codes, scales);
}

void fp8_row_quantize(
    const float* w, int64_t rows, int64_t columns, uint8_t* codes, uint8_t* scales) {
  fp8_quantize_blocks(w, rows, columns, 1, codes, scales);
}

void fp4_row_quantize(
    const float* w, int64_t rows, int64_t columns, uint8_t* codes, uint8_t* scales) {
  CACHALOT_CHECK(columns % 2 == 0, columns);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = w + r * columns;
    for (int64_t column = 0; column < columns; column += kWeightBlock) {
      const int64_t end = std::min(columns, column + kWeightBlock);
      const uint8_t byte = scale_byte(amax_of(row + column, end - column, 0), kE2m1Max);
      *scales++ = byte;
      const float inverse = inverse_scale(byte);
      for (int64_t i = column; i < end; i += 2) {
        *codes++ = static_cast<uint8_t>(e2m1_encode(row[i] * inverse) |
                                        e2m1_encode(row[i + 1] * inverse) << 4);
      }
    }
  }
}

void fp8_tile_dequantize(
    const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t columns, float* w) {
  fp8_dequantize_blocks(codes, scales, rows, columns, kWeightBlock, w);
}

void fp8_row_dequantize(
    const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t columns, float* w) {
  fp8_dequantize_blocks(codes, scales, rows, columns, 1, w);
}

void fp4_row_dequantize(
    const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t columns, float* w) {
  CACHALOT_CHECK(columns % 2 == 0, columns);
  const int64_t blocks = (columns + kWeightBlock - 1) / kWeightBlock;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t pair = codes[(r * columns + c) / 2];
      const auto code = static_cast<uint8_t>(c % 2 == 0 ? pair & 0x0F : pair >> 4);
      w[r * columns + c] = e2m1_decode(code) * e8m0_decode(scales[r * blocks + c / kWeightBlock]);
    }
  }
}

}  // namespace cachalot::quant
