#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "engine/stop_matcher.h"

namespace cachalot::engine {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f};

TEST(LogSoftmax, SumsToOneAndSurvivesLargeLogits) {
  for (float shift : {0.0f, 1e4f, -1e4f}) {
    std::vector<float> logits = kLogits;
    for (float& logit : logits) {
      logit += shift;
    }
    double sum = 0;
    for (float logprob : log_softmax(logits)) {
      sum += std::exp(static_cast<double>(logprob));
    }
    // One float rounding per term, of logits as large as 1e4: 2^-24 * 1e4 absolute.
    EXPECT_NEAR(sum, 1.0, 2e-3);
  }
}

TEST(TopLogprobs, BestFirstAndTheLowerIdWinsTies) {
  const auto best = top_logprobs(kLogits, 3);
  EXPECT_EQ(best[0].first, 1);
  EXPECT_EQ(best[1].first, 3);
  EXPECT_EQ(best[2].first, 2);
  EXPECT_EQ(top_logprobs(kLogits, 100).size(), 5u);
}

TEST(Sampler, GreedyTakesTheLowestOfTheBest) {
  EXPECT_EQ(Sampler({.temperature = 0}).sample(kLogits), 1);
}

TEST(Sampler, FrequenciesFollowTheDistribution) {
  const std::vector<float> logprobs = log_softmax(kLogits);
  std::vector<int> counts(5);
  constexpr int kDraws = 50000;
  Sampler sampler({.temperature = 1, .seed = 3});
  for (int i = 0; i < kDraws; ++i) {
    const int32_t token = *sampler.sample(kLogits);
    ++counts[static_cast<size_t>(token)];
    sampler.accept(token);
  }
  for (size_t i = 0; i < 5; ++i) {
    const double p = std::exp(static_cast<double>(logprobs[i]));
    // Five standard errors of a binomial share.
    EXPECT_NEAR(counts[i] / double{kDraws}, p, 5 * std::sqrt(p * (1 - p) / kDraws));
  }
}

TEST(Sampler, SameSeedSameDrawsAndPeekingChangesNothing) {
  Sampler a({.seed = 9}), b({.seed = 9}), c({.seed = 10});
  bool differs = false;
  for (int i = 0; i < 100; ++i) {
    a.sample(kLogits);
    const int32_t token = *a.sample(kLogits);
    EXPECT_EQ(token, b.sample(kLogits));
    differs = differs || token != c.sample(kLogits);
    a.accept(token);
    b.accept(token);
    c.accept(token);
  }
  EXPECT_TRUE(differs);
}

// The set of tokens that a sampler ever draws.
std::vector<int32_t> support(const SamplingParams& params, const std::vector<float>& logits) {
  std::vector<bool> seen(logits.size());
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SamplingParams p = params;
    p.seed = seed;
    seen[static_cast<size_t>(*Sampler(p).sample(logits))] = true;
  }
  std::vector<int32_t> ids;
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen[i]) {
      ids.push_back(static_cast<int32_t>(i));
    }
  }
  return ids;
}

TEST(Sampler, FiltersKeepWhatTheyName) {
  EXPECT_EQ(support({.top_k = 1}, kLogits), (std::vector<int32_t>{1}));
  EXPECT_EQ(support({.top_k = 3}, kLogits), (std::vector<int32_t>{1, 2, 3}));
  // Probabilities: 0.054, 0.397, 0.146, 0.397, 0.007.
  EXPECT_EQ(support({.top_p = 0.3f}, kLogits), (std::vector<int32_t>{1}));
  EXPECT_EQ(support({.top_p = 0.5f}, kLogits), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(support({.top_p = 0.9f}, kLogits), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(support({.min_p = 0.3f}, kLogits), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(support({.min_p = 0.9f}, kLogits), (std::vector<int32_t>{1, 3}));
}

// A large vocabulary is ranked only as far as the draw goes; the draw is that of a full ranking.
TEST(Sampler, LazyRankingDrawsWhatAFullOneWould) {
  std::vector<float> logits(5000);
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(Philox(3).normal(i)) * 0.7f;
  }
  logits[4321] = logits[17];  // a tie: the lower id first
  std::vector<std::pair<double, int32_t>> ranked;
  double sum = 0;
  const double best = *std::max_element(logits.begin(), logits.end());
  for (size_t i = 0; i < logits.size(); ++i) {
    ranked.emplace_back(std::exp(logits[i] - best), static_cast<int32_t>(i));
    sum += ranked.back().first;
  }
  std::stable_sort(
      ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (float top_p : {0.02f, 0.5f, 0.95f}) {
    double mass = 0;
    size_t keep = 0;
    while (mass < top_p * sum) {
      mass += ranked[keep++].first;
    }
    for (uint64_t seed = 0; seed < 200; ++seed) {
      double draw = Philox(seed).uniform(0) * mass;
      size_t rank = 0;
      while (rank + 1 < keep && (draw -= ranked[rank].first) >= 0) {
        ++rank;
      }
      EXPECT_EQ(*Sampler({.temperature = 1, .top_p = top_p, .seed = seed}).sample(logits),
                ranked[rank].second);
    }
  }
}

TEST(Sampler, PenaltiesAndBias) {
  Sampler repetition({.temperature = 0, .repetition_penalty = 2});
  repetition.see_prompt(std::vector<int32_t>{1, 1, 1});
  repetition.accept(3);
  EXPECT_EQ(repetition.sample(kLogits), 2);
  Sampler frequency({.temperature = 0, .frequency_penalty = 0.6f});
  frequency.accept(1);
  EXPECT_EQ(frequency.sample(kLogits), 3);
  frequency.accept(3);
  EXPECT_EQ(frequency.sample(kLogits), 1);
  frequency.accept(1);
  EXPECT_EQ(frequency.sample(kLogits), 3);
  Sampler presence({.temperature = 0, .presence_penalty = 1.5f});
  presence.accept(1);
  presence.accept(1);
  presence.accept(3);
  EXPECT_EQ(presence.sample(kLogits), 2);
  EXPECT_EQ(Sampler({.temperature = 0, .logit_bias = {{4, 100.0f}}}).sample(kLogits), 4);
}

TEST(SamplingParams, OutOfRangeValuesAreNamed) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::pair<SamplingParams, const char*> cases[] = {
      {{.temperature = -1}, "temperature"},
      {{.temperature = nan}, "temperature"},
      {{.top_k = -1}, "top_k"},
      {{.top_p = 0}, "top_p"},
      {{.top_p = nan}, "top_p"},
      {{.min_p = 2}, "min_p"},
      {{.repetition_penalty = 0}, "repetition"},
      {{.frequency_penalty = 3}, "frequency"},
      {{.presence_penalty = -3}, "presence"},
      {{.logit_bias = {{5, 1.0f}}}, "logit_bias"},
      {{.logit_bias = {{0, 101.0f}}}, "logit_bias"}};
  for (const auto& [params, field] : cases) {
    const Status status = validate(params, 5);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.message().find(field), std::string::npos) << status.message();
  }
  EXPECT_TRUE(validate({}, 5).ok());
}

TEST(StopMatcher, EverySplitOfTheTextGivesTheSame) {
  const std::string text = "one two STOP three";
  for (size_t a = 0; a <= text.size(); ++a) {
    for (size_t b = a; b <= text.size(); ++b) {
      StopMatcher matcher({"STOP", "", "XYZ"});
      std::string out = matcher.push(text.substr(0, a));
      out += matcher.push(text.substr(a, b - a));
      out += matcher.push(text.substr(b));
      out += matcher.finish();
      EXPECT_EQ(out, "one two ");
      EXPECT_TRUE(matcher.stopped());
    }
  }
}

TEST(StopMatcher, HoldsBackOnlyWhatMayBecomeAStop) {
  StopMatcher matcher({"abc"});
  EXPECT_EQ(matcher.push("xxa"), "xx");
  EXPECT_EQ(matcher.push("b"), "");
  EXPECT_EQ(matcher.push("x"), "abx");
  EXPECT_EQ(matcher.push("ab"), "");
  EXPECT_EQ(matcher.finish(), "ab");
  StopMatcher first({"two", "one"});
  EXPECT_EQ(first.push("then one two"), "then ");
}

// A mask is as if the vocabulary lacked what it forbids, for every way to draw.
TEST(Sampler, MaskedIdsTakeNoPart) {
  const std::vector<uint32_t> two = {0b1001};  // ids 0 and 3
  EXPECT_EQ(Sampler({.temperature = 0}).sample(kLogits, two), kLogits[0] > kLogits[3] ? 0 : 3);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const std::vector<float> reduced = {kLogits[0], kLogits[3]};
    const SamplingParams params{.temperature = 1.3f, .top_k = 2, .top_p = 0.9f, .seed = seed};
    EXPECT_EQ(*Sampler(params).sample(kLogits, two), *Sampler(params).sample(reduced) * 3);
  }
  const std::vector<uint32_t> none = {0};
  EXPECT_FALSE(Sampler({.temperature = 0}).sample(kLogits, none).has_value());
}

}  // namespace
}  // namespace cachalot::engine
