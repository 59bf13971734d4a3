// What each layer does, derived from the config once.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace cachalot::model {

enum class LayerMode : uint8_t {
  kWindow,   // sliding window only
  kFull,     // own compressor, index keys, index queries
  kReindex,  // own index queries over the KV source's entries
  kReuse,    // the last published selection over the KV source's entries
};

struct LayerSpec {
  int64_t index = 0;
  int64_t ratio = 0;  // 0: window only
  LayerMode mode = LayerMode::kWindow;
  int64_t kv_source = -1;         // layer whose compressed cache is read, or -1
  int64_t index_source = -1;      // layer whose selection is used, or -1
  int64_t candidate_source = -1;  // for an index source restricted by candidates: their layer
  bool publishes_candidates = false;
  int64_t engram = -1;  // index into engram_layer_ids, or -1
  int64_t tap = -1;     // index into dspark_target_layer_ids, or -1
  int64_t stage = -1;   // of the drafter; -1: a backbone layer
  int64_t experts_per_token = 0;
  // The last KV source and the layers behind it: no state of theirs but window rows reaches beyond
  // the source's own compressed rows, so a prompt need not run through them in full.
  bool decoder = false;
  bool operator==(const LayerSpec&) const = default;
};

// One entry per backbone layer. `config` must be valid.
std::vector<LayerSpec> layer_schedule(const ModelConfig& config);

// One entry per draft stage: window layers that count on behind the backbone's. Empty without a
// drafter.
std::vector<LayerSpec> draft_schedule(const ModelConfig& config);

// "window", "full", "reindex", "reuse".
std::string_view mode_name(LayerMode mode);

}  // namespace cachalot::model
