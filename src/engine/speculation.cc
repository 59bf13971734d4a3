#include "engine/speculation.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/clock.h"
#include "base/format.h"
#include "engine/logits.h"

namespace cachalot::engine {
namespace {

// Below this a draft's probability, or the mass of a residual, is noise of FP32 logits.
constexpr double kLeastProbability = 1e-8;
// Drafts are drawn from so many of the best tokens: any distribution is good enough to draw drafts
// from, and this one is small enough to keep until they are judged.
constexpr int64_t kDraftCandidates = kRankedTokens;
constexpr double kCalibrationSeconds = 0.25;
constexpr double kOutcomeMemory = 0.95;  // of older steps
constexpr double kKeptMemory = 0.98;     // of older drafts of a position
// Before drafts are known they count as right, with the weight of so many: one that is wrong at
// first is not the end of a good drafter, three are.
constexpr double kTrust = 2;
constexpr double kLeastGain = 1.05;   // less is within the noise of the measured costs
constexpr double kLossShare = 0.01;   // of the time, for finding out that drafts do not pay
constexpr int64_t kFirstPause = 128;  // steps
constexpr int64_t kLongestPause = 4096;
constexpr double kBiasRate = 0.25;  // about 20 drafts move an even chance to a likely one
constexpr double kMostBias = 6;
// Plain steps among those with drafts: often enough to follow the machine, for this share of a
// gain.
constexpr double kPlainShare = 0.008;
constexpr int64_t kPlainOften = 8, kPlainSeldom = 64;

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

// max(p - q, 0), not normalized; p itself if nothing is left.
Distribution residual(const Distribution& p, const Distribution& q) {
  std::vector<Distribution::Token> by_id = q.tokens;
  std::sort(by_id.begin(), by_id.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  Distribution rest;
  for (const Distribution::Token& token : p.tokens) {
    const auto at = std::lower_bound(
        by_id.begin(), by_id.end(), token.id, [](const auto& a, int32_t id) { return a.id < id; });
    const double drawn = at != by_id.end() && at->id == token.id ? at->weight / q.total : 0;
    const double left = token.weight / p.total - drawn;
    if (left > 0) {
      rest.tokens.push_back({token.id, left});
      rest.total += left;
    }
  }
  return rest.total > kLeastProbability ? rest : p;
}

}  // namespace

Decided<Verdict> judge(const Sampler& sampler,
                       const LogitsRow& row,
                       std::span<const uint32_t> allowed,
                       const Draft& draft) {
  const Decided<Distribution> target = sampler.distribution(row, allowed);
  const Decided<double> probability =
      target.and_then([&](const Distribution& p) { return p.of(draft.token); });
  if (!probability.has_value()) {
    return tl::unexpected(probability.error());
  }
  const double drawn = std::max(draft.from.of(draft.token).value(), kLeastProbability);
  if (sampler.uniform(Draw::kAccept) < *probability / drawn) {
    return Verdict{draft.token, true};
  }
  if (target->open) {
    return tl::unexpected(Missing::kLogits);
  }
  return residual(*target, draft.from).pick(sampler.uniform(Draw::kReplace)).map([](int32_t token) {
    return Verdict{token, false};
  });
}

void StepCost::record(int64_t rows, double seconds) {
  Samples& samples = measured_[rows];
  const auto window = static_cast<int64_t>(samples.last.size());
  samples.last[static_cast<size_t>(samples.count++ % window)] = seconds;
  const int64_t filled = std::min(samples.count, window);
  std::vector<double> sorted(samples.last.begin(), samples.last.begin() + filled);
  std::sort(sorted.begin(), sorted.end());
  // Of an even number the lower: noise only adds.
  samples.median = sorted[static_cast<size_t>((filled - 1) / 2)];
}

double StepCost::seconds(double rows) const {
  double most = 0, slope = 0, at = 0;
  for (const auto& [size, samples] : measured_) {
    const double seconds = samples.median;
    const auto x = static_cast<double>(size);
    if (x >= rows) {
      const double next = std::max(seconds, most);
      return at == 0 ? next : most + (next - most) * (rows - at) / (x - at);
    }
    slope = at == 0 ? 0 : std::max(seconds - most, 0.0) / (x - at);
    most = std::max(seconds, most);
    at = x;
  }
  return most + slope * (rows - at);
}

std::vector<int64_t> verify_lengths(const StepCost& cost,
                                    double fixed_seconds,
                                    const std::vector<std::vector<double>>& survival) {
  struct Candidate {
    double survival;
    size_t request;
  };
  std::vector<Candidate> candidates;
  for (size_t r = 0; r < survival.size(); ++r) {
    for (size_t j = 0; j < survival[r].size(); ++j) {
      CACHALOT_CHECK(j == 0 || survival[r][j] <= survival[r][j - 1], r, j);
      candidates.push_back({survival[r][j], r});
    }
  }
  // Stable, so the drafts of a request stay in order where their survival is equal.
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return a.survival > b.survival;
  });
  std::vector<int64_t> lengths(survival.size());
  double rows = static_cast<double>(survival.size()), tokens = rows;
  double best = tokens / (fixed_seconds + cost.seconds(rows));
  for (const Candidate& candidate : candidates) {
    rows += 1;
    tokens += candidate.survival;
    const double rate = tokens / (fixed_seconds + cost.seconds(rows));
    if (!(candidate.survival > 0 && rate > best)) {
      break;
    }
    best = rate;
    ++lengths[candidate.request];
  }
  return lengths;
}

DraftPolicy::Forecast DraftPolicy::forecast(int64_t requests) const {
  const auto n = static_cast<double>(requests);
  const double plain = step_.seconds(n), draft = draft_.seconds(n);
  Forecast best;
  double survival = 1, tokens = 1;  // per request
  for (size_t j = 0; j < kept_.size(); ++j) {
    survival *= (kept_[j].kept + kTrust) / (kept_[j].judged + kTrust);
    tokens += survival;
    const auto length = static_cast<int64_t>(j) + 1;
    const double rows = n * static_cast<double>(length + 1);
    const double gain = tokens * plain / (draft + step_.seconds(rows));
    if (gain > best.gain) {
      best = {length, gain};
    }
  }
  return best;
}

double DraftPolicy::gain(int64_t requests) const {
  if (trial_ < kTrial) {
    return forecast(requests).gain;
  }
  const auto n = static_cast<double>(requests);
  const double with_drafts = draft_.seconds(n) + step_.seconds(n * rows_ / requests_);
  return tokens_ / requests_ * step_.seconds(n) / with_drafts;
}

bool DraftPolicy::next(int64_t requests) {
  if (wait_ > 0) {
    --wait_;
    return false;
  }
  const double gained = gain(requests);
  if (gained > kLeastGain) {
    hopeless_ = 0;
    pause_ = trial_ < kTrial ? pause_ : 0;
    // A small gain hangs on the cost of plain steps, and loses little by them.
    const auto every = static_cast<int64_t>(std::min((gained - 1) / kPlainShare, 1e3));
    if (++since_plain_ <= std::clamp(every, kPlainOften, kPlainSeldom)) {
      return true;
    }
    since_plain_ = 0;
    return false;
  }
  if (requests_ > 0) {
    pause(requests);
  } else {
    // What cannot pay even if all drafts are kept costs nothing to ask again.
    ++hopeless_;
  }
  return false;
}

bool DraftPolicy::keeps_context() const {
  return wait_ < window_ && hopeless_ <= kFirstPause;
}

void DraftPolicy::pause(int64_t requests) {
  const double plain = step_.seconds(static_cast<double>(requests));
  const double earned = std::min(lost_ / (kLossShare * plain), double{kLongestPause});
  pause_ =
      std::clamp(std::max(2 * pause_, static_cast<int64_t>(earned)), kFirstPause, kLongestPause);
  wait_ = pause_ - 1;
  trial_ = kTrial - kRetrial;
  hopeless_ = 0;
  requests_ = rows_ = tokens_ = lost_ = 0;
  std::fill(kept_.begin(), kept_.end(), Kept());
}

double DraftPolicy::confidence(double logit) const {
  return std::fmax(sigmoid(logit + bias_), 0.0);
}

std::vector<int64_t> DraftPolicy::lengths(double draft_seconds,
                                          const std::vector<std::vector<double>>& survival) const {
  if (trial_ >= kTrial) {
    return verify_lengths(step_, draft_seconds, survival);
  }
  const int64_t length = forecast(static_cast<int64_t>(survival.size())).length;
  std::vector<int64_t> lengths;
  for (const std::vector<double>& drafts : survival) {
    lengths.push_back(std::min(length, static_cast<int64_t>(drafts.size())));
  }
  return lengths;
}

void DraftPolicy::record_draft_outcome(int64_t position, double confidence, bool kept) {
  bias_ = std::clamp(bias_ + kBiasRate * ((kept ? 1.0 : 0.0) - confidence), -kMostBias, kMostBias);
  Kept& counts = kept_[static_cast<size_t>(position)];
  counts.judged = kKeptMemory * counts.judged + 1;
  counts.kept = kKeptMemory * counts.kept + (kept ? 1 : 0);
}

void DraftPolicy::record_outcome(int64_t requests, int64_t rows, int64_t tokens) {
  ++trial_;
  for (auto [sum, value] :
       {std::pair(&requests_, requests), std::pair(&rows_, rows), std::pair(&tokens_, tokens)}) {
    *sum = kOutcomeMemory * *sum + static_cast<double>(value);
  }
  const auto n = static_cast<double>(requests);
  lost_ += draft_.seconds(n) + step_.seconds(static_cast<double>(rows)) -
           static_cast<double>(tokens) / n * step_.seconds(n);
}

Status Speculator::calibrate(model::StepRunner& runner,
                             kvcache::SequenceCache& cache,
                             int64_t most_rows) {
  const std::vector<int32_t> tokens(static_cast<size_t>(most_rows));
  const std::vector<float> temperature(tokens.size(), 1.0f);
  const double started = now_seconds();
  const auto read = [&](const TensorView& logits) {
    const auto n = static_cast<size_t>(logits.dim(0));
    return StepLogits::read(runner, logits, kRankedTokens, {temperature.data(), n}).status();
  };
  const auto draft = [&]() -> Status {
    const model::StepSequence anchor{.view = &cache.view(), .tokens = {tokens.data(), 1}};
    CACHALOT_RETURN_IF_ERROR(runner.draft({&anchor, 1}));
    for (int64_t k = 0; k < config_.dspark_block_size; ++k) {
      CACHALOT_TRY(const model::DraftLogits next, runner.next_draft({tokens.data(), 1}));
      CACHALOT_RETURN_IF_ERROR(read(next.logits));
    }
    return {};
  };
  // The first pass reads weights that later steps find in memory; it is not counted.
  constexpr int kPasses = 4;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double begin = now_seconds();
    CACHALOT_RETURN_IF_ERROR(draft());
    if (pass > 0) {
      policy_.record_draft(1, now_seconds() - begin);
    }
  }
  for (int64_t rows = 1; rows <= most_rows; rows *= 2) {
    CACHALOT_RETURN_IF_ERROR(cache.reserve(rows));
    for (int pass = 0; pass < kPasses; ++pass) {
      const model::StepSequence sequence{.view = &cache.view(),
                                         .tokens = {tokens.data(), static_cast<size_t>(rows)},
                                         .all_logits = true};
      const double begin = now_seconds();
      const Result<TensorView> logits = runner.run({&sequence, 1});
      const Status status = logits.ok() ? read(*logits) : logits.status();
      if (status.code() == Code::kResourceExhausted && rows > 2) {
        return {};
      }
      CACHALOT_RETURN_IF_ERROR(status);
      if (pass > 0) {
        policy_.record_step(rows, now_seconds() - begin);
      }
      // The first two sizes say what a row costs; the others may come from use.
      if (rows > 2 && now_seconds() - started > kCalibrationSeconds) {
        return {};
      }
    }
  }
  return {};
}

Result<std::vector<Proposal>> Speculator::propose(model::StepRunner& runner,
                                                  std::span<const Member> members) {
  std::vector<Proposal> proposals(members.size());
  std::vector<int64_t> most;
  for (const Member& member : members) {
    const int64_t seen_from =
        std::max(member.replay.decoder_from, member.view->length - config_.sliding_window);
    most.push_back(member.draft_from <= seen_from ? member.most : 0);
  }
  const bool useful = std::any_of(most.begin(), most.end(), [](int64_t m) { return m > 0; });
  const auto n = static_cast<int64_t>(members.size());
  const bool fixed = options_.length > 0;
  // A pause goes on whether or not there is something to draft.
  drafted_ = (fixed || policy_.next(n)) && useful;
  if (!drafted_) {
    return proposals;
  }
  const double begin = now_seconds();
  std::vector<model::StepSequence> sequences;
  std::vector<int32_t> previous;
  std::vector<float> temperature;
  int64_t wanted = 1;
  for (const Member& member : members) {
    sequences.push_back({.view = member.view,
                         .tokens = {&member.anchor, 1},
                         .replay = member.replay,
                         .draft_from = member.draft_from});
    previous.push_back(member.anchor);
    temperature.push_back(member.sampler->temperature());
    wanted = std::max(wanted, member.sampler->wanted(false));
  }
  CACHALOT_RETURN_IF_ERROR(runner.draft(sequences));
  std::vector<std::vector<double>> survival(members.size());
  const int64_t block =
      fixed ? std::min(options_.length, config_.dspark_block_size) : config_.dspark_block_size;
  for (int64_t k = 0; k < block; ++k) {
    CACHALOT_TRY(const model::DraftLogits rows, runner.next_draft(previous));
    CACHALOT_TRY(const StepLogits logits,
                 StepLogits::read(runner, rows.logits, wanted, temperature));
    for (size_t i = 0; i < members.size(); ++i) {
      const Sampler& sampler = *members[i].sampler;
      CACHALOT_TRY(Decided<Distribution> drawn_from,
                   logits.decide(static_cast<int64_t>(i), [&](const LogitsRow& row) {
                     return sampler.distribution(row, {}, kDraftCandidates);
                   }));
      Distribution& from = drawn_from.value();
      previous[i] = from.pick(sampler.uniform(Draw::kDraft, static_cast<uint64_t>(k))).value();
      if (k < most[i]) {
        const double before = k == 0 ? 1.0 : survival[i].back();
        const double calibration =
            temperatures_.empty() ? 1.0 : temperatures_[static_cast<size_t>(k)];
        const double confidence = policy_.confidence(rows.confidence.as<float>()[i] / calibration);
        survival[i].push_back(before * confidence);
        proposals[i].push_back({previous[i], std::move(from), confidence});
      }
    }
  }
  const double seconds = now_seconds() - begin;
  policy_.record_draft(n, seconds);
  if (!fixed) {
    const std::vector<int64_t> lengths = policy_.lengths(seconds, survival);
    for (size_t i = 0; i < members.size(); ++i) {
      proposals[i].resize(static_cast<size_t>(lengths[i]));
    }
  }
  return proposals;
}

}  // namespace cachalot::engine
