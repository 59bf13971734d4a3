// Row primitives: activations, pooling, scores, and the rank and mass of logits.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/activation_rows.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "ops/cpu/simd_math_inl.h"

#include <algorithm>
#include <functional>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE Vec rounded(Vec v, DType act) {
  return act == DType::kBF16 ? round_bf16_vec(v) : v;
}

void swiglu_row(
    const float* gate, const float* up, int64_t n, float limit, float weight, DType act, float* h) {
  const auto most = hn::Set(F32(), limit);
  const auto factor = hn::Set(F32(), weight);
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto g = at_most(rounded(load_at(gate, i, n), act), most);
    const auto u = at_least(at_most(rounded(load_at(up, i, n), act), most), hn::Neg(most));
    const auto product = hn::Mul(hn::Mul(hn::Mul(g, logistic(g)), u), factor);
    store_at(rounded(product, act), h, i, n);
  }
}

void silu_product_row(const float* gate, const float* up, int64_t n, DType act, float* h) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto g = rounded(load_at(gate, i, n), act);
    const auto u = rounded(load_at(up, i, n), act);
    const auto silu = rounded(hn::Mul(g, logistic(g)), act);
    store_at(rounded(hn::Mul(silu, u), act), h, i, n);
  }
}

void add_rounded(const float* values, int64_t n, DType act, float* sum) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_at(hn::Add(load_at(sum, i, n), rounded(load_at(values, i, n), act)), sum, i, n);
  }
}

void pool_pair(const float* kv0,
               const float* gate0,
               const float* kv1,
               const float* gate1,
               int64_t n,
               float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec w1, w0;
    logistic(hn::Sub(load_at(gate1, i, n), load_at(gate0, i, n)), w1, w0);
    store_vec(hn::MulAdd(load_at(kv1, i, n), w1, hn::Mul(load_at(kv0, i, n), w0)), out + i);
  }
  for (int64_t i = (n + kLanes - 1) / kLanes * kLanes; i < padded(n); i += kLanes) {
    store_vec(hn::Zero(F32()), out + i);
  }
}

void router_scores(float* row, int64_t n, float temperature) {
  const F32 d;
  const auto divisor = hn::Set(d, temperature);
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto x = hn::Div(load_at(row, i, n), divisor);
    // ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|). Far below zero it is e^x to within FP32, and its
    // root e^(x/2) stays a normal float where e^x no longer is one.
    const auto tail = hn::Exp(d, hn::Mul(x, hn::Set(d, 0.5f)));
    const auto e = hn::Exp(d, hn::Neg(hn::Abs(x)));
    const auto root = hn::Sqrt(hn::Add(at_least(x, hn::Zero(d)), hn::Log1p(d, e)));
    store_at(hn::IfThenElse(hn::Lt(x, hn::Set(d, -17.0f)), tail, root), row, i, n);
  }
}

void rank_form(const float* logits, int64_t n, float* row) {
  const F32 d;
  const auto none = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto x = load_at(logits, i, n);
    store_at(hn::IfThenElse(hn::IsNaN(x), none, hn::Add(x, hn::Zero(d))), row, i, n);
  }
}

int64_t best_candidates(const float* row, int64_t n, int64_t k, float* work, int32_t* ids) {
  // The largest of each kStretch values kLanes apart: k of these maxima are k values of the row, so
  // no value below the k-th maximum is among the k best.
  constexpr int64_t kStretch = 16;
  const F32 d;
  int64_t count = 0;
  for (int64_t i = 0; i + kStretch * kLanes <= n; i += kStretch * kLanes) {
    auto most = load_vec(row + i);
    for (int64_t v = 1; v < kStretch; ++v) {
      most = hn::Max(most, load_vec(row + i + v * kLanes));
    }
    store_vec(most, work + count);
    count += kLanes;
  }
  if (count < k) {
    return 0;
  }
  std::nth_element(work, work + k - 1, work + count, std::greater<float>());
  const float least = work[k - 1];
  if (least == -std::numeric_limits<float>::infinity()) {
    return 0;
  }
  const auto bound = hn::Set(d, least);
  count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t end = std::min(n, i + kLanes);
    if (i + kLanes <= n && hn::AllFalse(d, hn::Ge(load_vec(row + i), bound))) {
      continue;
    }
    for (int64_t j = i; j < end; ++j) {
      if (row[j] >= least) {
        ids[count++] = static_cast<int32_t>(j);
      }
    }
  }
  return count;
}

float exp_mass(const float* row, int64_t n, float best, float scale) {
  // Chains of kBlock values in FP32, their sums in double.
  constexpr int64_t kBlock = 4096;
  const F32 d;
  const auto top = hn::Set(d, best), factor = hn::Set(d, scale), one = hn::Set(d, 1.0f);
  const auto terms = [&](int64_t i) HWY_ATTR {
    const auto x = load_at(row, i, n);
    return hn::IfThenElse(hn::Eq(x, top), one, hn::Exp(d, hn::Mul(hn::Sub(x, top), factor)));
  };
  double mass = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock), whole = end - (end - begin) % kLanes;
    auto sum = hn::Zero(d);
    for (int64_t i = begin; i < whole; i += kLanes) {
      sum = hn::Add(sum, terms(i));
    }
    mass += lane_sum(sum);
    if (whole < end) {
      alignas(32) float lane[kLanes];
      hn::Store(terms(whole), d, lane);
      for (int64_t i = whole; i < end; ++i) {
        mass += lane[i - whole];
      }
    }
  }
  return static_cast<float>(mass);
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(swiglu_row);
HWY_EXPORT(silu_product_row);
HWY_EXPORT(add_rounded);
HWY_EXPORT(pool_pair);
HWY_EXPORT(router_scores);
HWY_EXPORT(rank_form);
HWY_EXPORT(best_candidates);
HWY_EXPORT(exp_mass);

void swiglu_row(
    const float* gate, const float* up, int64_t n, float limit, float weight, DType act, float* h) {
  HWY_DYNAMIC_DISPATCH(swiglu_row)(gate, up, n, limit, weight, act, h);
}
void silu_product_row(const float* gate, const float* up, int64_t n, DType act, float* h) {
  HWY_DYNAMIC_DISPATCH(silu_product_row)(gate, up, n, act, h);
}
void add_rounded(const float* values, int64_t n, DType act, float* sum) {
  HWY_DYNAMIC_DISPATCH(add_rounded)(values, n, act, sum);
}
void pool_pair(const float* kv0,
               const float* gate0,
               const float* kv1,
               const float* gate1,
               int64_t n,
               float* out) {
  HWY_DYNAMIC_DISPATCH(pool_pair)(kv0, gate0, kv1, gate1, n, out);
}
void router_scores(float* row, int64_t n, float temperature) {
  HWY_DYNAMIC_DISPATCH(router_scores)(row, n, temperature);
}
void rank_form(const float* logits, int64_t n, float* row) {
  HWY_DYNAMIC_DISPATCH(rank_form)(logits, n, row);
}
int64_t best_candidates(const float* row, int64_t n, int64_t k, float* work, int32_t* ids) {
  return HWY_DYNAMIC_DISPATCH(best_candidates)(row, n, k, work, ids);
}
float exp_mass(const float* row, int64_t n, float best, float scale) {
  return HWY_DYNAMIC_DISPATCH(exp_mass)(row, n, best, scale);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
