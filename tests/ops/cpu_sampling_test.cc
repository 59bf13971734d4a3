// What sampling needs of logits: the reference against hand-made rows, the CPU against it.
#include <gtest/gtest.h>

#include "tests/support/context.h"
#include "tests/support/logits.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::Random;
using test::TopLogits;

constexpr float kInf = std::numeric_limits<float>::infinity();

TopLogits run(OpContext& ctx, const TensorView& logits, const TensorView& temperature, int64_t k) {
  TopLogits top(logits.dim(0), k);
  const Status status = top_logits(ctx,
                                   {.logits = logits,
                                    .temperature = temperature,
                                    .value = top.value.view(),
                                    .id = top.id.view(),
                                    .mass = top.mass.view()});
  EXPECT_TRUE(status.ok()) << status.message();
  return top;
}

TEST(TopLogits, RanksAndMassesByHand) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> rows[] = {{0.5f, 2.0f, nan, 2.0f, -0.0f, 0.0f},
                               {-kInf, nan, -kInf, nan, -kInf, -kInf},
                               {1.0f, kInf, 0.0f, kInf, 3.0f, -kInf}};
  float temperature = 2.0f;
  const std::vector<int32_t> ids[] = {
      {1, 3, 0, 4, 5, 2, -1}, {0, 1, 2, 3, 4, 5, -1}, {1, 3, 4, 0, 2, 5, -1}};
  const std::vector<float> values[] = {{2, 2, 0.5f, 0, 0, -kInf, -kInf},
                                       {-kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf},
                                       {kInf, kInf, 3, 1, 0, -kInf, -kInf}};
  const double masses[][2] = {
      {2 + std::exp(-1.5) + 2 * std::exp(-2.0), 2 + std::exp(-0.75) + 2 * std::exp(-1.0)},
      {6, 6},
      {2, 2}};
  for (size_t r = 0; r < 3; ++r) {
    const TopLogits top = run(
        test::ref(), {rows[r].data(), DType::kF32, {1, 6}}, {&temperature, DType::kF32, {1}}, 7);
    for (int64_t i = 0; i < 7; ++i) {
      EXPECT_EQ(top.id.view().as<int32_t>()[i], ids[r][static_cast<size_t>(i)]) << r << " " << i;
      EXPECT_EQ(top.value.at(i), values[r][static_cast<size_t>(i)]) << r << " " << i;
    }
    EXPECT_FALSE(std::signbit(top.value.at(3)) && r == 0);
    for (int64_t i = 0; i < 2; ++i) {
      EXPECT_FLOAT_EQ(top.mass.at(i), static_cast<float>(masses[r][i])) << r << " " << i;
    }
  }
}

TEST(TopLogits, CpuEqualsReference) {
  Random random(1);
  for (const test::TopLogitsCase& c : test::kTopLogitsCases) {
    SCOPED_TRACE(testing::Message() << c.n << " x " << c.v << ", k " << c.k);
    const Buffer logits = logit_rows(random, c.n, c.v), temperature = test::temperatures(c.n);
    const TopLogits want = run(test::ref(), logits.view(), temperature.view(), c.k);
    test::on_every_instruction_set([&] {
      const TopLogits got = run(test::cpu(2), logits.view(), temperature.view(), c.k);
      test::expect_same(got, want);
      for (const int64_t r : {int64_t{0}, c.n / 2, c.n - 1}) {
        test::expect_same_row(
            run(test::cpu(0), logits.view().rows(r, 1), temperature.view().rows(r, 1), c.k),
            got,
            r);
      }
    });
  }
}

TEST(TopLogits, RefusesWhatItCannotRank) {
  Random random(2);
  const Buffer logits = logit_rows(random, 2, 5), temperature = test::temperatures(2);
  const auto refused = [&](const Buffer& rows, const Buffer& heat, int64_t k) {
    TopLogits top(2, k);
    return top_logits(test::ref(),
                      {.logits = rows.view(),
                       .temperature = heat.view(),
                       .value = top.value.view(),
                       .id = top.id.view(),
                       .mass = top.mass.view()})
               .code() == Code::kInvalidArgument;
  };
  EXPECT_FALSE(refused(logits, temperature, 5));
  EXPECT_TRUE(refused(logits, temperature, 0));
  EXPECT_TRUE(refused(logits, temperature, kMostTopLogits + 1));
  EXPECT_TRUE(refused(logits, test::temperatures(3), 5));
  EXPECT_TRUE(refused(Buffer(DType::kF32, {2, 0}), temperature, 5));
  EXPECT_TRUE(refused(Buffer(DType::kBF16, {2, 5}), temperature, 5));
}

}  // namespace
}  // namespace cachalot::ops
