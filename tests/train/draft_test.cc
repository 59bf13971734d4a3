// The rows and the loss of the drafter's stage.
#include "train/draft.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tests/train/support.h"
#include "train/draft_calibration.h"

namespace cachalot::train {
namespace {

TEST(DraftBlocks, StandBehindAnchorsAndSeeOnlyTheirContext) {
  const model::ModelConfig config = drafted_config();  // window 3, block 3
  const std::vector<int32_t> a = random_tokens(9, 18, 1), b = random_tokens(5, 18, 2);
  const std::vector<uint8_t> learn = {0, 0, 1, 1, 1, 0, 1, 1, 1};
  const std::vector<Sample> samples = {{a, learn}, {b, {}}};
  const Batch batch = make_batch(samples);
  const DraftBlocks blocks = make_draft_blocks(config, {.anchors = 100}, batch, 7);
  // Every row with a target is an anchor: 6 of the first sample, 4 of the second.
  ASSERT_EQ(blocks.rows.samples(), 10);
  ASSERT_EQ(blocks.rows.rows(), 30);
  for (int64_t i = 0; i < blocks.rows.rows(); ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t k = i % 3;
    const int32_t anchor = blocks.teacher[at - static_cast<size_t>(k)];
    EXPECT_EQ(blocks.rows.token[at], k == 0 ? batch.token[static_cast<size_t>(anchor)] : 18);
    EXPECT_EQ(blocks.rows.position[at], batch.position[static_cast<size_t>(anchor)] + k);
    EXPECT_EQ(blocks.rows.first_row[at], i - k);
    for (int64_t j = 0; j < 3; ++j) {
      const int32_t row = blocks.context.entry[at * 3 + static_cast<size_t>(j)];
      if (row >= 0) {
        EXPECT_LT(row, anchor);
        EXPECT_GE(row, anchor - 3);
        EXPECT_EQ(batch.sample[static_cast<size_t>(row)],
                  batch.sample[static_cast<size_t>(anchor)]);
      }
    }
    if (blocks.weight[at] > 0) {
      EXPECT_EQ(blocks.teacher[at], anchor + k);
      EXPECT_EQ(blocks.previous[at], batch.token[static_cast<size_t>(anchor + k)]);
      EXPECT_EQ(blocks.rows.target[at], batch.target[static_cast<size_t>(anchor + k)]);
      EXPECT_DOUBLE_EQ(blocks.weight[at], std::exp(-static_cast<double>(k) / 3));
    }
  }
  // A token that is not learned ends the block in front of it: of the anchor at row 3, the token
  // behind the next one does not count.
  size_t block = 0;
  while (blocks.teacher[block] != 3) {
    block += 3;
  }
  EXPECT_GT(blocks.weight[block], 0);
  EXPECT_EQ(blocks.weight[block + 1], 0);
  EXPECT_EQ(blocks.weight[block + 2], 0);
}

TEST(DraftBlocks, AnchorsAreDistinctAndFollowTheSeed) {
  const std::vector<int32_t> tokens = random_tokens(40, 18, 1);
  const std::vector<Sample> samples = {{tokens, {}}};
  const Batch batch = make_batch(samples);
  const auto anchors = [&](uint64_t seed) {
    const DraftBlocks blocks = make_draft_blocks(drafted_config(), {.anchors = 12}, batch, seed);
    std::vector<int32_t> rows;
    for (size_t i = 0; i < blocks.teacher.size(); i += 3) {
      rows.push_back(blocks.teacher[i]);
    }
    return rows;
  };
  const std::vector<int32_t> first = anchors(1);
  EXPECT_EQ(std::set<int32_t>(first.begin(), first.end()).size(), 12u);
  EXPECT_TRUE(std::is_sorted(first.begin(), first.end()));
  EXPECT_EQ(anchors(1), first);
  EXPECT_NE(anchors(2), first);
}

// p_target = (.7, .2, .1), p_draft = (.5, .3, .2): distance 0.4, acceptance 0.8, -log .5.
TEST(DraftLoss, HandCase) {
  DraftBlocks blocks{.block = 1};
  blocks.rows.target = {0};
  blocks.teacher = {0};
  blocks.previous = {1};
  blocks.weight = {1};
  const std::vector<double> base = {std::log(.5), std::log(.3), std::log(.2)};
  const std::vector<double> target = {1}, x = {2};
  const std::vector<double> head = {std::log(.7), std::log(.2), std::log(.1)};
  const std::vector<double> embed = {0, 0, 0}, markov = {1, 2, 3}, confidence = {0.25, 9};
  const auto rows = draft_loss<double>(nullptr,
                                       {},
                                       {.width = 1,
                                        .vocab = 3,
                                        .rank = 1,
                                        .blocks = &blocks,
                                        .base = base.data(),
                                        .x = x.data(),
                                        .target = target.data(),
                                        .head = head.data(),
                                        .markov_embed = embed.data(),
                                        .markov_head = markov.data(),
                                        .confidence = confidence.data()},
                                       {});
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_NEAR(rows[0].cross_entropy, 0.69314718056, 1e-11);
  EXPECT_NEAR(rows[0].distance, 0.4, 1e-15);
  EXPECT_NEAR(rows[0].acceptance, 0.8, 1e-15);
  EXPECT_NEAR(rows[0].confidence, 0.5, 1e-15);
  const double c = 1 / (1 + std::exp(-0.5));
  EXPECT_NEAR(rows[0].confidence_loss, -0.8 * std::log(c) - 0.2 * std::log(1 - c), 1e-15);
}

TEST(TrainDrafter, ABlockAloneGivesTheBitsOfABlockAmongMany) {
  ParameterSet<float> parameters(drafted_config());
  randomize(parameters, 5);
  const std::vector<int32_t> tokens = random_tokens(21, 18, 3);
  const std::vector<Sample> samples = {{tokens, {}}};
  const Batch batch = make_batch(samples);
  ForwardOptions options;
  options.gradients = false;
  options.quant.window = true;
  options.draft.anchors = 7;
  const DraftBlocks all = make_draft_blocks(drafted_config(), options.draft, batch, 1);
  options.blocks = &all;
  ThreadPool pool(2);
  const ForwardPass<float> together(parameters, options, batch, &pool);
  size_t row = 0;
  for (size_t block = 0; block < 7; ++block) {
    DraftBlocks one{.block = 3};
    const auto part = [&](const auto& from, auto* to, size_t width) {
      const auto begin = from.begin() + static_cast<std::ptrdiff_t>(block * 3 * width);
      to->assign(begin, begin + static_cast<std::ptrdiff_t>(3 * width));
    };
    part(all.rows.token, &one.rows.token, 1);
    part(all.rows.target, &one.rows.target, 1);
    part(all.rows.position, &one.rows.position, 1);
    part(all.rows.is_image, &one.rows.is_image, 1);
    part(all.teacher, &one.teacher, 1);
    part(all.previous, &one.previous, 1);
    part(all.weight, &one.weight, 1);
    part(all.context.entry, &one.context.entry, 3);
    one.rows.sample = {0, 0, 0};
    one.rows.first_row = {0, 0, 0};
    one.rows.sample_begin = {0, 3};
    one.context.width = 3;
    one.context.index(batch.rows());
    options.blocks = &one;
    const ForwardPass<float> alone(parameters, options, batch);
    for (const DraftRow& got : alone.report().draft) {
      const DraftRow& want = together.report().draft[row++];
      EXPECT_EQ(got.cross_entropy, want.cross_entropy);
      EXPECT_EQ(got.distance, want.distance);
      EXPECT_EQ(got.confidence, want.confidence);
    }
  }
  EXPECT_EQ(row, together.report().draft.size());
}

// Logits that are twice as sure as they should be: temperature 2 puts them right, position by
// position.
TEST(DraftCalibration, FindsTheTemperatureOfOverconfidence) {
  std::vector<DraftSample> samples;
  const Philox random(3);
  for (uint64_t i = 0; i < 4000; ++i) {
    DraftSample& sample = samples.emplace_back();
    for (uint64_t k = 0; k < 3; ++k) {
      const double logit = 1.5 * random.normal(3 * i + k) + 1;
      sample.confidence.push_back(2 * logit);
      sample.acceptance.push_back(1 / (1 + std::exp(-logit)));
    }
  }
  const DraftCalibration calibration = fit_draft_calibration(samples);
  for (double temperature : calibration.temperatures) {
    EXPECT_DOUBLE_EQ(temperature, 2);
  }
  EXPECT_GT(calibration.error_before, 0.05);
  EXPECT_LT(calibration.error_after, 1e-12);
  EXPECT_EQ(calibration.samples, 4000);
}

}  // namespace
}  // namespace cachalot::train
