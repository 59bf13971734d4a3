// The flags of an engine under load, which serve and bench serve share.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cli/run_flags.h"
#include "engine/engine.h"

namespace cachalot::cli {

struct EngineFlags {
  RunFlags run;
  engine::EngineOptions engine;
  std::string prefix_cache = "on";
  int64_t window_ttl = 300;
  double disk_retention_hours = 72;
  double prefix_wait = 1;

  void add_to(CLI::App& app);
  engine::EngineOptions options() const;
};

}  // namespace cachalot::cli
