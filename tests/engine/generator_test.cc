// Whole-model behaviour over a synthetic t1 checkpoint: saving, rollback, refusals.
#include "engine/generator.h"

#include <cmath>

#include "tests/engine/t1_fixture.h"

namespace cachalot::engine {
namespace {

class GeneratorTest : public T1Fixture {
 protected:
  static std::unique_ptr<model::StepRunner> make_runner(Runtime& runtime) {
    return std::move(runtime.make_runner().value());
  }
  static std::unique_ptr<kvcache::SequenceCache> make_cache(Runtime& runtime) {
    return std::move(runtime.make_cache().value());
  }

  // Runs tokens through one step and commits `accepted` of them (-1: all). Returns all logits.
  static std::vector<float> step(model::StepRunner& runner,
                                 kvcache::SequenceCache& cache,
                                 std::span<const int32_t> ids,
                                 int32_t accepted = -1,
                                 bool draft_context = true) {
    EXPECT_TRUE(cache.reserve(cache.view().length + static_cast<int64_t>(ids.size())).ok());
    const model::StepSequence sequence{.view = &cache.view(), .tokens = ids, .all_logits = true};
    const auto logits = runner.run({&sequence, 1}, nullptr, draft_context);
    EXPECT_TRUE(logits.ok()) << logits.error().message();
    std::vector<float> values(logits->as<float>(), logits->as<float>() + logits->shape.elements());
    const int32_t n = accepted < 0 ? static_cast<int32_t>(ids.size()) : accepted;
    EXPECT_TRUE(runner.commit({&n, 1}).ok());
    return values;
  }
};

// Lengths around every threshold of t1.
constexpr int64_t kEdges[] = {1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 33};

// a saved and restored request goes on bit for bit, in another slot too.
TEST_F(GeneratorTest, A22_SaveAndRestoreAtEveryEdge) {
  const auto runtime = open();
  const auto runner = make_runner(*runtime);
  const std::vector<int32_t> next = tokens(4, 99);
  for (int64_t length : kEdges) {
    const auto cache = make_cache(*runtime);
    step(*runner, *cache, tokens(length));
    const std::string record = cache->save().value();
    const auto other = make_cache(*runtime), restored = make_cache(*runtime);
    step(*runner, *other, tokens(20, 5));
    ASSERT_TRUE(restored->restore(record).ok());
    for (int32_t token : next) {
      EXPECT_EQ(step(*runner, *restored, {&token, 1}), step(*runner, *cache, {&token, 1}))
          << length;
    }
    EXPECT_EQ(restored->save().value(), cache->save().value());
  }
}

// rows that are not committed never happened: for every accepted prefix and every residue of
// the position, the state, with the drafter's, equals that of serial decoding.
TEST_F(GeneratorTest, A38_RejectedRowsLeaveNoTrace) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  const std::vector<int32_t> draft = tokens(4, 7), after = tokens(3, 8);
  for (int64_t length : {1, 2, 7, 8, 15, 16}) {
    for (int32_t accepted = 0; accepted <= 4; ++accepted) {
      const auto verified = make_cache(*runtime), serial = make_cache(*runtime);
      step(*runner, *verified, tokens(length));
      step(*runner, *serial, tokens(length));
      step(*runner, *verified, draft, accepted);
      for (int32_t i = 0; i < accepted; ++i) {
        step(*runner, *serial, {&draft[static_cast<size_t>(i)], 1});
      }
      EXPECT_EQ(verified->save().value(), serial->save().value()) << length << " " << accepted;
      EXPECT_EQ(step(*runner, *verified, after), step(*runner, *serial, after));
    }
  }
}

// after T tokens there are floor(T / ratio) entries; an open group writes nothing.
TEST_F(GeneratorTest, A06_AnOpenGroupWritesNothing) {
  const auto runtime = open();
  const auto runner = make_runner(*runtime);
  const auto cache = make_cache(*runtime);
  ASSERT_TRUE(cache->reserve(64).ok());
  const ops::SourceView& source = cache->view().sources[0];
  for (int64_t i = 0; i < 32; ++i) {
    std::fill_n(source.main.row(i), source.main.row_bytes, uint8_t{0xFF});
  }
  step(*runner, *cache, tokens(31));
  const auto untouched = [&](int64_t entry) {
    return std::all_of(source.main.row(entry),
                       source.main.row(entry) + source.main.row_bytes,
                       [](uint8_t byte) { return byte == 0xFF; });
  };
  EXPECT_FALSE(untouched(14));
  EXPECT_TRUE(untouched(15));
}

// ids outside of the vocabulary are refused before anything runs, and nothing changes.
TEST_F(GeneratorTest, A34_TokensOutsideOfTheVocabularyAreRefused) {
  const auto runtime = open();
  const auto runner = make_runner(*runtime);
  const auto cache = make_cache(*runtime);
  step(*runner, *cache, tokens(5));
  const std::string before = cache->save().value();
  for (int32_t bad : {-1, 512, 517, 2147483647}) {
    const std::vector<int32_t> ids = {3, bad};
    const model::StepSequence sequence{.view = &cache->view(), .tokens = ids};
    const auto result = runner->run({&sequence, 1});
    ASSERT_FALSE(result.ok());
    EXPECT_NE(result.error().message().find(std::to_string(bad)), std::string::npos);
    EXPECT_EQ(cache->save().value(), before);
  }
}

// the first forward of a process is like any other.
TEST_F(GeneratorTest, A35_FirstForwardOfAnyLength) {
  for (int64_t length : {1, 13}) {
    const auto runtime = open();
    const auto runner = make_runner(*runtime);
    const auto first = make_cache(*runtime), second = make_cache(*runtime);
    const std::vector<float> logits = step(*runner, *first, tokens(length));
    EXPECT_EQ(step(*runner, *second, tokens(length)), logits);
  }
}

// history and positions of a request that straddles two steps at any point.
TEST_F(GeneratorTest, A33_AnySplitOfAPromptGivesTheSame) {
  const auto runtime = open();
  const auto runner = make_runner(*runtime);
  const std::vector<int32_t> ids = tokens(24);
  const auto whole = make_cache(*runtime);
  const std::vector<float> expected = step(*runner, *whole, ids);
  for (size_t split = 1; split < ids.size(); ++split) {
    const auto cache = make_cache(*runtime);
    std::vector<float> logits = step(*runner, *cache, {ids.data(), split});
    const std::vector<float> rest = step(*runner, *cache, {ids.data() + split, ids.size() - split});
    logits.insert(logits.end(), rest.begin(), rest.end());
    EXPECT_EQ(logits, expected) << split;
    EXPECT_EQ(cache->save().value(), whole->save().value());
  }
}

// neighbours in a step do not matter, and neither does what freed pages held.
TEST_F(GeneratorTest, A14_NeighboursAndOldPagesDoNotMatter) {
  const auto runtime = open();
  const auto runner = make_runner(*runtime);
  std::vector<float> alone;
  {
    const auto cache = make_cache(*runtime);
    alone = step(*runner, *cache, tokens(19));
    // Poison what the next owners of these pages and rings will get.
    for (ops::SourceView& source : cache->view().sources) {
      for (int64_t i = 0; i < source.page_count * source.index.page_rows; ++i) {
        std::fill_n(source.main.row(i), source.main.row_bytes, uint8_t{0xFF});
        std::fill_n(source.index.row(i), source.index.row_bytes, uint8_t{0xFF});
      }
    }
  }
  std::vector<std::unique_ptr<kvcache::SequenceCache>> caches;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<model::StepSequence> sequences;
  for (int64_t length : {3, 19, 1, 30}) {
    caches.push_back(make_cache(*runtime));
    ASSERT_TRUE(caches.back()->reserve(length).ok());
    prompts.push_back(length == 19 ? tokens(19) : tokens(length, 50));
  }
  for (size_t i = 0; i < caches.size(); ++i) {
    sequences.push_back({.view = &caches[i]->view(), .tokens = prompts[i], .all_logits = true});
  }
  const auto logits = runner->run(sequences);
  ASSERT_TRUE(logits.ok());
  const float* rows = logits->as<float>() + 3 * 512;
  EXPECT_EQ(std::vector<float>(rows, rows + 19 * 512), alone);
}

TEST_F(GeneratorTest, ContextBeyondTheModelIsRefused) {
  const auto runtime = open();
  const auto runner = make_runner(*runtime);
  const auto cache = make_cache(*runtime);
  cache->view().length = 16384;
  const std::vector<int32_t> ids = {3};
  const model::StepSequence sequence{.view = &cache->view(), .tokens = ids};
  EXPECT_EQ(runner->run({&sequence, 1}).error().code(), Code::kOutOfRange);
  cache->view().length = 0;
}

TEST_F(GeneratorTest, RequestsAreCheckedBeforeAnythingRuns) {
  const auto runtime = open();
  Generator generator(*runtime, {});
  EXPECT_FALSE(generator.generate({{.prompt = {}}}).ok());
  EXPECT_FALSE(generator.generate({{.prompt = {5}, .max_tokens = 0}}).ok());
  EXPECT_FALSE(generator.generate({{.prompt = {5}, .sampling = {.top_p = 2}}}).ok());
  EXPECT_FALSE(generator.generate({{.prompt = {512}}}).ok());
  EXPECT_FALSE(generator.score({}, 0).ok());
}

TEST_F(GeneratorTest, PoolExhaustionIsAnErrorNotACrash) {
  const auto runtime = open({.max_cached_tokens = 32});
  Generator generator(*runtime, {});
  const auto result = generator.generate({{.prompt = tokens(40)}});
  EXPECT_EQ(result.error().code(), Code::kOutOfRange);
  EXPECT_EQ(runtime->pages().pages_in_use(), 0);
}

TEST_F(GeneratorTest, StopIdsStopStringsAndEos) {
  const auto runtime = open();
  Generator generator(*runtime, {});
  GenerateRequest request{.prompt = tokens(6), .max_tokens = 30, .ignore_eos = true};
  const auto free = generator.generate({request});
  ASSERT_TRUE(free.ok());
  ASSERT_EQ((*free)[0].token_ids.size(), 30u);
  EXPECT_EQ((*free)[0].finish, FinishReason::kLength);
  request.stop_ids = {(*free)[0].token_ids[10]};
  const auto stopped = generator.generate({request});
  EXPECT_EQ((*stopped)[0].finish, FinishReason::kStop);
  EXPECT_LE((*stopped)[0].token_ids.size(), 10u);
  request.stop_ids.clear();
  const std::string text = (*free)[0].text;
  ASSERT_GT(text.size(), 6u);
  request.stop = {text.substr(4, 2)};
  const auto cut = generator.generate({request});
  EXPECT_EQ((*cut)[0].text, text.substr(0, text.find(request.stop[0])));
}

// Drafter ---------------------------------------------------------------------------------------

// Logits and confidences of the best drafts behind `anchor`.
std::vector<float> drafts(model::StepRunner& runner,
                          kvcache::SequenceCache& cache,
                          int32_t anchor,
                          int64_t draft_from = 0) {
  const model::StepSequence sequence{
      .view = &cache.view(), .tokens = {&anchor, 1}, .draft_from = draft_from};
  EXPECT_TRUE(runner.draft({&sequence, 1}).ok());
  std::vector<float> all;
  for (int k = 0; k < 3; ++k) {
    const auto next = runner.next_draft({&anchor, 1});
    EXPECT_TRUE(next.ok()) << next.error().message();
    const float* logits = next->logits.as<float>();
    all.insert(all.end(), logits, logits + 512);
    all.push_back(next->confidence.as<float>()[0]);
    anchor = static_cast<int32_t>(std::max_element(logits, logits + 512) - logits);
  }
  return all;
}

// The same drafts whether the context came from one prefill, from steps of one token, or from
// verification with any number of rejected rows, and after a restore.
TEST_F(GeneratorTest, DraftsDoNotDependOnHowTheContextCame) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  const std::vector<int32_t> wrong = tokens(4, 7);
  for (int64_t length : {1, 2, 7, 8, 9, 16, 21}) {
    const std::vector<int32_t> ids = tokens(length);
    const auto whole = make_cache(*runtime);
    step(*runner, *whole, ids);
    const std::vector<float> expected = drafts(*runner, *whole, 33);
    EXPECT_NE(drafts(*runner, *whole, 34), expected);
    EXPECT_EQ(drafts(*runner, *whole, 33), expected);  // a draft changes nothing
    const auto restored = make_cache(*runtime);
    ASSERT_TRUE(restored->restore(whole->save().value()).ok());
    EXPECT_EQ(drafts(*runner, *restored, 33), expected);
    for (int64_t verified : {1, 2, 3, 4}) {
      // Steps of `verified` right tokens and some wrong ones behind them.
      const auto cache = make_cache(*runtime);
      for (int64_t at = 0; at < length; at += verified) {
        const int64_t right = std::min(verified, length - at);
        std::vector<int32_t> rows(ids.begin() + at, ids.begin() + at + right);
        rows.insert(rows.end(), wrong.begin(), wrong.begin() + (4 - right));
        step(*runner, *cache, rows, static_cast<int32_t>(right));
      }
      EXPECT_EQ(drafts(*runner, *cache, 33), expected) << length << " " << verified;
    }
  }
}

// Steps that leave the draft context alone give the same logits, and drafts behind them see what
// later steps have added: all that there is to see once that is a window.
TEST_F(GeneratorTest, ADraftContextThatWasLeftAlone) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  const int64_t window = runtime->config().sliding_window;
  for (const int64_t before : {0, 5, 20}) {
    for (const int64_t left : {1, 3, 11}) {
      const auto whole = make_cache(*runtime), cache = make_cache(*runtime);
      const std::vector<int32_t> ids = tokens(before + left + window);
      const std::span<const int32_t> all(ids);
      step(*runner, *whole, all.first(static_cast<size_t>(before + left)));
      if (before > 0) {
        step(*runner, *cache, all.first(static_cast<size_t>(before)));
      }
      for (int64_t i = before; i < before + left; ++i) {
        step(*runner, *cache, all.subspan(static_cast<size_t>(i), 1), -1, false);
      }
      const int64_t from = before + left;
      for (int64_t i = from;; ++i) {
        EXPECT_EQ(drafts(*runner, *cache, 33, from), drafts(*runner, *whole, 33, from)) << i;
        if (i == from + window) {
          break;
        }
        const auto next = all.subspan(static_cast<size_t>(i), 1);
        EXPECT_EQ(step(*runner, *cache, next), step(*runner, *whole, next)) << i;
      }
      EXPECT_EQ(drafts(*runner, *cache, 33, from), drafts(*runner, *whole, 33));
    }
  }
}

// Drafts of several requests in one call are those of each alone.
TEST_F(GeneratorTest, DraftsDoNotDependOnTheirNeighbours) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  std::vector<std::unique_ptr<kvcache::SequenceCache>> caches;
  std::vector<std::vector<float>> expected;
  const std::vector<int32_t> anchors = {5, 90, 400};
  for (size_t i = 0; i < 3; ++i) {
    caches.push_back(make_cache(*runtime));
    step(*runner, *caches[i], tokens(static_cast<int64_t>(3 + 7 * i), i));
    expected.push_back(drafts(*runner, *caches[i], anchors[i]));
  }
  std::vector<model::StepSequence> sequences;
  for (size_t i = 0; i < 3; ++i) {
    sequences.push_back({.view = &caches[i]->view(), .tokens = {&anchors[i], 1}});
  }
  ASSERT_TRUE(runner->draft(sequences).ok());
  std::vector<int32_t> previous = anchors;
  for (size_t k = 0; k < 3; ++k) {
    const auto next = runner->next_draft(previous);
    for (size_t i = 0; i < 3; ++i) {
      const float* logits = next->logits.as<float>() + i * 512;
      EXPECT_TRUE(
          std::equal(logits, logits + 512, expected[i].begin() + static_cast<long>(k) * 513));
      EXPECT_EQ(next->confidence.as<float>()[i], expected[i][k * 513 + 512]);
      previous[i] = static_cast<int32_t>(std::max_element(logits, logits + 512) - logits);
    }
  }
}

TEST_F(GeneratorTest, TheTargetDoesNotSeeTheDrafter) {
  const auto plain = open(), drafting = open({.draft = true});
  const auto a = make_cache(*plain), b = make_cache(*drafting);
  const auto plain_runner = make_runner(*plain), drafting_runner = make_runner(*drafting);
  EXPECT_EQ(step(*plain_runner, *a, tokens(30)), step(*drafting_runner, *b, tokens(30)));
}

// Requests whose few likely tokens drafter and target often agree on.
GenerateRequest biased_request(std::vector<int32_t> prompt, SamplingParams sampling) {
  sampling.logit_bias = {{40, 30.0f}, {41, 30.0f}, {42, 30.0f}};
  return {.prompt = std::move(prompt), .sampling = sampling, .max_tokens = 40, .ignore_eos = true};
}

void expect_same(const GenerateResult& got, const GenerateResult& want) {
  EXPECT_EQ(got.token_ids, want.token_ids);
  EXPECT_EQ(got.logprobs, want.logprobs);
  EXPECT_EQ(got.text, want.text);
  EXPECT_EQ(got.finish, want.finish);
}

// with temperature 0 speculation gives the same tokens and log-probabilities bit for bit,
// whatever the number of drafts, the penalties, and the way a request ends.
TEST_F(GeneratorTest, A36_GreedySpeculationChangesNothing) {
  const auto plain = open(), drafting = open({.draft = true});
  std::vector<GenerateRequest> requests;
  for (int64_t length : {1, 2, 8, 17, 30}) {
    const std::vector<int32_t> prompt = tokens(length, static_cast<uint64_t>(length));
    requests.push_back(biased_request(prompt, {.temperature = 0}));
    requests.push_back(biased_request(prompt, {.temperature = 0, .frequency_penalty = 1.0f}));
    requests.push_back({.prompt = prompt, .sampling = {.temperature = 0}, .max_tokens = 9});
    requests.push_back(biased_request(prompt, {.temperature = 0}));
    requests.back().stop_ids = {41};
  }
  const auto want = Generator(*plain, {.chunk = 16}).generate(requests);
  ASSERT_TRUE(want.ok());
  for (int64_t length : {0, 1, 2, 3, 9}) {
    const auto got =
        Generator(*drafting, {.chunk = 16, .speculation = {.length = length}}).generate(requests);
    ASSERT_TRUE(got.ok()) << got.error().message();
    int64_t drafted = 0, accepted = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "request " << i << " drafts " << length);
      expect_same((*got)[i], (*want)[i]);
      drafted += (*got)[i].draft_tokens;
      accepted += (*got)[i].accepted_tokens;
    }
    if (length > 0) {
      // Some drafts are kept and some are not: both paths were taken.
      EXPECT_GT(accepted, 50);
      EXPECT_LT(accepted, drafted - 50);
    }
  }
}

// Sampled output with a fixed number of drafts depends on the request alone, and has the
// distribution of plain decoding.
TEST_F(GeneratorTest, SampledSpeculation) {
  const auto plain = open(), drafting = open({.draft = true});
  std::vector<GenerateRequest> requests;
  constexpr size_t kRequests = 400;
  for (size_t i = 0; i < kRequests; ++i) {
    requests.push_back(biased_request(tokens(6), {.temperature = 1, .seed = i}));
    requests.back().max_tokens = 3;
  }
  Generator generator(*drafting, {.speculation = {.length = 3}});
  const auto drafted = generator.generate(requests);
  const auto undrafted = Generator(*plain, {}).generate(requests);
  ASSERT_TRUE(drafted.ok() && undrafted.ok());
  for (size_t i : {0, 57, 399}) {
    expect_same((*generator.generate({requests[i]}))[0], (*drafted)[i]);
  }
  for (size_t position = 0; position < 3; ++position) {
    for (int32_t token : {40, 41, 42}) {
      double share[2] = {};
      for (size_t i = 0; i < kRequests; ++i) {
        share[0] += (*drafted)[i].token_ids[position] == token;
        share[1] += (*undrafted)[i].token_ids[position] == token;
      }
      // Four standard errors of the difference of two shares.
      EXPECT_NEAR(share[0] / kRequests, share[1] / kRequests, 4 * std::sqrt(0.5 / kRequests));
    }
  }
}

// Drafts that are never kept are given up, even where rows cost nothing.
TEST_F(GeneratorTest, WorthlessDraftsAreGivenUp) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  const auto cache = make_cache(*runtime);
  step(*runner, *cache, tokens(5));
  Speculator speculator(runtime->model().config, {});
  for (const int64_t rows : {1, 4}) {
    speculator.policy().record_step(rows, 1.0);
  }
  const Sampler sampler({.temperature = 0});
  const Speculator::Member member{
      .view = &cache->view(), .anchor = 7, .sampler = &sampler, .most = 3};
  int drafts = 0;
  for (int i = 0; i < 50; ++i) {
    const auto proposals = speculator.propose(*runner, {&member, 1});
    ASSERT_TRUE(proposals.ok());
    // A trial verifies what would be best if drafts were kept.
    EXPECT_EQ((*proposals)[0].size(), speculator.drafted() ? 3u : 0u);
    if (speculator.drafted()) {
      ++drafts;
      speculator.policy().record_draft_outcome(0, (*proposals)[0][0].confidence, false);
      speculator.policy().record_outcome(1, 4, 1);
    }
  }
  EXPECT_GT(drafts, 0);
  EXPECT_LT(drafts, 10);
}

// In a pause the draft context is left alone. Whenever drafts are tried again they are those of a
// context that never was, and a request whose context lacks rows waits for them.
TEST_F(GeneratorTest, DraftsBehindAPauseAreThoseOfAWholeContext) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  const auto cache = make_cache(*runtime), whole = make_cache(*runtime);
  std::vector<float> logits = step(*runner, *cache, tokens(5));
  step(*runner, *whole, tokens(5));
  Speculator speculator(runtime->config(), {}), fixed(runtime->config(), {.length = 3});
  for (const int64_t rows : {1, 4}) {
    speculator.policy().record_step(rows, 1.0);
  }
  const Sampler sampler({.temperature = 0});
  int64_t draft_from = 0, trials = 0, left = 0;
  bool drafted = false;
  constexpr int kSteps = 700;
  for (int i = 0; i < kSteps; ++i) {
    const auto anchor = static_cast<int32_t>(std::max_element(logits.end() - 512, logits.end()) -
                                             logits.end() + 512);
    Speculator::Member member{.view = &cache->view(),
                              .anchor = anchor,
                              .sampler = &sampler,
                              .most = 3,
                              .draft_from = draft_from};
    const auto proposals = speculator.propose(*runner, {&member, 1});
    ASSERT_TRUE(proposals.ok());
    trials += speculator.drafted() && !drafted ? 1 : 0;
    drafted = speculator.drafted();
    if (drafted) {
      member.view = &whole->view();
      member.draft_from = 0;
      const auto expected = fixed.propose(*runner, {&member, 1});
      for (size_t k = 0; k < 3; ++k) {
        EXPECT_EQ((*proposals)[0][k].token, (*expected)[0][k].token) << i;
        EXPECT_EQ((*proposals)[0][k].from.total, (*expected)[0][k].from.total) << i;
      }
      speculator.policy().record_draft_outcome(0, (*proposals)[0][0].confidence, false);
      speculator.policy().record_outcome(1, 4, 1);
    }
    const bool context = speculator.keeps_context();
    logits = step(*runner, *cache, {&anchor, 1}, -1, context);
    EXPECT_EQ(step(*runner, *whole, {&anchor, 1}), logits);
    draft_from = context ? draft_from : cache->view().length;
    left += context ? 0 : 1;
  }
  // Pauses of 128 and 256 steps at least.
  EXPECT_GE(trials, 3);
  EXPECT_GT(left, 2 * kSteps / 3);
  // Asked in the middle of the pause that goes on, for the policy would draft.
  Speculator eager(runtime->config(), {.length = 3});
  Speculator::Member member{.view = &cache->view(),
                            .anchor = 7,
                            .sampler = &sampler,
                            .most = 3,
                            .draft_from = cache->view().length - runtime->config().sliding_window};
  EXPECT_FALSE((*eager.propose(*runner, {&member, 1}))[0].empty());
  ++member.draft_from;
  EXPECT_TRUE((*eager.propose(*runner, {&member, 1}))[0].empty());
  EXPECT_FALSE(eager.drafted());
}

// A stored temperature decides with the confidence whether a draft is worth its row.
TEST_F(GeneratorTest, TemperaturesCalibrateTheConfidence) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  const auto cache = make_cache(*runtime);
  step(*runner, *cache, tokens(5));
  const int32_t anchor = 7;
  const model::StepSequence sequence{.view = &cache->view(), .tokens = {&anchor, 1}};
  ASSERT_TRUE(runner->draft({&sequence, 1}).ok());
  const double logit = runner->next_draft({&anchor, 1})->confidence.as<float>()[0];
  const Sampler sampler({.temperature = 0});
  const Speculator::Member member{
      .view = &cache->view(), .anchor = anchor, .sampler = &sampler, .most = 1};
  int drafted = 0;
  for (const double temperature : {0.01, 0.3, 1.0, 100.0}) {
    const double survival = 1 / (1 + std::exp(-logit / temperature));
    for (const double row_cost : {0.1, 0.3, 0.45, 0.55, 0.7, 0.9}) {
      Speculator speculator(runtime->config(), {}, std::vector<double>(3, temperature));
      // So long that the draft's own time is nothing beside.
      speculator.policy().record_step(1, 1e9);
      speculator.policy().record_step(2, (1 + row_cost) * 1e9);
      // Drafts have paid, so that the confidence alone decides.
      for (int i = 0; i < 6; ++i) {
        speculator.policy().record_outcome(1, 2, 2);
      }
      const auto proposals = speculator.propose(*runner, {&member, 1});
      ASSERT_TRUE(proposals.ok());
      EXPECT_EQ(!(*proposals)[0].empty(), survival > row_cost) << temperature << " " << row_cost;
      drafted += (*proposals)[0].empty() ? 0 : 1;
    }
  }
  EXPECT_GT(drafted, 0);
  EXPECT_LT(drafted, 24);
}

// A confidence that says too little is corrected by what becomes of drafts, and back.
TEST_F(GeneratorTest, OutcomesCorrectTheConfidence) {
  const auto runtime = open({.draft = true});
  const auto runner = make_runner(*runtime);
  const auto cache = make_cache(*runtime);
  step(*runner, *cache, tokens(5));
  Speculator speculator(runtime->config(), {.length = 1});
  const Sampler sampler({.temperature = 0});
  const Speculator::Member member{
      .view = &cache->view(), .anchor = 7, .sampler = &sampler, .most = 1};
  const auto confidence = [&] { return (*speculator.propose(*runner, {&member, 1}))[0][0]; };
  const double before = confidence().confidence;
  for (const bool kept : {true, false}) {
    for (int i = 0; i < 60; ++i) {
      speculator.policy().record_draft_outcome(0, confidence().confidence, kept);
    }
    EXPECT_NEAR(confidence().confidence, kept ? 1 : 0, 0.1);
  }
  EXPECT_GT(before, 0);
  EXPECT_LT(before, 1);
}

// Drafts do not make a request fail that has just the room it needs.
TEST_F(GeneratorTest, DraftsNeedNoPageOfTheirOwn) {
  const auto runtime = open({.draft = true, .max_cached_tokens = 32});
  GenerateRequest request = biased_request(tokens(20), {.temperature = 0});
  request.max_tokens = 13;  // the last one is not run
  const auto result = Generator(*runtime, {.speculation = {.length = 3}}).generate({request});
  ASSERT_TRUE(result.ok()) << result.error().message();
  EXPECT_EQ((*result)[0].token_ids.size(), 13u);
}

TEST_F(GeneratorTest, MissingCheckpointsSaySo) {
  EXPECT_EQ(Runtime::open("/nonexistent", {}).error().code(), Code::kNotFound);
}

}  // namespace
}  // namespace cachalot::engine
