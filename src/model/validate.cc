// The rules of a valid config. Each error names the key and the value.
#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "model/config.h"
#include "model/engram_constants.h"

namespace cachalot::model {
namespace {

// Quantized tensors have tiles or blocks of 32; the loader and the kernels rely on whole ones.
constexpr int64_t kTile = 32;

std::string to_text(const std::vector<int64_t>& list) {
  return fmt::format("[{}]", fmt::join(list, ", "));
}

struct Range {
  const char* key;
  int64_t value;
  int64_t least;
  int64_t most;
  int64_t multiple = 1;
};

Status check_ranges(std::initializer_list<Range> ranges) {
  for (const Range& r : ranges) {
    if (r.value < r.least || r.value > r.most) {
      return invalid("{} is {}; it must be in [{}, {}]", r.key, r.value, r.least, r.most);
    }
    if (r.value % r.multiple != 0) {
      return invalid("{} is {}; it must be a multiple of {}", r.key, r.value, r.multiple);
    }
  }
  return {};
}

struct Number {
  const char* key;
  double value;
  double above;  // exclusive
  double most;
};

Status check_numbers(std::initializer_list<Number> numbers) {
  for (const Number& n : numbers) {
    if (!(n.value > n.above && n.value <= n.most)) {
      return invalid(
          "{} is {}; it must be above {} and at most {}", n.key, n.value, n.above, n.most);
    }
  }
  return {};
}

// `ids` must ascend strictly inside [0, layers).
Status check_layer_ids(const char* key, const std::vector<int64_t>& ids, int64_t layers) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= layers) {
      return invalid("{} is {}; {} is not a layer of {}", key, to_text(ids), ids[i], layers);
    }
    if (i > 0 && ids[i] <= ids[i - 1]) {
      return invalid("{} is {}; it must ascend", key, to_text(ids));
    }
  }
  return {};
}

bool contains(const std::vector<int64_t>& list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

Status check_extents(const ModelConfig& c) {
  CACHALOT_RETURN_IF_ERROR(check_ranges({
      {"vocab_size", c.vocab_size, 1, int64_t{1} << 24},
      {"hidden_size", c.hidden_size, kTile, 1 << 16, kTile},
      {"moe_intermediate_size", c.moe_intermediate_size, kTile, 1 << 16, kTile},
      {"num_hidden_layers", c.num_hidden_layers, 1, 1024},
      {"num_attention_heads", c.num_attention_heads, 1, 1024},
      {"head_dim", c.head_dim, kTile, 4096, kTile},
      {"qk_rope_head_dim", c.qk_rope_head_dim, 2, c.head_dim, 2},
      {"q_lora_rank", c.q_lora_rank, kTile, 1 << 16, kTile},
      {"o_lora_rank", c.o_lora_rank, kTile, 1 << 16, kTile},
      {"o_groups", c.o_groups, 1, 1024},
      {"max_position_embeddings", c.max_position_embeddings, 1, int64_t{1} << 24},
      {"n_routed_experts", c.n_routed_experts, 1, 4096},
      {"n_shared_experts", c.n_shared_experts, 0, 1},
      {"num_experts_per_tok", c.num_experts_per_tok, 1, c.n_routed_experts},
      {"sliding_window", c.sliding_window, 1, 1 << 20},
      {"hc_mult", c.hc_mult, 1, 16},
      {"hc_sinkhorn_iters", c.hc_sinkhorn_iters, 1, 1000},
      {"bos_token_id", c.bos_token_id, 0, c.vocab_size - 1},
      {"eos_token_id", c.eos_token_id, 0, c.vocab_size - 1},
      {"pad_token_id", c.pad_token_id, 0, c.vocab_size - 1},
      {"image_token_id", c.image_token_id, -1, c.vocab_size - 1},
  }));
  // Bounds the number of tensors.
  constexpr int64_t kMostExperts = 1 << 18;
  if (c.num_hidden_layers * c.n_routed_experts > kMostExperts) {
    return invalid("n_routed_experts is {}; with num_hidden_layers {} there would be more than {}",
                   c.n_routed_experts,
                   c.num_hidden_layers,
                   kMostExperts);
  }
  if (c.num_attention_heads % c.o_groups != 0) {
    return invalid("o_groups is {}; it must divide num_attention_heads, which is {}",
                   c.o_groups,
                   c.num_attention_heads);
  }
  return check_numbers({
      {"swiglu_limit", c.swiglu_limit, 0, 1e9},
      {"rms_norm_eps", c.rms_norm_eps, 0, 0.1},
      {"rope_theta", c.rope_theta, 1, 1e12},
      {"compress_rope_theta", c.compress_rope_theta, 1, 1e12},
      {"routed_scaling_factor", c.routed_scaling_factor, 0, 1e6},
      {"gate_temp", c.gate_temp, 0, 1e6},
      {"hc_eps", c.hc_eps, 0, 0.1},
  });
}

Status check_rope_scaling(const ModelConfig& c) {
  if (!c.has_rope_scaling) {
    return {};
  }
  const RopeScaling& r = c.rope_scaling;
  CACHALOT_RETURN_IF_ERROR(check_numbers({
      {"rope_scaling.factor", r.factor, 0, 1e6},
      {"rope_scaling.beta_slow", r.beta_slow, 0, 1e6},
      {"rope_scaling.beta_fast", r.beta_fast, r.beta_slow, 1e6},
  }));
  return check_ranges({{"rope_scaling.original_max_position_embeddings",
                        r.original_max_position_embeddings,
                        1,
                        int64_t{1} << 24}});
}

// The layer schedule: every later part trusts that layer_schedule() finds what it looks for.
Status check_schedule(const ModelConfig& c) {
  const int64_t layers = c.num_hidden_layers;
  if (static_cast<int64_t>(c.compress_ratios.size()) != layers + c.num_nextn_predict_layers) {
    return invalid(
        "compress_ratios has {} entries; num_hidden_layers {} and num_nextn_predict_layers {} need "
        "{}",
        c.compress_ratios.size(),
        layers,
        c.num_nextn_predict_layers,
        layers + c.num_nextn_predict_layers);
  }
  CACHALOT_RETURN_IF_ERROR(check_layer_ids("kv_source_layer_ids", c.kv_source_layer_ids, layers));
  CACHALOT_RETURN_IF_ERROR(
      check_layer_ids("index_source_layer_ids", c.index_source_layer_ids, layers));
  const auto ratio = [&](int64_t layer) { return c.compress_ratios[static_cast<size_t>(layer)]; };
  for (const int64_t source : c.kv_source_layer_ids) {
    if (!contains(c.index_source_layer_ids, source)) {
      return invalid("index_source_layer_ids is {}; it must contain the KV source {}",
                     to_text(c.index_source_layer_ids),
                     source);
    }
  }
  int64_t kv_source = -1;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t r = ratio(layer);
    if (r < 0 || r > 2) {
      return invalid("compress_ratios[{}] is {}; it must be 0, 1 or 2", layer, r);
    }
    const bool is_kv = contains(c.kv_source_layer_ids, layer);
    if (r == 0) {
      if (is_kv || contains(c.index_source_layer_ids, layer)) {
        return invalid("{} names layer {}, but compress_ratios[{}] is 0",
                       is_kv ? "kv_source_layer_ids" : "index_source_layer_ids",
                       layer,
                       layer);
      }
      continue;
    }
    kv_source = is_kv ? layer : kv_source;
    if (kv_source < 0) {
      return invalid("kv_source_layer_ids is {}; layer {} with ratio {} has no source before it",
                     to_text(c.kv_source_layer_ids),
                     layer,
                     r);
    }
    if (ratio(kv_source) != r) {
      return invalid("compress_ratios[{}] is {}, but its KV source, layer {}, has ratio {}",
                     layer,
                     r,
                     kv_source,
                     ratio(kv_source));
    }
  }
  for (int64_t layer = layers; layer < static_cast<int64_t>(c.compress_ratios.size()); ++layer) {
    if (ratio(layer) != 0) {
      return invalid("compress_ratios[{}] is {}; draft stages have ratio 0", layer, ratio(layer));
    }
  }
  if (c.kv_source_layer_ids.empty()) {
    if (!c.index_source_layer_ids.empty() || c.candidate_source_layer_id >= 0) {
      return invalid("{} is set, but kv_source_layer_ids is empty",
                     c.candidate_source_layer_id >= 0 ? "candidate_source_layer_id"
                                                      : "index_source_layer_ids");
    }
    return {};
  }
  return check_ranges({
      {"index_n_heads", c.index_n_heads, 1, 1024},
      {"index_head_dim", c.index_head_dim, kTile, 4096, kTile},
      {"index_topk", c.index_topk, 1, 1 << 20},
      {"qk_rope_head_dim", c.qk_rope_head_dim, 2, c.index_head_dim, 2},
  });
}

Status check_candidates(const ModelConfig& c) {
  const int64_t source = c.candidate_source_layer_id;
  if (source == -1) {
    return {};
  }
  if (!contains(c.index_source_layer_ids, source)) {
    return invalid("candidate_source_layer_id is {}; it must be one of index_source_layer_ids {}",
                   source,
                   to_text(c.index_source_layer_ids));
  }
  // Consumers filter the entries that the source scored, so they must read the same cache.
  if (c.kv_source_layer_ids.back() > source) {
    return invalid("candidate_source_layer_id is {}; it must not lie before the KV source {}",
                   source,
                   c.kv_source_layer_ids.back());
  }
  return check_ranges({
      {"candidate_topk_blocks", c.candidate_topk_blocks, 1, 1 << 24},
      {"candidate_block_size", c.candidate_block_size, 1, 1 << 16},
  });
}

Status check_engram(const ModelConfig& c) {
  CACHALOT_RETURN_IF_ERROR(
      check_layer_ids("engram_layer_ids", c.engram_layer_ids, c.num_hidden_layers));
  if (c.engram_layer_ids.empty()) {
    return c.engram_num_embeddings.empty()
               ? Status()
               : invalid("engram_num_embeddings is {}, but engram_layer_ids is empty",
                         to_text(c.engram_num_embeddings));
  }
  CACHALOT_RETURN_IF_ERROR(check_ranges({
      {"engram_max_ngram_size", c.engram_max_ngram_size, 2, 16},
      {"engram_vocab_size", c.engram_vocab_size, 2, int64_t{1} << 30},
      {"engram_n_heads", c.engram_n_heads, 1, 64},
      {"engram_head_dim", c.engram_head_dim, kTile, 1 << 14, kTile},
      {"engram_pad_token_id", c.engram_pad_token_id, 0, c.vocab_size - 1},
      {"engram_compressed_vocab_size", c.engram_compressed_vocab_size, 1, c.vocab_size},
      {"engram_layer_ids length", static_cast<int64_t>(c.engram_layer_ids.size()), 1, 64},
  }));
  // Row ids are int32.
  const int64_t columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads;
  if (c.engram_vocab_size > INT32_MAX / columns) {
    return invalid("engram_vocab_size is {}; with {} columns the row ids exceed 32 bits",
                   c.engram_vocab_size,
                   columns);
  }
  return {};
}

Status check_draft(const ModelConfig& c) {
  CACHALOT_RETURN_IF_ERROR(
      check_ranges({{"num_nextn_predict_layers", c.num_nextn_predict_layers, 0, 16}}));
  if (c.num_nextn_predict_layers == 0) {
    return {};
  }
  CACHALOT_RETURN_IF_ERROR(check_ranges({
      {"dspark_block_size", c.dspark_block_size, 1, 64},
      {"dspark_noise_token_id", c.dspark_noise_token_id, 0, c.vocab_size - 1},
      {"dspark_markov_rank", c.dspark_markov_rank, 1, 1 << 14},
      {"dspark_n_routed_experts", c.dspark_n_routed_experts, 1, 4096},
      {"dspark_num_experts_per_tok", c.dspark_num_experts_per_tok, 1, c.dspark_n_routed_experts},
  }));
  if (c.dspark_target_layer_ids.empty()) {
    return invalid("dspark_target_layer_ids is empty, but num_nextn_predict_layers is {}",
                   c.num_nextn_predict_layers);
  }
  return check_layer_ids("dspark_target_layer_ids", c.dspark_target_layer_ids, c.num_hidden_layers);
}

// START, NEWLINE and END: what an image takes besides its cells, at least.
constexpr int64_t kFrameTokens = 3;

// Of an image as the tower sees it. A pixel takes 3 bytes, its patch 12 more; this is beyond the
// largest file that is taken.
constexpr int64_t kMostImagePixels = int64_t{1} << 26;

Status check_vision(const ModelConfig& c) {
  const VisionConfig& v = c.vision;
  CACHALOT_RETURN_IF_ERROR(
      check_ranges({{"vision_config.num_hidden_layers", v.num_hidden_layers, 0, 1024}}));
  if (v.num_hidden_layers == 0) {
    return {};
  }
  CACHALOT_RETURN_IF_ERROR(check_ranges({
      {"vision_config.hidden_size", v.hidden_size, 1, 1 << 16},
      {"vision_config.num_attention_heads", v.num_attention_heads, 1, 1024},
      {"vision_config.intermediate_size", v.intermediate_size, 1, 1 << 16},
      {"vision_config.patch_size", v.patch_size, 1, 256},
      {"vision_config.downsample_ratio", v.downsample_ratio, 1, 64},
      {"vision_config.max_image_tokens", v.max_image_tokens, kFrameTokens + 1, 1 << 20},
      {"image_token_id", c.image_token_id, 0, c.vocab_size - 1},
  }));
  const int64_t side = v.patch_size * v.downsample_ratio;  // of a cell in pixels
  if (v.max_image_tokens > kMostImagePixels / (side * side)) {
    return invalid(
        "vision_config.max_image_tokens is {}; with {} x {} pixels each, an image may have more "
        "than {}",
        v.max_image_tokens,
        side,
        side,
        kMostImagePixels);
  }
  // Small images are enlarged to these, which must fit.
  CACHALOT_RETURN_IF_ERROR(check_ranges({{"vision_config.min_pixels",
                                          v.min_pixels,
                                          0,
                                          (v.max_image_tokens - kFrameTokens) * side * side}}));
  // Rotary positions have two axes, each with (cos, sin) pairs.
  if (v.hidden_size % (4 * v.num_attention_heads) != 0) {
    return invalid(
        "vision_config.hidden_size is {}; it must be a multiple of 4 num_attention_heads = {}",
        v.hidden_size,
        4 * v.num_attention_heads);
  }
  return check_numbers({{"vision_config.rope_theta", v.rope_theta, 1, 1e12}});
}

}  // namespace

Status derive_engram_rows(ModelConfig& config) {
  config.engram_num_embeddings.clear();
  CACHALOT_RETURN_IF_ERROR(check_ranges({{"vocab_size", config.vocab_size, 1, int64_t{1} << 24}}));
  CACHALOT_RETURN_IF_ERROR(check_engram(config));
  for (const EngramConstants& constants : engram_constants(config)) {
    // The primes lie above engram_vocab_size.
    if (constants.rows > INT32_MAX) {
      return invalid("engram_vocab_size is {}; {} rows of a layer exceed 32 bits",
                     config.engram_vocab_size,
                     constants.rows);
    }
    config.engram_num_embeddings.push_back(constants.rows);
  }
  return {};
}

Status validate(const ModelConfig& config) {
  CACHALOT_RETURN_IF_ERROR(check_extents(config));
  CACHALOT_RETURN_IF_ERROR(check_rope_scaling(config));
  CACHALOT_RETURN_IF_ERROR(check_draft(config));
  CACHALOT_RETURN_IF_ERROR(check_schedule(config));
  CACHALOT_RETURN_IF_ERROR(check_candidates(config));
  CACHALOT_RETURN_IF_ERROR(check_vision(config));
  CACHALOT_RETURN_IF_ERROR(check_engram(config));
  ModelConfig derived = config;
  CACHALOT_RETURN_IF_ERROR(derive_engram_rows(derived));
  if (derived.engram_num_embeddings != config.engram_num_embeddings) {
    return invalid("engram_num_embeddings is {}; the other engram keys give {}",
                   to_text(config.engram_num_embeddings),
                   to_text(derived.engram_num_embeddings));
  }
  return {};
}

}  // namespace cachalot::model
