// cachalot bench serve.
#pragma once

#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace cachalot::cli {

void add_bench_serve(CLI::App& bench, Action& action);

}  // namespace cachalot::cli
