#include "engine/generator.h"

#include <algorithm>

#include "base/clock.h"
#include "base/format.h"
#include "engine/stop_matcher.h"
#include "text/detokenizer.h"

namespace cachalot::engine {

struct Generator::Running {
  size_t index;
  const GenerateRequest* request;
  GenerateResult* result;
  std::unique_ptr<kvcache::SequenceCache> cache;
  Sampler sampler;
  text::Detokenizer detokenizer;
  StopMatcher stop;
  int64_t prefilled = 0;
  int32_t next = 0;  // the token to run in the next decode step
  double started = 0;
  double first_token = 0;
  bool finished = false;
};

namespace {

std::span<const float> logits_row(const TensorView& logits, int64_t row) {
  return {logits.as<float>() + row * logits.dim(1), static_cast<size_t>(logits.dim(1))};
}

bool ends(const GenerateRequest& request, int32_t token, int64_t eos) {
  return (!request.ignore_eos && token == eos) ||
         std::find(request.stop_ids.begin(), request.stop_ids.end(), token) !=
             request.stop_ids.end();
}

void visit_logits(DumpObserver* observer, const TensorView& logits, int64_t start) {
  if (observer != nullptr) {
    const auto first = static_cast<int32_t>(start);
    observer->visit("logits", logits, {.row_begin = {}, .start = {&first, 1}});
  }
}

}  // namespace

Status Generator::advance(std::vector<std::unique_ptr<Running>>& running,
                          model::StepRunner& runner,
                          DumpObserver* observer,
                          const Listener& listener) {
  std::vector<model::StepSequence> sequences;
  std::vector<int32_t> accepted;
  int64_t budget = options_.chunk;
  std::vector<size_t> members;
  for (size_t i = 0; i < running.size(); ++i) {
    Running& r = *running[i];
    const auto prompt = static_cast<int64_t>(r.request->prompt.size());
    model::StepSequence sequence{.view = &r.cache->view()};
    if (r.prefilled < prompt) {
      const int64_t n = std::min(budget, prompt - r.prefilled);
      if (n == 0) {
        continue;
      }
      budget -= n;
      sequence.tokens = {r.request->prompt.data() + r.prefilled, static_cast<size_t>(n)};
      sequence.no_logits = observer == nullptr && r.prefilled + n < prompt;
      sequence.all_logits = observer != nullptr;
      r.prefilled += n;
    } else {
      sequence.tokens = {&r.next, 1};
    }
    const auto n = static_cast<int64_t>(sequence.tokens.size());
    CACHALOT_RETURN_IF_ERROR(r.cache->reserve(r.cache->view().length + n));
    accepted.push_back(static_cast<int32_t>(n));
    sequences.push_back(sequence);
    members.push_back(i);
  }
  CACHALOT_TRY(const TensorView logits, runner.run(sequences, observer));
  visit_logits(observer, logits, sequences[0].view->length);
  CACHALOT_RETURN_IF_ERROR(runner.commit(accepted));

  int64_t row = 0;
  for (size_t m = 0; m < members.size(); ++m) {
    Running& r = *running[members[m]];
    if (sequences[m].no_logits) {
      continue;
    }
    row += sequences[m].all_logits ? accepted[m] : 1;
    if (r.prefilled < static_cast<int64_t>(r.request->prompt.size())) {
      continue;
    }
    const std::span<const float> values = logits_row(logits, row - 1);
    const int32_t token = r.sampler.sample(values);
    r.sampler.accept(token);
    if (r.first_token == 0) {
      r.first_token = now_seconds();
    }
    GenerateResult& result = *r.result;
    std::string piece;
    if (ends(*r.request, token, runtime_.model().config.eos_token_id)) {
      result.finish = FinishReason::kStop;
      r.finished = true;
    } else {
      const std::vector<float> logprobs = log_softmax(values);
      result.token_ids.push_back(token);
      if (listener.on_token) {
        listener.on_token(r.index, token);
      }
      result.logprobs.push_back(logprobs[static_cast<size_t>(token)]);
      if (r.request->top_logprobs > 0) {
        result.top.push_back(top_logprobs(logprobs, r.request->top_logprobs));
      }
      piece = r.stop.push(r.detokenizer.push(token));
      r.next = token;
      if (r.stop.stopped()) {
        result.finish = FinishReason::kStop;
        r.finished = true;
      } else if (static_cast<int64_t>(result.token_ids.size()) >= r.request->max_tokens) {
        r.finished = true;
      }
    }
    if (r.finished) {
      piece += r.stop.push(r.detokenizer.finish());
      piece += r.stop.finish();
      const double now = now_seconds();
      result.prefill_seconds = r.first_token - r.started;
      result.decode_seconds = now - r.first_token;
    }
    result.text += piece;
    if (listener.on_text && !piece.empty()) {
      listener.on_text(r.index, piece);
    }
  }
  return {};
}

Result<std::vector<GenerateResult>> Generator::generate(
    const std::vector<GenerateRequest>& requests,
    DumpObserver* observer,
    const Listener& listener) {
  const model::ModelConfig& config = runtime_.model().config;
  for (size_t i = 0; i < requests.size(); ++i) {
    const GenerateRequest& request = requests[i];
    if (request.prompt.empty()) {
      return invalid("request {}: the prompt is empty", i);
    }
    if (request.max_tokens < 1) {
      return invalid("request {}: max_tokens is {}, must be at least 1", i, request.max_tokens);
    }
    CACHALOT_RETURN_IF_ERROR(
        validate(request.sampling, config.vocab_size).with(fmt::format("request {}", i)));
  }
  std::vector<GenerateResult> results(requests.size());
  CACHALOT_TRY(const std::unique_ptr<model::StepRunner> runner, runtime_.make_runner());
  std::vector<std::unique_ptr<Running>> running;
  size_t next = 0;
  const auto limit = observer != nullptr ? size_t{1} : static_cast<size_t>(options_.max_running);
  while (next < requests.size() || !running.empty()) {
    while (next < requests.size() && running.size() < limit) {
      const GenerateRequest& request = requests[next];
      CACHALOT_TRY(std::unique_ptr<kvcache::SequenceCache> cache, runtime_.make_cache());
      running.emplace_back(new Running{.index = next,
                                       .request = &request,
                                       .result = &results[next],
                                       .cache = std::move(cache),
                                       .sampler = Sampler(request.sampling),
                                       .detokenizer = text::Detokenizer(runtime_.tokenizer()),
                                       .stop = StopMatcher(request.stop),
                                       .started = now_seconds()});
      running.back()->sampler.see_prompt(request.prompt);
      if (observer != nullptr) {
        CACHALOT_RETURN_IF_ERROR(observer->begin(static_cast<int64_t>(next)));
      }
      ++next;
    }
    CACHALOT_RETURN_IF_ERROR(advance(running, *runner, observer, listener));
    if (observer != nullptr && running[0]->finished) {
      CACHALOT_RETURN_IF_ERROR(observer->end());
    }
    std::erase_if(running, [](const auto& r) { return r->finished; });
  }
  return results;
}

Result<Generator::Score> Generator::score(const std::vector<int32_t>& tokens,
                                          int64_t top,
                                          DumpObserver* observer) {
  Score score;
  if (tokens.empty()) {
    return invalid("there are no tokens to score");
  }
  score.logprobs.resize(tokens.size());
  score.top.resize(tokens.size());
  CACHALOT_TRY(const std::unique_ptr<model::StepRunner> runner, runtime_.make_runner());
  CACHALOT_TRY(const std::unique_ptr<kvcache::SequenceCache> cache, runtime_.make_cache());
  const auto total = static_cast<int64_t>(tokens.size());
  for (int64_t begin = 0; begin < total; begin += options_.chunk) {
    const int64_t n = std::min(options_.chunk, total - begin);
    CACHALOT_RETURN_IF_ERROR(cache->reserve(begin + n));
    const model::StepSequence sequence{.view = &cache->view(),
                                       .tokens = {tokens.data() + begin, static_cast<size_t>(n)},
                                       .all_logits = true};
    CACHALOT_TRY(const TensorView logits, runner->run({&sequence, 1}, observer));
    visit_logits(observer, logits, begin);
    for (int64_t i = 0; i < n && begin + i + 1 < total; ++i) {
      const auto predicted = static_cast<size_t>(begin + i + 1);
      const std::vector<float> logprobs = log_softmax(logits_row(logits, i));
      score.logprobs[predicted] = logprobs[static_cast<size_t>(tokens[predicted])];
      score.top[predicted] = top_logprobs(logprobs, top);
    }
    const auto accepted = static_cast<int32_t>(n);
    CACHALOT_RETURN_IF_ERROR(runner->commit({&accepted, 1}));
  }
  return score;
}

}  // namespace cachalot::engine
