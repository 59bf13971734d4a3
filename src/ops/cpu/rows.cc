// Row primitives: conversions, order, norm, rotation.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/rows.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/highway.h"
#include "ops/cpu/simd_inl.h"

#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

template <class T>
void load_row_as(const T* source, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_vec(load_at(source, i, n), row + i);
  }
  for (int64_t i = (n + kLanes - 1) / kLanes * kLanes; i < padded(n); i += kLanes) {
    store_vec(hn::Zero(F32()), row + i);
  }
}

void load_row(const void* source, DType dtype, int64_t n, float* row) {
  if (dtype == DType::kBF16) {
    load_row_as(static_cast<const bf16*>(source), n, row);
  } else {
    load_row_as(static_cast<const float*>(source), n, row);
  }
}

template <class T>
void store_row_as(const float* row, int64_t n, T* target) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_at(load_at(row, i, n), target, i, n);
  }
}

void store_row(const float* row, int64_t n, void* target, DType dtype) {
  if (dtype == DType::kBF16) {
    store_row_as(row, n, static_cast<bf16*>(target));
  } else {
    store_row_as(row, n, static_cast<float*>(target));
  }
}

void round_row(float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_vec(round_bf16_vec(load_vec(row + i)), row + i);
  }
}

template <class D>
HWY_INLINE void transpose_groups(D d, float* row, int64_t n) {
  constexpr int64_t kN = static_cast<int64_t>(hn::MaxLanes(D()));
  for (float* x = row; x < row + n; x += 4 * kN) {
    hn::Vec<D> a, b, c, e;
    hn::LoadInterleaved4(d, x, a, b, c, e);
    hn::StoreU(a, d, x);
    hn::StoreU(b, d, x + kN);
    hn::StoreU(c, d, x + 2 * kN);
    hn::StoreU(e, d, x + 3 * kN);
  }
}

void arrange_row(float* row, int64_t n, RowOrder order) {
  if (order == RowOrder::kBytes) {
    transpose_groups(F32(), row, n);
  } else if (order == RowOrder::kNibbles) {
    transpose_groups(hn::CappedTag<float, 4>(), row, n);
  }
}

float sum_squares(const float* row, int64_t n) {
  Vec sum[kBlockVecs];
  for (int64_t v = 0; v < kBlockVecs; ++v) {
    sum[v] = hn::Zero(F32());
  }
  for (int64_t i = 0; i < n; i += 32) {
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      const auto x = load_vec(row + i + v * kLanes);
      sum[v] = hn::MulAdd(x, x, sum[v]);
    }
  }
  for (int64_t v = 1; v < kBlockVecs; ++v) {
    sum[0] = hn::Add(sum[0], sum[v]);
  }
  return lane_sum(sum[0]);
}

template <class T>
void norm_row_as(const float* x, const T* weight, int64_t n, float eps, float* out) {
  const float mean = sum_squares(x, n) / static_cast<float>(n);
  const auto scale = hn::Set(F32(), 1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    store_vec(hn::Mul(hn::Mul(load_vec(x + i), scale), load_at(weight, i, n)), out + i);
  }
}

void norm_row(const float* x, const TensorView& weight, int64_t n, float eps, float* out) {
  if (weight.dtype == DType::kBF16) {
    norm_row_as(x, static_cast<const bf16*>(weight.data), n, eps, out);
  } else {
    norm_row_as(x, static_cast<const float*>(weight.data), n, eps, out);
  }
}

void rotate_row(float* row, int64_t n, const float* cos_sin, int64_t half, float sign) {
  float* x = row + n - 2 * half;
  alignas(32) static constexpr float kSigns[8] = {-1, 1, -1, 1, -1, 1, -1, 1};
  const auto signs = hn::Mul(hn::Load(F32(), kSigns), hn::Set(F32(), sign));
  int64_t i = 0;
  for (; i + kLanes <= 2 * half; i += kLanes) {
    const auto pair = load_vec(x + i);
    const auto table = load_vec(cos_sin + i);
    const auto s = hn::Mul(hn::DupOdd(table), signs);
    const auto turned = hn::Mul(pair, hn::DupEven(table));
    store_vec(hn::MulAdd(hn::Shuffle2301(pair), s, turned), x + i);
  }
  for (; i < 2 * half; i += 2) {
    const float c = cos_sin[i], s = sign * cos_sin[i + 1], a = x[i], b = x[i + 1];
    x[i] = a * c - b * s;
    x[i + 1] = b * c + a * s;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(load_row);
HWY_EXPORT(store_row);
HWY_EXPORT(round_row);
HWY_EXPORT(arrange_row);
HWY_EXPORT(norm_row);
HWY_EXPORT(sum_squares);
HWY_EXPORT(rotate_row);

void load_row(const void* source, DType dtype, int64_t n, float* row) {
  HWY_DYNAMIC_DISPATCH(load_row)(source, dtype, n, row);
}
void store_row(const float* row, int64_t n, void* target, DType dtype) {
  HWY_DYNAMIC_DISPATCH(store_row)(row, n, target, dtype);
}
void round_row(float* row, int64_t n, DType act) {
  if (act == DType::kBF16) {
    HWY_DYNAMIC_DISPATCH(round_row)(row, n);
  }
}
void arrange_row(float* row, int64_t n, RowOrder order) {
  HWY_DYNAMIC_DISPATCH(arrange_row)(row, n, order);
}
void norm_row(const float* x, const TensorView& weight, int64_t n, float eps, float* out) {
  HWY_DYNAMIC_DISPATCH(norm_row)(x, weight, n, eps, out);
}
float sum_squares(const float* row, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(sum_squares)(row, n);
}
void rotate_row(float* row, int64_t n, const float* cos_sin, int64_t half, float sign) {
  HWY_DYNAMIC_DISPATCH(rotate_row)(row, n, cos_sin, half, sign);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
