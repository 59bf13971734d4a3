// From logits to a token.
#pragma once

#include <cstdint>
#include <map>
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

// What is known of one row of logits: its best tokens and the mass of all of them, as
// ops::top_logits gives them, and every logit where it was asked for. A sampler reads what it
// needs; which of the two it reads changes no result.
struct LogitsRow {
  std::span<const float> value;  // of the best tokens, descending
  std::span<const int32_t> id;   // theirs; ties: the lower id first
  double mass = 0;               // of all tokens, in units of the best one's
  double tempered_mass = 0;      // the same at Sampler::temperature()
  int64_t vocab = 0;
  std::span<const float> all;  // [V]; empty: not at hand
};

// Why there is no answer.
enum class Missing : uint8_t {
  kLogits,  // the best tokens do not decide: ask again with every logit
  kToken,   // no id is allowed
};
template <class T>
using Decided = tl::expected<T, Missing>;

// ln softmax of the row at temperature 1.
Decided<float> logprob(const LogitsRow& row, int32_t id);
// The `count` best (id, log-probability), best first; ties: the lower id.
Decided<std::vector<std::pair<int32_t, float>>> top_logprobs(const LogitsRow& row, int64_t count);

// How many of the best tokens any draw can use before it has to read the row: mass behind them is a
// few percent for most models and prompts.
constexpr int64_t kRankedTokens = 256;

// Tokens with their weights, best first as far as they are ranked; weight / total is the
// probability.
struct Distribution {
  struct Token {
    int32_t id;
    double weight;
  };
  std::vector<Token> tokens;
  double total = 0;
  bool open = false;  // what the tokens leave of the total belongs to others

  Decided<double> of(int32_t id) const;   // probability; 0 for ids that it does not have
  Decided<int32_t> pick(double u) const;  // by u in [0, 1)
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
//
// Tokens are drawn in the order of their rank where truncation ranks them. Without truncation the
// best kRankedTokens come first and then all others by id. So a draw walks down the best tokens,
// and only one that falls behind them reads the row. The mass of a row without penalties, bias and
// mask is that of the op, whichever way it is read. In detail, the best tokens decide
//
//   temperature 0    with the first that is allowed
//   top_k            if there are as many
//   min_p            if one of them is below
//   top_p            if their mass reaches it; its share is of what top_k leaves, else of the row's
//                    mass, which penalties, bias and masks make unknown
//   all              if the draw falls among them; not with penalties, bias or a mask
//
// and with penalties and bias, only where these lower logits alone: then tokens that are not among
// the best stay below the last of these, and those that are still above it keep their ranks.
class Sampler {
 public:
  explicit Sampler(SamplingParams params) : params_(std::move(params)) {}

  // Counts prompt ids for the repetition penalty.
  void see_prompt(std::span<const int32_t> tokens);

  // The token for the next output position. `allowed` has one bit per id, little-endian 32-bit
  // words; empty: every id is allowed. Masked ids take no part in anything, as if the vocabulary
  // lacked them. Does not count the token as output: accept() does.
  Decided<int32_t> sample(const LogitsRow& row, std::span<const uint32_t> allowed = {}) const;
  void accept(int32_t token);

  // What sample() draws from; with `most` > 0 of the best `most` tokens only.
  Decided<Distribution> distribution(const LogitsRow& row,
                                     std::span<const uint32_t> allowed = {},
                                     int64_t most = 0) const;
  // Of the next output position, uniform in [0, 1); `index` below 2^20 tells several draws apart.
  double uniform(Draw draw, uint64_t index = 0) const;

  // Of LogitsRow::tempered_mass; 1 where none is used.
  float temperature() const { return params_.temperature > 0 ? params_.temperature : 1.0f; }
  // How many of the best tokens a row should come with.
  int64_t wanted(bool masked) const {
    return params_.temperature == 0 && !adjusts() && !masked ? 1 : kRankedTokens;
  }

 private:
  class Ranking;

  Ranking rank(const LogitsRow& row, std::span<const uint32_t> allowed) const;
  bool adjusts() const;                                // penalties or bias change logits
  bool lowers() const;                                 // and never raise one
  std::vector<bool> touched_ids(int64_t vocab) const;  // that these change at all
  double adjusted(int32_t id, double logit) const;

  SamplingParams params_;
  std::map<int32_t, int64_t> output_count_;
  std::map<int32_t, int64_t> prompt_count_;
  uint64_t position_ = 0;
};

}  // namespace cachalot::engine
