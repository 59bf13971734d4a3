#include "train/update.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

#include "base/rng.h"
#include "train/vector.h"

namespace cachalot::train {
namespace {

using Values = std::vector<double>;

void expect_near(const Values& got, const Values& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], want[i], tolerance) << i;
  }
}

template <class Real>
std::vector<Real> normal_values(int64_t n, uint64_t seed) {
  std::vector<Real> values;
  const Philox random(seed);
  for (int64_t i = 0; i < n; ++i) {
    values.push_back(static_cast<Real>(random.normal(static_cast<uint64_t>(i))));
  }
  return values;
}

// The published table of what the ten steps do to a singular value that is the given share of the
// Frobenius norm.
TEST(NewtonSchulz, MapOfSingularValues) {
  const std::vector<std::pair<double, double>> table = {{1, 1.00001431},
                                                        {0.5, 1.00016323},
                                                        {0.1, 1.00006071},
                                                        {1e-2, 1.00001916},
                                                        {1e-3, 1.00000121},
                                                        {1e-4, 1.00201479},
                                                        {3e-5, 1.00175275},
                                                        {1e-5, 0.68582713},
                                                        {3e-6, 0.23456662}};
  for (const auto& [share, want] : table) {
    Values x = {share, 0, 0, std::sqrt(1 - share * share)};
    hybrid_newton_schulz(nullptr, 2, 2, x.data());
    EXPECT_NEAR(x[0], want, 1e-8) << share;
    EXPECT_NEAR(x[1], 0, 1e-12);
  }
}

// The singular values of a full-rank matrix end within 2.1e-3 of 1, so x x^T is within 4.3e-3 of 1.
template <class Real>
void check_orthogonal(int64_t rows, int64_t columns) {
  std::vector<Real> x = normal_values<Real>(rows * columns, 3);
  hybrid_newton_schulz(nullptr, rows, columns, x.data());
  const int64_t n = std::min(rows, columns), m = std::max(rows, columns);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < m; ++k) {
        const auto at = [&](int64_t r) {
          return static_cast<double>(
              x[static_cast<size_t>(rows <= columns ? r * columns + k : k * columns + r)]);
        };
        sum += at(i) * at(j);
      }
      EXPECT_NEAR(sum, i == j ? 1.0 : 0.0, 4.3e-3) << rows << " x " << columns;
    }
  }
}

TEST(NewtonSchulz, OrthogonalFactorOfAnyShape) {
  for (const auto& [rows, columns] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 40}, {40, 1}, {16, 40}, {48, 20}, {9, 9}}) {
    check_orthogonal<float>(rows, columns);
    check_orthogonal<double>(rows, columns);
  }
  std::vector<float> zero(12, 0.0f);
  hybrid_newton_schulz(nullptr, 3, 4, zero.data());
  EXPECT_EQ(zero, std::vector<float>(12, 0.0f));
}

TEST(Muon, GoldenSteps) {
  Values w = {.5, -.25, .125, 1, 0, -.5}, m(6, 0.0);
  const std::vector<Values> gradients = {
      {1, 2, 3, 4, 5, 6}, {1, 0, -1, 0, 1, 0}, {-2, 1, 0, .5, -1, 3}};
  const std::vector<Values> wanted = {
      {0.501302106, -0.250108810, 0.122355274, 0.996796247, -0.001763936, -0.500824118},
      {0.497842512, -0.250099284, 0.123187296, 0.995287254, -0.003968135, -0.502466456},
      {0.499244314, -0.252291348, 0.122667277, 0.992972605, -0.004540558, -0.504730017}};
  for (size_t step = 0; step < gradients.size(); ++step) {
    muon_update(nullptr, MuonConstants{}, 0.01, 2, 3, gradients[step].data(), m.data(), w.data());
    expect_near(w, wanted[step], 1e-9);
  }
  // Accumulated, not averaged: G3 + 0.95 G2 + 0.95^2 G1.
  EXPECT_NEAR(m[0], -2 + 0.95 + 0.9025, 1e-12);
}

// "Update RMS 0.18" is true to 0.2 % for a full-rank gradient, also for one whose singular values
// span three decades, which five steps with the first coefficients would turn into about 0.15.
TEST(Muon, UpdateRmsOverThreeDecades) {
  const int64_t rows = 24, columns = 56;
  for (const double decades : {0.0, 3.0}) {
    std::vector<float> w(static_cast<size_t>(rows * columns), 0.0f), m(w);
    // Orthogonal factors of a random matrix, with singular values from 1 down to 10^-decades.
    Values u = normal_values<double>(rows * rows, 6), v = normal_values<double>(rows * columns, 7);
    hybrid_newton_schulz(nullptr, rows, rows, u.data());
    hybrid_newton_schulz(nullptr, rows, columns, v.data());
    std::vector<float> g(w.size(), 0.0f);
    for (int64_t k = 0; k < rows; ++k) {
      const double size =
          std::pow(10.0, -decades * static_cast<double>(k) / static_cast<double>(rows - 1));
      for (int64_t i = 0; i < rows; ++i) {
        axpy(static_cast<float>(size * u[static_cast<size_t>(i * rows + k)]),
             std::vector<float>(v.begin() + k * columns, v.begin() + (k + 1) * columns).data(),
             columns,
             g.data() + i * columns);
      }
    }
    muon_update(nullptr, MuonConstants{}, 1.0, rows, columns, g.data(), m.data(), w.data());
    const double rms = std::sqrt(static_cast<double>(dot(w.data(), w.data(), rows * columns)) /
                                 static_cast<double>(rows * columns));
    EXPECT_NEAR(rms, 0.18, 0.18 * 2e-3) << decades;
  }
}

// A hundred steps in float stay with those in double: each adds the roundings of one update, 2^-24
// of the weights, and of ten Newton-Schulz products of up to 20 terms.
TEST(Muon, HundredStepsAgreeWithDouble) {
  const int64_t rows = 12, columns = 20, size = rows * columns;
  std::vector<float> w = normal_values<float>(size, 1), m(w.size(), 0.0f);
  Values exact(w.begin(), w.end()), exact_m(w.size(), 0.0);
  for (uint64_t step = 0; step < 100; ++step) {
    const std::vector<float> g = normal_values<float>(size, 100 + step);
    const Values exact_g(g.begin(), g.end());
    muon_update(nullptr, MuonConstants{}, 0.01, rows, columns, g.data(), m.data(), w.data());
    muon_update(nullptr,
                MuonConstants{},
                0.01,
                rows,
                columns,
                exact_g.data(),
                exact_m.data(),
                exact.data());
  }
  double difference = 0, squares = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    difference += std::pow(static_cast<double>(w[i]) - exact[i], 2);
    squares += exact[i] * exact[i];
  }
  // 100 roundings of 2^-24 in one direction are 6e-6; the updates' own are smaller by their rate.
  EXPECT_LT(std::sqrt(difference / squares), 1e-5);
}

// From a zero start one momentum is a multiple of the other, and both updates ignore the scale, so
// only the momenta tell a mix-up.
TEST(Momentum, MuonAccumulatesAndSinkhornAverages) {
  const Values g = normal_values<double>(12, 5);
  Values w(12, 0.0), accumulated(12, 0.0), averaged(12, 0.0);
  for (int step = 0; step < 3; ++step) {
    muon_update(nullptr, MuonConstants{}, 0.01, 3, 4, g.data(), accumulated.data(), w.data());
    sinkhorn_update(SinkhornConstants{}, 0.01, 3, 4, g.data(), averaged.data(), w.data());
  }
  for (size_t i = 0; i < g.size(); ++i) {
    EXPECT_NEAR(accumulated[i], (1 + 0.95 + 0.9025) * g[i], 1e-12);
    EXPECT_NEAR(averaged[i], (1 - 0.857375) * g[i], 1e-12);
  }
}

TEST(Sinkhorn, GoldenSteps) {
  Values w = {.1, .2, .3, 0, 0, 0, -.1, .1, .4, 1, 1, 1}, m(12, 0.0);
  const Values g1 = {1, 2, 2, 0, 0, 0, 3, -1, .5, 1e-4, 1e-4, 2e-4};
  const Values g2 = {0, 0, 0, 0, 0, 0, -1, 2, .25, 1, 0, 0};
  sinkhorn_update(SinkhornConstants{}, 0.01, 4, 3, g1.data(), m.data(), w.data());
  expect_near(w,
              {0.099476863,
               0.198016748,
               0.297652014,
               0,
               0,
               0,
               -0.102513023,
               0.101587844,
               0.399060070,
               1,
               1,
               1},
              1e-9);
  expect_near(m, {.05, .1, .1, 0, 0, 0, .15, -.05, .025, 5e-6, 5e-6, 1e-5}, 1e-12);
  sinkhorn_update(SinkhornConstants{}, 0.01, 4, 3, g2.data(), m.data(), w.data());
  expect_near(w,
              {0.098855649,
               0.196527558,
               0.294984354,
               0,
               0,
               0,
               -0.103076840,
               0.098913643,
               0.397559816,
               0.996882309,
               0.999999827,
               0.999999380},
              1e-9);
  expect_near(
      m, {.0475, .095, .095, 0, 0, 0, .0925, .0525, .03625, .05000475, 4.75e-6, 9.5e-6}, 1e-12);
}

// Algorithm 1 as it is written: a dense matrix, rows and columns divided in turn.
Values dense_sinkhorn(const SinkhornConstants& c, int64_t rows, int64_t columns, const Values& g) {
  const auto m = static_cast<size_t>(rows), n = static_cast<size_t>(columns);
  Values u(g), norm(m, 0.0);
  double mean = 0;
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      // From a zero start the Nesterov form is (1 - b)(1 + b) times the gradient.
      u[i * n + j] *= (1 - c.average) * (1 + c.average);
      norm[i] += u[i * n + j] * u[i * n + j];
    }
    norm[i] = std::sqrt(norm[i]);
    mean += norm[i] / static_cast<double>(m);
  }
  for (size_t i = 0; i < m * n; ++i) {
    u[i] = norm[i / n] <= c.threshold * mean ? 0 : u[i];
  }
  for (int k = 1; k <= c.normalizations; ++k) {
    const bool by_row = k % 2 == 1;
    for (size_t line = 0; line < (by_row ? m : n); ++line) {
      double sum = 0;
      for (size_t i = 0; i < (by_row ? n : m); ++i) {
        const double v = u[by_row ? line * n + i : i * n + line];
        sum += v * v;
      }
      for (size_t i = 0; i < (by_row ? n : m); ++i) {
        u[by_row ? line * n + i : i * n + line] /= std::sqrt(sum) + c.eps;
      }
    }
  }
  return u;
}

TEST(Sinkhorn, VectorFormAgreesWithTheDenseAlgorithm) {
  const int64_t rows = 300, columns = 12;
  Values g = normal_values<double>(rows * columns, 11);
  for (int64_t i = 0; i < rows; ++i) {
    // Zipf rows, a third of them zero; skewed columns, one of them zero.
    const double size = i % 3 == 0 ? 0 : 1.0 / static_cast<double>(1 + i * i * i);
    for (int64_t j = 0; j < columns; ++j) {
      g[static_cast<size_t>(i * columns + j)] *= j == 5 ? 0 : size * static_cast<double>(1 + j);
    }
  }
  const SinkhornConstants constants;
  const Values want = dense_sinkhorn(constants, rows, columns, g);
  const double factor = constants.update_rms * std::sqrt(static_cast<double>(columns));
  Values w(g.size(), 0.0), m(g.size(), 0.0);
  sinkhorn_update(constants, 1.0, rows, columns, g.data(), m.data(), w.data());
  std::vector<float> wf(g.size(), 0.0f), mf(g.size(), 0.0f);
  const std::vector<float> gf(g.begin(), g.end());
  sinkhorn_update(constants, 1.0, rows, columns, gf.data(), mf.data(), wf.data());
  int64_t active = 0;
  Values squares(static_cast<size_t>(columns), 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const auto at = static_cast<size_t>(i * columns + j);
      EXPECT_NEAR(-w[at] / factor, want[at], 1e-12);
      // Twelve roundings of 2^-24 per normalization, eleven of them: 7.9e-6.
      EXPECT_NEAR(static_cast<double>(-wf[at]) / factor, want[at], 1e-5);
      const double u = w[at] / constants.update_rms;
      sum += u * u;
      squares[static_cast<size_t>(j)] += u * u;
    }
    active += sum > 0;
    if (sum > 0) {
      EXPECT_NEAR(sum / static_cast<double>(columns), 1.0, 2e-6);
    }
  }
  EXPECT_GT(active, 20);
  EXPECT_LT(active, 100);
  for (int64_t j = 0; j < columns; ++j) {
    // 11 columns share what 12 would.
    const double rms = std::sqrt(squares[static_cast<size_t>(j)] / static_cast<double>(active));
    EXPECT_NEAR(rms, j == 5 ? 0.0 : std::sqrt(12.0 / 11.0), 2e-3) << j;
  }
}

// The mean row norm counts rows of zeros: one loud row among 99 silent ones makes a mean of 0.01,
// so a row of 2e-5 is above a thousandth of it; of the two rows alone the mean would be 0.5.
TEST(Sinkhorn, MeanRowNormCountsRowsOfZeros) {
  Values g(200, 0.0), m(200, 0.0), w(200, 0.0);
  g[0] = 1;
  g[3] = 2e-5;
  g[4] = 0.5e-5;
  sinkhorn_update(SinkhornConstants{}, 0.01, 100, 2, g.data(), m.data(), w.data());
  EXPECT_NE(w[0], 0);
  EXPECT_NE(w[3], 0);
  EXPECT_EQ(w[4], 0);
  EXPECT_NE(m[4], 0) << "a quiet row keeps its momentum";
}

// Without a guard the factor of a column of zeros grows by 1 / eps with each normalization, leaves
// the range of float and turns 0 * inf into NaN.
TEST(Sinkhorn, ColumnOfZerosStaysFinite) {
  std::vector<float> g = normal_values<float>(40 * 6, 2), m(g.size(), 0.0f), w(g.size(), 1.0f);
  for (size_t i = 3; i < g.size(); i += 6) {
    g[i] = 0;
  }
  sinkhorn_update(SinkhornConstants{}, 0.01, 40, 6, g.data(), m.data(), w.data());
  for (size_t i = 0; i < w.size(); ++i) {
    ASSERT_TRUE(std::isfinite(w[i])) << i;
    EXPECT_EQ(w[i] == 1.0f, i % 6 == 3) << i;
  }
}

// A first step moves by the rate down to gradients far below what BF16 or a flushed eps would keep
// apart, and a weight without a gradient does not become 0 / 0.
TEST(Adam, EpsilonIsNotFlushedAndMomentsAreFloat) {
  std::vector<float> w(3, 1.0f), m(3, 0.0f), v(3, 0.0f);
  const std::vector<float> first = {1e-16f, 1.0f, 0.0f};
  adam_update(AdamConstants{}, 0.01, 0.0, 1, 3, first.data(), m.data(), v.data(), w.data());
  EXPECT_NEAR(w[0], 0.99, 2e-6);
  EXPECT_EQ(w[2], 1.0f);
  EXPECT_NEAR(v[0], 0.05e-32, 1e-38);
  // 1 + 2^-10 squared: eight bits of mantissa would lose it.
  const std::vector<float> second = {1.0f + 0x1p-10f};
  std::vector<float> x = {0}, mx = {0}, vx = {0};
  adam_update(AdamConstants{}, 0.01, 0.0, 1, 1, second.data(), mx.data(), vx.data(), x.data());
  // 1 - 0.95f is off by up to 2^-25.
  EXPECT_NEAR(vx[0], 0.05 * std::pow(1 + 0x1p-10, 2), 3e-8);
}

TEST(Adam, TinyEpsilonAndDecay) {
  // The first step moves by the rate whatever the gradient, down to where eps acts.
  std::vector<float> w = {1, 1, 1}, m(3, 0.0f), v(3, 0.0f);
  const std::vector<float> g = {1e-15f, -2.0f, 0.0f};
  adam_update(AdamConstants{}, 0.01, 0.0, 1, 3, g.data(), m.data(), v.data(), w.data());
  EXPECT_NEAR(w[0], 0.99, 1e-5);
  EXPECT_NEAR(w[1], 1.01, 1e-6);
  EXPECT_EQ(w[2], 1.0f);
  Values x = {2}, first = {0}, second = {0};
  const Values one = {0.5}, two = {-1};
  adam_update(AdamConstants{}, 0.1, 0.1, 1, 1, one.data(), first.data(), second.data(), x.data());
  EXPECT_NEAR(x[0], 2 * 0.99 - 0.1, 1e-12);
  adam_update(AdamConstants{}, 0.1, 0.1, 2, 1, two.data(), first.data(), second.data(), x.data());
  const double m2 = (0.9 * 0.05 - 0.1) / (1 - 0.81);
  const double v2 = (0.95 * 0.0125 + 0.05) / (1 - 0.9025);
  EXPECT_NEAR(x[0], 1.88 * 0.99 - 0.1 * m2 / std::sqrt(v2), 1e-12);
}

TEST(Schedule, ReleasedPlan) {
  const Schedule plan{.peak = 2.6e-4,
                      .last = 2.6e-5,
                      .warmup_steps = 2000,
                      .decay_begin = 28e12,
                      .decay_end = 40e12};
  EXPECT_EQ(learning_rate(plan, 0, 0), 0);
  EXPECT_NEAR(learning_rate(plan, 1000, 1e11), 1.3e-4, 1e-9);
  EXPECT_NEAR(learning_rate(plan, 2000, 2e11), 2.6e-4, 1e-9);
  EXPECT_NEAR(learning_rate(plan, 300000, 28e12), 2.6e-4, 1e-9);
  EXPECT_NEAR(learning_rate(plan, 300000, 31e12), 2.2573149340e-4, 1e-13);
  EXPECT_NEAR(learning_rate(plan, 300000, 34e12), 1.43e-4, 1e-13);
  EXPECT_NEAR(learning_rate(plan, 300000, 37e12), 6.0268506601e-5, 1e-13);
  EXPECT_NEAR(learning_rate(plan, 300000, 40e12), 2.6e-5, 1e-13);
  EXPECT_NEAR(learning_rate(plan, 300000, 45e12), 2.6e-5, 1e-13);
  Schedule linear = plan;
  linear.decay = Schedule::Decay::kLinear;
  EXPECT_NEAR(learning_rate(linear, 300000, 31e12), 2.6e-4 - 0.25 * 2.34e-4, 1e-13);
}

// The inverse of the normal distribution function, by bisection.
double normal_quantile(double p) {
  double low = -8, high = 8;
  for (int i = 0; i < 80; ++i) {
    const double x = (low + high) / 2;
    (std::erfc(-x / std::numbers::sqrt2) / 2 < p ? low : high) = x;
  }
  return low;
}

// Skewed experts even out at the published pace: E = 32, K = 4, speed 1e-2.
TEST(BalanceBias, EvensOutASkewedRouter) {
  constexpr int64_t kExperts = 32, kChosen = 4, kTokens = 512;
  std::vector<float> bias(kExperts, 0.0f);
  std::vector<double> seen;
  const Philox random(21);
  uint64_t draw = 0;
  for (int step = 0; step <= 50; ++step) {
    std::vector<int64_t> load(kExperts, 0);
    for (int64_t t = 0; t < kTokens; ++t) {
      std::vector<std::pair<double, size_t>> scores;
      for (size_t e = 0; e < kExperts; ++e) {
        const double skew = 0.5 * normal_quantile((static_cast<double>(e) + 0.5) / kExperts);
        const double logit = skew + random.normal(draw++);
        scores.emplace_back(std::sqrt(std::log1p(std::exp(logit))) + static_cast<double>(bias[e]),
                            e);
      }
      std::partial_sort(scores.begin(), scores.begin() + kChosen, scores.end(), std::greater<>());
      for (int64_t i = 0; i < kChosen; ++i) {
        ++load[scores[static_cast<size_t>(i)].second];
      }
    }
    seen.push_back(max_violation(load));
    balance_bias(1e-2, load, bias.data());
  }
  // Published with 8192 tokens per step: 2.37, 1.55, 0.75, 0.10. A load of 64 +- 8 rows moves the
  // largest of 32 by about two deviations, a quarter.
  EXPECT_NEAR(seen[0], 2.37, 0.4);
  EXPECT_NEAR(seen[10], 1.55, 0.4);
  EXPECT_NEAR(seen[20], 0.75, 0.4);
  EXPECT_LT(seen[50], 0.5);
}

TEST(BalanceBias, MovesByTheSignOfTheExcess) {
  std::vector<float> bias = {0, 0, 0, 0};
  balance_bias(1e-3, {5, 3, 4, 4}, bias.data());
  EXPECT_EQ(bias, (std::vector<float>{-1e-3f, 1e-3f, 0, 0}));
  balance_bias(1e-3, {0, 0, 0, 0}, bias.data());
  EXPECT_EQ(bias, (std::vector<float>{-1e-3f, 1e-3f, 0, 0}));
  EXPECT_EQ(max_violation({6, 2, 4, 4}), 0.5);
  EXPECT_EQ(max_violation({0, 0}), 0);
}

}  // namespace
}  // namespace cachalot::train
