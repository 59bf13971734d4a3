// cachalot synth: a complete checkpoint with random weights.
#include "model/synth.h"

#include <cstdio>
#include <memory>

#include "base/file.h"
#include "base/format.h"
#include "cli/command.h"
#include "model/accounting.h"
#include "text/byte_tokenizer.h"
#include "text/tokenizer.h"

namespace cachalot::cli {
namespace {

struct SynthFlags {
  std::string preset, config, out, weights = "official", tokenizer;
  std::vector<std::string> set;
  uint64_t seed = 0;
  int threads = 0;
};

Result<model::ModelConfig> chosen_config(const SynthFlags& flags) {
  if (!flags.preset.empty()) {
    return model::preset_config(flags.preset);
  }
  CACHALOT_TRY(const std::string text, read_file(flags.config));
  return model::parse_config(text, flags.config);
}

// The tokenizer must name every id, and its token classes must be those that the Engram tables were
// sized for: only an identity map fits any tokenizer.
Result<std::string> chosen_tokenizer(const SynthFlags& flags, const model::ModelConfig& config) {
  if (flags.tokenizer.empty()) {
    if (config.vocab_size < text::kMinByteVocab) {
      return invalid("vocab_size is {}; a byte-level tokenizer needs at least {}",
                     config.vocab_size,
                     text::kMinByteVocab);
    }
    if (!config.engram_layer_ids.empty() &&
        config.engram_compressed_vocab_size != config.vocab_size) {
      return invalid(
          "engram_compressed_vocab_size is {}, so the checkpoint needs the tokenizer with that "
          "many "
          "token classes: give its tokenizer.json with --tokenizer, or choose one class per token "
          "with --set engram_compressed_vocab_size={}",
          config.engram_compressed_vocab_size,
          config.vocab_size);
    }
    return text::byte_level_tokenizer_json(static_cast<int32_t>(config.vocab_size));
  }
  CACHALOT_TRY(std::string json, read_file(flags.tokenizer));
  CACHALOT_TRY(const text::Tokenizer tokenizer, text::Tokenizer::parse(json, flags.tokenizer));
  if (tokenizer.vocab_size() > config.vocab_size) {
    return invalid("{} has {} tokens, but vocab_size is {}",
                   flags.tokenizer,
                   tokenizer.vocab_size(),
                   config.vocab_size);
  }
  return json;
}

Status synth(const SynthFlags& flags) {
  CACHALOT_TRY(model::ModelConfig config, chosen_config(flags));
  for (const std::string& assignment : flags.set) {
    CACHALOT_RETURN_IF_ERROR(model::set_config_value(config, assignment).with("--set"));
  }
  config.storage =
      flags.weights == "f32" ? model::WeightStorage::kF32 : model::WeightStorage::kOfficial;
  CACHALOT_RETURN_IF_ERROR(model::validate(config));
  CACHALOT_TRY(std::string tokenizer, chosen_tokenizer(flags, config));
  ThreadPool pool(flags.threads);
  CACHALOT_RETURN_IF_ERROR(model::synthesize(
      config, flags.out, {.seed = flags.seed, .tokenizer_json = std::move(tokenizer)}, pool));
  const model::Accounting sizes = model::account(config);
  std::fputs(fmt::format("{}: {} tensors, {:.1f} MB, {:.4g} M parameters\n",
                         flags.out,
                         sizes.tensors,
                         static_cast<double>(sizes.total_bytes) * 1e-6,
                         static_cast<double>(sizes.parameters.total) * 1e-6)
                 .c_str(),
             stderr);
  return {};
}

}  // namespace

void add_synth(CLI::App& app, Action& action) {
  auto flags = std::make_shared<SynthFlags>();
  CLI::App* command = app.add_subcommand("synth", "Write a checkpoint with random weights");
  auto* source = command->add_option_group("model");
  source->add_option(
      "--preset", flags->preset, "t1, t1-vision, micro, nano, bench-s, v41-flash or v41-slice");
  source->add_option("--config", flags->config, "A config.json");
  source->require_option(1);
  add_seed(*command, flags->seed, "Same seed, same bytes");
  command->add_option("--out", flags->out, "Directory to write")->required();
  command->add_option("--set", flags->set, "key=value: changes the config; repeatable")->take_all();
  command->add_option("--weights", flags->weights, "How weights are stored")
      ->check(CLI::IsMember({"official", "f32"}))
      ->capture_default_str();
  command->add_option(
      "--tokenizer", flags->tokenizer, "A tokenizer.json to copy; default: a byte-level one");
  add_threads(*command, flags->threads);
  command->callback([flags, &action] { action = [flags] { return synth(*flags); }; });
}

}  // namespace cachalot::cli
