// Weights with what runs on them. One version serves at a time; a replaced one ends with the last
// request that began on it.
#pragma once

#include <memory>

#include "engine/image_encoder.h"
#include "engine/loaded_model.h"
#include "engine/prefix_cache.h"
#include "engine/speculation.h"
#include "model/step.h"

namespace cachalot::engine {

struct ModelInstance {
  ModelInstance(std::shared_ptr<const LoadedModel> loaded_,
                Runtime& runtime,
                const EngineOptions& options,
                kvcache::Tiers* tiers,
                ImageEncoder& encoder)
      : loaded(std::move(loaded_)),
        prefixes(runtime, *loaded, options, tiers),
        images(encoder, options.image_cache_bytes) {}

  // Other weights serve from now on: gives up what only later requests would use.
  void retire() {
    prefixes.retire();
    images.clear();
  }

  std::shared_ptr<const LoadedModel> loaded;
  std::unique_ptr<model::StepRunner> runner;
  std::unique_ptr<Speculator> speculator;  // null: no drafter
  PrefixCache prefixes;
  EncodedImages images;
};

}  // namespace cachalot::engine
