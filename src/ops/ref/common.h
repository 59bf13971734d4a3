// Shared by the reference kernels: element access by dtype, norms, rotation. Double throughout; a
// value is rounded only where it is stored.
#pragma once

#include <algorithm>
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

// Softmax over keys in blocks of 64, in order: a probability is relative to the largest score so
// far and rounded to the activations' dtype before it weights a value; the sum takes it unrounded.
// Source of the rule: official reference, kernel.py (sparse_attn).
struct BlockSoftmax {
  explicit BlockSoftmax(int64_t k) : o(static_cast<size_t>(k), 0.0) {}

  // Adds `keys` keys: score_of(j), and value_of(j), the k values of key j.
  template <typename ScoreOf, typename ValueOf>
  void add(int64_t keys, DType act, const ScoreOf& score_of, const ValueOf& value_of);

  double best = -1e30;    // the largest score so far
  double sum = 0;         // of the probabilities
  std::vector<double> o;  // of the weighted values
};

template <typename ScoreOf, typename ValueOf>
void BlockSoftmax::add(int64_t keys, DType act, const ScoreOf& score_of, const ValueOf& value_of) {
  constexpr int64_t kBlock = 64;
  for (int64_t begin = 0; begin < keys; begin += kBlock) {
    const int64_t end = std::min(keys, begin + kBlock);
    std::vector<double> scores;
    double block_best = best;
    for (int64_t j = begin; j < end; ++j) {
      scores.push_back(score_of(j));
      block_best = std::max(block_best, scores.back());
    }
    const double rescale = std::exp(best - block_best);
    best = block_best;
    sum *= rescale;
    for (double& value : o) {
      value *= rescale;
    }
    for (int64_t j = begin; j < end; ++j) {
      const double probability = std::exp(scores[static_cast<size_t>(j - begin)] - best);
      sum += probability;
      const double weight = rounded(probability, act);
      const auto* values = value_of(j);
      for (size_t i = 0; i < o.size(); ++i) {
        o[i] += weight * values[i];
      }
    }
  }
}

}  // namespace cachalot::ops::ref
