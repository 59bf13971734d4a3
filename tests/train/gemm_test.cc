#include "train/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"
#include "train/vector.h"

namespace cachalot::train {
namespace {

template <class Real>
std::vector<Real> random_values(size_t n, uint64_t seed) {
  std::vector<Real> values(n);
  const Philox random(seed);
  for (size_t i = 0; i < n; ++i) {
    values[i] = static_cast<Real>(random.normal(i));
  }
  return values;
}

// Sums of k products of normal values: k roundings of half an ulp of a partial sum of about sqrt(k)
// each, sqrt(k) * sqrt(k) eps in all.
template <class Real>
double tolerance(int64_t k) {
  return 4 * static_cast<double>(k) * static_cast<double>(std::numeric_limits<Real>::epsilon());
}

template <class Real>
void check_product(int64_t m, int64_t n, int64_t k, int threads) {
  SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", " << threads);
  // A, B in all four orientations, with padding between rows.
  for (int orientation = 0; orientation < 4; ++orientation) {
    const bool a_turned = (orientation & 1) != 0, b_turned = (orientation & 2) != 0;
    Gemm<Real> g{.m = m, .n = n, .k = k};
    g.a_row = a_turned ? 1 : k + 3;
    g.a_column = a_turned ? m + 2 : 1;
    g.b_row = b_turned ? 1 : n + 1;
    g.b_column = b_turned ? k + 5 : 1;
    g.c_row = n + 2;
    g.accumulate = orientation % 2 == 0;
    const auto a = random_values<Real>(static_cast<size_t>((m + 3) * (k + 3)), 1);
    const auto b = random_values<Real>(static_cast<size_t>((n + 5) * (k + 5)), 2);
    const auto before = random_values<Real>(static_cast<size_t>(m * g.c_row), 3);
    std::vector<Real> c = before;
    g.a = a.data();
    g.b = b.data();
    g.c = c.data();
    ThreadPool pool(threads);
    gemm(&pool, g);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < g.c_row; ++j) {
        const auto at = static_cast<size_t>(i * g.c_row + j);
        if (j >= n) {
          EXPECT_EQ(c[at], before[at]) << "wrote behind a row";
          continue;
        }
        double want = g.accumulate ? static_cast<double>(before[at]) : 0.0;
        for (int64_t l = 0; l < k; ++l) {
          want += static_cast<double>(a[static_cast<size_t>(i * g.a_row + l * g.a_column)]) *
                  static_cast<double>(b[static_cast<size_t>(l * g.b_row + j * g.b_column)]);
        }
        ASSERT_NEAR(static_cast<double>(c[at]), want, tolerance<Real>(k + 1));
      }
    }
    std::vector<Real> alone = before;
    g.c = alone.data();
    gemm(nullptr, g);
    EXPECT_EQ(alone, c) << "threads change the sums";
  }
}

TEST(Gemm, OddShapesOrientationsAndThreads) {
  for (int threads : {1, 2, 3}) {
    check_product<float>(1, 1, 1, threads);
    check_product<float>(7, 33, 5, threads);
    check_product<float>(150, 70, 13, threads);
    check_product<float>(13, 17, 600, threads);
    check_product<double>(5, 3, 2, threads);
    check_product<double>(61, 39, 300, threads);
  }
}

TEST(Gemm, EmptyProducts) {
  std::vector<float> c = {5, 5};
  gemm(nullptr, Gemm<float>{.m = 1, .n = 2, .k = 0, .c = c.data(), .c_row = 2, .accumulate = true});
  EXPECT_EQ(c, (std::vector<float>{5, 5}));
  gemm(nullptr, Gemm<float>{.m = 1, .n = 2, .k = 0, .c = c.data(), .c_row = 2});
  EXPECT_EQ(c, (std::vector<float>{0, 0}));
  gemm(nullptr, Gemm<float>{.m = 0, .n = 2, .k = 3});
}

// `tolerance` is about two ulps of 1: one rounding of a product, one of a partial sum, of values
// around 1, so that n terms are allowed n of it; exp() is exact to two ulps of its result and to
// half an ulp of its argument, below 4 here.
template <class Real>
void check_vectors(double tolerance) {
  for (int64_t n : {1, 3, 8, 31, 64, 129}) {
    const auto x = random_values<Real>(static_cast<size_t>(n), 4);
    std::vector<std::vector<Real>> rows;
    std::vector<const Real*> pointers;
    std::vector<Real> weights;
    for (uint64_t r = 0; r < 7; ++r) {
      rows.push_back(random_values<Real>(static_cast<size_t>(n), 10 + r));
      weights.push_back(static_cast<Real>(r) - Real{2.5});
    }
    for (const auto& row : rows) {
      pointers.push_back(row.data());
    }
    std::vector<Real> products(7), sum(static_cast<size_t>(n), Real{1}), e(static_cast<size_t>(n));
    dots(x.data(), pointers.data(), 7, n, products.data());
    combine(weights.data(), pointers.data(), 7, n, true, sum.data());
    const Real total = exp_sum(x.data(), n, Real{0.5}, e.data());
    double want_total = 0;
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      double want = 1;
      for (size_t r = 0; r < 7; ++r) {
        want += static_cast<double>(weights[r]) * static_cast<double>(rows[r][i]);
      }
      EXPECT_NEAR(static_cast<double>(sum[i]), want, 10 * tolerance);
      const double exponential = std::exp(static_cast<double>(x[i]) - 0.5);
      EXPECT_NEAR(static_cast<double>(e[i]), exponential, 4 * exponential * tolerance);
      want_total += exponential;
    }
    EXPECT_NEAR(static_cast<double>(total), want_total, 4 * want_total * tolerance);
    for (size_t r = 0; r < 7; ++r) {
      double want = 0;
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        want += static_cast<double>(x[i]) * static_cast<double>(rows[r][i]);
      }
      EXPECT_NEAR(static_cast<double>(products[r]), want, static_cast<double>(n) * tolerance);
      EXPECT_NEAR(static_cast<double>(dot(x.data(), rows[r].data(), n)),
                  want,
                  static_cast<double>(n) * tolerance);
    }
  }
}

TEST(Vector, AgreesWithPlainSums) {
  check_vectors<float>(2e-7);
  check_vectors<double>(1e-15);
}

}  // namespace
}  // namespace cachalot::train
