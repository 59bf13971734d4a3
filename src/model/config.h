// The numbers that define a model of the DeepSeek-V4.1 architecture.
//
// Two spellings are read: the official nested config.json (text_config, vision_config,
// quantization_config) and the flat inference/config.json. A config that passed validate() is
// trusted by all later code.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace cachalot::model {

// How the weights that the official release quantizes are stored.
enum class WeightStorage : uint8_t {
  kOfficial,  // FP8 32x32 blocks, packed FP4 experts, FP8 Engram rows
  kF32,       // all of them F32: for oracles and training
};

struct RopeScaling {
  bool operator==(const RopeScaling&) const = default;
  double factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  int64_t original_max_position_embeddings = 0;
};

struct VisionConfig {
  bool operator==(const VisionConfig&) const = default;
  int64_t num_hidden_layers = 0;  // 0: no vision tower
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t intermediate_size = 0;
  int64_t patch_size = 0;
  int64_t downsample_ratio = 0;
  int64_t max_image_tokens = 0;
  int64_t min_pixels = 0;
  double rope_theta = 10000.0;
};

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t moe_intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t q_lora_rank = 0;
  int64_t o_lora_rank = 0;
  int64_t o_groups = 0;
  double swiglu_limit = 0;
  double rms_norm_eps = 0;
  int64_t max_position_embeddings = 0;
  double rope_theta = 0;
  double compress_rope_theta = 0;
  bool has_rope_scaling = false;
  RopeScaling rope_scaling;

  int64_t n_routed_experts = 0;
  int64_t n_shared_experts = 0;
  int64_t num_experts_per_tok = 0;
  double routed_scaling_factor = 1.0;
  double gate_temp = 1.0;

  int64_t sliding_window = 0;
  std::vector<int64_t> compress_ratios;         // backbone layers, then draft stages
  std::vector<int64_t> kv_source_layer_ids;     // ascending
  std::vector<int64_t> index_source_layer_ids;  // ascending, includes every KV source
  int64_t index_n_heads = 0;
  int64_t index_head_dim = 0;
  int64_t index_topk = 0;
  int64_t candidate_source_layer_id = -1;  // -1: no candidate restriction
  int64_t candidate_topk_blocks = 0;
  int64_t candidate_block_size = 0;

  int64_t hc_mult = 0;
  int64_t hc_sinkhorn_iters = 0;
  double hc_eps = 0;

  std::vector<int64_t> engram_layer_ids;       // ascending; empty: no Engram
  std::vector<int64_t> engram_num_embeddings;  // rows per Engram layer
  int64_t engram_max_ngram_size = 0;
  int64_t engram_vocab_size = 0;
  int64_t engram_n_heads = 0;
  int64_t engram_head_dim = 0;
  int64_t engram_pad_token_id = 0;
  int64_t engram_compressed_vocab_size = 0;

  int64_t num_nextn_predict_layers = 0;  // draft stages; 0: no drafter
  int64_t dspark_block_size = 0;
  int64_t dspark_noise_token_id = 0;
  std::vector<int64_t> dspark_target_layer_ids;
  int64_t dspark_markov_rank = 0;
  int64_t dspark_n_routed_experts = 0;
  int64_t dspark_num_experts_per_tok = 0;

  int64_t bos_token_id = 0;
  int64_t eos_token_id = 1;
  int64_t pad_token_id = 2;
  int64_t image_token_id = -1;

  VisionConfig vision;
  WeightStorage storage = WeightStorage::kOfficial;

  bool operator==(const ModelConfig&) const = default;
};

// Reads either spelling. `source` names the text in errors. The result is validated.
Result<ModelConfig> parse_config(std::string_view json, const std::string& source);

// Every rule that later code relies on (positive extents, divisibility, schedule, source order,
// width multiples of 32, sane upper bounds). The error names the key and the value.
Status validate(const ModelConfig& config);

// Recomputes engram_num_embeddings from the other engram fields; an error if those are out of
// bounds.
Status derive_engram_rows(ModelConfig& config);

// The nested official spelling, readable by parse_config().
std::string config_to_json(const ModelConfig& config);

// A named preset ("t1", "t1-vision", "micro", "nano", "bench-s", "v41-flash", "v41-slice"); the
// error lists the names. Every preset is valid.
Result<ModelConfig> preset_config(std::string_view name);

// Applies "key=value" to a config by its official key: integers, numbers, and lists as "[1, 2]";
// nested keys as "rope_scaling.factor" and "vision_config.hidden_size". An engram key also
// recomputes engram_num_embeddings. Not validated: several settings may be needed before the config
// is consistent again.
Status set_config_value(ModelConfig& config, std::string_view assignment);

}  // namespace cachalot::model
