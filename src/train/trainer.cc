#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "base/clock.h"
#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "model/checkpoint.h"
#include "model/forward.h"
#include "text/byte_tokenizer.h"
#include "text/token_classes.h"
#include "train/plot.h"

namespace cachalot::train {
namespace {

// Of the running mean of the loss that divergence is measured against.
constexpr double kMeanKeep = 0.98;

Result<RunModel> new_run_model(const RunConfig& config) {
  model::ModelConfig c;
  if (!config.preset.empty()) {
    CACHALOT_TRY(c, model::preset_config(config.preset));
  } else {
    CACHALOT_TRY(const std::string text, read_file(config.config));
    CACHALOT_TRY(c, model::parse_config(text, config.config));
  }
  for (const std::string& assignment : config.set) {
    CACHALOT_RETURN_IF_ERROR(model::set_config_value(c, assignment).with("model.set"));
  }
  c.storage = model::WeightStorage::kOfficial;
  std::string json, source = config.tokenizer;
  if (config.tokenizer.empty()) {
    if (c.vocab_size < text::kMinByteVocab) {
      return invalid("vocab_size is {}; a byte-level tokenizer needs at least {}",
                     c.vocab_size,
                     text::kMinByteVocab);
    }
    source = "the byte-level tokenizer";
    json = text::byte_level_tokenizer_json(static_cast<int32_t>(c.vocab_size));
  } else {
    CACHALOT_TRY(json, read_file(config.tokenizer));
  }
  if (config.classes_from_tokenizer) {
    CACHALOT_TRY(const text::Tokenizer tokenizer, text::Tokenizer::parse(json, source));
    CACHALOT_TRY(const std::vector<int32_t> classes, text::token_classes(tokenizer));
    c.engram_compressed_vocab_size = *std::max_element(classes.begin(), classes.end()) + 1;
    CACHALOT_RETURN_IF_ERROR(model::derive_engram_rows(c));
  }
  return make_run_model(std::move(c), std::move(json), source);
}

std::string step_line(const StepRecord& r, bool drafts) {
  JsonWriter w;
  w.begin_object()
      .field("step", r.step)
      .field("tokens", r.tokens)
      .field("loss", r.loss)
      .field("rate", r.rate)
      .field("gradient_norm", r.gradient_norm)
      .field("balance", r.balance)
      .field("violation", r.violation);
  if (drafts) {
    w.field("acceptance", r.acceptance);
  } else {
    w.field("indexer", r.indexer)
        .field("selected_share", r.selected_share)
        .field("selected_recall", r.selected_recall)
        .field("gain", r.gain)
        .field("gain_back", r.gain_back)
        .field("idle_experts", r.idle_experts)
        .field("max_latent", r.max_latent);
  }
  w.field("seconds", r.seconds).field("tokens_per_second", r.tokens_per_second).end_object();
  return w.text();
}

std::string evaluation_line(int64_t step, const Evaluation& e) {
  JsonWriter w;
  w.begin_object()
      .field("step", step)
      .field("heldout_loss", e.loss())
      .field("bits_per_byte", e.bits_per_byte())
      .field("heldout_targets", e.targets)
      .field("heldout_right", e.right)
      .end_object();
  return w.text();
}

// The first weight with a value that is not finite; empty if there is none.
std::string not_finite(const ParameterSet<float>& parameters) {
  for (const Parameter<float>& parameter : parameters.all()) {
    if (!std::ranges::all_of(parameter.value, [](float v) { return std::isfinite(v); })) {
      return parameter.spec.name;
    }
  }
  return {};
}

std::string draft_evaluation_line(int64_t step, const DraftEvaluation& e) {
  JsonWriter w;
  w.begin_object()
      .field("step", step)
      .field("heldout_loss", e.loss)
      .field("acceptance_length", e.length)
      .field("heldout_blocks", e.samples.size())
      .end_object();
  return w.text();
}

// Drops what a log says about steps that a resumed run will do again.
Status cut_log(const std::string& path, int64_t step) {
  if (!file_exists(path)) {
    return {};
  }
  CACHALOT_TRY(const std::string text, read_file(path));
  std::string kept;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const nlohmann::json record = nlohmann::json::parse(line, nullptr, false);
    // A line without its end was being written when the run died.
    if (record.is_object() && end < text.size() && step_of(record).value_or(0) <= step) {
      kept += line + "\n";
    }
    begin = end + 1;
  }
  return replace_file(path, kept);
}

}  // namespace

Trainer::Trainer(const RunConfig& config, RunModel model)
    : config_(config), model_(std::move(model)), pool_(static_cast<int>(config.threads)) {}

Result<std::unique_ptr<Trainer>> Trainer::create(const RunConfig& config, bool resume) {
  const std::vector<int64_t> steps = saved_steps(config.out);
  if (resume && steps.empty()) {
    return error(
        Code::kNotFound, "run.out is '{}', which holds no state to resume from", config.out);
  }
  if (!resume && !steps.empty()) {
    return error(Code::kFailedPrecondition,
                 "run.out is '{}', which holds a run at step {}; use --resume or another folder",
                 config.out,
                 steps.back());
  }
  CACHALOT_TRY(RunModel model,
               resume                ? open_run_model(config.out)
               : config.from.empty() ? new_run_model(config)
                                     : open_run_model(config.from, config.set));
  if (config.stage == Stage::kDrafter && model.config.num_nextn_predict_layers == 0) {
    return invalid("model.stage is \"drafter\", but {} has no drafter", config.from);
  }
  std::unique_ptr<Trainer> trainer(new Trainer(config, std::move(model)));
  CACHALOT_TRY(trainer->parameters_,
               ParameterSet<float>::create(trainer->model_.config, trainer->model_.token_class));
  trainer->lanes_ = std::make_unique<Lanes>(*trainer->parameters_, trainer->pool_);
  trainer->optimizer_ =
      std::make_unique<Optimizer>(*trainer->parameters_, config.optimizer, config.stage);
  CACHALOT_RETURN_IF_ERROR(trainer->load_data());
  CACHALOT_RETURN_IF_ERROR(trainer->start(resume));
  return trainer;
}

Status Trainer::load_data() {
  const model::ModelConfig& c = model_.config;
  if (config_.forward.mixing == Mixing::kPlain && c.hc_mult != 1) {
    return invalid("model.mixing is \"plain\", which needs hc_mult 1; it is {}", c.hc_mult);
  }
  if (config_.sequence > c.max_position_embeddings) {
    return invalid("data.sequence is {}; max_position_embeddings is {}",
                   config_.sequence,
                   c.max_position_embeddings);
  }
  const DocumentTokens control{.bos = static_cast<int32_t>(c.bos_token_id),
                               .eos = static_cast<int32_t>(c.eos_token_id),
                               .vocab_size = c.vocab_size};
  for (const DataSource& source : config_.train) {
    for (int64_t i = 0; i < source.repeat; ++i) {
      CACHALOT_RETURN_IF_ERROR(corpus_.add(source.path, model_.tokenizer, control, pool_));
    }
  }
  for (const std::string& path : config_.heldout) {
    CACHALOT_RETURN_IF_ERROR(heldout_.add(path, model_.tokenizer, control, pool_));
  }
  if (plan_epoch(corpus_, config_.seed, 0, config_.sequence, config_.micro_tokens).empty()) {
    return invalid("data.train holds no sample of two tokens");
  }
  return {};
}

Status Trainer::check_mixing(const RunPosition& position, const char* key) const {
  const auto name = [](Mixing mixing) { return kMixingNames[static_cast<size_t>(mixing)]; };
  if (position.mixing != config_.forward.mixing) {
    return invalid("{} holds weights of model.mixing \"{}\"; the run's is \"{}\"",
                   key,
                   name(position.mixing),
                   name(config_.forward.mixing));
  }
  return {};
}

Status Trainer::start(bool resume) {
  const std::string log_path = config_.out + "/log.jsonl";
  Settings settings = step_settings_of(config_);
  settings["data.train"] = json_quote(corpus_.summary());
  CACHALOT_RETURN_IF_ERROR(remove_unfinished(config_.out));
  if (resume) {
    saved_step_ = saved_steps(config_.out).back();
    const std::string state = state_path(config_.out, saved_step_);
    CACHALOT_TRY(position_, load_state(state, *parameters_, &optimizer_->states()));
    CACHALOT_RETURN_IF_ERROR(
        check_resumed(settings, position_.settings, position_.tokens).with(state));
    CACHALOT_RETURN_IF_ERROR(check_mixing(position_, "run.out"));
    CACHALOT_RETURN_IF_ERROR(cut_log(log_path, position_.step));
  } else {
    position_.mixing = config_.forward.mixing;
    initialize(*parameters_, config_.seed, config_.forward.mixing == Mixing::kFree);
    if (!config_.from.empty()) {
      const std::vector<int64_t> steps = saved_steps(config_.from);
      RunPosition from;  // a checkpoint's is that of a new run
      if (steps.empty()) {
        CACHALOT_RETURN_IF_ERROR(load_checkpoint(config_.from, *parameters_).with("model.from"));
      } else {
        CACHALOT_TRY(from,
                     load_state(state_path(config_.from, steps.back()), *parameters_, nullptr));
      }
      CACHALOT_RETURN_IF_ERROR(check_mixing(from, "model.from"));
    }
    CACHALOT_RETURN_IF_ERROR(make_directories(config_.out));
    CACHALOT_RETURN_IF_ERROR(
        replace_file(config_.out + "/config.json", model::config_to_json(model_.config)));
    CACHALOT_RETURN_IF_ERROR(replace_file(config_.out + "/tokenizer.json", model_.tokenizer_json));
    CACHALOT_RETURN_IF_ERROR(replace_file(log_path, ""));
  }
  position_.settings = std::move(settings);
  parameters_->apply(config_.forward.quant, &pool_);
  return {};
}

Result<std::vector<Batch>> Trainer::next_batches() {
  std::vector<Batch> batches;
  const int64_t count = config_.batch_tokens / config_.micro_tokens;
  while (static_cast<int64_t>(batches.size()) < count) {
    if (planned_epoch_ != position_.epoch) {
      plan_ = plan_epoch(
          corpus_, config_.seed, position_.epoch, config_.sequence, config_.micro_tokens);
      planned_epoch_ = position_.epoch;
    }
    if (position_.batch >= static_cast<int64_t>(plan_.size())) {
      ++position_.epoch;
      position_.batch = 0;
      continue;
    }
    batches.push_back(make_batch(corpus_, plan_[static_cast<size_t>(position_.batch++)]));
  }
  return batches;
}

Status Trainer::diverged(const std::string& what) const {
  return error(Code::kFailedPrecondition,
               "step {}: {}; the last good state is {}",
               position_.step + 1,
               what,
               saved_step_ == 0 ? "none" : state_path(config_.out, saved_step_));
}

Result<StepRecord> Trainer::train_step() {
  const double started = now_seconds();
  CACHALOT_TRY(const std::vector<Batch> batches, next_batches());
  int64_t rows = 0;
  std::vector<DraftBlocks> blocks;
  double weight = 0;  // of all losses
  for (const Batch& batch : batches) {
    rows += batch.rows();
    if (drafts()) {
      const auto index = static_cast<uint64_t>(position_.step) * batches.size() + blocks.size();
      blocks.push_back(
          make_draft_blocks(model_.config, config_.forward.draft, batch, config_.seed + index));
    }
    weight += drafts() ? blocks.back().weight_sum : static_cast<double>(batch.targets);
  }
  if (weight == 0) {
    return diverged("no token of the batch has a loss");
  }
  parameters_->zero_gradients(&pool_);
  StepRecord record{.step = position_.step + 1, .steps = config_.steps};
  std::vector<std::vector<int64_t>> load, load_image;
  double drafted = 0;  // rows
  double all_mass = 0, selected_mass = 0, best_mass = 0;
  const auto add = [](const std::vector<std::vector<int64_t>>& from,
                      std::vector<std::vector<int64_t>>& to) {
    to.resize(from.size());
    for (size_t l = 0; l < from.size(); ++l) {
      to[l].resize(from[l].size());
      for (size_t e = 0; e < from[l].size(); ++e) {
        to[l][e] += from[l][e];
      }
    }
  };
  const auto share = [&](const Batch& batch) {
    return static_cast<double>(batch.rows()) / static_cast<double>(rows);
  };
  lanes_->run(
      batches,
      [&](const Batch& batch) {
        ForwardOptions options = config_.forward;
        options.loss_scale = 1.0 / weight;
        options.auxiliary_scale = share(batch);
        options.seed = config_.seed + static_cast<uint64_t>(record.step);
        if (drafts()) {
          options.blocks = &blocks[static_cast<size_t>(&batch - batches.data())];
        }
        return options;
      },
      [&](TrainExec<float>& exec) {
        if (drafts()) {
          train_drafter(exec, parameters_->model());
        } else {
          model::forward(exec, parameters_->model());
        }
      },
      [&](const Batch& batch, const TrainExec<float>& exec) {
        const ForwardReport& report = exec.report();
        record.loss += report.loss_sum / weight;
        drafted += static_cast<double>(report.draft.size());
        for (const DraftRow& row : report.draft) {
          record.acceptance += row.acceptance;
        }
        record.balance += report.balance * share(batch);
        record.indexer += report.indexer * share(batch);
        record.max_latent = std::max(record.max_latent, report.max_latent);
        record.gain = std::max(record.gain, report.gain.forward);
        record.gain_back = std::max(record.gain_back, report.gain.backward);
        all_mass += report.all_mass;
        selected_mass += report.selected_mass;
        best_mass += report.best_mass;
        add(report.load, load);
        add(report.load_image, load_image);
      });
  record.acceptance /= std::max(drafted, 1.0);
  if (all_mass > 0) {
    record.selected_share = selected_mass / all_mass;
    record.selected_recall = selected_mass / best_mass;
  }
  if (!std::isfinite(record.loss)) {
    const std::string culprit = not_finite(*parameters_);
    return diverged(culprit.empty()
                        ? "the loss is not finite, but every weight is"
                        : fmt::format("the loss is not finite, nor is the weight {}", culprit));
  }
  std::string worst;
  record.gradient_norm = gradient_norm(*parameters_, *optimizer_, &pool_, &worst);
  if (!worst.empty()) {
    return diverged(fmt::format("the gradient of {} is not finite", worst));
  }
  if (position_.step > 0 && record.loss > position_.mean_loss + config_.divergence) {
    return diverged(
        fmt::format("the loss is {:.4f}, its running mean {:.4f}; they may differ by {}",
                    record.loss,
                    position_.mean_loss,
                    config_.divergence));
  }
  record.rate = learning_rate(config_.schedule, record.step, static_cast<double>(position_.tokens));
  const double scale = config_.clip > 0 && record.gradient_norm > config_.clip
                           ? config_.clip / record.gradient_norm
                           : 1.0;
  optimizer_->step(record.step, record.rate, scale, &pool_);
  // Once per optimizer step, from the loads of all its batches.
  const model::ModelWeights& weights = parameters_->model().weights;
  const std::vector<model::LayerWeights>& layers = drafts() ? weights.draft.stages : weights.layers;
  for (size_t l = 0; l < load.size(); ++l) {
    const model::MoeWeights& moe = layers[l].moe;
    if (config_.stage != Stage::kIndexer) {
      balance_bias(config_.bias_speed, load[l], parameters_->of(moe.bias).value.data());
      balance_bias(config_.bias_speed, load_image[l], parameters_->of(moe.bias_vl).value.data());
    }
    record.violation += max_violation(load[l]) / static_cast<double>(load.size());
    record.idle_experts += std::count(load[l].begin(), load[l].end(), 0);
  }
  parameters_->apply(config_.forward.quant, &pool_);
  position_.step = record.step;
  position_.tokens += rows;
  position_.mean_loss = record.step == 1
                            ? record.loss
                            : kMeanKeep * position_.mean_loss + (1 - kMeanKeep) * record.loss;
  record.tokens = position_.tokens;
  record.seconds = now_seconds() - started;
  record.tokens_per_second = static_cast<double>(rows) / record.seconds;
  return record;
}

Status Trainer::log(const std::string& line) {
  const std::string path = config_.out + "/log.jsonl";
  std::ofstream file(path, std::ios::app | std::ios::binary);
  file << line << '\n';
  file.flush();
  return file.good() ? Status() : error(Code::kUnavailable, "cannot append to '{}'", path);
}

Status Trainer::save() {
  CACHALOT_RETURN_IF_ERROR(save_state(
      state_path(config_.out, position_.step), *parameters_, optimizer_->states(), position_));
  saved_step_ = position_.step;
  const std::vector<int64_t> steps = saved_steps(config_.out);
  for (size_t i = 0; i + static_cast<size_t>(config_.keep_checkpoints) < steps.size(); ++i) {
    std::error_code ignored;
    std::filesystem::remove(state_path(config_.out, steps[i]), ignored);
  }
  return plot_log(config_.out + "/log.jsonl", config_.out + "/plot.svg");
}

Status Trainer::evaluate_heldout(const Listener& listener, bool last) {
  const EvaluationText text{.sequence = config_.sequence,
                            .micro_tokens = config_.micro_tokens,
                            .most = config_.evaluate_tokens};
  const int64_t step = position_.step;
  if (!drafts()) {
    const Evaluation evaluation =
        evaluate(*parameters_, config_.forward, heldout_, model_.tokenizer, text, pool_);
    CACHALOT_RETURN_IF_ERROR(log(evaluation_line(step, evaluation)));
    if (listener.on_evaluation) {
      listener.on_evaluation(step, evaluation);
    }
    return {};
  }
  const DraftEvaluation evaluation =
      evaluate_drafter(*parameters_, config_.forward, heldout_, text, pool_);
  CACHALOT_RETURN_IF_ERROR(log(draft_evaluation_line(step, evaluation)));
  if (listener.on_draft_evaluation) {
    listener.on_draft_evaluation(step, evaluation);
  }
  if (last && !evaluation.samples.empty()) {
    return replace_file(config_.out + "/" + model::kDraftCalibrationFile,
                        draft_calibration_json(fit_draft_calibration(evaluation.samples), step));
  }
  return {};
}

Status Trainer::run(const Listener& listener) {
  while (position_.step < config_.steps) {
    CACHALOT_TRY(const StepRecord record, train_step());
    CACHALOT_RETURN_IF_ERROR(log(step_line(record, drafts())));
    if (listener.on_step) {
      listener.on_step(record);
    }
    const bool last = record.step == config_.steps;
    if (heldout_.documents() > 0 &&
        (last || (config_.evaluate_every > 0 && record.step % config_.evaluate_every == 0))) {
      CACHALOT_RETURN_IF_ERROR(evaluate_heldout(listener, last));
    }
    if (last || record.step % config_.checkpoint_every == 0) {
      CACHALOT_RETURN_IF_ERROR(save());
    }
  }
  return {};
}

}  // namespace cachalot::train
