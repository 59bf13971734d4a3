#include "train/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <utility>

#include "base/file.h"
#include "base/rng.h"
#include "engine/generator.h"
#include "engine/runtime.h"
#include "model/forward.h"
#include "tests/support/temp_directory.h"

namespace cachalot::train {
namespace {

// How far log-probabilities of t1 lie apart whose FP32 sums had different orders. Behind a branch
// stand sums of up to 256 products in at least four lanes: 64 roundings of 2^-24 / 3^1/2 (RMS) of
// their size. Two branches in each of `layers` layers and the head add in quadrature; a
// log-probability is the difference of two such numbers, no larger than the largest logit; four
// deviations hold for the worst of some dozens.
double log_probability_tolerance(int64_t layers, std::span<const float> logits) {
  double largest = 0;
  for (const float logit : logits) {
    largest = std::max(largest, std::fabs(static_cast<double>(logit)));
  }
  const auto sums = static_cast<double>(2 * layers + 1);
  return 4 * std::sqrt(2 * sums * 64 / 3) * 0x1p-24 * largest;
}

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
  const std::string torn = state_path(part.out, 6) + ".12-0.tmp";
  ASSERT_TRUE(write_file(torn, "torn").ok());
  part.steps = whole.steps;
  part.threads = 2;
  ASSERT_TRUE(train(part, true).ok());
  EXPECT_EQ(curve(part.out), lines);
  EXPECT_EQ(*read_file(state_path(part.out, 8)), *read_file(state_path(whole.out, 8)));
  EXPECT_EQ(saved_steps(part.out), (std::vector<int64_t>{4, 8}));
  EXPECT_FALSE(file_exists(torn));
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

// Only the settings and the data that a run began with give the bits of a run that was never
// interrupted.
TEST_F(TrainerTest, ResumesWithItsOwnSettingsAndData) {
  RunConfig run = config("run");
  run.steps = 2;
  ASSERT_TRUE(train(run, false).ok());
  run.steps = 3;
  const auto refused = [&](const RunConfig& changed, const std::string& text) {
    const Status status = train(changed, true);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_NE(status.message().find(state_path(run.out, 2) + ": " + text), std::string::npos)
        << status.message();
  };
  RunConfig changed = run;
  changed.clip = 0.5;
  refused(changed, "optimizer.clip is 0.5; the run so far had 1");
  changed = run;
  changed.set = {"index_topk=3"};
  refused(changed, "model.set is [\"index_topk=3\"]; the run so far had []");
  // The data may move, but must be the same.
  changed = run;
  ASSERT_TRUE(
      write_file(directory_.file("moved.jsonl"), *read_file(directory_.file("data.jsonl"))).ok());
  changed.train[0].path = directory_.file("moved.jsonl");
  changed.checkpoint_every = 1;
  ASSERT_TRUE(train(changed, true).ok());
  run.steps = 4;
  ASSERT_TRUE(write_file(directory_.file("data.jsonl"), "{\"tokens\": [4, 5]}\n").ok());
  const Status status = train(run, true);
  EXPECT_NE(status.message().find("data.train is \"1 documents, 2 tokens, digest "),
            std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("the run so far had \"60 documents, "), std::string::npos)
      << status.message();
}

// A mixing that the architecture does not have trains and is evaluated, and nothing mistakes its
// weights for the architecture's.
TEST_F(TrainerTest, KeepsOtherMixingsApart) {
  RunConfig plain = config("plain");
  plain.forward.mixing = Mixing::kPlain;
  EXPECT_NE(train(plain, false).message().find("hc_mult"), std::string::npos);
  plain.set = {"hc_mult=1"};
  plain.steps = 4;
  ASSERT_TRUE(train(plain, false).ok());
  const auto record = nlohmann::json::parse(curve(plain.out)[3]);
  EXPECT_EQ(record["gain"], 1);
  EXPECT_EQ(record["gain_back"], 1);
  ThreadPool pool(1);
  EXPECT_NE(export_run(plain.out, 4, directory_.file("x"), pool).message().find("model.mixing"),
            std::string::npos);
  plain.steps = 5;
  plain.forward.mixing = Mixing::kManifold;
  EXPECT_NE(train(plain, true).message().find("model.mixing"), std::string::npos);
  RunConfig next = config("next");
  next.preset = "";
  next.from = plain.out;
  EXPECT_NE(train(next, false).message().find("model.from"), std::string::npos);
}

// The indexer's stage, from the weights of another run and with a changed config.
TEST_F(TrainerTest, FrozenBackboneKeepsStill) {
  RunConfig first = config("first");
  first.steps = 2;
  ASSERT_TRUE(train(first, false).ok());
  RunConfig run = config("frozen");
  run.preset = "";
  run.from = first.out;
  run.set = {"index_topk=3"};
  run.stage = Stage::kIndexer;
  run.steps = 3;
  ASSERT_TRUE(train(run, false).ok());
  auto model = open_run_model(run.out);
  EXPECT_EQ(model->config.index_topk, 3);
  auto before = ParameterSet<float>::create(model->config, model->token_class);
  auto after = ParameterSet<float>::create(model->config, model->token_class);
  ASSERT_TRUE(load_state(state_path(first.out, 2), **before, nullptr).ok());
  ASSERT_TRUE(load_state(state_path(run.out, 3), **after, nullptr).ok());
  for (size_t i = 0; i < (*before)->all().size(); ++i) {
    const Parameter<float>& parameter = (*before)->all()[i];
    EXPECT_EQ(parameter.value != (*after)->all()[i].value,
              parameter.spec.name.find(".indexer.") != std::string::npos)
        << parameter.spec.name;
  }
}

// The bias moves once per step, by the sign of the whole step's load: the speed or nothing, however
// many batches there were.
TEST_F(TrainerTest, BiasMovesOncePerStep) {
  RunConfig run = config("bias");
  ASSERT_GT(run.batch_tokens, run.micro_tokens);
  run.steps = 1;
  run.bias_speed = 0.25;
  ASSERT_TRUE(train(run, false).ok());
  auto model = open_run_model(run.out);
  auto parameters = ParameterSet<float>::create(model->config, model->token_class);
  ASSERT_TRUE(load_state(state_path(run.out, 1), **parameters, nullptr).ok());
  int moved = 0;
  for (const Parameter<float>& parameter : (*parameters)->all()) {
    if (parameter.spec.name.ends_with("gate.bias")) {
      for (float b : parameter.value) {
        EXPECT_TRUE(b == 0 || b == 0.25f || b == -0.25f) << b;
        moved += b != 0 ? 1 : 0;
      }
    } else if (parameter.spec.name.ends_with("gate.bias_vl")) {
      EXPECT_EQ(parameter.value, std::vector<float>(parameter.value.size(), 0.0f));
    }
  }
  EXPECT_GT(moved, 10);
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

TEST_F(TrainerTest, NamesTheWeightThatIsNotFinite) {
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
  EXPECT_NE(status.message().find("step 5: the loss is not finite, nor is the weight "
                                  "layers.4.attn.wo_b.weight"),
            std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("state-00000004"), std::string::npos) << status.message();
}

// Official codes have no NaN, so it would become a number; a position is an index.
TEST_F(TrainerTest, StatesThatCannotBeAreRefused) {
  RunConfig run = config("damaged");
  run.steps = 1;
  ASSERT_TRUE(train(run, false).ok());
  auto model = open_run_model(run.out);
  auto parameters = ParameterSet<float>::create(model->config, model->token_class);
  Optimizer optimizer(**parameters, run.optimizer);
  const std::string path = state_path(run.out, 1);
  const auto position = load_state(path, **parameters, &optimizer.states());
  ASSERT_TRUE(position.ok()) << position.status().message();
  RunPosition before = *position;
  before.batch = -5;
  ASSERT_TRUE(save_state(path, **parameters, optimizer.states(), before).ok());
  EXPECT_NE(train(run, true).message().find("'batch' is -5"), std::string::npos);
  before = *position;
  before.epoch = std::numeric_limits<int64_t>::max();
  ASSERT_TRUE(save_state(path, **parameters, optimizer.states(), before).ok());
  EXPECT_NE(train(run, true).message().find("'epoch' is 9223372036854775807"), std::string::npos);
  Parameter<float>& parameter = (*parameters)->named("layers.0.ffn.experts.1.w1.weight");
  ThreadPool pool(1);
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    parameter.value[7] = value;
    ASSERT_TRUE(save_state(path, **parameters, optimizer.states(), *position).ok());
    const Status status = export_run(run.out, 1, directory_.file("bad"), pool);
    EXPECT_NE(status.message().find("'value/layers.0.ffn.experts.1.w1.weight' has"),
              std::string::npos)
        << status.message();
  }
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
  options.keep_logits = true;
  (*parameters)->apply(options.quant, nullptr);
  const std::vector<Sample> samples = {{tokens, {}}};
  const Batch batch = make_batch(samples);
  Tape<float> tape;
  Arena scratch;
  TrainExec<float> exec(**parameters, options, batch, tape, scratch, nullptr);
  model::forward(exec, (*parameters)->model());
  // No code of this prompt lies at a boundary.
  const double tolerance = log_probability_tolerance(
      model->config.num_hidden_layers,
      {exec.logits().value(), static_cast<size_t>(exec.logits().node->size())});
  for (size_t i = 1; i < tokens.size(); ++i) {
    EXPECT_NEAR(*score->logprobs[i], -exec.losses().value()[i - 1], tolerance) << i;
  }
}

// The drafter's stage: it learns, resumes to the bit, leaves the backbone as it was, and goes with
// its calibration into the checkpoint.
TEST_F(TrainerTest, TrainsTheDrafterBehindAFrozenBackbone) {
  const RunConfig backbone = config("backbone");
  ASSERT_TRUE(train(backbone, false).ok());
  RunConfig whole = config("drafter");
  whole.preset.clear();
  whole.from = backbone.out;
  whole.stage = Stage::kDrafter;
  whole.steps = 24;
  whole.evaluate_every = 8;
  whole.checkpoint_every = 8;
  whole.keep_checkpoints = 9;
  ASSERT_TRUE(train(whole, false).ok());
  const std::vector<std::string> lines = curve(whole.out);
  std::vector<double> lengths;
  for (const std::string& line : lines) {
    const nlohmann::json record = nlohmann::json::parse(line);
    if (record.contains("acceptance_length")) {
      lengths.push_back(record["acceptance_length"]);
    }
  }
  ASSERT_EQ(lengths.size(), 3u);
  EXPECT_GT(lengths[2], lengths[0]);

  RunConfig part = whole;
  part.out = directory_.file("resumed");
  part.steps = 8;
  ASSERT_TRUE(train(part, false).ok());
  part.steps = whole.steps;
  part.threads = 2;
  ASSERT_TRUE(train(part, true).ok());
  EXPECT_EQ(*read_file(state_path(part.out, 24)), *read_file(state_path(whole.out, 24)));
  EXPECT_EQ(curve(part.out).back(), lines.back());

  const auto model = open_run_model(whole.out);
  const auto values = [&](const std::string& folder, int64_t step) {
    auto parameters = ParameterSet<float>::create(model->config, model->token_class);
    EXPECT_TRUE(load_state(state_path(folder, step), **parameters, nullptr).ok());
    return std::move(*parameters);
  };
  const auto before = values(backbone.out, 8), after = values(whole.out, 24);
  int64_t moved = 0;
  for (size_t i = 0; i < before->all().size(); ++i) {
    if (before->all()[i].spec.part != model::WeightPart::kDraft) {
      EXPECT_EQ(before->all()[i].value, after->all()[i].value) << before->all()[i].spec.name;
    } else {
      moved += before->all()[i].value != after->all()[i].value ? 1 : 0;
    }
  }
  EXPECT_GT(moved, 10);

  ThreadPool pool(1);
  const std::string out = directory_.file("drafted");
  ASSERT_TRUE(export_run(whole.out, 24, out, pool).ok());
  const auto calibration =
      nlohmann::json::parse(*read_file(out + "/" + model::kDraftCalibrationFile));
  EXPECT_EQ(calibration["temperatures"].size(), 3u);
  EXPECT_LE(calibration["ece_after"], calibration["ece_before"]);
  // That of another state stays behind, and what an interrupted export left does not.
  const std::string older = directory_.file("older"), torn = older + "/config.json.12-0.tmp";
  ASSERT_TRUE(make_directories(older).ok() && write_file(torn, "torn").ok());
  ASSERT_TRUE(export_run(whole.out, 16, older, pool).ok());
  EXPECT_FALSE(file_exists(torn));
  // Nor does one stay that another state has left.
  ASSERT_TRUE(export_run(whole.out, 16, out, pool).ok());
  EXPECT_FALSE(file_exists(out + "/" + model::kDraftCalibrationFile));
  EXPECT_FALSE(file_exists(older + "/" + model::kDraftCalibrationFile));
}

// A checkpoint is a start as well. Rounded values are rounded to themselves, though a scale may be
// another.
TEST_F(TrainerTest, StartsFromACheckpoint) {
  RunConfig run = config("first");
  run.steps = 4;
  ASSERT_TRUE(train(run, false).ok());
  ThreadPool pool(1);
  const std::string first = directory_.file("first-model"),
                    second = directory_.file("second-model");
  ASSERT_TRUE(export_run(run.out, 4, first, pool).ok());
  RunConfig next = config("second");
  next.preset.clear();
  next.from = first;
  next.stage = Stage::kDrafter;
  next.steps = 2;
  ASSERT_TRUE(train(next, false).ok());
  ASSERT_TRUE(export_run(next.out, 2, second, pool).ok());
  const auto model = open_run_model(next.out);
  const auto values = [&](const std::string& directory) {
    auto parameters = ParameterSet<float>::create(model->config, model->token_class);
    EXPECT_TRUE(load_checkpoint(directory, **parameters).ok());
    return std::move(*parameters);
  };
  const auto before = values(first), after = values(second);
  for (size_t i = 0; i < before->all().size(); ++i) {
    if (before->all()[i].spec.part != model::WeightPart::kDraft) {
      EXPECT_EQ(before->all()[i].value, after->all()[i].value) << before->all()[i].spec.name;
    }
  }
  next.from = directory_.file("nowhere");
  next.out = directory_.file("third");
  EXPECT_FALSE(train(next, false).ok());
}

// The drafts of the engine over the exported checkpoint are those that the stage trains.
TEST_F(TrainerTest, TheEngineDraftsAsTheStageTrains) {
  const RunConfig run = config("drafts");
  ASSERT_TRUE(train(run, false).ok());
  ThreadPool pool(1);
  const std::string out = directory_.file("checkpoint");
  ASSERT_TRUE(export_run(run.out, 8, out, pool).ok());
  auto runtime = engine::Runtime::open(out,
                                       {.backend = ops::Backend::kRef,
                                        .threads = 1,
                                        .precision = model::Precision::kF32,
                                        .draft = true});
  ASSERT_TRUE(runtime.ok()) << runtime.status().message();
  std::vector<int32_t> tokens = *(*runtime)->tokenizer().encode("whales dive deep and eat krill");
  tokens.insert(tokens.begin(), 0);

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
  options.draft.anchors = batch.rows();
  const DraftBlocks blocks = make_draft_blocks(model->config, options.draft, batch, 1);
  options.blocks = &blocks;
  Tape<float> tape;
  Arena scratch;
  TrainExec<float> exec(**parameters, options, batch, tape, scratch, nullptr);
  train_drafter(exec, (*parameters)->model());

  const auto runner = (*runtime)->make_runner();
  ASSERT_TRUE(runner.ok());
  const int64_t vocab = model->config.vocab_size, block = model->config.dspark_block_size;
  std::map<std::pair<int32_t, int64_t>, DraftRow> trained;  // by anchor and row of its block
  for (const DraftRow& row : exec.report().draft) {
    const int64_t k = row.row % block;
    trained[{blocks.teacher[static_cast<size_t>(row.row - k)], k}] = row;
  }
  int64_t compared = 0;
  const int64_t layers = model->config.num_hidden_layers + model->config.num_nextn_predict_layers;
  for (const int32_t anchor : {1, 5, static_cast<int32_t>(batch.rows() - 4)}) {
    auto cache = (*runtime)->make_cache();
    ASSERT_TRUE(cache.ok() && (*cache)->reserve(anchor + 8).ok());
    model::StepSequence sequence{.view = &(*cache)->view(),
                                 .tokens = {tokens.data(), static_cast<size_t>(anchor)}};
    ASSERT_TRUE((*runner)->run({&sequence, 1}).ok());
    ASSERT_TRUE((*runner)->commit({&anchor, 1}).ok());
    sequence.tokens = {tokens.data() + anchor, 1};
    ASSERT_TRUE((*runner)->draft({&sequence, 1}).ok());
    for (int64_t k = 0; k < block; ++k) {
      const auto next = (*runner)->next_draft({tokens.data() + anchor + k, 1});
      ASSERT_TRUE(next.ok());
      const float* logits = next->logits.as<float>();
      double sum = 0;
      for (int64_t v = 0; v < vocab; ++v) {
        sum += std::exp(static_cast<double>(logits[v]));
      }
      const double loss =
          std::log(sum) - static_cast<double>(logits[tokens[static_cast<size_t>(anchor + k + 1)]]);
      const DraftRow& row = trained.at({anchor, k});
      const double tolerance =
          log_probability_tolerance(layers, {logits, static_cast<size_t>(vocab)});
      EXPECT_NEAR(row.cross_entropy, loss, tolerance) << anchor << " " << k;
      // A logit as well.
      EXPECT_NEAR(row.confidence, next->confidence.as<float>()[0], tolerance) << anchor << " " << k;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 3 * block);
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
