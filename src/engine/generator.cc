#include "engine/generator.h"

#include <algorithm>

#include "base/clock.h"
#include "base/format.h"

namespace cachalot::engine {
namespace {

EngineRequest engine_request(const GenerateRequest& request) {
  return {.prompt = request.prompt,
          .images = request.images,
          .sampling = request.sampling,
          .max_tokens = request.max_tokens,
          .stop = request.stop,
          .stop_ids = request.stop_ids,
          .ignore_eos = request.ignore_eos,
          .logprobs = true,
          .top_logprobs = request.top_logprobs};
}

// Collects the events of one request.
struct Collector {
  GenerateResult& result;
  const Generator::Listener& listener;
  size_t index;
  double added = now_seconds();
  double first_token = 0;
  Status status;

  void take(Event event) {
    if (event.first) {
      first_token = now_seconds();
      result.prefill_seconds = first_token - added - event.queue_seconds;
    }
    result.draft_tokens += event.draft_tokens;
    result.accepted_tokens += event.accepted_tokens;
    for (TokenOutput& token : event.tokens) {
      result.token_ids.push_back(token.id);
      result.logprobs.push_back(token.logprob);
      if (!token.top.empty()) {
        result.top.push_back(std::move(token.top));
      }
      if (listener.on_token) {
        listener.on_token(index, token.id);
      }
    }
    result.text += event.text;
    if (listener.on_text && !event.text.empty()) {
      listener.on_text(index, event.text);
    }
    if (event.done) {
      result.finish =
          event.reason == StopReason::kLength ? FinishReason::kLength : FinishReason::kStop;
      result.decode_seconds = now_seconds() - first_token;
    }
    status = event.status;
  }
};

}  // namespace

Result<Scheduler*> Generator::scheduler() {
  if (scheduler_ == nullptr) {
    CACHALOT_TRY(scheduler_,
                 Scheduler::create(runtime_,
                                   {.chunk = options_.chunk,
                                    .max_running = options_.max_running,
                                    .prefix_cache = options_.prefix_cache,
                                    .speculation = options_.speculation}));
  }
  return scheduler_.get();
}

Result<std::vector<GenerateResult>> Generator::generate(
    const std::vector<GenerateRequest>& requests,
    DumpObserver* observer,
    const Listener& listener) {
  CACHALOT_TRY(Scheduler* const scheduler, this->scheduler());
  for (size_t i = 0; i < requests.size(); ++i) {
    CACHALOT_RETURN_IF_ERROR(
        scheduler->check(engine_request(requests[i])).with(fmt::format("request {}", i)));
  }
  std::vector<GenerateResult> results(requests.size());
  std::vector<Collector> collectors;
  for (size_t i = 0; i < requests.size(); ++i) {
    collectors.push_back({.result = results[i], .listener = listener, .index = i});
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    if (observer != nullptr) {
      CACHALOT_RETURN_IF_ERROR(observer->begin(static_cast<int64_t>(i)));
    }
    scheduler->add(i, engine_request(requests[i]), [&collectors](RequestId id, Event event) {
      collectors[id].take(std::move(event));
    });
    if (observer == nullptr && i + 1 < requests.size()) {
      continue;  // with an observer requests run one after the other
    }
    while (!scheduler->idle()) {
      scheduler->step(observer);
    }
    if (observer != nullptr) {
      CACHALOT_RETURN_IF_ERROR(observer->end());
    }
  }
  for (size_t i = 0; i < collectors.size(); ++i) {
    CACHALOT_RETURN_IF_ERROR(collectors[i].status.with(fmt::format("request {}", i)));
  }
  return results;
}

Result<Generator::Score> Generator::score(const std::vector<int32_t>& tokens,
                                          int64_t top,
                                          DumpObserver* observer) {
  CACHALOT_TRY(Scheduler* const scheduler, this->scheduler());
  const auto request = [&] {
    return EngineRequest{
        .prompt = tokens, .max_tokens = 0, .top_logprobs = top, .prompt_logprobs = true};
  };
  CACHALOT_RETURN_IF_ERROR(scheduler->check(request()));
  Event result;
  scheduler->add(0, request(), [&result](RequestId, Event event) { result = std::move(event); });
  while (!scheduler->idle()) {
    scheduler->step(observer);
  }
  CACHALOT_RETURN_IF_ERROR(result.status);
  Score score;
  score.logprobs.resize(tokens.size());
  score.top.resize(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (std::optional<TokenOutput>& token = result.prompt[i]; token.has_value()) {
      score.logprobs[i] = token->logprob;
      score.top[i] = std::move(token->top);
    }
  }
  return score;
}

}  // namespace cachalot::engine
