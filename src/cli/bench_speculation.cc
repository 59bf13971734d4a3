// cachalot bench speculation: whole generations with and without the drafter, in turns.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <memory>

#include "base/clock.h"
#include "base/format.h"
#include "base/json.h"
#include "base/rng.h"
#include "cli/command.h"
#include "cli/run_flags.h"

namespace cachalot::cli {
namespace {

struct SpeculationFlags {
  RunFlags run;
  std::vector<int64_t> batch = {1};
  int64_t prompt = 32;
  int64_t tokens = 128;
  int repeats = 15;
  double temperature = 0;
  bool agree = false;
};

// One side of the comparison.
struct Side {
  std::unique_ptr<engine::Runtime> runtime;
  std::unique_ptr<engine::Generator> generator;

  static Result<Side> open(RunFlags flags, const char* speculation, int64_t batch) {
    flags.spec = speculation;
    Side side;
    CACHALOT_TRY(side.runtime, open_runtime(flags));
    engine::GeneratorOptions options = flags.generator_options();
    options.max_running = batch;
    side.generator = std::make_unique<engine::Generator>(*side.runtime, options);
    return side;
  }
};

// What one generation took and what became of its drafts.
struct Pass {
  double seconds = 0;
  double processor = 0;  // seconds that its threads had a processor
  int64_t tokens = 0;
  int64_t drafted = 0;
  int64_t accepted = 0;
};

Result<Pass> generate(Side& side, const std::vector<engine::GenerateRequest>& requests) {
  Pass pass;
  const double begin = now_seconds();
  const std::clock_t processor = std::clock();
  CACHALOT_TRY(const auto results, side.generator->generate(requests));
  pass.seconds = now_seconds() - begin;
  pass.processor = static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC;
  for (const engine::GenerateResult& result : results) {
    pass.tokens += static_cast<int64_t>(result.token_ids.size());
    pass.drafted += result.draft_tokens;
    pass.accepted += result.accepted_tokens;
  }
  return pass;
}

std::vector<engine::GenerateRequest> make_requests(const SpeculationFlags& flags,
                                                   int64_t vocab,
                                                   int64_t batch,
                                                   int repeat) {
  std::vector<engine::GenerateRequest> requests;
  for (int64_t i = 0; i < batch; ++i) {
    engine::GenerateRequest request;
    const Philox rng(static_cast<uint64_t>(1000 * repeat + i));
    for (int64_t k = 0; k < flags.prompt; ++k) {
      request.prompt.push_back(
          static_cast<int32_t>(rng.uniform(static_cast<uint64_t>(k)) * static_cast<double>(vocab)));
    }
    request.sampling.temperature = static_cast<float>(flags.temperature);
    request.sampling.seed = static_cast<uint64_t>(repeat);
    if (flags.agree) {
      request.sampling.logit_bias = {{3, 100.0f}};
    }
    request.max_tokens = flags.tokens;
    request.ignore_eos = true;
    requests.push_back(std::move(request));
  }
  return requests;
}

void write_quartiles(JsonWriter& w, const std::string& name, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t last = values.size() - 1;
  w.field(name + "_median", values[last / 2]);
  w.field(name + "_quarter", values[last / 4])
      .field(name + "_three_quarters", values[3 * last / 4]);
}

// Every repeat is off, on, off: the ratio is of "on" to the mean of its neighbours, and the noise
// is that of the neighbours to each other. What the machine does beside touches all three.
Status bench_speculation(const SpeculationFlags& flags) {
  for (const int64_t batch : flags.batch) {
    CACHALOT_TRY(Side off, Side::open(flags.run, "off", batch));
    CACHALOT_TRY(Side on, Side::open(flags.run, "dspark", batch));
    const int64_t vocab = off.runtime->config().vocab_size;
    std::vector<double> ratios, noise, processor_ratios, processor_noise;
    Pass total;
    double seconds = 0;
    // Measured from the first token on: learning what drafts are worth is part of the price.
    for (int repeat = 0; repeat < flags.repeats; ++repeat) {
      const auto requests = make_requests(flags, vocab, batch, repeat);
      if (repeat == 0) {
        CACHALOT_RETURN_IF_ERROR(generate(off, requests).status());  // reads the files
      }
      CACHALOT_TRY(const Pass before, generate(off, requests));
      CACHALOT_TRY(const Pass with, generate(on, requests));
      CACHALOT_TRY(const Pass after, generate(off, requests));
      ratios.push_back(2 * with.seconds / (before.seconds + after.seconds));
      noise.push_back(after.seconds / before.seconds);
      processor_ratios.push_back(2 * with.processor / (before.processor + after.processor));
      processor_noise.push_back(after.processor / before.processor);
      seconds += (before.seconds + after.seconds) / 2;
      total.tokens += with.tokens;
      total.drafted += with.drafted;
      total.accepted += with.accepted;
    }
    JsonWriter w;
    w.begin_object().field("name", "speculation").field("backend", flags.run.backend);
    w.field("shape",
            fmt::format("batch {} prompt {} tokens {}", batch, flags.prompt, flags.tokens));
    write_quartiles(w, "ratio", ratios);
    w.field("ratio_first", ratios.front());
    write_quartiles(w, "noise", noise);
    // Without the time in which others ran; on a device it says nothing.
    write_quartiles(w, "processor_ratio", processor_ratios);
    write_quartiles(w, "processor_noise", processor_noise);
    w.field("off_tokens_per_s", static_cast<double>(total.tokens) / seconds);
    w.field("drafted", total.drafted).field("accepted", total.accepted);
    w.field("tokens", total.tokens).end_object();
    std::fputs((w.text() + "\n").c_str(), stdout);
    std::fflush(stdout);
  }
  return {};
}

}  // namespace

void add_bench_speculation(CLI::App& bench, Action& action) {
  auto flags = std::make_shared<SpeculationFlags>();
  CLI::App* command = bench.add_subcommand(
      "speculation", "Time with the drafter over time without, in interleaved runs");
  flags->run.add_to(*command);
  command->add_option("--batch", flags->batch, "Requests at once; several: one measurement each")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--prompt", flags->prompt, "Random tokens before")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--tokens", flags->tokens, "Tokens that each request generates")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--repeats", flags->repeats, "Runs off, on, off")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--temperature", flags->temperature)->capture_default_str();
  command->add_flag("--agree",
                    flags->agree,
                    "Bias every request to one token: drafter and target agree on all drafts");
  command->callback([flags, &action] { action = [flags] { return bench_speculation(*flags); }; });
}

}  // namespace cachalot::cli
