// cachalot doctor: what this machine and this build can do.
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <thread>

#include "base/format.h"
#include "base/json.h"
#include "cli/command.h"
#include "ops/cpu/machine.h"
#include "ops/registry.h"

namespace cachalot::cli {
namespace {

constexpr ops::Backend kBackends[] = {ops::Backend::kRef, ops::Backend::kCpu, ops::Backend::kCuda};

bool built_in(ops::Backend backend) {
  return !ops::kernels(backend).linear.empty();
}

Status doctor(bool json) {
  struct sysinfo memory{};
  ::sysinfo(&memory);
  const uint64_t total = uint64_t{memory.totalram} * memory.mem_unit;
  const uint64_t available = uint64_t{memory.freeram + memory.bufferram} * memory.mem_unit;
  const auto threads = std::thread::hardware_concurrency();
  const std::vector<std::string> targets = ops::cpu::instruction_sets();
  JsonWriter w;
  w.begin_object().field("version", CACHALOT_VERSION).field("compiler", __VERSION__);
  w.field("threads", threads).field("memory_bytes", total).field("memory_free_bytes", available);
  w.key("instruction_sets").begin_array();
  for (const std::string& target : targets) {
    w.value(target);
  }
  w.end_array().key("backends").begin_array();
  std::string text =
      fmt::format("cachalot {} ({})\n{} threads, {:.1f} GiB memory, {:.1f} GiB free\n",
                  CACHALOT_VERSION,
                  __VERSION__,
                  threads,
                  static_cast<double>(total) / (1 << 30),
                  static_cast<double>(available) / (1 << 30));
  text += "instruction sets (first is used):";
  for (const std::string& target : targets) {
    text += " " + target;
  }
  text += "\n";
  for (ops::Backend backend : kBackends) {
    w.begin_object()
        .field("name", ops::backend_name(backend))
        .field("built_in", built_in(backend))
        .key("kernels")
        .begin_object();
    text += fmt::format("\nbackend {}: {}\n",
                        ops::backend_name(backend),
                        built_in(backend) ? "available" : "not in this build");
    if (built_in(backend)) {
      for (const ops::KernelName& op : ops::kernel_names(backend)) {
        w.key(op.op).begin_array();
        text += fmt::format("  {:<16}", op.op);
        for (std::string_view kernel : op.kernels) {
          w.value(kernel);
          text += fmt::format(" {}", kernel);
        }
        w.end_array();
        text += "\n";
      }
    }
    w.end_object().end_object();
  }
  w.end_array().end_object();
  std::fputs((json ? w.text() + "\n" : text).c_str(), stdout);
  return {};
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command = app.add_subcommand("doctor", "Devices, instruction sets, kernels, versions");
  command->add_flag("--json", *json, "One JSON document");
  command->callback([json, &action] { action = [json] { return doctor(*json); }; });
}

}  // namespace cachalot::cli
