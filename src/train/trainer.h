// Runs a training run: batches, steps, evaluation, saved states, the log.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "train/corpus.h"
#include "train/evaluation.h"
#include "train/lanes.h"
#include "train/optimizer.h"
#include "train/parameters.h"
#include "train/run_config.h"
#include "train/run_state.h"

namespace cachalot::train {

// What one step did; a line of the log.
struct StepRecord {
  int64_t step = 0;
  int64_t steps = 0;
  int64_t tokens = 0;  // rows seen so far
  double loss = 0;     // nats per target; of a drafter: its weighted loss
  double rate = 0;
  double gradient_norm = 0;
  double balance = 0;    // mean balance loss of the layers; 1 is even
  double violation = 0;  // mean over layers of max load / mean load - 1
  double indexer = 0;    // KL in nats
  // Of the indexer's compared rows: the share of all attention, and of what as many best entries
  // get, that the selected entries get. 0 where nothing was left out.
  double selected_share = 0, selected_recall = 0;
  double gain = 0, gain_back = 0;  // of the hyper-connections, see MixingGain
  int64_t idle_experts = 0;        // without a row in this step, over all layers
  double max_latent = 0;           // largest |value| of a compressed row
  double acceptance = 0;           // of a drafter: mean over all positions
  double seconds = 0;              // of this step
  double tokens_per_second = 0;
};

// Not thread-safe. The same config gives the same bits whatever the threads, and whether the run
// was interrupted or not.
class Trainer {
 public:
  // Starts a run in a folder without states, or, with `resume`, continues from the last state, if
  // the settings are those of the run (check_resumed).
  static Result<std::unique_ptr<Trainer>> create(const RunConfig& config, bool resume);

  struct Listener {
    std::function<void(const StepRecord&)> on_step;
    std::function<void(int64_t step, const Evaluation&)> on_evaluation;
    std::function<void(int64_t step, const DraftEvaluation&)> on_draft_evaluation;
  };
  // Runs to the last step. Errors: a loss or gradient that is not finite, a loss that left the
  // running mean upwards, a file that cannot be written; the message names step, tensor and the
  // last good state.
  Status run(const Listener& listener);

  int64_t step() const { return position_.step; }
  const ParameterSet<float>& parameters() const { return *parameters_; }

 private:
  Trainer(const RunConfig& config, RunModel model);
  Status load_data();
  Status start(bool resume);
  bool drafts() const { return config_.stage == Stage::kDrafter; }
  // Refuses weights that were trained for another mixing than the run's; `key` names them.
  Status check_mixing(const RunPosition& position, const char* key) const;
  Result<StepRecord> train_step();
  Result<std::vector<Batch>> next_batches();
  Status diverged(const std::string& what) const;
  Status log(const std::string& line);
  Status evaluate_heldout(const Listener& listener, bool last);
  Status save();

  RunConfig config_;
  RunModel model_;
  ThreadPool pool_;
  std::unique_ptr<ParameterSet<float>> parameters_;
  std::unique_ptr<Lanes> lanes_;
  std::unique_ptr<Optimizer> optimizer_;
  Corpus corpus_, heldout_;
  RunPosition position_;
  int64_t saved_step_ = 0;
  std::vector<std::vector<Piece>> plan_;  // of the epoch in planned_epoch_
  int64_t planned_epoch_ = -1;
};

}  // namespace cachalot::train
