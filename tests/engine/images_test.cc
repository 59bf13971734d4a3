// Images in prompts, over a synthetic t1-vision checkpoint. What a request gives alone, cold and in
// one chunk is the definition; everything else must give the same bits.
#include <algorithm>
#include <thread>

#include "engine/prompt_images.h"
#include "tests/engine/inbox.h"
#include "tests/engine/scheduler_bench.h"

namespace cachalot::engine {
namespace {

using image::Picture;

// A picture of noise, of so many patches.
std::shared_ptr<const Picture> picture(uint8_t seed, int64_t rows = 6, int64_t columns = 9) {
  const model::VisionConfig vision = model::preset_config("t1-vision")->vision;
  Picture out{.patch = vision.patch_size,
              .rows = rows,
              .columns = columns,
              .slots = model::image_slots(vision, {rows, columns}),
              .digest = {seed, static_cast<uint8_t>(rows), static_cast<uint8_t>(columns)}};
  for (int64_t i = 0; i < rows * columns * out.patch * out.patch * 3; ++i) {
    out.rgb.push_back(
        static_cast<uint8_t>(Philox(seed).uniform(static_cast<uint64_t>(i)) * 255.99));
  }
  return std::make_shared<const Picture>(std::move(out));
}

class ImagesTest : public ModeFixture {
 protected:
  static void SetUpTestSuite() { set_up("t1-vision"); }

  // A prompt from pieces: tokens, or a picture's slots.
  class Prompt {
   public:
    Prompt& text(int64_t count, uint64_t seed = 1) {
      ids_ = joined(std::move(ids_), tokens(count, seed));
      return *this;
    }
    Prompt& image(const std::shared_ptr<const Picture>& picture) {
      images_.push_back({std::ssize(ids_), picture});
      ids_.insert(ids_.end(),
                  static_cast<size_t>(picture->slots),
                  static_cast<int32_t>(exact().config().image_token_id));
      return *this;
    }
    int64_t length() const { return std::ssize(ids_); }
    EngineRequest request(int64_t max_tokens = 6, int priority = 0) const {
      EngineRequest out = engine::request(ids_, max_tokens);
      out.images = images_;
      out.priority = priority;
      return out;
    }

   private:
    std::vector<int32_t> ids_;
    std::vector<PromptImage> images_;
  };

  static Answer alone(const Prompt& prompt, int64_t max_tokens = 6) {
    return ModeFixture::alone(prompt.request(max_tokens));
  }

  // Text, the image, text.
  static Prompt around(uint8_t seed, int64_t before = 21, int64_t behind = 13) {
    return Prompt().text(before).image(picture(seed)).text(behind, 2);
  }
  static uint64_t encoded(const Bench& bench) {
    uint64_t count = 0;
    for (const uint64_t n : bench.stats().image_seconds.counts) {
      count += n;
    }
    return count;
  }
};

INSTANTIATE_TEST_SUITE_P(Modes,
                         ImagesTest,
                         testing::Values(Mode::kExact, Mode::kHalo),
                         [](const auto& mode) {
                           return mode.param == Mode::kExact ? "exact" : "halo";
                         });

TEST_P(ImagesTest, AnyBatchAndAnyChunkGivesTheSame) {
  const auto runtime = open();
  const std::vector<Prompt> prompts = {
      around(1),
      Prompt().image(picture(2)).text(3),                                   // at the start
      Prompt().text(5).image(picture(3)),                                   // at the end
      Prompt().text(7).image(picture(4)).image(picture(5, 3, 3)).text(30),  // side by side
      Prompt().text(40),
      Prompt().text(2).image(picture(1, 1, 1)).text(9).image(picture(1)).text(1)};
  std::vector<Answer> expected;
  for (const Prompt& prompt : prompts) {
    expected.push_back(alone(prompt));
  }
  for (const bool cache : {false, true}) {
    for (const int64_t chunk : {1, 3, 16, 100}) {
      Bench bench(*runtime, {.chunk = chunk, .max_running = 4, .prefix_cache = cache});
      std::vector<EngineRequest> requests;
      for (const Prompt& prompt : prompts) {
        requests.push_back(prompt.request());
      }
      const std::vector<Answer> answers = bench.run_all(std::move(requests));
      for (size_t i = 0; i < answers.size(); ++i) {
        EXPECT_TRUE(answers[i].same(expected[i])) << i << " chunk " << chunk << " " << cache;
      }
    }
  }
}

// the same text with the images A, B, A.
TEST_P(ImagesTest, A26_AnotherImageFindsNothing) {
  const auto runtime = open();
  for (const int64_t before : {1, 15, 16, 21, 32}) {
    const Answer first = alone(around(1, before)), second = alone(around(2, before));
    EXPECT_FALSE(first.logprobs == second.logprobs) << "the image has no effect";
    Bench bench(*runtime, {});
    EXPECT_TRUE(bench.run(around(1, before).request()).same(first));
    const Answer other = bench.run(around(2, before).request());
    EXPECT_TRUE(other.same(second)) << before;
    EXPECT_LE(other.cached, before);
    const Answer again = bench.run(around(1, before).request());
    EXPECT_TRUE(again.same(first)) << before;
    if (GetParam() == Mode::kExact) {
      EXPECT_EQ(again.cached, (around(1, before).length() - 1) / kPage * kPage);
    }
    EXPECT_EQ(encoded(bench), 2u);
    // The same image in another place, and its slots as text.
    const Answer moved = bench.run(around(1, before + 1).request());
    EXPECT_TRUE(moved.same(alone(around(1, before + 1))));
    EngineRequest text = around(1, before).request();
    text.images.clear();
    EXPECT_LE(bench.run(std::move(text)).cached, before);
  }
}

// On a store outside of the process, too.
TEST_P(ImagesTest, A26_AnotherImageFindsNothingOnDisk) {
  const test::TempDirectory directory;
  const EngineOptions options{.tiers = {.disk = directory.path()}};
  const Prompt first = around(1, 40, 100), second = around(2, 40, 100);
  {
    const auto runtime = open();
    Bench(*runtime, options).run(first.request());
  }
  const auto runtime = open();
  Bench bench(*runtime, options);
  const Answer other = bench.run(second.request());
  EXPECT_TRUE(other.same(alone(second)));
  EXPECT_LE(other.cached, 40);
  const Answer again = bench.run(first.request());
  EXPECT_TRUE(again.same(alone(first)));
  EXPECT_GT(again.cached, first.length() - 100);
  EXPECT_EQ(encoded(bench), 1u) << "the image of the prefix was encoded";
}

// A prefix that ends behind the image needs no rows of it.
TEST_P(ImagesTest, AHitBehindTheImageEncodesNothing) {
  const auto runtime = open();
  Bench bench(*runtime, {.image_cache_bytes = 0});
  const Prompt prompt = around(1, 21, 60);
  const Answer expected = alone(prompt);
  EXPECT_TRUE(bench.run(prompt.request()).same(expected));
  const Answer again = bench.run(prompt.request());
  EXPECT_TRUE(again.same(expected));
  EXPECT_GE(again.cached, 32);
  EXPECT_EQ(encoded(bench), 1u);
  // Another tail behind the same image.
  Prompt other = around(1, 21, 40);
  other.text(20, 5);
  EXPECT_TRUE(bench.run(other.request()).same(alone(other)));
  EXPECT_EQ(encoded(bench), 1u);
}

// One that ends inside of it needs the rest of them.
TEST_P(ImagesTest, AHitInsideTheImageGoesOnInIt) {
  const auto runtime = open();
  const Prompt prompt = Prompt().text(90).image(picture(1, 18, 18)).text(20, 2);
  const int64_t slots = picture(1, 18, 18)->slots;
  ASSERT_GT(slots, 2 * kPage);
  Bench bench(*runtime, {.chunk = kPage, .image_cache_bytes = 0});
  const RequestId left = bench.add(prompt.request());
  // The first step waits for the image, seven more run a page each.
  for (int i = 0; i < 8; ++i) {
    bench.scheduler().step();
  }
  bench.scheduler().cancel(left);
  const Answer answer = bench.run(prompt.request());
  EXPECT_TRUE(answer.same(alone(prompt)));
  if (GetParam() == Mode::kExact) {
    EXPECT_GT(answer.cached, 90);
    EXPECT_LT(answer.cached, 90 + slots);
  }
  EXPECT_EQ(encoded(bench), 2u);
}

// A preempted request goes on with its image: one whose prompt still runs, and one with output.
TEST_P(ImagesTest, PreemptionChangesNothing) {
  const auto runtime = open();
  const Prompt low_prompt = around(1), high_prompt = around(2, 3, 4);
  const Answer expected = alone(low_prompt, 12), urgent = alone(high_prompt);
  for (int steps = 0; steps < 12; ++steps) {
    Bench bench(*runtime, {.chunk = 7, .max_running = 1});
    const RequestId low = bench.add(low_prompt.request(12));
    for (int i = 0; i < steps; ++i) {
      bench.scheduler().step();
    }
    const RequestId high = bench.add(high_prompt.request(6, 1));
    bench.finish();
    EXPECT_TRUE(bench.answer(low).same(expected)) << steps;
    EXPECT_TRUE(bench.answer(high).same(urgent)) << steps;
  }
}

// Rows are evicted and found again, and pages are given up under a request with an image.
TEST_P(ImagesTest, SmallCachesChangeNothing) {
  const auto runtime = open({.max_cached_tokens = 10 * kPage});
  Bench bench(*runtime, {.chunk = 40, .max_running = 3, .image_cache_bytes = 1 << 14});
  std::vector<RequestId> ids;
  std::vector<Prompt> prompts;
  for (uint8_t i = 0; i < 20; ++i) {
    prompts.push_back(around(i % 5, 10 + i % 3, 10));
    ids.push_back(bench.add(prompts.back().request()));
  }
  bench.finish();
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(bench.answer(ids[i]).same(alone(prompts[i]))) << i;
  }
  EXPECT_EQ(bench.stats().image_bytes, 0);
}

TEST_P(ImagesTest, DraftsChangeNothing) {
  const auto runtime = open({.draft = true});
  const Prompt prompt = around(1);
  const auto greedy = [&] {
    EngineRequest r = prompt.request(30);
    r.sampling = {.temperature = 0};
    return r;
  };
  Bench plain(exact(), {.prefix_cache = false});
  const Answer expected = plain.run(greedy());
  Bench bench(*runtime, {.chunk = 8, .speculation = {.length = 3}});
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(bench.run(greedy()).same(expected)) << i;
  }
  EXPECT_GT(bench.stats().draft_tokens, 0u);
}

// the rows of an image belong to the weights that made them.
TEST_P(ImagesTest, A27_SwappedWeightsSeeWithTheirOwnTower) {
  test::TempDirectory other;
  write_checkpoint(other, 5, *model::preset_config("t1-vision"));
  const Prompt prompt = around(1);
  const Answer expected = alone(prompt);
  const auto fresh = std::move(*Runtime::open(other.path(), {.threads = 1}));
  Bench reference(*fresh, {.prefix_cache = false});
  const Answer new_expected = reference.run(prompt.request());
  ASSERT_FALSE(new_expected.logprobs == expected.logprobs);
  const auto runtime = open();
  Bench bench(*runtime, {});
  EXPECT_TRUE(bench.run(prompt.request()).same(expected));
  const RequestId old_id = bench.add(prompt.request());
  ASSERT_TRUE(bench.scheduler().use(*runtime->load(other.path())).ok());
  const RequestId new_id = bench.add(prompt.request());
  bench.finish();
  EXPECT_TRUE(bench.answer(old_id).same(expected));
  EXPECT_TRUE(bench.answer(new_id).same(new_expected));
  EXPECT_EQ(bench.answer(new_id).cached, 0);
  // The swap gave up the rows of the old tower, and the prefix that would have done without.
  EXPECT_EQ(encoded(bench), 3u);
}

// Requests with the same image at the same time wait for one run of the tower.
TEST_P(ImagesTest, OneImageIsEncodedOnce) {
  const auto runtime = open();
  Bench bench(*runtime, {.prefix_cache = false});
  for (int i = 0; i < 5; ++i) {
    bench.add(around(1, 10 + i).request());
  }
  bench.finish();
  bench.run(around(1, 30).request());
  EXPECT_EQ(encoded(bench), 1u);
  EXPECT_EQ(bench.stats().images_reused, 5u);
}

TEST_P(ImagesTest, WaitingForAnImageEndsByCancellationAndDeadline) {
  const auto runtime = open();
  Bench bench(*runtime, {});
  const RequestId cancelled = bench.add(around(1).request());
  EXPECT_EQ(bench.stats().waiting, 1);
  EXPECT_GT(bench.stats().image_bytes, 0);
  bench.scheduler().cancel(cancelled);
  EXPECT_EQ(bench.answer(cancelled).status.code(), Code::kCancelled);
  EngineRequest late = around(1).request();
  late.deadline = std::chrono::steady_clock::now();
  const RequestId expired = bench.add(std::move(late));
  bench.finish();
  EXPECT_EQ(bench.answer(expired).status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(encoded(bench), 0u);
  EXPECT_TRUE(bench.scheduler().idle());
}

TEST_P(ImagesTest, RequestsThatDoNotFitTheModelAreRefused) {
  const auto runtime = open();
  Bench bench(*runtime, {});
  const auto message = [&](EngineRequest r) { return bench.scheduler().check(r).message(); };
  EXPECT_EQ(message(around(1).request()), "");
  EngineRequest r = around(1).request();
  r.images[0].position = 22;
  EXPECT_EQ(message(std::move(r)), "prompt[31] is no slot of images[0]");
  r = around(1).request();
  r.images.push_back(r.images[0]);
  EXPECT_EQ(message(std::move(r)), "images[1] has no 10 slots at position 21");
  r = Prompt().text(3).image(picture(1)).request();
  r.prompt.pop_back();
  EXPECT_EQ(message(std::move(r)), "images[0] has no 10 slots at position 3");
  // an image without a digest would be taken for any other.
  Picture nameless = *picture(1);
  nameless.digest = {};
  r = around(1).request();
  r.images[0].picture = std::make_shared<const Picture>(nameless);
  EXPECT_EQ(message(std::move(r)), "images[0] was not made for this model");
  Bench small(*runtime, {.image_bytes = 1000});
  EXPECT_EQ(small.scheduler().check(around(1).request()).code(), Code::kInvalidArgument);
}

// Whoever asks for more than the memory that images are given is told to come again.
TEST_P(ImagesTest, TheMemoryOfImagesIsBounded) {
  const auto runtime = open();
  const int64_t one = image_bytes(around(1).request(), runtime->config());
  const auto engine = std::move(Engine::start(*runtime, {.image_bytes = one * 3 / 2}).value());
  Inbox inbox;
  const RequestId first = *engine->submit(around(1).request(100000), inbox.sink());
  EXPECT_EQ(engine->submit(around(2).request(), inbox.sink()).status().code(),
            Code::kResourceExhausted);
  const RequestId text = *engine->submit(Prompt().text(9).request(), inbox.sink());
  EXPECT_TRUE(inbox.wait(text).second.ok());
  engine->cancel(first);
  inbox.wait(first);
  while (engine->stats().image_bytes > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const RequestId again = *engine->submit(around(2).request(), inbox.sink());
  const auto [ids, status] = inbox.wait(again);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(ids, alone(around(2)).ids);
}

}  // namespace
}  // namespace cachalot::engine
