// Comparison of a kernel's output with the reference in three stages: the special values agree,
// every element is close, and the directions agree.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "tests/support/random.h"
#include "tests/support/tolerance.h"

namespace cachalot::test {

inline double rms(const std::vector<float>& values) {
  double sum = 0;
  for (float v : values) {
    sum += std::isfinite(v) ? static_cast<double>(v) * v : 0.0;
  }
  return values.empty() ? 0.0 : std::sqrt(sum / static_cast<double>(values.size()));
}

// |got - want| <= of_rms * rms(want) + relative * |want|, and 1 - cosine <= cosine.
inline ::testing::AssertionResult close(const std::vector<float>& got,
                                        const std::vector<float>& want,
                                        const Tolerance& tolerance) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure() << got.size() << " values, expected " << want.size();
  }
  const double absolute = tolerance.of_rms * rms(want);
  double dot = 0, gg = 0, ww = 0, worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = got[i], w = want[i];
    if (std::isnan(g) != std::isnan(w) || (std::isinf(w) && g != w) || (std::isinf(g) && g != w)) {
      return ::testing::AssertionFailure() << "value " << i << " is " << g << ", expected " << w;
    }
    if (!std::isfinite(w)) {
      continue;
    }
    const double excess = std::fabs(g - w) / (absolute + tolerance.relative * std::fabs(w) + 1e-37);
    if (excess > worst) {
      worst = excess;
      at = i;
    }
    dot += g * w;
    gg += g * g;
    ww += w * w;
  }
  if (worst > 1) {
    return ::testing::AssertionFailure()
           << "value " << at << " is " << got[at] << ", expected " << want[at] << " (rms "
           << rms(want) << "): " << worst << " times the tolerance";
  }
  const double distance = gg > 0 && ww > 0 ? 1 - dot / std::sqrt(gg * ww) : 0;
  if (distance > tolerance.cosine) {
    return ::testing::AssertionFailure() << "1 - cosine is " << distance;
  }
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult close(const Buffer& got,
                                        const Buffer& want,
                                        const Tolerance& tolerance) {
  return close(got.floats(), want.floats(), tolerance);
}

// The same bytes.
inline ::testing::AssertionResult same_bits(const Buffer& got, const Buffer& want) {
  if (got.bytes.size() != want.bytes.size()) {
    return ::testing::AssertionFailure() << "sizes differ";
  }
  for (size_t i = 0; i < got.bytes.size(); ++i) {
    if (got.bytes[i] != want.bytes[i]) {
      const size_t element = i / static_cast<size_t>(dtype_bytes(got.dtype));
      return ::testing::AssertionFailure() << "element " << element << " differs";
    }
  }
  return ::testing::AssertionSuccess();
}

// How many bytes differ, as a share: for quantized rows, whose codes may flip where the unquantized
// value lies within the float error of a rounding boundary.
inline double differing_share(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  size_t count = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    count += a[i] != b[i];
  }
  return a.empty() ? 0.0 : static_cast<double>(count) / static_cast<double>(a.size());
}

// How many picks of selections [T, k], ids ascending with -1 behind them, differ as sets: rows may
// differ in picks whose scores tie within FP32 error. Also checks the form of `a`.
inline int64_t differing_picks(const Buffer& a, const Buffer& b) {
  const int64_t t = a.shape[0], k = a.shape[1];
  int64_t count = 0;
  for (int64_t row = 0; row < t; ++row) {
    const int32_t* x = ints(a) + row * k;
    const int32_t* y = ints(b) + row * k;
    std::vector<int32_t> difference;
    std::set_symmetric_difference(
        x, std::find(x, x + k, -1), y, std::find(y, y + k, -1), std::back_inserter(difference));
    count += static_cast<int64_t>(difference.size());
    EXPECT_TRUE(std::is_sorted(x, std::find(x, x + k, -1)));
    EXPECT_EQ(std::count(std::find(x, x + k, -1), x + k, -1), x + k - std::find(x, x + k, -1));
  }
  return count;
}

}  // namespace cachalot::test
