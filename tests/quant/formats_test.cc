#include "quant/formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tensor/dtype.h"

namespace cachalot::quant {
namespace {

// The value of an E4M3 code from its fields, in double.
double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? mantissa * std::ldexp(1.0, -9)
                                         : (8 + mantissa) * std::ldexp(1.0, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

bool is_nan_code(int code) {
  return (code & 0x7F) == 0x7F;
}

TEST(E4m3, AllCodesDecodeAndEncodeBack) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_decode(static_cast<uint8_t>(code));
    if (is_nan_code(code)) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(e4m3_encode(value) & 0x7F, 0x7F);
      continue;
    }
    EXPECT_EQ(value, e4m3_value(code)) << code;
    EXPECT_EQ(e4m3_encode(value), code);
  }
}

TEST(E4m3, EveryTieGoesToTheEvenCode) {
  for (int code = 0; code < 0x7E; ++code) {
    const double low = e4m3_value(code), high = e4m3_value(code + 1);
    const auto tie = static_cast<float>((low + high) / 2);
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(e4m3_encode(tie), even) << code;
    EXPECT_EQ(e4m3_encode(-tie), even | 0x80) << code;
    EXPECT_EQ(e4m3_encode(std::nextafter(tie, 0.0f)), code);
    EXPECT_EQ(e4m3_encode(std::nextafter(tie, 1e9f)), code + 1);
  }
}

TEST(E4m3, SaturatesAndKeepsSignAndNan) {
  const float inf = std::numeric_limits<float>::infinity();
  for (float big : {449.0f, 464.0f, 480.0f, 1e30f, inf}) {
    EXPECT_EQ(e4m3_encode(big), 0x7E);
    EXPECT_EQ(e4m3_encode(-big), 0xFE);
  }
  EXPECT_EQ(e4m3_encode(0.0f), 0x00);
  EXPECT_EQ(e4m3_encode(-0.0f), 0x80);
  EXPECT_EQ(e4m3_encode(std::numeric_limits<float>::denorm_min()), 0x00);
  EXPECT_EQ(e4m3_encode(-std::numeric_limits<float>::denorm_min()), 0x80);
  EXPECT_EQ(e4m3_encode(std::nanf("")) & 0x7F, 0x7F);
}

TEST(E2m1, AllCodesDecodeAndEncodeBack) {
  const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int code = 0; code < 16; ++code) {
    const float value = e2m1_decode(static_cast<uint8_t>(code));
    EXPECT_EQ(std::fabs(value), magnitudes[code & 7]);
    EXPECT_EQ(std::signbit(value), code >= 8);
    EXPECT_EQ(e2m1_encode(value), code);
  }
}

TEST(E2m1, EveryTieGoesToTheEvenCode) {
  const float ties[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const int codes[] = {0, 2, 2, 4, 4, 6, 6};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(e2m1_encode(ties[i]), codes[i]) << ties[i];
    EXPECT_EQ(e2m1_encode(-ties[i]), codes[i] | 8);
    EXPECT_EQ(e2m1_encode(std::nextafter(ties[i], 0.0f)), i);
    EXPECT_EQ(e2m1_encode(std::nextafter(ties[i], 10.0f)), i + 1);
  }
}

TEST(E8m0, AllCodesArePowersOfTwo) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(e8m0_decode(static_cast<uint8_t>(code)), std::ldexp(1.0f, code - 127)) << code;
  }
}

TEST(E8m0, CeilIsTheSmallestPowerOfTwoThatIsNotBelow) {
  for (int code = 1; code < 254; ++code) {
    const float power = std::ldexp(1.0f, code - 127);
    EXPECT_EQ(e8m0_ceil(power), code);
    EXPECT_EQ(e8m0_ceil(std::nextafter(power, 2 * power)), code + 1);
  }
  EXPECT_EQ(e8m0_ceil(std::numeric_limits<float>::max()), 254);
  EXPECT_EQ(e8m0_ceil(std::numeric_limits<float>::denorm_min()), 1);
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNan) {
  for (uint32_t high = 0; high < 0x7F80; ++high) {
    const float low = std::bit_cast<float>(high << 16);
    const float tie = std::bit_cast<float>((high << 16) | 0x8000);
    EXPECT_EQ(bf16(low).bits, high);
    EXPECT_EQ(bf16(tie).bits, high + (high & 1));
    EXPECT_EQ(bf16(std::bit_cast<float>((high << 16) | 0x7FFF)).bits, high);
    EXPECT_EQ(bf16(std::bit_cast<float>((high << 16) | 0x8001)).bits, high + 1);
  }
  EXPECT_TRUE(std::isnan(round_bf16(std::bit_cast<float>(uint32_t{0x7F800001}))));
  EXPECT_TRUE(std::isinf(round_bf16(std::numeric_limits<float>::infinity())));
}

}  // namespace
}  // namespace cachalot::quant
