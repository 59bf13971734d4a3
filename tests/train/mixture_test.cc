#include "train/mixture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace cachalot::train {
namespace {

// The logit whose router score is s.
double logit_of(double s) {
  return std::log(std::expm1(s * s));
}

TEST(BalanceLoss, HandCase) {
  const std::vector<double> scores = {.9, .5, .3, .1, .2, .8, .6, .4, .7, .1, .2, .6};
  std::vector<double> logits;
  for (double s : scores) {
    logits.push_back(logit_of(s));
  }
  const std::vector<double> bias(4, 0.0);
  const std::vector<uint8_t> image(3, 0);
  const RouterRows<double> args{.rows = 3,
                                .experts = 4,
                                .chosen = 2,
                                .temperature = 1,
                                .scale = 1.5,
                                .logits = logits.data(),
                                .bias = bias.data(),
                                .bias_image = bias.data(),
                                .is_image = image.data()};
  std::vector<int32_t> ids(6);
  std::vector<double> weights(6);
  route(nullptr, args, ids.data(), weights.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{0, 1, 1, 2, 0, 3}));
  EXPECT_NEAR(weights[0], 1.5 * .9 / 1.4, 1e-12);
  EXPECT_NEAR(balance_loss(args, ids.data(), {0, 3}) * 1e-4, 1.0617283951e-4, 1e-13);
  // Two samples are two losses, weighted by their rows.
  EXPECT_NEAR(
      balance_loss(args, ids.data(), {0, 1, 3}),
      (balance_loss(
           RouterRows<double>{
               1, 4, 2, 1, 1.5, logits.data(), bias.data(), bias.data(), image.data()},
           ids.data(),
           {0, 1}) +
       2 * balance_loss(
               RouterRows<double>{
                   2, 4, 2, 1, 1.5, logits.data() + 4, bias.data(), bias.data(), image.data()},
               ids.data() + 2,
               {0, 2})) /
          3,
      1e-12);
}

TEST(BalanceLoss, EvenRoutingGivesOne) {
  const std::vector<double> logits(4 * 4, 0.3), bias(4, 0.0);
  const std::vector<uint8_t> image(4, 0);
  const RouterRows<double> args{
      4, 4, 1, 1, 1, logits.data(), bias.data(), bias.data(), image.data()};
  const std::vector<int32_t> ids = {0, 1, 2, 3};
  EXPECT_NEAR(balance_loss(args, ids.data(), {0, 4}), 1.0, 1e-12);
}

// Text and image rows look at biases of their own; the bias chooses but does not weigh.
TEST(Route, BiasOfTheRowsKind) {
  const std::vector<double> logits = {0, 0, 0, 0, 0, 0}, text = {0, 0, 1}, vision = {1, 0, 0};
  const std::vector<uint8_t> image = {0, 1};
  const RouterRows<double> args{
      2, 3, 1, 1, 1.5, logits.data(), text.data(), vision.data(), image.data()};
  std::vector<int32_t> ids(2);
  std::vector<double> weights(2);
  route(nullptr, args, ids.data(), weights.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{2, 0}));
  // A single expert weighs its score, without the bias.
  EXPECT_NEAR(weights[0], 1.5 * std::sqrt(std::log(2.0)), 1e-12);
}

TEST(Route, UnderflowingScoresHaveAFiniteGradient) {
  const std::vector<float> logits = {-200, -300}, bias = {0, 0};
  const std::vector<uint8_t> image = {0};
  const RouterRows<float> args{
      1, 2, 1, 1, 1, logits.data(), bias.data(), bias.data(), image.data()};
  const std::vector<int32_t> ids = {0};
  const std::vector<float> dweights = {1};
  std::vector<float> dlogits = {0, 0};
  route_backward(nullptr, args, ids.data(), dweights.data(), 0.0f, {0, 1}, dlogits.data());
  EXPECT_TRUE(std::isfinite(dlogits[0]) && std::isfinite(dlogits[1]));
}

// The clamp passes a value at its edge and stops the gradient of one beyond it.
TEST(Swiglu, GradientAtTheClampsEdges) {
  const float limit = 10;
  const float above = std::nextafter(limit, 20.0f);
  const std::vector<float> gates = {limit, above, -20, 3}, ups = {limit, above, -above, -limit};
  for (size_t i = 0; i < gates.size(); ++i) {
    float x = 1, w1 = gates[i], w3 = ups[i], w2 = 1, gate, up, product, y, dx = 0;
    const SwigluRows<float> args{.rows = 1,
                                 .width = 1,
                                 .hidden = 1,
                                 .limit = limit,
                                 .x = &x,
                                 .gate = &gate,
                                 .up = &up,
                                 .product = &product};
    swiglu<float>(nullptr, args, {&w1, &w3, &w2}, &y);
    float d1 = 0, d3 = 0, d2 = 0, one = 1, scratch[3];
    swiglu_backward<float>(
        nullptr, args, {&w1, &w3, &w2}, &one, scratch, &dx, nullptr, {&d1, &d3, &d2});
    EXPECT_EQ(d1 != 0, gates[i] <= limit) << i;
    EXPECT_EQ(d3 != 0, ups[i] <= limit && ups[i] >= -limit) << i;
  }
}

}  // namespace
}  // namespace cachalot::train
