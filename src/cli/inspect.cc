// cachalot inspect: what a checkpoint or a bare config is.
#include <cstdio>
#include <memory>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "cli/command.h"
#include "model/accounting.h"
#include "model/checkpoint.h"
#include "model/schedule.h"

namespace cachalot::cli {
namespace {

struct InspectFlags {
  std::string directory, config;
  bool json = false;
};

void write_json(const model::Accounting& sizes, const std::vector<model::LayerSpec>& layers) {
  const model::ParameterCounts& p = sizes.parameters;
  JsonWriter w;
  w.begin_object().field("tensors", sizes.tensors).field("total_bytes", sizes.total_bytes);
  w.key("parameters")
      .begin_object()
      .field("backbone", p.backbone)
      .field("engram", p.engram)
      .field("draft", p.draft)
      .field("vision", p.vision)
      .field("total", p.total)
      .field("active_prefill", p.active_prefill)
      .field("active_decode", p.active_decode)
      .end_object();
  w.field("cache_bytes_per_token", sizes.cache_bytes_per_token)
      .field("window_bytes_per_request", sizes.window_bytes_per_request);
  // A layer without the thing in question has null.
  const auto id = [&w](std::string_view name, int64_t value) {
    w.key(name);
    if (value < 0) {
      w.null();
    } else {
      w.value(value);
    }
  };
  w.key("layers").begin_array();
  for (const model::LayerSpec& layer : layers) {
    w.begin_object()
        .field("index", layer.index)
        .field("ratio", layer.ratio)
        .field("mode", model::mode_name(layer.mode));
    id("kv_source", layer.kv_source);
    id("index_source", layer.index_source);
    id("candidate_source", layer.candidate_source);
    w.field("engram", layer.engram >= 0).end_object();
  }
  w.end_array().end_object();
  std::fputs((w.text() + "\n").c_str(), stdout);
}

// n in the larger of two units that it reaches.
std::string rounded(
    int64_t n, int64_t unit, std::string_view name, int64_t larger, std::string_view larger_name) {
  const bool large = n >= larger;
  return fmt::format("{:.2f} {}",
                     static_cast<double>(n) / static_cast<double>(large ? larger : unit),
                     large ? larger_name : name);
}

void write_table(const model::ModelConfig& config,
                 const model::Accounting& sizes,
                 const std::vector<model::LayerSpec>& layers) {
  const model::ParameterCounts& p = sizes.parameters;
  std::string text = fmt::format("tensors                  {}\n", sizes.tensors);
  text += fmt::format("{:<24} {} ({})\n",
                      "bytes",
                      sizes.total_bytes,
                      rounded(sizes.total_bytes, 1 << 20, "MiB", 1 << 30, "GiB"));
  const auto count = [&text](std::string_view what, int64_t n) {
    text += fmt::format(
        "{:<24} {} ({})\n", what, n, rounded(n, 1'000'000, "million", 1'000'000'000, "billion"));
  };
  count("backbone parameters", p.backbone);
  count("Engram table parameters", p.engram);
  count("draft parameters", p.draft);
  count("vision parameters", p.vision);
  count("all parameters", p.total);
  count("active in prefill", p.active_prefill);
  count("active in decode", p.active_decode);
  text += fmt::format("cache bytes per token    {}\n", sizes.cache_bytes_per_token);
  text += fmt::format("window bytes per request {}\n", sizes.window_bytes_per_request);
  text +=
      fmt::format("hidden {}, heads {} x {}, experts {} top {}, vocabulary {}, positions {}\n\n",
                  config.hidden_size,
                  config.num_attention_heads,
                  config.head_dim,
                  config.n_routed_experts,
                  config.num_experts_per_tok,
                  config.vocab_size,
                  config.max_position_embeddings);
  text += "layer  ratio  mode     kv source  index source  candidates of  engram\n";
  const auto id = [](int64_t value) {
    return value < 0 ? std::string("-") : fmt::format("{}", value);
  };
  for (const model::LayerSpec& layer : layers) {
    text += fmt::format("{:>5}  {:>5}  {:<7}  {:>9}  {:>12}  {:>13}  {:>6}\n",
                        layer.index,
                        layer.ratio,
                        model::mode_name(layer.mode),
                        id(layer.kv_source),
                        id(layer.index_source),
                        id(layer.candidate_source),
                        layer.engram >= 0 ? "yes" : "-");
  }
  std::fputs(text.c_str(), stdout);
}

Result<model::ModelConfig> chosen_config(const InspectFlags& flags) {
  if (!flags.directory.empty()) {
    CACHALOT_TRY(const model::Checkpoint checkpoint,
                 model::Checkpoint::open(flags.directory, model::Checkpoint::Values::kUnchecked));
    return checkpoint.config();
  }
  CACHALOT_TRY(const std::string text, read_file(flags.config));
  return model::parse_config(text, flags.config);
}

Status inspect(const InspectFlags& flags) {
  CACHALOT_TRY(const model::ModelConfig config, chosen_config(flags));
  const model::Accounting sizes = model::account(config);
  const std::vector<model::LayerSpec> layers = model::layer_schedule(config);
  if (flags.json) {
    write_json(sizes, layers);
  } else {
    write_table(config, sizes, layers);
  }
  return {};
}

}  // namespace

void add_inspect(CLI::App& app, Action& action) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* command = app.add_subcommand(
      "inspect", "Sizes, parameters and layer schedule of a checkpoint or config");
  auto* source = command->add_option_group("model");
  source->add_option("directory", flags->directory, "Checkpoint directory");
  source->add_option("--config", flags->config, "A bare config.json");
  source->require_option(1);
  command->add_flag("--json", flags->json, "One JSON document");
  command->callback([flags, &action] { action = [flags] { return inspect(*flags); }; });
}

}  // namespace cachalot::cli
