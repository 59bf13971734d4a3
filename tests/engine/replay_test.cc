// Bounded replays: what must be exact is, what must not be written is not, and chunking changes
// nothing.
#include "engine/replay.h"

#include "engine/generator.h"
#include "tests/engine/t1_fixture.h"

namespace cachalot::engine {
namespace {

// Of t1: window 8, layers 0 to 4 before the last KV source, 5 from it on.
constexpr int64_t kWindow = 8;
constexpr int64_t kEncoderReach = 5 * 7;
constexpr int64_t kDecoderReach = 5 * 7;

class ReplayTest : public T1Fixture {
 protected:
  void SetUp() override {
    runtime_ = open();
    runner_ = std::move(runtime_->make_runner().value());
  }

  std::unique_ptr<kvcache::SequenceCache> make_cache() {
    return std::move(runtime_->make_cache().value());
  }

  // Runs tokens [length, ids.size()) in chunks and commits them. Returns the last row's logits.
  std::vector<float> run(kvcache::SequenceCache& cache,
                         const std::vector<int32_t>& ids,
                         const model::Replay& replay,
                         int64_t chunk = 1000) {
    std::vector<float> last;
    const auto total = static_cast<int64_t>(ids.size());
    EXPECT_TRUE(cache.reserve(total).ok());
    while (cache.view().length < total) {
      const int64_t n = std::min(chunk, total - cache.view().length);
      const model::StepSequence sequence{
          .view = &cache.view(),
          .tokens = {ids.data() + cache.view().length, static_cast<size_t>(n)},
          .no_logits = cache.view().length + n < total,
          .replay = replay};
      const auto logits = runner_->run({&sequence, 1});
      EXPECT_TRUE(logits.ok()) << logits.error().message();
      last.assign(logits->as<float>(), logits->as<float>() + logits->shape.elements());
      const auto accepted = static_cast<int32_t>(n);
      EXPECT_TRUE(runner_->commit({&accepted, 1}).ok());
    }
    return last;
  }

  // A cache that holds the compressed rows of [0, hit) of `owner` and is about to replay.
  std::unique_ptr<kvcache::SequenceCache> attached(const kvcache::SequenceCache& owner,
                                                   const std::vector<int32_t>& ids,
                                                   int64_t hit,
                                                   int64_t from) {
    auto cache = make_cache();
    std::vector<kvcache::PageRef> pages;
    for (int64_t i = 0; i * runtime_->layout().page_tokens < hit; ++i) {
      pages.push_back(owner.page(i));
    }
    EXPECT_TRUE(cache->adopt(pages, hit).ok());
    cache->view().length = from;
    cache->view().lookback = model::engram_lookback(
        runtime_->model(), std::span<const int32_t>(ids).first(static_cast<size_t>(from)));
    return cache;
  }

  // The main and index rows of entries below those of `positions`, of every source.
  std::vector<uint8_t> rows(const kvcache::SequenceCache& cache, int64_t positions) {
    std::vector<uint8_t> bytes;
    for (size_t source = 0; source < cache.view().sources.size(); ++source) {
      const ops::SourceView& view = cache.view().sources[source];
      for (int64_t i = 0; i < positions / runtime_->layout().ratios[source]; ++i) {
        for (const ops::PagedRows* paged : {&view.main, &view.index}) {
          bytes.insert(bytes.end(), paged->row(i), paged->row(i) + paged->row_bytes);
        }
      }
    }
    return bytes;
  }

  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<model::StepRunner> runner_;
};

// The decoder over a halo of rows gives the bits of the decoder over all rows; over the window
// alone it does not.
TEST_F(ReplayTest, TheDecoderHaloIsExact) {
  const std::vector<int32_t> next = tokens(12, 77);
  bool shorter_differs = false;
  for (int64_t length : {kDecoderReach + 2, int64_t{50}, int64_t{71}, int64_t{100}}) {
    std::vector<int32_t> ids = tokens(length);
    const auto exact = make_cache();
    const std::vector<float> expected = run(*exact, ids, {});
    const int64_t from = length - 1 - kDecoderReach;
    for (int64_t chunk : {1000, 16, 3}) {
      const auto halo = make_cache();
      EXPECT_EQ(run(*halo, ids, {.decoder_from = from}, chunk), expected) << length;
      std::vector<int32_t> more = ids;
      const auto again = make_cache();
      run(*again, ids, {});
      for (int32_t token : next) {
        more.push_back(token);
        EXPECT_EQ(run(*halo, more, {.decoder_from = from}), run(*again, more, {})) << more.size();
      }
    }
    const auto window = make_cache();
    shorter_differs =
        shorter_differs || run(*window, ids, {.decoder_from = length - kWindow}) != expected;
  }
  EXPECT_TRUE(shorter_differs);
}

// A replay behind a hit, wide enough, gives the bits of a cold run; compressed rows stay as they
// were and continue as if they had always been this request's.
TEST_F(ReplayTest, TheEncoderHaloIsExact) {
  int replays = 0;
  for (int64_t hit : {44, 48, 61, 64}) {
    for (int64_t length : {hit + 1, hit + 2, hit + 30}) {
      const std::vector<int32_t> ids = tokens(length);
      const auto cold = make_cache();
      const std::vector<float> expected = run(*cold, ids, {});
      const auto owner = make_cache();
      run(*owner, {ids.begin(), ids.begin() + hit}, {});
      const int64_t decoder_from = std::max<int64_t>(0, length - 1 - kDecoderReach);
      const int64_t from = std::min(hit, decoder_from) - kEncoderReach;
      if (from <= 0) {
        continue;
      }
      ++replays;
      const auto warm = attached(*owner, ids, hit, from);
      const model::Replay replay{.encoder_from = from, .decoder_from = decoder_from, .stored = hit};
      EXPECT_EQ(run(*warm, ids, replay, 7), expected) << hit << " " << length;
      EXPECT_EQ(rows(*warm, length), rows(*cold, length)) << hit << " " << length;
    }
  }
  EXPECT_GE(replays, 4);
}

// The same for all layers at once, as mode exact does it.
TEST_F(ReplayTest, AReplayThroughAllLayersIsExact) {
  const ReplayPolicy policy(runtime_->model(), Mode::kExact);
  for (int64_t hit : {71, 80, 95}) {
    const std::vector<int32_t> ids = tokens(hit + 9);
    const auto cold = make_cache(), owner = make_cache();
    const std::vector<float> expected = run(*cold, ids, {});
    run(*owner, {ids.begin(), ids.begin() + hit}, {});
    const model::Replay replay = policy.from_rows(hit + 9, hit);
    const auto warm = attached(*owner, ids, hit, replay.encoder_from);
    EXPECT_EQ(run(*warm, ids, replay, 16), expected) << hit;
    EXPECT_EQ(warm->save().value(), cold->save().value()) << hit;
  }
}

// entries below the hit are not written, the pair that straddles an odd hit is; windows of
// the replayed rows see nothing below the replay's start.
TEST_F(ReplayTest, A21_ReplayNeverRewritesStoredRows) {
  for (int64_t hit : {9, 16, 17, 30, 31}) {
    const std::vector<int32_t> ids = tokens(hit + 6);
    const auto owner = make_cache();
    run(*owner, {ids.begin(), ids.begin() + hit}, {});
    // Rows of another content: whoever rewrites them is found out.
    const auto changed = attached(*owner, ids, hit, hit - kWindow);
    const std::vector<uint8_t> before = rows(*changed, hit);
    const model::Replay replay{
        .encoder_from = hit - kWindow, .decoder_from = hit - kWindow, .stored = hit};
    // Rings of an earlier owner must not be read.
    for (uint8_t* ring : changed->view().rings) {
      std::fill_n(ring, kWindow * runtime_->layout().window_row_bytes, uint8_t{0x7F});
    }
    const std::vector<float> logits = run(*changed, ids, replay);
    EXPECT_EQ(rows(*changed, hit), before) << hit;
    const auto second = attached(*owner, ids, hit, hit - kWindow);
    EXPECT_EQ(run(*second, ids, replay, 1), logits) << hit;
    EXPECT_EQ(rows(*second, hit + 6), rows(*changed, hit + 6)) << hit;
    if (hit % 2 == 1) {
      const ops::PagedRows& main = changed->view().sources[0].main;
      EXPECT_TRUE(std::any_of(main.row(hit / 2),
                              main.row(hit / 2) + main.row_bytes,
                              [](uint8_t byte) { return byte != 0; }));
    }
  }
}

// A request's replay is part of it: chunks, neighbours and rejected rows change nothing.
TEST_F(ReplayTest, ReplayedRequestsAreInvariantToo) {
  const std::vector<int32_t> ids = tokens(45), other = tokens(60, 3);
  const model::Replay replay{.decoder_from = 45 - kWindow};
  const auto whole = make_cache();
  const std::vector<float> expected = run(*whole, ids, replay);
  for (int64_t chunk : {1, 2, 7, 16, 44}) {
    const auto cache = make_cache();
    EXPECT_EQ(run(*cache, ids, replay, chunk), expected) << chunk;
  }
  const auto first = make_cache(), second = make_cache();
  ASSERT_TRUE(first->reserve(60).ok() && second->reserve(60).ok());
  // The neighbour has no row in the decoder.
  const std::vector<model::StepSequence> batch = {
      {.view = &first->view(), .tokens = other, .no_logits = true, .replay = {.decoder_from = 100}},
      {.view = &second->view(), .tokens = ids, .replay = replay}};
  const auto logits = runner_->run(batch);
  ASSERT_TRUE(logits.ok());
  EXPECT_EQ(std::vector<float>(logits->as<float>(), logits->as<float>() + 512), expected);
  const std::vector<int32_t> accepted = {0, 45};
  ASSERT_TRUE(runner_->commit(accepted).ok());
  std::vector<int32_t> more = ids;
  more.push_back(5);
  EXPECT_EQ(run(*second, more, replay), run(*whole, more, replay));
}

TEST_F(ReplayTest, PolicyOfEachMode) {
  const model::Model& t1 = runtime_->model();
  const ReplayPolicy exact(t1, Mode::kExact), replay(t1, Mode::kReplay), halo(t1, Mode::kHalo);
  EXPECT_EQ(exact.decoder_from(1000), 0);
  EXPECT_EQ(replay.decoder_from(kWindow), 0);
  EXPECT_EQ(replay.decoder_from(1000), 1000 - kWindow);
  EXPECT_EQ(halo.decoder_from(1000), 1000 - 1 - kDecoderReach);
  EXPECT_EQ(exact.from_rows(1000, 500).encoder_from, 500 - kEncoderReach - kDecoderReach);
  EXPECT_EQ(exact.from_rows(1000, 500).decoder_from, 500 - kEncoderReach - kDecoderReach);
  // a hit no longer than the window is of no use.
  EXPECT_LE(replay.from_rows(1000, kWindow).encoder_from, 0);
  EXPECT_EQ(replay.from_rows(1000, kWindow + 1).encoder_from, 1);
  EXPECT_EQ(halo.from_rows(1000, 500).encoder_from, 500 - kEncoderReach);
  EXPECT_EQ(halo.from_rows(510, 500).encoder_from, 510 - 1 - kDecoderReach - kEncoderReach);
  // A state inside a prompt has no decoder rows: it serves those that start the decoder behind it.
  EXPECT_TRUE(replay.serves(100, 92, 200));
  EXPECT_FALSE(replay.serves(100, 93, 200));
  EXPECT_TRUE(replay.serves(100, 93, 93 - kWindow));
  EXPECT_EQ(replay.from_state(100, 93, 85).decoder_from, 85);
  EXPECT_EQ(replay.from_state(100, 80, 200).decoder_from, 92);
  EXPECT_TRUE(exact.serves(100, 99, 50));
  EXPECT_EQ(exact.from_state(100, 99, 50).decoder_from, 0);
}

}  // namespace
}  // namespace cachalot::engine
