#include "model/synth.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <vector>

#include "base/rng.h"
#include "model/checkpoint_writer.h"

namespace cachalot::model {
namespace {

constexpr double kEmbeddingOutlier = 4.0;
constexpr double kNormOutlier = 3.0;
constexpr double kCombDiagonal = 2.0;

Philox stream_of(uint64_t seed, std::string_view name) {
  return Philox(seed, XXH3_64bits(name.data(), name.size()));
}

// About standard normal: the sum of the four bytes of a word. Uses no function of the C library, so
// the bytes of a checkpoint do not depend on the machine.
float normal_from(uint32_t word) {
  constexpr float kMean = 510.0f;                   // 4 * 127.5
  constexpr float kInverseDeviation = 1 / 147.80f;  // 4 * (256^2 - 1) / 12 is its square
  const uint32_t pairs = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF);
  const auto sum = static_cast<int32_t>((pairs + (pairs >> 16)) & 0xFFFF);
  return (static_cast<float>(sum) - kMean) * kInverseDeviation;
}

// Elements [begin, begin + out.size()); each 32-bit word of the generator gives one.
void fill_normal(const Philox& random, int64_t begin, std::span<float> out) {
  size_t i = 0;
  auto index = static_cast<uint64_t>(begin);
  const auto one = [&] {
    out[i++] = normal_from(random.words(index / 4)[index % 4]);
    ++index;
  };
  while (i < out.size() && index % 4 != 0) {
    one();
  }
  for (; i + 4 <= out.size(); i += 4, index += 4) {
    const std::array<uint32_t, 4> words = random.words(index / 4);
    for (size_t k = 0; k < 4; ++k) {
      out[i + k] = normal_from(words[k]);
    }
  }
  while (i < out.size()) {
    one();
  }
}

// Draws the elements of one weight.
class Generator {
 public:
  Generator(const ModelConfig& config, const WeightSpec& spec, uint64_t seed)
      : random_(stream_of(seed, spec.name)),
        mean_(static_cast<float>(spec.mean)),
        deviation_(static_cast<float>(spec.deviation)) {
    if (spec.role == WeightRole::kEmbedding || spec.role == WeightRole::kImageVector) {
      // The same channels for all tokens, as the residual stream of a trained model has them.
      channel_factors(
          stream_of(seed, "outlier channels"), spec.shape[spec.shape.rank - 1], kEmbeddingOutlier);
    } else if (spec.role == WeightRole::kNorm) {
      channel_factors(stream_of(seed, spec.name + " outliers"), spec.shape[0], kNormOutlier);
    } else if (spec.role == WeightRole::kHcBase) {
      // Streams keep most of themselves; a constant comb would hide a transposed one.
      const int64_t m = config.hc_mult;
      offsets_.assign(static_cast<size_t>(spec.shape[0]), 0.0f);
      for (int64_t j = 0; j < m; ++j) {
        offsets_[static_cast<size_t>(2 * m + j * m + j)] = kCombDiagonal;
      }
    }
  }

  // Elements [begin, begin + out.size()).
  void operator()(int64_t begin, std::span<float> out) const {
    fill_normal(random_, begin, out);
    for (float& value : out) {
      value = mean_ + deviation_ * value;
    }
    for (size_t i = 0; !factors_.empty() && i < out.size(); ++i) {
      out[i] *= factors_[(static_cast<size_t>(begin) + i) % factors_.size()];
    }
    for (size_t i = 0; !offsets_.empty() && i < out.size(); ++i) {
      out[i] += offsets_[static_cast<size_t>(begin) + i];
    }
  }

 private:
  // A few channels are `outlier` times larger; the RMS over all channels stays 1.
  void channel_factors(const Philox& random, int64_t channels, double outlier) {
    constexpr int64_t kChannelsPerOutlier = 256;
    factors_.assign(static_cast<size_t>(channels), 1.0f);
    for (int64_t i = 0; i < 1 + channels / kChannelsPerOutlier; ++i) {
      const uint64_t channel = random.words(static_cast<uint64_t>(i))[0] % factors_.size();
      factors_[channel] = static_cast<float>(outlier);
    }
    double squares = 0;
    for (const float f : factors_) {
      squares += static_cast<double>(f) * static_cast<double>(f);
    }
    const auto norm = static_cast<float>(std::sqrt(static_cast<double>(channels) / squares));
    for (float& f : factors_) {
      f *= norm;
    }
  }

  Philox random_;
  float mean_;
  float deviation_;
  std::vector<float> factors_;
  std::vector<float> offsets_;
};

}  // namespace

Status synthesize(const ModelConfig& config,
                  const std::string& directory,
                  const SynthOptions& options,
                  ThreadPool& pool) {
  const WeightSource source = [&](const WeightSpec& spec) -> WeightValues {
    return Generator(config, spec, options.seed);
  };
  return write_checkpoint(config, directory, options.tokenizer_json, source, pool);
}

}  // namespace cachalot::model
