// cachalot verify: names every tensor of a checkpoint that does not fit; if all do, reads them and
// names every one with values that cannot be.
#include <cstdio>
#include <memory>

#include "base/format.h"
#include "cli/command.h"
#include "model/accounting.h"
#include "model/checkpoint.h"

namespace cachalot::cli {
namespace {

struct VerifyFlags {
  std::string directory;
  int threads = 0;
};

Status verify(const VerifyFlags& flags) {
  CACHALOT_TRY(const model::Checkpoint checkpoint,
               model::Checkpoint::open(flags.directory, model::Checkpoint::Values::kUnchecked));
  ThreadPool pool(flags.threads);
  const std::vector<model::ValueFault> faults = checkpoint.verify(pool);
  for (const model::ValueFault& fault : faults) {
    std::fputs((to_string(fault) + "\n").c_str(), stdout);
  }
  if (!faults.empty()) {
    return error(Code::kDataLoss, "'{}': {} damaged tensors", flags.directory, faults.size());
  }
  const model::Accounting sizes = model::account(checkpoint.config());
  std::fputs(
      fmt::format(
          "{}: {} tensors, {} bytes, no fault\n", flags.directory, sizes.tensors, sizes.total_bytes)
          .c_str(),
      stdout);
  return {};
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* command = app.add_subcommand(
      "verify", "Read every tensor: names, shapes, dtypes, bounds, NaN and infinite values");
  command->add_option("directory", flags->directory, "Checkpoint directory")->required();
  add_threads(*command, flags->threads);
  command->callback([flags, &action] { action = [flags] { return verify(*flags); }; });
}

}  // namespace cachalot::cli
