// What sampling needs of logits, on the CUDA backend against the reference.
#include "tests/support/device.h"
#include "tests/support/logits.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::on_both;
using test::Random;
using test::Side;
using test::TopLogits;

class CudaSampling : public test::CudaTest {};

TopLogits run(Side& side, const TensorView& logits, const TensorView& temperature, int64_t k) {
  TopLogits top(logits.dim(0), k);
  side.finish(top_logits(side.ctx(),
                         {.logits = side.in(logits),
                          .temperature = side.in(temperature),
                          .value = side.out(top.value),
                          .id = side.out(top.id),
                          .mass = side.out(top.mass)}));
  return top;
}

TEST_F(CudaSampling, TopLogits) {
  Random random(1);
  for (const test::TopLogitsCase& c : test::kTopLogitsCases) {
    SCOPED_TRACE(testing::Message() << c.n << " x " << c.v << ", k " << c.k);
    const Buffer logits = logit_rows(random, c.n, c.v), temperature = test::temperatures(c.n);
    const auto both =
        on_both([&](Side& side) { return run(side, logits.view(), temperature.view(), c.k); });
    test::expect_same(both.got, both.want);
    for (const int64_t r : {int64_t{0}, c.n / 2, c.n - 1}) {
      Side side(Side::Kind::kCuda);
      test::expect_same_row(
          run(side, logits.view().rows(r, 1), temperature.view().rows(r, 1), c.k), both.got, r);
    }
  }
}

// Many rows in flight, each as if it were alone.
TEST_F(CudaSampling, TopLogitsOfManyRowsAgain) {
  Random random(2);
  const Buffer logits = logit_rows(random, 64, 129280), temperature = test::temperatures(64);
  const auto again = [&] {
    Side side(Side::Kind::kCuda);
    return run(side, logits.view(), temperature.view(), 256);
  };
  const TopLogits first = again();
  for (int repeat = 0; repeat < 3; ++repeat) {
    const TopLogits next = again();
    EXPECT_TRUE(same_bits(next.id, first.id));
    EXPECT_TRUE(same_bits(next.value, first.value));
    EXPECT_TRUE(same_bits(next.mass, first.mass));
  }
}

}  // namespace
}  // namespace cachalot::ops
