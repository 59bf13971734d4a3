#include "model/accounting.h"

#include "model/schedule.h"
#include "model/weights.h"
#include "quant/block.h"

namespace cachalot::model {

Accounting account(const ModelConfig& config) {
  Accounting result;
  ParameterCounts& p = result.parameters;
  const int64_t encoder_end = config.kv_source_layer_ids.empty()
                                  ? config.num_hidden_layers
                                  : config.kv_source_layer_ids.back();
  for (const WeightSpec& spec : weight_table(config)) {
    for (const StoredTensor& stored : stored_tensors(spec)) {
      ++result.tensors;
      result.total_bytes += stored.shape.elements() * dtype_bytes(stored.dtype);
    }
    const int64_t n = spec.shape.elements();
    switch (spec.part) {
      case WeightPart::kBackbone:
        p.backbone += n;
        break;
      case WeightPart::kEngram:
        p.engram += n;
        break;
      case WeightPart::kDraft:
        p.draft += n;
        break;
      case WeightPart::kVision:
        p.vision += n;
        break;
    }
    const bool is_active = spec.part == WeightPart::kBackbone &&
                           spec.role != WeightRole::kEmbedding &&
                           spec.expert < config.num_experts_per_tok;
    p.active_decode += is_active ? n : 0;
    p.active_prefill += is_active && spec.layer >= 0 && spec.layer < encoder_end ? n : 0;
  }
  p.total = p.backbone + p.engram + p.draft + p.vision;

  const int64_t entry =
      quant::main_row_bytes(config.head_dim) + quant::index_row_bytes(config.index_head_dim);
  for (const int64_t source : config.kv_source_layer_ids) {
    result.cache_bytes_per_token +=
        static_cast<double>(entry) /
        static_cast<double>(config.compress_ratios[static_cast<size_t>(source)]);
  }
  result.window_bytes_per_request =
      config.num_hidden_layers * config.sliding_window * quant::window_row_bytes(config.head_dim);
  return result;
}

}  // namespace cachalot::model
