// Every backward rule against finite differences of the whole model, in double, at odd extents.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "base/format.h"
#include "tests/train/support.h"
#include "train/vector.h"

namespace cachalot::train {
namespace {

// Central differences of step 2e-6: the third derivative, large near the gates' square roots, costs
// 4e-12 of itself, and the roundings of a loss of a few units 1e-15 / 2e-6 = 5e-10, times a
// condition of up to 40.
constexpr double kStep = 2e-6;
constexpr double kAbsolute = 2e-8;
constexpr double kRelative = 1e-6;

class GradientTest : public testing::Test {
 protected:
  explicit GradientTest(const model::ModelConfig& config = odd_config())
      : parameters_(config), first_(random_tokens(17, 19, 1)), second_(random_tokens(12, 19, 2)) {
    randomize(parameters_, 5);
    const std::vector<Sample> samples = {{first_, {}}, {second_, {}}};
    batch_ = make_batch(samples);
  }

  // Compares the gradient of loss(report) along one random direction per weight.
  void check(const ForwardOptions& options,
             const std::function<double(const ForwardReport&)>& loss,
             const std::function<bool(const model::WeightSpec&)>& applies,
             double step = kStep) {
    parameters_.zero_gradients(nullptr);
    const ForwardPass<double> run(parameters_, options, batch_);
    ForwardOptions plain = options;
    plain.gradients = false;
    uint64_t stream = 0;
    int64_t checked = 0;
    for (Parameter<double>& parameter : parameters_.all()) {
      ++stream;
      const bool drafts = parameter.spec.part == model::WeightPart::kDraft;
      if (drafts != (options.blocks != nullptr) || !applies(parameter.spec)) {
        continue;
      }
      const Philox random(9, stream);
      std::vector<double> direction(parameter.value.size());
      double along = 0;
      for (size_t i = 0; i < direction.size(); ++i) {
        direction[i] = random.normal(i);
        along += direction[i] * parameter.grad[i];
      }
      const std::vector<double> value = parameter.value;
      const auto at = [&](double distance) {
        for (size_t i = 0; i < value.size(); ++i) {
          parameter.value[i] = value[i] + distance * direction[i];
        }
        const ForwardPass<double> moved(parameters_, plain, batch_);
        return loss(moved.report());
      };
      const double slope = (at(step) - at(-step)) / (2 * step);
      parameter.value = value;
      EXPECT_NEAR(along, slope, kAbsolute + kRelative * std::fabs(slope)) << parameter.spec.name;
      if (std::fabs(slope) > 1e-6) {
        ++checked;
      }
    }
    // A test that finds flat directions everywhere proves nothing.
    EXPECT_GT(checked, 3);
  }

  ParameterSet<double> parameters_;
  std::vector<int32_t> first_, second_;
  Batch batch_;
};

bool is_bias(const model::WeightSpec& spec) {
  return spec.role == model::WeightRole::kRouterBias;
}
bool is_indexer(const model::WeightSpec& spec) {
  return spec.name.find("indexer") != std::string::npos;
}

TEST_F(GradientTest, CrossEntropyOfEveryWeight) {
  ForwardOptions options;
  options.balance_coefficient = 0;
  options.indexer.coefficient = 0;
  options.candidates = true;
  options.loss_scale = 0.25;
  check(
      options,
      [&](const ForwardReport& report) { return options.loss_scale * report.loss_sum; },
      [](const model::WeightSpec& spec) { return !is_bias(spec); });
}

TEST_F(GradientTest, BalanceLossThroughTheSharesOnly) {
  ForwardOptions options;
  options.loss_scale = 0;
  options.indexer.coefficient = 0;
  options.balance_coefficient = 0.5;
  const auto layers = static_cast<double>(parameters_.model().layers.size());
  check(
      options,
      [&](const ForwardReport& report) {
        return options.balance_coefficient * layers * report.balance;
      },
      [](const model::WeightSpec& spec) { return !is_bias(spec); });
}

TEST_F(GradientTest, IndexerObjectiveOfTheIndexer) {
  for (const bool selected : {false, true}) {
    ForwardOptions options;
    options.loss_scale = 0;
    options.balance_coefficient = 0;
    options.indexer.coefficient = 0.5;
    options.indexer.queries = 9;
    options.indexer.selected_only = selected;
    const auto sources = static_cast<double>(odd_config().index_source_layer_ids.size());
    check(
        options,
        [&](const ForwardReport& report) {
          return options.indexer.coefficient * sources * report.indexer;
        },
        is_indexer);
  }
}

// A source's compressed rows and index keys get gradients from all layers that read them: layer 3's
// from its own attention and index, those of Reuse layers, and the Reindex layer 5.
TEST_F(GradientTest, SharedRowsCollectFromEveryReader) {
  ForwardOptions options;
  options.balance_coefficient = 0;
  options.indexer.coefficient = 0;
  check(
      options,
      [&](const ForwardReport& report) { return report.loss_sum; },
      [](const model::WeightSpec& spec) {
        return spec.name.find(".compressor.") != std::string::npos;
      });
  options.loss_scale = 0;
  options.indexer.coefficient = 1;
  check(
      options,
      [&](const ForwardReport& report) { return 3 * report.indexer; },
      [](const model::WeightSpec& spec) {
        return spec.name.ends_with("indexer.wk.weight") ||
               spec.name.ends_with("indexer.k_norm.weight");
      });
  // Without the Reindex layer's part it would be another one.
  const auto gradient = [&](int64_t muted) {
    parameters_.zero_gradients(nullptr);
    Parameter<double>& w =
        parameters_.named(fmt::format("layers.{}.attn.indexer.weights_proj.weight", muted));
    const std::vector<double> kept = w.value;
    std::fill(w.value.begin(), w.value.end(), 0.0);
    const ForwardPass<double> run(parameters_, options, batch_);
    w.value = kept;
    return parameters_.named("layers.3.attn.indexer.wk.weight").grad;
  };
  EXPECT_NE(gradient(5), gradient(1));
}

// The output is rotated back by the query's angle, so its gradient is rotated forward before it
// meets the keys; a query's own gradient then is rotated back.
TEST_F(GradientTest, OutputGradientIsRotatedBeforeTheCore) {
  ForwardOptions options;
  options.balance_coefficient = 0;
  options.indexer.coefficient = 0;
  check(
      options,
      [&](const ForwardReport& report) { return report.loss_sum; },
      [](const model::WeightSpec& spec) {
        return spec.name.ends_with("attn.wq_b.weight") || spec.name.ends_with("attn.wkv.weight");
      });
}

// The selection of the forward is what the backward uses, also where it makes a block again: an
// indexer that changes in between changes no gradient of the backbone.
TEST_F(GradientTest, SelectionsAreMadeOnce) {
  ForwardOptions options;
  options.balance_coefficient = 0;
  options.indexer.coefficient = 0;
  const auto gradients = [&](bool disturb) {
    Tape<double> tape;
    Arena scratch;
    TrainExec<double> exec(parameters_, options, batch_, tape, scratch, nullptr);
    model::forward(exec, parameters_.model());
    std::vector<std::vector<double>> kept;
    for (Parameter<double>& parameter : parameters_.all()) {
      kept.push_back(parameter.value);
      if (disturb && is_indexer(parameter.spec)) {
        for (double& v : parameter.value) {
          v = -v;
        }
      }
    }
    tape.backward();
    std::vector<std::vector<double>> result;
    for (size_t i = 0; i < kept.size(); ++i) {
      Parameter<double>& parameter = parameters_.all()[i];
      parameter.value = kept[i];
      if (const double* gradient = exec.gradient(parameter); !is_indexer(parameter.spec)) {
        result.emplace_back(gradient, gradient + (gradient == nullptr ? 0 : kept[i].size()));
      }
    }
    return result;
  };
  const auto wanted = gradients(false);
  EXPECT_EQ(gradients(true), wanted);
  options.recompute = true;
  EXPECT_EQ(gradients(true), wanted);
}

// By default a Reindex layer chooses among all visible entries: a restriction while the indexer
// learns would hide what it has not found yet.
TEST_F(GradientTest, CandidatesAreOffUntilAskedFor) {
  ForwardOptions options;
  EXPECT_FALSE(options.candidates);
  const auto chosen = [&] {
    const ForwardPass<double> run(parameters_, options, batch_);
    return std::pair(run.exec().selected(3), run.exec().selected(5));
  };
  const auto [source, free] = chosen();
  options.candidates = true;
  const auto [same, restricted] = chosen();
  EXPECT_EQ(source, same) << "the source itself is never restricted";
  EXPECT_NE(free, restricted);
}

// Loads of text and of image rows are counted apart, each row once per expert it goes to.
TEST_F(GradientTest, ImageRowsAreNotInTheTextLoad) {
  batch_.is_image[3] = batch_.is_image[4] = 1;
  ForwardOptions options;
  options.gradients = false;
  const ForwardPass<double> run(parameters_, options, batch_);
  for (const auto& [loads, rows] : {std::pair(run.report().load, batch_.rows() - 2),
                                    std::pair(run.report().load_image, int64_t{2})}) {
    for (const std::vector<int64_t>& load : loads) {
      EXPECT_EQ(std::accumulate(load.begin(), load.end(), int64_t{0}), 2 * rows);
    }
  }
}

TEST_F(GradientTest, FreeMixing) {
  // Combs far from the identity let the streams grow or vanish, and the third derivative grow.
  const auto m = static_cast<size_t>(odd_config().hc_mult);
  for (Parameter<double>& parameter : parameters_.all()) {
    if (parameter.spec.role == model::WeightRole::kHcScale) {
      parameter.value[2] *= 0.1;
    } else if (parameter.spec.role == model::WeightRole::kHcBase) {
      for (size_t i = 0; i < m * m; ++i) {
        parameter.value[2 * m + i] = 0.1 * parameter.value[2 * m + i] + (i % (m + 1) == 0 ? 1 : 0);
      }
    }
  }
  ForwardOptions options;
  options.mixing = Mixing::kFree;
  options.balance_coefficient = 0;
  options.indexer.coefficient = 0;
  check(
      options,
      [&](const ForwardReport& report) { return report.loss_sum; },
      [](const model::WeightSpec& spec) { return spec.name.find("hc_") != std::string::npos; },
      // Without bounds on the combs the third derivative is larger.
      kStep / 4);
}

TEST_F(GradientTest, IndexerObjectiveMovesNothingElse) {
  ForwardOptions options;
  options.loss_scale = 0;
  options.balance_coefficient = 0;
  options.indexer.coefficient = 1;
  parameters_.zero_gradients(nullptr);
  const ForwardPass<double> run(parameters_, options, batch_);
  double indexer = 0;
  for (const Parameter<double>& parameter : parameters_.all()) {
    for (double g : parameter.grad) {
      if (is_indexer(parameter.spec)) {
        indexer += std::fabs(g);
      } else {
        ASSERT_EQ(g, 0.0) << parameter.spec.name;
      }
    }
  }
  EXPECT_GT(indexer, 1e-3);
}

TEST_F(GradientTest, CrossEntropyLeavesTheIndexerAlone) {
  ForwardOptions options;
  options.balance_coefficient = 0;
  options.indexer.coefficient = 0;
  parameters_.zero_gradients(nullptr);
  const ForwardPass<double> run(parameters_, options, batch_);
  for (const Parameter<double>& parameter : parameters_.all()) {
    if (is_indexer(parameter.spec)) {
      for (double g : parameter.grad) {
        ASSERT_EQ(g, 0.0) << parameter.spec.name;
      }
    }
  }
}

// Straight-through: with rounded caches the gradient is that of the unrounded function at the
// rounded values, so it stays finite and close to the gradient without rounding.
TEST_F(GradientTest, RoundedCachesPassTheGradient) {
  ForwardOptions options;
  options.balance_coefficient = 0;
  const auto gradient = [&] {
    parameters_.zero_gradients(nullptr);
    const ForwardPass<double> run(parameters_, options, batch_);
    return parameters_.named("layers.3.attn.compressor.wkv.weight").grad;
  };
  const std::vector<double> exact = gradient();
  options.quant = {.window = true, .main = true, .index = true};
  const std::vector<double> rounded = gradient();
  const auto n = static_cast<int64_t>(exact.size());
  const double cosine =
      dot(exact.data(), rounded.data(), n) /
      std::sqrt(dot(exact.data(), exact.data(), n) * dot(rounded.data(), rounded.data(), n));
  EXPECT_NE(exact, rounded);
  EXPECT_GT(cosine, 0.5);
}

class DraftGradientTest : public GradientTest {
 protected:
  DraftGradientTest() : GradientTest(drafted_config()) {}
};

TEST_F(DraftGradientTest, LossOfEveryDraftWeight) {
  ForwardOptions options;
  options.draft = {.anchors = 5, .confidence = 0};
  const DraftBlocks blocks = make_draft_blocks(drafted_config(), options.draft, batch_, 3);
  options.blocks = &blocks;
  options.loss_scale = 1 / blocks.weight_sum;
  check(
      options,
      [&](const ForwardReport& report) { return options.loss_scale * report.loss_sum; },
      [](const model::WeightSpec& spec) {
        return !is_bias(spec) && spec.role != model::WeightRole::kConfidence;
      });
}

// The acceptance that the confidence learns is a constant: the slope is that of the loss with the
// acceptances of the unmoved weights.
TEST_F(DraftGradientTest, ConfidenceTakesTheAcceptanceAsGiven) {
  ForwardOptions options;
  options.draft = {.anchors = 5, .cross_entropy = 0, .distance = 0};
  const DraftBlocks blocks = make_draft_blocks(drafted_config(), options.draft, batch_, 3);
  options.blocks = &blocks;
  const ForwardPass<double> run(parameters_, options, batch_);
  std::vector<double> given;
  for (const DraftRow& row : run.report().draft) {
    given.push_back(row.acceptance);
  }
  check(
      options,
      [&](const ForwardReport& report) {
        double loss = 0;
        for (size_t i = 0; i < given.size(); ++i) {
          const double z = report.draft[i].confidence;
          loss += blocks.weight[static_cast<size_t>(report.draft[i].row)] *
                  (std::log1p(std::exp(z)) - given[i] * z);
        }
        return loss;
      },
      [](const model::WeightSpec& spec) {
        return !is_bias(spec) && spec.name.find("markov_head.head") == std::string::npos &&
               spec.name != "mtp.1.norm.weight";
      });
}

TEST_F(DraftGradientTest, MovesNothingOfTheBackbone) {
  ForwardOptions options;
  const DraftBlocks blocks = make_draft_blocks(drafted_config(), options.draft, batch_, 3);
  options.blocks = &blocks;
  Tape<double> tape;
  Arena scratch;
  TrainExec<double> exec(parameters_, options, batch_, tape, scratch, nullptr);
  train_drafter(exec, parameters_.model());
  tape.backward();
  for (const Parameter<double>& parameter : parameters_.all()) {
    if (parameter.spec.part != model::WeightPart::kDraft) {
      EXPECT_EQ(exec.gradient(parameter), nullptr) << parameter.spec.name;
    }
  }
}

TEST(TrainExec, FloatAgreesWithDouble) {
  ParameterSet<double> exact(odd_config());
  ParameterSet<float> single(odd_config());
  randomize(exact, 5);
  for (size_t i = 0; i < exact.all().size(); ++i) {
    std::vector<double>& value = exact.all()[i].value;
    single.all()[i].value.assign(value.begin(), value.end());
    value.assign(single.all()[i].value.begin(), single.all()[i].value.end());
  }
  const std::vector<int32_t> tokens = random_tokens(23, 19, 3);
  const std::vector<Sample> samples = {{tokens, {}}};
  const Batch batch = make_batch(samples);
  ForwardOptions options;
  options.loss_scale = 1.0 / static_cast<double>(batch.targets);
  const ForwardPass<double> a(exact, options, batch);
  const ForwardPass<float> b(single, options, batch);
  // Seven layers of sums of up to 40 values: a few hundred roundings of 2^-24, 3e-5 if all had one
  // sign. A gradient goes through them twice, and its small sums are differences of larger terms.
  EXPECT_NEAR(a.report().loss_sum, b.report().loss_sum, 1e-4 * a.report().loss_sum);
  EXPECT_NEAR(a.report().indexer, b.report().indexer, 1e-4);
  for (size_t i = 0; i < exact.all().size(); ++i) {
    const Parameter<double>& want = exact.all()[i];
    const Parameter<float>& got = single.all()[i];
    double difference = 0, size = 1e-12;
    for (size_t j = 0; j < want.grad.size(); ++j) {
      difference += std::pow(want.grad[j] - static_cast<double>(got.grad[j]), 2);
      size += want.grad[j] * want.grad[j];
    }
    EXPECT_LT(std::sqrt(difference / size), 1e-3) << want.spec.name;
  }
}

// Blocks that are made again give the same bits, for less memory.
TEST(TrainExec, RecomputationChangesNoBit) {
  ParameterSet<float> parameters(odd_config());
  randomize(parameters, 5);
  const std::vector<int32_t> a = random_tokens(29, 19, 1), b = random_tokens(12, 19, 2);
  const std::vector<Sample> samples = {{a, {}}, {b, {}}};
  const Batch batch = make_batch(samples);
  ForwardOptions options;
  options.quant = {.window = true, .main = true, .index = true};
  options.candidates = true;
  options.indexer.queries = 9;
  struct Run {
    std::vector<std::vector<float>> gradients;
    ForwardReport report;
    int64_t bytes;
  };
  const auto run = [&](bool recompute) {
    options.recompute = recompute;
    Run result;
    Tape<float> tape;
    Arena scratch;
    TrainExec<float> exec(parameters, options, batch, tape, scratch, nullptr);
    model::forward(exec, parameters.model());
    tape.backward();
    for (const Parameter<float>& parameter : parameters.all()) {
      const float* gradient = exec.gradient(parameter);
      result.gradients.emplace_back();
      if (gradient != nullptr) {
        result.gradients.back().assign(gradient, gradient + parameter.value.size());
      }
    }
    result.report = exec.report();
    result.bytes = tape.most_bytes();
    return result;
  };
  const Run plain = run(false), again = run(true);
  for (size_t i = 0; i < plain.gradients.size(); ++i) {
    EXPECT_EQ(again.gradients[i], plain.gradients[i]) << parameters.all()[i].spec.name;
  }
  EXPECT_EQ(again.report.loss_sum, plain.report.loss_sum);
  EXPECT_EQ(again.report.indexer, plain.report.indexer);
  EXPECT_EQ(again.report.balance, plain.report.balance);
  EXPECT_EQ(again.report.load, plain.report.load);
  // Gradients of the weights take their part of both.
  EXPECT_LT(again.bytes, 0.8 * static_cast<double>(plain.bytes));
}

TEST(TrainExec, PackedSamplesDoNotSeeEachOtherAndThreadsChangeNothing) {
  ParameterSet<float> parameters(odd_config());
  randomize(parameters, 5);
  const std::vector<int32_t> a = random_tokens(17, 19, 1), b = random_tokens(12, 19, 2);
  ForwardOptions options;
  options.keep_logits = true;
  options.quant = {.window = true, .main = true, .index = true};
  options.candidates = true;
  const std::vector<Sample> both = {{a, {}}, {b, {}}};
  const Batch packed = make_batch(both);
  ThreadPool pool(3);
  parameters.zero_gradients(nullptr);
  const ForwardPass<float> run(parameters, options, packed, &pool);
  std::vector<std::vector<float>> gradients;
  for (const Parameter<float>& parameter : parameters.all()) {
    gradients.push_back(parameter.grad);
  }
  const float* logits = run.exec().logits().value();
  for (const std::vector<int32_t>& tokens : {a, b}) {
    const std::vector<Sample> alone = {{tokens, {}}};
    const Batch batch = make_batch(alone);
    const ForwardPass<float> single(parameters, options, batch);
    const int64_t n = batch.rows() * 19;
    EXPECT_TRUE(std::equal(logits, logits + n, single.exec().logits().value()));
    logits += n;
  }
  parameters.zero_gradients(nullptr);
  const ForwardPass<float> again(parameters, options, packed);
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_EQ(parameters.all()[i].grad, gradients[i]) << parameters.all()[i].spec.name;
  }
}

}  // namespace
}  // namespace cachalot::train
