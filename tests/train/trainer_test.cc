#include "train/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/file.h"
#include "base/rng.h"
#include "engine/generator.h"
#include "engine/runtime.h"
#include "model/forward.h"
#include "tests/support/temp_directory.h"

namespace cachalot::train {
namespace {

class TrainerTest : public testing::Test {
 protected:
  TrainerTest() {
    std::string lines;
    const std::vector<std::string> words = {
        "krill", "swim", "deep", "whales", "dive", "and", "eat"};
    const Philox random(5);
    for (uint64_t i = 0; i < 60; ++i) {
      std::string text;
      for (uint64_t j = 0; j < 30; ++j) {
        text += words[static_cast<size_t>(random.uniform(i * 64 + j) * 7)] + " ";
      }
      lines += "{\"text\": \"" + text + "\"}\n";
    }
    EXPECT_TRUE(write_file(directory_.file("data.jsonl"), lines).ok());
  }

  RunConfig config(const std::string& out) const {
    const std::string file = "[model]\npreset = \"t1\"\n[data]\ntrain = [\"" +
                             directory_.file("data.jsonl") + "\"]\nheldout = [\"" +
                             directory_.file("data.jsonl") + "\"]\n" + R"(
sequence = 48
batch_tokens = 192
micro_tokens = 96
[schedule]
steps = 8
peak = 5e-3
last = 5e-4
warmup_steps = 2
decay_begin = 0.5
[objective]
indexer_queries = 8
[run]
threads = 1
checkpoint_every = 4
evaluate_tokens = 400
out = ")" + directory_.file(out) +
                             "\"\n";
    const auto parsed = parse_run_config(file, "test.toml", {});
    EXPECT_TRUE(parsed.ok()) << parsed.status().message();
    return *parsed;
  }

  // The log without what depends on the clock.
  static std::vector<std::string> curve(const std::string& folder) {
    std::vector<std::string> lines;
    std::istringstream text(*read_file(folder + "/log.jsonl"));
    for (std::string line; std::getline(text, line);) {
      nlohmann::json record = nlohmann::json::parse(line);
      record.erase("seconds");
      record.erase("tokens_per_second");
      lines.push_back(record.dump());
    }
    return lines;
  }
  static Status train(const RunConfig& config, bool resume) {
    auto trainer = Trainer::create(config, resume);
    return trainer.ok() ? (*trainer)->run({}) : trainer.status();
  }

  test::TempDirectory directory_;
};

TEST_F(TrainerTest, LearnsAndResumesToTheBit) {
  const RunConfig whole = config("whole");
  ASSERT_TRUE(train(whole, false).ok());
  const std::vector<std::string> lines = curve(whole.out);
  ASSERT_EQ(lines.size(), 9u);
  const double first = nlohmann::json::parse(lines[0])["loss"];
  const double last = nlohmann::json::parse(lines[7])["loss"];
  EXPECT_LT(last, first - 1) << "eight steps over seven words";
  EXPECT_TRUE(file_exists(whole.out + "/plot.svg"));

  // Killed at step 6, in the middle of a line: continues from the state of step 4, on other
  // threads.
  RunConfig part = config("part");
  part.steps = 6;
  ASSERT_TRUE(train(part, false).ok());
  std::filesystem::remove(state_path(part.out, 6));
  ASSERT_TRUE(write_file(part.out + "/log.jsonl",
                         *read_file(part.out + "/log.jsonl") + "{\"step\": 7, \"lo")
                  .ok());
  ASSERT_TRUE(write_file(state_path(part.out, 6) + ".tmp", "torn").ok());
  part.steps = whole.steps;
  part.threads = 2;
  ASSERT_TRUE(train(part, true).ok());
  EXPECT_EQ(curve(part.out), lines);
  EXPECT_EQ(*read_file(state_path(part.out, 8)), *read_file(state_path(whole.out, 8)));
  EXPECT_EQ(saved_steps(part.out), (std::vector<int64_t>{4, 8}));
}

TEST_F(TrainerTest, RefusesToMixRuns) {
  RunConfig run = config("run");
  run.steps = 4;
  EXPECT_NE(train(run, true).message().find("no state"), std::string::npos);
  ASSERT_TRUE(train(run, false).ok());
  EXPECT_NE(train(run, false).message().find("step 4"), std::string::npos);
  // A damaged state is refused by name.
  std::string bytes = *read_file(state_path(run.out, 4));
  ASSERT_TRUE(write_file(state_path(run.out, 4), bytes.substr(0, bytes.size() / 2)).ok());
  EXPECT_NE(train(run, true).message().find("state-00000004"), std::string::npos);
}

TEST_F(TrainerTest, StopsAtALossThatLeavesItsMean) {
  RunConfig run = config("wild");
  run.schedule.peak = run.schedule.last = 1;
  run.clip = 0;
  run.divergence = 1;
  run.steps = 200;
  run.checkpoint_every = 1;
  const Status status = train(run, false);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("step "), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("last good state"), std::string::npos) << status.message();
}

TEST_F(TrainerTest, NamesTheWeightWhoseGradientIsNotFinite) {
  RunConfig run = config("nan");
  run.steps = 4;
  ASSERT_TRUE(train(run, false).ok());
  auto model = open_run_model(run.out);
  auto parameters = ParameterSet<float>::create(model->config, model->token_class);
  Optimizer optimizer(**parameters, run.optimizer);
  auto position = load_state(state_path(run.out, 4), **parameters, &optimizer.states());
  ASSERT_TRUE(position.ok());
  (*parameters)->named("layers.4.attn.wo_b.weight").value[3] = std::nanf("");
  ASSERT_TRUE(save_state(state_path(run.out, 4), **parameters, optimizer.states(), *position).ok());
  run.steps = 6;
  const Status status = train(run, true);
  EXPECT_NE(status.message().find("step 5: the loss is not finite"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("state-00000004"), std::string::npos) << status.message();
}

// What the exported checkpoint computes in precision f32 is what training computes with the same
// rounding of weights and caches.
TEST_F(TrainerTest, ScoreOfTheExportAgreesWithTheTrainingForward) {
  RunConfig run = config("export");
  ASSERT_TRUE(train(run, false).ok());
  ThreadPool pool(1);
  const std::string out = directory_.file("checkpoint");
  ASSERT_TRUE(export_run(run.out, 8, out, pool).ok());
  auto runtime = engine::Runtime::open(
      out, {.backend = ops::Backend::kRef, .threads = 1, .precision = model::Precision::kF32});
  ASSERT_TRUE(runtime.ok()) << runtime.status().message();
  std::vector<int32_t> tokens = *(*runtime)->tokenizer().encode("whales dive deep and eat krill");
  tokens.insert(tokens.begin(), 0);
  engine::Generator generator(**runtime, {});
  const auto score = generator.score(tokens, 0);
  ASSERT_TRUE(score.ok()) << score.status().message();

  auto model = open_run_model(run.out);
  auto parameters = ParameterSet<float>::create(model->config, model->token_class);
  ASSERT_TRUE(load_state(state_path(run.out, 8), **parameters, nullptr).ok());
  ForwardOptions options;
  options.quant = QuantSwitches::exported();
  options.candidates = true;
  options.gradients = false;
  (*parameters)->apply(options.quant, nullptr);
  const std::vector<Sample> samples = {{tokens, {}}};
  const Batch batch = make_batch(samples);
  Tape<float> tape;
  Arena scratch;
  TrainExec<float> exec(**parameters, options, batch, tape, scratch, nullptr);
  model::forward(exec, (*parameters)->model());
  for (size_t i = 1; i < tokens.size(); ++i) {
    // FP32 sums in two orders through ten layers; no code of this prompt lies at a boundary.
    EXPECT_NEAR(*score->logprobs[i], -exec.losses().value()[i - 1], 2e-4) << i;
  }
}

// The indexer learns the attention it is compared with: with a frozen backbone, that is with
// nothing but its own objective, the divergence halves.
TEST_F(TrainerTest, IndexerObjectiveFalls) {
  const RunConfig run = config("indexer");
  ASSERT_TRUE(Trainer::create(run, false).ok());
  auto model = open_run_model(run.out);
  auto parameters = ParameterSet<float>::create(model->config, model->token_class);
  initialize(**parameters, 1);
  Corpus corpus;
  ThreadPool pool(1);
  ASSERT_TRUE(corpus
                  .add(directory_.file("data.jsonl"),
                       model->tokenizer,
                       {.vocab_size = model->config.vocab_size},
                       pool)
                  .ok());
  const auto plan = plan_epoch(corpus, 1, 0, 96, 96);
  OptimizerOptions options;
  options.muon.weight_decay = options.adam_weight_decay = 0;
  Optimizer optimizer(**parameters, options);
  ForwardOptions forward;
  forward.loss_scale = 0;
  forward.balance_coefficient = 0;
  forward.indexer = {.coefficient = 1, .queries = 32};
  Lanes lanes(**parameters, pool);
  double first = 0, last = 0;
  constexpr int kSteps = 120, kMean = 8;
  for (int step = 1; step <= kSteps; ++step) {
    const Batch batch = make_batch(corpus, plan[static_cast<size_t>(step) % plan.size()]);
    (*parameters)->zero_gradients(nullptr);
    forward.seed = static_cast<uint64_t>(step);
    lanes.run(
        {&batch, 1},
        [&](const Batch&) { return forward; },
        [&](TrainExec<float>& exec) { model::forward(exec, (*parameters)->model()); },
        [&](const Batch&, const TrainExec<float>& exec) {
          first += step <= kMean ? exec.report().indexer / kMean : 0;
          last += step > kSteps - kMean ? exec.report().indexer / kMean : 0;
        });
    // Weights without a gradient keep still: no decay, and zero updates of zero gradients.
    optimizer.step(step, 5e-3, 1.0, nullptr);
  }
  EXPECT_LT(last, 0.5 * first) << first;
}

}  // namespace
}  // namespace cachalot::train
