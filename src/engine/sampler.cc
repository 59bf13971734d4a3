#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "base/format.h"
#include "base/rng.h"

namespace cachalot::engine {
namespace {

using Token = Distribution::Token;

// Best first; ties: the lower id.
bool better(const Token& a, const Token& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

// As ops::top_logits reads it.
double canonical(float logit) {
  return std::isnan(logit) ? -std::numeric_limits<double>::infinity() : logit;
}

bool is_allowed(std::span<const uint32_t> allowed, int32_t id) {
  const auto word = static_cast<size_t>(id) / 32;
  return allowed.empty() || (word < allowed.size() && (allowed[word] >> (id % 32) & 1) != 0);
}

double logprob_of(const LogitsRow& row, double logit) {
  const double best = row.value[0];
  return (logit == best ? 0.0 : logit - best) - std::log(row.mass);
}

}  // namespace

// The tokens that take part in a draw, with their logits, ranked as far as it goes.
class Sampler::Ranking {
 public:
  // Of the best tokens of a row: `tokens` in any order. Others are worse than `bound`, unless there
  // are none.
  Ranking(std::vector<Token> tokens, const Token& bound, bool others) : open_(others) {
    if (others) {
      std::erase_if(tokens, [&](const Token& t) { return better(bound, t); });
    }
    std::sort(tokens.begin(), tokens.end(), better);
    best_ = std::move(tokens);
  }
  // Of a whole row, in the order of the ids.
  explicit Ranking(std::vector<Token> tokens) : all_(std::move(tokens)) {}

  // Ranks the best n, or all if there are fewer; false: not all of these are known.
  bool reach(size_t n) {
    if (n <= best_.size()) {
      return true;
    }
    if (all_.size() > best_.size()) {
      best_.resize(std::min(all_.size(), std::max(n, 4 * best_.size())));
      std::partial_sort_copy(all_.begin(), all_.end(), best_.begin(), best_.end(), better);
    }
    return !open_;
  }
  // Ranked so far.
  const std::vector<Token>& best() const { return best_; }
  // More than are ranked may take part.
  bool has_others() const { return open_ || all_.size() > best_.size(); }

  // Calls body(token) for those behind the first n, by id. Of a whole row.
  template <class Body>
  void others(size_t n, const Body& body) const {
    for (const Token& token : all_) {
      if (n < best_.size() ? !better(token, best_[n]) : better(best_.back(), token)) {
        body(token);
      }
    }
  }

 private:
  std::vector<Token> all_, best_;
  bool open_ = false;
};

Status validate(const SamplingParams& p, int64_t vocab_size) {
  const auto in = [](float value, float low, float high) { return value >= low && value <= high; };
  if (!in(p.temperature, 0, 100)) {
    return invalid("temperature is {}, must be in [0, 100]", p.temperature);
  }
  if (p.top_k < 0) {
    return invalid("top_k is {}, must not be negative", p.top_k);
  }
  if (!(p.top_p > 0 && p.top_p <= 1)) {
    return invalid("top_p is {}, must be in (0, 1]", p.top_p);
  }
  if (!in(p.min_p, 0, 1)) {
    return invalid("min_p is {}, must be in [0, 1]", p.min_p);
  }
  if (!in(p.repetition_penalty, 0.01f, 100)) {
    return invalid("repetition_penalty is {}, must be in [0.01, 100]", p.repetition_penalty);
  }
  if (!in(p.frequency_penalty, -2, 2)) {
    return invalid("frequency_penalty is {}, must be in [-2, 2]", p.frequency_penalty);
  }
  if (!in(p.presence_penalty, -2, 2)) {
    return invalid("presence_penalty is {}, must be in [-2, 2]", p.presence_penalty);
  }
  for (const auto& [id, bias] : p.logit_bias) {
    if (id < 0 || id >= vocab_size) {
      return invalid("logit_bias names token {}, the vocabulary has {}", id, vocab_size);
    }
    if (!in(bias, -100, 100)) {
      return invalid("logit_bias of token {} is {}, must be in [-100, 100]", id, bias);
    }
  }
  return {};
}

Decided<float> logprob(const LogitsRow& row, int32_t id) {
  if (!row.all.empty()) {
    return static_cast<float>(logprob_of(row, canonical(row.all[static_cast<size_t>(id)])));
  }
  const auto at = std::find(row.id.begin(), row.id.end(), id);
  if (at == row.id.end()) {
    return tl::unexpected(Missing::kLogits);
  }
  return static_cast<float>(logprob_of(row, row.value[static_cast<size_t>(at - row.id.begin())]));
}

Decided<std::vector<std::pair<int32_t, float>>> top_logprobs(const LogitsRow& row, int64_t count) {
  count = std::min(count, row.vocab);
  std::vector<std::pair<int32_t, float>> best;
  const auto add = [&](int32_t id, double logit) {
    best.emplace_back(id, static_cast<float>(logprob_of(row, logit)));
  };
  if (count <= static_cast<int64_t>(row.id.size())) {
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      add(row.id[i], row.value[i]);
    }
    return best;
  }
  if (row.all.empty()) {
    return tl::unexpected(Missing::kLogits);
  }
  std::vector<Token> tokens;
  for (size_t i = 0; i < row.all.size(); ++i) {
    tokens.push_back({static_cast<int32_t>(i), canonical(row.all[i])});
  }
  std::partial_sort(tokens.begin(), tokens.begin() + count, tokens.end(), better);
  tokens.resize(static_cast<size_t>(count));
  for (const Token& token : tokens) {
    add(token.id, token.weight);
  }
  return best;
}

Decided<double> Distribution::of(int32_t id) const {
  for (const Token& token : tokens) {
    if (token.id == id) {
      return token.weight / total;
    }
  }
  if (open) {
    return tl::unexpected(Missing::kLogits);
  }
  return 0;
}

Decided<int32_t> Distribution::pick(double u) const {
  double left = u * total;
  const Token* last = nullptr;
  for (const Token& token : tokens) {
    left -= token.weight;
    if (left < 0) {
      return token.id;
    }
    last = token.weight > 0 ? &token : last;
  }
  if (open) {
    return tl::unexpected(Missing::kLogits);
  }
  return last->id;  // u is a rounding error away from 1
}

void Sampler::see_prompt(std::span<const int32_t> tokens) {
  if (params_.repetition_penalty == 1) {
    return;  // nothing else asks, and prompts are long
  }
  for (int32_t token : tokens) {
    ++prompt_count_[token];
  }
}

void Sampler::accept(int32_t token) {
  ++output_count_[token];
  ++position_;
}

double Sampler::uniform(Draw draw, uint64_t index) const {
  return Philox(params_.seed, static_cast<uint64_t>(draw)).uniform(position_ | index << 44);
}

bool Sampler::adjusts() const {
  return params_.repetition_penalty != 1 || params_.frequency_penalty != 0 ||
         params_.presence_penalty != 0 || !params_.logit_bias.empty();
}

bool Sampler::lowers() const {
  return params_.repetition_penalty >= 1 && params_.frequency_penalty >= 0 &&
         params_.presence_penalty >= 0 &&
         std::all_of(params_.logit_bias.begin(), params_.logit_bias.end(), [](const auto& entry) {
           return entry.second <= 0;
         });
}

std::vector<bool> Sampler::touched_ids(int64_t vocab) const {
  std::vector<bool> touched(static_cast<size_t>(vocab));
  const auto touch = [&](const auto& ids) {
    for (const auto& [id, value] : ids) {
      touched[static_cast<size_t>(id)] = true;
    }
  };
  touch(prompt_count_);
  touch(output_count_);
  touch(params_.logit_bias);
  return touched;
}

double Sampler::adjusted(int32_t id, double logit) const {
  const auto output = output_count_.find(id);
  if (output != output_count_.end() || prompt_count_.contains(id)) {
    logit = logit > 0 ? logit / params_.repetition_penalty : logit * params_.repetition_penalty;
  }
  if (output != output_count_.end()) {
    logit -=
        params_.frequency_penalty * static_cast<double>(output->second) + params_.presence_penalty;
  }
  const auto bias = params_.logit_bias.find(id);
  return bias == params_.logit_bias.end() ? logit : logit + bias->second;
}

Sampler::Ranking Sampler::rank(const LogitsRow& row, std::span<const uint32_t> allowed) const {
  const bool whole = !row.all.empty();
  std::vector<Token> tokens;
  const auto add = [&](int32_t id, double logit) {
    if (is_allowed(allowed, id)) {
      tokens.push_back({id, logit});
    }
  };
  if (whole) {
    tokens.reserve(row.all.size());
    for (size_t i = 0; i < row.all.size(); ++i) {
      add(static_cast<int32_t>(i), canonical(row.all[i]));
    }
  } else {
    for (size_t i = 0; i < row.id.size(); ++i) {
      add(row.id[i], row.value[i]);
    }
  }
  if (adjusts()) {
    const std::vector<bool> touched = touched_ids(row.vocab);
    for (Token& token : tokens) {
      if (touched[static_cast<size_t>(token.id)]) {
        token.weight = adjusted(token.id, token.weight);
      }
    }
  }
  // Every token that is not listed is worse than this.
  const Token bound = adjusts() && !lowers() ? Token{-1, std::numeric_limits<double>::infinity()}
                                             : Token{row.id.back(), row.value.back()};
  const bool listed = whole || static_cast<int64_t>(row.id.size()) == row.vocab;
  return whole ? Ranking(std::move(tokens)) : Ranking(std::move(tokens), bound, !listed);
}

Decided<int32_t> Sampler::sample(const LogitsRow& row, std::span<const uint32_t> allowed) const {
  return distribution(row, allowed).and_then([&](const Distribution& tokens) {
    return tokens.pick(uniform(Draw::kToken));
  });
}

Decided<Distribution> Sampler::distribution(const LogitsRow& row,
                                            std::span<const uint32_t> allowed,
                                            int64_t most) const {
  const bool whole = !row.all.empty();
  Ranking ranking = rank(row, allowed);
  if (!ranking.reach(1)) {
    return tl::unexpected(Missing::kLogits);
  }
  const std::vector<Token>& best = ranking.best();
  if (best.empty()) {
    return tl::unexpected(Missing::kToken);
  }
  if (params_.temperature == 0.0f) {
    return Distribution{{{best[0].id, 1.0}}, 1.0};
  }
  const double top = best[0].weight;
  const auto weight = [&](const Token& t) {
    return t.weight == top ? 1.0 : std::exp((t.weight - top) / params_.temperature);
  };
  size_t limit = std::numeric_limits<size_t>::max();
  for (const int64_t k : {params_.top_k, most}) {
    limit = k > 0 ? std::min(limit, static_cast<size_t>(k)) : limit;
  }
  const bool limited = limit != std::numeric_limits<size_t>::max();
  const bool truncated = limited || params_.top_p < 1 || params_.min_p > 0;

  // Of what the limit leaves, or of all: the first tokens one by one, then the rest together.
  size_t first = 0;
  double first_mass = 0, rest_mass = 0;
  bool rest = false;
  if (limited || params_.top_p < 1 || !truncated) {
    first = limited ? limit : size_t{kRankedTokens};
    if (!ranking.reach(first)) {
      return tl::unexpected(Missing::kLogits);
    }
    first = std::min(first, best.size());
    for (size_t i = 0; i < first; ++i) {
      first_mass += weight(best[i]);
    }
    rest = !limited && (first < best.size() || ranking.has_others());
    if (rest && (adjusts() || !allowed.empty())) {
      if (!whole) {
        return tl::unexpected(Missing::kLogits);
      }
      ranking.others(first, [&](const Token& t) { rest_mass += weight(t); });
    } else if (rest) {
      rest_mass = std::max(row.tempered_mass - first_mass, 0.0);
    }
  }

  Distribution result;
  if (truncated) {
    for (size_t i = 0; i < limit; ++i) {
      if (!ranking.reach(i + 1)) {
        return tl::unexpected(Missing::kLogits);
      }
      if (i == best.size()) {
        break;
      }
      const double w = weight(best[i]);
      if (w < params_.min_p || (params_.top_p < 1 && i > 0 &&
                                result.total >= params_.top_p * (first_mass + rest_mass))) {
        break;
      }
      result.tokens.push_back({best[i].id, w});
      result.total += w;
    }
    return result;
  }
  for (size_t i = 0; i < first; ++i) {
    result.tokens.push_back({best[i].id, weight(best[i])});
  }
  result.total = first_mass + rest_mass;
  result.open = rest && !whole;
  if (rest && whole) {
    double sum = 0;
    ranking.others(first, [&](const Token& t) {
      result.tokens.push_back({t.id, weight(t)});
      sum += result.tokens.back().weight;
    });
    // The op's mass carries FP32 errors: what the best leave of it is shared out.
    const double scale = sum > 0 ? rest_mass / sum : 0.0;
    for (size_t i = first; i < result.tokens.size(); ++i) {
      result.tokens[i].weight *= scale;
    }
  }
  return result;
}

}  // namespace cachalot::engine
