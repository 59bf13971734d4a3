// Rotary frequencies.
#pragma once

#include <vector>

#include "model/config.h"

namespace cachalot::model {

// The R/2 frequencies base^(-2i/R), computed in double and rounded to FP32. Window-only layers and
// the drafter use rope_theta without scaling; layers with a compressed cache use
// compress_rope_theta and, where rope_scaling is given, YaRN for everything they rotate. No
// attention factor. Source: official reference, model.py (precompute_freqs_cis).
std::vector<float> window_frequencies(const ModelConfig& config);
std::vector<float> compressed_frequencies(const ModelConfig& config);
// Of each of the two axes of an image, [head dim / 4].
std::vector<float> vision_frequencies(const VisionConfig& config);

}  // namespace cachalot::model
