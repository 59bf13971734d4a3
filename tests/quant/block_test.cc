#include "quant/block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "quant/formats.h"
#include "tensor/dtype.h"

namespace cachalot::quant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Quantizer {
  const char* name;
  int64_t block;
  bool fp4;
  void (*quantize)(const float*, int64_t, uint8_t*, uint8_t*);
  void (*dequantize)(const uint8_t*, const uint8_t*, int64_t, float*);
};

const Quantizer kQuantizers[] = {
    {"fp8", kFp8Block, false, fp8_quantize, fp8_dequantize},
    {"fp4_index", kFp4IndexBlock, true, fp4_index_quantize, fp4_index_dequantize},
    {"fp4_main", kFp4MainBlock, true, fp4_main_quantize, fp4_main_dequantize},
};

struct Encoded {
  std::vector<uint8_t> codes, scales;
  std::vector<float> values;
};

Encoded round_trip(const Quantizer& q, const std::vector<float>& x) {
  const auto n = static_cast<int64_t>(x.size());
  Encoded e;
  e.codes.assign(static_cast<size_t>(q.fp4 ? (n + 1) / 2 : n), 0xAA);
  e.scales.assign(static_cast<size_t>(blocks(n, q.block)), 0xAA);
  e.values.resize(x.size());
  q.quantize(x.data(), n, e.codes.data(), e.scales.data());
  q.dequantize(e.codes.data(), e.scales.data(), n, e.values.data());
  return e;
}

class BlockQuantizer : public testing::TestWithParam<Quantizer> {};
INSTANTIATE_TEST_SUITE_P(All,
                         BlockQuantizer,
                         testing::ValuesIn(kQuantizers),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(Fp4Main, HandCheckedVector) {
  std::vector<float> x;
  for (int i = 0; i < 16; ++i) {
    x.push_back((static_cast<float>(i) - 8 + 0.25f) * 0.375f);
  }
  const Encoded e = round_trip(kQuantizers[2], x);
  EXPECT_EQ(e4m3_decode(e.scales[0]), 0.5f);
  EXPECT_EQ(e.codes, (std::vector<uint8_t>{0xff, 0xee, 0xcd, 0x9b, 0x20, 0x43, 0x65, 0x76}));
}

TEST(Fp4Index, HandCheckedVector) {
  std::vector<float> x;
  for (int i = 0; i < 32; ++i) {
    x.push_back((static_cast<float>(i) - 16 + 0.25f) * 0.375f);
  }
  const Encoded e = round_trip(kQuantizers[1], x);
  EXPECT_EQ(e.scales[0], 127);
  EXPECT_EQ(e.codes,
            (std::vector<uint8_t>{0xff,
                                  0xef,
                                  0xee,
                                  0xde,
                                  0xdd,
                                  0xcc,
                                  0xab,
                                  0x99,
                                  0x10,
                                  0x22,
                                  0x43,
                                  0x54,
                                  0x55,
                                  0x66,
                                  0x66,
                                  0x77}));
}

// codes are computed with the decoded stored scale.
TEST_P(BlockQuantizer, A09_ErrorIsAtMostHalfAStepAndRequantizingChangesNothing) {
  const Quantizer& q = GetParam();
  for (float amax : {5.0f, 6.0f, 6.01f, 1.0f, 100.0f, 2688.0f, 0.01f}) {
    const Philox rng(static_cast<uint64_t>(amax * 100));
    std::vector<float> x;
    for (int64_t i = 0; i < q.block; ++i) {
      x.push_back(
          round_bf16(static_cast<float>(rng.uniform(static_cast<uint64_t>(i)) * 2 - 1) * amax));
    }
    x[3] = round_bf16(amax);
    const Encoded e = round_trip(q, x);
    const Encoded again = round_trip(q, e.values);
    EXPECT_EQ(again.values, e.values) << amax;
    for (size_t i = 0; i < x.size(); ++i) {
      // Half of the widest step of the format at this scale: 2 of 6 for E2M1, 32 of 448 for E4M3.
      const double scale = std::fabs(e.values[3]) / (q.fp4 ? 4.0 : 224.0);
      EXPECT_LE(std::fabs(e.values[i] - x[i]), scale * (q.fp4 ? 1.0 : 16.0) * 1.001) << amax;
    }
  }
}

TEST_P(BlockQuantizer, ZeroAndTinyBlocksDecodeToZerosWithAValidScale) {
  const Quantizer& q = GetParam();
  for (float tiny : {0.0f, -0.0f, 1e-30f, -1e-38f}) {
    const Encoded e = round_trip(q, std::vector<float>(static_cast<size_t>(q.block), tiny));
    for (float value : e.values) {
      EXPECT_TRUE(std::isfinite(value));
      EXPECT_LE(std::fabs(value), std::fabs(tiny) * 2);
      EXPECT_EQ(std::signbit(value), std::signbit(tiny));
    }
  }
}

TEST(Fp8, TheFloorOfTheMaximumGivesTheSmallestScale) {
  const Encoded e = round_trip(kQuantizers[0], std::vector<float>(32, 1e-9f));
  EXPECT_EQ(e.scales[0], 127 - 22);
}

TEST(Fp4Main, TheFloorOfTheMaximumGivesTheSmallestScale) {
  const Encoded e = round_trip(kQuantizers[2], std::vector<float>(16, 1e-9f));
  EXPECT_EQ(e4m3_decode(e.scales[0]), 0x1.0p-9f);
}

TEST(Fp4Main, ScalesSaturateAt448AndValuesClip) {
  const Encoded e = round_trip(kQuantizers[2], std::vector<float>(16, 1e6f));
  EXPECT_EQ(e4m3_decode(e.scales[0]), 448.0f);
  EXPECT_EQ(e.values[0], 2688.0f);
}

TEST(CeilScales, NeverClip) {
  for (const Quantizer& q : {kQuantizers[0], kQuantizers[1]}) {
    const float limit = q.fp4 ? kE2m1Max : kE4m3Max;
    for (float amax = 1.0f; amax < 4.0f; amax = std::nextafter(amax * 1.01f, 10.0f)) {
      std::vector<float> x(static_cast<size_t>(q.block), 0.0f);
      x[0] = amax;
      const Encoded e = round_trip(q, x);
      EXPECT_LE(amax / e8m0_decode(e.scales[0]), limit);
      EXPECT_GT(2 * amax / e8m0_decode(e.scales[0]), limit * 0.999f);
    }
  }
}

TEST_P(BlockQuantizer, NonFiniteInputStaysVisible) {
  const Quantizer& q = GetParam();
  for (float bad : {std::nanf(""), kInf, -kInf}) {
    // 6 is exact in every format.
    std::vector<float> x(static_cast<size_t>(2 * q.block), 6.0f);
    x[5] = bad;
    const Encoded e = round_trip(q, x);
    for (int64_t i = 0; i < q.block; ++i) {
      EXPECT_TRUE(std::isnan(e.values[static_cast<size_t>(i)]));
    }
    // The next block is not touched by it.
    EXPECT_EQ(e.values[static_cast<size_t>(q.block)], 6.0f);
  }
}

TEST_P(BlockQuantizer, AShortLastBlockIsQuantizedAlone) {
  const Quantizer& q = GetParam();
  std::vector<float> x(static_cast<size_t>(q.block + 3), 4.0f);
  for (int i = 0; i < 3; ++i) {
    x[static_cast<size_t>(q.block + i)] = 1.5f;
  }
  const Encoded e = round_trip(q, x);
  EXPECT_EQ(e.scales.size(), 2u);
  EXPECT_EQ(e.values.back(), 1.5f);
}

// E2M1 x E4M3 has at most 6 significant bits, E4M3 x 2^k has 4: BF16 holds every decoded value.
TEST_P(BlockQuantizer, DecodedValuesAreExactInBf16) {
  const Quantizer& q = GetParam();
  const Philox rng(17);
  std::vector<float> x;
  for (int i = 0; i < 4096; ++i) {
    x.push_back(
        static_cast<float>(rng.normal(static_cast<uint64_t>(i)) * std::pow(2.0, i % 12 - 6)));
  }
  for (float value : round_trip(q, x).values) {
    EXPECT_EQ(round_bf16(value), value);
  }
}

TEST(Rows, HaveTheTrainedSizes) {
  EXPECT_EQ(window_row_bytes(512), 528);
  EXPECT_EQ(main_row_bytes(512), 288);
  EXPECT_EQ(index_row_bytes(128), 68);
}

}  // namespace
}  // namespace cachalot::quant
