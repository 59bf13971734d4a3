// Row primitives: the gates of Engram.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/engram_rows.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/highway.h"
#include "ops/cpu/simd_inl.h"

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

template <class T, class Q, class K>
EngramSums engram_sums_as(const T* x, const T* key, const Q* q, const K* k, int64_t n) {
  constexpr int64_t kChains = 2;
  Vec xx[kChains], kk[kChains], xk[kChains];
  for (int64_t c = 0; c < kChains; ++c) {
    xx[c] = kk[c] = xk[c] = hn::Zero(F32());
  }
  for (int64_t i = 0; i < n; i += kChains * kLanes) {
    for (int64_t c = 0; c < kChains; ++c) {
      const int64_t j = i + c * kLanes;
      if (j >= n) {
        break;
      }
      const auto a = load_at(x, j, n), b = load_at(key, j, n);
      const auto gain = hn::Mul(load_at(q, j, n), load_at(k, j, n));
      xx[c] = hn::MulAdd(a, a, xx[c]);
      kk[c] = hn::MulAdd(b, b, kk[c]);
      xk[c] = hn::MulAdd(hn::Mul(a, gain), b, xk[c]);
    }
  }
  return {lane_sum(hn::Add(xx[0], xx[1])),
          lane_sum(hn::Add(kk[0], kk[1])),
          lane_sum(hn::Add(xk[0], xk[1]))};
}

template <class T, class Q>
EngramSums engram_sums_k(
    const T* x, const T* key, const Q* q, const TensorView& k, int64_t begin, int64_t n) {
  return k.dtype == DType::kBF16
             ? engram_sums_as(x, key, q, static_cast<const bf16*>(k.data) + begin, n)
             : engram_sums_as(x, key, q, static_cast<const float*>(k.data) + begin, n);
}

template <class T>
EngramSums engram_sums_qk(
    const T* x, const T* key, const TensorView& q, const TensorView& k, int64_t begin, int64_t n) {
  return q.dtype == DType::kBF16
             ? engram_sums_k(x, key, static_cast<const bf16*>(q.data) + begin, k, begin, n)
             : engram_sums_k(x, key, static_cast<const float*>(q.data) + begin, k, begin, n);
}

EngramSums engram_sums(const void* x,
                       const void* key,
                       DType act,
                       const TensorView& q_weight,
                       const TensorView& k_weight,
                       int64_t weight_begin,
                       int64_t n) {
  return act == DType::kBF16 ? engram_sums_qk(static_cast<const bf16*>(x),
                                              static_cast<const bf16*>(key),
                                              q_weight,
                                              k_weight,
                                              weight_begin,
                                              n)
                             : engram_sums_qk(static_cast<const float*>(x),
                                              static_cast<const float*>(key),
                                              q_weight,
                                              k_weight,
                                              weight_begin,
                                              n);
}

template <class T>
void engram_add_as(const T* x, const T* value, float gate, int64_t n, T* out) {
  const auto factor = hn::Set(F32(), gate);
  for (int64_t i = 0; i < n; i += kLanes) {
    store_at(hn::MulAdd(factor, load_at(value, i, n), load_at(x, i, n)), out, i, n);
  }
}

void engram_add(const void* x, const void* value, DType act, float gate, int64_t n, void* out) {
  if (act == DType::kBF16) {
    engram_add_as(static_cast<const bf16*>(x),
                  static_cast<const bf16*>(value),
                  gate,
                  n,
                  static_cast<bf16*>(out));
  } else {
    engram_add_as(static_cast<const float*>(x),
                  static_cast<const float*>(value),
                  gate,
                  n,
                  static_cast<float*>(out));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(engram_sums);
HWY_EXPORT(engram_add);

EngramSums engram_sums(const void* x,
                       const void* key,
                       DType act,
                       const TensorView& q_weight,
                       const TensorView& k_weight,
                       int64_t weight_begin,
                       int64_t n) {
  return HWY_DYNAMIC_DISPATCH(engram_sums)(x, key, act, q_weight, k_weight, weight_begin, n);
}
void engram_add(const void* x, const void* value, DType act, float gate, int64_t n, void* out) {
  HWY_DYNAMIC_DISPATCH(engram_add)(x, value, act, gate, n, out);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
