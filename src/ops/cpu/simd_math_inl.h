// Vector functions made of exponentials; compiled once per instruction set (no #pragma once).
#include "hwy/contrib/math/math-inl.h"
#include "ops/cpu/simd_inl.h"

#if defined(CACHALOT_OPS_CPU_SIMD_MATH_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef CACHALOT_OPS_CPU_SIMD_MATH_INL_H
#undef CACHALOT_OPS_CPU_SIMD_MATH_INL_H
#else
#define CACHALOT_OPS_CPU_SIMD_MATH_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

// 1 / (1 + e^-x) and its complement, each to a few ulp.
HWY_INLINE void logistic(Vec x, Vec& value, Vec& complement) {
  const F32 d;
  const auto one = hn::Set(d, 1.0f);
  const auto e = hn::Exp(d, hn::Neg(hn::Abs(x)));
  const auto large = hn::Div(one, hn::Add(one, e));
  const auto small = hn::Mul(e, large);
  const auto negative = hn::Lt(x, hn::Zero(d));
  value = hn::IfThenElse(negative, small, large);
  complement = hn::IfThenElse(negative, large, small);
}
HWY_INLINE Vec logistic(Vec x) {
  Vec value, complement;
  logistic(x, value, complement);
  return value;
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
