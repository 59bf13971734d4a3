// Generation and scoring of given requests over a Runtime, in the caller's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/dump.h"
#include "engine/runtime.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"

namespace cachalot::engine {

using TokenLogprob = std::pair<int32_t, float>;

struct GenerateRequest {
  std::vector<int32_t> prompt;      // at least one token
  std::vector<PromptImage> images;  // as EngineRequest has them
  SamplingParams sampling;
  int64_t max_tokens = 16;
  std::vector<std::string> stop;  // ends the text before the first of these
  std::vector<int32_t> stop_ids;  // in addition to EOS
  bool ignore_eos = false;
  int64_t top_logprobs = 0;  // alternatives per output token
};

enum class FinishReason : uint8_t { kStop, kLength };

struct GenerateResult {
  std::vector<int32_t> token_ids;  // without the EOS that ended it
  std::vector<float> logprobs;     // of token_ids, under the unmodified distribution
  std::vector<std::vector<TokenLogprob>> top;
  std::string text;
  FinishReason finish = FinishReason::kLength;
  double prefill_seconds = 0;
  double decode_seconds = 0;
  int64_t draft_tokens = 0;     // drafts that the target judged
  int64_t accepted_tokens = 0;  // of them, those that it kept
};

struct GeneratorOptions {
  int64_t chunk = 512;        // prompt tokens per step
  int64_t max_running = 16;   // requests in flight
  bool prefix_cache = false;  // whether a call finds prefixes of earlier ones
  SpeculationOptions speculation;
};

class Generator {
 public:
  Generator(Runtime& runtime, GeneratorOptions options) : runtime_(runtime), options_(options) {}

  // Told of a request's output while it runs, by the request's index. Either may be null.
  struct Listener {
    // Text as it becomes certain: whole characters, and nothing that a stop string may still claim.
    std::function<void(size_t, std::string_view)> on_text;
    // Every output token, EOS apart.
    std::function<void(size_t, int32_t)> on_token;
  };

  // Runs all requests; a result depends on its own request alone (sampled ones with a drafter: see
  // speculation.h). A runtime with a drafter speculates. With an observer requests run one after
  // the other, and nothing is drafted: rejected rows have no place in a dump.
  Result<std::vector<GenerateResult>> generate(const std::vector<GenerateRequest>& requests,
                                               DumpObserver* observer = nullptr,
                                               const Listener& listener = {});

  // The log-probability of every token given those before it. logprobs[0] and top[0] are empty. A
  // drafter shows the observer its context, and a block of best drafts behind every chunk.
  struct Score {
    std::vector<std::optional<float>> logprobs;
    std::vector<std::vector<TokenLogprob>> top;
  };
  Result<Score> score(const std::vector<int32_t>& tokens,
                      int64_t top,
                      DumpObserver* observer = nullptr);

 private:
  // The scheduler, made by the first call.
  Result<Scheduler*> scheduler();

  Runtime& runtime_;
  GeneratorOptions options_;
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace cachalot::engine
