// Which weight gets which update, and the step that applies them all.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "train/parameters.h"
#include "train/update.h"

namespace cachalot::train {

enum class Update : uint8_t {
  kMuon,
  kSinkhorn,
  kAdam,
  kBias,  // no gradient: balance_bias()
};

// Rows [begin, begin + rows) of a weight that are updated as one matrix.
struct Block {
  int64_t begin = 0;
  int64_t rows = 0;
};

struct UpdateRule {
  Update update = Update::kAdam;
  bool decays = false;        // weight decay; Muon's is part of its rule
  double rate = 1;            // times the learning rate
  bool is_table = false;      // has the rate of Engram tables
  std::vector<Block> blocks;  // of kMuon and kSinkhorn
};

// The rule of a weight, derived from its entry in the weight table. `config` gives the sizes of the
// hash tables inside an Engram table.
UpdateRule update_rule(const model::ModelConfig& config, const model::WeightSpec& spec);

struct OptimizerOptions {
  MuonConstants muon;
  SinkhornConstants sinkhorn;
  AdamConstants adam;
  double adam_weight_decay = 0.1;
  double engram_rate = 5;          // times the rate, for Engram tables
  double matrix_rate = 1;          // times the rate, for what Muon updates by default
  double table_rate = 1;           // times the rate, for what Sinkhorn updates by default
  bool adam_for_matrices = false;  // AdamW instead of Muon, to compare
  bool adam_for_tables = false;    // AdamW instead of the Sinkhorn update
};

// Optimizer state of one weight, as long as the weight.
struct OptimizerState {
  std::vector<float> first;   // momentum or first moment
  std::vector<float> second;  // second moment; AdamW only
};

// What a run trains.
enum class Stage : uint8_t {
  kBackbone,  // everything but the drafter
  kDrafter,   // the drafter alone, behind the frozen backbone
  kIndexer,   // the indexer alone, in the frozen backbone
};

// Updates the weights of a stage but its router biases. Not thread-safe.
class Optimizer {
 public:
  Optimizer(ParameterSet<float>& parameters,
            const OptimizerOptions& options,
            Stage stage = Stage::kBackbone);

  // One step with the gradients times `gradient_scale`; `step` counts from 1.
  void step(int64_t step, double rate, double gradient_scale, ThreadPool* pool);

  // Per parameter, in their order; empty where nothing is kept.
  std::vector<OptimizerState>& states() { return states_; }
  bool trains(size_t parameter) const { return trains_[parameter]; }

 private:
  struct Task {
    size_t parameter;
    Block block;
  };

  ParameterSet<float>& parameters_;
  OptimizerOptions options_;
  std::vector<UpdateRule> rules_;
  std::vector<OptimizerState> states_;
  std::vector<bool> trains_;
  std::vector<Task> tasks_;  // large ones first
};

// sqrt of the sum of squares of the gradients that the optimizer uses. `worst` names the first
// weight with a gradient that is not finite, or stays empty.
double gradient_norm(const ParameterSet<float>& parameters,
                     const Optimizer& optimizer,
                     ThreadPool* pool,
                     std::string* worst);

}  // namespace cachalot::train
