#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "base/format.h"
#include "base/rng.h"

namespace cachalot::engine {
namespace {

struct Candidate {
  int32_t id;
  double value;  // logit, later probability
};

// Best first; ties: the lower id.
bool better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
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

std::optional<int32_t> Sampler::sample(std::span<const float> logits,
                                       std::span<const uint32_t> allowed) const {
  std::vector<Candidate> candidates(logits.size());
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
        double& value = candidates[static_cast<size_t>(id)].value;
        value = value > 0 ? value / params_.repetition_penalty : value * params_.repetition_penalty;
      }
    }
  }
  for (const auto& [id, count] : output_count_) {
    candidates[static_cast<size_t>(id)].value -=
        params_.frequency_penalty * static_cast<double>(count) + params_.presence_penalty;
  }
  for (const auto& [id, bias] : params_.logit_bias) {
    candidates[static_cast<size_t>(id)].value += bias;
  }
  if (!allowed.empty()) {
    std::erase_if(candidates, [&](const Candidate& c) {
      const auto word = static_cast<size_t>(c.id) / 32;
      return word >= allowed.size() || (allowed[word] >> (c.id % 32) & 1) == 0;
    });
    if (candidates.empty()) {
      return std::nullopt;
    }
  }
  if (params_.temperature == 0.0f) {
    return std::min_element(candidates.begin(), candidates.end(), better)->id;
  }
  if (params_.top_k > 0 && params_.top_k < static_cast<int64_t>(candidates.size())) {
    std::nth_element(
        candidates.begin(), candidates.begin() + params_.top_k, candidates.end(), better);
    candidates.resize(static_cast<size_t>(params_.top_k));
  }
  double best = candidates[0].value;
  for (const Candidate& c : candidates) {
    best = std::max(best, c.value);
  }
  double sum = 0;
  for (Candidate& c : candidates) {
    c.value = std::exp((c.value - best) / params_.temperature);
    sum += c.value;
  }
  if (params_.min_p > 0) {
    // Relative to the best, whose value is 1.
    std::erase_if(candidates, [&](const Candidate& c) { return c.value < params_.min_p; });
  }
  double total = 0;
  for (const Candidate& c : candidates) {
    total += c.value;
  }
  // The best come first only as far as somebody looks: of a large vocabulary that is seldom more
  // than a few hundred.
  size_t sorted = 0;
  const auto ranked = [&](size_t rank) -> const Candidate& {
    if (rank >= sorted) {
      const auto from = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
      sorted = std::min(candidates.size(), std::max<size_t>(256, 4 * sorted));
      std::partial_sort(
          from, candidates.begin() + static_cast<std::ptrdiff_t>(sorted), candidates.end(), better);
    }
    return candidates[rank];
  };
  size_t keep = candidates.size();
  if (params_.top_p < 1) {
    double mass = 0;
    size_t n = 0;
    while (n < candidates.size() && mass < params_.top_p * sum) {
      mass += ranked(n++).value;
    }
    keep = std::max<size_t>(n, 1);
    total = mass;
  }
  double draw = Philox(params_.seed).uniform(position_) * total;
  for (size_t rank = 0; rank < keep; ++rank) {
    draw -= ranked(rank).value;
    if (draw < 0) {
      return ranked(rank).id;
    }
  }
  return ranked(keep - 1).id;
}

}  // namespace cachalot::engine
