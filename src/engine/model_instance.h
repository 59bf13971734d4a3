// Weights with what runs on them. One version serves at a time; a replaced one ends with the last
// request that began on it.
#pragma once

#include <memory>

#include "engine/loaded_model.h"
#include "engine/prefix_cache.h"
#include "engine/speculation.h"
#include "model/step.h"

namespace cachalot::engine {

struct ModelInstance {
  ModelInstance(std::shared_ptr<const LoadedModel> loaded_,
                Runtime& runtime,
                const EngineOptions& options,
                kvcache::Tiers* tiers)
      : loaded(std::move(loaded_)), prefixes(runtime, *loaded, options, tiers) {}

  std::shared_ptr<const LoadedModel> loaded;
  std::unique_ptr<model::StepRunner> runner;
  std::unique_ptr<Speculator> speculator;  // null: no drafter
  PrefixCache prefixes;
};

}  // namespace cachalot::engine
