// The cachalot binary: exit status 0 on success, 1 on a failed operation, 2 on wrong usage.
#include <cstdio>

#include "base/format.h"
#include "cli/command.h"

int main(int argc, char** argv) {
  CLI::App app("Cachalot: loads, runs and trains models of the DeepSeek-V4.1 architecture.",
               "cachalot");
  app.require_subcommand(1);
  app.set_version_flag("--version", CACHALOT_VERSION);
  app.set_help_all_flag("--help-all", "Print the options of every command");
  cachalot::cli::Action action;
  for (auto* add : {cachalot::cli::add_doctor,
                    cachalot::cli::add_synth,
                    cachalot::cli::add_inspect,
                    cachalot::cli::add_verify,
                    cachalot::cli::add_tokenize,
                    cachalot::cli::add_score,
                    cachalot::cli::add_run,
                    cachalot::cli::add_chat,
                    cachalot::cli::add_serve,
                    cachalot::cli::add_bench,
                    cachalot::cli::add_train,
                    cachalot::cli::add_export,
                    cachalot::cli::add_eval}) {
    add(app, action);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (argc > 1 && argv[1][0] != '-' && app.get_subcommands().empty()) {
      std::fputs(
          fmt::format("cachalot: there is no command '{}'; cachalot --help lists them\n", argv[1])
              .c_str(),
          stderr);
      return 2;
    }
    return app.exit(error) == 0 ? 0 : 2;
  }
  const cachalot::Status status = action();
  if (!status.ok()) {
    std::fputs(fmt::format("cachalot: {}\n", status.message()).c_str(), stderr);
    return 1;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fputs("cachalot: standard output takes no more\n", stderr);
    return 1;
  }
  return 0;
}
