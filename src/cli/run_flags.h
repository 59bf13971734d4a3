// The run flags that score, run, chat, serve and bench share.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "engine/generator.h"

namespace cachalot::cli {

struct RunFlags {
  std::string model;
  std::string backend = "cpu";
  int threads = 0;
  std::string mode = "exact";
  std::string precision = "official";
  std::string tables = "auto";
  int64_t chunk = 512;
  std::string spec = "off";
  int64_t spec_length = 0;
  std::string dump_dir;
  std::string force_dir;
  // Of serve alone.
  int64_t page_tokens = 0;        // 0: a default of the model
  int64_t max_cached_tokens = 0;  // 0: bounded by memory alone

  void add_to(CLI::App& app);
  // --dump and --force, for commands that use make_observer().
  void add_dump_to(CLI::App& app);
  engine::GeneratorOptions generator_options() const {
    return {.chunk = chunk, .speculation = {.length = spec_length}};
  }
};

// Opens the model that the flags name; checks every flag.
Result<std::unique_ptr<engine::Runtime>> open_runtime(const RunFlags& flags);

// Null if the flags ask for neither a dump nor prescribed choices.
std::unique_ptr<engine::DumpObserver> make_observer(const RunFlags& flags);

// The sampling flags of run and chat.
struct SamplingFlags {
  engine::SamplingParams params{.temperature = 1.0f, .top_p = 0.95f};
  std::vector<std::string> stop;
  std::vector<std::string> logit_bias;  // "id=value"

  void add_to(CLI::App& app);
  // The params with the biases parsed.
  Result<engine::SamplingParams> resolve() const;
};

// The directory that -m names, or the embedded model.
std::string default_model();

}  // namespace cachalot::cli
