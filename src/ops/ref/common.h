// Shared by the reference kernels: element access by dtype, norms, rotation. Double throughout; a
// value is rounded only where it is stored.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/ops.h"
#include "quant/block.h"
#include "quant/formats.h"

namespace cachalot::ops::ref {

// Element i of a BF16 or F32 view.
inline float load(const TensorView& view, int64_t i) {
  return view.dtype == DType::kBF16 ? static_cast<float>(static_cast<const bf16*>(view.data)[i])
                                    : static_cast<const float*>(view.data)[i];
}

inline void store(const TensorView& view, int64_t i, double value) {
  const auto rounded = static_cast<float>(value);
  if (view.dtype == DType::kBF16) {
    static_cast<bf16*>(view.data)[i] = bf16(rounded);
  } else {
    static_cast<float*>(view.data)[i] = rounded;
  }
}

// `value` as it reads back from a store into `dtype`.
inline float rounded(double value, DType dtype) {
  const auto f = static_cast<float>(value);
  return dtype == DType::kBF16 ? round_bf16(f) : f;
}

inline double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

// Row `row` of a weight, decoded.
std::vector<float> weight_row(const Weight& weight, int64_t row);

// Row `row` of x [T, n], quantized to FP8 blocks and back if `quantize` is set and x is BF16.
std::vector<float> input_row(const TensorView& x, int64_t row, bool quantize);

// x * rsqrt(mean(x^2) + eps) * weight over n values of x; not yet rounded.
std::vector<double> rms_norm(const std::vector<double>& x, const TensorView& weight, double eps);

// Rotates the last 2 * half of n values in place by the table's row; `sign` -1 rotates back.
void rotate(double* x, int64_t n, const float* cos_sin, int64_t half, int sign);

}  // namespace cachalot::ops::ref
