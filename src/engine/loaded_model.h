// A checkpoint in memory, ready to run.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/runtime_options.h"
#include "kvcache/prefix_key.h"
#include "model/checkpoint.h"
#include "model/device_weights.h"
#include "model/model.h"
#include "text/tokenizer.h"

namespace cachalot::engine {

// Immutable, so any thread may read it. Whoever needs the weights shares the object; they are freed
// with the last reference.
class LoadedModel {
 public:
  // On a backend with memory of its own, copies the weights there. Errors name the file;
  // kResourceExhausted: they do not fit.
  static Result<std::shared_ptr<const LoadedModel>> make(model::Checkpoint checkpoint,
                                                         const text::Tokenizer& tokenizer,
                                                         const RuntimeOptions& options);

  const std::string& directory() const { return checkpoint_.directory(); }
  const model::Model& model() const { return model_; }
  // Of the drafter's confidence, by position; empty without a drafter.
  const std::vector<double>& draft_temperatures() const { return draft_temperatures_; }
  // Names the weights: 16 hexadecimal digits.
  const std::string& fingerprint() const { return fingerprint_; }
  // What the content of a cached row depends on besides its tokens: the weights, and how the model
  // is run.
  const kvcache::PrefixKey& cache_key() const { return cache_key_; }

 private:
  explicit LoadedModel(model::Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}

  model::Checkpoint checkpoint_;
  model::DeviceWeights device_weights_;  // of a backend with its own memory
  model::Model model_;
  std::vector<double> draft_temperatures_;
  std::string fingerprint_;
  kvcache::PrefixKey cache_key_;
};

// Where two configs differ, for messages: "text_config.hidden_size is 64, not 128". Empty if they
// are equal.
std::string config_difference(const model::ModelConfig& config, const model::ModelConfig& expected);

}  // namespace cachalot::engine
