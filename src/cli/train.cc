// cachalot train, export, eval: a training run, its model as a checkpoint, its quality.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "cli/command.h"
#include "train/evaluation.h"
#include "train/run_config.h"
#include "train/run_state.h"
#include "train/trainer.h"

namespace cachalot::cli {
namespace {

// Of steps and of tokens.
constexpr int64_t kMost = int64_t{1} << 40;

struct TrainFlags {
  std::string config;
  bool resume = false;
  std::vector<std::string> set;
};

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

Status run_training(const TrainFlags& flags) {
  CACHALOT_TRY(const std::string text, read_file(flags.config));
  CACHALOT_TRY(const train::RunConfig config,
               train::parse_run_config(text, flags.config, flags.set));
  CACHALOT_TRY(const auto trainer, train::Trainer::create(config, flags.resume));
  const bool terminal = isatty(STDERR_FILENO) != 0;
  double mean_seconds = 0;
  train::Trainer::Listener listener;
  listener.on_step = [&](const train::StepRecord& r) {
    mean_seconds = mean_seconds == 0 ? r.seconds : 0.9 * mean_seconds + 0.1 * r.seconds;
    if (terminal) {
      std::fputs(fmt::format("\rstep {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left \033[K",
                             r.step,
                             r.steps,
                             r.loss,
                             r.tokens_per_second,
                             duration(static_cast<double>(r.steps - r.step) * mean_seconds))
                     .c_str(),
                 stderr);
    }
  };
  listener.on_evaluation = [&](int64_t step, const train::Evaluation& e) {
    std::fputs(fmt::format("{}step {}: held-out loss {:.4f}, {:.4f} bits per byte\n",
                           terminal ? "\r\033[K" : "",
                           step,
                           e.loss(),
                           e.bits_per_byte())
                   .c_str(),
               stderr);
  };
  listener.on_draft_evaluation = [&](int64_t step, const train::DraftEvaluation& e) {
    std::fputs(fmt::format("{}step {}: held-out draft loss {:.4f}, acceptance length {:.4f}\n",
                           terminal ? "\r\033[K" : "",
                           step,
                           e.loss,
                           e.length)
                   .c_str(),
               stderr);
  };
  const Status status = trainer->run(listener);
  if (terminal) {
    std::fputs("\n", stderr);
  }
  return status;
}

struct RunFlags {
  std::string run, out;
  std::vector<std::string> data;
  int64_t step = 0, sequence = 512, tokens = kMost;
  int threads = 0;
  bool exported = false, drafter = false, zero_tables = false, json = false;
};

// The state that the flags name: the last one by default.
Result<int64_t> chosen_step(const RunFlags& flags) {
  const std::vector<int64_t> steps = train::saved_steps(flags.run);
  if (flags.step > 0) {
    return flags.step;
  }
  if (steps.empty()) {
    return error(Code::kNotFound, "'{}' holds no saved state", flags.run);
  }
  return steps.back();
}

Status export_model(const RunFlags& flags) {
  CACHALOT_TRY(const int64_t step, chosen_step(flags));
  ThreadPool pool(flags.threads);
  CACHALOT_RETURN_IF_ERROR(train::export_run(flags.run, step, flags.out, pool));
  std::fputs(fmt::format("{}: the model of step {}\n", flags.out, step).c_str(), stderr);
  return {};
}

Status evaluate_draft(const RunFlags& flags,
                      int64_t step,
                      train::ParameterSet<float>& parameters,
                      const train::ForwardOptions& options,
                      const train::Corpus& corpus,
                      const train::EvaluationText& text,
                      ThreadPool& pool) {
  if (parameters.model().draft.empty()) {
    return invalid("--drafter: the model of '{}' has no drafter", flags.run);
  }
  const train::DraftEvaluation result =
      train::evaluate_drafter(parameters, options, corpus, text, pool);
  if (result.samples.empty()) {
    return invalid("--data holds no draft block of {} tokens",
                   parameters.model().config.dspark_block_size);
  }
  JsonWriter w;
  std::string positions;
  w.begin_object()
      .field("step", step)
      .field("acceptance_length", result.length)
      .field("blocks", result.samples.size())
      .key("acceptance")
      .begin_array();
  for (double acceptance : result.acceptance) {
    w.value(acceptance);
    positions += fmt::format(" {:.4f}", acceptance);
  }
  w.end_array().end_object();
  std::fputs(
      (flags.json ? w.text() + "\n"
                  : fmt::format("step {}: acceptance length {:.4f} ({} blocks); per position{}\n",
                                step,
                                result.length,
                                result.samples.size(),
                                positions))
          .c_str(),
      stdout);
  return {};
}

Status evaluate_run(const RunFlags& flags) {
  CACHALOT_TRY(const int64_t step, chosen_step(flags));
  CACHALOT_TRY(const train::RunModel model, train::open_run_model(flags.run));
  if (flags.sequence > model.config.max_position_embeddings) {
    return invalid("--sequence is {}; max_position_embeddings is {}",
                   flags.sequence,
                   model.config.max_position_embeddings);
  }
  CACHALOT_TRY(const auto parameters,
               train::ParameterSet<float>::create(model.config, model.token_class));
  CACHALOT_TRY(const train::RunPosition position,
               train::load_state(train::state_path(flags.run, step), *parameters, nullptr));
  ThreadPool pool(flags.threads);
  train::ForwardOptions options;
  options.mixing = position.mixing;
  if (flags.zero_tables) {
    if (model.config.engram_layer_ids.empty()) {
      return invalid("--zero-tables: the model of '{}' has no Engram tables", flags.run);
    }
    for (train::Parameter<float>& parameter : parameters->all()) {
      if (parameter.spec.role == model::WeightRole::kEngramTable) {
        std::fill(parameter.value.begin(), parameter.value.end(), 0.0f);
      }
    }
  }
  if (flags.exported) {
    options.quant = train::QuantSwitches::exported();
    options.candidates = true;
  }
  parameters->apply(options.quant, &pool);
  train::Corpus corpus;
  for (const std::string& path : flags.data) {
    CACHALOT_RETURN_IF_ERROR(corpus.add(path,
                                        model.tokenizer,
                                        {.bos = static_cast<int32_t>(model.config.bos_token_id),
                                         .eos = static_cast<int32_t>(model.config.eos_token_id),
                                         .vocab_size = model.config.vocab_size},
                                        pool));
  }
  const train::EvaluationText text{
      .sequence = flags.sequence, .micro_tokens = 2 * flags.sequence, .most = flags.tokens};
  if (flags.drafter) {
    return evaluate_draft(flags, step, *parameters, options, corpus, text, pool);
  }
  const train::Evaluation result =
      train::evaluate(*parameters, options, corpus, model.tokenizer, text, pool);
  if (result.targets == 0) {
    return invalid("--data holds no sample of two tokens");
  }
  if (flags.json) {
    JsonWriter w;
    w.begin_object()
        .field("step", step)
        .field("loss", result.loss())
        .field("bits_per_byte", result.bits_per_byte())
        .field("targets", result.targets)
        .field("right", result.right)
        .field("bytes", result.bytes)
        .end_object();
    std::fputs((w.text() + "\n").c_str(), stdout);
  } else {
    std::fputs(
        fmt::format("step {}: loss {:.6f} nats per token, {:.6f} bits per byte ({} tokens)\n",
                    step,
                    result.loss(),
                    result.bits_per_byte(),
                    result.targets)
            .c_str(),
        stdout);
  }
  return {};
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto flags = std::make_shared<TrainFlags>();
  CLI::App* command = app.add_subcommand("train", "Train a model as a TOML file says");
  command->add_option("config", flags->config, "The run's TOML file")->required();
  command->add_flag("--resume", flags->resume, "Continue from the last saved state");
  command->add_option("--set", flags->set, "section.key=value: changes the file; repeatable")
      ->take_all();
  command->callback([flags, &action] { action = [flags] { return run_training(*flags); }; });
}

void add_export(CLI::App& app, Action& action) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* command =
      app.add_subcommand("export", "Write a run's model as a checkpoint in the official format");
  command->add_option("run", flags->run, "The run's folder")->required();
  command->add_option("--out", flags->out, "Directory to write")->required();
  command->add_option("--step", flags->step, "0: the last saved state")
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  add_threads(*command, flags->threads);
  command->callback([flags, &action] { action = [flags] { return export_model(*flags); }; });
}

void add_eval(CLI::App& app, Action& action) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* command = app.add_subcommand("eval", "Cross-entropy of a run's model on text");
  command->add_option("run", flags->run, "The run's folder")->required();
  command->add_option("--data", flags->data, "Files or folders, as in the run's TOML file")
      ->required()
      ->take_all();
  command->add_option("--step", flags->step, "0: the last saved state")
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  command->add_option("--sequence", flags->sequence, "Longest sample in tokens")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--tokens", flags->tokens, "At most about this many")
      ->check(CLI::Range(int64_t{1}, kMost))
      ->capture_default_str();
  command->add_flag("--drafter", flags->drafter, "Its drafter's acceptance instead");
  command->add_flag("--exported", flags->exported, "With the rounding of an exported checkpoint");
  command->add_flag("--zero-tables", flags->zero_tables, "With Engram tables of zeros");
  add_threads(*command, flags->threads);
  command->add_flag("--json", flags->json, "One JSON document");
  command->callback([flags, &action] { action = [flags] { return evaluate_run(*flags); }; });
}

}  // namespace cachalot::cli
