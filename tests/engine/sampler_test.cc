#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "engine/stop_matcher.h"
#include "tests/engine/test_row.h"

namespace cachalot::engine {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f};

TEST(LogSoftmax, SumsToOneAndSurvivesLargeLogits) {
  for (float shift : {0.0f, 1e4f, -1e4f}) {
    std::vector<float> logits = kLogits;
    for (float& logit : logits) {
      logit += shift;
    }
    const TestRow row(logits);
    double sum = 0;
    for (int32_t id = 0; id < 5; ++id) {
      sum += std::exp(static_cast<double>(logprob(row.best(), id).value()));
      EXPECT_EQ(logprob(row.best(), id), logprob(row.whole(), id));
    }
    // One float rounding per term, of logits as large as 1e4: 2^-24 * 1e4 absolute.
    EXPECT_NEAR(sum, 1.0, 2e-3);
  }
}

TEST(TopLogprobs, BestFirstAndTheLowerIdWinsTies) {
  const TestRow row(kLogits, 1, 3);
  const auto best = top_logprobs(row.best(), 3).value();
  EXPECT_EQ(best[0].first, 1);
  EXPECT_EQ(best[1].first, 3);
  EXPECT_EQ(best[2].first, 2);
  EXPECT_EQ(top_logprobs(row.whole(), 3).value(), best);
  // More than the best: only the whole row tells.
  EXPECT_EQ(top_logprobs(row.best(), 4).error(), Missing::kLogits);
  EXPECT_EQ(logprob(row.best(), 0).error(), Missing::kLogits);
  const auto all = top_logprobs(row.whole(), 100).value();
  EXPECT_EQ(all.size(), 5u);
  EXPECT_EQ(all[3].second, logprob(row.whole(), 0).value());
}

TEST(Sampler, GreedyTakesTheLowestOfTheBest) {
  EXPECT_EQ(sample(Sampler({.temperature = 0}), kLogits), 1);
}

TEST(Sampler, FrequenciesFollowTheDistribution) {
  const TestRow row(kLogits);
  std::vector<int> counts(5);
  constexpr int kDraws = 50000;
  Sampler sampler({.temperature = 1, .seed = 3});
  for (int i = 0; i < kDraws; ++i) {
    const int32_t token = *sample(sampler, row);
    ++counts[static_cast<size_t>(token)];
    sampler.accept(token);
  }
  for (size_t i = 0; i < 5; ++i) {
    const double p = std::exp(static_cast<double>(*logprob(row.best(), static_cast<int32_t>(i))));
    // Five standard errors of a binomial share.
    EXPECT_NEAR(counts[i] / double{kDraws}, p, 5 * std::sqrt(p * (1 - p) / kDraws));
  }
}

TEST(Sampler, SameSeedSameDrawsAndPeekingChangesNothing) {
  Sampler a({.seed = 9}), b({.seed = 9}), c({.seed = 10});
  bool differs = false;
  const TestRow row(kLogits);
  for (int i = 0; i < 100; ++i) {
    sample(a, row);
    const int32_t token = *sample(a, row);
    EXPECT_EQ(token, sample(b, row));
    differs = differs || token != sample(c, row);
    a.accept(token);
    b.accept(token);
    c.accept(token);
  }
  EXPECT_TRUE(differs);
}

// The set of tokens that a sampler ever draws.
std::vector<int32_t> support(const SamplingParams& params, const std::vector<float>& logits) {
  std::vector<bool> seen(logits.size());
  const TestRow row(logits, params.temperature);
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SamplingParams p = params;
    p.seed = seed;
    seen[static_cast<size_t>(*sample(Sampler(p), row))] = true;
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
  const TestRow row(logits);
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
      EXPECT_EQ(*sample(Sampler({.temperature = 1, .top_p = top_p, .seed = seed}), row),
                ranked[rank].second);
    }
  }
}

TEST(Sampler, PenaltiesAndBias) {
  Sampler repetition({.temperature = 0, .repetition_penalty = 2});
  repetition.see_prompt(std::vector<int32_t>{1, 1, 1});
  repetition.accept(3);
  EXPECT_EQ(sample(repetition, kLogits), 2);
  Sampler frequency({.temperature = 0, .frequency_penalty = 0.6f});
  frequency.accept(1);
  EXPECT_EQ(sample(frequency, kLogits), 3);
  frequency.accept(3);
  EXPECT_EQ(sample(frequency, kLogits), 1);
  frequency.accept(1);
  EXPECT_EQ(sample(frequency, kLogits), 3);
  Sampler presence({.temperature = 0, .presence_penalty = 1.5f});
  presence.accept(1);
  presence.accept(1);
  presence.accept(3);
  EXPECT_EQ(sample(presence, kLogits), 2);
  EXPECT_EQ(sample(Sampler({.temperature = 0, .logit_bias = {{4, 100.0f}}}), kLogits), 4);
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
  EXPECT_EQ(sample(Sampler({.temperature = 0}), kLogits, two), kLogits[0] > kLogits[3] ? 0 : 3);
  const TestRow row(kLogits, 1.3f), reduced({kLogits[0], kLogits[3]}, 1.3f);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const SamplingParams params{.temperature = 1.3f, .top_k = 2, .top_p = 0.9f, .seed = seed};
    EXPECT_EQ(*sample(Sampler(params), row, two), *sample(Sampler(params), reduced) * 3);
  }
  const std::vector<uint32_t> none = {0};
  EXPECT_EQ(sample(Sampler({.temperature = 0}), kLogits, none).error(), Missing::kToken);
}

TEST(Sampler, NumbersThatAreNoneLoseAndInfinityWins) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(sample(Sampler({.temperature = 0}), {nan, 1.0f, nan, 2.0f, -inf}), 3);
  for (const float temperature : {0.5f, 1.0f}) {
    EXPECT_EQ(support({.temperature = temperature}, {nan, 1.0f, nan, 1.5f, -inf}),
              (std::vector<int32_t>{1, 3}));
    EXPECT_EQ(support({.temperature = temperature}, {nan, inf, 3.0f, inf}),
              (std::vector<int32_t>{1, 3}));
    EXPECT_EQ(support({.temperature = temperature}, {nan, -inf}), (std::vector<int32_t>{0, 1}));
  }
}

// A vocabulary of which the best tokens are a part.
std::vector<float> random_logits(uint64_t seed, size_t size, double spread) {
  std::vector<float> logits(size);
  for (size_t i = 0; i < size; ++i) {
    logits[i] = static_cast<float>(Philox(seed).normal(i) * spread);
    // A third are ties.
    logits[i] = i % 3 == 0 ? std::round(logits[i] * 4) / 4 : logits[i];
  }
  return logits;
}

// Draws from behind the ranked tokens have the right share, and reach every token there.
TEST(Sampler, TheRestOfALargeVocabularyIsDrawnFrom) {
  const TestRow row(random_logits(5, 600, 0.5));
  const Sampler sampler({.temperature = 1});
  const Distribution whole = sampler.distribution(row.whole()).value();
  const Distribution best = sampler.distribution(row.best()).value();
  std::vector<int> counts(600);
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = Philox(4).uniform(static_cast<uint64_t>(i));
    const int32_t token = whole.pick(u).value();
    EXPECT_EQ(best.pick(u).value_or(token), token);
    ++counts[static_cast<size_t>(token)];
  }
  double deviation = 0;
  for (size_t i = 0; i < 600; ++i) {
    const double want =
        kDraws * std::exp(static_cast<double>(*logprob(row.whole(), static_cast<int32_t>(i))));
    deviation += (counts[i] - want) * (counts[i] - want) / want;
  }
  // Chi-squared with 599 degrees of freedom: mean 599, standard deviation 35; five of them.
  EXPECT_LT(deviation, 599 + 5 * 35);
  EXPECT_GT(*std::min_element(counts.begin(), counts.end()), 0);
}

// Whatever is asked for, and however many of the best tokens there are: what these decide is what
// the whole row says, to the last bit of the distribution.
TEST(Sampler, TheBestTokensDecideAsTheWholeRowDoes) {
  int decided = 0, open = 0, undecided = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const Philox random(seed, 77);
    uint64_t draws = 0;
    const auto chance = [&](double p) { return random.uniform(draws++) < p; };
    const size_t size = chance(0.2) ? 200 : 1000;
    SamplingParams params{.temperature = chance(0.2)   ? 0.0f
                                         : chance(0.5) ? 1.0f
                                                       : 0.7f,
                          .top_k = chance(0.2)   ? 5
                                   : chance(0.2) ? 300
                                                 : 0,
                          .top_p = chance(0.3) ? 0.9f : 1.0f,
                          .min_p = chance(0.2) ? 0.05f : 0.0f,
                          .repetition_penalty = chance(0.2)   ? 1.3f
                                                : chance(0.1) ? 0.8f
                                                              : 1.0f,
                          .frequency_penalty = chance(0.2) ? 0.5f : 0.0f,
                          .presence_penalty = chance(0.2)    ? 0.5f
                                              : chance(0.05) ? -0.5f
                                                             : 0.0f,
                          .logit_bias = {},
                          .seed = seed};
    if (chance(0.1)) {
      params.logit_bias = {{7, -3.0f},
                           {static_cast<int32_t>(size - 1), chance(0.5) ? 20.0f : -20.0f}};
    }
    Sampler sampler(params);
    const std::vector<float> logits = random_logits(seed, size, chance(0.5) ? 4 : 1);
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    sampler.see_prompt(std::vector<int32_t>{3, 5, static_cast<int32_t>(best)});
    sampler.accept(11);
    sampler.accept(static_cast<int32_t>(best));
    std::vector<uint32_t> allowed;
    if (chance(0.2)) {
      for (uint32_t word = 0; word < 30; ++word) {
        allowed.push_back(random.words(1000 + word)[0]);
      }
    }
    for (const int64_t k : {1, 16, 256, 700}) {
      const TestRow row(logits, sampler.temperature(), k);
      const Distribution whole = sampler.distribution(row.whole(), allowed).value();
      EXPECT_FALSE(whole.open);
      const Decided<Distribution> found = sampler.distribution(row.best(), allowed);
      if (!found.has_value()) {
        EXPECT_EQ(found.error(), Missing::kLogits);
        EXPECT_LT(k, static_cast<int64_t>(size)) << seed;
        ++undecided;
        continue;
      }
      ++decided;
      open += found->open ? 1 : 0;
      EXPECT_EQ(found->total, whole.total) << seed << " " << k;
      ASSERT_TRUE(found->open || found->tokens.size() == whole.tokens.size()) << seed << " " << k;
      for (size_t i = 0; i < found->tokens.size(); ++i) {
        ASSERT_EQ(found->tokens[i].id, whole.tokens[i].id) << seed << " " << k << " " << i;
        ASSERT_EQ(found->tokens[i].weight, whole.tokens[i].weight) << seed << " " << k << " " << i;
      }
      sample(sampler, row, allowed);
    }
  }
  // Each branch is met often.
  EXPECT_GT(decided, 200);
  EXPECT_GT(open, 50);
  EXPECT_GT(undecided, 200);
}

}  // namespace
}  // namespace cachalot::engine
