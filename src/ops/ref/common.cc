#include "ops/ref/common.h"

namespace cachalot::ops::ref {

std::vector<float> weight_row(const Weight& weight, int64_t row) {
  const int64_t n = weight.in;
  std::vector<float> values(static_cast<size_t>(n));
  switch (weight.format) {
    case WeightFormat::kF32:
    case WeightFormat::kBF16:
      for (int64_t i = 0; i < n; ++i) {
        values[static_cast<size_t>(i)] = load(weight.values, row * n + i);
      }
      break;
    case WeightFormat::kFp8Block: {
      const auto* scales =
          static_cast<const uint8_t*>(weight.scales.data) + row / 32 * quant::blocks(n, 32);
      quant::fp8_dequantize(
          static_cast<const uint8_t*>(weight.values.data) + row * n, scales, n, values.data());
      break;
    }
    case WeightFormat::kFp8Row:
      quant::fp8_dequantize(
          static_cast<const uint8_t*>(weight.values.data) + row * n,
          static_cast<const uint8_t*>(weight.scales.data) + row * quant::blocks(n, 32),
          n,
          values.data());
      break;
    case WeightFormat::kFp4Row:
      quant::fp4_index_dequantize(
          static_cast<const uint8_t*>(weight.values.data) + row * n / 2,
          static_cast<const uint8_t*>(weight.scales.data) + row * quant::blocks(n, 32),
          n,
          values.data());
      break;
  }
  return values;
}

std::vector<float> input_row(const TensorView& x, int64_t row, bool quantize) {
  const int64_t n = x.dim(1);
  std::vector<float> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    values[static_cast<size_t>(i)] = load(x, row * n + i);
  }
  if (quantize && x.dtype == DType::kBF16) {
    std::vector<uint8_t> codes(static_cast<size_t>(n));
    std::vector<uint8_t> scales(static_cast<size_t>(quant::blocks(n, quant::kFp8Block)));
    quant::fp8_quantize(values.data(), n, codes.data(), scales.data());
    quant::fp8_dequantize(codes.data(), scales.data(), n, values.data());
  }
  return values;
}

std::vector<double> rms_norm(const std::vector<double>& x, const TensorView& weight, double eps) {
  double sum = 0;
  for (double v : x) {
    sum += v * v;
  }
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = x[i] * scale * load(weight, static_cast<int64_t>(i));
  }
  return y;
}

void rotate(double* x, int64_t n, const float* cos_sin, int64_t half, int sign) {
  double* tail = x + n - 2 * half;
  for (int64_t i = 0; i < half; ++i) {
    const double c = cos_sin[2 * i], s = sign * static_cast<double>(cos_sin[2 * i + 1]);
    const double a = tail[2 * i], b = tail[2 * i + 1];
    tail[2 * i] = a * c - b * s;
    tail[2 * i + 1] = a * s + b * c;
  }
}

}  // namespace cachalot::ops::ref
