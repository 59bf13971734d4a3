#include "train/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "train/gemm.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

struct Polynomial {
  double a, b, c;  // x <- a x + (b A + c A^2) x, A = x x^T
};
constexpr Polynomial kSpread = {3.4445, -4.7750, 2.0315};
constexpr Polynomial kSettle = {2.0, -1.5, 0.5};
constexpr int kSpreadSteps = 8;
constexpr int kSettleSteps = 2;

template <class Real>
void transpose(int64_t rows, int64_t columns, const Real* x, Real* y) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      y[j * rows + i] = x[i * columns + j];
    }
  }
}

// One iteration on x [n, m], n <= m. `a` [n, n], `b` [n, n] and `next` [n, m] are scratch.
template <class Real>
void newton_schulz_step(ThreadPool* pool,
                        const Polynomial& p,
                        int64_t n,
                        int64_t m,
                        Real* x,
                        Real* a,
                        Real* b,
                        Real* next) {
  gemm(pool, Gemm<Real>{n, n, m, x, m, 1, x, 1, m, a, n, false});
  gemm(pool, Gemm<Real>{n, n, n, a, n, 1, a, n, 1, b, n, false});
  for (int64_t i = 0; i < n * n; ++i) {
    b[i] = static_cast<Real>(p.b) * a[i] + static_cast<Real>(p.c) * b[i];
  }
  gemm(pool, Gemm<Real>{n, m, n, b, n, 1, x, m, 1, next, m, false});
  for (int64_t i = 0; i < n * m; ++i) {
    x[i] = static_cast<Real>(p.a) * x[i] + next[i];
  }
}

}  // namespace

template <class Real>
void hybrid_newton_schulz(ThreadPool* pool, int64_t rows, int64_t columns, Real* x) {
  const int64_t size = rows * columns, n = std::min(rows, columns), m = std::max(rows, columns);
  const Real norm = std::sqrt(dot(x, x, size));
  if (norm == Real{0}) {
    return;
  }
  std::vector<Real> wide(static_cast<size_t>(size)), next(wide);
  std::vector<Real> a(static_cast<size_t>(n * n)), b(a);
  if (rows > columns) {
    transpose(rows, columns, x, wide.data());
  } else {
    std::copy_n(x, size, wide.data());
  }
  for (Real& value : wide) {
    value /= norm;
  }
  for (int step = 0; step < kSpreadSteps + kSettleSteps; ++step) {
    newton_schulz_step(pool,
                       step < kSpreadSteps ? kSpread : kSettle,
                       n,
                       m,
                       wide.data(),
                       a.data(),
                       b.data(),
                       next.data());
  }
  if (rows > columns) {
    transpose(columns, rows, wide.data(), x);
  } else {
    std::copy_n(wide.data(), size, x);
  }
}

template <class Real>
void muon_update(ThreadPool* pool,
                 const MuonConstants& constants,
                 double rate,
                 int64_t rows,
                 int64_t columns,
                 const Real* gradient,
                 Real* momentum,
                 Real* weight) {
  const int64_t size = rows * columns;
  const auto mu = static_cast<Real>(constants.momentum);
  std::vector<Real> update(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    momentum[i] = mu * momentum[i] + gradient[i];
    update[static_cast<size_t>(i)] = mu * momentum[i] + gradient[i];
  }
  hybrid_newton_schulz(pool, rows, columns, update.data());
  const auto keep = static_cast<Real>(1 - rate * constants.weight_decay);
  const auto step = static_cast<Real>(rate * constants.update_rms *
                                      std::sqrt(static_cast<double>(std::max(rows, columns))));
  for (int64_t i = 0; i < size; ++i) {
    weight[i] = weight[i] * keep - step * update[static_cast<size_t>(i)];
  }
}

template <class Real>
void sinkhorn_update(const SinkhornConstants& constants,
                     double rate,
                     int64_t rows,
                     int64_t columns,
                     const Real* gradient,
                     Real* momentum,
                     Real* weight) {
  const auto beta = static_cast<Real>(constants.average);
  const auto eps = static_cast<Real>(constants.eps);
  const auto n = static_cast<size_t>(columns);
  // The balanced matrix is diag(row) E diag(column) of the expected gradient E, which is recomputed
  // from the momentum wherever it is needed.
  std::vector<Real> norm(static_cast<size_t>(rows)), row(norm), column(n, Real{1}), squares(n);
  std::vector<Real> e(n);
  const auto expected = [&](int64_t i) {
    const Real *m = momentum + i * columns, *g = gradient + i * columns;
    for (size_t j = 0; j < n; ++j) {
      e[j] = beta * m[j] + (Real{1} - beta) * g[j];
    }
  };
  double total = 0;
  for (int64_t i = 0; i < rows; ++i) {
    Real* m = momentum + i * columns;
    const Real* g = gradient + i * columns;
    for (size_t j = 0; j < n; ++j) {
      m[j] = beta * m[j] + (Real{1} - beta) * g[j];
    }
    expected(i);
    norm[static_cast<size_t>(i)] = std::sqrt(dot(e.data(), e.data(), columns));
    total += static_cast<double>(norm[static_cast<size_t>(i)]);
  }
  // The mean is over all rows, those without a gradient included.
  const auto least = static_cast<Real>(constants.threshold * total / static_cast<double>(rows));
  const auto active = [&](int64_t i) { return norm[static_cast<size_t>(i)] > least; };
  for (int k = 1; k <= constants.normalizations; k += 2) {
    std::fill(squares.begin(), squares.end(), Real{0});
    const bool last = k == constants.normalizations;
    const auto step =
        static_cast<Real>(constants.update_rms * rate * std::sqrt(static_cast<double>(columns)));
    for (int64_t i = 0; i < rows; ++i) {
      if (!active(i)) {
        continue;
      }
      expected(i);
      Real& scale = row[static_cast<size_t>(i)];
      Real sum = 0;
      for (size_t j = 0; j < n; ++j) {
        e[j] *= column[j];
        sum += e[j] * e[j];
      }
      scale = k == 1 ? Real{1} / (norm[static_cast<size_t>(i)] + eps)
                     : scale / (scale * std::sqrt(sum) + eps);
      for (size_t j = 0; j < n; ++j) {
        const Real value = scale * e[j];
        if (last) {
          weight[i * columns + static_cast<int64_t>(j)] -= step * value;
        } else {
          squares[j] += value * value;
        }
      }
    }
    for (size_t j = 0; j < n && !last; ++j) {
      // An empty column keeps its factor: dividing by eps alone would overflow.
      if (squares[j] > Real{0}) {
        column[j] /= std::sqrt(squares[j]) + eps;
      }
    }
  }
}

template <class Real>
void adam_update(const AdamConstants& constants,
                 double rate,
                 double weight_decay,
                 int64_t step,
                 int64_t n,
                 const Real* gradient,
                 Real* first,
                 Real* second,
                 Real* weight) {
  const auto b1 = static_cast<Real>(constants.first), b2 = static_cast<Real>(constants.second);
  const auto t = static_cast<double>(step);
  const auto correct1 = static_cast<Real>(1 / (1 - std::pow(constants.first, t)));
  const auto correct2 = static_cast<Real>(1 / (1 - std::pow(constants.second, t)));
  const auto keep = static_cast<Real>(1 - rate * weight_decay);
  for (int64_t i = 0; i < n; ++i) {
    first[i] = b1 * first[i] + (Real{1} - b1) * gradient[i];
    second[i] = b2 * second[i] + (Real{1} - b2) * gradient[i] * gradient[i];
    weight[i] =
        weight[i] * keep - static_cast<Real>(rate) * first[i] * correct1 /
                               (std::sqrt(second[i] * correct2) + static_cast<Real>(constants.eps));
  }
}

void balance_bias(double speed, const std::vector<int64_t>& load, float* bias) {
  int64_t total = 0;
  for (int64_t n : load) {
    total += n;
  }
  const auto experts = static_cast<int64_t>(load.size());
  for (size_t e = 0; e < load.size(); ++e) {
    // load < mean without rounding: load * experts < total.
    const int64_t excess = load[e] * experts - total;
    bias[e] += static_cast<float>(excess < 0 ? speed : excess > 0 ? -speed : 0.0);
  }
}

double max_violation(const std::vector<int64_t>& load) {
  int64_t total = 0, most = 0;
  for (int64_t n : load) {
    total += n;
    most = std::max(most, n);
  }
  return total == 0 ? 0
                    : static_cast<double>(most) * static_cast<double>(load.size()) /
                              static_cast<double>(total) -
                          1;
}

double learning_rate(const Schedule& s, int64_t step, double tokens) {
  if (step < s.warmup_steps) {
    return s.peak * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
  }
  if (s.decay_end <= s.decay_begin || tokens <= s.decay_begin) {
    return s.peak;
  }
  if (tokens >= s.decay_end) {
    return s.last;
  }
  const double x = (tokens - s.decay_begin) / (s.decay_end - s.decay_begin);
  const double share =
      s.decay == Schedule::Decay::kCosine ? (1 + std::cos(std::numbers::pi * x)) / 2 : 1 - x;
  return s.last + (s.peak - s.last) * share;
}

#define CACHALOT_INSTANTIATE(Real)                                                             \
  template void hybrid_newton_schulz(ThreadPool*, int64_t, int64_t, Real*);                    \
  template void muon_update(                                                                   \
      ThreadPool*, const MuonConstants&, double, int64_t, int64_t, const Real*, Real*, Real*); \
  template void sinkhorn_update(                                                               \
      const SinkhornConstants&, double, int64_t, int64_t, const Real*, Real*, Real*);          \
  template void adam_update(                                                                   \
      const AdamConstants&, double, double, int64_t, int64_t, const Real*, Real*, Real*, Real*);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
