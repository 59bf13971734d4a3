#include "model/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/format.h"
#include "model/engram_constants.h"
#include "model/schedule.h"

namespace cachalot::model {
namespace {

using nlohmann::json;

constexpr const char* kPresetNames[] = {
    "t1", "t1-vision", "micro", "nano", "bench-s", "v41-flash", "v41-slice"};

std::string golden(const std::string& name) {
  auto text = read_file(std::string(CACHALOT_SOURCE_DIR) + "/tests/golden/config/" + name);
  EXPECT_TRUE(text.ok());
  return *text;
}

ModelConfig preset(std::string_view name) {
  auto config = preset_config(name);
  EXPECT_TRUE(config.ok()) << name;
  return *config;
}

// The message of a refused config, "" if it was accepted.
std::string refusal(const json& document) {
  const auto result = parse_config(document.dump(), "x.json");
  return result.ok() ? "" : result.error().message();
}

TEST(Config, OfficialNestedConfigIsThePreset) {
  const auto config = parse_config(golden("v41-flash.json"), "v41-flash.json");
  ASSERT_TRUE(config.ok()) << config.error().message();
  EXPECT_EQ(*config, preset("v41-flash"));
}

TEST(Config, FlatConfigIsThePreset) {
  const auto config = parse_config(golden("v41-flash-flat.json"), "flat.json");
  ASSERT_TRUE(config.ok()) << config.error().message();
  EXPECT_EQ(*config, preset("v41-flash"));
}

TEST(Config, EveryPresetIsValidAndSurvivesJson) {
  for (const char* name : kPresetNames) {
    for (const WeightStorage storage : {WeightStorage::kOfficial, WeightStorage::kF32}) {
      SCOPED_TRACE(name);
      ModelConfig config = preset(name);
      config.storage = storage;
      EXPECT_TRUE(validate(config).ok());
      const auto back = parse_config(config_to_json(config), name);
      ASSERT_TRUE(back.ok()) << back.error().message();
      EXPECT_EQ(*back, config);
    }
  }
}

TEST(Config, PresetsHaveEveryLayerMode) {
  for (const char* name : kPresetNames) {
    std::set<LayerMode> modes;
    std::set<int64_t> ratios;
    bool candidates = false;
    for (const LayerSpec& layer : layer_schedule(preset(name))) {
      modes.insert(layer.mode);
      ratios.insert(layer.ratio);
      candidates = candidates || layer.candidate_source >= 0;
    }
    EXPECT_EQ(modes.size(), 4u) << name;
    EXPECT_EQ(ratios.size(), 3u) << name;
    EXPECT_TRUE(candidates) << name;
  }
}

TEST(Config, DraftStagesCountOnBehindTheLayers) {
  const ModelConfig config = preset("v41-flash");
  const std::vector<LayerSpec> stages = draft_schedule(config), layers = layer_schedule(config);
  ASSERT_EQ(stages.size(), 3u);
  for (int64_t s = 0; s < 3; ++s) {
    const LayerSpec& stage = stages[static_cast<size_t>(s)];
    EXPECT_EQ(stage.index, 40 + s);
    EXPECT_EQ(stage.stage, s);
    EXPECT_EQ(stage.mode, LayerMode::kWindow);
    EXPECT_EQ(stage.experts_per_token, 3);
  }
  for (const LayerSpec& layer : layers) {
    EXPECT_EQ(layer.tap, layer.index < 37 ? -1 : layer.index - 37);
    EXPECT_EQ(layer.stage, -1);
    EXPECT_EQ(layer.experts_per_token, 6);
  }
}

TEST(Config, UnknownPresetListsTheNames) {
  const auto result = preset_config("t2");
  ASSERT_FALSE(result.ok());
  for (const char* name : kPresetNames) {
    EXPECT_NE(result.error().message().find(name), std::string::npos);
  }
}

TEST(Config, EveryKeyOfEveryPresetCanBeSet) {
  // Setting each key to its own value, on top of another preset, turns that into this preset.
  for (const char* name : kPresetNames) {
    SCOPED_TRACE(name);
    const ModelConfig wanted = preset(name);
    const json document = json::parse(config_to_json(wanted));
    ModelConfig config = preset("t1");
    config.vision = {};
    const auto set_all = [&](const json& object, const std::string& prefix) {
      for (const auto& [key, value] : object.items()) {
        if (value.is_number() || value.is_array()) {
          if (set_config_value(config, prefix + key + "=" + value.dump()).ok()) {
            continue;
          }
          // Only keys whose value is fixed.
          EXPECT_TRUE(key.starts_with("n_group") || key == "topk_group" ||
                      key == "num_key_value_heads" || key == "first_k_dense_replace" ||
                      key == "num_hash_layers" || key == "architectures")
              << key;
        }
      }
    };
    set_all(document, "");
    set_all(document["text_config"], "");
    set_all(document["text_config"]["rope_scaling"], "rope_scaling.");
    if (document.contains("vision_config")) {
      set_all(document["vision_config"], "vision_config.");
    }
    EXPECT_EQ(config, wanted);
  }
}

TEST(Config, SetRefusesNonsense) {
  ModelConfig config = preset("t1");
  for (const char* assignment : {"",
                                 "=",
                                 "hidden_size",
                                 "=3",
                                 "hidden_size=",
                                 "hidden_size=x",
                                 "hidden_size=1.5",
                                 "hidden_size=\"64\"",
                                 "hidden_size=[1]",
                                 "no_such_key=1",
                                 "rope_scaling.x=1",
                                 "a.b=1",
                                 "compress_ratios=3",
                                 "compress_ratios=[1,\"2\"]",
                                 "vision_config.=1"}) {
    EXPECT_FALSE(set_config_value(config, assignment).ok()) << assignment;
  }
  EXPECT_EQ(config, preset("t1"));
}

TEST(Config, SetEngramKeysRecomputesRows) {
  ModelConfig config = preset("t1");
  ASSERT_TRUE(set_config_value(config, "engram_vocab_size=1000").ok());
  EXPECT_TRUE(validate(config).ok());
  EXPECT_NE(config.engram_num_embeddings, preset("t1").engram_num_embeddings);
  ASSERT_TRUE(set_config_value(config, "engram_layer_ids=[]").ok());
  EXPECT_TRUE(config.engram_num_embeddings.empty());
  EXPECT_TRUE(validate(config).ok()) << validate(config).message();
}

// Rows of a layer are counted in 32 bits; the primes of its tables lie above engram_vocab_size.
TEST(Config, EngramRowsFitThirtyTwoBits) {
  ModelConfig config = *preset_config("t1");
  const int64_t columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads;
  const int64_t limit = INT32_MAX / columns;
  const auto set = [&](int64_t size) {
    EXPECT_TRUE(set_config_value(config, fmt::format("engram_vocab_size={}", size)).ok());
    return validate(config);
  };
  EXPECT_NE(set(limit + 1).message().find(
                fmt::format("engram_vocab_size is {}; with {} columns", limit + 1, columns)),
            std::string::npos);
  EXPECT_NE(set(limit).message().find("rows of a layer exceed 32 bits"), std::string::npos);
  const Status below = set(limit - 10'000);
  ASSERT_TRUE(below.ok()) << below.message();
  for (const int64_t rows : config.engram_num_embeddings) {
    EXPECT_LE(rows, INT32_MAX);
    EXPECT_GT(rows, INT32_MAX - int64_t{1'000'000});
  }
}

// ---- Refusals
// ------------------------------------------------------------------------------------

struct Edit {
  const char* name;
  const char* pointer;  // JSON pointer into the official config
  const char* value;    // JSON, or null to remove the key
  std::vector<std::string> message;
};

void PrintTo(const Edit& edit, std::ostream* out) {
  *out << edit.name;
}

class RefusedEdit : public testing::TestWithParam<Edit> {};

TEST_P(RefusedEdit, NamesKeyAndValue) {
  const Edit& edit = GetParam();
  json document = json::parse(golden("v41-flash.json"));
  const json::json_pointer pointer(edit.pointer);
  if (edit.value == nullptr) {
    ASSERT_TRUE(document.contains(pointer));
    document.at(pointer.parent_pointer()).erase(pointer.back());
  } else {
    document[pointer] = json::parse(edit.value);
  }
  const std::string message = refusal(document);
  ASSERT_NE(message, "");
  EXPECT_TRUE(message.starts_with("x.json: ")) << message;
  for (const std::string& part : edit.message) {
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks " << part;
  }
}

const Edit kRefused[] = {
    // Behaviour that does not exist here.
    {"AttentionBias", "/text_config/attention_bias", "true", {"attention_bias", "true"}},
    {"HiddenAct", "/text_config/hidden_act", "\"gelu\"", {"hidden_act", "gelu"}},
    {"ScoringFunc", "/text_config/scoring_func", "\"softmax\"", {"scoring_func", "softmax"}},
    {"TopkMethod", "/text_config/topk_method", "\"greedy\"", {"topk_method", "greedy"}},
    {"NormTopkProb", "/text_config/norm_topk_prob", "false", {"norm_topk_prob", "false"}},
    {"NGroup", "/text_config/n_group", "8", {"n_group", "8"}},
    {"TiedEmbeddings", "/text_config/tie_word_embeddings", "true", {"tie_word_embeddings"}},
    {"TiedEmbeddingsTop", "/tie_word_embeddings", "true", {"tie_word_embeddings"}},
    {"KvHeads", "/text_config/num_key_value_heads", "8", {"num_key_value_heads", "8"}},
    {"RopeType", "/text_config/rope_scaling/rope_type", "\"linear\"", {"rope_type", "linear"}},
    {"ScaleFormat", "/quantization_config/scale_fmt", "\"float\"", {"scale_fmt", "float"}},
    {"BlockSize",
     "/quantization_config/weight_block_size",
     "[128,128]",
     {"weight_block_size", "[128,128]"}},
    {"ExpertDtype", "/quantization_config/expert_dtype", "\"fp8\"", {"expert_dtype", "fp8"}},
    {"QuantMethod", "/quantization_config/quant_method", "\"awq\"", {"quant_method", "awq"}},
    {"ModelType", "/model_type", "\"deepseek_v4\"", {"model_type", "deepseek_v4"}},
    {"WideImages", "/vision_config/max_wh_ratio", "3", {"max_wh_ratio", "3"}},
    {"NoQuantization", "/quantization_config", nullptr, {"quantization_config", "bfloat16"}},
    // Types.
    {"StringForInteger",
     "/text_config/hidden_size",
     "\"5120\"",
     {"text_config.hidden_size", "integer", "5120"}},
    {"FractionForInteger", "/text_config/hidden_size", "5120.5", {"hidden_size", "5120.5"}},
    {"FloatForInteger", "/text_config/hidden_size", "5120.0", {"hidden_size", "5120.0"}},
    {"BoolForInteger", "/text_config/hidden_size", "true", {"hidden_size", "true"}},
    {"HugeInteger", "/text_config/hidden_size", "18446744073709551615", {"hidden_size"}},
    {"StringForNumber", "/text_config/rope_theta", "\"1e4\"", {"rope_theta", "1e4"}},
    {"NumberForList", "/text_config/compress_ratios", "2", {"compress_ratios", "2"}},
    {"StringInList", "/text_config/compress_ratios/3", "\"2\"", {"compress_ratios[3]"}},
    {"ListForObject", "/vision_config", "[]", {"vision_config", "[]"}},
    {"TextConfigNumber", "/text_config", "3", {"text_config", "3"}},
    // Values.
    {"ZeroHidden", "/text_config/hidden_size", "0", {"hidden_size is 0"}},
    {"NegativeHidden", "/text_config/hidden_size", "-5120", {"hidden_size is -5120"}},
    {"AbsurdHidden", "/text_config/hidden_size", "1000000000", {"hidden_size is 1000000000"}},
    {"HiddenNotMultiple", "/text_config/hidden_size", "5100", {"hidden_size is 5100", "32"}},
    {"AbsurdVocabulary", "/text_config/vocab_size", "4611686018427387904", {"vocab_size"}},
    {"AbsurdLayers", "/text_config/num_hidden_layers", "1000000", {"num_hidden_layers"}},
    {"RopeOdd", "/text_config/qk_rope_head_dim", "63", {"qk_rope_head_dim is 63"}},
    {"RopeAboveIndexHead", "/text_config/qk_rope_head_dim", "256", {"qk_rope_head_dim is 256"}},
    {"GroupsDoNotDivide", "/text_config/o_groups", "7", {"o_groups is 7", "64"}},
    {"TooManyExperts", "/text_config/num_hidden_layers", "1000", {"n_routed_experts is 384"}},
    {"TooManyExpertsChosen",
     "/text_config/num_experts_per_tok",
     "385",
     {"num_experts_per_tok is 385"}},
    {"TwoShared", "/text_config/n_shared_experts", "2", {"n_shared_experts is 2"}},
    {"ZeroEps", "/text_config/rms_norm_eps", "0", {"rms_norm_eps is 0"}},
    {"NegativeLimit", "/text_config/swiglu_limit", "-1", {"swiglu_limit is -1"}},
    {"BetaOrder", "/text_config/rope_scaling/beta_slow", "64", {"beta_fast"}},
    {"EosOutside", "/eos_token_id", "129280", {"eos_token_id is 129280"}},
    {"ImageOutside", "/image_token_id", "-2", {"image_token_id is -2"}},
    {"NoiseOutside", "/text_config/dspark_noise_token_id", "129280", {"dspark_noise_token_id"}},
    {"DraftTarget",
     "/text_config/dspark_target_layer_ids",
     "[37,38,40]",
     {"dspark_target_layer_ids is [37, 38, 40]"}},
    {"NoDraftTarget", "/text_config/dspark_target_layer_ids", "[]", {"dspark_target_layer_ids"}},
    {"VisionHeads",
     "/vision_config/num_attention_heads",
     "15",
     {"vision_config.hidden_size is 1024"}},
    {"NoImageTokens",
     "/vision_config/max_image_tokens",
     "3",
     {"vision_config.max_image_tokens is 3", "[4, "}},
    {"ManyImageTokens",
     "/vision_config/max_image_tokens",
     "40000",
     {"vision_config.max_image_tokens is 40000", "42 x 42 pixels"}},
    {"WidePatches",
     "/vision_config/downsample_ratio",
     "64",
     {"vision_config.max_image_tokens is 1024", "896 x 896 pixels"}},
    {"MinPixelsBeyondTheTokens",
     "/vision_config/min_pixels",
     "1801045",
     {"vision_config.min_pixels is 1801045", "[0, 1801044]"}},
    // Missing keys.
    {"NoHidden", "/text_config/hidden_size", nullptr, {"text_config.hidden_size is missing"}},
    {"NoPositions",
     "/text_config/max_position_embeddings",
     nullptr,
     {"text_config.max_position_embeddings is missing"}},
    {"NoIndexHeads", "/text_config/index_n_heads", nullptr, {"index_n_heads is missing"}},
    {"NoCandidateBlocks",
     "/text_config/candidate_topk_blocks",
     nullptr,
     {"candidate_topk_blocks is missing"}},
    {"NoRopeFactor", "/text_config/rope_scaling/factor", nullptr, {"rope_scaling.factor"}},
    {"NoDraftBlock", "/text_config/dspark_block_size", nullptr, {"dspark_block_size is missing"}},
    // the schedule is refused at load by the key's name.
    {"A54_NoSchedule", "/text_config/compress_ratios", nullptr, {"compress_ratios is missing"}},
    {"A54_EmptySchedule", "/text_config/compress_ratios", "[]", {"compress_ratios has 0 entries"}},
    {"A54_NoSources",
     "/text_config/kv_source_layer_ids",
     nullptr,
     {"kv_source_layer_ids is missing"}},
    {"A54_EmptySources",
     "/text_config/kv_source_layer_ids",
     "[]",
     {"kv_source_layer_ids is []", "layer 2"}},
    {"A54_ReuseBeforeFull",
     "/text_config/kv_source_layer_ids",
     "[8,14,20]",
     {"kv_source_layer_ids is [8, 14, 20]", "layer 2"}},
    {"A54_SourceWithoutRatio",
     "/text_config/kv_source_layer_ids",
     "[1,2,8,14,20]",
     {"index_source_layer_ids", "1"}},
    {"A54_IndexSourceWithoutRatio",
     "/text_config/index_source_layer_ids",
     "[1,2,8,14,20,24,28,32,36]",
     {"index_source_layer_ids", "layer 1"}},
    {"A54_SourceOutside",
     "/text_config/kv_source_layer_ids",
     "[2,8,14,20,40]",
     {"kv_source_layer_ids", "40"}},
    {"A54_SourcesDescend",
     "/text_config/kv_source_layer_ids",
     "[8,2,14,20]",
     {"kv_source_layer_ids", "ascend"}},
    {"A54_SourceTwice",
     "/text_config/kv_source_layer_ids",
     "[2,2,8,14,20]",
     {"kv_source_layer_ids", "ascend"}},
    {"A54_SourceWithoutIndexer",
     "/text_config/index_source_layer_ids",
     "[2,8,20]",
     {"index_source_layer_ids", "14"}},
    {"A54_RatioThree", "/text_config/compress_ratios/5", "3", {"compress_ratios[5] is 3"}},
    {"A54_RatioChangesWithoutSource",
     "/text_config/compress_ratios/5",
     "1",
     {"compress_ratios[5] is 1", "layer 2"}},
    {"A54_DraftRatio", "/text_config/compress_ratios/41", "1", {"compress_ratios[41] is 1"}},
    {"A54_CandidateNotIndexSource",
     "/text_config/candidate_source_layer_id",
     "21",
     {"candidate_source_layer_id is 21"}},
    {"A54_CandidateBeforeKvSource",
     "/text_config/candidate_source_layer_id",
     "14",
     {"candidate_source_layer_id is 14", "20"}},
    // constants that contradict the rest of the config.
    {"A55_RowsContradict",
     "/text_config/engram_num_embeddings",
     "[384006168,384016683]",
     {"engram_num_embeddings is [384006168, 384016683]", "384016682"}},
    {"A55_RowsCount",
     "/text_config/engram_num_embeddings",
     "[384006168]",
     {"engram_num_embeddings"}},
    {"A55_NoVocabulary", "/text_config/engram_vocab_size", nullptr, {"engram_vocab_size"}},
    {"A55_NoClasses",
     "/text_config/engram_compressed_vocab_size",
     nullptr,
     {"engram_compressed_vocab_size is missing"}},
    {"A55_ClassesAboveVocabulary",
     "/text_config/engram_compressed_vocab_size",
     "129281",
     {"engram_compressed_vocab_size is 129281"}},
    {"A55_RowsOverflow",
     "/text_config/engram_vocab_size",
     "200000000",
     {"engram_vocab_size is 200000000"}},
    {"A55_PadOutside", "/text_config/engram_pad_token_id", "-1", {"engram_pad_token_id is -1"}},
    {"A55_LayerOutside", "/text_config/engram_layer_ids", "[1,40]", {"engram_layer_ids"}},
    {"A55_RowsWithoutLayers", "/text_config/engram_layer_ids", "[]", {"engram_num_embeddings"}},
};

INSTANTIATE_TEST_SUITE_P(Config, RefusedEdit, testing::ValuesIn(kRefused), [](const auto& test) {
  return test.param.name;
});

TEST(Config, MalformedTextIsRefused) {
  std::string deep(100000, '[');
  for (const std::string& text : {std::string(),
                                  std::string("{"),
                                  std::string("[]"),
                                  std::string("3"),
                                  std::string("null"),
                                  std::string("{}"),
                                  std::string("{\"text_config\":{}}"),
                                  std::string("\xFF"),
                                  deep,
                                  std::string("{\"a\":1,\"a\":1}"),
                                  "{\"a\":" + deep,
                                  std::string("{\"text_config\":{\"hidden_size\":1e999}}")}) {
    const auto result = parse_config(text, "x.json");
    ASSERT_FALSE(result.ok()) << text.substr(0, 40);
    EXPECT_TRUE(result.error().message().starts_with("x.json: "));
  }
}

TEST(Config, UnknownKeysAreIgnored) {
  json document = json::parse(golden("v41-flash.json"));
  document["new_key"] = {{"nested", {1, 2, 3}}};
  document["text_config"]["new_key"] = "x";
  document["text_config"]["n_group"] = nullptr;
  EXPECT_EQ(refusal(document), "");
}

TEST(Config, A55_RowsAreRecomputedWhenAbsent) {
  json document = json::parse(golden("v41-flash.json"));
  document["text_config"].erase("engram_num_embeddings");
  const auto config = parse_config(document.dump(), "x.json");
  ASSERT_TRUE(config.ok()) << config.error().message();
  EXPECT_EQ(config->engram_num_embeddings, (std::vector<int64_t>{384006168, 384016682}));
}

// ---- Engram constants
// ----------------------------------------------------------------------------

TEST(EngramConstants, ReleasedModel) {
  const std::vector<EngramConstants> all = engram_constants(preset("v41-flash"));
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].multiplier,
            (std::vector<int64_t>{76632096046245, 4839876093313, 35959672319349, 73987337458391}));
  EXPECT_EQ(all[1].multiplier,
            (std::vector<int64_t>{67716810739261, 51510806800915, 30921347202721, 82619226485591}));
  ASSERT_EQ(all[0].prime.size(), 24u);
  EXPECT_EQ(all[0].prime[0], 16000057);
  EXPECT_EQ(all[0].prime[8], 16000189);
  EXPECT_EQ(all[0].prime[23], 16000463);
  EXPECT_EQ(all[1].prime[0], 16000477);
  EXPECT_EQ(all[1].prime[16], 16000781);
  EXPECT_EQ(all[1].prime[23], 16000889);
  EXPECT_EQ(all[0].offset[1], 16000057);
  EXPECT_EQ(all[0].offset[23], 368005705);
  EXPECT_EQ(all[1].offset[23], 368015793);
  EXPECT_EQ(all[0].rows, 384006168);
  EXPECT_EQ(all[1].rows, 384016682);
}

TEST(EngramConstants, SmallModel) {
  const std::vector<EngramConstants> all = engram_constants(preset("t1"));
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].prime, (std::vector<int64_t>{101, 103, 107, 109, 113, 127}));
  EXPECT_EQ(all[1].prime, (std::vector<int64_t>{131, 137, 139, 149, 151, 157}));
  EXPECT_EQ(all[0].rows, 660);
  EXPECT_EQ(all[1].rows, 864);
  EXPECT_EQ(all[0].multiplier,
            (std::vector<int64_t>{
                14831304026200453, 936705081716061, 6959601268494069, 14319439928568407}));
  EXPECT_EQ(all[1].multiplier,
            (std::vector<int64_t>{
                5327545137947969, 15804252993068197, 2105304604748359, 13605204602324401}));
}

}  // namespace
}  // namespace cachalot::model
