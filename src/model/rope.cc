#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace cachalot::model {
namespace {

std::vector<double> plain_frequencies(double base, int64_t rotary) {
  std::vector<double> f;
  for (int64_t i = 0; i < rotary / 2; ++i) {
    f.push_back(std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(rotary)));
  }
  return f;
}

std::vector<float> to_float(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

std::vector<float> window_frequencies(const ModelConfig& config) {
  return to_float(plain_frequencies(config.rope_theta, config.qk_rope_head_dim));
}

std::vector<float> vision_frequencies(const VisionConfig& config) {
  const int64_t head_dim = config.hidden_size / config.num_attention_heads;
  return to_float(plain_frequencies(config.rope_theta, head_dim / 2));
}

std::vector<float> compressed_frequencies(const ModelConfig& config) {
  const double base = config.compress_rope_theta;
  const auto rotary = static_cast<double>(config.qk_rope_head_dim);
  std::vector<double> f = plain_frequencies(base, config.qk_rope_head_dim);
  if (!config.has_rope_scaling) {
    return to_float(f);
  }
  const RopeScaling& yarn = config.rope_scaling;
  // The pair index whose wavelength completes `turns` rotations over the original context.
  const auto correction = [&](double turns) {
    return rotary *
           std::log(static_cast<double>(yarn.original_max_position_embeddings) /
                    (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(base));
  };
  const double low = std::max(std::floor(correction(yarn.beta_fast)), 0.0);
  const double high = std::min(std::ceil(correction(yarn.beta_slow)), rotary - 1.0);
  for (size_t i = 0; i < f.size(); ++i) {
    const double ramp =
        std::clamp((static_cast<double>(i) - low) / std::max(high - low, 1e-3), 0.0, 1.0);
    f[i] = f[i] / yarn.factor * ramp + f[i] * (1.0 - ramp);
  }
  return to_float(f);
}

}  // namespace cachalot::model
