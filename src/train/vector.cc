#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/vector.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#include <cmath>

#include "train/vector.h"

HWY_BEFORE_NAMESPACE();
namespace cachalot::train {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class Real>
using Tag = hn::ScalableTag<Real>;

template <class Real>
HWY_INLINE int64_t lanes() {
  return static_cast<int64_t>(hn::Lanes(Tag<Real>()));
}

template <class Real>
HWY_INLINE Real dot_of(const Real* a, const Real* b, int64_t n) {
  const Tag<Real> d;
  const int64_t step = lanes<Real>();
  auto s0 = hn::Zero(d), s1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * step <= n; i += 2 * step) {
    s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
    s1 = hn::MulAdd(hn::LoadU(d, a + i + step), hn::LoadU(d, b + i + step), s1);
  }
  for (; i + step <= n; i += step) {
    s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
  }
  Real sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(s0, s1)));
  for (; i < n; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

template <class Real>
HWY_INLINE void axpy_of(Real alpha, const Real* x, int64_t n, Real* y) {
  const Tag<Real> d;
  const int64_t step = lanes<Real>();
  const auto factor = hn::Set(d, alpha);
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    hn::StoreU(hn::MulAdd(factor, hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, y + i);
  }
  for (; i < n; ++i) {
    y[i] += alpha * x[i];
  }
}

template <class Real>
HWY_INLINE void dots_of(
    const Real* x, const Real* const* rows, int64_t count, int64_t n, Real* out) {
  const Tag<Real> d;
  const int64_t step = lanes<Real>();
  int64_t r = 0;
  for (; r + 4 <= count; r += 4) {
    const Real *a = rows[r], *b = rows[r + 1], *c = rows[r + 2], *e = rows[r + 3];
    auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    int64_t i = 0;
    for (; i + step <= n; i += step) {
      const auto v = hn::LoadU(d, x + i);
      s0 = hn::MulAdd(v, hn::LoadU(d, a + i), s0);
      s1 = hn::MulAdd(v, hn::LoadU(d, b + i), s1);
      s2 = hn::MulAdd(v, hn::LoadU(d, c + i), s2);
      s3 = hn::MulAdd(v, hn::LoadU(d, e + i), s3);
    }
    Real sums[4] = {hn::GetLane(hn::SumOfLanes(d, s0)),
                    hn::GetLane(hn::SumOfLanes(d, s1)),
                    hn::GetLane(hn::SumOfLanes(d, s2)),
                    hn::GetLane(hn::SumOfLanes(d, s3))};
    for (; i < n; ++i) {
      sums[0] += x[i] * a[i];
      sums[1] += x[i] * b[i];
      sums[2] += x[i] * c[i];
      sums[3] += x[i] * e[i];
    }
    for (int64_t j = 0; j < 4; ++j) {
      out[r + j] = sums[j];
    }
  }
  for (; r < count; ++r) {
    out[r] = dot_of(x, rows[r], n);
  }
}

template <class Real>
HWY_INLINE void combine_of(
    const Real* w, const Real* const* rows, int64_t count, int64_t n, bool accumulate, Real* out) {
  const Tag<Real> d;
  const int64_t step = lanes<Real>();
  int64_t i = 0;
  // Four vectors of the output stay in registers while all rows pass.
  for (; i + 4 * step <= n; i += 4 * step) {
    auto s0 = accumulate ? hn::LoadU(d, out + i) : hn::Zero(d);
    auto s1 = accumulate ? hn::LoadU(d, out + i + step) : hn::Zero(d);
    auto s2 = accumulate ? hn::LoadU(d, out + i + 2 * step) : hn::Zero(d);
    auto s3 = accumulate ? hn::LoadU(d, out + i + 3 * step) : hn::Zero(d);
    for (int64_t r = 0; r < count; ++r) {
      const auto factor = hn::Set(d, w[r]);
      const Real* row = rows[r] + i;
      s0 = hn::MulAdd(factor, hn::LoadU(d, row), s0);
      s1 = hn::MulAdd(factor, hn::LoadU(d, row + step), s1);
      s2 = hn::MulAdd(factor, hn::LoadU(d, row + 2 * step), s2);
      s3 = hn::MulAdd(factor, hn::LoadU(d, row + 3 * step), s3);
    }
    hn::StoreU(s0, d, out + i);
    hn::StoreU(s1, d, out + i + step);
    hn::StoreU(s2, d, out + i + 2 * step);
    hn::StoreU(s3, d, out + i + 3 * step);
  }
  for (; i + step <= n; i += step) {
    auto s = accumulate ? hn::LoadU(d, out + i) : hn::Zero(d);
    for (int64_t r = 0; r < count; ++r) {
      s = hn::MulAdd(hn::Set(d, w[r]), hn::LoadU(d, rows[r] + i), s);
    }
    hn::StoreU(s, d, out + i);
  }
  for (; i < n; ++i) {
    Real s = accumulate ? out[i] : Real{0};
    for (int64_t r = 0; r < count; ++r) {
      s += w[r] * rows[r][i];
    }
    out[i] = s;
  }
}

template <class Real>
HWY_INLINE Real exp_sum_of(const Real* x, int64_t n, Real shift, Real* out) {
  const Tag<Real> d;
  const int64_t step = lanes<Real>();
  const auto offset = hn::Set(d, shift);
  auto total = hn::Zero(d);
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    const auto e = hn::Exp(d, hn::Sub(hn::LoadU(d, x + i), offset));
    hn::StoreU(e, d, out + i);
    total = hn::Add(total, e);
  }
  Real sum = hn::GetLane(hn::SumOfLanes(d, total));
  for (; i < n; ++i) {
    out[i] = std::exp(x[i] - shift);
    sum += out[i];
  }
  return sum;
}

float dot_f32(const float* a, const float* b, int64_t n) {
  return dot_of(a, b, n);
}
double dot_f64(const double* a, const double* b, int64_t n) {
  return dot_of(a, b, n);
}
void axpy_f32(float alpha, const float* x, int64_t n, float* y) {
  axpy_of(alpha, x, n, y);
}
void axpy_f64(double alpha, const double* x, int64_t n, double* y) {
  axpy_of(alpha, x, n, y);
}
void dots_f32(const float* x, const float* const* rows, int64_t count, int64_t n, float* out) {
  dots_of(x, rows, count, n, out);
}
void dots_f64(const double* x, const double* const* rows, int64_t count, int64_t n, double* out) {
  dots_of(x, rows, count, n, out);
}
void combine_f32(const float* w,
                 const float* const* rows,
                 int64_t count,
                 int64_t n,
                 bool accumulate,
                 float* out) {
  combine_of(w, rows, count, n, accumulate, out);
}
void combine_f64(const double* w,
                 const double* const* rows,
                 int64_t count,
                 int64_t n,
                 bool accumulate,
                 double* out) {
  combine_of(w, rows, count, n, accumulate, out);
}
float exp_sum_f32(const float* x, int64_t n, float shift, float* out) {
  return exp_sum_of(x, n, shift, out);
}
double exp_sum_f64(const double* x, int64_t n, double shift, double* out) {
  return exp_sum_of(x, n, shift, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::train
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::train {

HWY_EXPORT(dot_f32);
HWY_EXPORT(dot_f64);
HWY_EXPORT(axpy_f32);
HWY_EXPORT(axpy_f64);
HWY_EXPORT(dots_f32);
HWY_EXPORT(dots_f64);
HWY_EXPORT(combine_f32);
HWY_EXPORT(combine_f64);
HWY_EXPORT(exp_sum_f32);
HWY_EXPORT(exp_sum_f64);

float dot(const float* a, const float* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(dot_f32)(a, b, n);
}
double dot(const double* a, const double* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(dot_f64)(a, b, n);
}
void axpy(float alpha, const float* x, int64_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(axpy_f32)(alpha, x, n, y);
}
void axpy(double alpha, const double* x, int64_t n, double* y) {
  HWY_DYNAMIC_DISPATCH(axpy_f64)(alpha, x, n, y);
}
void dots(const float* x, const float* const* rows, int64_t count, int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(dots_f32)(x, rows, count, n, out);
}
void dots(const double* x, const double* const* rows, int64_t count, int64_t n, double* out) {
  HWY_DYNAMIC_DISPATCH(dots_f64)(x, rows, count, n, out);
}
void combine(const float* w,
             const float* const* rows,
             int64_t count,
             int64_t n,
             bool accumulate,
             float* out) {
  HWY_DYNAMIC_DISPATCH(combine_f32)(w, rows, count, n, accumulate, out);
}
void combine(const double* w,
             const double* const* rows,
             int64_t count,
             int64_t n,
             bool accumulate,
             double* out) {
  HWY_DYNAMIC_DISPATCH(combine_f64)(w, rows, count, n, accumulate, out);
}
float exp_sum(const float* x, int64_t n, float shift, float* out) {
  return HWY_DYNAMIC_DISPATCH(exp_sum_f32)(x, n, shift, out);
}
double exp_sum(const double* x, int64_t n, double shift, double* out) {
  return HWY_DYNAMIC_DISPATCH(exp_sum_f64)(x, n, shift, out);
}

}  // namespace cachalot::train
#endif  // HWY_ONCE
