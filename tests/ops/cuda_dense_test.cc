// The image encoder's ops on a CUDA device against the reference.
#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/dense.h"
#include "tests/support/device.h"

namespace cachalot::ops {
namespace {

using test::AttendInput;
using test::Buffer;
using test::close;
using test::DenseInput;
using test::on_both;
using test::Random;
using test::same_bits;
using test::Side;

class CudaDense : public test::CudaTest {};

Buffer run_dense(Side& side, const DenseInput& in, int64_t first, int64_t rows) {
  Buffer y(in.x.dtype, {rows, in.residual.shape[1]});
  side.finish(
      dense(side.ctx(),
            {.x = side.in(in.x.view().rows(first, rows)),
             .weight = side.weight(in.weight),
             .bias = in.biased ? side.in(in.bias) : TensorView(),
             .function = in.function,
             .residual = in.adds ? side.in(in.residual.view().rows(first, rows)) : TensorView(),
             .y = side.out(y)}));
  return y;
}

struct DenseCase {
  int64_t rows, in, out;
};

// K of whole chunks and not (the pixels of a patch), few and many rows; a weight that takes longer
// to pad than its input.
TEST_F(CudaDense, MatchesRef) {
  Random random(1);
  for (const DenseCase& c : {DenseCase{1, 1, 2},
                             {3, 33, 62},
                             {5, 256, 128},
                             {97, 588, 72},
                             {131, 512, 192},
                             {9, 588, 2400}}) {
    for (DenseFunction function : test::kFunctions) {
      for (DType act : {DType::kF32, DType::kBF16}) {
        DenseInput in = test::random_dense(random, c.rows, c.in, c.out, act, function);
        for (bool whole : {false, true}) {
          SCOPED_TRACE(testing::Message() << "rows " << c.rows << " in " << c.in << " out " << c.out
                                          << " function " << static_cast<int>(function) << " act "
                                          << dtype_name(act) << " whole " << whole);
          in.biased = in.adds = whole;
          const auto both = on_both([&](Side& side) { return run_dense(side, in, 0, c.rows); });
          EXPECT_TRUE(close(both.got, both.want, test::dense_tolerance(act)));
        }
      }
    }
  }
}

// More rows than one pass takes; those of a later pass alone have the same bits.
TEST_F(CudaDense, RowsDoNotDependOnTheirPass) {
  Random random(2);
  const int64_t rows = 3000, alone = 90;
  DenseInput in = test::random_dense(random, rows, 256, 4096, DType::kBF16, DenseFunction::kSwiglu);
  in.biased = in.adds = true;
  Side first(Side::Kind::kCuda), second(Side::Kind::kCuda);
  const Buffer all = run_dense(first, in, 0, rows);
  const Buffer last = run_dense(second, in, rows - alone, alone);
  EXPECT_TRUE(same_bits(last, test::part(all, rows - alone, alone)));
}

struct AttendCase {
  int64_t rows, heads, k;
};

// Fewer rows than a block of keys and of queries, one more than each, several of both.
TEST_F(CudaDense, AttendMatchesRef) {
  Random random(3);
  for (const AttendCase& c : {AttendCase{1, 1, 2},
                              {1, 2, 64},
                              {65, 1, 6},
                              {70, 3, 20},
                              {63, 2, 64},
                              {129, 3, 64},
                              {400, 2, 64}}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(testing::Message() << "rows " << c.rows << " heads " << c.heads << " k " << c.k
                                      << " act " << dtype_name(act));
      const AttendInput in = test::random_attend(random, c.rows, c.heads, c.k, act);
      const auto both = on_both([&](Side& side) {
        Buffer o(act, {c.rows, c.heads * c.k});
        side.finish(dense_attend(side.ctx(),
                                 {.qkv = side.in(in.qkv),
                                  .rope = side.in(in.rope),
                                  .heads = c.heads,
                                  .o = side.out(o)}));
        return o;
      });
      EXPECT_TRUE(
          close(both.got, both.want, act == DType::kBF16 ? test::kAttendBf16 : test::kAttendF32));
    }
  }
}

}  // namespace
}  // namespace cachalot::ops
