// The folder of a training run: what it trains, and its saved states.
//
//   config.json, tokenizer.json   the model
//   state-00000100.safetensors    everything that step 101 needs; appears whole or not at all
//   draft_calibration.json        of a drafter's last state, where there is held-out text
//   log.jsonl                     one line per step and evaluation
//   plot.svg                      the log as curves
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "text/tokenizer.h"
#include "train/optimizer.h"
#include "train/parameters.h"
#include "train/run_config.h"
#include "train/streams.h"

namespace cachalot::train {

struct RunModel {
  model::ModelConfig config;  // storage kOfficial
  std::string tokenizer_json;
  text::Tokenizer tokenizer;
  std::vector<int32_t> token_class;
};

// The model of a run folder, with "key=value" changes of its config. Errors name the file.
Result<RunModel> open_run_model(const std::string& folder,
                                const std::vector<std::string>& set = {});
// Checks that config and tokenizer fit each other and derives the Engram classes.
Result<RunModel> make_run_model(model::ModelConfig config,
                                std::string tokenizer_json,
                                const std::string& source);

// Where a run stands, beside its tensors.
struct RunPosition {
  int64_t step = 0;    // steps done
  int64_t tokens = 0;  // rows that they saw
  int64_t epoch = 0;   // of the next batch
  int64_t batch = 0;   // its index in the epoch
  double mean_loss = 0;
  Mixing mixing = Mixing::kManifold;  // what the weights were trained for
  Settings settings;                  // of its steps; data.train says what it holds
};

// The step that a record of log.jsonl or of draft_calibration.json names.
std::optional<int64_t> step_of(const nlohmann::json& record);

std::string state_path(const std::string& folder, int64_t step);
// The steps of the saved states, ascending.
std::vector<int64_t> saved_steps(const std::string& folder);

Status save_state(const std::string& path,
                  const ParameterSet<float>& parameters,
                  const std::vector<OptimizerState>& states,
                  const RunPosition& position);
// Fills the parameters and, unless it is null, the optimizer's states. Errors: a file that is
// damaged, of another model or of another optimizer, by file and tensor.
Result<RunPosition> load_state(const std::string& path,
                               ParameterSet<float>& parameters,
                               std::vector<OptimizerState>* states);

// The values of a checkpoint of the same config, as its storage rounded them.
Status load_checkpoint(const std::string& directory, ParameterSet<float>& parameters);

// Writes the model of a state as a checkpoint in the official layout, with the calibration of that
// state's drafter if there is one. Errors: a state with another mixing than the architecture's.
Status export_run(const std::string& folder,
                  int64_t step,
                  const std::string& out,
                  ThreadPool& pool);

}  // namespace cachalot::train
