// The named presets. Every quantized width is a multiple of 32, and all but v41-slice contain every
// layer mode, Engram and a drafter.
#include <iterator>

#include "base/check.h"
#include "base/format.h"
#include "model/config.h"

namespace cachalot::model {
namespace {

// What all presets share with the released model.
ModelConfig family() {
  ModelConfig c;
  c.swiglu_limit = 10;
  c.rms_norm_eps = 1e-20;
  c.rope_theta = 10000;
  c.compress_rope_theta = 160000;
  c.has_rope_scaling = true;
  c.n_shared_experts = 1;
  c.routed_scaling_factor = 1.5;
  c.hc_mult = 4;
  c.hc_sinkhorn_iters = 20;
  c.hc_eps = 1e-6;
  c.engram_max_ngram_size = 4;
  c.engram_pad_token_id = 2;
  return c;
}

std::vector<int64_t> repeated(std::initializer_list<std::pair<int64_t, int64_t>> value_and_count) {
  std::vector<int64_t> list;
  for (const auto& [value, count] : value_and_count) {
    list.insert(list.end(), static_cast<size_t>(count), value);
  }
  return list;
}

// The released model.
ModelConfig v41_flash() {
  ModelConfig c = family();
  c.vocab_size = 129280;
  c.hidden_size = 5120;
  c.moe_intermediate_size = 2304;
  c.num_hidden_layers = 40;
  c.num_attention_heads = 64;
  c.head_dim = 512;
  c.qk_rope_head_dim = 64;
  c.q_lora_rank = 1280;
  c.o_lora_rank = 1024;
  c.o_groups = 8;
  c.max_position_embeddings = 1048576;
  c.rope_scaling = {.factor = 16, .original_max_position_embeddings = 65536};
  c.n_routed_experts = 384;
  c.num_experts_per_tok = 6;
  c.sliding_window = 128;
  c.compress_ratios = repeated({{0, 2}, {2, 18}, {1, 20}, {0, 3}});
  c.kv_source_layer_ids = {2, 8, 14, 20};
  c.index_source_layer_ids = {2, 8, 14, 20, 24, 28, 32, 36};
  c.index_n_heads = 32;
  c.index_head_dim = 128;
  c.index_topk = 512;
  c.candidate_source_layer_id = 20;
  c.candidate_topk_blocks = 2048;
  c.candidate_block_size = 8;
  c.engram_layer_ids = {1, 14};
  c.engram_vocab_size = 16000000;
  c.engram_n_heads = 8;
  c.engram_head_dim = 256;
  c.engram_compressed_vocab_size = 99092;
  c.num_nextn_predict_layers = 3;
  c.dspark_block_size = 5;
  c.dspark_noise_token_id = 128799;
  c.dspark_target_layer_ids = {37, 38, 39};
  c.dspark_markov_rank = 256;
  c.dspark_n_routed_experts = 128;
  c.dspark_num_experts_per_tok = 3;
  c.image_token_id = 129264;
  c.vision = {.num_hidden_layers = 32,
              .hidden_size = 1024,
              .num_attention_heads = 16,
              .intermediate_size = 2816,
              .patch_size = 14,
              .downsample_ratio = 3,
              .max_image_tokens = 1024,
              .min_pixels = 295936,
              .rope_theta = 10000};
  return c;
}

// One layer of each kind at the released shapes: about 53 GB on disk. The Engram table is cut to
// 65536 rows per column, and every token is its own class, so that any tokenizer of 129280 entries
// fits.
ModelConfig v41_slice() {
  ModelConfig c = v41_flash();
  c.num_hidden_layers = 7;
  // Window, Full, Reuse | Full and candidate source, Reuse, Reindex, Reuse.
  c.compress_ratios = {0, 2, 2, 1, 1, 1, 1};
  c.kv_source_layer_ids = {1, 3};
  c.index_source_layer_ids = {1, 3, 5};
  c.candidate_source_layer_id = 3;
  c.engram_layer_ids = {1};
  c.engram_vocab_size = 65536;
  c.engram_compressed_vocab_size = c.vocab_size;
  c.num_nextn_predict_layers = 0;
  c.dspark_block_size = 0;
  c.dspark_noise_token_id = 0;
  c.dspark_target_layer_ids = {};
  c.dspark_markov_rank = 0;
  c.dspark_n_routed_experts = 0;
  c.dspark_num_experts_per_tok = 0;
  c.image_token_id = -1;
  c.vision = {};
  return c;
}

// The smallest model in which every rule of the architecture has an effect.
ModelConfig t1() {
  ModelConfig c = family();
  c.vocab_size = 512;
  c.hidden_size = 64;
  c.moe_intermediate_size = 32;
  c.num_hidden_layers = 10;
  c.num_attention_heads = 4;
  c.head_dim = 64;
  c.qk_rope_head_dim = 16;
  c.q_lora_rank = 32;
  c.o_lora_rank = 32;
  c.o_groups = 2;
  c.swiglu_limit = 2;
  c.max_position_embeddings = 16384;
  c.rope_scaling = {.factor = 4, .original_max_position_embeddings = 1024};
  c.n_routed_experts = 8;
  c.num_experts_per_tok = 2;
  c.sliding_window = 8;
  // Window x2, Full, Reuse x2 | Full and candidate source, Reuse, Reindex, Reuse, Reindex.
  c.compress_ratios = repeated({{0, 2}, {2, 3}, {1, 5}, {0, 1}});
  c.kv_source_layer_ids = {2, 5};
  c.index_source_layer_ids = {2, 5, 7, 9};
  c.index_n_heads = 8;
  c.index_head_dim = 32;
  c.index_topk = 4;
  c.candidate_source_layer_id = 5;
  c.candidate_topk_blocks = 3;
  c.candidate_block_size = 4;
  c.engram_layer_ids = {1, 3};
  c.engram_vocab_size = 100;
  c.engram_n_heads = 2;
  c.engram_head_dim = 32;
  c.engram_compressed_vocab_size = c.vocab_size;
  c.num_nextn_predict_layers = 1;
  c.dspark_block_size = 3;
  c.dspark_noise_token_id = c.vocab_size - 1;
  c.dspark_target_layer_ids = {7, 8, 9};
  c.dspark_markov_rank = 16;
  c.dspark_n_routed_experts = 4;
  c.dspark_num_experts_per_tok = 1;
  return c;
}

// t1 that sees: patches of 4 pixels, cells of 12, three small blocks of odd widths.
ModelConfig t1_vision() {
  ModelConfig c = t1();
  c.image_token_id = 321;  // of the byte-level tokenizer of 512 entries
  c.vision = {.num_hidden_layers = 3,
              .hidden_size = 48,
              .num_attention_heads = 3,
              .intermediate_size = 72,
              .patch_size = 4,
              .downsample_ratio = 3,
              .max_image_tokens = 64,
              .min_pixels = 576,
              .rope_theta = 10000};
  return c;
}

// For training on two cores. Engram rows are 32 wide: one scale block.
ModelConfig micro() {
  ModelConfig c = family();
  c.vocab_size = 352;
  c.hidden_size = 128;
  c.moe_intermediate_size = 64;
  c.num_hidden_layers = 8;
  c.num_attention_heads = 4;
  c.head_dim = 32;
  c.qk_rope_head_dim = 16;
  c.q_lora_rank = 64;
  c.o_lora_rank = 32;
  c.o_groups = 2;
  c.max_position_embeddings = 1024;
  c.rope_scaling = {.factor = 4, .original_max_position_embeddings = 256};
  c.n_routed_experts = 8;
  c.num_experts_per_tok = 2;
  c.sliding_window = 32;
  // Window x2, Full, Reuse | Full and candidate source, Reuse, Reindex, Reuse.
  c.compress_ratios = repeated({{0, 2}, {2, 2}, {1, 4}, {0, 1}});
  c.kv_source_layer_ids = {2, 4};
  c.index_source_layer_ids = {2, 4, 6};
  c.index_n_heads = 4;
  c.index_head_dim = 32;
  c.index_topk = 16;
  c.candidate_source_layer_id = 4;
  c.candidate_topk_blocks = 8;
  c.candidate_block_size = 8;
  c.engram_layer_ids = {1, 3};
  c.engram_vocab_size = 4096;
  c.engram_n_heads = 2;
  c.engram_head_dim = 32;
  c.engram_compressed_vocab_size = c.vocab_size;
  c.num_nextn_predict_layers = 1;
  c.dspark_block_size = 3;
  c.dspark_noise_token_id = c.vocab_size - 1;
  c.dspark_target_layer_ids = {6, 7};
  c.dspark_markov_rank = 16;
  c.dspark_n_routed_experts = 4;
  c.dspark_num_experts_per_tok = 1;
  return c;
}

// For training on one GPU.
ModelConfig nano() {
  ModelConfig c = family();
  c.vocab_size = 16384;
  c.hidden_size = 768;
  c.moe_intermediate_size = 384;
  c.num_hidden_layers = 12;
  c.num_attention_heads = 12;
  c.head_dim = 128;
  c.qk_rope_head_dim = 32;
  c.q_lora_rank = 384;
  c.o_lora_rank = 192;
  c.o_groups = 4;
  c.max_position_embeddings = 8192;
  c.rope_scaling = {.factor = 4, .original_max_position_embeddings = 2048};
  c.n_routed_experts = 32;
  c.num_experts_per_tok = 4;
  c.sliding_window = 128;
  // Window x2, Full, Reuse x3 | Full and candidate source, Reuse x2, Reindex, Reuse x2.
  c.compress_ratios = repeated({{0, 2}, {2, 4}, {1, 6}, {0, 1}});
  c.kv_source_layer_ids = {2, 6};
  c.index_source_layer_ids = {2, 6, 9};
  c.index_n_heads = 8;
  c.index_head_dim = 64;
  c.index_topk = 128;
  c.candidate_source_layer_id = 6;
  c.candidate_topk_blocks = 32;
  c.candidate_block_size = 8;
  c.engram_layer_ids = {1, 4};
  c.engram_vocab_size = 65536;
  c.engram_n_heads = 4;
  c.engram_head_dim = 64;
  c.engram_compressed_vocab_size = c.vocab_size;
  c.num_nextn_predict_layers = 1;
  c.dspark_block_size = 5;
  c.dspark_noise_token_id = c.vocab_size - 1;
  c.dspark_target_layer_ids = {9, 10, 11};
  c.dspark_markov_rank = 64;
  c.dspark_n_routed_experts = 8;
  c.dspark_num_experts_per_tok = 2;
  return c;
}

// For benchmarks on a small machine: the proportions of the released model at a fifth of its width,
// about 1.3 B parameters in 0.9 GB.
ModelConfig bench_s() {
  ModelConfig c = family();
  c.vocab_size = 32768;
  c.hidden_size = 1024;
  c.moe_intermediate_size = 480;
  c.num_hidden_layers = 12;
  c.num_attention_heads = 16;
  c.head_dim = 128;
  c.qk_rope_head_dim = 64;
  c.q_lora_rank = 256;
  c.o_lora_rank = 256;
  c.o_groups = 4;
  c.max_position_embeddings = 65536;
  c.rope_scaling = {.factor = 16, .original_max_position_embeddings = 4096};
  c.n_routed_experts = 64;
  c.num_experts_per_tok = 4;
  c.sliding_window = 128;
  // Window x2, Full, Reuse x3 | Full and candidate source, Reuse x2, Reindex, Reuse x2.
  c.compress_ratios = repeated({{0, 2}, {2, 4}, {1, 6}, {0, 2}});
  c.kv_source_layer_ids = {2, 6};
  c.index_source_layer_ids = {2, 6, 9};
  c.index_n_heads = 16;
  c.index_head_dim = 64;
  c.index_topk = 256;
  c.candidate_source_layer_id = 6;
  c.candidate_topk_blocks = 512;
  c.candidate_block_size = 8;
  c.engram_layer_ids = {1, 4};
  c.engram_vocab_size = 16384;
  c.engram_n_heads = 4;
  c.engram_head_dim = 64;
  c.engram_compressed_vocab_size = c.vocab_size;
  c.num_nextn_predict_layers = 2;
  c.dspark_block_size = 5;
  c.dspark_noise_token_id = c.vocab_size - 1;
  c.dspark_target_layer_ids = {9, 10, 11};
  c.dspark_markov_rank = 64;
  c.dspark_n_routed_experts = 16;
  c.dspark_num_experts_per_tok = 2;
  return c;
}

struct Preset {
  std::string_view name;
  ModelConfig (*make)();
};
constexpr Preset kPresets[] = {
    {"t1", t1},
    {"t1-vision", t1_vision},
    {"micro", micro},
    {"nano", nano},
    {"bench-s", bench_s},
    {"v41-flash", v41_flash},
    {"v41-slice", v41_slice},
};

}  // namespace

Result<ModelConfig> preset_config(std::string_view name) {
  std::string names;
  for (const Preset& preset : kPresets) {
    if (preset.name == name) {
      ModelConfig config = preset.make();
      const Status derived = derive_engram_rows(config);
      CACHALOT_CHECK(derived.ok() && validate(config).ok(), std::distance(kPresets, &preset));
      return config;
    }
    names += (names.empty() ? "" : ", ") + std::string(preset.name);
  }
  return invalid("there is no preset '{}'; the presets are {}", name, names);
}

}  // namespace cachalot::model
