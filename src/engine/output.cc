#include "engine/output.h"

#include <algorithm>
#include <utility>

#include "base/format.h"

namespace cachalot::engine {
namespace {

// The token was drawn. True: the output is complete.
Result<bool> follow(TokenConstraint& constraint, int32_t token) {
  CACHALOT_TRY(const bool accepted, constraint.accept(token));
  if (!accepted) {
    return error(Code::kInternal, "the constraint refuses token {}, which it allowed", token);
  }
  return constraint.finished();
}

}  // namespace

Decided<TokenOutput> token_output(const LogitsRow& row, int32_t token, int64_t top) {
  const Decided<float> own = logprob(row, token);
  if (!own.has_value()) {
    return tl::unexpected(own.error());
  }
  return top_logprobs(row, top).map(
      [&](auto best) { return TokenOutput{.id = token, .logprob = *own, .top = std::move(best)}; });
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

int64_t Output::wanted() const {
  return std::max(sampler_.wanted(request_.constraint != nullptr), request_.top_logprobs);
}

void Output::fill_mask() {
  if (request_.constraint != nullptr && !masked_) {
    masked_ = request_.constraint->fill(allowed_);
  }
}

bool Output::next(const StepLogits& logits, int64_t row, Event& event, const Draft* draft) {
  TokenConstraint* const constraint = request_.constraint.get();
  fill_mask();
  const Result<bool> masked = std::exchange(masked_, std::nullopt).value_or(false);
  if (!masked.ok()) {
    event.status = masked.status();
    return false;
  }
  const std::span<const uint32_t> allowed =
      *masked ? std::span<const uint32_t>(allowed_) : std::span<const uint32_t>();
  const Result<Decided<Verdict>> verdict = logits.decide(row, [&](const LogitsRow& known) {
    return draft != nullptr ? judge(sampler_, known, allowed, *draft)
                            : sampler_.sample(known, allowed).map([](int32_t token) {
                                return Verdict{token, false};
                              });
  });
  if (!verdict.ok()) {
    event.status = verdict.status();
    return false;
  }
  if (!verdict->has_value()) {
    event.status = error(Code::kFailedPrecondition, "the constraint allows no token");
    return false;
  }
  const auto [token, kept] = verdict->value();
  sampler_.accept(token);
  if ((!request_.ignore_eos && token == eos_) ||
      std::find(request_.stop_ids.begin(), request_.stop_ids.end(), token) !=
          request_.stop_ids.end()) {
    end(StopReason::kEos, event);
    return kept;
  }
  ++count_;
  TokenOutput output{.id = token};
  if (request_.logprobs || request_.top_logprobs > 0) {
    const auto found = logits.decide(row, [&, id = token](const LogitsRow& known) {
      return token_output(known, id, request_.top_logprobs);
    });
    if (!found.ok()) {
      event.status = found.status();
      return false;
    }
    output = found->value();
  }
  event.tokens.push_back(std::move(output));
  event.text += stop_.push(detokenizer_.push(token));
  const Result<bool> complete = constraint != nullptr ? follow(*constraint, token) : false;
  if (!complete.ok()) {
    event.status = complete.status();
  } else if (stop_.stopped()) {
    end(StopReason::kStopString, event);
  } else if (*complete) {
    end(StopReason::kConstraint, event);
  } else if (count_ >= max_tokens_) {
    end(StopReason::kLength, event);
  }
  return kept;
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
