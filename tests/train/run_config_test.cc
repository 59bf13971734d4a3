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

// What a resumed run may change is what no step so far depended on.
TEST(RunConfig, ResumesWithTheSettingsOfItsSteps) {
  const auto settings = [](const std::vector<std::string>& changes) {
    const auto config = parse_run_config(kFile, "f.toml", changes);
    EXPECT_TRUE(config.ok()) << config.status().message();
    return step_settings_of(*config);
  };
  const Settings before = settings({});
  EXPECT_EQ(before.at("model.set"), "[\"num_hidden_layers=8\"]");
  EXPECT_EQ(before.at("schedule.peak"), "0.001");
  EXPECT_EQ(before.at("schedule.decay_begin"), "102400");  // tokens
  constexpr int64_t kEarly = 102400, kLate = kEarly + 1;
  for (const char* change : {"data.heldout=[\"c\"]",
                             "run.out=\"b\"",
                             "run.threads=3",
                             "run.recompute=true",
                             "run.checkpoint_every=7",
                             "run.keep_checkpoints=7",
                             "run.evaluate_every=7",
                             "run.evaluate_tokens=7",
                             "run.divergence=7"}) {
    EXPECT_TRUE(check_resumed(settings({change}), before, kLate).ok()) << change;
  }
  EXPECT_TRUE(check_resumed(settings({"schedule.steps=200", "schedule.decay_begin=0.25"}),
                            settings({"schedule.decay_end=1.0"}),
                            kEarly)
                  .ok());
  for (const char* change : {"schedule.steps=101",
                             "schedule.steps=99",
                             "schedule.last=1e-4",
                             "schedule.decay=\"cosine\"",
                             "schedule.decay_begin=0.75",
                             "schedule.decay_end=0.75"}) {
    EXPECT_FALSE(check_resumed(settings({change}), before, kLate).ok()) << change;
  }
  // Nor may a decay begin in the past.
  EXPECT_FALSE(check_resumed(settings({"schedule.decay_begin=0.25"}), before, kEarly).ok());
  // Without a decay there is none to change.
  const std::string none = "schedule.decay_begin=1.0";
  EXPECT_TRUE(
      check_resumed(settings({none, "schedule.steps=900"}), settings({none}), int64_t{1} << 40)
          .ok());
  for (const auto& [change, text] : std::vector<std::pair<std::string, std::string>>{
           {"optimizer.clip=2.0", "optimizer.clip is 2; the run so far had 1"},
           {"model.seed=2", "model.seed is 2; the run so far had 1"},
           {"model.mixing=\"free\"", "model.mixing is \"free\"; the run so far had \"manifold\""},
           {"model.set=[]", "model.set is []; the run so far had [\"num_hidden_layers=8\"]"},
           {"optimizer.matrices=\"adamw\"", "optimizer.matrices is \"adamw\""},
           {"optimizer.weight_decay=0.0", "optimizer.weight_decay is 0; the run so far had 0.1"},
           {"optimizer.update_rms=0.2", "optimizer.update_rms is 0.2"},
           {"quant.main=false", "quant.main is false; the run so far had true"},
           {"schedule.warmup_steps=5", "schedule.warmup_steps is 5; the run so far had 0"},
           {"data.micro_tokens=1024", "data.micro_tokens is 1024; the run so far had 512"}}) {
    const Status status = check_resumed(settings({change}), before, kEarly);
    EXPECT_NE(status.message().find(text), std::string::npos) << change << ": " << status.message();
  }
  // Every step setting is compared, the four of the decay once it has begun.
  for (const auto& [key, value] : before) {
    Settings now = before;
    now[key] += key.starts_with("schedule.decay_") ? "0" : "x";
    EXPECT_FALSE(check_resumed(now, before, kLate).ok()) << key;
  }
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
