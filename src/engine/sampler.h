// From logits to a token.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"

namespace cachalot::engine {

struct SamplingParams {
  float temperature = 1.0f;  // 0: the best token (ties: the lower id)
  int64_t top_k = 0;         // keep the best k; 0: all
  float top_p = 1.0f;        // keep the smallest best set of at least this mass
  float min_p = 0.0f;        // drop tokens below min_p times the best probability
  float repetition_penalty =
      1.0f;                        // divides (positive) or multiplies (negative) logits of seen ids
  float frequency_penalty = 0.0f;  // subtracted per occurrence in the output
  float presence_penalty = 0.0f;   // subtracted once per id in the output
  std::map<int32_t, float> logit_bias;
  uint64_t seed = 0;
};

// Ranges as the OpenAI API defines them; the error names the field and the value.
Status validate(const SamplingParams& params, int64_t vocab_size);

// ln softmax of one row, natural logarithm, accumulated in double. [V] -> [V]
std::vector<float> log_softmax(std::span<const float> logits);

// The `count` best (id, log-probability), best first; ties: the lower id.
std::vector<std::pair<int32_t, float>> top_logprobs(std::span<const float> logprobs, int64_t count);

// Tokens with their weights, in an order that follows from the logits; weight / total is the
// probability.
struct Distribution {
  struct Token {
    int32_t id;
    double weight;
  };
  std::vector<Token> tokens;
  double total = 0;

  bool empty() const { return tokens.empty(); }  // no id is allowed
  double of(int32_t id) const;                   // probability; 0 for ids that it does not have
  int32_t pick(double u) const;                  // by u in [0, 1)
};

// Independent random numbers of one output position.
enum class Draw : uint8_t {
  kToken,    // the token itself
  kDraft,    // drafts behind this position
  kAccept,   // whether the draft for it is kept
  kReplace,  // what replaces it
};

// Draws tokens for one request. The draw for output position i depends on the seed, i and the
// logits alone: not on other requests, and not on how often sample() ran before.
class Sampler {
 public:
  explicit Sampler(SamplingParams params) : params_(std::move(params)) {}

  // Counts prompt ids for the repetition penalty.
  void see_prompt(std::span<const int32_t> tokens);

  // The token for the next output position; `logits` is not changed. `allowed` has one bit per id,
  // little-endian 32-bit words; empty: every id is allowed. Masked ids take no part in anything, as
  // if the vocabulary lacked them. None if no id is allowed. Does not count the token as output:
  // accept() does.
  std::optional<int32_t> sample(std::span<const float> logits,
                                std::span<const uint32_t> allowed = {}) const;
  void accept(int32_t token);

  // What sample() draws from; with `most` > 0 of the best `most` tokens only.
  Distribution distribution(std::span<const float> logits,
                            std::span<const uint32_t> allowed = {},
                            int64_t most = 0) const;
  // Of the next output position, uniform in [0, 1); `index` below 2^20 tells several draws apart.
  double uniform(Draw draw, uint64_t index = 0) const;

 private:
  SamplingParams params_;
  std::map<int32_t, int64_t> output_count_;
  std::map<int32_t, int64_t> prompt_count_;
  uint64_t position_ = 0;
};

}  // namespace cachalot::engine
