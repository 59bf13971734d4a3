// How a subcommand plugs into the binary: one add_*() per file, called by main.cc in help order.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"

namespace cachalot::cli {

// Registers the options of one subcommand on `app` and stores its action in `action` when the
// subcommand is chosen. The action prints results on stdout and everything else on stderr.
using Action = std::function<Status()>;

void add_doctor(CLI::App& app, Action& action);
void add_synth(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_tokenize(CLI::App& app, Action& action);
void add_score(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_chat(CLI::App& app, Action& action);
void add_serve(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_bench_speculation(CLI::App& bench, Action& action);  // below add_bench()
void add_train(CLI::App& app, Action& action);
void add_export(CLI::App& app, Action& action);
void add_eval(CLI::App& app, Action& action);

// --threads of every command that computes.
inline void add_threads(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "Threads; 0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

// --seed. The parser alone would take -1, and 2^64 as 2^64 - 1.
inline void add_seed(CLI::App& app, uint64_t& seed, const std::string& description) {
  app.add_option("--seed", seed, description)
      ->check([](const std::string& text) {
        uint64_t value = 0;
        const char* end = text.data() + text.size();
        const auto [stop, failure] = std::from_chars(text.data(), end, value);
        return failure == std::errc() && stop == end
                   ? std::string()
                   : "'" + text + "' is not an integer in [0, 2^64)";
      })
      ->capture_default_str();
}

}  // namespace cachalot::cli
