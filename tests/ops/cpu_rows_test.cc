// The row primitives of the CPU backend: bit-equal to the scalar quantizers, accurate elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/cpu/machine.h"
#include "ops/cpu/select.h"
#include "ops/cpu/simd.h"
#include "ops/cpu/tables.h"
#include "quant/block.h"
#include "quant/formats.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"

namespace cachalot::ops::cpu {
namespace {

using test::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Rows that meet every branch of the quantizers: ordinary blocks, zeros, ties, extremes, NaN.
std::vector<std::vector<float>> quantizer_rows(int64_t n) {
  Random random(1);
  std::vector<std::vector<float>> rows;
  const auto add = [&](auto&& value) {
    std::vector<float> row(static_cast<size_t>(padded(n)), 0.0f);
    for (int64_t i = 0; i < n; ++i) {
      row[static_cast<size_t>(i)] = value(i);
    }
    rows.push_back(row);
  };
  for (double scale : {1e-38, 1e-30, 1e-6, 1e-3, 0.3, 7.0, 1e4, 1e30}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      add([&](int64_t) { return static_cast<float>(random.normal(scale)); });
      add([&](int64_t) { return round_bf16(static_cast<float>(random.normal(scale))); });
    }
  }
  add([](int64_t i) { return i % 2 == 0 ? 0.0f : -0.0f; });
  // The hand-check vectors of the FP4 formats, and values on every tie.
  add([](int64_t i) { return (static_cast<float>(i % 16) - 8 + 0.25f) * 0.375f; });
  add([](int64_t i) { return (static_cast<float>(i % 32) - 16 + 0.25f) * 0.375f; });
  add([](int64_t i) { return i % 32 == 0 ? 6.0f : (static_cast<float>(i % 32) - 16) * 0.25f; });
  add([](int64_t i) { return i % 32 == 0 ? 448.0f : static_cast<float>(i % 32) * 8.0f + 4.0f; });
  add([](int64_t i) { return i % 32 == 0 ? 448.0f : static_cast<float>(i % 32) * 0x1.0p-10f; });
  for (float amax : {5.0f, 6.0f, 6.01f, 1e-30f, 2688.0f, 448.0f, 448.5f, 3e38f, 0x1.0p-149f}) {
    add([&](int64_t i) { return i % 16 == 3 ? amax : amax * 0.3f; });
  }
  for (float bad : {std::nanf(""), kInf, -kInf}) {
    add([&](int64_t i) { return i == n / 2 ? bad : 1.0f; });
  }
  return rows;
}

void expect_same(const std::vector<float>& got, const std::vector<float>& want, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = got[static_cast<size_t>(i)], w = want[static_cast<size_t>(i)];
    ASSERT_TRUE(std::bit_cast<uint32_t>(g) == std::bit_cast<uint32_t>(w) ||
                (std::isnan(g) && std::isnan(w)))
        << "value " << i << ": " << g << ", expected " << w;
  }
}

// Per width and instruction set.
class CpuQuantizers : public testing::TestWithParam<std::tuple<int64_t, std::string>> {
 protected:
  void SetUp() override { ASSERT_TRUE(use_instruction_set(std::get<1>(GetParam()))); }
  void TearDown() override { use_instruction_set(""); }
};
INSTANTIATE_TEST_SUITE_P(Widths,
                         CpuQuantizers,
                         testing::Combine(testing::Values(16, 32, 48, 64, 128, 512),
                                          testing::ValuesIn(instruction_sets())));

TEST_P(CpuQuantizers, Fp8RoundTripIsExact) {
  const int64_t n = std::get<0>(GetParam());
  std::vector<uint8_t> codes(static_cast<size_t>(n)), scales(static_cast<size_t>(n));
  for (const std::vector<float>& row : quantizer_rows(n)) {
    std::vector<float> want(row.size()), got = row;
    quant::fp8_quantize(row.data(), n, codes.data(), scales.data());
    quant::fp8_dequantize(codes.data(), scales.data(), n, want.data());
    fp8_round_row(got.data(), n);
    expect_same(got, want, n);
  }
}

TEST_P(CpuQuantizers, Fp4IndexRoundTripIsExact) {
  const int64_t n = std::get<0>(GetParam());
  std::vector<uint8_t> bytes(static_cast<size_t>(quant::index_row_bytes(n)));
  for (const std::vector<float>& row : quantizer_rows(n)) {
    std::vector<float> want(row.size()), got = row;
    quant::index_row_encode(row.data(), n, bytes.data());
    quant::index_row_decode(bytes.data(), n, want.data());
    fp4_index_round_row(got.data(), n);
    expect_same(got, want, n);
  }
}

TEST_P(CpuQuantizers, CacheRowsHaveTheSameBytes) {
  const int64_t n = std::get<0>(GetParam());
  struct Format {
    int64_t bytes;
    void (*want)(const float*, int64_t, uint8_t*);
    void (*got)(const float*, int64_t, uint8_t*);
  };
  const Format formats[] = {
      {quant::window_row_bytes(n), quant::window_row_encode, encode_window_row},
      {quant::main_row_bytes(n), quant::main_row_encode, encode_main_row},
      {quant::index_row_bytes(n), quant::index_row_encode, encode_index_row}};
  for (const std::vector<float>& row : quantizer_rows(n)) {
    for (const Format& format : formats) {
      std::vector<uint8_t> want(static_cast<size_t>(format.bytes) + 8, 0xAA), got = want;
      format.want(row.data(), n, want.data());
      format.got(row.data(), n, got.data());
      ASSERT_EQ(got, want);
    }
  }
}

TEST_P(CpuQuantizers, CacheRowsDecodeExactly) {
  const int64_t n = std::get<0>(GetParam());
  std::vector<uint8_t> bytes(static_cast<size_t>(quant::window_row_bytes(n)));
  for (const std::vector<float>& row : quantizer_rows(n)) {
    std::vector<float> want(row.size()), got(row.size());
    if (*std::max_element(row.begin(), row.end()) > 1e37f) {
      continue;  // FP8 scales from 2^120 on decode to infinity: see kE8m0Times256
    }
    quant::window_row_encode(row.data(), n, bytes.data());
    quant::window_row_decode(bytes.data(), n, want.data());
    decode_window_row(bytes.data(), n, got.data());
    expect_same(got, want, n);
    quant::main_row_encode(row.data(), n, bytes.data());
    quant::main_row_decode(bytes.data(), n, want.data());
    decode_main_row(bytes.data(), n, got.data());
    expect_same(got, want, n);
  }
}

TEST(CpuTables, Fp4PatternsAreExact) {
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = 0; code < 16; ++code) {
      const auto& table = kFp4Patterns[static_cast<size_t>(scale)];
      const uint32_t bits = static_cast<uint32_t>(table.high[code] << 8 | table.low[code]) << 16;
      const float got = std::bit_cast<float>(bits);
      if (scale == 255) {
        EXPECT_TRUE(std::isnan(got));
        continue;
      }
      const float want = quant::e2m1_decode(static_cast<uint8_t>(code)) *
                         quant::e8m0_decode(static_cast<uint8_t>(scale));
      EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want))
          << "code " << code << " scale " << scale;
    }
  }
}

TEST(CpuTables, E4m3IsExact) {
  for (int code = 0; code < 256; ++code) {
    const float got = kE4m3[static_cast<size_t>(code)];
    const float want = quant::e4m3_decode(static_cast<uint8_t>(code));
    EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code;
  }
}

TEST(CpuRows, Bf16RoundingIsThatOfTheScalarType) {
  Random random(2);
  std::vector<float> row(1024);
  for (size_t i = 0; i < row.size(); ++i) {
    const uint32_t bits = static_cast<uint32_t>(random.integer(0, int64_t{1} << 32));
    row[i] = std::bit_cast<float>(i % 8 == 0 ? (bits & 0xFFFF0000u) | 0x8000u : bits);
  }
  row[0] = std::nanf("");
  row[1] = kInf;
  row[2] = std::bit_cast<float>(0x7F7FFFFFu);
  row[3] = std::bit_cast<float>(0x7F800001u);
  row[4] = std::bit_cast<float>(0xFFFFFFFFu);
  std::vector<bf16> stored(row.size());
  store_row(row.data(), 1024, stored.data(), DType::kBF16);
  std::vector<float> rounded = row;
  round_row(rounded.data(), 1024, DType::kBF16);
  for (size_t i = 0; i < row.size(); ++i) {
    EXPECT_EQ(stored[i].bits, bf16::round(row[i]));
    EXPECT_EQ(std::bit_cast<uint32_t>(rounded[i]), uint32_t{bf16::round(row[i])} << 16);
  }
}

TEST(CpuRows, NothingBehindTheTensorIsTouched) {
  for (int64_t n : {1, 3, 7, 8, 9, 31, 33}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const auto bytes = static_cast<size_t>(n * dtype_bytes(dtype));
      std::vector<uint8_t> target(bytes + 64, 0xCC);
      std::vector<float> row(static_cast<size_t>(padded(n)), 2.0f);
      store_row(row.data(), n, target.data(), dtype);
      for (size_t i = bytes; i < target.size(); ++i) {
        EXPECT_EQ(target[i], 0xCC);
      }
      load_row(target.data(), dtype, n, row.data());
      for (int64_t i = 0; i < padded(n); ++i) {
        EXPECT_EQ(row[static_cast<size_t>(i)], i < n ? 2.0f : 0.0f);
      }
    }
  }
}

TEST(CpuRows, SwigluKeepsNanAndClamps) {
  std::vector<float> gate(32, 0.0f), up(32, 1.0f), h(32);
  gate[0] = std::nanf("");
  up[1] = std::nanf("");
  gate[1] = 1;
  gate[2] = 50;
  gate[3] = -200;
  up[4] = -50;
  gate[4] = 1;
  swiglu_row(gate.data(), up.data(), 32, 10.0f, 0.5f, DType::kF32, h.data());
  EXPECT_TRUE(std::isnan(h[0]));
  EXPECT_TRUE(std::isnan(h[1]));
  EXPECT_NEAR(h[2], 5.0 / (1 + std::exp(-10.0)), 1e-5);
  EXPECT_NEAR(h[3], 0.0, 1e-30);
  EXPECT_NEAR(h[4], -5.0 / (1 + std::exp(-1.0)), 1e-5);
}

// Top-k against a stable sort.
std::vector<int32_t> sorted_best(const std::vector<float>& scores, int64_t k) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] != -kInf) {
      order.push_back(static_cast<int32_t>(i));
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(std::min(order.size(), static_cast<size_t>(k)));
  std::sort(order.begin(), order.end());
  return order;
}

TEST(CpuSelect, A08_MatchesAStableSort) {
  Random random(3);
  for (int repeat = 0; repeat < 400; ++repeat) {
    const int64_t n = random.integer(0, 300), k = random.integer(1, 80);
    std::vector<float> scores(static_cast<size_t>(n));
    for (float& score : scores) {
      switch (random.integer(0, repeat % 4 + 1)) {
        case 0:
          score = static_cast<float>(random.normal());
          break;
        case 1:
          score = random.integer(0, 2) == 0 ? 0.0f : -0.0f;
          break;
        case 2:
          score = static_cast<float>(random.integer(-2, 3));
          break;
        default:
          score = random.integer(0, 3) == 0 ? kInf : -kInf;
      }
    }
    std::vector<int32_t> got(static_cast<size_t>(k));
    std::vector<uint32_t> work(static_cast<size_t>(n) + 1);
    const int64_t count = select_best(scores.data(), n, k, got.data(), work.data());
    got.resize(static_cast<size_t>(count));
    EXPECT_EQ(got, sorted_best(scores, k));
  }
}

}  // namespace
}  // namespace cachalot::ops::cpu
