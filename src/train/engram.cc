#include "train/engram.h"

#include <cmath>

#include "train/norm.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

constexpr int64_t kGrain = 16;
// Below this the gate's signed square root is flat.
constexpr double kLeastDot = 1e-6;

}  // namespace

template <class Real>
void inject(ThreadPool* pool, const InjectRows<Real>& args, const GateRows<Real>& kept, Real* out) {
  const int64_t m = args.shape.streams, d = args.shape.width;
  const auto width = static_cast<Real>(d);
  const auto eps = static_cast<Real>(args.eps);
  parallel_for(pool, args.shape.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Real* value = args.kv + (t * (m + 1) + m) * d;
      for (int64_t j = 0; j < m; ++j) {
        const Real* x = args.x + (t * m + j) * d;
        const Real* key = args.kv + (t * (m + 1) + j) * d;
        Real raw = 0;
        for (int64_t i = 0; i < d; ++i) {
          raw += x[i] * (args.q_weight[j * d + i] * args.k_weight[j * d + i]) * key[i];
        }
        const int64_t at = t * m + j;
        kept.x_factor[at] = Real{1} / std::sqrt(dot(x, x, d) / width + eps);
        kept.key_factor[at] = Real{1} / std::sqrt(dot(key, key, d) / width + eps);
        kept.dot[at] = raw * kept.x_factor[at] * kept.key_factor[at] / std::sqrt(width);
        const Real z = std::copysign(
            std::sqrt(std::max(std::fabs(kept.dot[at]), static_cast<Real>(kLeastDot))),
            kept.dot[at]);
        kept.gate[at] = args.is_image[t] != 0 ? Real{0} : sigmoid(z);
        Real* target = out + (t * m + j) * d;
        for (int64_t i = 0; i < d; ++i) {
          target[i] = x[i] + kept.gate[at] * value[i];
        }
      }
    }
  });
}

template <class Real>
void inject_backward(ThreadPool* pool,
                     const InjectRows<Real>& args,
                     const GateRows<Real>& kept,
                     const Real* dout,
                     Real* dx,
                     Real* dkv,
                     Real* dq_weight,
                     Real* dk_weight) {
  const int64_t m = args.shape.streams, d = args.shape.width, size = m * d;
  const auto width = static_cast<Real>(d);
  // The two gains act through their product: its gradient is reduced, then split.
  std::vector<Real> dgain(static_cast<size_t>(size), Real{0});
  reduce_rows(
      pool, args.shape.rows, size, dgain.data(), [&](int64_t first, int64_t last, Real* sum) {
        for (int64_t t = first; t < last; ++t) {
          const Real* value = args.kv + (t * (m + 1) + m) * d;
          Real* dvalue = dkv + (t * (m + 1) + m) * d;
          for (int64_t j = 0; j < m; ++j) {
            const int64_t at = t * m + j;
            const Real* g = dout + at * d;
            const Real* x = args.x + at * d;
            const Real* key = args.kv + (t * (m + 1) + j) * d;
            Real* dkey = dkv + (t * (m + 1) + j) * d;
            const Real gate = kept.gate[at], dotted = kept.dot[at];
            axpy(Real{1}, g, d, dx + at * d);
            if (args.is_image[t] != 0) {
              continue;
            }
            axpy(gate, g, d, dvalue);
            if (std::fabs(dotted) < static_cast<Real>(kLeastDot)) {
              continue;
            }
            const Real dgate = dot(g, value, d);
            const Real ddot =
                dgate * gate * (Real{1} - gate) / (Real{2} * std::sqrt(std::fabs(dotted)));
            const Real rx = kept.x_factor[at], rk = kept.key_factor[at];
            const Real c = ddot * rx * rk / std::sqrt(width);
            const Real shrink_x = ddot * dotted * rx * rx / width;
            const Real shrink_key = ddot * dotted * rk * rk / width;
            for (int64_t i = 0; i < d; ++i) {
              const Real gain = args.q_weight[j * d + i] * args.k_weight[j * d + i];
              dx[at * d + i] += c * gain * key[i] - shrink_x * x[i];
              dkey[i] += c * gain * x[i] - shrink_key * key[i];
              sum[j * d + i] += c * x[i] * key[i];
            }
          }
        }
      });
  for (int64_t i = 0; i < size; ++i) {
    dq_weight[i] += dgain[static_cast<size_t>(i)] * args.k_weight[i];
    dk_weight[i] += dgain[static_cast<size_t>(i)] * args.q_weight[i];
  }
}

#define CACHALOT_INSTANTIATE(Real)                                                          \
  template void inject(ThreadPool*, const InjectRows<Real>&, const GateRows<Real>&, Real*); \
  template void inject_backward(ThreadPool*,                                                \
                                const InjectRows<Real>&,                                    \
                                const GateRows<Real>&,                                      \
                                const Real*,                                                \
                                Real*,                                                      \
                                Real*,                                                      \
                                Real*,                                                      \
                                Real*);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
