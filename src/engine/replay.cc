#include "engine/replay.h"

#include <algorithm>

namespace cachalot::engine {

ReplayPolicy::ReplayPolicy(const model::Model& model, Mode mode)
    : mode_(mode), window_(model.config.sliding_window) {
  const auto decoder = std::count_if(model.layers.begin(),
                                     model.layers.end(),
                                     [](const model::LayerSpec& layer) { return layer.decoder; });
  const auto encoder = static_cast<int64_t>(model.layers.size()) - decoder;
  encoder_reach_ = encoder * (window_ - 1);
  decoder_reach_ = decoder * (window_ - 1);
}

int64_t ReplayPolicy::decoder_from(int64_t prompt) const {
  switch (mode_) {
    case Mode::kReplay:
      return std::max<int64_t>(0, prompt - window_);
    case Mode::kHalo:
      return std::max<int64_t>(0, prompt - 1 - decoder_reach_);
    case Mode::kExact:
      break;
  }
  return 0;
}

bool ReplayPolicy::serves(int64_t prompt, int64_t position, int64_t rows_from) const {
  // Either the decoder starts behind it anyway, or its rings are as full as at a prompt's end. In
  // mode exact they always are.
  return mode_ == Mode::kExact || decoder_from(prompt) >= position ||
         rows_from <= decoder_from(position);
}

model::Replay ReplayPolicy::cold(int64_t prompt) const {
  return {.decoder_from = decoder_from(prompt)};
}

model::Replay ReplayPolicy::from_state(int64_t prompt, int64_t position, int64_t rows_from) const {
  if (mode_ == Mode::kExact) {
    return {};
  }
  const int64_t start = decoder_from(prompt);
  return {.decoder_from = start >= position ? start : rows_from};
}

model::Replay ReplayPolicy::from_rows(int64_t prompt, int64_t hit) const {
  model::Replay replay{.decoder_from = decoder_from(prompt), .stored = hit};
  switch (mode_) {
    case Mode::kReplay:
      replay.encoder_from = hit - window_;
      break;
    case Mode::kHalo:
      // What the decoder starts with must be exact, too.
      replay.encoder_from = std::min(hit, replay.decoder_from) - encoder_reach_;
      break;
    case Mode::kExact:
      replay.encoder_from = replay.decoder_from = hit - encoder_reach_ - decoder_reach_;
      break;
  }
  return replay;
}

}  // namespace cachalot::engine
