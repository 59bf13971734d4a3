#include "train/streams.h"

#include <gtest/gtest.h>

#include <vector>

namespace cachalot::train {
namespace {

// Row = source stream, column = destination: stream 0 goes into both, stream 1 nowhere.
TEST(Expand, CombIsAppliedTransposed) {
  const StreamShape shape{.rows = 1, .streams = 2, .width = 1};
  std::vector<double> x = {3, 5}, y = {7}, post = {0.1, 0.2}, comb = {1, 0.5, 0, 0}, out(2);
  expand(nullptr,
         shape,
         x.data(),
         PendingRows<double>{y.data(), post.data(), comb.data()},
         out.data());
  EXPECT_DOUBLE_EQ(out[0], 3 + 0.7);
  EXPECT_DOUBLE_EQ(out[1], 1.5 + 1.4);
  const std::vector<double> dout = {1, 10};
  std::vector<double> dx(2, 0.0), dy(1, 0.0), dpost(2, 0.0), dcomb(4, 0.0);
  expand_backward(nullptr,
                  shape,
                  x.data(),
                  PendingRows<double>{y.data(), post.data(), comb.data()},
                  dout.data(),
                  dx.data(),
                  PendingRows<double>{dy.data(), dpost.data(), dcomb.data()});
  EXPECT_EQ(dx, (std::vector<double>{6, 0}));
  EXPECT_EQ(dcomb, (std::vector<double>{3, 30, 5, 50}));
  EXPECT_EQ(dpost, (std::vector<double>{7, 70}));
  EXPECT_DOUBLE_EQ(dy[0], 2.1);
}

TEST(MixingGain, OfAProductOfCombs) {
  const StreamShape shape{.rows = 2, .streams = 2, .width = 1};
  std::vector<double> product = {1, 0, 0, 1, 1, 0, 0, 1};
  // The first row's streams swap; the second's grow.
  const std::vector<double> comb = {0, 1, 1, 0, 2, -1, 0, 1};
  MixingGain gain = extend_mixing(nullptr, shape, comb.data(), product.data());
  EXPECT_EQ(product, comb);
  EXPECT_EQ(gain.forward, 2);
  EXPECT_EQ(gain.backward, 3);
  gain = extend_mixing(nullptr, shape, comb.data(), product.data());
  EXPECT_EQ(product, (std::vector<double>{1, 0, 0, 1, 4, -3, 0, 1}));
  EXPECT_EQ(gain.forward, 4);
  EXPECT_EQ(gain.backward, 7);
}

}  // namespace
}  // namespace cachalot::train
