// Row primitives: residual streams and the coefficients of their sites.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/stream_rows.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "ops/cpu/simd_math_inl.h"

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

template <class T>
void expand_as(const T* x,
               const T* y,
               const float* post,
               const float* comb,
               int64_t m,
               int64_t d,
               float* out) {
  constexpr int64_t kMost = 8;
  for (int64_t i = 0; i < d; i += kLanes) {
    Vec streams[kMost];
    for (int64_t j = 0; j < m; ++j) {
      streams[j] = load_at(x + j * d, i, d);
    }
    const auto added = load_at(y, i, d);
    for (int64_t k = 0; k < m; ++k) {
      auto sum = hn::Mul(hn::Set(F32(), post[k]), added);
      for (int64_t j = 0; j < m; ++j) {
        sum = hn::MulAdd(hn::Set(F32(), comb[j * m + k]), streams[j], sum);
      }
      store_at(round_to(sum, x), out + k * d, i, d);
    }
  }
}

void expand_streams(const void* x,
                    const void* y,
                    DType act,
                    const float* post,
                    const float* comb,
                    int64_t m,
                    int64_t d,
                    float* out) {
  if (act == DType::kBF16) {
    expand_as(static_cast<const bf16*>(x), static_cast<const bf16*>(y), post, comb, m, d, out);
  } else {
    expand_as(static_cast<const float*>(x), static_cast<const float*>(y), post, comb, m, d, out);
  }
  for (int64_t i = m * d; i < padded(m * d); ++i) {
    out[i] = 0;
  }
}

void collapse_streams(
    const float* x, const float* pre, int64_t m, int64_t d, DType act, float* out) {
  for (int64_t i = 0; i < d; i += kLanes) {
    auto sum = hn::Mul(hn::Set(F32(), pre[0]), load_at(x, i, d));
    for (int64_t j = 1; j < m; ++j) {
      sum = hn::MulAdd(hn::Set(F32(), pre[j]), load_at(x + j * d, i, d), sum);
    }
    store_vec(act == DType::kBF16 ? round_bf16_vec(sum) : sum, out + i);
  }
  for (int64_t i = (d + kLanes - 1) / kLanes * kLanes; i < padded(d); i += kLanes) {
    store_vec(hn::Zero(F32()), out + i);
  }
}

// Normalizes the rows (kRows) or columns of the m x m matrices in the lanes.
template <bool kRows>
HWY_INLINE void normalize(Vec* c, int64_t m, Vec eps) {
  const int64_t along = kRows ? 1 : m, across = kRows ? m : 1;
  for (int64_t a = 0; a < m; ++a) {
    auto sum = eps;
    for (int64_t b = 0; b < m; ++b) {
      sum = hn::Add(sum, c[a * across + b * along]);
    }
    const auto inverse = hn::Div(hn::Set(F32(), 1.0f), sum);
    for (int64_t b = 0; b < m; ++b) {
      c[a * across + b * along] = hn::Mul(c[a * across + b * along], inverse);
    }
  }
}

// Lanes are tokens: a token's coefficients never depend on its neighbours.
void site_coefficients(const SiteCoefficients& site,
                       const float* mix,
                       const float* factor,
                       int64_t count,
                       float* pre,
                       float* post,
                       float* comb) {
  constexpr int64_t kMost = 8;
  const F32 d;
  const int64_t m = site.m, width = (2 + m) * m;
  const auto eps = hn::Set(d, site.eps);
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t tokens = std::min(kLanes, count - first);
    alignas(32) float lane[kLanes];
    // m_i * scale + base of coefficient i, a token per lane.
    const auto gather = [&](int64_t i, int64_t part) HWY_ATTR {
      for (int64_t t = 0; t < kLanes; ++t) {
        lane[t] = t < tokens ? mix[(first + t) * width + i] * factor[first + t] : 0.0f;
      }
      return hn::MulAdd(hn::Load(d, lane), hn::Set(d, site.scale[part]), hn::Set(d, site.base[i]));
    };
    const auto scatter = [&](Vec v, int64_t i, int64_t row_floats, float* out) HWY_ATTR {
      hn::Store(v, d, lane);
      for (int64_t t = 0; t < tokens; ++t) {
        out[(first + t) * row_floats + i] = lane[t];
      }
    };
    for (int64_t j = 0; j < m; ++j) {
      scatter(hn::Add(logistic(gather(j, 0)), eps), j, m, pre);
      scatter(hn::Mul(hn::Set(d, 2.0f), logistic(gather(m + j, 1))), j, m, post);
    }
    Vec c[kMost * kMost];
    for (int64_t j = 0; j < m; ++j) {
      Vec* row = c + j * m;
      for (int64_t k = 0; k < m; ++k) {
        row[k] = gather(2 * m + j * m + k, 2);
      }
      auto best = row[0];
      for (int64_t k = 1; k < m; ++k) {
        best = hn::Max(best, row[k]);
      }
      auto sum = hn::Zero(d);
      for (int64_t k = 0; k < m; ++k) {
        row[k] = hn::Exp(d, hn::Sub(row[k], best));
        sum = hn::Add(sum, row[k]);
      }
      const auto inverse = hn::Div(hn::Set(d, 1.0f), sum);
      for (int64_t k = 0; k < m; ++k) {
        row[k] = hn::MulAdd(row[k], inverse, eps);
      }
    }
    normalize<false>(c, m, eps);
    for (int iter = 1; iter < site.iters; ++iter) {
      normalize<true>(c, m, eps);
      normalize<false>(c, m, eps);
    }
    for (int64_t i = 0; i < m * m; ++i) {
      scatter(c[i], i, m * m, comb);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(expand_streams);
HWY_EXPORT(collapse_streams);
HWY_EXPORT(site_coefficients);

void expand_streams(const void* x,
                    const void* y,
                    DType act,
                    const float* post,
                    const float* comb,
                    int64_t m,
                    int64_t d,
                    float* out) {
  HWY_DYNAMIC_DISPATCH(expand_streams)(x, y, act, post, comb, m, d, out);
}
void collapse_streams(
    const float* x, const float* pre, int64_t m, int64_t d, DType act, float* out) {
  HWY_DYNAMIC_DISPATCH(collapse_streams)(x, pre, m, d, act, out);
}
void site_coefficients(const SiteCoefficients& site,
                       const float* mix,
                       const float* factor,
                       int64_t count,
                       float* pre,
                       float* post,
                       float* comb) {
  HWY_DYNAMIC_DISPATCH(site_coefficients)(site, mix, factor, count, pre, post, comb);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
