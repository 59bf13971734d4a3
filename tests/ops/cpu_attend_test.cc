// Attention of the CPU backend against the reference, and the known faults of such kernels.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/compressor.h"
#include "tests/support/context.h"
#include "tests/support/step.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::CompressorInput;
using test::Pages;
using test::Random;
using test::same_bits;
using test::SequenceSpec;
using test::TestStep;
using test::TestWindow;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

struct AttendInput {
  AttendInput(Random& random,
              std::vector<SequenceSpec> specs,
              DType act,
              int64_t h,
              int64_t head_dim,
              int64_t window_rows,
              int64_t picks,
              int64_t block = 0)
      : step(std::move(specs)),
        heads(h),
        k(head_dim),
        q(random.normals(act, {step.count(), h * head_dim}, 3.0)),
        rope(test::rope_rows(step, head_dim / 4)),
        sink(random.normals(DType::kF32, {h})),
        window(random, step, window_rows, head_dim, block),
        main(random,
             static_cast<int64_t>(step.specs().size()),
             kEntries,
             5,
             quant::main_row_bytes(head_dim)),
        selected(DType::kI32, {step.count(), picks}) {
    std::vector<std::vector<bool>> written(step.specs().size(), std::vector<bool>(kEntries));
    for (int64_t row = 0; row < step.count(); ++row) {
      // Ascending ids of entries that then exist, -1 behind.
      int64_t id = random.integer(0, 4), i = 0;
      for (; i < picks - row % 3 && id < kEntries; ++i, id += random.integer(1, 4)) {
        ints(selected)[row * picks + i] = static_cast<int32_t>(id);
        const auto s = static_cast<size_t>(step.sequence(row));
        if (!written[s][static_cast<size_t>(id)]) {
          written[s][static_cast<size_t>(id)] = true;
          const Buffer x = random.normals(DType::kF32, {k}, 0.7);
          quant::main_row_encode(x.floats().data(), k, main.views()[s].row(id));
        }
      }
    }
  }

  static constexpr int64_t kEntries = 200;
  TestStep step;
  int64_t heads, k;
  Buffer q, rope, sink;
  TestWindow window;
  Pages main;
  Buffer selected;
};

Buffer run_attend(OpContext& ctx, const AttendInput& in, bool use_main = true) {
  Buffer o(in.q.dtype, in.q.shape);
  AttendArgs args;
  args.rows = in.step.rows();
  args.q = in.q.view();
  args.rope = in.rope.view();
  args.window = in.window.view();
  if (use_main) {
    args.main = in.main.views();
    args.selected = in.selected.view();
  }
  args.sink = in.sink.view();
  args.o = o.view();
  const Status status = attend(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return o;
}

const test::Tolerance& attend_tolerance(DType act) {
  return act == DType::kF32 ? test::kAttendF32 : test::kAttendBf16;
}

struct AttendCase {
  std::vector<SequenceSpec> specs;
  int64_t h, k, window, picks;
};

std::vector<AttendCase> attend_cases() {
  return {
      {{{.start = 0, .rows = 1}}, 1, 32, 4, 1},
      {{{.start = 0, .rows = 20}}, 4, 32, 8, 4},
      {{{.start = 5, .rows = 3}, {.start = 30, .rows = 1}, {.start = 0, .rows = 9}}, 6, 64, 8, 70},
      {{{.start = 100, .rows = 6, .floor = 97}}, 5, 96, 16, 9},
      {{{.start = 300, .rows = 2}}, 33, 64, 128, 60},
      {{{.start = 126, .rows = 70}}, 8, 32, 128, 16},
      {{{.start = 200, .rows = 1}}, 64, 512, 128, 40},
      // More window rows than are decoded at a time.
      {{{.start = 2000, .rows = 9}, {.start = 2000, .rows = 9}, {.start = 1900, .rows = 9}},
       2,
       32,
       2000,
       4},
  };
}

TEST(CpuAttend, MatchesRef) {
  Random random(20);
  for (const AttendCase& c : attend_cases()) {
    for (DType act : kActs) {
      SCOPED_TRACE(testing::Message() << "heads " << c.h << " dim " << c.k << " picks " << c.picks
                                      << " " << dtype_name(act));
      const AttendInput in(random, c.specs, act, c.h, c.k, c.window, c.picks);
      for (bool use_main : {true, false}) {
        const Buffer want = run_attend(test::ref(), in, use_main);
        test::on_every_instruction_set([&] {
          EXPECT_TRUE(close(run_attend(test::cpu(), in, use_main), want, attend_tolerance(act)));
        });
        const Buffer got = run_attend(test::cpu(), in, use_main);
        EXPECT_TRUE(same_bits(run_attend(test::cpu(0), in, use_main), got));
        EXPECT_TRUE(same_bits(run_attend(test::cpu(3), in, use_main), got));
      }
    }
  }
}

struct BlockCase {
  std::vector<SequenceSpec> specs;
  int64_t h, k, window;
};

std::vector<BlockCase> block_cases() {
  return {
      {{{.start = 1, .rows = 3}}, 1, 32, 8},
      {{{.start = 7, .rows = 5}, {.start = 8, .rows = 5}, {.start = 40, .rows = 5}}, 6, 64, 8},
      {{{.start = 300, .rows = 5}}, 33, 64, 128},
      {{{.start = 90, .rows = 2, .floor = 85}}, 64, 512, 128},
  };
}

TEST(CpuAttend, DraftBlocksMatchRef) {
  Random random(26);
  for (const BlockCase& c : block_cases()) {
    for (DType act : kActs) {
      SCOPED_TRACE(testing::Message() << "heads " << c.h << " dim " << c.k << dtype_name(act));
      const AttendInput in(random, c.specs, act, c.h, c.k, c.window, 1, c.specs[0].rows);
      const Buffer want = run_attend(test::ref(), in, false);
      test::on_every_instruction_set([&] {
        EXPECT_TRUE(close(run_attend(test::cpu(), in, false), want, attend_tolerance(act)));
      });
      EXPECT_TRUE(
          same_bits(run_attend(test::cpu(0), in, false), run_attend(test::cpu(3), in, false)));
    }
  }
}

// Every row of a block sees the W positions before it and the whole block, no more and no less.
TEST(CpuAttend, ADraftBlockSeesItsWindowAndItself) {
  constexpr int64_t kWindow = 8, kBlock = 3, kDim = 32, kStart = 20;
  Random random(27);
  AttendInput in(
      random, {{.start = kStart, .rows = kBlock}}, DType::kF32, 2, kDim, kWindow, 1, kBlock);
  const int64_t bytes = quant::window_row_bytes(kDim);
  for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
    const Buffer before = run_attend(*ctx, in, false);
    const auto changes = [&](uint8_t* row) {
      std::vector<uint8_t> kept(row, row + bytes);
      for (int64_t i = 0; i < kDim; ++i) {
        row[i] ^= 0x80;  // the other sign
      }
      const Buffer after = run_attend(*ctx, in, false);
      std::copy(kept.begin(), kept.end(), row);
      int64_t rows = 0;
      for (int64_t r = 0; r < kBlock; ++r) {
        rows += same_bits(part(after, r, 1), part(before, r, 1)) ? 0 : 1;
      }
      return rows;
    };
    for (int64_t slot = 0; slot < kWindow; ++slot) {
      EXPECT_EQ(changes(in.window.rings()[0].data() + slot * bytes), kBlock) << slot;
    }
    for (int64_t row = 0; row < kBlock; ++row) {
      EXPECT_EQ(changes(in.window.fresh().bytes.data() + row * bytes), kBlock) << row;
    }
  }
  AttendInput uneven(
      random, {{.start = 5, .rows = 3}, {.start = 5, .rows = 2}}, DType::kF32, 2, kDim, 8, 1, 3);
  Buffer o(DType::kF32, uneven.q.shape);
  AttendArgs args{.rows = uneven.step.rows(),
                  .q = uneven.q.view(),
                  .rope = uneven.rope.view(),
                  .window = uneven.window.view(),
                  .sink = uneven.sink.view(),
                  .o = o.view()};
  EXPECT_EQ(attend(test::cpu(), args).code(), Code::kInvalidArgument);
}

// The same query alone, with the keys in its ring, and among its neighbours, with the keys fresh.
TEST(CpuAttend, A19_PrefillAndDecodeAgree) {
  // So many threads share each row, and take 40 rows in two parts.
  test::Context many(ops::Backend::kCpu, 11);
  for (DType act : kActs) {
    Random random(21);
    const AttendInput all(random, {{.start = 0, .rows = 40}}, act, 20, 64, 16, 12);
    const Buffer want = run_attend(test::cpu(), all);
    EXPECT_TRUE(same_bits(run_attend(*many, all), want));
    for (int64_t row : {0, 1, 15, 16, 39}) {
      Random again(21);
      AttendInput one(again, {{.start = 0, .rows = 40}}, act, 20, 64, 16, 12);
      const int64_t bytes = quant::window_row_bytes(64);
      for (int64_t p = std::max<int64_t>(0, row - 15); p < row; ++p) {
        std::memcpy(one.window.rings()[0].data() + p % 16 * bytes,
                    all.window.view().fresh.as<uint8_t>() + p * bytes,
                    static_cast<size_t>(bytes));
      }
      one.window.fresh() = Buffer(DType::kU8, {1, bytes});
      std::memcpy(one.window.fresh().bytes.data(),
                  all.window.view().fresh.as<uint8_t>() + row * bytes,
                  static_cast<size_t>(bytes));
      one.step = TestStep({{.start = row, .rows = 1}});
      one.q = part(all.q, row, 1);
      one.rope = part(all.rope, row, 1);
      one.selected = part(all.selected, row, 1);
      for (int threads : {0, 2, 3}) {
        EXPECT_TRUE(same_bits(run_attend(test::cpu(threads), one), part(want, row, 1)));
      }
    }
  }
}

// Three queries with disjoint picks, in one call and in three.
TEST(CpuAttend, A02_QueriesSeeOnlyTheirOwnPicks) {
  for (DType act : kActs) {
    Random random(22);
    AttendInput in(random,
                   {{.start = 50, .rows = 1}, {.start = 50, .rows = 1}, {.start = 50, .rows = 1}},
                   act,
                   4,
                   64,
                   1,
                   6);
    // One cache for all three, so that only the lists separate them.
    std::vector<PagedRows> shared(3, in.main.views()[0]);
    for (int64_t e = 0; e < 18; ++e) {
      const Buffer x = random.normals(DType::kF32, {64}, 0.7);
      quant::main_row_encode(x.floats().data(), 64, shared[0].row(e));
    }
    for (int32_t i = 0; i < 18; ++i) {
      ints(in.selected)[i] = i / 6 + i % 6 * 3;
    }
    const auto run = [&](OpContext& ctx, const AttendInput& input) {
      Buffer o(act, input.q.shape);
      AttendArgs args;
      args.rows = input.step.rows();
      args.q = input.q.view();
      args.rope = input.rope.view();
      args.window = input.window.view();
      args.main = shared.data();
      args.selected = input.selected.view();
      args.sink = input.sink.view();
      args.o = o.view();
      EXPECT_TRUE(attend(ctx, args).ok());
      return o;
    };
    const Buffer together = run(test::cpu(), in);
    EXPECT_TRUE(close(together, run(test::ref(), in), attend_tolerance(act)));
    for (int64_t row = 0; row < 3; ++row) {
      Random again(22);
      AttendInput one(again, {{.start = 50, .rows = 1}}, act, 4, 64, 1, 6);
      one.q = part(in.q, row, 1);
      one.rope = part(in.rope, row, 1);
      one.selected = part(in.selected, row, 1);
      one.sink = in.sink;
      one.window.fresh() = part(in.window.fresh(), row, 1);
      EXPECT_TRUE(same_bits(run(test::cpu(), one), part(together, row, 1)));
    }
  }
}

// No window key at all (the floor lies behind the query); 16 leading -1, then one entry.
TEST(CpuAttend, A07_FullyMaskedFirstTile) {
  for (DType act : kActs) {
    Random random(23);
    AttendInput in(random, {{.start = 40, .rows = 2, .floor = 45}}, act, 3, 64, 8, 24);
    std::fill_n(ints(in.selected), 48, -1);
    ints(in.selected)[16] = 7;
    ints(in.selected)[24 + 23] = 9;
    for (int64_t e : {7, 9}) {
      const Buffer x = random.normals(DType::kF32, {64}, 0.7);
      quant::main_row_encode(x.floats().data(), 64, in.main.views()[0].row(e));
    }
    const Buffer got = run_attend(test::cpu(), in);
    EXPECT_TRUE(close(got, run_attend(test::ref(), in), attend_tolerance(act)));
    for (float value : got.floats()) {
      EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST(CpuAttend, A07_FullyMaskedRowGivesZeros) {
  for (DType act : kActs) {
    for (float sink : {0.5f, -INFINITY}) {
      Random random(24);
      AttendInput in(random, {{.start = 40, .rows = 2, .floor = 45}}, act, 3, 64, 8, 24);
      std::fill_n(ints(in.selected), 48, -1);
      for (int64_t h = 0; h < 3; ++h) {
        in.sink.set(h, sink);
      }
      for (float value : run_attend(test::cpu(), in).floats()) {
        EXPECT_EQ(value, 0.0f);
      }
    }
  }
}

// A NaN among the visible keys must show.
TEST(CpuAttend, NanStaysVisible) {
  Random random(25);
  AttendInput in(random, {{.start = 0, .rows = 4}}, DType::kF32, 2, 32, 8, 2);
  std::fill_n(in.window.fresh().bytes.begin() + 2 * quant::window_row_bytes(32),
              static_cast<size_t>(quant::window_row_bytes(32)),
              uint8_t{0xFF});
  const Buffer o = run_attend(test::cpu(), in);
  for (int64_t i = 0; i < 4 * 64; ++i) {
    EXPECT_EQ(std::isnan(o.at(i)), i >= 2 * 64);
  }
}

// Rows at offsets around 2^31 and 2^32 of one huge page read and write as rows of a small one.
TEST(CpuAttend, A17_OffsetsAre64Bit) {
  constexpr int64_t kK = 64, kBytes = 36;
  static_assert(kBytes == kK / 2 + kK / 16);
  ASSERT_EQ(quant::main_row_bytes(kK), kBytes);
  constexpr int64_t kSpace = int64_t{8} << 30;
  void* memory = mmap(
      nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    GTEST_SKIP() << "no address space";
  }
  uint8_t* page = static_cast<uint8_t*>(memory);
  const PagedRows high{&page, kSpace / kBytes, kBytes};
  const int32_t ids[] = {static_cast<int32_t>(((int64_t{1} << 31) - 1) / kBytes),
                         static_cast<int32_t>((int64_t{1} << 31) / kBytes + 1),
                         static_cast<int32_t>(((int64_t{1} << 32) + 1) / kBytes + 1)};

  Random random(26);
  AttendInput in(random, {{.start = 10, .rows = 1}}, DType::kBF16, 4, kK, 8, 3);
  for (int32_t i = 0; i < 3; ++i) {
    ints(in.selected)[i] = i;
    const Buffer x = random.normals(DType::kF32, {kK}, 0.7);
    quant::main_row_encode(x.floats().data(), kK, in.main.views()[0].row(i));
    std::memcpy(high.row(ids[i]), in.main.views()[0].row(i), kBytes);
  }
  const Buffer want = run_attend(test::cpu(), in);
  Buffer got(DType::kBF16, in.q.shape);
  std::copy_n(ids, 3, ints(in.selected));
  AttendArgs args;
  args.rows = in.step.rows();
  args.q = in.q.view();
  args.rope = in.rope.view();
  args.window = in.window.view();
  args.main = &high;
  args.selected = in.selected.view();
  args.sink = in.sink.view();
  args.o = got.view();
  EXPECT_TRUE(attend(test::cpu(), args).ok());
  EXPECT_TRUE(same_bits(got, want));

  // The compressor writes there, too; the index rows are smaller, so their page is cut differently.
  CompressorInput store({{.start = 0, .rows = 3}});
  store.ratio = 1;
  fill(store, random);
  const Buffer latent = run_pool(test::cpu(), store);
  Pages main(random, 1, 4, 2, quant::main_row_bytes(store.c));
  Pages index(random, 1, 4, 2, quant::index_row_bytes(store.di));
  run_store(test::cpu(), store, latent, main.views(), index.views());
  const int64_t index_bytes = quant::index_row_bytes(store.di);
  const PagedRows high_index{&page, kSpace / index_bytes, index_bytes};
  for (int32_t i = 0; i < 3; ++i) {
    ints(store.group_entry)[i] = static_cast<int32_t>((int64_t{3} << 30) / index_bytes + i);
  }
  const PagedRows high_main{&page, kSpace / kBytes, kBytes};
  run_store(test::cpu(), store, latent, &high_main, &high_index);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(
        std::memcmp(high_main.row(ints(store.group_entry)[i]), main.views()[0].row(i), kBytes), 0);
    EXPECT_EQ(std::memcmp(high_index.row(ints(store.group_entry)[i]),
                          index.views()[0].row(i),
                          static_cast<size_t>(index_bytes)),
              0);
  }
  munmap(memory, kSpace);
}

}  // namespace
}  // namespace cachalot::ops
