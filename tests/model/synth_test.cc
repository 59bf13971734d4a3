#include "model/synth.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "model/accounting.h"
#include "model/checkpoint.h"
#include "quant/weight_quant.h"
#include "tests/support/temp_directory.h"

namespace cachalot::model {
namespace {

using Files = std::map<std::string, std::string>;

Files files_of(const std::string& directory) {
  Files files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    files[entry.path().filename()] = *read_file(entry.path());
  }
  return files;
}

Files synthesized(const ModelConfig& config, uint64_t seed, int threads) {
  const test::TempDirectory directory;
  ThreadPool pool(threads);
  const Status status =
      synthesize(config, directory.path(), {.seed = seed, .tokenizer_json = "{\"a\": 1}"}, pool);
  EXPECT_TRUE(status.ok()) << status.message();
  return files_of(directory.path());
}

TEST(Synth, SameSeedSameBytesForAnyThreadCount) {
  const ModelConfig config = *preset_config("t1");
  const Files first = synthesized(config, 1, 1);
  EXPECT_EQ(first.size(), 20u);
  EXPECT_EQ(synthesized(config, 1, 2), first);
  EXPECT_EQ(synthesized(config, 1, 5), first);
  const Files other = synthesized(config, 2, 1);
  EXPECT_EQ(other.at("config.json"), first.at("config.json"));
  EXPECT_NE(other.at("model-00003-of-00015.safetensors"),
            first.at("model-00003-of-00015.safetensors"));
  EXPECT_EQ(first.at("tokenizer.json"), "{\"a\": 1}");
}

TEST(Synth, SideFiles) {
  const Files files = synthesized(*preset_config("t1"), 1, 1);
  const auto index = nlohmann::json::parse(files.at("model.safetensors.index.json"));
  const Accounting sizes = account(*preset_config("t1"));
  EXPECT_EQ(index["metadata"]["total_size"], sizes.total_bytes);
  EXPECT_EQ(index["weight_map"].size(), static_cast<size_t>(sizes.tensors));
  EXPECT_EQ(index["weight_map"]["embed.weight"], "model-00001-of-00015.safetensors");
  EXPECT_EQ(index["weight_map"]["layers.3.engram.embed.scale"], "model-00015-of-00015.safetensors");
  EXPECT_EQ(nlohmann::json::parse(files.at("generation_config.json"))["eos_token_id"], 1);
  EXPECT_TRUE(nlohmann::json::parse(files.at("tokenizer_config.json")).is_object());
}

TEST(Synth, ShardsAreNaturallyAligned) {
  const test::TempDirectory directory;
  ThreadPool pool(1);
  ASSERT_TRUE(synthesize(*preset_config("t1"), directory.path(), {}, pool).ok());
  const auto tensors = io::ShardedTensors::open(directory.path());
  ASSERT_TRUE(tensors.ok());
  for (const auto& tensor : tensors->tensors()) {
    const auto address = reinterpret_cast<uintptr_t>(tensor.view.data);
    EXPECT_EQ(address % static_cast<uintptr_t>(dtype_bytes(tensor.view.dtype)), 0u) << tensor.name;
    if (tensor.name.find(".experts.") != std::string_view::npos &&
        tensor.name.ends_with("weight")) {
      EXPECT_EQ(address % 64, 0u) << tensor.name;
    }
  }
}

TEST(Synth, RefusesAnInvalidConfig) {
  ModelConfig config = *preset_config("t1");
  config.hidden_size = 65;
  ThreadPool pool(1);
  const test::TempDirectory directory;
  const Status status = synthesize(config, directory.path(), {}, pool);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("hidden_size is 65"), std::string::npos);
}

struct Moments {
  double mean = 0;
  double rms = 0;
  double negative = 0;
};

Moments moments(const std::vector<float>& values) {
  Moments m;
  for (const float v : values) {
    m.mean += static_cast<double>(v);
    m.rms += static_cast<double>(v) * static_cast<double>(v);
    m.negative += v < 0 ? 1 : 0;
  }
  const auto n = static_cast<double>(values.size());
  return {m.mean / n, std::sqrt(m.rms / n), m.negative / n};
}

class SynthStatistics : public testing::TestWithParam<WeightStorage> {
 protected:
  void SetUp() override {
    // Wide enough for statistics, small enough for a test.
    ModelConfig config = *preset_config("micro");
    for (const char* assignment : {"hidden_size=512", "q_lora_rank=256"}) {
      ASSERT_TRUE(set_config_value(config, assignment).ok());
    }
    config.storage = GetParam();
    ThreadPool pool(2);
    ASSERT_TRUE(synthesize(config, directory_.path(), {.seed = 3}, pool).ok());
    auto opened = Checkpoint::open(directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.error().message();
    checkpoint_ = std::make_unique<Checkpoint>(std::move(*opened));
  }

  std::vector<float> values(const std::string& name) const {
    const auto& table = checkpoint_->table();
    const auto spec = std::find_if(
        table.begin(), table.end(), [&](const WeightSpec& s) { return s.name == name; });
    EXPECT_NE(spec, table.end()) << name;
    std::vector<float> out(static_cast<size_t>(spec->shape.elements()));
    const TensorView view = checkpoint_->tensor(name);
    if (spec->kind == WeightKind::kPlain) {
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = view.dtype == DType::kF32 ? view.as<float>()[i]
                                           : static_cast<float>(view.as<bf16>()[i]);
      }
      return out;
    }
    const ops::Weight weight = checkpoint_->weight(*spec);
    const auto* codes = weight.values.as<uint8_t>();
    const auto* scales = weight.scales.as<uint8_t>();
    if (spec->kind == WeightKind::kFp8Block) {
      quant::fp8_tile_dequantize(codes, scales, weight.out, weight.in, out.data());
    } else if (spec->kind == WeightKind::kFp4Row) {
      quant::fp4_row_dequantize(codes, scales, weight.out, weight.in, out.data());
    } else {
      quant::fp8_row_dequantize(codes, scales, weight.out, weight.in, out.data());
    }
    return out;
  }

  test::TempDirectory directory_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_P(SynthStatistics, FollowTheReleasedModel) {
  EXPECT_NEAR(moments(values("embed.weight")).rms, 0.12, 0.01);
  const Moments attn = moments(values("layers.4.attn_norm.weight"));
  EXPECT_NEAR(attn.mean, 0.025, 0.003);
  EXPECT_GT(attn.negative, 0.01);
  EXPECT_LT(attn.negative, 0.12);
  EXPECT_NEAR(moments(values("layers.4.ffn_norm.weight")).mean, 0.2, 0.02);
  EXPECT_NEAR(moments(values("layers.4.attn.q_norm.weight")).mean, 0.97, 0.1);
  EXPECT_NEAR(moments(values("layers.4.attn.compressor.norm.weight")).mean, 0.6, 0.15);
  for (const char* name : {"layers.0.attn.wq_b.weight",
                           "layers.0.attn.wo_b.weight",
                           "layers.0.ffn.experts.3.w1.weight",
                           "layers.0.ffn.experts.3.w2.weight",
                           "layers.0.ffn.shared_experts.w3.weight",
                           "layers.1.engram.embed.weight",
                           "layers.1.engram.wkv.weight",
                           "mtp.0.main_proj.weight"}) {
    const auto& table = checkpoint_->table();
    const auto spec = std::find_if(
        table.begin(), table.end(), [&](const WeightSpec& s) { return s.name == name; });
    ASSERT_NE(spec, table.end()) << name;
    const Moments m = moments(values(name));
    EXPECT_NEAR(m.rms / spec->deviation, 1, 0.05) << name;
    EXPECT_NEAR(m.mean / spec->deviation, 0, 0.05) << name;
  }
  // Nothing that a rule depends on may be zero or symmetric.
  EXPECT_GT(moments(values("layers.0.attn.attn_sink")).rms, 0.3);
  EXPECT_GT(moments(values("layers.0.ffn.gate.bias")).rms, 0.05);
  EXPECT_NE(values("layers.0.ffn.gate.bias"), values("layers.0.ffn.gate.bias_vl"));
  EXPECT_NE(values("layers.0.hc_attn_fn"), values("layers.1.hc_attn_fn"));
  const std::vector<float> base = values("layers.0.hc_attn_base");
  for (size_t j = 0; j < 4; ++j) {
    for (size_t k = 0; k < j; ++k) {
      EXPECT_GT(std::fabs(base[8 + 4 * j + k] - base[8 + 4 * k + j]), 1e-3f);
    }
  }
}

TEST_P(SynthStatistics, EmbeddingHasOutlierChannels) {
  const std::vector<float> embed = values("embed.weight");
  const size_t d = 512;
  std::vector<double> squares(d);
  for (size_t i = 0; i < embed.size(); ++i) {
    squares[i % d] += static_cast<double>(embed[i]) * static_cast<double>(embed[i]);
  }
  std::sort(squares.begin(), squares.end());
  EXPECT_GT(squares[d - 1], 8 * squares[d / 2]);
  EXPECT_LT(squares[d - 8], 2 * squares[d / 2]);
}

INSTANTIATE_TEST_SUITE_P(Synth,
                         SynthStatistics,
                         testing::Values(WeightStorage::kOfficial, WeightStorage::kF32),
                         [](const auto& test) {
                           return test.param == WeightStorage::kOfficial ? "official" : "f32";
                         });

}  // namespace
}  // namespace cachalot::model
