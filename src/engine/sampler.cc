#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "base/format.h"
#include "base/rng.h"

namespace cachalot::engine {
namespace {

using Token = Distribution::Token;

// Best first; ties: the lower id.
bool better(const Token& a, const Token& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

}  // namespace

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

std::vector<float> log_softmax(std::span<const float> logits) {
  const double best = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) {
    sum += std::exp(logit - best);
  }
  const double shift = best + std::log(sum);
  std::vector<float> result(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    result[i] = static_cast<float>(logits[i] - shift);
  }
  return result;
}

std::vector<std::pair<int32_t, float>> top_logprobs(std::span<const float> logprobs,
                                                    int64_t count) {
  std::vector<int32_t> order(logprobs.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int32_t>(i);
  }
  count = std::min<int64_t>(count, static_cast<int64_t>(order.size()));
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
    const float x = logprobs[static_cast<size_t>(a)], y = logprobs[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  std::vector<std::pair<int32_t, float>> best;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = order[static_cast<size_t>(i)];
    best.emplace_back(id, logprobs[static_cast<size_t>(id)]);
  }
  return best;
}

void Sampler::see_prompt(std::span<const int32_t> tokens) {
  for (int32_t token : tokens) {
    ++prompt_count_[token];
  }
}

void Sampler::accept(int32_t token) {
  ++output_count_[token];
  ++position_;
}

double Distribution::of(int32_t id) const {
  for (const Token& token : tokens) {
    if (token.id == id) {
      return token.weight / total;
    }
  }
  return 0;
}

int32_t Distribution::pick(double u) const {
  double left = u * total;
  for (const Token& token : tokens) {
    left -= token.weight;
    if (left < 0) {
      return token.id;
    }
  }
  return tokens.back().id;
}

double Sampler::uniform(Draw draw, uint64_t index) const {
  return Philox(params_.seed, static_cast<uint64_t>(draw)).uniform(position_ | index << 44);
}

std::optional<int32_t> Sampler::sample(std::span<const float> logits,
                                       std::span<const uint32_t> allowed) const {
  const Distribution tokens = distribution(logits, allowed);
  if (tokens.empty()) {
    return std::nullopt;
  }
  return tokens.pick(uniform(Draw::kToken));
}

Distribution Sampler::distribution(std::span<const float> logits,
                                   std::span<const uint32_t> allowed,
                                   int64_t most) const {
  // Logits first, weights later.
  std::vector<Token> candidates(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    candidates[i] = {static_cast<int32_t>(i), logits[i]};
  }
  if (params_.repetition_penalty != 1.0f) {
    for (const auto* counts : {&prompt_count_, &output_count_}) {
      for (const auto& [id, count] : *counts) {
        // An id in both maps is penalized once.
        if (counts == &output_count_ && prompt_count_.contains(id)) {
          continue;
        }
        double& value = candidates[static_cast<size_t>(id)].weight;
        value = value > 0 ? value / params_.repetition_penalty : value * params_.repetition_penalty;
      }
    }
  }
  for (const auto& [id, count] : output_count_) {
    candidates[static_cast<size_t>(id)].weight -=
        params_.frequency_penalty * static_cast<double>(count) + params_.presence_penalty;
  }
  for (const auto& [id, bias] : params_.logit_bias) {
    candidates[static_cast<size_t>(id)].weight += bias;
  }
  if (!allowed.empty()) {
    std::erase_if(candidates, [&](const Token& c) {
      const auto word = static_cast<size_t>(c.id) / 32;
      return word >= allowed.size() || (allowed[word] >> (c.id % 32) & 1) == 0;
    });
    if (candidates.empty()) {
      return {};
    }
  }
  if (params_.temperature == 0.0f) {
    return {{{std::min_element(candidates.begin(), candidates.end(), better)->id, 1.0}}, 1.0};
  }
  for (const int64_t limit : {params_.top_k, most}) {
    if (limit > 0 && limit < static_cast<int64_t>(candidates.size())) {
      std::nth_element(candidates.begin(), candidates.begin() + limit, candidates.end(), better);
      candidates.resize(static_cast<size_t>(limit));
    }
  }
  double best = candidates[0].weight;
  for (const Token& c : candidates) {
    best = std::max(best, c.weight);
  }
  double sum = 0;
  for (Token& c : candidates) {
    c.weight = std::exp((c.weight - best) / params_.temperature);
    sum += c.weight;
  }
  if (params_.min_p > 0) {
    // Relative to the best, whose value is 1.
    std::erase_if(candidates, [&](const Token& c) { return c.weight < params_.min_p; });
  }
  if (params_.top_p < 1) {
    // Ranked only as far as the mass needs: of a large vocabulary that is seldom more than a few
    // hundred tokens.
    size_t ranked = 0, keep = 0;
    double mass = 0;
    while (keep < candidates.size() && mass < params_.top_p * sum) {
      if (keep == ranked) {
        ranked = std::min(candidates.size(), std::max<size_t>(256, 4 * ranked));
        std::partial_sort(candidates.begin() + static_cast<std::ptrdiff_t>(keep),
                          candidates.begin() + static_cast<std::ptrdiff_t>(ranked),
                          candidates.end(),
                          better);
      }
      mass += candidates[keep++].weight;
    }
    candidates.resize(std::max<size_t>(keep, 1));
  }
  Distribution result{.tokens = std::move(candidates)};
  for (const Token& c : result.tokens) {
    result.total += c.weight;
  }
  return result;
}

}  // namespace cachalot::engine
