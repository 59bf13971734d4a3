// Linears, router and experts.
// Source of the rules: official reference, model.py (Linear, Gate, Expert, MoE) and kernel.py.
#include <algorithm>
#include <limits>

#include "ops/ref/common.h"
#include "ops/ref/kernels.h"

namespace cachalot::ops::ref {
namespace {

// x W^T of one input row, not yet rounded; the row is quantized if the weight's format asks for it.
std::vector<double> matvec(const TensorView& x, int64_t row, const Weight& weight, bool quantize) {
  const std::vector<float> input = input_row(x, row, quantize && weight.quantizes_input());
  std::vector<double> y(static_cast<size_t>(weight.out));
  for (int64_t o = 0; o < weight.out; ++o) {
    const std::vector<float> w = weight_row(weight, o);
    double sum = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      sum += static_cast<double>(input[i]) * w[i];
    }
    y[static_cast<size_t>(o)] = sum;
  }
  return y;
}

// One expert on one row; `weight` multiplies the hidden values before w2.
std::vector<double> expert(
    const TensorView& x, int64_t row, const ExpertView& w, double limit, double weight) {
  const std::vector<double> gate = matvec(x, row, w.w1, true);
  const std::vector<double> up = matvec(x, row, w.w3, true);
  std::vector<float> memory(gate.size());
  std::vector<bf16> memory_bf16(gate.size());
  TensorView hidden(memory.data(), DType::kF32, {1, w.w1.out});
  if (x.dtype == DType::kBF16) {
    hidden = TensorView(memory_bf16.data(), DType::kBF16, {1, w.w1.out});
  }
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = std::min<double>(rounded(gate[i], x.dtype), limit);
    const double u = std::clamp<double>(rounded(up[i], x.dtype), -limit, limit);
    store(hidden, static_cast<int64_t>(i), g * sigmoid(g) * u * weight);
  }
  return matvec(hidden, 0, w.w2, true);
}

// ln(1 + e^x) without overflow or cancellation.
double softplus(double x) {
  return x > 20.0 ? x : std::log1p(std::exp(x));
}

}  // namespace

Status linear(OpContext&, const LinearArgs& args) {
  const int64_t t = args.x.dim(0);
  for (const LinearTarget& target : args.targets) {
    const Weight& w = *target.weight;
    const int64_t group_rows = w.out / args.groups;
    for (int64_t row = 0; row < t; ++row) {
      const std::vector<float> x =
          input_row(args.x, row, args.quantize_input && w.quantizes_input());
      for (int64_t o = 0; o < w.out; ++o) {
        const std::vector<float> weights = weight_row(w, o);
        const float* input = x.data() + o / group_rows * w.in;
        double sum = 0;
        for (int64_t i = 0; i < w.in; ++i) {
          sum += static_cast<double>(input[i]) * weights[static_cast<size_t>(i)];
        }
        store(target.y, row * w.out + o, sum);
      }
    }
  }
  return {};
}

Status gate(OpContext&, const GateArgs& args) {
  const int64_t t = args.x.dim(0), e = args.weight.out, k = args.experts.dim(1);
  for (int64_t row = 0; row < t; ++row) {
    std::vector<double> scores = matvec(args.x, row, args.weight, false);
    for (double& score : scores) {
      score = std::sqrt(softplus(score / args.temperature));
    }
    const bool image = args.rows.is_image.as<uint8_t>()[row] != 0;
    const float* bias = (image ? args.bias_vl : args.bias).as<float>();
    int32_t* chosen = args.experts.as<int32_t>() + row * k;
    if (args.forced.empty()) {
      std::vector<int32_t> order(static_cast<size_t>(e));
      for (int64_t i = 0; i < e; ++i) {
        order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
      }
      // FP32 sums, as the model adds them: a tie there is a tie in the model.
      const auto biased = [&](int32_t i) {
        return static_cast<float>(scores[static_cast<size_t>(i)]) + bias[i];
      };
      std::stable_sort(
          order.begin(), order.end(), [&](int32_t a, int32_t b) { return biased(a) > biased(b); });
      std::sort(order.begin(), order.begin() + k);
      std::copy_n(order.begin(), k, chosen);
    } else {
      std::copy_n(args.forced.as<int32_t>() + row * k, k, chosen);
    }
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      sum += scores[static_cast<size_t>(chosen[i])];
    }
    const double divisor = k > 1 ? sum + 1e-20 : 1.0;
    for (int64_t i = 0; i < k; ++i) {
      args.weights.as<float>()[row * k + i] =
          static_cast<float>(scores[static_cast<size_t>(chosen[i])] / divisor * args.scale);
    }
  }
  return {};
}

Status experts(OpContext&, const ExpertsArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1), k = args.experts.dim(1);
  for (int64_t row = 0; row < t; ++row) {
    std::vector<double> sum(static_cast<size_t>(d), 0.0);
    const auto add = [&](const ExpertView& w, double weight) {
      const std::vector<double> y = expert(args.x, row, w, args.limit, weight);
      for (int64_t i = 0; i < d; ++i) {
        sum[static_cast<size_t>(i)] += rounded(y[static_cast<size_t>(i)], args.x.dtype);
      }
    };
    for (int64_t i = 0; i < k; ++i) {
      add(args.routed[static_cast<size_t>(args.experts.as<int32_t>()[row * k + i])],
          args.weights.as<float>()[row * k + i]);
    }
    for (const ExpertView& shared : args.shared) {
      add(shared, 1.0);
    }
    for (int64_t i = 0; i < d; ++i) {
      store(args.y, row * d + i, sum[static_cast<size_t>(i)]);
    }
  }
  return {};
}

}  // namespace cachalot::ops::ref
