// Inputs of the image encoder's ops.
#pragma once

#include <cmath>

#include "ops/ops.h"
#include "tests/support/random.h"
#include "tests/support/tolerance.h"

namespace cachalot::test {

using ops::DenseFunction;

constexpr DenseFunction kFunctions[] = {
    DenseFunction::kIdentity, DenseFunction::kGelu, DenseFunction::kSwiglu};

struct DenseInput {
  Buffer x, bias, residual;
  WeightBuffer weight;
  DenseFunction function = DenseFunction::kIdentity;
  bool biased = false, adds = false;
};

inline DenseInput random_dense(
    Random& random, int64_t rows, int64_t in, int64_t out, DType act, DenseFunction function) {
  DenseInput input;
  const bool bf16_weight = random.integer(0, 2) == 0;
  const int64_t width = function == DenseFunction::kSwiglu ? out / 2 : out;
  input.x = random.activations(act, {rows, in});
  input.weight = random_weight(random,
                               bf16_weight ? ops::WeightFormat::kBF16 : ops::WeightFormat::kF32,
                               out,
                               in,
                               0.7 / std::sqrt(static_cast<double>(in)));
  input.bias = random.normals(bf16_weight ? DType::kBF16 : DType::kF32, {out}, 0.3);
  input.residual = random.normals(act, {rows, width});
  input.function = function;
  return input;
}

// FP32: SwiGLU multiplies two sums, each within kDotF32. BF16: a value on the other side of a
// boundary before `function` or the product of SwiGLU moves the output by another ulp each, and by
// an ulp of what is added to the residual: three ulps in all.
constexpr Tolerance kDenseF32 = {2.4e-5, 2e-6};
constexpr Tolerance kDenseBf16 = {0x1.0p-7, 3 * 0x1.0p-7, 1e-5};
constexpr const Tolerance& dense_tolerance(DType act) {
  return act == DType::kBF16 ? kDenseBf16 : kDenseF32;
}

struct AttendInput {
  Buffer qkv, rope;
  int64_t heads = 0;
};

inline AttendInput random_attend(
    Random& random, int64_t rows, int64_t heads, int64_t k, DType act) {
  AttendInput in{random.normals(act, {rows, 3 * heads * k}, 1.2),
                 Buffer(DType::kF32, {rows, k / 2, 2}),
                 heads};
  for (int64_t i = 0; i < rows * k / 2; ++i) {
    const double angle = random.uniform(0, 6);
    in.rope.set(2 * i, static_cast<float>(std::cos(angle)));
    in.rope.set(2 * i + 1, static_cast<float>(std::sin(angle)));
  }
  return in;
}

}  // namespace cachalot::test
