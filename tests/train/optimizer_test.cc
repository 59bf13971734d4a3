#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
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

// What distinguishes the heads is their rows alone: exchanging two of them exchanges the result.
TEST(Optimizer, ExchangedHeadsGiveExchangedUpdates) {
  const auto updated = [](bool exchange) {
    ParameterSet<float> parameters(odd_config());
    randomize(parameters, 3);
    Parameter<float>& wq = parameters.named("layers.0.attn.wq_b.weight");
    const auto head = static_cast<std::ptrdiff_t>(wq.value.size() / 4);
    const auto swap = [&](std::vector<float>& values) {
      std::swap_ranges(values.begin(), values.begin() + head, values.begin() + 2 * head);
    };
    const Philox random(4);
    for (size_t i = 0; i < wq.grad.size(); ++i) {
      wq.grad[i] = static_cast<float>(random.normal(i));
    }
    if (exchange) {
      swap(wq.value);
      swap(wq.grad);
    }
    Optimizer optimizer(parameters, {});
    optimizer.step(1, 0.02, 1.0, nullptr);
    if (exchange) {
      swap(wq.value);
    }
    return wq.value;
  };
  EXPECT_EQ(updated(false), updated(true));
}

// The momentum is made of the step's summed gradient in float, whose low bits BF16 would drop.
TEST(Optimizer, MomentumKeepsTheFloatSum) {
  ParameterSet<float> parameters(odd_config());
  randomize(parameters, 3);
  Parameter<float>& wo = parameters.named("layers.1.attn.wo_b.weight");
  Parameter<float>& embed = parameters.named("embed.weight");
  for (int batch = 0; batch < 3; ++batch) {
    for (Parameter<float>* parameter : {&wo, &embed}) {
      for (float& g : parameter->grad) {
        g += batch == 0 ? 1.0f : 0x1p-20f;
      }
    }
  }
  Optimizer optimizer(parameters, {});
  optimizer.step(1, 0.01, 1.0, nullptr);
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    const Parameter<float>* parameter = &parameters.all()[i];
    const float one = optimizer.states()[i].first.empty() ? 0 : optimizer.states()[i].first[0];
    if (parameter == &wo) {
      EXPECT_EQ(one, 1.0f + 0x1p-19f);
    } else if (parameter == &embed) {
      // 1 - 0.95f is off by up to 2^-25; the low bits are worth 2^-19 / 20 = 9.5e-8.
      EXPECT_NEAR(one, 0.05f * (1.0f + 0x1p-19f), 3e-8f);
    }
  }
}

// Stored rows are rounded from the master at every step and never go back into it: steps far below
// the distance of two FP8 values add up, and rounding twice is rounding once.
TEST(Parameters, EngramRowsAreRoundedFromTheMaster) {
  const model::ModelConfig config = *model::preset_config("t1");
  ParameterSet<float> parameters(config);
  randomize(parameters, 3);
  const QuantSwitches switches{.engram = true};
  Parameter<float>& table = parameters.named("layers.1.engram.embed.weight");
  const std::vector<float> before = table.value;
  parameters.apply(switches, nullptr);
  const std::vector<float> stored = table.stored;
  EXPECT_NE(stored, table.value);
  parameters.apply(switches, nullptr);
  EXPECT_EQ(table.stored, stored);
  for (int step = 0; step < 1000; ++step) {
    for (float& v : table.value) {
      v += 0x1p-12f;
    }
    if (step % 250 == 0) {
      parameters.apply(switches, nullptr);
    }
  }
  parameters.apply(switches, nullptr);
  double moved = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    // A thousand roundings of 2^-24 of values below 8.
    EXPECT_NEAR(table.value[i], before[i] + 1000 * 0x1p-12f, 1e-3);
    moved += static_cast<double>(table.stored[i] - stored[i]) / static_cast<double>(before.size());
  }
  EXPECT_NEAR(moved, 1000 * 0x1p-12, 5e-3);
}

TEST(Optimizer, RatesOfItsOwnAndWhatTrains) {
  const auto step_size =
      [](const OptimizerOptions& options, const char* name, Stage stage = Stage::kBackbone) {
        ParameterSet<float> parameters(odd_config());
        randomize(parameters, 3);
        Parameter<float>& parameter = parameters.named(name);
        const std::vector<float> before = parameter.value;
        std::fill(parameter.grad.begin(), parameter.grad.end(), 1.0f);
        Optimizer optimizer(parameters, options, stage);
        optimizer.step(1, 0.01, 1.0, nullptr);
        double size = 0;
        for (size_t i = 0; i < before.size(); ++i) {
          size += static_cast<double>(std::fabs(parameter.value[i] - before[i]));
        }
        return size;
      };
  const char *matrix = "layers.1.attn.indexer.wk.weight", *table = "layers.1.engram.embed.weight";
  OptimizerOptions plain;
  plain.muon.weight_decay = 0;
  OptimizerOptions twice = plain;
  twice.matrix_rate = twice.table_rate = 2;
  for (const char* name : {matrix, table}) {
    EXPECT_NEAR(step_size(twice, name), 2 * step_size(plain, name), 1e-3 * step_size(twice, name));
  }
  EXPECT_EQ(step_size(twice, "norm.weight"), step_size(plain, "norm.weight"));
  EXPECT_EQ(step_size(plain, matrix, Stage::kIndexer), step_size(plain, matrix));
  EXPECT_EQ(step_size(plain, table, Stage::kIndexer), 0);
  EXPECT_EQ(step_size(plain, "norm.weight", Stage::kIndexer), 0);
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
