// Steps with rows of images over a synthetic t1-vision checkpoint.
#include "model/vision.h"

#include <cstring>

#include "tests/engine/t1_fixture.h"
#include "text/control_tokens.h"

namespace cachalot::engine {
namespace {

// A prompt with two images behind each other, text around them.
struct Prompt {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> image;
  std::vector<uint8_t> rows;  // of all slots

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

class VisionTest : public T1Fixture {
 protected:
  static void SetUpTestSuite() { set_up("t1-vision"); }

  void SetUp() override {
    runtime_ = open({.draft = true});
    runner_ = std::move(runtime_->make_runner().value());
  }

  std::unique_ptr<kvcache::SequenceCache> make_cache() {
    auto cache = std::move(runtime_->make_cache().value());
    EXPECT_TRUE(cache->reserve(200).ok());
    return cache;
  }

  Prompt prompt(uint64_t seed = 1) const {
    const auto tower = model::VisionTower::create(
        runtime_->model(), {.pool = &runtime_->threads()}, model::Precision::kOfficial);
    Prompt prompt;
    const auto add_text = [&](int64_t count) {
      for (int32_t id : tokens(count, seed + prompt.tokens.size())) {
        prompt.tokens.push_back(id);
        prompt.image.push_back(0);
      }
    };
    add_text(3);
    for (const model::ImageGrid grid : {model::ImageGrid{4, 7}, {3, 3}}) {
      std::vector<float> patches(static_cast<size_t>(grid.rows * grid.columns * 48));
      for (size_t i = 0; i < patches.size(); ++i) {
        patches[i] = static_cast<float>(2 * Philox(seed).uniform(i) - 1);
      }
      const auto image =
          tower->encode({patches.data(), DType::kF32, {grid.rows * grid.columns, 48}}, grid);
      EXPECT_TRUE(image.ok());
      for (int64_t i = 0; i < image->slots; ++i) {
        prompt.tokens.push_back(static_cast<int32_t>(runtime_->config().image_token_id));
        prompt.image.push_back(1);
      }
      prompt.rows.insert(prompt.rows.end(), image->bytes.begin(), image->bytes.end());
    }
    add_text(9);
    return prompt;
  }

  // Positions [begin, begin + count) of a prompt.
  model::StepSequence part(kvcache::SequenceCache& cache,
                           const Prompt& prompt,
                           int64_t begin,
                           int64_t count) const {
    const auto at = static_cast<size_t>(begin), n = static_cast<size_t>(count);
    model::StepSequence step{.view = &cache.view(),
                             .tokens = std::span(prompt.tokens).subspan(at, n),
                             .image = std::span(prompt.image).subspan(at, n),
                             .all_logits = true};
    const int64_t before = std::count(prompt.image.begin(), prompt.image.begin() + begin, 1);
    const int64_t images = std::ranges::count(step.image, 1);
    const int64_t width = runtime_->config().hidden_size;
    if (images > 0) {
      step.image_rows = {const_cast<uint8_t*>(prompt.rows.data()) + before * width * 2,
                         DType::kBF16,
                         {images, width}};
    }
    return step;
  }

  std::vector<float> run(std::span<const model::StepSequence> steps) {
    const auto logits = runner_->run(steps);
    EXPECT_TRUE(logits.ok()) << logits.error().message();
    return {logits->as<float>(), logits->as<float>() + logits->shape.elements()};
  }
  // Runs and commits a part of a prompt.
  std::vector<float> step(kvcache::SequenceCache& cache,
                          const Prompt& prompt,
                          int64_t begin,
                          int64_t count) {
    const model::StepSequence sequence = part(cache, prompt, begin, count);
    std::vector<float> logits = run({&sequence, 1});
    const auto accepted = static_cast<int32_t>(count);
    EXPECT_TRUE(runner_->commit({&accepted, 1}).ok());
    return logits;
  }

  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<model::StepRunner> runner_;
};

TEST_F(VisionTest, ThePresetKnowsItsTokenizer) {
  EXPECT_EQ(*runtime_->tokenizer().control_id(text::kImageToken),
            runtime_->config().image_token_id);
}

TEST_F(VisionTest, AnyCutOfASpanGivesTheSame) {
  const Prompt p = prompt();
  const auto whole = make_cache();
  const std::vector<float> expected = step(*whole, p, 0, p.size());
  for (int64_t chunk = 1; chunk < p.size(); ++chunk) {
    const auto cache = make_cache();
    std::vector<float> logits;
    for (int64_t begin = 0; begin < p.size(); begin += chunk) {
      const std::vector<float> some = step(*cache, p, begin, std::min(chunk, p.size() - begin));
      logits.insert(logits.end(), some.begin(), some.end());
    }
    EXPECT_EQ(logits, expected) << chunk;
    EXPECT_EQ(cache->save().value(), whole->save().value()) << chunk;
  }
}

TEST_F(VisionTest, RowsDoNotDependOnOtherRequests) {
  const Prompt p = prompt(), q = prompt(2);
  const auto alone = make_cache(), first = make_cache(), second = make_cache();
  const std::vector<float> expected = step(*alone, p, 0, p.size());
  const std::vector<model::StepSequence> both = {part(*second, q, 0, q.size()),
                                                 part(*first, p, 0, p.size())};
  const std::vector<float> logits = run(both);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), logits.end() - std::ssize(expected)));
}

// Rows that are not committed never happened, inside of a span and at its ends.
TEST_F(VisionTest, RejectedRowsLeaveNoTrace) {
  const Prompt p = prompt();
  for (int64_t kept = 1; kept < p.size(); ++kept) {
    const auto cut = make_cache(), serial = make_cache();
    const model::StepSequence sequence = part(*cut, p, 0, p.size());
    run({&sequence, 1});
    const auto accepted = static_cast<int32_t>(kept);
    ASSERT_TRUE(runner_->commit({&accepted, 1}).ok());
    step(*serial, p, 0, kept);
    EXPECT_EQ(cut->save().value(), serial->save().value()) << kept;
  }
}

TEST_F(VisionTest, LookbackOfATextWithImages) {
  const Prompt p = prompt();
  const auto cache = make_cache();
  for (int64_t length = 1; length <= p.size(); ++length) {
    step(*cache, p, length - 1, 1);
    const auto n = static_cast<size_t>(length);
    EXPECT_EQ(cache->view().lookback,
              model::engram_lookback(
                  runtime_->model(), std::span(p.tokens).first(n), std::span(p.image).first(n)))
        << length;
  }
}

// What a prompt says depends on its images, and on their slots being such: a text of the same ids
// reads their embedding.
TEST_F(VisionTest, ImagesAreSeen) {
  Prompt p = prompt(), other = p;
  other.rows = prompt(2).rows;
  Prompt text = p;
  std::fill(text.image.begin(), text.image.end(), uint8_t{0});
  const auto last = [&](const Prompt& prompt) {
    const auto cache = make_cache();
    const std::vector<float> logits = step(*cache, prompt, 0, prompt.size());
    return std::vector<float>(logits.end() - 512, logits.end());
  };
  EXPECT_EQ(last(p), last(prompt()));
  EXPECT_NE(last(p), last(other));
  EXPECT_NE(last(p), last(text));
}

// Drafts behind a prompt with images, whose rows are context like any other.
TEST_F(VisionTest, DraftsDoNotDependOnTheChunks) {
  const Prompt p = prompt();
  const int32_t anchor = 17;
  const auto drafted = [&](int64_t chunk) {
    const auto cache = make_cache();
    for (int64_t begin = 0; begin < p.size(); begin += chunk) {
      step(*cache, p, begin, std::min(chunk, p.size() - begin));
    }
    const model::StepSequence sequence{.view = &cache->view(), .tokens = {&anchor, 1}};
    EXPECT_TRUE(runner_->draft({&sequence, 1}).ok());
    const auto next = runner_->next_draft({&anchor, 1});
    return std::vector<float>(next->logits.as<float>(), next->logits.as<float>() + 512);
  };
  EXPECT_EQ(drafted(p.size()), drafted(5));
}

TEST_F(VisionTest, RowsThatDoNotFitAreRefused) {
  const Prompt p = prompt();
  const auto cache = make_cache();
  const std::string before = cache->save().value();
  const model::StepSequence good = part(*cache, p, 0, p.size());
  const auto refused = [&](const model::StepSequence& sequence) {
    const auto result = runner_->run({&sequence, 1});
    return !result.ok() && result.error().code() == Code::kInvalidArgument;
  };
  model::StepSequence bad = good;
  bad.image = bad.image.first(bad.image.size() - 1);
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad.image_rows = {};
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad.image_rows = good.image_rows.rows(0, good.image_rows.dim(0) - 1);
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad.image_rows.dtype = DType::kF32;
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad.image = {};
  EXPECT_TRUE(refused(bad));
  EXPECT_EQ(cache->save().value(), before);
}

}  // namespace
}  // namespace cachalot::engine
