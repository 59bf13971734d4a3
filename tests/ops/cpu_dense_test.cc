// The image encoder's ops of the CPU backend against the reference, and their invariances.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/context.h"
#include "tests/support/dense.h"

namespace cachalot::ops {
namespace {

using test::AttendInput;
using test::Buffer;
using test::close;
using test::dense_tolerance;
using test::DenseInput;
using test::kFunctions;
using test::Random;
using test::random_attend;
using test::random_dense;
using test::same_bits;

Buffer run_dense(OpContext& ctx, const DenseInput& in, int64_t first = 0, int64_t rows = -1) {
  rows = rows < 0 ? in.x.shape[0] : rows;
  Buffer y(in.x.dtype, {rows, in.residual.shape[1]});
  const Status status =
      dense(ctx,
            {.x = in.x.view().rows(first, rows),
             .weight = in.weight.view(),
             .bias = in.biased ? in.bias.view() : TensorView(),
             .function = in.function,
             .residual = in.adds ? in.residual.view().rows(first, rows) : TensorView(),
             .y = y.view()});
  EXPECT_TRUE(status.ok()) << status.message();
  return y;
}

struct DenseCase {
  int64_t rows, in, out;
};
constexpr DenseCase kDenseCases[] = {
    {1, 1, 2}, {1, 48, 36}, {2, 27, 10}, {3, 33, 62}, {5, 64, 128}, {97, 40, 26}, {131, 147, 70}};

TEST(CpuDense, MatchesRef) {
  Random random(1);
  for (const DenseCase& c : kDenseCases) {
    for (DenseFunction function : kFunctions) {
      for (DType act : {DType::kF32, DType::kBF16}) {
        DenseInput in = random_dense(random, c.rows, c.in, c.out, act, function);
        for (bool biased : {false, true}) {
          for (bool adds : {false, true}) {
            SCOPED_TRACE(testing::Message()
                         << "rows " << c.rows << " in " << c.in << " out " << c.out << " function "
                         << static_cast<int>(function) << " act " << dtype_name(act) << " bias "
                         << biased << " residual " << adds);
            in.biased = biased;
            in.adds = adds;
            const Buffer want = run_dense(test::ref(), in);
            test::on_every_instruction_set([&] {
              EXPECT_TRUE(close(run_dense(test::cpu(), in), want, dense_tolerance(act)));
            });
          }
        }
      }
    }
  }
}

// The residual's memory may take the result.
TEST(CpuDense, AddsInPlace) {
  Random random(2);
  for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
    DenseInput in = random_dense(random, 7, 30, 30, DType::kBF16, DenseFunction::kIdentity);
    in.adds = true;
    const Buffer apart = run_dense(*ctx, in);
    ASSERT_TRUE(dense(*ctx,
                      {.x = in.x.view(),
                       .weight = in.weight.view(),
                       .bias = {},
                       .residual = in.residual.view(),
                       .y = in.residual.view()})
                    .ok());
    EXPECT_TRUE(same_bits(in.residual, apart));
  }
}

// More rows than one pass takes; a row's bits do not depend on the others or the threads.
TEST(CpuDense, RowsDoNotDependOnTheirBatch) {
  Random random(3);
  const int64_t rows = 1700;
  for (DenseFunction function : kFunctions) {
    DenseInput in = random_dense(random, rows, 50, 44, DType::kBF16, function);
    in.biased = in.adds = true;
    const Buffer all = run_dense(test::cpu(2), in);
    for (int threads : {0, 3}) {
      EXPECT_TRUE(same_bits(run_dense(test::cpu(threads), in), all));
    }
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {760, 17}, {1699, 1}}) {
      EXPECT_TRUE(
          same_bits(run_dense(test::cpu(), in, first, count), test::part(all, first, count)));
    }
  }
}

TEST(Dense, ContradictingArgumentsAreRefused) {
  Random random(4);
  const DenseInput in = random_dense(random, 3, 8, 6, DType::kF32, DenseFunction::kIdentity);
  Buffer y(DType::kF32, {3, 6});
  const DenseArgs good = {.x = in.x.view(),
                          .weight = in.weight.view(),
                          .bias = in.bias.view(),
                          .residual = in.residual.view(),
                          .y = y.view()};
  ASSERT_TRUE(dense(test::cpu(), good).ok());
  const auto refused = [](const DenseArgs& args) {
    return dense(test::cpu(), args).code() == Code::kInvalidArgument;
  };
  DenseArgs args = good;
  args.function = DenseFunction::kSwiglu;
  EXPECT_TRUE(refused(args));
  args = good;
  args.bias = in.bias.view().rows(0, 5);
  EXPECT_TRUE(refused(args));
  args = good;
  args.residual = in.residual.view().rows(0, 2);
  EXPECT_TRUE(refused(args));
  args = good;
  args.weight.format = WeightFormat::kFp8Block;
  EXPECT_TRUE(refused(args));
}

Buffer run_attend(OpContext& ctx, const AttendInput& in) {
  Buffer o(in.qkv.dtype, {in.qkv.shape[0], in.qkv.shape[1] / 3});
  const Status status = dense_attend(
      ctx, {.qkv = in.qkv.view(), .rope = in.rope.view(), .heads = in.heads, .o = o.view()});
  EXPECT_TRUE(status.ok()) << status.message();
  return o;
}

struct AttendCase {
  int64_t rows, heads, k;
};
constexpr AttendCase kAttendCases[] = {
    {1, 1, 2}, {1, 3, 16}, {2, 2, 64}, {7, 5, 20}, {64, 2, 32}, {65, 1, 6}, {150, 3, 64}};

TEST(CpuDenseAttend, MatchesRef) {
  Random random(5);
  for (const AttendCase& c : kAttendCases) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(testing::Message() << "rows " << c.rows << " heads " << c.heads << " k " << c.k
                                      << " act " << dtype_name(act));
      const AttendInput in = random_attend(random, c.rows, c.heads, c.k, act);
      const Buffer want = run_attend(test::ref(), in);
      test::on_every_instruction_set([&] {
        EXPECT_TRUE(close(run_attend(test::cpu(), in),
                          want,
                          act == DType::kBF16 ? test::kAttendBf16 : test::kAttendF32));
      });
      for (int threads : {0, 3}) {
        EXPECT_TRUE(same_bits(run_attend(test::cpu(threads), in), run_attend(test::cpu(), in)));
      }
    }
  }
}

// Against the formula, for one query: rows that attend to each other, rotated in halves.
TEST(DenseAttend, RotatesHalvesAndSeesAllRows) {
  Random random(6);
  const int64_t n = 70, k = 4;
  const AttendInput in = random_attend(random, n, 1, k, DType::kF32);
  const auto turned = [&](int64_t row, int64_t part, int64_t i) {
    const double a = in.qkv.at((row * 3 + part) * k + i % 2);
    const double b = in.qkv.at((row * 3 + part) * k + i % 2 + 2);
    const double c = in.rope.at((row * 2 + i % 2) * 2), s = in.rope.at((row * 2 + i % 2) * 2 + 1);
    return i < 2 ? a * c - b * s : b * c + a * s;
  };
  std::vector<double> expected(static_cast<size_t>(k));
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) {
    double dot = 0;
    for (int64_t i = 0; i < k; ++i) {
      dot += turned(3, 0, i) * turned(j, 1, i);
    }
    const double p = std::exp(dot / 2);
    sum += p;
    for (int64_t i = 0; i < k; ++i) {
      expected[static_cast<size_t>(i)] += p * in.qkv.at((j * 3 + 2) * k + i);
    }
  }
  for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
    const Buffer o = run_attend(*ctx, in);
    for (int64_t i = 0; i < k; ++i) {
      EXPECT_NEAR(o.at(3 * k + i), expected[static_cast<size_t>(i)] / sum, 1e-5);
    }
  }
}

}  // namespace
}  // namespace cachalot::ops
