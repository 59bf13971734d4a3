#include "train/run_config.h"

#include <gtest/gtest.h>

namespace cachalot::train {
namespace {

constexpr std::string_view kFile = R"(
[model]
preset = "micro"
set = ["num_hidden_layers=8"]
[data]
train = ["a.jsonl", {path = "b.txt", repeat = 3}]
batch_tokens = 2048
micro_tokens = 512
[schedule]
steps = 100
peak = 1e-3
decay_begin = 0.5
decay = "linear"
[quant]
main = true
[run]
out = "runs/a"
)";

TEST(RunConfig, ReadsEverySection) {
  const auto config = parse_run_config(kFile, "f.toml", {"schedule.peak=2e-3", "run.threads=2"});
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->preset, "micro");
  EXPECT_EQ(config->train.size(), 2u);
  EXPECT_EQ(config->train[1].repeat, 3);
  EXPECT_EQ(config->schedule.peak, 2e-3);
  EXPECT_EQ(config->schedule.decay_begin, 0.5 * 100 * 2048);
  EXPECT_EQ(config->schedule.decay, Schedule::Decay::kLinear);
  EXPECT_TRUE(config->forward.quant.main);
  EXPECT_FALSE(config->forward.quant.window);
  EXPECT_EQ(config->threads, 2);
}

// Each change must fail with a message that contains the key.
TEST(RunConfig, RefusesWhatItDoesNotKnow) {
  const std::vector<std::pair<std::string, std::string>> faults = {
      {"schedule.pace=1", "schedule.pace"},
      {"schedule.peak=\"fast\"", "schedule.peak"},
      {"schedule.peak=2.0", "schedule.peak"},
      {"schedule.peak=0.0", "schedule.peak"},
      {"schedule.steps=1.5", "schedule.steps"},
      {"schedule.steps=-1", "schedule.steps"},
      {"schedule.decay=\"slow\"", "schedule.decay"},
      {"data.train=[1]", "data.train"},
      {"data.train=[{path = \"a\", repeat = 0}]", "data.train"},
      {"data.train=[]", "data.train"},
      {"data.micro_tokens=500", "batch_tokens"},
      {"model.preset=\"\"", "preset"},
      {"run.out=\"\"", "run.out"},
      {"optimizer.clip=-1", "optimizer.clip"},
      {"tests.a=1", "[tests]"},
      {"model.mixing=\"loose\"", "model.mixing"},
      {"optimizer.matrix_rate=-1", "optimizer.matrix_rate"},
      {"optimizer.table_rate=\"1\"", "optimizer.table_rate"},
      {"model={from=\"runs/b\", stage=\"indexer\", preset=\"\"}\nobjective={indexer=0.0}",
       "objective.indexer"},
      {"model.stage=\"indexer\"", "needs 'from'"},
      {"quant.main=1", "quant.main"},
      {"schedule.decay=slow", "quotes"},
      {"steps=4", "section.key"},
  };
  for (const auto& [assignment, key] : faults) {
    const auto config = parse_run_config(kFile, "f.toml", {assignment});
    ASSERT_FALSE(config.ok()) << assignment;
    EXPECT_NE(config.status().message().find(key), std::string::npos)
        << assignment << ": " << config.status().message();
  }
  const auto broken = parse_run_config("[model\n", "f.toml", {});
  EXPECT_NE(broken.status().message().find("f.toml:1"), std::string::npos)
      << broken.status().message();
}

TEST(RunConfig, TheDraftersStageNeedsABackbone) {
  const std::string rest =
      "[data]\ntrain = [\"a\"]\n[schedule]\nsteps = 1\npeak = 1e-3\n"
      "[drafter]\nanchors = 9\n[run]\nout = \"b\"\n";
  const auto parse = [&](const std::string& model) {
    return parse_run_config("[model]\nstage = \"drafter\"\n" + model + rest, "f.toml", {});
  };
  const auto config = parse("from = \"a\"\n");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->stage, Stage::kDrafter);
  EXPECT_EQ(config->from, "a");
  EXPECT_EQ(config->forward.draft.anchors, 9);
  EXPECT_NE(parse("preset = \"t1\"\n").status().message().find("needs 'from'"), std::string::npos);
  EXPECT_TRUE(parse("from = \"a\"\nset = [\"hc_mult=4\"]\n").ok());
}

}  // namespace
}  // namespace cachalot::train
