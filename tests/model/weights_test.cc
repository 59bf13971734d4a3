#include "model/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

namespace cachalot::model {
namespace {

std::map<std::string, StoredTensor> stored(const ModelConfig& config) {
  std::map<std::string, StoredTensor> all;
  for (const WeightSpec& spec : weight_table(config)) {
    for (const StoredTensor& tensor : stored_tensors(spec)) {
      EXPECT_TRUE(all.emplace(tensor.name, tensor).second) << tensor.name << " occurs twice";
    }
  }
  return all;
}

struct Expected {
  const char* name;
  DType dtype;
  Shape shape;
  int64_t shard;  // 1-based, as the files are numbered
};

TEST(WeightTable, ReleasedModel) {
  const auto all = stored(*preset_config("v41-flash"));
  const Expected expected[] = {
      {"vision.patch_embed.proj.weight", DType::kBF16, {1024, 588}, 1},
      {"vision.patch_embed.proj.bias", DType::kBF16, {1024}, 1},
      {"vision.blocks.31.attn.wqkv.weight", DType::kBF16, {3072, 1024}, 1},
      {"vision.blocks.31.attn.wqkv.bias", DType::kBF16, {3072}, 1},
      {"vision.blocks.0.attn.wo.bias", DType::kBF16, {1024}, 1},
      {"vision.blocks.0.mlp.w1.weight", DType::kBF16, {5632, 1024}, 1},
      {"vision.blocks.0.mlp.w2.weight", DType::kBF16, {1024, 2816}, 1},
      {"vision.blocks.0.norm2.weight", DType::kBF16, {1024}, 1},
      {"vision.norm.weight", DType::kBF16, {1024}, 1},
      {"aligner.w1.weight", DType::kBF16, {5120, 9216}, 1},
      {"aligner.w2.bias", DType::kBF16, {5120}, 1},
      {"embed.weight", DType::kBF16, {129280, 5120}, 2},
      {"image_newline", DType::kBF16, {5120}, 2},
      {"layers.0.attn.wq_a.weight", DType::kF8E4M3, {1280, 5120}, 3},
      {"layers.0.attn.wq_a.scale", DType::kF8E8M0, {40, 160}, 3},
      {"layers.0.attn.q_norm.weight", DType::kBF16, {1280}, 3},
      {"layers.0.attn.wq_b.weight", DType::kF8E4M3, {32768, 1280}, 3},
      {"layers.0.attn.wkv.scale", DType::kF8E8M0, {16, 160}, 3},
      {"layers.0.attn.kv_norm.weight", DType::kBF16, {512}, 3},
      {"layers.0.attn.attn_sink", DType::kF32, {64}, 3},
      {"layers.0.attn.wo_a.weight", DType::kF8E4M3, {8192, 4096}, 3},
      {"layers.0.attn.wo_b.scale", DType::kF8E8M0, {160, 256}, 3},
      {"layers.0.attn_norm.weight", DType::kBF16, {5120}, 3},
      {"layers.0.hc_ffn_fn", DType::kF32, {24, 20480}, 3},
      {"layers.0.hc_attn_base", DType::kF32, {24}, 3},
      {"layers.0.hc_attn_scale", DType::kF32, {3}, 3},
      {"layers.39.ffn.gate.weight", DType::kBF16, {384, 5120}, 42},
      {"layers.39.ffn.gate.bias_vl", DType::kF32, {384}, 42},
      {"layers.39.ffn.experts.383.w1.weight", DType::kI8, {2304, 2560}, 42},
      {"layers.39.ffn.experts.383.w3.scale", DType::kF8E8M0, {2304, 160}, 42},
      {"layers.39.ffn.experts.0.w2.weight", DType::kI8, {5120, 1152}, 42},
      {"layers.39.ffn.experts.0.w2.scale", DType::kF8E8M0, {5120, 72}, 42},
      {"layers.39.ffn.shared_experts.w2.scale", DType::kF8E8M0, {160, 72}, 42},
      {"layers.2.attn.compressor.wgate.weight", DType::kBF16, {512, 5120}, 5},
      {"layers.20.attn.compressor.wkv.weight", DType::kBF16, {512, 5120}, 23},
      {"layers.20.attn.compressor.norm.weight", DType::kBF16, {512}, 23},
      {"layers.20.attn.indexer.wk.weight", DType::kBF16, {128, 512}, 23},
      {"layers.20.attn.indexer.k_norm.weight", DType::kBF16, {128}, 23},
      {"layers.24.attn.indexer.wq_b.weight", DType::kF8E4M3, {4096, 1280}, 27},
      {"layers.24.attn.indexer.weights_proj.weight", DType::kBF16, {32, 5120}, 27},
      {"head.weight", DType::kBF16, {129280, 5120}, 43},
      {"norm.weight", DType::kBF16, {5120}, 43},
      {"mtp.0.main_proj.weight", DType::kF8E4M3, {5120, 15360}, 44},
      {"mtp.0.main_proj.scale", DType::kF8E8M0, {160, 480}, 44},
      {"mtp.0.main_norm.weight", DType::kBF16, {5120}, 44},
      {"mtp.1.ffn.gate.bias_vl", DType::kF32, {128}, 45},
      {"mtp.2.norm.weight", DType::kBF16, {5120}, 46},
      {"mtp.2.markov_head.embed.weight", DType::kBF16, {129280, 256}, 46},
      {"mtp.2.markov_head.head.weight", DType::kBF16, {129280, 256}, 46},
      {"mtp.2.confidence_head.proj.weight", DType::kBF16, {1, 5376}, 46},
      {"layers.1.engram.embed.weight", DType::kF8E4M3, {384006168, 256}, 47},
      {"layers.1.engram.embed.scale", DType::kF8E8M0, {384006168, 8}, 47},
      {"layers.14.engram.embed.weight", DType::kF8E4M3, {384016682, 256}, 48},
      {"layers.14.engram.wkv.weight", DType::kF8E4M3, {25600, 6144}, 48},
      {"layers.14.engram.wkv.scale", DType::kF8E8M0, {800, 192}, 48},
      {"layers.14.engram.k_weight", DType::kBF16, {4, 5120}, 48},
  };
  for (const Expected& e : expected) {
    ASSERT_TRUE(all.contains(e.name)) << e.name;
    const StoredTensor& tensor = all.at(e.name);
    EXPECT_EQ(tensor.dtype, e.dtype) << e.name;
    EXPECT_EQ(tensor.shape, e.shape) << e.name << " " << to_string(tensor.shape);
    EXPECT_EQ(tensor.shard + 1, e.shard) << e.name;
  }
  for (const char* name : {"layers.20.attn.compressor.wgate.weight",
                           "layers.24.attn.indexer.wk.weight",
                           "layers.3.attn.indexer.wq_b.weight",
                           "layers.0.engram.wkv.weight",
                           "mtp.1.norm.weight",
                           "mtp.1.main_norm.weight",
                           "layers.0.ffn.experts.384.w1.weight",
                           "mtp.0.ffn.experts.128.w1.weight"}) {
    EXPECT_FALSE(all.contains(name)) << name;
  }
}

TEST(WeightTable, CountsByGroup) {
  std::map<WeightPart, int64_t> counts;
  int64_t draft = 0;
  for (const WeightSpec& spec : weight_table(*preset_config("v41-flash"))) {
    const auto n = static_cast<int64_t>(stored_tensors(spec).size());
    counts[spec.part] += n;
    draft += spec.name.starts_with("mtp.") ? n : 0;
  }
  EXPECT_EQ(counts[WeightPart::kBackbone] + counts[WeightPart::kEngram], 93418);
  EXPECT_EQ(counts[WeightPart::kDraft], 2401);
  EXPECT_EQ(draft, 2401);
  EXPECT_EQ(counts[WeightPart::kVision], 266);
}

TEST(WeightTable, OneDraftStageCarriesEverything) {
  const auto all = stored(*preset_config("t1"));
  for (const char* name : {"mtp.0.main_proj.scale",
                           "mtp.0.main_norm.weight",
                           "mtp.0.norm.weight",
                           "mtp.0.confidence_head.proj.weight"}) {
    EXPECT_TRUE(all.contains(name)) << name;
  }
  EXPECT_FALSE(all.contains("vision.norm.weight"));
  EXPECT_FALSE(all.contains("image_start"));
}

TEST(WeightTable, FullPrecisionHasNoScales) {
  ModelConfig config = *preset_config("t1");
  config.storage = WeightStorage::kF32;
  for (const auto& [name, tensor] : stored(config)) {
    EXPECT_EQ(tensor.dtype, DType::kF32) << name;
    EXPECT_FALSE(name.ends_with(".scale")) << name;
  }
}

TEST(WeightTable, EveryPresetHasAscendingShardsAndStatistics) {
  for (const char* name :
       {"t1", "t1-vision", "micro", "nano", "bench-s", "v41-flash", "v41-slice"}) {
    int64_t shard = 0;
    for (const WeightSpec& spec : weight_table(*preset_config(name))) {
      EXPECT_TRUE(spec.shard == shard || spec.shard == shard + 1) << spec.name;
      shard = spec.shard;
      EXPECT_GT(spec.deviation, 0) << spec.name;
    }
  }
}

TEST(ResolveWeights, FillsTheVisionTower) {
  const ModelConfig config = *preset_config("t1-vision");
  auto tensors = stored(config);
  std::vector<uint8_t> byte(1);
  const VisionWeights vision = resolve_weights(config, [&](const std::string& name) {
                                 const StoredTensor& t = tensors.at(name);
                                 return TensorView(byte.data(), t.dtype, t.shape);
                               }).vision;
  const auto is = [](const BiasedWeight& w, int64_t out, int64_t in) {
    return w.weight.values.shape == Shape{out, in} && w.bias.shape == Shape{out};
  };
  EXPECT_TRUE(is(vision.patch_embed, 48, 48));
  ASSERT_EQ(vision.blocks.size(), 3u);
  for (const VisionBlockWeights& block : vision.blocks) {
    EXPECT_EQ(block.norm1.shape, Shape{48});
    EXPECT_TRUE(is(block.wqkv, 144, 48));
    EXPECT_TRUE(is(block.wo, 48, 48));
    EXPECT_EQ(block.norm2.shape, Shape{48});
    EXPECT_EQ(block.mlp_w1.values.shape, (Shape{144, 48}));
    EXPECT_EQ(block.mlp_w2.values.shape, (Shape{48, 72}));
  }
  EXPECT_EQ(vision.norm.shape, Shape{48});
  EXPECT_TRUE(is(vision.aligner_w1, 64, 432));
  EXPECT_TRUE(is(vision.aligner_w2, 64, 64));
  for (const TensorView* view : {&vision.image_start, &vision.image_newline, &vision.image_end}) {
    EXPECT_EQ(view->shape, Shape{64});
  }
}

TEST(ResolveWeights, FillsExactlyTheFieldsOfEachMode) {
  for (const WeightStorage storage : {WeightStorage::kOfficial, WeightStorage::kF32}) {
    ModelConfig config = *preset_config("t1");
    config.storage = storage;
    auto tensors = stored(config);
    std::set<std::string> asked;
    std::vector<uint8_t> byte(1);
    const ModelWeights weights = resolve_weights(config, [&](const std::string& name) {
      EXPECT_TRUE(tensors.contains(name)) << name;
      asked.insert(name);
      const StoredTensor& t = tensors.at(name);
      return TensorView(byte.data(), t.dtype, t.shape);
    });
    for (const auto& [name, tensor] : tensors) {
      EXPECT_TRUE(asked.contains(name)) << name;
    }
    const DraftWeights& draft = weights.draft;
    ASSERT_EQ(draft.stages.size(), 1u);
    EXPECT_EQ(draft.main_proj.in, 3 * 64);
    EXPECT_EQ(draft.confidence.in, 64 + 16);
    EXPECT_FALSE(draft.main_norm.empty() || draft.norm.empty() || draft.markov_embed.empty() ||
                 draft.markov_head.empty());
    EXPECT_TRUE(draft.stages[0].attn.compressor.wkv.empty());
    EXPECT_EQ(draft.stages[0].moe.experts.size(), 4u);
    ASSERT_EQ(weights.layers.size(), 10u);
    for (size_t l = 0; l < 10; ++l) {
      const LayerWeights& layer = weights.layers[l];
      const bool kv = l == 2 || l == 5, index = kv || l == 7 || l == 9;
      EXPECT_EQ(layer.attn.compressor.wkv.empty(), !kv) << l;
      EXPECT_EQ(layer.attn.compressor.wgate.empty(), l != 2) << l;
      EXPECT_EQ(layer.attn.compressor.norm.empty(), !kv) << l;
      EXPECT_EQ(layer.attn.indexer.wk.empty(), !kv) << l;
      EXPECT_EQ(layer.attn.indexer.wq_b.empty(), !index) << l;
      EXPECT_EQ(layer.attn.indexer.weights_proj.empty(), !index) << l;
      EXPECT_EQ(layer.engram.table.empty(), l != 1 && l != 3) << l;
      EXPECT_FALSE(layer.attn.wo_b.empty()) << l;
      ASSERT_EQ(layer.moe.experts.size(), 8u);
      EXPECT_FALSE(layer.moe.experts[7].w2.empty());
      ASSERT_EQ(layer.moe.shared.size(), 1u);
    }
    const bool official = storage == WeightStorage::kOfficial;
    const LayerWeights& layer = weights.layers[1];
    EXPECT_EQ(weights.embed.format, official ? ops::WeightFormat::kBF16 : ops::WeightFormat::kF32);
    EXPECT_EQ(layer.attn.wq_a.format,
              official ? ops::WeightFormat::kFp8Block : ops::WeightFormat::kF32);
    EXPECT_EQ(layer.attn.wq_a.out, 32);
    EXPECT_EQ(layer.attn.wq_a.in, 64);
    EXPECT_EQ(layer.engram.table.format,
              official ? ops::WeightFormat::kFp8Row : ops::WeightFormat::kF32);
    const ops::Weight& expert = layer.moe.experts[0].w1;
    EXPECT_EQ(expert.format, official ? ops::WeightFormat::kFp4Row : ops::WeightFormat::kF32);
    EXPECT_EQ(expert.in, 64);
    EXPECT_EQ(expert.values.shape, official ? (Shape{32, 32}) : (Shape{32, 64}));
    EXPECT_EQ(expert.scales.empty(), !official);
  }
}

}  // namespace
}  // namespace cachalot::model
