#include "train/run_config.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "base/file.h"

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
      {"schedule.pace=1", "schedule.pace is not a known key (it is 1)"},
      {"schedule.peak=\"fast\"", "schedule.peak must be a number in [0, 1] (it is 'fast')"},
      {"schedule.peak=2.0", "(it is 2.0)"},
      {"schedule.peak=0.0", "schedule.peak"},
      {"schedule.steps=1.5", "schedule.steps"},
      {"schedule.steps=-1", "(it is -1)"},
      {"schedule.decay=\"slow\"", "must be one of \"cosine\", \"linear\" (it is 'slow')"},
      {"data.train=[1]", "(it is [ 1 ])"},
      {"data.train=[{path = \"a\", repeat = 0}]", "repeat = 0"},
      {"data.train=[]", "data.train"},
      {"data.micro_tokens=500", "batch_tokens"},
      {"model.preset=\"\"", "model.preset is \"\", config is \"\""},
      {"model.from=\"b\"", "model.preset is \"micro\", config is \"\" and from is \"b\""},
      {"run.out=\"\"", "run.out"},
      {"optimizer.clip=-1", "optimizer.clip"},
      {"tests.a=1", "[tests]"},
      {"model.mixing=\"loose\"", "model.mixing"},
      {"optimizer.matrix_rate=-1", "optimizer.matrix_rate"},
      {"optimizer.table_rate=\"1\"", "optimizer.table_rate"},
      {"model={from=\"runs/b\", stage=\"indexer\", preset=\"\"}\nobjective={indexer=0.0}",
       "objective.indexer"},
      {"model.stage=\"indexer\"", "needs 'from'"},
      {"quant.main=1", "(it is 1)"},
      {"quant.main=\"" + std::string(100, 'x') + "\"", std::string(58, 'x') + "..."},
      {"data.heldout=\"x\"", "(it is 'x')"},
      {"run.out=3", "(it is 3)"},
      {"schedule=3", "section.key"},
      {"schedule.decay_end=0.25",
       "schedule.decay_begin is token 102400, behind decay_end, token 51200"},
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

// docs/training.md names every key and no other: in the first column of the table, each with its
// section or with that of the name before it.
TEST(RunConfig, EveryKeyIsDocumented) {
  const Settings settings = settings_of(*parse_run_config(kFile, "f.toml", {}));
  const auto text = read_file(CACHALOT_SOURCE_DIR "/docs/training.md");
  ASSERT_TRUE(text.ok()) << text.status().message();
  std::set<std::string> documented;
  std::istringstream lines(*text);
  bool in_table = false;
  for (std::string line; std::getline(lines, line);) {
    in_table = line.starts_with("| key |") || (in_table && line.starts_with("|"));
    const std::string cell = in_table ? line.substr(1, line.find('|', 1) - 1) : "";
    std::string section;
    for (size_t begin = cell.find('`'); begin != std::string::npos;) {
      const size_t end = cell.find('`', begin + 1);
      ASSERT_NE(end, std::string::npos) << line;
      std::string key = cell.substr(begin + 1, end - begin - 1);
      if (const size_t dot = key.find('.'); dot != std::string::npos) {
        section = key.substr(0, dot + 1);
        key = key.substr(dot + 1);
      }
      EXPECT_TRUE(documented.insert(section + key).second) << section << key;
      begin = cell.find('`', end + 1);
    }
  }
  for (const auto& [key, value] : settings) {
    EXPECT_EQ(documented.erase(key), 1u) << key << " is not in docs/training.md";
  }
  EXPECT_EQ(documented, std::set<std::string>());
  // Those that a resumed run may change are named there too.
  const Settings of_steps = step_settings_of(*parse_run_config(kFile, "f.toml", {}));
  const std::string may_change = text->substr(0, text->find("## The run file"));
  for (const auto& [key, value] : settings) {
    EXPECT_EQ(
        may_change.find("`" + key + "`") != std::string::npos,
        !of_steps.contains(key) || key == "schedule.last" || key.starts_with("schedule.decay"))
        << key;
  }
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
