#include "engine/output.h"

#include <algorithm>

#include "base/format.h"

namespace cachalot::engine {

TokenOutput token_output(std::span<const float> logits, int32_t token, int64_t top) {
  const std::vector<float> logprobs = log_softmax(logits);
  return {.id = token,
          .logprob = logprobs[static_cast<size_t>(token)],
          .top = top_logprobs(logprobs, top)};
}

Output::Output(const EngineRequest& request,
               const text::Tokenizer& tokenizer,
               int64_t max_tokens,
               int32_t eos)
    : request_(request),
      max_tokens_(max_tokens),
      eos_(eos),
      sampler_(request.sampling),
      detokenizer_(tokenizer),
      stop_(request.stop) {
  sampler_.see_prompt(request.prompt);
}

bool Output::next(std::span<const float> logits, Event& event, const Draft* draft) {
  TokenConstraint* const constraint = request_.constraint.get();
  const bool masked = constraint != nullptr && constraint->fill(allowed_);
  const std::span<const uint32_t> allowed =
      masked ? std::span<const uint32_t>(allowed_) : std::span<const uint32_t>();
  std::optional<Verdict> verdict;
  if (draft != nullptr) {
    verdict = judge(sampler_, logits, allowed, *draft);
  } else if (const std::optional<int32_t> drawn = sampler_.sample(logits, allowed)) {
    verdict = Verdict{*drawn, false};
  }
  if (!verdict.has_value()) {
    event.status = error(Code::kFailedPrecondition, "the constraint allows no token");
    return false;
  }
  const int32_t token = verdict->token;
  sampler_.accept(token);
  if ((!request_.ignore_eos && token == eos_) ||
      std::find(request_.stop_ids.begin(), request_.stop_ids.end(), token) !=
          request_.stop_ids.end()) {
    end(StopReason::kEos, event);
    return verdict->kept;
  }
  ++count_;
  event.tokens.push_back(request_.logprobs || request_.top_logprobs > 0
                             ? token_output(logits, token, request_.top_logprobs)
                             : TokenOutput{.id = token});
  event.text += stop_.push(detokenizer_.push(token));
  if (constraint != nullptr && !constraint->accept(token)) {
    event.status =
        error(Code::kInternal, "the constraint refuses token {}, which it allowed", token);
  } else if (stop_.stopped()) {
    end(StopReason::kStopString, event);
  } else if (constraint != nullptr && constraint->finished()) {
    end(StopReason::kConstraint, event);
  } else if (count_ >= max_tokens_) {
    end(StopReason::kLength, event);
  }
  return verdict->kept;
}

void Output::end(StopReason reason, Event& event) {
  event.text += stop_.push(detokenizer_.finish());
  event.text += stop_.finish();
  // The bytes that the detokenizer held back may complete a stop string.
  event.reason = stop_.stopped() ? StopReason::kStopString : reason;
  event.stop_string = stop_.match();
  event.done = true;
}

}  // namespace cachalot::engine
