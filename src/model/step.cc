#include "model/step.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/format.h"
#include "model/infer_exec.h"

namespace cachalot::model {
namespace {

// Refuses what an op could not: ids outside of the vocabulary, positions beyond the context.
Status check_sequence(const ModelConfig& config, const StepSequence& sequence) {
  const auto n = static_cast<int64_t>(sequence.tokens.size());
  if (n == 0) {
    return invalid("a step sequence has no tokens");
  }
  if (!sequence.image.empty() && sequence.image.size() != sequence.tokens.size()) {
    return invalid("the image mask has {} entries for {} tokens", sequence.image.size(), n);
  }
  if (sequence.view->length + n > config.max_position_embeddings) {
    return error(Code::kOutOfRange,
                 "{} tokens exceed max_position_embeddings {}",
                 sequence.view->length + n,
                 config.max_position_embeddings);
  }
  for (int32_t token : sequence.tokens) {
    if (token < 0 || token >= config.vocab_size) {
      return invalid("token id {} is outside of the vocabulary of {}", token, config.vocab_size);
    }
  }
  return {};
}

StepPlan make_plan(const Model& model, std::span<const StepSequence> sequences) {
  const ModelConfig& c = model.config;
  StepPlan plan;
  for (const LayerSpec& layer : model.layers) {
    if (layer.ratio > 0) {
      plan.groups[layer.ratio];
    }
  }
  for (size_t s = 0; s < sequences.size(); ++s) {
    const StepSequence& sequence = sequences[s];
    const int64_t start = sequence.view->length;
    plan.row_begin.push_back(static_cast<int32_t>(plan.rows));
    plan.start.push_back(static_cast<int32_t>(start));
    if (!model.engram.empty()) {
      plan.classes.insert(
          plan.classes.end(), sequence.view->lookback.begin(), sequence.view->lookback.end());
    }
    const auto n = static_cast<int64_t>(sequence.tokens.size());
    for (int64_t i = 0; i < n; ++i) {
      const int32_t token = sequence.tokens[static_cast<size_t>(i)];
      const bool image = !sequence.image.empty() && sequence.image[static_cast<size_t>(i)] != 0;
      const int64_t p = start + i;
      const auto row = static_cast<int32_t>(plan.rows);
      plan.token.push_back(token);
      plan.position.push_back(static_cast<int32_t>(p));
      plan.sequence.push_back(static_cast<int32_t>(s));
      plan.is_image.push_back(image ? 1 : 0);
      if (!model.engram.empty()) {
        plan.classes.push_back(image ? -1 : model.token_class[static_cast<size_t>(token)]);
      }
      for (auto& [ratio, groups] : plan.groups) {
        if ((p + 1) % ratio == 0) {
          const int64_t entry = (p + 1) / ratio - 1;
          groups.row.push_back(row);
          groups.sequence.push_back(static_cast<int32_t>(s));
          groups.entry.push_back(static_cast<int32_t>(entry));
          groups.position.push_back(static_cast<int32_t>(entry * ratio));
        }
      }
      if (!sequence.no_logits && (sequence.all_logits || i + 1 == n)) {
        plan.logit_rows.push_back(row);
      }
      ++plan.rows;
    }
  }
  plan.row_begin.push_back(static_cast<int32_t>(plan.rows));
  CACHALOT_CHECK(plan.rows <= std::numeric_limits<int32_t>::max(), plan.rows, c.vocab_size);
  return plan;
}

}  // namespace

struct StepRunner::State {
  State(const Model& m, const ops::OpContext& c, Precision p)
      : model(m), context(c), precision(p) {}

  const Model& model;
  ops::OpContext context;
  Precision precision;
  Arena memory;   // the step's tensors
  Arena scratch;  // the ops' temporaries
  StepPlan plan;
  std::vector<StepSequence> sequences;
  std::unique_ptr<InferExec> exec;  // of the last step; null: nothing to commit
};

StepRunner::StepRunner(const Model& model, ops::OpContext context, Precision precision)
    : state_(std::make_unique<State>(model, context, precision)) {
  if (state_->context.scratch == nullptr) {
    state_->context.scratch = &state_->scratch;
  }
}

StepRunner::~StepRunner() = default;

Result<TensorView> StepRunner::run(std::span<const StepSequence> sequences, Observer* observer) {
  State& s = *state_;
  s.exec.reset();
  for (const StepSequence& sequence : sequences) {
    CACHALOT_RETURN_IF_ERROR(check_sequence(s.model.config, sequence));
  }
  s.memory.reset();
  s.scratch.reset();
  s.sequences.assign(sequences.begin(), sequences.end());
  s.plan = make_plan(s.model, s.sequences);
  s.exec = std::make_unique<InferExec>(
      s.model, s.context, s.precision, s.memory, s.plan, s.sequences, observer);
  const TensorView logits = forward(*s.exec, s.model);
  if (!s.exec->status().ok()) {
    const Status status = s.exec->status();
    s.exec.reset();
    return status;
  }
  return logits;
}

Status StepRunner::commit(std::span<const int32_t> accepted) {
  State& s = *state_;
  if (s.exec == nullptr) {
    return error(Code::kFailedPrecondition, "commit without a step");
  }
  CACHALOT_CHECK(accepted.size() == s.sequences.size(), accepted.size(), s.sequences.size());
  TensorView counts = s.memory.allocate(DType::kI32, {static_cast<int64_t>(accepted.size())});
  std::copy(accepted.begin(), accepted.end(), counts.as<int32_t>());
  for (const LayerSpec& layer : s.model.layers) {
    CACHALOT_RETURN_IF_ERROR(ops::window_commit(s.context,
                                                {.rows = s.exec->step_rows(),
                                                 .window = s.exec->window(layer.index),
                                                 .accepted = counts}));
  }
  for (size_t i = 0; i < s.sequences.size(); ++i) {
    ops::SequenceView& view = *s.sequences[i].view;
    const int64_t n = accepted[i];
    CACHALOT_CHECK(n >= 0 && n <= static_cast<int64_t>(s.sequences[i].tokens.size()), n);
    if (n == 0) {
      continue;
    }
    const int64_t last_row = s.plan.row_begin[i] + n - 1;
    // A group is open after an odd number of positions: its first token is the last accepted one.
    if ((view.length + n) % 2 == 1) {
      for (const auto& [source, input] : s.exec->group_inputs()) {
        const int64_t c = input.kv.dim(1);
        float* open = view.sources[static_cast<size_t>(source)].open_group;
        std::memcpy(open, input.kv.as<float>() + last_row * c, static_cast<size_t>(c) * 4);
        std::memcpy(open + c, input.gate.as<float>() + last_row * c, static_cast<size_t>(c) * 4);
      }
    }
    if (!s.model.engram.empty()) {
      const auto back = static_cast<int64_t>(view.lookback.size());
      const int32_t* classes =
          s.plan.classes.data() + s.plan.row_begin[i] + static_cast<int64_t>(i) * back;
      std::vector<int32_t> next(classes + n, classes + n + back);
      view.lookback = std::move(next);
    }
    view.length += n;
  }
  s.exec.reset();
  return {};
}

}  // namespace cachalot::model
