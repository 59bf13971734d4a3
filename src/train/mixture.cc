#include "train/mixture.h"

#include <algorithm>
#include <cmath>

#include "train/gemm.h"
#include "train/norm.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

constexpr int64_t kGrain = 16;

// sqrt(ln(1 + e^z)).
template <class Real>
Real router_score(Real z) {
  return std::sqrt(z > Real{20} ? z : std::log1p(std::exp(z)));
}

// Its derivative; for very negative z the score underflows and the limit e^(z/2) / 2 is used.
template <class Real>
Real router_score_slope(Real z, Real score) {
  return score > Real{0} ? sigmoid(z) / (Real{2} * score) : std::exp(z / 2) / 2;
}

// Keeps a row whose scores all underflow at zero weights instead of NaN.
constexpr double kWeightEps = 1e-20;

template <class Real>
struct Scores {
  Scores(const RouterRows<Real>& args, int64_t row) : z(static_cast<size_t>(args.experts)), s(z) {
    for (size_t e = 0; e < z.size(); ++e) {
      z[e] = args.logits[row * args.experts + static_cast<int64_t>(e)] / args.temperature;
      s[e] = router_score(z[e]);
      total += s[e];
    }
  }
  std::vector<Real> z, s;
  Real total = static_cast<Real>(kWeightEps);
};

// What the scores of the chosen experts are divided by: several share one weight, a single one
// weighs its score.
template <class Real>
Real chosen_sum(const Scores<Real>& scores, const int32_t* ids, int64_t k) {
  if (k == 1) {
    return Real{1};
  }
  Real sum = static_cast<Real>(kWeightEps);
  for (int64_t i = 0; i < k; ++i) {
    sum += scores.s[static_cast<size_t>(ids[i])];
  }
  return sum;
}

// How often each expert was chosen by rows [begin, end).
template <class Real>
std::vector<int64_t> counts_of(const RouterRows<Real>& args,
                               const int32_t* ids,
                               int64_t begin,
                               int64_t end) {
  std::vector<int64_t> counts(static_cast<size_t>(args.experts), 0);
  for (int64_t i = begin * args.chosen; i < end * args.chosen; ++i) {
    ++counts[static_cast<size_t>(ids[i])];
  }
  return counts;
}

}  // namespace

template <class Real>
void route(ThreadPool* pool, const RouterRows<Real>& args, int32_t* ids, Real* weights) {
  const int64_t k = args.chosen;
  parallel_for(pool, args.rows, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> order(static_cast<size_t>(args.experts));
    for (int64_t t = begin; t < end; ++t) {
      const Scores<Real> scores(args, t);
      const Real* bias = args.is_image[t] != 0 ? args.bias_image : args.bias;
      for (size_t e = 0; e < order.size(); ++e) {
        order[e] = static_cast<int32_t>(e);
      }
      // FP32 sums, as the model adds them.
      const auto biased = [&](int32_t e) {
        return static_cast<float>(scores.s[static_cast<size_t>(e)]) + static_cast<float>(bias[e]);
      };
      std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
        const float x = biased(a), y = biased(b);
        return x > y || (x == y && a < b);
      });
      std::sort(order.begin(), order.begin() + k);
      std::copy_n(order.begin(), k, ids + t * k);
      const Real divisor = chosen_sum(scores, ids + t * k, k);
      for (int64_t i = 0; i < k; ++i) {
        weights[t * k + i] = scores.s[static_cast<size_t>(ids[t * k + i])] / divisor * args.scale;
      }
    }
  });
}

template <class Real>
Real balance_loss(const RouterRows<Real>& args,
                  const int32_t* ids,
                  const std::vector<int32_t>& sample_begin) {
  const auto e = static_cast<size_t>(args.experts);
  double loss = 0;
  for (size_t s = 0; s + 1 < sample_begin.size(); ++s) {
    const int64_t begin = sample_begin[s], end = sample_begin[s + 1];
    const std::vector<int64_t> counts = counts_of(args, ids, begin, end);
    std::vector<double> share(e, 0.0);
    for (int64_t t = begin; t < end; ++t) {
      const Scores<Real> scores(args, t);
      for (size_t i = 0; i < e; ++i) {
        share[i] += static_cast<double>(scores.s[i] / scores.total);
      }
    }
    // n rows of weight 1/T each, f = E/(k n) counts, P = share / n.
    for (size_t i = 0; i < e; ++i) {
      loss += static_cast<double>(counts[i]) * share[i] * static_cast<double>(e) /
              static_cast<double>(args.chosen * (end - begin) * args.rows);
    }
  }
  return static_cast<Real>(loss);
}

template <class Real>
void route_backward(ThreadPool* pool,
                    const RouterRows<Real>& args,
                    const int32_t* ids,
                    const Real* dweights,
                    Real coefficient,
                    const std::vector<int32_t>& sample_begin,
                    Real* dlogits) {
  const int64_t k = args.chosen, experts = args.experts;
  for (size_t s = 0; s + 1 < sample_begin.size(); ++s) {
    const int64_t first = sample_begin[s], last = sample_begin[s + 1];
    std::vector<Real> load(static_cast<size_t>(experts), Real{0});
    if (coefficient != Real{0}) {
      const std::vector<int64_t> counts = counts_of(args, ids, first, last);
      const Real unit = coefficient * static_cast<Real>(experts) /
                        static_cast<Real>(k * (last - first) * args.rows);
      for (size_t e = 0; e < load.size(); ++e) {
        load[e] = unit * static_cast<Real>(counts[e]);
      }
    }
    parallel_for(pool, last - first, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t t = first + begin; t < first + end; ++t) {
        const Scores<Real> scores(args, t);
        Real mean = 0;
        for (size_t e = 0; e < load.size(); ++e) {
          mean += load[e] * scores.s[e];
        }
        mean /= scores.total;
        std::vector<Real> ds(load.size());
        for (size_t e = 0; e < load.size(); ++e) {
          ds[e] = (load[e] - mean) / scores.total;
        }
        if (dweights != nullptr) {
          const Real sum = chosen_sum(scores, ids + t * k, k);
          Real along = 0;
          for (int64_t i = 0; k > 1 && i < k; ++i) {
            along += dweights[t * k + i] * scores.s[static_cast<size_t>(ids[t * k + i])] / sum;
          }
          for (int64_t i = 0; i < k; ++i) {
            ds[static_cast<size_t>(ids[t * k + i])] +=
                args.scale / sum * (dweights[t * k + i] - along);
          }
        }
        for (size_t e = 0; e < load.size(); ++e) {
          dlogits[t * experts + static_cast<int64_t>(e)] +=
              ds[e] * router_score_slope(scores.z[e], scores.s[e]) / args.temperature;
        }
      }
    });
  }
}

ExpertRows sort_by_expert(const int32_t* ids, int64_t rows, int64_t chosen, int64_t experts) {
  const auto n = static_cast<size_t>(rows * chosen);
  ExpertRows sorted;
  sorted.begin.assign(static_cast<size_t>(experts + 1), 0);
  sorted.row.resize(n);
  sorted.slot.resize(n);
  sorted.place.resize(n);
  for (size_t i = 0; i < n; ++i) {
    ++sorted.begin[static_cast<size_t>(ids[i]) + 1];
  }
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e) {
    sorted.begin[e + 1] += sorted.begin[e];
  }
  std::vector<int32_t> next(sorted.begin.begin(), sorted.begin.end() - 1);
  for (size_t i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(next[static_cast<size_t>(ids[i])]++);
    sorted.row[at] = static_cast<int32_t>(static_cast<int64_t>(i) / chosen);
    sorted.slot[at] = static_cast<int32_t>(i);
    sorted.place[i] = static_cast<int32_t>(at);
  }
  return sorted;
}

template <class Real>
void swiglu(ThreadPool* pool, const SwigluRows<Real>& args, const ExpertWeights<Real>& w, Real* y) {
  const int64_t f = args.hidden, d = args.width;
  const LinearShape<Real> in{args.rows, f, d, d, f};
  linear_forward(pool, in, args.x, w.w1, args.gate);
  linear_forward(pool, in, args.x, w.w3, args.up);
  parallel_for(pool, args.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Real weight = args.weights == nullptr ? Real{1} : args.weights[t];
      for (int64_t i = t * f; i < (t + 1) * f; ++i) {
        const Real g = std::min(args.gate[i], args.limit);
        const Real u = std::clamp(args.up[i], -args.limit, args.limit);
        args.product[i] = g * sigmoid(g) * u * weight;
      }
    }
  });
  linear_forward(pool, LinearShape<Real>{args.rows, d, f, f, d}, args.product, w.w2, y);
}

template <class Real>
void swiglu_backward(ThreadPool* pool,
                     const SwigluRows<Real>& args,
                     const ExpertWeights<Real>& w,
                     const Real* dy,
                     Real* scratch,
                     Real* dx,
                     Real* dweights,
                     const ExpertWeights<Real>& dw) {
  const int64_t f = args.hidden, d = args.width, n = args.rows * f;
  Real *dproduct = scratch, *dgate = scratch + n, *dup = scratch + 2 * n;
  const LinearShape<Real> out{args.rows, d, f, f, d}, in{args.rows, f, d, d, f};
  linear_weight_gradient(pool, out, dy, args.product, dw.w2);
  gemm(pool, Gemm<Real>{args.rows, f, d, dy, d, 1, w.w2, f, 1, dproduct, f, false});
  parallel_for(pool, args.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Real weight = args.weights == nullptr ? Real{1} : args.weights[t];
      Real along = 0;
      for (int64_t i = t * f; i < (t + 1) * f; ++i) {
        const Real g = std::min(args.gate[i], args.limit);
        const Real u = std::clamp(args.up[i], -args.limit, args.limit);
        const Real s = sigmoid(g), silu = g * s;
        along += dproduct[i] * silu * u;
        const Real da = dproduct[i] * weight;
        dgate[i] = args.gate[i] > args.limit ? Real{0} : da * u * s * (Real{1} + g * (Real{1} - s));
        dup[i] = args.up[i] > args.limit || args.up[i] < -args.limit ? Real{0} : da * silu;
      }
      if (dweights != nullptr) {
        dweights[t] = along;
      }
    }
  });
  linear_weight_gradient(pool, in, dgate, args.x, dw.w1);
  linear_weight_gradient(pool, in, dup, args.x, dw.w3);
  linear_input_gradient(pool, in, dgate, w.w1, dx);
  linear_input_gradient(pool, in, dup, w.w3, dx);
}

#define CACHALOT_INSTANTIATE(Real)                                                               \
  template void route(ThreadPool*, const RouterRows<Real>&, int32_t*, Real*);                    \
  template Real balance_loss(                                                                    \
      const RouterRows<Real>&, const int32_t*, const std::vector<int32_t>&);                     \
  template void route_backward(ThreadPool*,                                                      \
                               const RouterRows<Real>&,                                          \
                               const int32_t*,                                                   \
                               const Real*,                                                      \
                               Real,                                                             \
                               const std::vector<int32_t>&,                                      \
                               Real*);                                                           \
  template void swiglu(ThreadPool*, const SwigluRows<Real>&, const ExpertWeights<Real>&, Real*); \
  template void swiglu_backward(ThreadPool*,                                                     \
                                const SwigluRows<Real>&,                                         \
                                const ExpertWeights<Real>&,                                      \
                                const Real*,                                                     \
                                Real*,                                                           \
                                Real*,                                                           \
                                Real*,                                                           \
                                const ExpertWeights<Real>&);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
