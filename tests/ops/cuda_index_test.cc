// Index selection of the CUDA backend against the reference.
#include <algorithm>
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/device.h"
#include "tests/support/index.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::differing_picks;
using test::IndexCase;
using test::IndexInput;
using test::IndexOutput;
using test::on_both;
using test::Random;
using test::SequenceSpec;
using test::Side;
using test::TestStep;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

class CudaIndex : public test::CudaTest {};

// Publishes `blocks` blocks, or restricts to `candidates`.
IndexOutput run_index(Side& side,
                      IndexInput& in,
                      int64_t k,
                      int64_t blocks = 0,
                      int64_t block = 0,
                      const Buffer* candidates = nullptr,
                      int64_t bound = 0) {
  const int64_t t = in.step.count();
  IndexOutput out{Buffer(DType::kI32, {t, k}), {}};
  std::fill_n(ints(out.selected), t * k, 12345);
  IndexSelectArgs args;
  args.rows = side.rows(in.step);
  args.ratio = in.ratio;
  args.q = side.in(in.q);
  args.w = side.in(in.w);
  args.rope = side.in(in.rope);
  args.index = side.pages(in.pages, in.step.specs().size());
  args.candidate_block = block;
  args.entries_bound = bound;
  if (candidates != nullptr) {
    args.candidates = side.in(*candidates);
  } else if (blocks > 0) {
    out.candidates = Buffer(DType::kI32, {t, blocks});
    std::fill_n(ints(out.candidates), t * blocks, 12345);
    args.candidates_out = side.out(out.candidates);
  }
  args.selected = side.out(out.selected);
  side.finish(index_select(side.ctx(), args));
  return out;
}

// Those of every backend, and more entries and rows than one block of threads takes.
std::vector<IndexCase> cuda_cases() {
  std::vector<IndexCase> cases = test::index_cases();
  const std::vector<IndexCase> more = {
      {{{.start = 2500, .rows = 2}, {.start = 7, .rows = 1}}, 32, 128, 1, 512},
      {{{.start = 3000, .rows = 1}}, 16, 128, 2, 64},
      // Several sequences in a group of tokens, and sequences across two of them.
      {{{.start = 900, .rows = 6}, {.start = 1000, .rows = 6}, {.start = 3, .rows = 6}},
       32,
       128,
       1,
       64},
      {{{.start = 700, .rows = 9}, {.start = 640, .rows = 1}, {.start = 90, .rows = 23}},
       32,
       128,
       2,
       20},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

// A BF16 query value on the other side of a rounding boundary can move an FP4 code.
int64_t allowed_picks(DType act, int64_t rows, int64_t k) {
  return act == DType::kF32 ? rows * k / 200 : rows * k / 20;
}

TEST_F(CudaIndex, IndexSelect) {
  Random random(10);
  for (const IndexCase& c : cuda_cases()) {
    for (DType act : kActs) {
      IndexInput in(random, c.specs, act, c.hi, c.di, 3100, c.ratio);
      const auto both = on_both([&](Side& side) { return run_index(side, in, c.k); });
      EXPECT_LE(differing_picks(both.got.selected, both.want.selected),
                allowed_picks(act, in.step.count(), c.k));
      // A bound lets several blocks share a row, and the model's shape run on tensor cores.
      Side side(Side::Kind::kCuda);
      EXPECT_LE(differing_picks(run_index(side, in, c.k, 0, 0, nullptr, 3100).selected,
                                both.want.selected),
                allowed_picks(act, in.step.count(), c.k));
    }
  }
}

// More entries than there are bits in a row of words of every warp.
TEST_F(CudaIndex, IndexSelectOfManyEntries) {
  constexpr int64_t kEntries = 20000, kTopK = 512;
  Random random(17);
  IndexInput in(random, {{.start = kEntries - 2, .rows = 2}}, DType::kF32, 32, 128, kEntries, 1);
  const auto both = on_both([&](Side& side) {
    return run_index(side, in, kTopK, 0, 0, nullptr, side.cuda() ? kEntries : 0);
  });
  EXPECT_LE(differing_picks(both.got.selected, both.want.selected),
            allowed_picks(DType::kF32, in.step.count(), kTopK));
}

TEST_F(CudaIndex, IndexSelectPublishesAndConsumesCandidates) {
  Random random(11);
  struct Case {
    std::vector<SequenceSpec> specs;
    int64_t hi, di, k, blocks, block;
  };
  const Case cases[] = {
      {{{.start = 30, .rows = 50}}, 2, 32, 6, 5, 4},
      {{{.start = 1300, .rows = 3}, {.start = 0, .rows = 2}}, 32, 128, 64, 40, 8},
      {{{.start = 3000, .rows = 1}}, 32, 128, 512, 128, 8},
  };
  for (const Case& c : cases) {
    IndexInput in(random, c.specs, DType::kF32, c.hi, c.di, 3100, 1);
    for (int64_t bound : {0, 3100}) {
      const auto source = on_both([&](Side& side) {
        return run_index(side, in, c.k, c.blocks, c.block, nullptr, side.cuda() ? bound : 0);
      });
      EXPECT_LE(differing_picks(source.got.selected, source.want.selected),
                allowed_picks(DType::kF32, in.step.count(), c.k));
      EXPECT_LE(differing_picks(source.got.candidates, source.want.candidates), 2);
      // The newest entry's block is always published.
      for (int64_t row = 0; row < in.step.count(); ++row) {
        const auto newest = static_cast<int32_t>(in.step.position(row) / c.block);
        const int32_t* ids = ints(source.got.candidates) + row * c.blocks;
        EXPECT_NE(std::find(ids, ids + c.blocks, newest), ids + c.blocks);
      }
      const auto consumer = on_both([&](Side& side) {
        return run_index(
            side, in, c.k, 0, c.block, &source.want.candidates, side.cuda() ? bound : 0);
      });
      EXPECT_LE(differing_picks(consumer.got.selected, consumer.want.selected),
                allowed_picks(DType::kF32, in.step.count(), c.k));
    }
  }
}

// Alone, a token is selected from by several blocks that wait for each other or, among many tokens,
// by one: the lists are the same, those of consumers with fewer candidates than places too.
TEST_F(CudaIndex, IndexSelectIsBatchInvariant) {
  constexpr int64_t kStart = 2100, kTopK = 200, kBlocks = 150, kCrowd = 300;
  Random random(18);
  std::vector<SequenceSpec> crowd(kCrowd, {.start = 0, .rows = 1});
  crowd.front() = crowd.back() = {.start = kStart, .rows = 1};
  IndexInput alone(random, {crowd[0]}, DType::kBF16, 32, 128, kStart + 1, 1, 32);
  IndexInput crowded(random, crowd, DType::kBF16, 32, 128, kStart + 1, 1, 32);
  const int64_t q_bytes = static_cast<int64_t>(alone.q.bytes.size()),
                w_bytes = static_cast<int64_t>(alone.w.bytes.size());
  for (int64_t at : {int64_t{0}, kCrowd - 1}) {
    std::copy(alone.q.bytes.begin(), alone.q.bytes.end(), crowded.q.bytes.begin() + at * q_bytes);
    std::copy(alone.w.bytes.begin(), alone.w.bytes.end(), crowded.w.bytes.begin() + at * w_bytes);
    Random keys(19), same(19);
    for (int64_t e = 0; e <= kStart; ++e) {
      alone.write_key(keys, 0, e);
      crowded.write_key(same, static_cast<size_t>(at), e);
    }
  }
  Side side(Side::Kind::kCuda);
  const IndexOutput a = run_index(side, alone, kTopK, kBlocks, 8, nullptr, kStart + 1);
  const IndexOutput b = run_index(side, crowded, kTopK, kBlocks, 8, nullptr, kStart + 1);
  const IndexOutput c = run_index(side, alone, kTopK, 0, 8, &a.candidates, kStart + 1);
  const IndexOutput d = run_index(side, crowded, kTopK, 0, 8, &b.candidates, kStart + 1);
  for (int64_t at : {int64_t{0}, kCrowd - 1}) {
    const auto equal = [&](const Buffer& one, const Buffer& many, int64_t width) {
      return std::equal(ints(one), ints(one) + width, ints(many) + at * width);
    };
    EXPECT_TRUE(equal(a.selected, b.selected, kTopK)) << at;
    EXPECT_TRUE(equal(a.candidates, b.candidates, kBlocks)) << at;
    EXPECT_TRUE(equal(c.selected, d.selected, kTopK)) << at;
  }
}

// Tokens of one sequence share unpacked keys, tokens of different ones do not, and pages of whole
// runs are copied in larger pieces: the scores are the same to the last bit.
TEST_F(CudaIndex, IndexSelectSharesKeys) {
  constexpr int64_t kRows = 11, kStart = 1500, kTopK = 300, kBlocks = 60;
  std::vector<SequenceSpec> crowd = {{.start = kStart, .rows = kRows}};
  crowd.resize(12, {.start = 0, .rows = 1});
  Random random(14);
  IndexInput alone(random, {crowd[0]}, DType::kBF16, 32, 128, 1600, 1, 8);
  IndexInput crowded(random, crowd, DType::kBF16, 32, 128, 1600, 1, 5);
  std::copy(alone.q.bytes.begin(), alone.q.bytes.end(), crowded.q.bytes.begin());
  std::copy(alone.w.bytes.begin(), alone.w.bytes.end(), crowded.w.bytes.begin());
  for (IndexInput* in : {&alone, &crowded}) {
    Random keys(15);
    for (int64_t e = 0; e < kStart + kRows; ++e) {
      in->write_key(keys, 0, e);
    }
  }
  Side side(Side::Kind::kCuda);
  const IndexOutput a = run_index(side, alone, kTopK, kBlocks, 8, nullptr, 1600);
  const IndexOutput b = run_index(side, crowded, kTopK, kBlocks, 8, nullptr, 1600);
  EXPECT_TRUE(std::equal(ints(a.selected), ints(a.selected) + kRows * kTopK, ints(b.selected)));
  EXPECT_TRUE(
      std::equal(ints(a.candidates), ints(a.candidates) + kRows * kBlocks, ints(b.candidates)));
}

// The tensor core aligns the 32 products of a step and the sum so far to the largest of them and
// keeps 13 bits behind that one's leading bit: each of the 33 loses less than 2^-13 of it. So a
// score is off by at most the weighted sum of that over steps and heads, plus the roundings of the
// FP32 sum of the heads. The blocks of a row differ by less than 2^14 in scale, which E4M3 holds
// exactly.
TEST_F(CudaIndex, IndexSelectMargin) {
  constexpr int64_t kHeads = 32, kDim = 128, kStart = 1200, kTopK = 100;
  Random random(16);
  IndexInput in(random, {{.start = kStart, .rows = 7}}, DType::kF32, kHeads, kDim, 1300, 1);
  const auto spread = [&](std::vector<float> rows) {
    for (size_t block = 0; block < rows.size() / 32; ++block) {
      const int shift = static_cast<int>(random.integer(0, 8));
      for (size_t i = 0; i < 32; ++i) {
        rows[block * 32 + i] = std::ldexp(rows[block * 32 + i], -shift);
      }
    }
    return rows;
  };
  for (int64_t i = 0; i < in.rope.shape.elements(); ++i) {
    in.rope.set(i, i % 2 == 0 ? 1.0f : 0.0f);  // no rotation
  }
  const std::vector<float> queries = spread(in.q.floats()), weights = in.w.floats();
  for (size_t i = 0; i < queries.size(); ++i) {
    in.q.set(static_cast<int64_t>(i), queries[i]);
  }
  const int64_t t = in.step.count();
  std::vector<float> keys(static_cast<size_t>((kStart + t) * kDim));
  for (int64_t e = 0; e < kStart + t; ++e) {
    uint8_t* row = in.pages.views()[0].row(e);
    quant::index_row_encode(
        spread(random.normals(DType::kF32, {kDim}, 0.5).floats()).data(), kDim, row);
    quant::index_row_decode(row, kDim, keys.data() + e * kDim);
  }
  Side side(Side::Kind::kCuda);
  const IndexOutput out = run_index(side, in, kTopK, 0, 0, nullptr, 1300);
  for (int64_t row = 0; row < t; ++row) {
    const int32_t* picked = ints(out.selected) + row * kTopK;
    double least_picked = INFINITY, most_left = -INFINITY, tolerance = 0;
    for (int64_t e = 0; e <= kStart + row; ++e) {
      const float* k = keys.data() + e * kDim;
      double score = 0, error = 0;
      for (int64_t h = 0; h < kHeads; ++h) {
        float q[kDim];
        uint8_t codes[quant::index_row_bytes(kDim)];
        quant::index_row_encode(queries.data() + (row * kHeads + h) * kDim, kDim, codes);
        quant::index_row_decode(codes, kDim, q);
        double dot = 0, lost = 0;
        for (int64_t step = 0; step < 4; ++step) {
          double largest = std::abs(dot);
          for (int64_t i = 0; i < 32; ++i) {
            const int64_t column = i / 8 * 32 + step * 8 + i % 8;
            const double product = static_cast<double>(q[column]) * k[column];
            largest = std::max(largest, std::abs(product));
            dot += product;
          }
          lost += 33 * std::ldexp(largest, -13);
        }
        const double w = weights[static_cast<size_t>(row * kHeads + h)];
        score += w * std::max(dot, 0.0);
        error += std::abs(w) * (lost + std::ldexp(std::abs(dot), -18));
      }
      tolerance = std::max(tolerance, error);
      if (std::find(picked, picked + kTopK, static_cast<int32_t>(e)) != picked + kTopK) {
        least_picked = std::min(least_picked, score);
      } else {
        most_left = std::max(most_left, score);
      }
    }
    EXPECT_GE(least_picked, most_left - 2 * tolerance) << row;
  }
}

// equal scores are decided by the entry, and narrow distributions overflow nothing.
TEST_F(CudaIndex, IndexSelectTies) {
  Random random(12);
  for (const auto& [hi, di] : {std::pair<int64_t, int64_t>{2, 32}, {32, 128}}) {
    IndexInput in(random, {{.start = 2999, .rows = 1}}, DType::kF32, hi, di, 3100, 1);
    Random same(13);
    const Buffer key = same.normals(DType::kF32, {di}, 0.5);
    for (int64_t e = 0; e < 3000; ++e) {
      quant::index_row_encode(key.floats().data(), di, in.pages.views()[0].row(e));
    }
    for (int64_t bound : {0, 3100}) {
      Side side(Side::Kind::kCuda);
      const IndexOutput out = run_index(side, in, 300, 100, 8, nullptr, bound);
      for (int64_t i = 0; i < 300; ++i) {
        ASSERT_EQ(ints(out.selected)[i], i);
      }
      for (int64_t i = 0; i < 99; ++i) {
        ASSERT_EQ(ints(out.candidates)[i], i);
      }
      EXPECT_EQ(ints(out.candidates)[99], 2999 / 8);
    }
  }
}

}  // namespace
}  // namespace cachalot::ops
