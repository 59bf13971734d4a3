// The output of one request: from logits to tokens, text and the reason to stop.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/logits.h"
#include "engine/sampler.h"
#include "engine/stop_matcher.h"
#include "text/detokenizer.h"

namespace cachalot::engine {

// What does not depend on scheduling: neither on other requests nor on when steps run.
class Output {
 public:
  // `request` must outlive it. At most `max_tokens` tokens come out; `eos` ends the output unless
  // the request ignores it.
  Output(const EngineRequest& request,
         const text::Tokenizer& tokenizer,
         int64_t max_tokens,
         int32_t eos);

  // Fills the mask of the next token ahead, on any thread while no other uses the output.
  void fill_mask();
  // Draws the next token from row `row` of the logits and adds what follows from it to `event`: the
  // token, the text that is now certain, the end. An error of the constraint or of a device is the
  // event's status. With a draft for this position, true if that is the token.
  bool next(const StepLogits& logits, int64_t row, Event& event, const Draft* draft = nullptr);

  // The tokens so far, EOS apart.
  int64_t count() const { return count_; }
  const Sampler& sampler() const { return sampler_; }
  // How many of a row's best tokens it can use.
  int64_t wanted() const;

 private:
  void end(StopReason reason, Event& event);

  const EngineRequest& request_;
  int64_t max_tokens_;
  int32_t eos_;
  int64_t count_ = 0;
  Sampler sampler_;
  text::Detokenizer detokenizer_;
  StopMatcher stop_;
  std::optional<Result<bool>> masked_;  // what the constraint said of the next token
  std::vector<uint32_t> allowed_;       // and the mask, if it is one
};

// `token` with its log-probability and the `top` best alternatives.
Decided<TokenOutput> token_output(const LogitsRow& row, int32_t token, int64_t top);

}  // namespace cachalot::engine
