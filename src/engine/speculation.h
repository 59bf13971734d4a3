// Speculative decoding with the model's drafter: what to draft, how much of it to verify, and what
// to keep. The output has the distribution that plain decoding has; with temperature 0 it is the
// same, token by token.
//
// Draws are keyed by request seed and position, so a sampled result depends on how many drafts each
// step verified: with a fixed SpeculationOptions::length it can be repeated, otherwise the measured
// speed of the machine has a say in it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/sampler.h"
#include "kvcache/sequence_cache.h"
#include "model/step.h"

namespace cachalot::engine {

// A proposed token and what it was drawn from.
struct Draft {
  int32_t token = 0;
  Distribution from;
  double confidence = 0;  // that it is kept if all before it are
};

struct Verdict {
  int32_t token = 0;  // the next output token
  bool kept = false;  // it is the draft: the row behind it is valid
};

// Judges a draft against the target's logits for its position: kept with probability
// min(1, p / from), else replaced by a draw from what p has more of. `allowed` as for
// Sampler::sample(). Does not count the token as output. The best tokens decide on a draft among
// them, and on what replaces it where truncation keeps no others.
Decided<Verdict> judge(const Sampler& sampler,
                       const LogitsRow& row,
                       std::span<const uint32_t> allowed,
                       const Draft& draft);

// Seconds of a step by its rows.
class StepCost {
 public:
  // The median of the last measurements of each number of rows counts: one that the machine
  // disturbed does not.
  void record(int64_t rows, double seconds);
  // Interpolated between measured sizes, extrapolated at the last slope; never less than for fewer
  // rows. 0 if nothing was measured.
  double seconds(double rows) const;

 private:
  struct Samples {
    std::array<double, 5> last{};
    int64_t count = 0;
    double median = 0;
  };
  std::map<int64_t, Samples> measured_;
};

// How many drafts of each request to verify. survival[r][j]: the probability that drafts 1 .. j + 1
// of request r are all kept, not increasing in j. Drafts are admitted by descending survival while
// each raises the expected tokens per second of a step that costs fixed_seconds beside its rows; it
// ends with the first that does not. Looking further would pay on a step-shaped cost, but then a
// draft's admission depends on its successors and the output is biased.
std::vector<int64_t> verify_lengths(const StepCost& cost,
                                    double fixed_seconds,
                                    const std::vector<std::vector<double>>& survival);

// Whether drafting pays and how many drafts to verify, from what recent steps cost and what became
// of their drafts.
//
// Drafts are tried where they would pay if (nearly) all of them were kept, in as many rows as are
// then best. What is kept says within a step or two whether they do; from then on the drafter's
// confidences choose the rows, corrected by what became of earlier drafts. Drafts that lose time
// are left alone until it is 1 % of what went by, and more and more seldom after that. While they
// pay, a plain step now and then keeps the measured cost of plain steps true.
//
// The drafter's context has its price in every step, so it is left alone, too, while no draft is
// near: in a pause up to as many steps before its end as the drafter looks back, and where drafts
// could not pay for as long as a first pause.
class DraftPolicy {
 public:
  // `block`: drafts of a request and step, at most. `window`: positions that a draft looks back.
  DraftPolicy(int64_t block, int64_t window) : window_(window), kept_(static_cast<size_t>(block)) {}

  // Whether the next decode step, of `requests`, should draft. To be asked once per step.
  bool next(int64_t requests);
  // Whether it, and steps of prompts until next() is asked again, should extend the context.
  bool keeps_context() const;

  // What the drafter's logit says of a draft: the probability that it is kept if all before it are.
  // A NaN says nothing: 0.
  double confidence(double logit) const;
  // Drafts of each request to verify, at most as many as it has survivals. These are products of
  // confidences; a trial goes by the forecast instead, which knows nothing of the drafts either.
  std::vector<int64_t> lengths(double draft_seconds,
                               const std::vector<std::vector<double>>& survival) const;

  void record_draft(int64_t requests, double seconds) { draft_.record(requests, seconds); }
  // A step over `rows` rows of decoding requests.
  void record_step(int64_t rows, double seconds) { step_.record(rows, seconds); }
  // What became of a draft that the target judged, the `position`-th of its request.
  void record_draft_outcome(int64_t position, double confidence, bool kept);
  // What a step with drafts gave: output tokens of its requests, and the rows that it ran.
  void record_outcome(int64_t requests, int64_t rows, int64_t tokens);

  // Takes over what another policy knows of the machine; what drafts gave is of its own model.
  void learn_costs(const DraftPolicy& other) {
    step_ = other.step_;
    draft_ = other.draft_;
  }

 private:
  static constexpr int64_t kTrial = 6;    // steps with drafts before they are judged by their rows
  static constexpr int64_t kRetrial = 3;  // after a pause

  // Decaying counts of judged drafts.
  struct Kept {
    double judged = 0;
    double kept = 0;
  };
  // The number of drafts that gives the most tokens per second if drafts are kept as earlier ones
  // were, and this rate over that of plain steps.
  struct Forecast {
    int64_t length = 0;
    double gain = 0;
  };
  Forecast forecast(int64_t requests) const;
  // Tokens per second with drafts over those without: as forecast in a trial, then as it came.
  double gain(int64_t requests) const;
  void pause(int64_t requests);

  int64_t window_;
  StepCost step_, draft_;
  double bias_ = 0;  // of the confidence logits
  // Since the last pause: by position, and decaying sums over the steps with drafts.
  std::vector<Kept> kept_;
  double requests_ = 0, rows_ = 0, tokens_ = 0;
  double lost_ = 0;          // seconds against plain steps, negative: won
  int64_t trial_ = 0;        // steps with drafts
  int64_t wait_ = 0;         // steps left of a pause
  int64_t pause_ = 0;        // length of the last pause
  int64_t since_plain_ = 0;  // steps with drafts since the last without
  int64_t hopeless_ = 0;     // steps, up to the last, in which drafts could not pay
};

struct SpeculationOptions {
  int64_t length = 0;  // drafts to verify per step; 0: as confidence and measured speed advise
};

// A request's drafts for one step, each behind the one before.
using Proposal = std::vector<Draft>;

// Drafts for the decoding requests of one step runner.
class Speculator {
 public:
  // `temperatures`: of the confidence of each draft position (draft_calibration.h); empty: 1.
  Speculator(const model::ModelConfig& config,
             SpeculationOptions options,
             std::vector<double> temperatures = {})
      : config_(config),
        options_(options),
        temperatures_(std::move(temperatures)),
        policy_(config.dspark_block_size, config.sliding_window) {}

  // Measures a draft of one request, and steps of 1, 2, 4, ... up to `most_rows` rows, on an empty
  // cache, so that the first decisions have something to go by; decode refreshes it. Ends
  // early after a quarter of a second, or where the memory of a step does.
  Status calibrate(model::StepRunner& runner, kvcache::SequenceCache& cache, int64_t most_rows);

  // A request whose newest token is `anchor`.
  struct Member {
    ops::SequenceView* view = nullptr;
    int32_t anchor = 0;
    const Sampler* sampler = nullptr;
    int64_t most = 0;  // drafts that it has use and room for
    model::Replay replay;
    int64_t draft_from = 0;  // StepSequence::draft_from
  };
  // One proposal per member, empty where drafting does not pay or where the draft context lacks
  // rows of the member's window: drafts, and what is learned from them, are those of a context that
  // was never left alone.
  Result<std::vector<Proposal>> propose(model::StepRunner& runner, std::span<const Member> members);
  // Whether the next step, behind a propose() if it decodes, should extend the draft context.
  bool keeps_context() const { return options_.length > 0 || policy_.keeps_context(); }
  // Whether the last propose() ran the drafter. If so the policy must hear of the step's outcome,
  // even if no draft was worth a row.
  bool drafted() const { return drafted_; }

  DraftPolicy& policy() { return policy_; }

 private:
  const model::ModelConfig& config_;
  SpeculationOptions options_;
  std::vector<double> temperatures_;
  DraftPolicy policy_;
  bool drafted_ = false;
};

}  // namespace cachalot::engine
