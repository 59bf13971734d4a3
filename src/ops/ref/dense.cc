// The ops of the image encoder.
// Source of the rules: official reference, vision.py (Attention, MLP, Aligner).
#include <algorithm>
#include <array>
#include <numbers>

#include "ops/ref/common.h"
#include "ops/ref/kernels.h"

namespace cachalot::ops::ref {

Status dense(OpContext&, const DenseArgs& args) {
  const int64_t n = args.x.dim(0), out = args.weight.out, width = args.y.dim(1);
  const DType act = args.x.dtype;
  std::vector<std::vector<float>> weights;
  for (int64_t o = 0; o < out; ++o) {
    weights.push_back(weight_row(args.weight, o));
  }
  for (int64_t row = 0; row < n; ++row) {
    const std::vector<float> x = input_row(args.x, row, false);
    const auto product = [&](int64_t o) {
      double sum = args.bias.empty() ? 0.0 : load(args.bias, o);
      for (size_t i = 0; i < x.size(); ++i) {
        sum += static_cast<double>(x[i]) * weights[static_cast<size_t>(o)][i];
      }
      return rounded(sum, act);
    };
    std::vector<double> y;
    for (int64_t o = 0; o < width; ++o) {
      const double value = product(o);
      switch (args.function) {
        case DenseFunction::kIdentity:
          y.push_back(value);
          break;
        case DenseFunction::kGelu:
          y.push_back(0.5 * value * std::erfc(-value / std::numbers::sqrt2));
          break;
        case DenseFunction::kSwiglu:
          y.push_back(static_cast<double>(rounded(value * sigmoid(value), act)) *
                      product(width + o));
          break;
      }
    }
    for (int64_t o = 0; o < width; ++o) {
      const int64_t at = row * width + o;
      const double value = y[static_cast<size_t>(o)];
      store(args.y,
            at,
            args.residual.empty() ? value : rounded(value, act) + double{load(args.residual, at)});
    }
  }
  return {};
}

Status dense_attend(OpContext&, const DenseAttendArgs& args) {
  const int64_t n = args.o.dim(0), width = args.o.dim(1), k = width / args.heads, half = k / 2;
  const DType act = args.o.dtype;
  const double scale = 1.0 / std::sqrt(static_cast<double>(k));
  // q, k and v of one head, [N, K] each.
  std::array<std::vector<double>, 3> head;
  for (int64_t h = 0; h < args.heads; ++h) {
    for (int64_t part = 0; part < 3; ++part) {
      std::vector<double>& rows = head[static_cast<size_t>(part)];
      rows.assign(static_cast<size_t>(n * k), 0.0);
      for (int64_t row = 0; row < n; ++row) {
        double* to = rows.data() + row * k;
        for (int64_t i = 0; i < k; ++i) {
          to[i] = load(args.qkv, (row * 3 + part) * width + h * k + i);
        }
        for (int64_t i = 0; i < half && part < 2; ++i) {
          const float* cos_sin = args.rope.as<float>() + (row * half + i) * 2;
          const double a = to[i], b = to[half + i], c = cos_sin[0], s = cos_sin[1];
          to[i] = rounded(a * c - b * s, act);
          to[half + i] = rounded(b * c + a * s, act);
        }
      }
    }
    for (int64_t row = 0; row < n; ++row) {
      const double* q = head[0].data() + row * k;
      BlockSoftmax softmax(k);
      const auto score = [&](int64_t j) {
        double dot = 0;
        for (int64_t i = 0; i < k; ++i) {
          dot += q[i] * head[1][static_cast<size_t>(j * k + i)];
        }
        return dot * scale;
      };
      softmax.add(n, act, score, [&](int64_t j) { return head[2].data() + j * k; });
      for (int64_t i = 0; i < k; ++i) {
        store(args.o, row * width + h * k + i, softmax.o[static_cast<size_t>(i)] / softmax.sum);
      }
    }
  }
  return {};
}

}  // namespace cachalot::ops::ref
