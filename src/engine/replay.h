// What a mode leaves out of a request's past, and what it computes again.
//
// A prompt of n tokens runs through the decoder layers from decoder_from(n) on. A request that
// found the compressed rows of [0, hit), but no window state, runs again from encoder_from(hit) on
// to rebuild its windows. The rows in front of these positions are missing in the windows of the
// first rows behind them; each layer carries that W - 1 positions further. Mode `replay` accepts
// this, as the model's training does. Modes `exact` and `halo` start so much earlier that nothing
// of it is left where it matters; they differ in the decoder, which mode `exact` runs in full.
#pragma once

#include <cstdint>

#include "engine/runtime.h"
#include "model/step.h"

namespace cachalot::engine {

class ReplayPolicy {
 public:
  ReplayPolicy(const model::Model& model, Mode mode);

  int64_t decoder_from(int64_t prompt) const;

  // Whether a window state serves a prompt: `position` is its place, `rows_from` the first position
  // of which its decoder rings have rows.
  bool serves(int64_t prompt, int64_t position, int64_t rows_from) const;

  // The replay of a request without any hit.
  model::Replay cold(int64_t prompt) const;
  // Of one that goes on from such a state.
  model::Replay from_state(int64_t prompt, int64_t position, int64_t rows_from) const;
  // Of one that found compressed rows alone; `encoder_from` is not positive if the hit is of no
  // use.
  model::Replay from_rows(int64_t prompt, int64_t hit) const;

 private:
  Mode mode_;
  int64_t window_;
  int64_t encoder_reach_;  // positions that the encoder layers together look back
  int64_t decoder_reach_;
};

}  // namespace cachalot::engine
