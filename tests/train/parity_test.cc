// TrainExec and InferExec run the same forward: their logits, selections and loads agree.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/runtime.h"
#include "model/checkpoint.h"
#include "model/synth.h"
#include "tests/support/temp_directory.h"
#include "tests/train/support.h"
#include "text/byte_tokenizer.h"

namespace cachalot::train {
namespace {

// The schedule of a preset at the widths of t1, so that 40 layers run in a moment.
model::ModelConfig narrow(const std::string& preset) {
  model::ModelConfig c = *model::preset_config(preset);
  const model::ModelConfig t1 = *model::preset_config("t1");
  if (preset == "t1") {
    return c;
  }
  c.vocab_size = t1.vocab_size;
  c.hidden_size = t1.hidden_size;
  c.moe_intermediate_size = t1.moe_intermediate_size;
  c.num_attention_heads = t1.num_attention_heads;
  c.head_dim = t1.head_dim;
  c.qk_rope_head_dim = t1.qk_rope_head_dim;
  c.q_lora_rank = t1.q_lora_rank;
  c.o_lora_rank = t1.o_lora_rank;
  c.o_groups = t1.o_groups;
  c.swiglu_limit = t1.swiglu_limit;
  c.n_routed_experts = t1.n_routed_experts;
  c.num_experts_per_tok = t1.num_experts_per_tok;
  c.sliding_window = t1.sliding_window;
  c.index_n_heads = t1.index_n_heads;
  c.index_head_dim = t1.index_head_dim;
  c.index_topk = t1.index_topk;
  c.candidate_topk_blocks = t1.candidate_topk_blocks;
  c.candidate_block_size = t1.candidate_block_size;
  c.engram_vocab_size = t1.engram_vocab_size;
  c.engram_n_heads = t1.engram_n_heads;
  c.engram_head_dim = t1.engram_head_dim;
  c.engram_compressed_vocab_size = c.vocab_size;
  c.dspark_noise_token_id = c.vocab_size - 1;
  c.dspark_n_routed_experts = std::min<int64_t>(c.dspark_n_routed_experts, 4);
  c.dspark_num_experts_per_tok = std::min<int64_t>(c.dspark_num_experts_per_tok, 1);
  c.image_token_id = -1;
  c.vision = {};
  EXPECT_TRUE(model::derive_engram_rows(c).ok());
  return c;
}

// Each layer adds a few roundings of 2^-24, and the network amplifies them by less than a hundred.
constexpr double kTolerance = 1e-4;

// In units of the RMS of `a`.
double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double squares = 0, worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += a[i] * a[i];
    worst = std::max(worst, std::fabs(a[i] - b[i]));
  }
  return worst / std::sqrt(squares / static_cast<double>(a.size()));
}

// Writes the same random model in both storages; InferExec runs the one, TrainExec loads the exact
// values and, for the official storage, rounds them itself.
void compare(const std::string& preset, model::WeightStorage storage) {
  model::ModelConfig config = narrow(preset);
  config.storage = storage;
  const test::TempDirectory directory, exact;
  ThreadPool pool(1);
  const std::string tokenizer =
      text::byte_level_tokenizer_json(static_cast<int32_t>(config.vocab_size));
  const auto write = [&](model::ModelConfig c, const test::TempDirectory& to) {
    return model::synthesize(c, to.path(), {.seed = 3, .tokenizer_json = tokenizer}, pool);
  };
  ASSERT_TRUE(write(config, directory).ok());
  model::ModelConfig exact_config = config;
  exact_config.storage = model::WeightStorage::kF32;
  ASSERT_TRUE(write(exact_config, exact).ok());
  auto runtime = engine::Runtime::open(
      directory.path(),
      {.backend = ops::Backend::kRef, .threads = 1, .precision = model::Precision::kF32});
  ASSERT_TRUE(runtime.ok()) << runtime.status().message();
  auto parameters = ParameterSet<double>::create(config, (*runtime)->model().token_class);
  ASSERT_TRUE(parameters.ok()) << parameters.status().message();
  const auto checkpoint = model::Checkpoint::open(exact.path());
  ASSERT_TRUE(checkpoint.ok());
  for (Parameter<double>& parameter : (*parameters)->all()) {
    const float* stored = checkpoint->tensor(parameter.spec.name).as<float>();
    std::copy_n(stored, parameter.value.size(), parameter.value.begin());
  }
  ForwardOptions options;
  options.quant = storage == model::WeightStorage::kOfficial
                      ? QuantSwitches::exported()
                      : QuantSwitches{.window = true, .main = true, .index = true};
  options.candidates = true;
  options.gradients = false;
  options.keep_logits = true;
  const auto logits_of = [&](const std::vector<int32_t>& tokens, double noise) {
    (*parameters)->apply(options.quant, nullptr);
    for (Parameter<double>& parameter : (*parameters)->all()) {
      if (parameter.spec.role == model::WeightRole::kNorm) {
        const Philox random(parameter.value.size());
        std::vector<double> moved(parameter.used(), parameter.used() + parameter.value.size());
        for (size_t i = 0; i < moved.size(); ++i) {
          moved[i] *= 1 + noise * random.normal(i);
        }
        parameter.stored = std::move(moved);
      }
    }
    const std::vector<Sample> samples = {{tokens, {}}};
    const Batch batch = make_batch(samples);
    const ForwardPass<double> pass(**parameters, options, batch);
    const double* logits = pass.exec().logits().value();
    return std::vector<double>(logits, logits + pass.exec().logits().node->size());
  };

  // Both sum in double, but the ops store FP32: an error of 2^-24 that a code or a choice near its
  // boundary would turn into another one. So the prompt is one whose logits hardly move when every
  // norm weight moves by four times as much.
  std::vector<int32_t> tokens;
  std::vector<double> got;
  for (uint64_t seed = 1; tokens.empty() && seed < 40; ++seed) {
    const std::vector<int32_t> prompt = random_tokens(21, config.vocab_size, seed);
    got = logits_of(prompt, 0);
    if (worst_difference(got, logits_of(prompt, 0x1p-22)) < kTolerance) {
      tokens = prompt;
    }
  }
  ASSERT_FALSE(tokens.empty()) << "no prompt without a decision at its boundary";

  auto cache = (*runtime)->make_cache();
  auto runner = (*runtime)->make_runner();
  ASSERT_TRUE(cache.ok() && runner.ok());
  ASSERT_TRUE((*cache)->reserve(static_cast<int64_t>(tokens.size())).ok());
  const model::StepSequence sequence{
      .view = &(*cache)->view(), .tokens = tokens, .all_logits = true};
  const auto inferred = (*runner)->run({&sequence, 1});
  ASSERT_TRUE(inferred.ok()) << inferred.status().message();

  const float* want = inferred->as<float>();
  EXPECT_LT(worst_difference(got, {want, want + got.size()}), kTolerance);
}

class Parity : public testing::TestWithParam<const char*> {};

TEST_P(Parity, OfTheExactWeights) {
  compare(GetParam(), model::WeightStorage::kF32);
}

TEST_P(Parity, OfTheExportedWeights) {
  compare(GetParam(), model::WeightStorage::kOfficial);
}

INSTANTIATE_TEST_SUITE_P(
    Presets,
    Parity,
    testing::Values("t1", "micro", "nano", "bench-s", "v41-flash", "v41-slice"),
    [](const auto& parameter) {
      std::string name = parameter.param;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

}  // namespace
}  // namespace cachalot::train
