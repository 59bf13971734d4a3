// What a training run is: the content of its TOML file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "train/optimizer.h"
#include "train/train_exec.h"
#include "train/update.h"

namespace cachalot::train {

struct DataSource {
  std::string path;
  int64_t repeat = 1;  // times that an epoch sees it
};

struct RunConfig {
  // [model]
  std::string preset;                   // a named preset, or
  std::string config;                   // a config.json
  std::vector<std::string> set;         // "key=value" changes of it
  std::string tokenizer;                // tokenizer.json; empty: a byte-level one
  bool classes_from_tokenizer = false;  // Engram classes: of the tokenizer instead of the config's
  std::string from;                     // or a run's folder or a checkpoint: its model and weights
  Stage stage = Stage::kBackbone;
  uint64_t seed = 1;  // of initial values and of the order of the data
  // [data]
  std::vector<DataSource> train;
  std::vector<std::string> heldout;
  int64_t sequence = 512;       // longest sample
  int64_t batch_tokens = 4096;  // tokens per step
  int64_t micro_tokens = 1024;  // tokens per forward
  // [schedule]
  int64_t steps = 0;
  Schedule schedule;  // decay_begin and decay_end are set in tokens
  // [optimizer]
  OptimizerOptions optimizer;
  double clip = 1.0;         // of the gradient norm; 0: none
  double bias_speed = 1e-3;  // of router biases
  // [objective], [drafter], [quant]
  ForwardOptions forward;
  // [run]
  std::string out;  // the run's folder
  int64_t threads = 0;
  int64_t checkpoint_every = 100;  // steps
  int64_t keep_checkpoints = 2;
  int64_t evaluate_every = 0;  // steps; 0: only at the end
  int64_t evaluate_tokens = 100'000;
  double divergence = 3.0;  // nats above the running mean that stop a run
};

// Parses the text of a run file; `source` names it in errors. `assignments` are "section.key=value"
// with a TOML value and win over the file. An unknown key is an error, as is a value of the wrong
// type or out of range; relative paths stay as they are.
Result<RunConfig> parse_run_config(std::string_view toml,
                                   const std::string& source,
                                   const std::vector<std::string>& assignments);

// "section.key" and its value, in the spelling of a run file; the decay's shares in tokens.
using Settings = std::map<std::string, std::string>;
Settings settings_of(RunConfig config);
// Those that a step may depend on.
Settings step_settings_of(const RunConfig& config);

// Refuses step settings under which a run would not have come to where it is, by key and both
// values: all must be as `before`, but those of the decay while it has not begun. `tokens` are
// those of the run so far. Keys that only one side knows are not compared.
Status check_resumed(const Settings& now, const Settings& before, int64_t tokens);

}  // namespace cachalot::train
