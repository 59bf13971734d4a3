// Verification of drafts and the decisions around it, on toy vocabularies and simulated machines.
#include "engine/speculation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/file.h"
#include "base/rng.h"
#include "engine/draft_calibration.h"
#include "tests/engine/test_row.h"
#include "tests/support/temp_directory.h"

namespace cachalot::engine {
namespace {

TestRow row_of(const std::vector<double>& p, float temperature = 1) {
  std::vector<float> logits;
  for (double probability : p) {
    logits.push_back(static_cast<float>(std::log(probability)));
  }
  return TestRow(logits, temperature);
}

// Draws a draft from q and judges it against p.
Verdict draft_and_judge(const Sampler& sampler,
                        const TestRow& p,
                        const TestRow& q,
                        bool best_draft = false) {
  Distribution from = sampler.distribution(q.best()).value();
  if (best_draft) {
    const Distribution::Token best =
        *std::max_element(from.tokens.begin(), from.tokens.end(), [](const auto& a, const auto& b) {
          return a.weight < b.weight;
        });
    from = {{best}, best.weight};
  }
  return *judge(sampler, p.best(), {}, {*from.pick(sampler.uniform(Draw::kDraft)), from});
}

const std::vector<double> kTarget = {0.31, 0.02, 0.2, 0.07, 0.15, 0.05, 0.19, 0.01};
const std::vector<double> kDrafter = {0.05, 0.3, 0.2, 0.01, 0.2, 0.14, 0.09, 0.01};

// A-37: drafts drawn from q, and drafts that are q's best token, both leave p's distribution.
TEST(Judge, A37_OutputFollowsTheTarget) {
  constexpr int kTrials = 400000;
  const TestRow target = row_of(kTarget), drafter = row_of(kDrafter);
  for (const bool best_draft : {false, true}) {
    Sampler sampler({.temperature = 1, .seed = 1});
    std::array<int, 8> counts{};
    int kept = 0;
    for (int i = 0; i < kTrials; ++i) {
      const Verdict verdict = draft_and_judge(sampler, target, drafter, best_draft);
      ++counts[static_cast<size_t>(verdict.token)];
      kept += verdict.kept ? 1 : 0;
      sampler.accept(verdict.token);
    }
    for (size_t i = 0; i < 8; ++i) {
      // Four standard errors of the most uncertain share.
      EXPECT_NEAR(counts[i] / double{kTrials}, kTarget[i], 0.003) << i << " " << best_draft;
    }
    // Kept: the overlap of both distributions, or p of q's best token.
    double overlap = best_draft ? kTarget[1] : 0;
    for (size_t i = 0; i < 8 && !best_draft; ++i) {
      overlap += std::min(kTarget[i], kDrafter[i]);
    }
    EXPECT_NEAR(kept / double{kTrials}, overlap, 0.003);
  }
}

TEST(Judge, TruncatedDistributionsAreJudgedAsTheyAreDrawn) {
  constexpr int kTrials = 200000;
  Sampler sampler({.temperature = 0.7f, .top_k = 5, .top_p = 0.9f, .seed = 2});
  const TestRow target = row_of(kTarget, 0.7f), drafter = row_of(kDrafter, 0.7f);
  const Distribution want = sampler.distribution(target.best()).value();
  std::array<int, 8> counts{};
  for (int i = 0; i < kTrials; ++i) {
    const Verdict verdict = draft_and_judge(sampler, target, drafter);
    ++counts[static_cast<size_t>(verdict.token)];
    sampler.accept(verdict.token);
  }
  for (int32_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(counts[static_cast<size_t>(i)] / double{kTrials}, *want.of(i), 0.005) << i;
  }
}

TEST(Judge, GreedyKeepsTheBestTokenAlone) {
  Sampler sampler({.temperature = 0});
  const TestRow p = row_of(kTarget);
  const Distribution one_hot{{{0, 1.0}}, 1.0}, other{{{4, 1.0}}, 1.0};
  EXPECT_TRUE(judge(sampler, p.best(), {}, {0, one_hot})->kept);
  const Verdict rejected = *judge(sampler, p.best(), {}, {4, other});
  EXPECT_FALSE(rejected.kept);
  EXPECT_EQ(rejected.token, sample(sampler, p));
}

TEST(Judge, EqualDistributionsKeepEveryDraft) {
  Sampler sampler({.temperature = 1, .seed = 3});
  const TestRow target = row_of(kTarget);
  for (int i = 0; i < 2000; ++i) {
    const Verdict verdict = draft_and_judge(sampler, target, target);
    ASSERT_TRUE(verdict.kept);
    sampler.accept(verdict.token);
  }
}

// Judging by the best tokens of a large vocabulary is judging by all of them.
TEST(Judge, TheBestTokensDecideAsTheWholeRowDoes) {
  int decided = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::vector<float> p(1500), q(1500);
    for (size_t i = 0; i < p.size(); ++i) {
      p[i] = static_cast<float>(Philox(seed, 1).normal(i) * 3);
      q[i] = p[i] + static_cast<float>(Philox(seed, 2).normal(i));
    }
    const Sampler sampler({.temperature = seed % 3 == 0 ? 0.0f : 0.8f,
                           .top_p = seed % 3 == 1 ? 0.8f : 1.0f,
                           .seed = seed});
    const TestRow target(p, sampler.temperature()), drafter(q, sampler.temperature());
    const Distribution from = sampler.distribution(drafter.best(), {}, kRankedTokens).value();
    const Draft draft{from.pick(sampler.uniform(Draw::kDraft)).value(), from};
    const Verdict whole = judge(sampler, target.whole(), {}, draft).value();
    const Decided<Verdict> best = judge(sampler, target.best(), {}, draft);
    if (best.has_value()) {
      ++decided;
      EXPECT_EQ(best->token, whole.token) << seed;
      EXPECT_EQ(best->kept, whole.kept) << seed;
    } else {
      EXPECT_EQ(best.error(), Missing::kLogits);
      EXPECT_EQ(seed % 3, 2u) << "greedy and truncated drafts are always decided here";
    }
  }
  EXPECT_GT(decided, 200);
}

// A-39: a kept draft counts like any other token.
TEST(Judge, A39_PenaltiesSeeEveryKeptToken) {
  const TestRow logits({2.0f, 1.5f, 0.0f});
  Sampler drafted({.temperature = 0, .frequency_penalty = 1.0f}), plain = drafted;
  for (int i = 0; i < 6; ++i) {
    const int32_t want = *sample(plain, logits);
    plain.accept(want);
    const Distribution from = drafted.distribution(logits.best()).value();
    const Verdict verdict = *judge(drafted, logits.best(), {}, {*from.pick(0), from});
    EXPECT_TRUE(verdict.kept);
    EXPECT_EQ(verdict.token, want) << i;
    drafted.accept(verdict.token);
  }
}

TEST(StepCost, InterpolatesAndExtrapolates) {
  StepCost cost;
  EXPECT_EQ(cost.seconds(3), 0);
  cost.record(2, 1.0);
  EXPECT_EQ(cost.seconds(1), 1.0);
  EXPECT_EQ(cost.seconds(9), 1.0);
  cost.record(6, 3.0);
  EXPECT_DOUBLE_EQ(cost.seconds(4), 2.0);
  EXPECT_DOUBLE_EQ(cost.seconds(8), 4.0);
  // One disturbed measurement among others does not count, and a lasting change does.
  for (const double seconds : {50.0, 3.0, 3.0}) {
    cost.record(6, seconds);
  }
  EXPECT_DOUBLE_EQ(cost.seconds(6), 3.0);
  cost.record(10, 2.0);  // noise: more rows do not cost less
  EXPECT_DOUBLE_EQ(cost.seconds(10), 3.0);
  EXPECT_DOUBLE_EQ(cost.seconds(20), 3.0);
  for (int i = 0; i < 3; ++i) {
    cost.record(2, 0.5);
  }
  EXPECT_DOUBLE_EQ(cost.seconds(2), 0.5);
}

StepCost cost_of(const std::vector<double>& seconds) {
  StepCost cost;
  for (size_t i = 0; i < seconds.size(); ++i) {
    cost.record(static_cast<int64_t>(i + 1), seconds[i]);
  }
  return cost;
}

TEST(VerifyLengths, AdmitsBySurvivalWhileItPays) {
  const StepCost flat = cost_of({1, 1, 1, 1, 1, 1, 1, 1});
  EXPECT_EQ(verify_lengths(flat, 0, {{0.9, 0.5, 0}, {0.1, 0.1, 0.1}}),
            (std::vector<int64_t>{2, 3}));
  // Each row costs as much as the first: a draft never pays.
  EXPECT_EQ(verify_lengths(cost_of({1, 2, 3, 4}), 0, {{0.9, 0.8, 0.7}}), std::vector<int64_t>{0});
  // Beside a fixed cost it does.
  EXPECT_EQ(verify_lengths(cost_of({1, 2, 3, 4}), 10, {{0.9, 0.8, 0.05}}), std::vector<int64_t>{2});
  // The better request gets the rows.
  const StepCost step = cost_of({1, 1, 1.1, 1.2, 2.5, 4});
  EXPECT_EQ(verify_lengths(step, 0, {{0.3, 0.2}, {0.9, 0.8}}), (std::vector<int64_t>{0, 2}));
  // It does not look past a step of the cost.
  EXPECT_EQ(verify_lengths(cost_of({1, 2, 2, 2, 2}), 0, {{0.9, 0.9, 0.9, 0.9}}),
            std::vector<int64_t>{0});
  EXPECT_TRUE(verify_lengths(flat, 0, {}).empty());
}

// What a chooser of lengths makes of the distribution of the first token: target (.7, .3), drafter
// (.5, .5), and a confidence in the second draft that depends on the first.
template <class Lengths>
double share_of_first_token(const StepCost& cost, const Lengths& lengths) {
  constexpr int kTrials = 100000;
  const TestRow p = row_of({0.7, 0.3}), q = row_of({0.5, 0.5});
  Sampler sampler({.temperature = 1, .seed = 5});
  int first = 0;
  for (int i = 0; i < kTrials; ++i) {
    const Distribution from = sampler.distribution(q.best()).value();
    const int32_t draft = *from.pick(sampler.uniform(Draw::kDraft));
    const std::vector<double> survival = {0.8, draft == 0 ? 0.8 : 0.0};
    const int32_t token = lengths(cost, survival) > 0
                              ? judge(sampler, p.best(), {}, {draft, from})->token
                              : *sampler.sample(p.best());
    first += token == 0 ? 1 : 0;
    sampler.accept(token);
  }
  return first / double{kTrials};
}

// The counterexample of the DSpark paper's appendix A: throughputs 1, .5, .45.
TEST(VerifyLengths, AdmissionDoesNotBiasTheOutput) {
  const StepCost paper = cost_of({1, 1 / 0.5, 1 / 0.45});
  const auto early_stop = [](const StepCost& cost, const std::vector<double>& survival) {
    return verify_lengths(cost, 0, {survival})[0];
  };
  EXPECT_NEAR(share_of_first_token(paper, early_stop), 0.7, 0.006);
  for (const std::vector<double>& seconds :
       {std::vector<double>{1, 1, 1}, {1, 1.5, 1.6}, {1, 1.79, 1.9}, {1, 1.2, 3}}) {
    EXPECT_NEAR(share_of_first_token(cost_of(seconds), early_stop), 0.7, 0.006);
  }
  // The test can fail: a search over all lengths has the fault's signature (.85, .15).
  const auto global_search = [](const StepCost& cost, const std::vector<double>& survival) {
    int64_t best = 0;
    double tokens = 1, most = 1 / cost.seconds(1);
    for (size_t j = 0; j < survival.size(); ++j) {
      tokens += survival[j];
      const double rate = tokens / cost.seconds(static_cast<double>(j + 2));
      if (rate > most) {
        most = rate;
        best = static_cast<int64_t>(j + 1);
      }
    }
    return best;
  };
  EXPECT_NEAR(share_of_first_token(paper, global_search), 0.85, 0.006);
}

// Two tokens of a toy language with everything at work: drafts, lengths, replacements, bonus
// tokens.
TEST(VerifyLengths, JointDistributionOfTwoTokens) {
  constexpr int kTrials = 200000;
  const std::vector<double> p1 = {0.6, 0.3, 0.1}, q1 = {0.2, 0.5, 0.3};
  const std::vector<std::vector<double>> p2 = {{0.1, 0.8, 0.1}, {0.4, 0.3, 0.3}, {0.05, 0.05, 0.9}};
  const std::vector<std::vector<double>> q2 = {{0.3, 0.4, 0.3}, {0.1, 0.1, 0.8}, {0.4, 0.3, 0.3}};
  const StepCost cost = cost_of({1, 1.3, 1.45});
  std::array<std::array<int, 3>, 3> counts{};
  std::array<int, 3> lengths{};
  const TestRow p1_row = row_of(p1), q1_row = row_of(q1);
  const auto rows_of = [](const std::vector<std::vector<double>>& p) {
    return std::vector<TestRow>{row_of(p[0]), row_of(p[1]), row_of(p[2])};
  };
  const std::vector<TestRow> p2_rows = rows_of(p2), q2_rows = rows_of(q2);
  for (int i = 0; i < kTrials; ++i) {
    Sampler sampler({.temperature = 1, .seed = static_cast<uint64_t>(i)});
    std::vector<Distribution> from = {*sampler.distribution(q1_row.best())};
    const int32_t d1 = *from[0].pick(sampler.uniform(Draw::kDraft, 0));
    from.push_back(*sampler.distribution(q2_rows[static_cast<size_t>(d1)].best()));
    const int32_t d2 = *from[1].pick(sampler.uniform(Draw::kDraft, 1));
    const double a1 = 0.5, a2 = a1 * (d1 == 1 ? 0.9 : d1 == 0 ? 0.4 : 0.05);
    const int64_t n = verify_lengths(cost, 0, {{a1, a2}})[0];
    ++lengths[static_cast<size_t>(n)];
    const auto next = [&](bool has_draft, const TestRow& p, int32_t d, const auto& q) {
      const Verdict v = has_draft ? *judge(sampler, p.best(), {}, {d, q})
                                  : Verdict{*sampler.sample(p.best()), false};
      sampler.accept(v.token);
      return v;
    };
    const Verdict first = next(n > 0, p1_row, d1, from[0]);
    const auto t1 = static_cast<size_t>(first.token);
    const Verdict second = next(first.kept && n > 1, p2_rows[t1], d2, from[1]);
    ++counts[t1][static_cast<size_t>(second.token)];
  }
  EXPECT_GT(lengths[1], kTrials / 10);
  EXPECT_GT(lengths[2], kTrials / 10);
  for (size_t a = 0; a < 3; ++a) {
    for (size_t b = 0; b < 3; ++b) {
      // Four standard errors.
      EXPECT_NEAR(counts[a][b] / double{kTrials}, p1[a] * p2[a][b], 0.0045) << a << " " << b;
    }
  }
}

// A decoder with given costs, on a clock of its own.
struct Simulation {
  double draft_seconds;
  std::vector<double> step_seconds;  // of 1, 2, ... rows
  double right;                      // drafts of a step that are right, on average
  int64_t block = 3;
  double logit = 0;  // what the drafter says of every draft

  double cost(int64_t rows) const { return step_seconds[static_cast<size_t>(rows - 1)]; }

  // Seconds of `steps` steps of one request over those of as many tokens without drafts. `watch`
  // hears of every step whether it drafts, and the policy is the one that said so.
  double slowdown(
      DraftPolicy& policy, int64_t steps, const std::function<void(bool)>& watch = [](bool) {
      }) const {
    double seconds = 0, tokens = 0, owed = 0;
    for (int64_t i = 0; i < steps; ++i) {
      int64_t drafts = 0, kept = 0;
      const bool tries = policy.next(1);
      watch(tries);
      if (tries) {
        policy.record_draft(1, draft_seconds);
        seconds += draft_seconds;
        const double confidence = policy.confidence(logit);
        std::vector<double> survival;
        for (int64_t k = 0; k < block; ++k) {
          survival.push_back(confidence * (k == 0 ? 1.0 : survival.back()));
        }
        drafts = policy.lengths(draft_seconds, {survival})[0];
        owed += right;
        const auto whole = static_cast<int64_t>(owed);
        owed -= static_cast<double>(whole);
        kept = std::min(whole, drafts);
        for (int64_t k = 0; k < std::min(kept + 1, drafts); ++k) {
          policy.record_draft_outcome(k, confidence, k < kept);
        }
        policy.record_outcome(1, 1 + drafts, 1 + kept);
      }
      policy.record_step(1 + drafts, cost(1 + drafts));
      seconds += cost(1 + drafts);
      tokens += static_cast<double>(1 + kept);
    }
    return seconds / (tokens * cost(1));
  }
};

constexpr int64_t kWindow = 64;

// What a policy knows when decoding begins.
DraftPolicy measured(const Simulation& simulation) {
  DraftPolicy policy(simulation.block, kWindow);
  policy.record_draft(1, simulation.draft_seconds);
  for (int64_t rows = 1; rows <= simulation.block + 1; ++rows) {
    policy.record_step(rows, simulation.cost(rows));
  }
  return policy;
}

// A step over 4 rows costs 1.3 and brings 3 tokens. Each 64 such are followed by a plain step.
constexpr double kGood = (64 * 1.5 + 1) / (64 * 3 + 1);
Simulation good_drafts() {
  return {.draft_seconds = 0.2, .step_seconds = {1, 1.1, 1.2, 1.3}, .right = 2};
}
// The same drafter when it is never right.
Simulation bad_drafts() {
  Simulation simulation = good_drafts();
  simulation.right = 0;
  return simulation;
}

TEST(DraftPolicy, UsesDraftsThatPay) {
  const Simulation simulation = good_drafts();
  DraftPolicy policy = measured(simulation);
  // From the first step on, whatever the drafter says of itself.
  EXPECT_LT(simulation.slowdown(policy, 20), 0.55);
  simulation.slowdown(policy, 200);
  EXPECT_NEAR(simulation.slowdown(policy, 6500), kGood, 0.02);
}

// Two processors, a model of 1.3 B parameters (docs/benchmarks.md): a draft costs more than a plain
// step, and only all five drafts pay.
TEST(DraftPolicy, GainsThatNeedManyDraftsAreFound) {
  const Simulation simulation{
      .draft_seconds = 24.2, .step_seconds = {20.7, 25, 35, 44, 59, 74.5}, .right = 5, .block = 5};
  DraftPolicy policy = measured(simulation);
  const double best = (24.2 + 74.5) / 6 / 20.7;
  EXPECT_LT(simulation.slowdown(policy, 10), best + 0.03);
  simulation.slowdown(policy, 100);
  EXPECT_LT(simulation.slowdown(policy, 1000), best + 0.01);
}

// The same machine with a drafter that knows nothing: what it costs to find out, and in the long
// run.
TEST(DraftPolicy, TurnsItselfDown) {
  for (const double right : {0.0, 0.3, 1.0}) {
    const Simulation simulation{.draft_seconds = 24.2,
                                .step_seconds = {20.7, 25, 35, 44, 59, 74.5},
                                .right = right,
                                .block = 5};
    DraftPolicy policy = measured(simulation);
    EXPECT_LT(simulation.slowdown(policy, 400), 1.03) << right;
    EXPECT_LT(simulation.slowdown(policy, 10000), 1.01) << right;
  }
}

// Confidences that promise everything change nothing.
TEST(DraftPolicy, TurnsItselfDownAgainstABoastingDrafter) {
  Simulation simulation = bad_drafts();
  simulation.logit = 6;
  simulation.draft_seconds = 0.5;
  DraftPolicy policy = measured(simulation);
  EXPECT_LT(simulation.slowdown(policy, 400), 1.03);
  EXPECT_LT(simulation.slowdown(policy, 10000), 1.01);
}

// Where even right drafts lose nothing is ever drafted, and a batch in which they win is seen.
TEST(DraftPolicy, WhatCannotPayIsNotTried) {
  DraftPolicy policy(3, kWindow);
  policy.record_draft(1, 0.26);
  policy.record_draft(4, 0.89);
  for (const auto& [rows, seconds] : {std::pair(1, 0.31), {2, 0.43}, {4, 0.89}, {16, 3.39}}) {
    policy.record_step(rows, seconds);
  }
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(policy.next(4));
    // Not at once: it may be one of few.
    EXPECT_EQ(policy.keeps_context(), i < 128);
  }
  EXPECT_TRUE(policy.next(1));
  EXPECT_TRUE(policy.keeps_context());
  EXPECT_EQ(policy.lengths(0.26, {{0.5, 0.25, 0.125}, {0.5}}).size(), 2u);
  EXPECT_EQ(policy.lengths(0.26, {{0.5, 0.25, 0.125}}), std::vector<int64_t>{3});
}

// A pause leaves the context alone for most of its time, and a draft always finds all of it.
TEST(DraftPolicy, TheContextIsThereWhenADraftIs) {
  const Simulation bad = bad_drafts();
  DraftPolicy policy = measured(bad);
  int64_t rows = kWindow, drafts = 0, extended = 0;
  constexpr int64_t kSteps = 40000;
  bad.slowdown(policy, kSteps, [&](bool tries) {
    if (tries) {
      EXPECT_GE(rows, kWindow);
      EXPECT_TRUE(policy.keeps_context());
      ++drafts;
    }
    rows = policy.keeps_context() ? rows + 1 : 0;
    extended += policy.keeps_context() ? 1 : 0;
  });
  EXPECT_GT(drafts, 20);
  // Pauses of 128, 256, ... 4096, 4096, ...: 14 in all, each with a window before its end.
  EXPECT_LT(extended, 14 * kWindow + drafts);
  // Good drafts need it in every step.
  const Simulation good = good_drafts();
  DraftPolicy drafting = measured(good);
  good.slowdown(drafting, 1000, [&](bool) { EXPECT_TRUE(drafting.keeps_context()); });
}

TEST(DraftPolicy, ComesBackWhenDraftsPayAgain) {
  const Simulation good = good_drafts(), bad = bad_drafts();
  DraftPolicy policy = measured(good);
  bad.slowdown(policy, 20000);
  good.slowdown(policy, 5000);  // the longest pause
  EXPECT_NEAR(good.slowdown(policy, 6500), kGood, 0.02);
}

// The cost of plain steps is measured again while drafts pay, or a stale one would keep them.
TEST(DraftPolicy, PlainStepsAreMeasuredAgain) {
  Simulation simulation = bad_drafts();
  simulation.draft_seconds = 0.5;
  simulation.right = 0.3;
  DraftPolicy policy(simulation.block, kWindow);
  policy.record_step(1, 10.0);  // a busy machine, at the start
  simulation.slowdown(policy, 400);
  EXPECT_LT(simulation.slowdown(policy, 4000), 1.02);
}

// A plain step that is taken for dearer than it is makes a small loss look like a small gain.
TEST(DraftPolicy, SmallGainsAreCheckedOften) {
  const Simulation simulation{.draft_seconds = 0.3, .step_seconds = {1, 1.9, 2.9, 3.9}, .right = 3};
  DraftPolicy policy = measured(simulation);
  for (int i = 0; i < 5; ++i) {
    policy.record_step(1, 1.15);
  }
  EXPECT_LT(simulation.slowdown(policy, 200), 1.03);
}

TEST(DraftCalibration, ReadsTemperaturesAndNamesFaults) {
  const test::TempDirectory directory;
  EXPECT_EQ(*read_draft_calibration(directory.path(), 3), (std::vector<double>{1, 1, 1}));
  const auto read = [&](const std::string& json) {
    EXPECT_TRUE(write_file(directory.path() + "/draft_calibration.json", json).ok());
    return read_draft_calibration(directory.path(), 3);
  };
  EXPECT_EQ(*read(R"({"temperatures": [0.5, 1, 2.25], "num_samples": 7})"),
            (std::vector<double>{0.5, 1, 2.25}));
  for (const auto& [json, what] : {
           std::pair("[]", "must be an object"),
           std::pair("{}", "temperatures has 0 values, dspark_block_size is 3"),
           std::pair(R"({"temperatures": [1, 1]})", "temperatures has 2 values"),
           std::pair(R"({"temperatures": 1})", "temperatures must be an array"),
           std::pair(R"({"temperatures": [1, 0, 1]})", "temperatures[1] is 0, must be"),
           std::pair(R"({"temperatures": [1, 1, "x"]})", R"(temperatures[2] is "x")"),
           std::pair(R"({"temperatures": [1e9, 1, 1]})", "temperatures[0] is 1000000000.0"),
           std::pair("{", "draft_calibration.json"),
       }) {
    const auto result = read(json);
    ASSERT_FALSE(result.ok()) << json;
    EXPECT_NE(result.error().message().find(what), std::string::npos) << result.error().message();
    EXPECT_NE(result.error().message().find("draft_calibration.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace cachalot::engine
