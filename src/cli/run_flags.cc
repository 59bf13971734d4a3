#include "cli/run_flags.h"

#include <charconv>
#include <filesystem>

#include "base/file.h"
#include "base/format.h"
#include "cli/command.h"

namespace cachalot::cli {

std::string default_model() {
  // Beside the binary's source tree: build/cachalot finds models/ one level up.
  std::error_code code;
  const auto binary = std::filesystem::read_symlink("/proc/self/exe", code);
  for (auto folder = binary.parent_path(); !folder.empty() && folder != folder.root_path();
       folder = folder.parent_path()) {
    const auto candidate = folder / "models" / "krill";
    if (std::filesystem::exists(candidate / "config.json", code)) {
      return candidate.string();
    }
  }
  return {};
}

void RunFlags::add_to(CLI::App& app) {
  app.add_option("-m,--model", model, "Checkpoint directory; default: the embedded model");
  app.add_option("--backend", backend, "Kernels: ref, cpu or cuda")
      ->check(CLI::IsMember({"ref", "cpu", "cuda"}))
      ->capture_default_str();
  add_threads(app, threads);
  app.add_option("--mode",
                 mode,
                 "exact: every row through every layer; replay: bounded replays, an approximation; "
                 "halo: replays wide enough for the bits of exact")
      ->check(CLI::IsMember({"exact", "replay", "halo"}))
      ->capture_default_str();
  app.add_option("--precision",
                 precision,
                 "official: BF16 and FP8 activations, as trained; f32: FP32 activations")
      ->check(CLI::IsMember({"official", "f32"}))
      ->capture_default_str();
  app.add_option(
         "--engram-tables",
         tables,
         "Of a device: on the device; on the host, which sends the rows of each step; auto: on "
         "the host if they take over a quarter of the device's memory")
      ->check(CLI::IsMember({"auto", "device", "host"}))
      ->capture_default_str();
  app.add_option("--chunk", chunk, "Prefill chunk in tokens")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--spec", spec, "Speculation: off or dspark")
      ->check(CLI::IsMember({"off", "dspark"}))
      ->capture_default_str();
  app.add_option("--spec-length",
                 spec_length,
                 "Drafts to verify per step; 0: as confidence and measured speed advise")
      ->check(CLI::Range(int64_t{0}, int64_t{64}))
      ->capture_default_str();
}

void RunFlags::add_dump_to(CLI::App& app) {
  app.add_option(
      "--dump", dump_dir, "Write intermediate values of each request into this directory");
  app.add_option("--force", force_dir, "Use router choices and selections of a dump");
}

Result<std::unique_ptr<engine::Runtime>> open_runtime(const RunFlags& flags) {
  engine::RuntimeOptions options;
  options.backend = flags.backend == "ref"   ? ops::Backend::kRef
                    : flags.backend == "cpu" ? ops::Backend::kCpu
                                             : ops::Backend::kCuda;
  options.threads = flags.threads;
  options.mode = flags.mode == "replay" ? engine::Mode::kReplay
                 : flags.mode == "halo" ? engine::Mode::kHalo
                                        : engine::Mode::kExact;
  options.precision =
      flags.precision == "f32" ? model::Precision::kF32 : model::Precision::kOfficial;
  options.tables = flags.tables == "device" ? model::TablePlace::kDevice
                   : flags.tables == "host" ? model::TablePlace::kHost
                                            : model::TablePlace::kAuto;
  options.page_tokens = flags.page_tokens;
  options.max_cached_tokens = flags.max_cached_tokens;
  options.draft = flags.spec == "dspark";
  const std::string directory = flags.model.empty() ? default_model() : flags.model;
  if (directory.empty()) {
    return error(Code::kNotFound, "no embedded model is installed; name a checkpoint with -m DIR");
  }
  return engine::Runtime::open(directory, options);
}

std::unique_ptr<engine::DumpObserver> make_observer(const RunFlags& flags) {
  if (flags.dump_dir.empty() && flags.force_dir.empty()) {
    return nullptr;
  }
  return std::make_unique<engine::DumpObserver>(flags.dump_dir, flags.force_dir);
}

void SamplingFlags::add_to(CLI::App& app) {
  app.add_option("--temperature", params.temperature, "0: always the best token")
      ->capture_default_str();
  app.add_option("--top-p", params.top_p, "Keep the best tokens of this mass")
      ->capture_default_str();
  app.add_option("--top-k", params.top_k, "Keep the best k tokens; 0: all")->capture_default_str();
  app.add_option("--min-p", params.min_p, "Drop tokens below this share of the best")
      ->capture_default_str();
  add_seed(app, params.seed, "Seed of the draws");
  app.add_option("--repetition-penalty",
                 params.repetition_penalty,
                 "Makes tokens of prompt and output less likely by this factor; 1: off")
      ->capture_default_str();
  app.add_option("--frequency-penalty",
                 params.frequency_penalty,
                 "Subtracted from a token's logit each time that it is in the output")
      ->capture_default_str();
  app.add_option("--presence-penalty",
                 params.presence_penalty,
                 "Subtracted from a token's logit once if it is in the output")
      ->capture_default_str();
  app.add_option("--logit-bias", logit_bias, "ID=VALUE, added to the token's logit (repeatable)");
  app.add_option("--stop", stop, "End the text before this string (repeatable)");
}

Result<engine::SamplingParams> SamplingFlags::resolve() const {
  engine::SamplingParams resolved = params;
  for (const std::string& text : logit_bias) {
    int32_t id = 0;
    float value = 0;
    const size_t equals = text.find('=');
    const char* end = text.data() + text.size();
    const auto is_whole = [](std::from_chars_result read, const char* last) {
      return read.ec == std::errc() && read.ptr == last;
    };
    const bool good =
        equals != std::string::npos &&
        is_whole(std::from_chars(text.data(), text.data() + equals, id), text.data() + equals) &&
        is_whole(std::from_chars(text.data() + equals + 1, end, value), end);
    if (!good) {
      return invalid("--logit-bias '{}' is not ID=VALUE", text);
    }
    resolved.logit_bias[id] = value;
  }
  return resolved;
}

}  // namespace cachalot::cli
