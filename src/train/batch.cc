#include "train/batch.h"

namespace cachalot::train {

Batch make_batch(std::span<const Sample> samples) {
  Batch batch;
  for (size_t s = 0; s < samples.size(); ++s) {
    const Sample& sample = samples[s];
    const auto first = static_cast<int32_t>(batch.rows());
    batch.sample_begin.push_back(first);
    for (size_t i = 0; i < sample.tokens.size(); ++i) {
      const bool learns =
          i + 1 < sample.tokens.size() && (sample.learn.empty() || sample.learn[i + 1] != 0);
      batch.token.push_back(sample.tokens[i]);
      batch.target.push_back(learns ? sample.tokens[i + 1] : -1);
      batch.position.push_back(static_cast<int32_t>(i));
      batch.sample.push_back(static_cast<int32_t>(s));
      batch.first_row.push_back(first);
      batch.is_image.push_back(0);
      batch.targets += learns ? 1 : 0;
    }
  }
  batch.sample_begin.push_back(static_cast<int32_t>(batch.rows()));
  return batch;
}

}  // namespace cachalot::train
