#include "quant/weight_quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"
#include "quant/formats.h"

namespace cachalot::quant {
namespace {

std::vector<float> random_matrix(int64_t rows, int64_t columns, uint64_t seed) {
  std::vector<float> w(static_cast<size_t>(rows * columns));
  const Philox random(seed);
  for (size_t i = 0; i < w.size(); ++i) {
    // Magnitudes over many binades, so that blocks differ in scale.
    w[i] = static_cast<float>(random.normal(i) * std::exp2(random.uniform(i + 1000000) * 20 - 15));
  }
  return w;
}

// Every block has the smallest power of two that does not clip, and every value is within half a
// step.
void check_blocks(const std::vector<float>& w,
                  const std::vector<float>& back,
                  const std::vector<uint8_t>& scales,
                  int64_t rows,
                  int64_t columns,
                  int64_t block_rows,
                  float largest,
                  float relative,
                  float absolute) {
  const int64_t blocks = (columns + 31) / 32;
  for (int64_t r0 = 0; r0 < rows; r0 += block_rows) {
    for (int64_t c0 = 0; c0 < columns; c0 += 32) {
      const float scale =
          e8m0_decode(scales[static_cast<size_t>(r0 / block_rows * blocks + c0 / 32)]);
      float amax = 0;
      for (int64_t r = r0; r < std::min(rows, r0 + block_rows); ++r) {
        for (int64_t c = c0; c < std::min(columns, c0 + 32); ++c) {
          const auto i = static_cast<size_t>(r * columns + c);
          amax = std::max(amax, std::fabs(w[i]));
          EXPECT_LE(std::fabs(w[i] - back[i]),
                    std::max(relative * std::fabs(w[i]), absolute * scale));
        }
      }
      EXPECT_LE(amax, largest * scale);
      EXPECT_GT(amax, largest * scale / 2);
    }
  }
}

TEST(WeightQuant, Fp8Tiles) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{64, 96}, {33, 70}, {1, 1}}) {
    const std::vector<float> w = random_matrix(rows, columns, 1);
    std::vector<uint8_t> codes(w.size()),
        scales(static_cast<size_t>((rows + 31) / 32 * ((columns + 31) / 32)));
    std::vector<float> back(w.size());
    fp8_tile_quantize(w.data(), rows, columns, codes.data(), scales.data());
    fp8_tile_dequantize(codes.data(), scales.data(), rows, columns, back.data());
    check_blocks(w, back, scales, rows, columns, 32, kE4m3Max, 0x1p-4f, 0x1p-10f);
  }
}

TEST(WeightQuant, Fp8Rows) {
  const int64_t rows = 5, columns = 80;
  const std::vector<float> w = random_matrix(rows, columns, 2);
  std::vector<uint8_t> codes(w.size()), scales(static_cast<size_t>(rows * 3));
  std::vector<float> back(w.size());
  fp8_row_quantize(w.data(), rows, columns, codes.data(), scales.data());
  fp8_row_dequantize(codes.data(), scales.data(), rows, columns, back.data());
  check_blocks(w, back, scales, rows, columns, 1, kE4m3Max, 0x1p-4f, 0x1p-10f);
}

TEST(WeightQuant, Fp4Rows) {
  const int64_t rows = 5, columns = 80;
  const std::vector<float> w = random_matrix(rows, columns, 3);
  std::vector<uint8_t> codes(w.size() / 2), scales(static_cast<size_t>(rows * 3));
  std::vector<float> back(w.size());
  fp4_row_quantize(w.data(), rows, columns, codes.data(), scales.data());
  fp4_row_dequantize(codes.data(), scales.data(), rows, columns, back.data());
  check_blocks(w, back, scales, rows, columns, 1, kE2m1Max, 0.25f, 0.25f);
  // The even column is the low nibble.
  const float pair[2] = {6, -1};
  uint8_t code, scale;
  fp4_row_quantize(pair, 1, 2, &code, &scale);
  EXPECT_EQ(code, 0xA7);
  EXPECT_EQ(scale, 127);
}

TEST(WeightQuant, RepresentableValuesAreExact) {
  // E4M3 values times one power of two per tile, with the largest code present.
  std::vector<float> w(32 * 32);
  for (size_t i = 0; i < w.size(); ++i) {
    const auto code = static_cast<uint8_t>(i % 254);
    w[i] = e4m3_decode(static_cast<uint8_t>(code >= 127 ? code + 1 : code)) * 0x1p-9f;
  }
  std::vector<uint8_t> codes(w.size());
  uint8_t scale = 0;
  std::vector<float> back(w.size());
  fp8_tile_quantize(w.data(), 32, 32, codes.data(), &scale);
  fp8_tile_dequantize(codes.data(), &scale, 32, 32, back.data());
  EXPECT_EQ(scale, 118);
  EXPECT_EQ(w, back);
}

TEST(WeightQuant, Extremes) {
  const std::vector<float> zeros(64, 0.0f);
  std::vector<uint8_t> codes(64), scales(2);
  fp8_row_quantize(zeros.data(), 1, 64, codes.data(), scales.data());
  EXPECT_EQ(scales, (std::vector<uint8_t>{127, 127}));
  EXPECT_EQ(codes, std::vector<uint8_t>(64, 0));
  std::vector<float> w(64, 0.0f), back(64);
  w[0] = 2.9e38f;  // larger values would round up to infinity
  w[33] = 1e-45f;
  fp4_row_quantize(w.data(), 1, 64, codes.data(), scales.data());
  fp4_row_dequantize(codes.data(), scales.data(), 1, 64, back.data());
  EXPECT_EQ(scales[0], 253);
  EXPECT_NEAR(back[0] / w[0], 1, 0.25);
  EXPECT_EQ(scales[1], 0);
  fp8_row_quantize(w.data(), 1, 64, codes.data(), scales.data());
  fp8_row_dequantize(codes.data(), scales.data(), 1, 64, back.data());
  EXPECT_NEAR(back[0] / w[0], 1, 0.0625);
}

}  // namespace
}  // namespace cachalot::quant
