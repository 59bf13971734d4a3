// A model ready to run: the config, what follows from it, and views of the weights.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"
#include "model/engram_constants.h"
#include "model/schedule.h"
#include "model/weights.h"

namespace cachalot::model {

struct Model {
  ModelConfig config;
  std::vector<LayerSpec> layers;
  std::vector<LayerSpec> draft;             // stages; empty without the drafter's weights
  ModelWeights weights;                     // views; the checkpoint must outlive the model
  std::vector<EngramConstants> engram;      // per Engram layer
  std::vector<int32_t> token_class;         // [V] Engram class of each token; empty without Engram
  std::vector<float> window_frequency;      // [R/2]
  std::vector<float> compressed_frequency;  // [R/2]

  // Position of a layer among kv_source_layer_ids, or -1.
  int64_t source_slot(int64_t layer) const;
};

// Weights without draft stages make a model without a drafter, whatever the config says.
// `token_class` is required iff the model has Engram layers: V classes in
// [0, engram_compressed_vocab_size).
Result<Model> make_model(const ModelConfig& config,
                         ModelWeights weights,
                         std::vector<int32_t> token_class);

}  // namespace cachalot::model
