#include "train/optimizer.h"

#include <algorithm>
#include <cmath>

#include "model/engram_constants.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

using model::WeightRole;

std::vector<Block> equal_blocks(const model::WeightSpec& spec) {
  std::vector<Block> blocks;
  const int64_t rows = spec.shape[0] / spec.blocks;
  for (int64_t b = 0; b < spec.blocks; ++b) {
    blocks.push_back({b * rows, rows});
  }
  return blocks;
}

// Each hash column of an Engram table is a table of its own.
std::vector<Block> hash_tables(const model::ModelConfig& config, const model::WeightSpec& spec) {
  const auto& ids = config.engram_layer_ids;
  const auto at = static_cast<size_t>(std::find(ids.begin(), ids.end(), spec.layer) - ids.begin());
  const model::EngramConstants constants = model::engram_constants(config)[at];
  std::vector<Block> blocks;
  for (size_t c = 0; c < constants.prime.size(); ++c) {
    blocks.push_back({constants.offset[c], constants.prime[c]});
  }
  return blocks;
}

}  // namespace

UpdateRule update_rule(const model::ModelConfig& config, const model::WeightSpec& spec) {
  switch (spec.role) {
    case WeightRole::kEmbedding:
    case WeightRole::kHead:
    case WeightRole::kMarkov:
      return {.update = Update::kSinkhorn, .blocks = equal_blocks(spec)};
    case WeightRole::kEngramTable:
      return {.update = Update::kSinkhorn, .is_table = true, .blocks = hash_tables(config, spec)};
    case WeightRole::kProjection:
    case WeightRole::kRouter:
    case WeightRole::kHcFn:
    case WeightRole::kVision:
      return {.update = Update::kMuon, .blocks = equal_blocks(spec)};
    case WeightRole::kNorm:
    case WeightRole::kEngramGate:
      return {.update = Update::kAdam, .decays = true};
    case WeightRole::kRouterBias:
      return {.update = Update::kBias};
    case WeightRole::kSink:
    case WeightRole::kHcBase:
    case WeightRole::kHcScale:
    case WeightRole::kConfidence:
    case WeightRole::kVisionBias:
    case WeightRole::kImageVector:
      break;
  }
  return {.update = Update::kAdam};
}

Optimizer::Optimizer(ParameterSet<float>& parameters, const OptimizerOptions& options, Stage stage)
    : parameters_(parameters), options_(options) {
  const model::ModelConfig& config = parameters.model().config;
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    const Parameter<float>& parameter = parameters.all()[i];
    UpdateRule rule = update_rule(config, parameter.spec);
    if (rule.update == Update::kMuon) {
      rule.rate = options.matrix_rate;
    } else if (rule.update == Update::kSinkhorn) {
      rule.rate = options.table_rate * (rule.is_table ? options.engram_rate : 1.0);
    }
    if ((rule.update == Update::kMuon && options.adam_for_matrices) ||
        (rule.update == Update::kSinkhorn && options.adam_for_tables)) {
      rule.decays = rule.update == Update::kMuon;
      rule.update = Update::kAdam;
    }
    const bool trains =
        rule.update != Update::kBias &&
        (parameter.spec.part == model::WeightPart::kDraft) == (stage == Stage::kDrafter) &&
        (stage != Stage::kIndexer || parameter.spec.name.find(".indexer.") != std::string::npos);
    OptimizerState& state = states_.emplace_back();
    trains_.push_back(trains);
    if (trains) {
      state.first.assign(parameter.value.size(), 0.0f);
      if (rule.update == Update::kAdam) {
        state.second.assign(parameter.value.size(), 0.0f);
        tasks_.push_back({i, {0, parameter.rows()}});
      } else {
        for (const Block& block : rule.blocks) {
          tasks_.push_back({i, block});
        }
      }
    }
    rules_.push_back(std::move(rule));
  }
  std::stable_sort(tasks_.begin(), tasks_.end(), [&](const Task& a, const Task& b) {
    return a.block.rows * parameters_.all()[a.parameter].columns() >
           b.block.rows * parameters_.all()[b.parameter].columns();
  });
}

void Optimizer::step(int64_t step, double rate, double gradient_scale, ThreadPool* pool) {
  parallel_tasks(pool, static_cast<int64_t>(tasks_.size()), [&](int64_t index) {
    const Task& task = tasks_[static_cast<size_t>(index)];
    Parameter<float>& parameter = parameters_.all()[task.parameter];
    const UpdateRule& rule = rules_[task.parameter];
    OptimizerState& state = states_[task.parameter];
    const int64_t columns = parameter.columns(), begin = task.block.begin * columns;
    const int64_t size = task.block.rows * columns;
    float* gradient = parameter.grad.data() + begin;
    float* weight = parameter.value.data() + begin;
    float* first = state.first.data() + begin;
    const double own_rate = rate * rule.rate;
    if (gradient_scale != 1.0) {
      for (int64_t i = 0; i < size; ++i) {
        gradient[i] *= static_cast<float>(gradient_scale);
      }
    }
    switch (rule.update) {
      case Update::kMuon:
        muon_update(
            nullptr, options_.muon, own_rate, task.block.rows, columns, gradient, first, weight);
        break;
      case Update::kSinkhorn:
        sinkhorn_update(
            options_.sinkhorn, own_rate, task.block.rows, columns, gradient, first, weight);
        break;
      case Update::kAdam:
        adam_update(options_.adam,
                    own_rate,
                    rule.decays ? options_.adam_weight_decay : 0.0,
                    step,
                    size,
                    gradient,
                    first,
                    state.second.data() + begin,
                    weight);
        break;
      case Update::kBias:
        break;
    }
  });
}

double gradient_norm(const ParameterSet<float>& parameters,
                     const Optimizer& optimizer,
                     ThreadPool* pool,
                     std::string* worst) {
  std::vector<double> squares(parameters.all().size(), 0.0);
  parallel_tasks(pool, static_cast<int64_t>(squares.size()), [&](int64_t index) {
    const auto i = static_cast<size_t>(index);
    if (optimizer.trains(i)) {
      const std::vector<float>& grad = parameters.all()[i].grad;
      squares[i] = dot(grad.data(), grad.data(), static_cast<int64_t>(grad.size()));
    }
  });
  double sum = 0;
  for (size_t i = 0; i < squares.size(); ++i) {
    if (!std::isfinite(squares[i]) && worst->empty()) {
      *worst = parameters.all()[i].spec.name;
    }
    sum += squares[i];
  }
  return std::sqrt(sum);
}

}  // namespace cachalot::train
