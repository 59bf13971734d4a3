#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <map>

#include "model/config.h"
#include "tests/train/support.h"

namespace cachalot::train {
namespace {

struct Expected {
  Update update;
  bool decays = false;
  size_t blocks = 0;
};

// Every kind of weight by the end of its name, with the number of matrices in the released model.
TEST(UpdateRule, OfEveryWeightOfTheReleasedModel) {
  const std::vector<std::pair<std::string, Expected>> wanted = {
      {"markov_head.embed.weight", {Update::kSinkhorn, false, 1}},
      {"markov_head.head.weight", {Update::kSinkhorn, false, 1}},
      {"confidence_head.proj.weight", {Update::kAdam}},
      {"main_proj.weight", {Update::kMuon, false, 1}},
      {"engram.embed.weight", {Update::kSinkhorn, false, 24}},
      {"engram.wkv.weight", {Update::kMuon, false, 5}},
      {"engram.q_weight", {Update::kAdam, true}},
      {"engram.k_weight", {Update::kAdam, true}},
      {"embed.weight", {Update::kSinkhorn, false, 1}},
      {"head.weight", {Update::kSinkhorn, false, 1}},
      {"indexer.wq_b.weight", {Update::kMuon, false, 32}},
      {"indexer.wk.weight", {Update::kMuon, false, 1}},
      {"indexer.weights_proj.weight", {Update::kMuon, false, 1}},
      {"attn.wq_b.weight", {Update::kMuon, false, 64}},
      {"attn.wq_a.weight", {Update::kMuon, false, 1}},
      {"attn.wkv.weight", {Update::kMuon, false, 1}},
      {"attn.wo_a.weight", {Update::kMuon, false, 8}},
      {"attn.wo_b.weight", {Update::kMuon, false, 1}},
      {"compressor.wkv.weight", {Update::kMuon, false, 1}},
      {"compressor.wgate.weight", {Update::kMuon, false, 1}},
      {"attn_sink", {Update::kAdam}},
      {"hc_attn_fn", {Update::kMuon, false, 1}},
      {"hc_ffn_fn", {Update::kMuon, false, 1}},
      {"_base", {Update::kAdam}},
      {"_scale", {Update::kAdam}},
      {"ffn.gate.weight", {Update::kMuon, false, 1}},
      {"ffn.gate.bias", {Update::kBias}},
      {"ffn.gate.bias_vl", {Update::kBias}},
      {".w1.weight", {Update::kMuon, false, 1}},
      {".w2.weight", {Update::kMuon, false, 1}},
      {".w3.weight", {Update::kMuon, false, 1}},
      {"norm.weight", {Update::kAdam, true}},
  };
  model::ModelConfig config = *model::preset_config("v41-flash");
  config.n_routed_experts = 8;  // every expert is alike
  config.vision = {};
  std::map<std::string, int> seen;
  for (const model::WeightSpec& spec : model::weight_table(config)) {
    const UpdateRule rule = update_rule(config, spec);
    const auto* match = &wanted[0];
    bool found = false;
    for (const auto& entry : wanted) {
      if (spec.name.ends_with(entry.first)) {
        match = &entry;
        found = true;
        break;
      }
    }
    ASSERT_TRUE(found) << spec.name;
    ++seen[match->first];
    EXPECT_EQ(rule.update, match->second.update) << spec.name;
    EXPECT_EQ(rule.decays, match->second.decays) << spec.name;
    EXPECT_EQ(rule.blocks.size(), match->second.blocks) << spec.name;
    EXPECT_EQ(rule.is_table, spec.name.ends_with("engram.embed.weight"));
    int64_t rows = 0;
    for (const Block& block : rule.blocks) {
      EXPECT_EQ(block.begin, rows);
      rows += block.rows;
    }
    if (!rule.blocks.empty()) {
      EXPECT_EQ(rows, spec.shape[0]) << spec.name;
    }
  }
  EXPECT_EQ(seen.size(), wanted.size());
  config = *model::preset_config("v41-flash");
  EXPECT_EQ(model::engram_constants(config)[0].prime[0], 16000057);
}

// One optimizer step of the head-wise query projection equals independent updates of its heads, and
// differs from one update of the whole matrix.
TEST(Optimizer, HeadsAreMatricesOfTheirOwn) {
  ParameterSet<float> parameters(odd_config());
  randomize(parameters, 3);
  const int64_t heads = odd_config().num_attention_heads;
  Parameter<float>& wq = parameters.named("layers.0.attn.wq_b.weight");
  const Philox random(4);
  for (size_t i = 0; i < wq.grad.size(); ++i) {
    wq.grad[i] = static_cast<float>(random.normal(i));
  }
  std::vector<float> apart = wq.value, momentum(apart.size(), 0.0f);
  std::vector<float> whole = wq.value, whole_momentum = momentum;
  const int64_t columns = wq.columns(), rows = wq.rows() / heads;
  const OptimizerOptions options;
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t at = h * rows * columns;
    muon_update(nullptr,
                options.muon,
                0.02,
                rows,
                columns,
                wq.grad.data() + at,
                momentum.data() + at,
                apart.data() + at);
  }
  muon_update(nullptr,
              options.muon,
              0.02,
              wq.rows(),
              columns,
              wq.grad.data(),
              whole_momentum.data(),
              whole.data());
  Optimizer optimizer(parameters, options);
  ThreadPool pool(2);
  optimizer.step(1, 0.02, 1.0, &pool);
  EXPECT_EQ(wq.value, apart);
  EXPECT_NE(wq.value, whole);
}

TEST(Optimizer, LeavesBiasesAndDraftsAloneAndCountsOneMomentum) {
  model::ModelConfig config = *model::preset_config("t1");
  ParameterSet<float> parameters(config);
  randomize(parameters, 3);
  for (Parameter<float>& parameter : parameters.all()) {
    std::fill(parameter.grad.begin(), parameter.grad.end(), 0.5f);
  }
  std::vector<std::vector<float>> before;
  for (const Parameter<float>& parameter : parameters.all()) {
    before.push_back(parameter.value);
  }
  Optimizer optimizer(parameters, {});
  optimizer.step(1, 0.01, 1.0, nullptr);
  for (size_t i = 0; i < before.size(); ++i) {
    const Parameter<float>& parameter = parameters.all()[i];
    const OptimizerState& state = optimizer.states()[i];
    const UpdateRule rule = update_rule(config, parameter.spec);
    const bool still =
        rule.update == Update::kBias || parameter.spec.part == model::WeightPart::kDraft;
    EXPECT_EQ(optimizer.trains(i), !still) << parameter.spec.name;
    EXPECT_EQ(parameter.value == before[i], still) << parameter.spec.name;
    EXPECT_EQ(state.first.size(), still ? 0 : parameter.value.size());
    EXPECT_EQ(state.second.size(),
              !still && rule.update == Update::kAdam ? parameter.value.size() : 0);
  }
}

TEST(Optimizer, NamesTheWeightWithABadGradient) {
  ParameterSet<float> parameters(odd_config());
  Optimizer optimizer(parameters, {});
  parameters.named("norm.weight").grad[2] = 3;
  std::string worst;
  EXPECT_EQ(gradient_norm(parameters, optimizer, nullptr, &worst), 3);
  EXPECT_EQ(worst, "");
  parameters.named("layers.3.attn.wkv.weight").grad[5] = std::nanf("");
  gradient_norm(parameters, optimizer, nullptr, &worst);
  EXPECT_EQ(worst, "layers.3.attn.wkv.weight");
}

}  // namespace
}  // namespace cachalot::train
