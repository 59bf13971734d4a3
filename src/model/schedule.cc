#include "model/schedule.h"

#include <algorithm>

namespace cachalot::model {
namespace {

// The largest element <= id, or -1. `ids` ascends.
int64_t last_at_or_before(const std::vector<int64_t>& ids, int64_t id) {
  int64_t found = -1;
  for (int64_t candidate : ids) {
    if (candidate <= id) {
      found = candidate;
    }
  }
  return found;
}

// Position of `id` in `ids`, or -1.
int64_t index_of(const std::vector<int64_t>& ids, int64_t id) {
  const auto at = std::find(ids.begin(), ids.end(), id);
  return at == ids.end() ? -1 : at - ids.begin();
}

}  // namespace

std::vector<LayerSpec> layer_schedule(const ModelConfig& config) {
  std::vector<LayerSpec> layers;
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    LayerSpec layer;
    layer.index = l;
    layer.ratio = config.compress_ratios[static_cast<size_t>(l)];
    if (layer.ratio > 0) {
      layer.kv_source = last_at_or_before(config.kv_source_layer_ids, l);
      layer.index_source = last_at_or_before(config.index_source_layer_ids, l);
      layer.mode = layer.kv_source == l      ? LayerMode::kFull
                   : layer.index_source == l ? LayerMode::kReindex
                                             : LayerMode::kReuse;
      layer.publishes_candidates = l == config.candidate_source_layer_id;
      // Candidates restrict the index sources behind their source, never the source itself.
      if (layer.index_source == l && config.candidate_source_layer_id >= 0 &&
          l > config.candidate_source_layer_id) {
        layer.candidate_source = config.candidate_source_layer_id;
      }
    }
    layer.decoder = !config.kv_source_layer_ids.empty() && l >= config.kv_source_layer_ids.back();
    layer.engram = index_of(config.engram_layer_ids, l);
    layer.tap = index_of(config.dspark_target_layer_ids, l);
    layer.experts_per_token = config.num_experts_per_tok;
    layers.push_back(layer);
  }
  return layers;
}

std::vector<LayerSpec> draft_schedule(const ModelConfig& config) {
  std::vector<LayerSpec> stages;
  for (int64_t stage = 0; stage < config.num_nextn_predict_layers; ++stage) {
    LayerSpec layer;
    layer.index = config.num_hidden_layers + stage;
    layer.stage = stage;
    layer.experts_per_token = config.dspark_num_experts_per_tok;
    layer.decoder = true;  // its context comes from the rows that reach the last layers
    stages.push_back(layer);
  }
  return stages;
}

std::string_view mode_name(LayerMode mode) {
  switch (mode) {
    case LayerMode::kWindow:
      return "window";
    case LayerMode::kFull:
      return "full";
    case LayerMode::kReindex:
      return "reindex";
    case LayerMode::kReuse:
      return "reuse";
  }
  return "unknown";
}

}  // namespace cachalot::model
