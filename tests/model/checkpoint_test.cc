#include "model/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "base/file.h"
#include "base/format.h"
#include "base/rng.h"
#include "model/synth.h"
#include "quant/formats.h"
#include "quant/weight_quant.h"
#include "tests/support/temp_directory.h"

namespace cachalot::model {
namespace {

struct Tensor {
  DType dtype;
  Shape shape;
  std::vector<uint8_t> bytes;
};
using Tensors = std::map<std::string, Tensor>;

// A t1 checkpoint, taken apart and written again with changes, as one file.
class CheckpointTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    original_ = new test::TempDirectory;
    ThreadPool pool(1);
    ModelConfig config = *preset_config("t1");
    ASSERT_TRUE(
        synthesize(config, original_->path(), {.seed = 5, .tokenizer_json = "{}"}, pool).ok());
  }
  static void TearDownTestSuite() { delete original_; }

  static const std::string& original() { return original_->path(); }

  static Tensors load() {
    Tensors tensors;
    const auto shards = io::ShardedTensors::open(original());
    EXPECT_TRUE(shards.ok());
    for (const auto& tensor : shards->tensors()) {
      const auto* data = static_cast<const uint8_t*>(tensor.view.data);
      tensors[std::string(tensor.name)] = {
          tensor.view.dtype, tensor.view.shape, {data, data + tensor.view.bytes()}};
    }
    return tensors;
  }

  void save(Tensors& tensors) {
    std::vector<io::SafetensorsFile::Tensor> list;
    for (auto& [name, tensor] : tensors) {
      list.push_back({name, TensorView(tensor.bytes.data(), tensor.dtype, tensor.shape)});
    }
    ASSERT_TRUE(io::write_safetensors(changed_.file("model.safetensors"), list).ok());
    ASSERT_TRUE(
        write_file(changed_.file("config.json"), *read_file(original() + "/config.json")).ok());
  }

  std::string refusal(Checkpoint::Values values = Checkpoint::Values::kChecked) {
    const auto result = Checkpoint::open(changed_.path(), values);
    return result.ok() ? "" : result.error().message();
  }

  void expect_refused(const std::vector<std::string>& parts) {
    const std::string message = refusal();
    ASSERT_NE(message, "");
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks " << part;
    }
  }

  test::TempDirectory changed_;

 private:
  static test::TempDirectory* original_;
};

test::TempDirectory* CheckpointTest::original_ = nullptr;

TEST_F(CheckpointTest, OpensAndResolves) {
  auto opened = Checkpoint::open(original());
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  const Checkpoint checkpoint = std::move(*opened);
  EXPECT_EQ(checkpoint.config(), *preset_config("t1"));
  const ModelWeights& weights = checkpoint.weights();
  EXPECT_EQ(weights.layers.size(), 10u);
  EXPECT_EQ(weights.embed.values.data, checkpoint.tensor("embed.weight").data);
  EXPECT_EQ(weights.layers[3].engram.table.scales.data,
            checkpoint.tensor("layers.3.engram.embed.scale").data);
  for (const WeightSpec& spec : checkpoint.table()) {
    if (spec.name == "mtp.0.main_proj.weight") {
      const ops::Weight weight = checkpoint.weight(spec);
      EXPECT_EQ(weight.format, ops::WeightFormat::kFp8Block);
      EXPECT_EQ(weight.scales.shape, (Shape{2, 6}));
    }
  }
  ThreadPool pool(2);
  EXPECT_TRUE(checkpoint.verify(pool).empty());
}

// A loader says how many more there are; a tool that looks for faults names all.
TEST_F(CheckpointTest, NamesEveryWrongTensorWhereAsked) {
  Tensors tensors = load();
  constexpr int64_t kWrong = 12;
  for (int64_t i = 0; i < kWrong; ++i) {
    tensors[fmt::format("extra.{}.", i)] = {DType::kU8, {1}, {0}};
    tensors.erase(fmt::format("layers.0.ffn.experts.{}.w{}.weight", i % 8, 1 + i / 8));
  }
  save(tensors);
  expect_refused({"12 tensors missing: ", "12 tensors unexpected: ", ", and 2 more"});
  const std::string all = refusal(Checkpoint::Values::kUnchecked);
  EXPECT_EQ(all.find("more"), std::string::npos);
  for (int64_t i = 0; i < kWrong; ++i) {
    EXPECT_NE(all.find(fmt::format("extra.{}.", i)), std::string::npos) << i;
    EXPECT_NE(all.find(fmt::format("experts.{}.w{}.weight", i % 8, 1 + i / 8)), std::string::npos);
  }
}

TEST_F(CheckpointTest, MissingDirectoryAndConfig) {
  EXPECT_FALSE(Checkpoint::open("/no/such").ok());
  Tensors tensors = load();
  save(tensors);
  ASSERT_TRUE(write_file(changed_.file("config.json"), "{}").ok());
  expect_refused({changed_.file("config.json"), "text_config"});
}

TEST_F(CheckpointTest, A56_EveryNamePrefixed) {
  Tensors prefixed;
  for (auto& [name, tensor] : load()) {
    prefixed["model." + name] = tensor;
  }
  save(prefixed);
  expect_refused({"877 tensors missing: embed.weight", "877 tensors unexpected", "model."});
}

TEST_F(CheckpointTest, A56_OneRenamed) {
  Tensors tensors = load();
  auto node = tensors.extract("layers.4.attn.wq_a.weight");
  node.key() = "layers.4.attn.wq_c.weight";
  tensors.insert(std::move(node));
  save(tensors);
  expect_refused({"1 tensor missing: layers.4.attn.wq_a.weight",
                  "1 tensor unexpected: layers.4.attn.wq_c.weight"});
}

TEST_F(CheckpointTest, A56_OneExtra) {
  Tensors tensors = load();
  tensors["layers.4.attn.wgate.weight"] = tensors["norm.weight"];
  save(tensors);
  expect_refused({"1 tensor unexpected: layers.4.attn.wgate.weight"});
}

TEST_F(CheckpointTest, A56_ManyMissingAreCut) {
  Tensors tensors = load();
  std::erase_if(tensors,
                [](const auto& item) { return item.first.find(".experts.") != std::string::npos; });
  save(tensors);
  expect_refused({"504 tensors missing: layers.0.ffn.experts.0.w1.weight", ", and 494 more"});
}

TEST_F(CheckpointTest, WrongShapeAndDtype) {
  Tensors tensors = load();
  tensors["norm.weight"].shape = {8, 8};
  tensors["layers.0.attn_norm.weight"].dtype = DType::kF32;
  tensors["layers.0.attn_norm.weight"].bytes.resize(256);
  save(tensors);
  expect_refused({"2 tensors with the wrong dtype or shape",
                  "norm.weight is BF16 [8, 8] instead of BF16 [64]",
                  "layers.0.attn_norm.weight is F32 [64] instead of BF16 [64]"});
}

TEST_F(CheckpointTest, A53_ScalesStoredAsNumbersAreRefused) {
  Tensors tensors = load();
  Tensor& scale = tensors["layers.0.attn.wq_b.scale"];
  std::vector<uint8_t> as_float(scale.bytes.size() * 4);
  for (size_t i = 0; i < scale.bytes.size(); ++i) {
    const auto value = static_cast<float>(scale.bytes[i]);  // 120 as 120.0 instead of 2^-7
    std::memcpy(&as_float[4 * i], &value, 4);
  }
  scale.bytes = as_float;
  scale.dtype = DType::kF32;
  save(tensors);
  expect_refused({"layers.0.attn.wq_b.scale is F32", "F8_E8M0"});
}

TEST_F(CheckpointTest, A53_ScaleBytesMeanPowersOfTwo) {
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(quant::e8m0_decode(static_cast<uint8_t>(byte)), std::ldexp(1.0f, byte - 127));
  }
  // A raised scale byte doubles every weight of its tile, bit by bit.
  Tensors tensors = load();
  Tensor& scale = tensors["layers.0.attn.wq_b.scale"];
  for (uint8_t& byte : scale.bytes) {
    ++byte;
  }
  save(tensors);
  const auto before = Checkpoint::open(original());
  const auto after = Checkpoint::open(changed_.path());
  ASSERT_TRUE(after.ok());
  const auto values = [](const ops::Weight& w) {
    std::vector<float> real(static_cast<size_t>(w.out * w.in));
    quant::fp8_tile_dequantize(
        w.values.as<uint8_t>(), w.scales.as<uint8_t>(), w.out, w.in, real.data());
    return real;
  };
  const std::vector<float> a = values(before->weights().layers[0].attn.wq_b);
  const std::vector<float> b = values(after->weights().layers[0].attn.wq_b);
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(2 * a[i], b[i]);
  }
}

struct BadValue {
  const char* name;
  const char* tensor;
  size_t byte;
  std::vector<uint8_t> bytes;
  const char* message;
};

class BadValueTest : public CheckpointTest, public testing::WithParamInterface<BadValue> {};

TEST_P(BadValueTest, IsNamedByOpenAndVerify) {
  const BadValue& bad = GetParam();
  Tensors tensors = load();
  ASSERT_TRUE(tensors.contains(bad.tensor));
  std::copy(bad.bytes.begin(),
            bad.bytes.end(),
            tensors[bad.tensor].bytes.begin() + static_cast<std::ptrdiff_t>(bad.byte));
  save(tensors);
  const std::string expected = fmt::format("{}: {}", bad.tensor, bad.message);
  if (std::string_view(bad.tensor).find("engram.embed") == std::string_view::npos) {
    expect_refused({expected});
  } else {
    EXPECT_EQ(refusal(), "");
  }
  const auto checkpoint = Checkpoint::open(changed_.path(), Checkpoint::Values::kUnchecked);
  ASSERT_TRUE(checkpoint.ok());
  ThreadPool pool(2);
  const std::vector<ValueFault> faults = checkpoint->verify(pool);
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(to_string(faults[0]), expected);
}

const BadValue kBadValues[] = {
    {"A53_Scale255",
     "layers.0.attn.wq_b.scale",
     3,
     {255},
     "element 3 is the NaN scale 255 (1 such element)"},
    {"ExpertScale255",
     "layers.9.ffn.experts.7.w2.scale",
     63,
     {255},
     "element 63 is the NaN scale 255 (1 such element)"},
    {"Fp8Nan", "layers.0.attn.wo_a.weight", 5000, {0x7F}, "element 5000 is NaN (1 such element)"},
    {"Fp8NegativeNan",
     "layers.0.attn.wo_a.weight",
     0,
     {0xFF, 0x7F},
     "element 0 is NaN (2 such elements)"},
    {"DraftFp8Nan", "mtp.0.main_proj.weight", 1, {0xFF}, "element 1 is NaN (1 such element)"},
    {"Bf16Nan",
     "embed.weight",
     2 * 777,
     {0xC0, 0x7F},
     "element 777 is NaN or infinite (1 such element)"},
    {"Bf16Infinite",
     "norm.weight",
     0,
     {0x80, 0xFF},
     "element 0 is NaN or infinite (1 such element)"},
    {"F32Nan",
     "layers.3.hc_ffn_scale",
     8,
     {0, 0, 0xC0, 0x7F},
     "element 2 is NaN or infinite (1 such element)"},
    {"F32Infinite",
     "layers.3.attn.attn_sink",
     4,
     {0, 0, 0x80, 0x7F},
     "element 1 is NaN or infinite (1 such element)"},
    {"EngramRowNan",
     "layers.1.engram.embed.weight",
     659 * 32 + 31,
     {0x7F},
     "element 21119 is NaN (1 such element)"},
    {"EngramScale255",
     "layers.1.engram.embed.scale",
     659,
     {255},
     "element 659 is the NaN scale 255 (1 such element)"},
};
INSTANTIATE_TEST_SUITE_P(Checkpoint,
                         BadValueTest,
                         testing::ValuesIn(kBadValues),
                         [](const auto& test) { return test.param.name; });

TEST_F(CheckpointTest, VerifyCountsAcrossPieces) {
  Tensors tensors = load();
  for (const char* name : {"embed.weight", "head.weight"}) {
    std::vector<uint8_t>& bytes = tensors[name].bytes;
    for (size_t i = 1; i < bytes.size(); i += 2000) {
      bytes[i] = 0x7F;
      bytes[i - 1] = 0x80;
    }
  }
  save(tensors);
  const auto checkpoint = Checkpoint::open(changed_.path(), Checkpoint::Values::kUnchecked);
  ASSERT_TRUE(checkpoint.ok());
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const std::vector<ValueFault> faults = checkpoint->verify(pool);
    ASSERT_EQ(faults.size(), 2u);
    EXPECT_EQ(faults[0].tensor, "embed.weight");
    EXPECT_EQ(faults[0].element, 0);
    EXPECT_EQ(faults[0].count, 33);
  }
}

TEST_F(CheckpointTest, A18_NormWeightsLoadExactly) {
  Tensors tensors = load();
  Tensor& norm = tensors["layers.6.attn_norm.weight"];
  const Philox random(18);
  std::vector<float> drawn;
  for (size_t i = 0; i < 64; ++i) {
    const bf16 value(static_cast<float>(0.03 + 0.02 * random.normal(i)));
    std::memcpy(&norm.bytes[2 * i], &value, 2);
    drawn.push_back(static_cast<float>(value));
  }
  save(tensors);
  const auto checkpoint = Checkpoint::open(changed_.path());
  ASSERT_TRUE(checkpoint.ok());
  const TensorView& loaded = checkpoint->weights().layers[6].attn_norm;
  int negative = 0;
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(static_cast<float>(loaded.as<bf16>()[i]), drawn[i]);
    negative += drawn[i] < 0 ? 1 : 0;
  }
  EXPECT_GT(negative, 0);
}

TEST_F(CheckpointTest, MisalignedTensorsAreCopied) {
  // In name order, byte tensors of odd size push what follows them off its alignment.
  Tensors tensors = load();
  const std::vector<uint8_t> sink = tensors["layers.0.attn.attn_sink"].bytes;
  save(tensors);
  const auto file = io::SafetensorsFile::open(changed_.file("model.safetensors"));
  ASSERT_TRUE(file.ok());
  int misaligned = 0;
  for (const auto& tensor : file->tensors()) {
    misaligned += reinterpret_cast<uintptr_t>(tensor.view.data) %
                              static_cast<uintptr_t>(dtype_bytes(tensor.view.dtype)) !=
                          0
                      ? 1
                      : 0;
  }
  ASSERT_GT(misaligned, 0);
  const auto checkpoint = Checkpoint::open(changed_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.error().message();
  for (const auto& [name, tensor] : tensors) {
    const TensorView view = checkpoint->tensor(name);
    EXPECT_EQ(
        reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(dtype_bytes(view.dtype)),
        0u)
        << name;
    EXPECT_EQ(std::memcmp(view.data, tensor.bytes.data(), tensor.bytes.size()), 0) << name;
  }
}

TEST_F(CheckpointTest, A57_TruncatedShardIsRefused) {
  Tensors tensors = load();
  save(tensors);
  const std::string path = changed_.file("model.safetensors");
  const std::string bytes = *read_file(path);
  for (const size_t cut : {size_t{1}, size_t{1000}, bytes.size() - 4, bytes.size()}) {
    ASSERT_TRUE(write_file(path, std::string_view(bytes).substr(0, bytes.size() - cut)).ok());
    expect_refused({path});
  }
}

TEST_F(CheckpointTest, A55_TablesMustFitTheConstants) {
  Tensors tensors = load();
  save(tensors);
  std::string config = *read_file(changed_.file("config.json"));
  const size_t at = config.find("864");
  ASSERT_NE(at, std::string::npos);
  ASSERT_TRUE(write_file(changed_.file("config.json"), config.replace(at, 3, "863")).ok());
  expect_refused({"engram_num_embeddings is [660, 863]", "[660, 864]"});
  // Absent constants are recomputed, and the tensors are checked against them.
  Tensor& table = tensors["layers.3.engram.embed.weight"];
  table.shape = {863, 32};
  table.bytes.resize(863 * 32);
  save(tensors);
  expect_refused(
      {"layers.3.engram.embed.weight is F8_E4M3 [863, 32] instead of F8_E4M3 [864, 32]"});
}

}  // namespace
}  // namespace cachalot::model
