#include "train/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace cachalot::train {
namespace {

// Head 0 gives nearly all its attention to the window, head 1 to the entries, and they prefer
// different entries: the teacher is head 1's choice. A softmax over the entries alone would weigh
// both heads alike.
TEST(AttentionShare, IsTheConditionalOfTheJointSoftmax) {
  const int64_t dim = 2;
  const double large = 6 * std::sqrt(2.0);
  const std::vector<double> q = {large, 0, 0, large}, keys = {1, 0}, sink = {-1, 0.5};
  const std::vector<double> entries = {0.2, 0.1, -0.2, 0.4};
  const std::vector<int32_t> first_row = {0}, entry = {0, 1};
  Selection selection{.width = 2, .entry = entry};
  selection.index(2);
  const AttentionRows<double> args{.rows = 1,
                                   .heads = 2,
                                   .dim = dim,
                                   .window = 1,
                                   .first_row = first_row.data(),
                                   .q = q.data(),
                                   .keys = keys.data(),
                                   .entries = entries.data(),
                                   .selection = &selection,
                                   .sink = sink.data()};
  // Scores of (window, entry 0, entry 1): (6, 1.2, -1.2) and (0, 0.6, 2.4); the sink's is its
  // logit.
  const double scores[2][3] = {{6, 1.2, -1.2}, {0, 0.6, 2.4}};
  std::vector<double> joint(2, 0.0), apart(2, 0.0);
  for (int h = 0; h < 2; ++h) {
    const double a = std::exp(scores[h][1]), b = std::exp(scores[h][2]);
    const double all = std::exp(scores[h][0]) + a + b + std::exp(sink[static_cast<size_t>(h)]);
    joint[0] += a / all;
    joint[1] += b / all;
    apart[0] += a / (a + b) / 2;
    apart[1] += b / (a + b) / 2;
  }
  const double total = joint[0] + joint[1];
  std::vector<double> teacher(2, 0.0);
  attention_share(args, 0, entry.data(), 2, teacher.data());
  EXPECT_NEAR(teacher[0], joint[0] / total, 1e-12);
  EXPECT_NEAR(teacher[1], joint[1] / total, 1e-12);
  EXPECT_GT(std::fabs(teacher[0] - apart[0]), 0.2);
}

}  // namespace
}  // namespace cachalot::train
