// How a model is run.
#pragma once

#include <cstdint>

#include "model/device_weights.h"
#include "model/step.h"
#include "ops/context.h"

namespace cachalot::engine {

// What of a prompt runs through which layers; see replay.h.
enum class Mode : uint8_t {
  kExact,   // every row through every layer
  kReplay,  // bounded replays, as the model is trained for
  kHalo,    // bounded replays wide enough to give the bits of kExact
};

struct RuntimeOptions {
  ops::Backend backend = ops::Backend::kCpu;
  int threads = 0;  // 0: one per processor
  Mode mode = Mode::kExact;
  model::Precision precision = model::Precision::kOfficial;
  model::TablePlace tables = model::TablePlace::kAuto;
  bool draft = false;             // load the drafter and keep its context in every cache
  int64_t page_tokens = 0;        // 0: 128, or 16 for models with a window below 64
  int64_t max_cached_tokens = 0;  // 0: bounded by memory alone
};

}  // namespace cachalot::engine
