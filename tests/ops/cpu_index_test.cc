// Index selection of the CPU backend against the reference, and the known faults of such kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/compressor.h"
#include "tests/support/context.h"
#include "tests/support/index.h"
#include "tests/support/step.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::CompressorInput;
using test::differing_picks;
using test::IndexCase;
using test::IndexInput;
using test::IndexOutput;
using test::Pages;
using test::Random;
using test::same_bits;
using test::TestStep;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

IndexOutput run_index(OpContext& ctx,
                      const IndexInput& in,
                      int64_t k,
                      int64_t blocks = 0,
                      int64_t block = 0,
                      const Buffer* candidates = nullptr) {
  const int64_t t = in.step.count();
  IndexOutput out{Buffer(DType::kI32, {t, k}), {}};
  std::fill_n(ints(out.selected), t * k, 12345);
  IndexSelectArgs args;
  args.rows = in.step.rows();
  args.ratio = in.ratio;
  args.q = in.q.view();
  args.w = in.w.view();
  args.rope = in.rope.view();
  args.index = in.pages.views();
  args.candidate_block = block;
  if (candidates != nullptr) {
    args.candidates = candidates->view();
  } else if (blocks > 0) {
    out.candidates = Buffer(DType::kI32, {t, blocks});
    std::fill_n(ints(out.candidates), t * blocks, 12345);
    args.candidates_out = out.candidates.view();
  }
  args.selected = out.selected.view();
  const Status status = index_select(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST(CpuIndexSelect, MatchesRef) {
  Random random(10);
  for (const IndexCase& c : test::index_cases()) {
    for (DType act : kActs) {
      const IndexInput in(random, c.specs, act, c.hi, c.di, 600, c.ratio);
      const IndexOutput got = run_index(test::cpu(), in, c.k),
                        want = run_index(test::ref(), in, c.k);
      // In BF16 a rotated value on the other side of a rounding boundary can move an FP4 code.
      const int64_t allowed = act == DType::kF32 ? 0 : in.step.count() * c.k / 20;
      EXPECT_LE(differing_picks(got.selected, want.selected), allowed);
      EXPECT_TRUE(same_bits(run_index(test::cpu(3), in, c.k).selected, got.selected));
      EXPECT_TRUE(same_bits(run_index(test::cpu(0), in, c.k).selected, got.selected));
    }
  }
}

TEST(CpuIndexSelect, CandidatesMatchRef) {
  Random random(11);
  for (int64_t blocks : {3, 5, 100}) {
    for (int64_t block : {4, 8}) {
      const IndexInput in(random,
                          {{.start = 150, .rows = 12}, {.start = 0, .rows = 30}},
                          DType::kF32,
                          4,
                          32,
                          200,
                          1);
      const IndexOutput want = run_index(test::ref(), in, 6, blocks, block);
      const IndexOutput got = run_index(test::cpu(), in, 6, blocks, block);
      EXPECT_TRUE(same_bits(got.selected, want.selected));
      EXPECT_TRUE(same_bits(got.candidates, want.candidates));
      // The source itself is not restricted.
      EXPECT_TRUE(same_bits(got.selected, run_index(test::cpu(), in, 6).selected));
      for (int64_t row = 0; row < in.step.count(); ++row) {
        const int32_t newest = static_cast<int32_t>(in.step.position(row) / block);
        const int32_t* ids = ints(got.candidates) + row * blocks;
        EXPECT_NE(std::find(ids, ids + blocks, newest), ids + blocks);
      }
      // A consumer, whose own queries differ.
      IndexInput consumer(random,
                          {{.start = 150, .rows = 12}, {.start = 0, .rows = 30}},
                          DType::kF32,
                          4,
                          32,
                          200,
                          1);
      const Buffer want_picks =
          run_index(test::ref(), consumer, 6, 0, block, &want.candidates).selected;
      for (int threads : {0, 2, 3}) {
        EXPECT_TRUE(same_bits(
            run_index(test::cpu(threads), consumer, 6, 0, block, &want.candidates).selected,
            want_picks));
      }
    }
  }
}

// One call for all rows and one call per row select the same.
TEST(CpuIndexSelect, A19_RowsDoNotDependOnTheirBatch) {
  Random random(12);
  const IndexInput in(random, {{.start = 400, .rows = 37}}, DType::kBF16, 32, 128, 500, 1);
  const Buffer all = run_index(test::cpu(), in, 16).selected;
  for (int64_t row : {0, 1, 20, 36}) {
    Random again(12);
    IndexInput one(again, {{.start = 400, .rows = 37}}, DType::kBF16, 32, 128, 500, 1);
    one.step = TestStep({{.start = 400 + row, .rows = 1}});
    one.q = part(in.q, row, 1);
    one.w = part(in.w, row, 1);
    one.rope = part(in.rope, row, 1);
    EXPECT_TRUE(same_bits(run_index(test::cpu(), one, 16).selected, part(all, row, 1)));
  }
}

// 3k entries with equal keys around the k-th place, in sequences with and without a non-zero start.
TEST(CpuIndexSelect, A08_TiesTakeTheLowestEntries) {
  constexpr int64_t kPicks = 8;
  Random random(13);
  IndexInput in(
      random, {{.start = 63, .rows = 1}, {.start = 0, .rows = 60}}, DType::kBF16, 2, 32, 64, 1);
  for (size_t s = 0; s < 2; ++s) {
    const std::vector<float> key(32, 0.25f);
    for (int64_t e = 10; e < 10 + 3 * kPicks; ++e) {
      quant::index_row_encode(key.data(), 32, in.pages.views()[s].row(e));
    }
  }
  const Buffer want = run_index(test::ref(), in, kPicks).selected;
  for (int repeat = 0; repeat < 50; ++repeat) {
    ASSERT_TRUE(same_bits(run_index(test::cpu(repeat % 4), in, kPicks).selected, want));
  }
  // All entries tie at zero when no head scores: the first k.
  std::fill(in.w.bytes.begin(), in.w.bytes.end(), uint8_t{0});
  const Buffer zeros = run_index(test::cpu(), in, kPicks).selected;
  for (int32_t i = 0; i < kPicks; ++i) {
    EXPECT_EQ(ints(zeros)[i], i);
  }
}

// Every slot of a page is read as it was written, and scores pass the ReLU.
TEST(CpuIndexSelect, A16_ReadersSeeWhatTheWriterStored) {
  CompressorInput in({{.start = 0, .rows = 48}});
  in.ratio = 1;
  in.act = DType::kF32;
  Random random(14);
  fill(in, random);
  for (int64_t page_rows : {1, 4, 16}) {
    Pages main(random, 1, 48, page_rows, quant::main_row_bytes(in.c));
    Pages index(random, 1, 48, page_rows, quant::index_row_bytes(in.di));
    run_store(test::cpu(), in, run_pool(test::cpu(), in), main.views(), index.views());
    // A query that points along the key of one entry, with a positive and a negative head weight:
    // without the ReLU the second head would favour the opposite keys.
    for (int64_t target = 0; target < 48; ++target) {
      const TestStep step({{.start = 47, .rows = 1}});
      Buffer q(DType::kF32, {1, 2 * in.di}), w(DType::kF32, {1, 2});
      std::vector<float> key(static_cast<size_t>(in.di));
      quant::index_row_decode(index.views()[0].row(target), in.di, key.data());
      for (int64_t i = 0; i < in.di; ++i) {
        q.set(i, key[static_cast<size_t>(i)]);
        q.set(in.di + i, -key[static_cast<size_t>(i)]);
      }
      w.set(0, 1.0f);
      w.set(1, -1.0f);
      const Buffer rope = test::rope_rows({0}, in.half);
      std::vector<Buffer> picks;
      for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
        picks.emplace_back(DType::kI32, Shape{1, 5});
        IndexSelectArgs args;
        args.rows = step.rows();
        args.q = q.view();
        args.w = w.view();
        args.rope = rope.view();
        args.index = index.views();
        args.selected = picks.back().view();
        EXPECT_TRUE(index_select(*ctx, args).ok());
      }
      EXPECT_TRUE(same_bits(picks[1], picks[0]));
      const int32_t* ids = ints(picks[1]);
      EXPECT_NE(std::find(ids, ids + 5, static_cast<int32_t>(target)), ids + 5);
    }
  }
}

}  // namespace
}  // namespace cachalot::ops
