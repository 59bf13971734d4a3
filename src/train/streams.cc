#include "train/streams.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "train/gemm.h"
#include "train/norm.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

constexpr int64_t kMaxStreams = 8;
constexpr int64_t kGrain = 16;
// Rows that pass a Sinkhorn iteration side by side.
constexpr int64_t kLanes = 16;

// Pointers to the M streams of row t.
template <class Real>
void stream_rows(Real* x, const StreamShape& s, int64_t t, Real** rows) {
  for (int64_t j = 0; j < s.streams; ++j) {
    rows[j] = x + (t * s.streams + j) * s.width;
  }
}

// The iteration for kLanes rows at once: value (j, k) of lane l at [(j M + k) kLanes + l].
template <class Real>
class Sinkhorn {
 public:
  Sinkhorn(int64_t m, double eps, int iterations)
      : m_(m),
        eps_(static_cast<Real>(eps)),
        steps_(2 * iterations - 1),
        states_(static_cast<size_t>((steps_ + 2) * size())) {}

  // Of the logits left in input(). All intermediate matrices are kept.
  void forward() {
    softmax();
    for (int64_t step = 0; step < steps_; ++step) {
      const Real* x = state(1 + step);
      Real* y = state(2 + step);
      for_each_line(step, [&](const int64_t* at) {
        Real inverse[kLanes];
        inverse_sum(x, at, inverse);
        for (int64_t i = 0; i < m_; ++i) {
          for (int64_t l = 0; l < kLanes; ++l) {
            y[at[i] + l] = x[at[i] + l] * inverse[l];
          }
        }
      });
    }
  }

  // Turns the gradient of the result, left in `d`, into that of the logits.
  void backward(Real* d) {
    for (int64_t step = steps_ - 1; step >= 0; --step) {
      const Real* x = state(1 + step);
      const Real* y = state(2 + step);
      for_each_line(step, [&](const int64_t* at) {
        Real inverse[kLanes], along[kLanes] = {};
        inverse_sum(x, at, inverse);
        for (int64_t i = 0; i < m_; ++i) {
          for (int64_t l = 0; l < kLanes; ++l) {
            along[l] += d[at[i] + l] * y[at[i] + l];
          }
        }
        for (int64_t i = 0; i < m_; ++i) {
          for (int64_t l = 0; l < kLanes; ++l) {
            d[at[i] + l] = (d[at[i] + l] - along[l]) * inverse[l];
          }
        }
      });
    }
    const Real* p = state(0);
    for (int64_t j = 0; j < m_; ++j) {
      Real along[kLanes] = {};
      for (int64_t k = 0; k < m_; ++k) {
        for (int64_t l = 0; l < kLanes; ++l) {
          along[l] += d[index(j, k) + l] * p[index(j, k) + l];
        }
      }
      for (int64_t k = 0; k < m_; ++k) {
        for (int64_t l = 0; l < kLanes; ++l) {
          d[index(j, k) + l] = p[index(j, k) + l] * (d[index(j, k) + l] - along[l]);
        }
      }
    }
  }

  int64_t size() const { return m_ * m_ * kLanes; }
  Real* input() { return state(0); }
  const Real* result() { return state(1 + steps_); }

 private:
  int64_t index(int64_t j, int64_t k) const { return (j * m_ + k) * kLanes; }
  // 0: logits, then their softmax; 1: that plus eps; 2 + i: after step i.
  Real* state(int64_t i) { return states_.data() + i * size(); }

  // Even steps normalize columns, odd steps rows.
  template <class Body>
  void for_each_line(int64_t step, const Body& body) {
    std::array<int64_t, kMaxStreams> at;
    for (int64_t line = 0; line < m_; ++line) {
      for (int64_t i = 0; i < m_; ++i) {
        at[static_cast<size_t>(i)] = step % 2 == 0 ? index(i, line) : index(line, i);
      }
      body(at.data());
    }
  }
  void inverse_sum(const Real* x, const int64_t* at, Real* inverse) const {
    Real sum[kLanes];
    std::fill_n(sum, kLanes, eps_);
    for (int64_t i = 0; i < m_; ++i) {
      for (int64_t l = 0; l < kLanes; ++l) {
        sum[l] += x[at[i] + l];
      }
    }
    for (int64_t l = 0; l < kLanes; ++l) {
      inverse[l] = Real{1} / sum[l];
    }
  }
  void softmax() {
    Real *p = state(0), *x = state(1);
    for (int64_t j = 0; j < m_; ++j) {
      for (int64_t l = 0; l < kLanes; ++l) {
        Real best = p[index(j, 0) + l], sum = 0;
        for (int64_t k = 1; k < m_; ++k) {
          best = std::max(best, p[index(j, k) + l]);
        }
        for (int64_t k = 0; k < m_; ++k) {
          p[index(j, k) + l] = std::exp(p[index(j, k) + l] - best);
          sum += p[index(j, k) + l];
        }
        for (int64_t k = 0; k < m_; ++k) {
          p[index(j, k) + l] /= sum;
          x[index(j, k) + l] = p[index(j, k) + l] + eps_;
        }
      }
    }
  }

  int64_t m_;
  Real eps_;
  int64_t steps_;
  std::vector<Real> states_;
};

// Logits of lane l are those of row `begin + l`; lanes behind `end` are zero.
template <class Real>
void load_logits(const StreamShape& s,
                 const SiteWeights<Real>& w,
                 const Real* predicted,
                 int64_t begin,
                 int64_t end,
                 Real* lanes) {
  const int64_t m = s.streams, first = 2 * m, n = s.coefficients();
  std::fill_n(lanes, m * m * kLanes, Real{0});
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < m * m; ++i) {
      lanes[i * kLanes + t - begin] = predicted[t * n + first + i] * w.scale[2] + w.base[first + i];
    }
  }
}

}  // namespace

template <class Real>
void expand(ThreadPool* pool,
            const StreamShape& s,
            const Real* x,
            const PendingRows<Real>& pending,
            Real* out) {
  const int64_t m = s.streams;
  parallel_for(pool, s.rows, kGrain, [&](int64_t begin, int64_t end) {
    const Real* rows[kMaxStreams + 1];
    Real weights[kMaxStreams + 1];
    for (int64_t t = begin; t < end; ++t) {
      stream_rows(x, s, t, rows);
      rows[m] = pending.y + t * s.width;
      for (int64_t k = 0; k < m; ++k) {
        for (int64_t j = 0; j < m; ++j) {
          weights[j] = pending.comb[(t * m + j) * m + k];
        }
        weights[m] = pending.post[t * m + k];
        combine(weights, rows, m + 1, s.width, false, out + (t * m + k) * s.width);
      }
    }
  });
}

template <class Real>
void expand_backward(ThreadPool* pool,
                     const StreamShape& s,
                     const Real* x,
                     const PendingRows<Real>& pending,
                     const Real* dout,
                     Real* dx,
                     const PendingRows<Real>& d) {
  const int64_t m = s.streams;
  parallel_for(pool, s.rows, kGrain, [&](int64_t begin, int64_t end) {
    const Real* rows[kMaxStreams];
    Real sums[kMaxStreams];
    for (int64_t t = begin; t < end; ++t) {
      stream_rows(dout, s, t, rows);
      const Real* y = pending.y + t * s.width;
      combine(pending.post + t * m, rows, m, s.width, true, d.y + t * s.width);
      dots(y, rows, m, s.width, sums);
      for (int64_t k = 0; k < m; ++k) {
        d.post[t * m + k] += sums[k];
      }
      for (int64_t j = 0; j < m; ++j) {
        const Real* source = x + (t * m + j) * s.width;
        const int64_t row = (t * m + j) * m;
        combine(pending.comb + row, rows, m, s.width, true, dx + (t * m + j) * s.width);
        dots(source, rows, m, s.width, sums);
        for (int64_t k = 0; k < m; ++k) {
          d.comb[row + k] += sums[k];
        }
      }
    }
  });
}

template <class Real>
void collapse(ThreadPool* pool,
              const StreamShape& s,
              const Real* x,
              const Real* pre,
              const Real* norm,
              double eps,
              const CollapseRows<Real>& kept,
              Real* u) {
  parallel_for(pool, s.rows, kGrain, [&](int64_t begin, int64_t end) {
    const Real* rows[kMaxStreams];
    for (int64_t t = begin; t < end; ++t) {
      stream_rows(x, s, t, rows);
      Real* c = kept.c + t * s.width;
      combine(pre + t * s.streams, rows, s.streams, s.width, false, c);
      kept.factor[t] = rms_norm(c, norm, s.width, eps, u + t * s.width);
    }
  });
}

template <class Real>
void collapse_backward(ThreadPool* pool,
                       const StreamShape& s,
                       const Real* x,
                       const Real* pre,
                       const Real* norm,
                       const CollapseRows<Real>& kept,
                       const Real* du,
                       Real* dx,
                       Real* dpre,
                       Real* dnorm) {
  const int64_t m = s.streams;
  reduce_rows(pool, s.rows, s.width, dnorm, [&](int64_t begin, int64_t end, Real* partial) {
    std::vector<Real> dc(static_cast<size_t>(s.width));
    const Real* rows[kMaxStreams];
    Real sums[kMaxStreams];
    for (int64_t t = begin; t < end; ++t) {
      std::fill(dc.begin(), dc.end(), Real{0});
      rms_norm_backward(kept.c + t * s.width,
                        norm,
                        kept.factor[t],
                        du + t * s.width,
                        s.width,
                        dc.data(),
                        partial);
      for (int64_t j = 0; j < m; ++j) {
        axpy(pre[t * m + j], dc.data(), s.width, dx + (t * m + j) * s.width);
      }
      if (dpre != nullptr) {
        stream_rows(x, s, t, rows);
        dots(dc.data(), rows, m, s.width, sums);
        for (int64_t j = 0; j < m; ++j) {
          dpre[t * m + j] += sums[j];
        }
      }
    }
  });
}

template <class Real>
void site_coefficients(ThreadPool* pool,
                       const StreamShape& s,
                       const SiteConstants& constants,
                       const Real* x,
                       const SiteWeights<Real>& w,
                       const SiteRows<Real>& out) {
  const int64_t m = s.streams, n = s.coefficients(), size = s.row_size();
  if (constants.mixing == Mixing::kPlain) {
    std::fill_n(out.pre, s.rows * m, Real{1});
    std::fill_n(out.post, s.rows * m, Real{1});
    std::fill_n(out.comb, s.rows * m * m, Real{1});
    return;
  }
  linear_forward(pool, LinearShape<Real>{s.rows, n, size, size, n}, x, w.fn, out.predicted);
  const int64_t blocks = (s.rows + kLanes - 1) / kLanes;
  parallel_for(pool, blocks, 1, [&](int64_t first, int64_t last) {
    Sinkhorn<Real> sinkhorn(m, constants.hc_eps, constants.iterations);
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * kLanes, end = std::min(s.rows, begin + kLanes);
      for (int64_t t = begin; t < end; ++t) {
        const Real* row = x + t * size;
        out.factor[t] = Real{1} / std::sqrt(dot(row, row, size) / static_cast<Real>(size) +
                                            static_cast<Real>(constants.rms_eps));
        Real* predicted = out.predicted + t * n;
        for (int64_t i = 0; i < n; ++i) {
          predicted[i] *= out.factor[t];
        }
        for (int64_t j = 0; j < m; ++j) {
          out.pre[t * m + j] =
              sigmoid(predicted[j] * w.scale[0] + w.base[j]) + static_cast<Real>(constants.hc_eps);
          out.post[t * m + j] = Real{2} * sigmoid(predicted[m + j] * w.scale[1] + w.base[m + j]);
        }
      }
      load_logits(s, w, out.predicted, begin, end, sinkhorn.input());
      if (constants.mixing == Mixing::kManifold) {
        sinkhorn.forward();
      }
      const Real* comb =
          constants.mixing == Mixing::kManifold ? sinkhorn.result() : sinkhorn.input();
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t i = 0; i < m * m; ++i) {
          out.comb[t * m * m + i] = comb[i * kLanes + t - begin];
        }
      }
    }
  });
}

template <class Real>
void site_coefficients_backward(ThreadPool* pool,
                                const StreamShape& s,
                                const SiteConstants& constants,
                                const Real* x,
                                const SiteWeights<Real>& w,
                                const SiteRows<Real>& out,
                                const SiteRows<Real>& d,
                                Real* dx,
                                const SiteWeights<Real>& dw) {
  const int64_t m = s.streams, n = s.coefficients(), size = s.row_size();
  if (constants.mixing == Mixing::kPlain) {
    return;
  }
  // Gradients of the logits before scale and base, then of fn . x.
  std::vector<Real> dlogit(static_cast<size_t>(s.rows * n), Real{0});
  const int64_t blocks = (s.rows + kLanes - 1) / kLanes;
  parallel_for(pool, blocks, 1, [&](int64_t first, int64_t last) {
    Sinkhorn<Real> sinkhorn(m, constants.hc_eps, constants.iterations);
    std::vector<Real> lanes(static_cast<size_t>(sinkhorn.size()));
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * kLanes, end = std::min(s.rows, begin + kLanes);
      for (int64_t t = begin; t < end; ++t) {
        Real* row = dlogit.data() + t * n;
        for (int64_t j = 0; j < m; ++j) {
          const Real p = out.pre[t * m + j] - static_cast<Real>(constants.hc_eps);
          const Real q = out.post[t * m + j];
          row[j] = d.pre == nullptr ? Real{0} : d.pre[t * m + j] * p * (Real{1} - p);
          row[m + j] = d.post == nullptr ? Real{0} : d.post[t * m + j] * q * (Real{1} - q / 2);
        }
      }
      if (d.comb == nullptr) {
        continue;
      }
      std::fill(lanes.begin(), lanes.end(), Real{0});
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t i = 0; i < m * m; ++i) {
          lanes[static_cast<size_t>(i * kLanes + t - begin)] = d.comb[t * m * m + i];
        }
      }
      if (constants.mixing == Mixing::kManifold) {
        load_logits(s, w, out.predicted, begin, end, sinkhorn.input());
        sinkhorn.forward();
        sinkhorn.backward(lanes.data());
      }
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t i = 0; i < m * m; ++i) {
          dlogit[static_cast<size_t>(t * n + 2 * m + i)] =
              lanes[static_cast<size_t>(i * kLanes + t - begin)];
        }
      }
    }
  });
  const auto part_of = [&](int64_t i) { return i < m ? 0 : i < 2 * m ? 1 : 2; };
  for (int64_t t = 0; t < s.rows; ++t) {
    for (int64_t i = 0; i < n; ++i) {
      const Real g = dlogit[static_cast<size_t>(t * n + i)];
      dw.base[i] += g;
      dw.scale[part_of(i)] += g * out.predicted[t * n + i];
    }
  }
  // The predictions are factor * (fn . x), factor = 1 / rms(x).
  parallel_for(pool, s.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      Real* row = dlogit.data() + t * n;
      Real along = 0;
      for (int64_t i = 0; i < n; ++i) {
        row[i] *= w.scale[part_of(i)];
        along += row[i] * out.predicted[t * n + i];
        row[i] *= out.factor[t];
      }
      const Real shrink = -out.factor[t] * out.factor[t] / static_cast<Real>(size) * along;
      axpy(shrink, x + t * size, size, dx + t * size);
    }
  });
  const LinearShape<Real> linear{s.rows, n, size, size, n};
  linear_weight_gradient(pool, linear, dlogit.data(), x, dw.fn);
  linear_input_gradient(pool, linear, dlogit.data(), w.fn, dx);
}

template <class Real>
MixingGain extend_mixing(ThreadPool* pool, const StreamShape& s, const Real* comb, Real* product) {
  const int64_t m = s.streams;
  const int64_t blocks = (s.rows + kGrain - 1) / kGrain;
  std::vector<MixingGain> gains(static_cast<size_t>(blocks), MixingGain{0, 0});
  parallel_tasks(pool, blocks, [&](int64_t block) {
    MixingGain& gain = gains[static_cast<size_t>(block)];
    Real next[kMaxStreams * kMaxStreams];
    for (int64_t t = block * kGrain; t < std::min(s.rows, (block + 1) * kGrain); ++t) {
      Real* p = product + t * m * m;
      Real columns[kMaxStreams] = {};
      for (int64_t j = 0; j < m; ++j) {
        Real row = 0;
        for (int64_t k = 0; k < m; ++k) {
          Real sum = 0;
          for (int64_t i = 0; i < m; ++i) {
            sum += p[j * m + i] * comb[(t * m + i) * m + k];
          }
          next[j * m + k] = sum;
          row += std::fabs(sum);
          columns[k] += std::fabs(sum);
        }
        gain.backward = std::max(gain.backward, static_cast<double>(row));
      }
      gain.forward =
          std::max(gain.forward, static_cast<double>(*std::max_element(columns, columns + m)));
      std::copy_n(next, m * m, p);
    }
  });
  MixingGain most{0, 0};
  for (const MixingGain& gain : gains) {
    most.forward = std::max(most.forward, gain.forward);
    most.backward = std::max(most.backward, gain.backward);
  }
  return most;
}

#define CACHALOT_INSTANTIATE(Real)                                                    \
  template void expand(                                                               \
      ThreadPool*, const StreamShape&, const Real*, const PendingRows<Real>&, Real*); \
  template void expand_backward(ThreadPool*,                                          \
                                const StreamShape&,                                   \
                                const Real*,                                          \
                                const PendingRows<Real>&,                             \
                                const Real*,                                          \
                                Real*,                                                \
                                const PendingRows<Real>&);                            \
  template void collapse(ThreadPool*,                                                 \
                         const StreamShape&,                                          \
                         const Real*,                                                 \
                         const Real*,                                                 \
                         const Real*,                                                 \
                         double,                                                      \
                         const CollapseRows<Real>&,                                   \
                         Real*);                                                      \
  template void collapse_backward(ThreadPool*,                                        \
                                  const StreamShape&,                                 \
                                  const Real*,                                        \
                                  const Real*,                                        \
                                  const Real*,                                        \
                                  const CollapseRows<Real>&,                          \
                                  const Real*,                                        \
                                  Real*,                                              \
                                  Real*,                                              \
                                  Real*);                                             \
  template void site_coefficients(ThreadPool*,                                        \
                                  const StreamShape&,                                 \
                                  const SiteConstants&,                               \
                                  const Real*,                                        \
                                  const SiteWeights<Real>&,                           \
                                  const SiteRows<Real>&);                             \
  template void site_coefficients_backward(ThreadPool*,                               \
                                           const StreamShape&,                        \
                                           const SiteConstants&,                      \
                                           const Real*,                               \
                                           const SiteWeights<Real>&,                  \
                                           const SiteRows<Real>&,                     \
                                           const SiteRows<Real>&,                     \
                                           Real*,                                     \
                                           const SiteWeights<Real>&);                 \
  template MixingGain extend_mixing(ThreadPool*, const StreamShape&, const Real*, Real*);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
