// Rows of logits for tests of ops::top_logits, and the comparison of its outputs.
#pragma once

#include <limits>
#include <vector>

#include "tests/support/compare.h"

namespace cachalot::test {

struct TopLogits {
  TopLogits(int64_t n, int64_t k)
      : value(DType::kF32, {n, k}), id(DType::kI32, {n, k}), mass(DType::kF32, {n, 2}) {}
  Buffer value, id, mass;
};

struct TopLogitsCase {
  int64_t n, v, k;
};
// One token, more than there are, odd vocabularies, one row and many, the real vocabulary.
constexpr TopLogitsCase kTopLogitsCases[] = {{12, 1, 1},
                                             {12, 7, 64},
                                             {12, 1000, 1},
                                             {12, 1000, 1024},
                                             {130, 513, 64},
                                             {12, 4099, 256},
                                             {12, 8200, 256},
                                             {1, 129280, 1},
                                             {13, 129280, 256},
                                             {3, 129280, 1024},
                                             {2, 200003, 100}};

// Row r is of kind r % 12: what a model gives, then ties, orders, and values that are no numbers.
inline Buffer logit_rows(Random& random, int64_t n, int64_t v) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Buffer rows = random.normals(DType::kF32, {n, v}, 3);
  for (int64_t r = 0; r < n; ++r) {
    float* row = rows.view().as<float>() + r * v;
    for (int64_t i = 0; i < v; ++i) {
      switch (r % 12) {
        case 1:
          row[i] = std::round(row[i] * 2) / 2;
          break;
        case 2:
          row[i] = 1.5f;
          break;
        case 3:
          row[i] = static_cast<float>(i) * 1e-3f;
          break;
        case 4:
          row[i] = -static_cast<float>(i) * 1e-3f;
          break;
        case 5:
          row[i] = i % 3 == 0 ? kNan : i % 7 == 0 ? -kInf : row[i];
          break;
        case 6:
          row[i] = i % 100 == 51 ? kInf : i % 5 == 0 ? kNan : row[i];
          break;
        case 7:
          row[i] = i % 400 == 3 ? row[i] : -kInf;
          break;
        case 8:
          row[i] = -kInf;
          break;
        case 9:
          row[i] = i % 2 == 0 ? kNan : -kNan;
          break;
        case 10:
          row[i] = i % 3 == 0 ? -0.0f : i % 3 == 1 ? 0.0f : -std::fabs(row[i]);
          break;
        case 11:
          row[i] = row[i] * 1e4f;
          break;
        default:
          break;
      }
    }
  }
  return rows;
}

// 0.01 and 100 among them: nearly one token, nearly all alike.
inline Buffer temperatures(int64_t n) {
  constexpr float kValues[] = {0.7f, 1.0f, 0.01f, 1.3f, 100.0f};
  Buffer buffer(DType::kF32, {n});
  for (int64_t r = 0; r < n; ++r) {
    buffer.set(r, kValues[r % 5]);
  }
  return buffer;
}

inline void expect_same(const TopLogits& got, const TopLogits& want) {
  EXPECT_TRUE(same_bits(got.id, want.id));
  EXPECT_TRUE(same_bits(got.value, want.value));
  EXPECT_TRUE(close(got.mass, want.mass, kMass));
}

// Row r of `batch`, from a run of its own.
inline void expect_same_row(const TopLogits& alone, const TopLogits& batch, int64_t r) {
  const auto same = [r](const Buffer& one, const Buffer& all) {
    const size_t bytes = one.bytes.size();
    return std::equal(
        one.bytes.begin(), one.bytes.end(), all.bytes.begin() + r * static_cast<int64_t>(bytes));
  };
  EXPECT_TRUE(same(alone.id, batch.id) && same(alone.value, batch.value) &&
              same(alone.mass, batch.mass))
      << "row " << r;
}

}  // namespace cachalot::test
