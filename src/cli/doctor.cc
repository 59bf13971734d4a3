// cachalot doctor: what this machine and this build can do.
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "base/format.h"
#include "base/json.h"
#include "cli/command.h"
#include "ops/cpu/machine.h"
#include "ops/registry.h"

namespace cachalot::cli {
namespace {

constexpr ops::Backend kBackends[] = {ops::Backend::kRef, ops::Backend::kCpu, ops::Backend::kCuda};

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

// In bytes; zero where Linux does not say.
struct MemorySizes {
  int64_t total = 0;
  int64_t available = 0;  // without swapping: file caches give way
};

MemorySizes memory_sizes() {
  MemorySizes sizes;
  std::ifstream file("/proc/meminfo");
  std::string name, rest;
  for (int64_t kib = 0; file >> name >> kib; std::getline(file, rest)) {
    if (name == "MemTotal:") {
      sizes.total = kib << 10;
    } else if (name == "MemAvailable:") {
      sizes.available = kib << 10;
    }
  }
  return sizes;
}

bool built_in(ops::Backend backend) {
  return !ops::kernels(backend).linear.empty();
}

Status doctor(bool json) {
  const MemorySizes memory = memory_sizes();
  const auto threads = std::thread::hardware_concurrency();
  const std::vector<std::string> targets = ops::cpu::instruction_sets();
  JsonWriter w;
  w.begin_object().field("version", CACHALOT_VERSION).field("compiler", kCompiler);
  w.field("threads", threads)
      .field("memory_bytes", memory.total)
      .field("memory_available_bytes", memory.available);
  w.key("instruction_sets").begin_array();
  for (const std::string& target : targets) {
    w.value(target);
  }
  w.end_array().key("backends").begin_array();
  std::string text = fmt::format(
      "cachalot {}, built with {}\n{} threads, {:.1f} GiB memory, {:.1f} GiB available\n",
      CACHALOT_VERSION,
      kCompiler,
      threads,
      static_cast<double>(memory.total) / (1 << 30),
      static_cast<double>(memory.available) / (1 << 30));
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
