// Window rows, compressor and attention of the CUDA backend against the reference, and the known
// faults of such kernels.
#include <algorithm>
#include <cmath>
#include <deque>

#include "tests/support/compare.h"
#include "tests/support/device.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::on_both;
using test::Pages;
using test::Random;
using test::same_bits;
using test::SequenceSpec;
using test::Side;
using test::TestStep;
using test::TestWindow;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

std::vector<uint8_t> row_bytes(const Buffer& all, int64_t row) {
  const auto size = static_cast<int64_t>(all.bytes.size()) / all.shape[0];
  return {all.bytes.begin() + row * size, all.bytes.begin() + (row + 1) * size};
}

double code_share(DType act) {
  return act == DType::kF32 ? test::kCodesF32 : test::kCodesBf16;
}

class CudaAttention : public test::CudaTest {};

// Rows
// ----------------------------------------------------------------------------------------------

struct QkvOutput {
  Buffer r, fresh;
};

QkvOutput run_qkv(Side& side,
                  const Buffer& t,
                  const Buffer& q_norm,
                  const Buffer& kv,
                  const Buffer& kv_norm,
                  const Buffer& rope) {
  QkvOutput out{Buffer(t.dtype, t.shape),
                Buffer(DType::kU8, {t.shape[0], quant::window_row_bytes(kv.shape[1])})};
  side.finish(qkv_finish(side.ctx(),
                         {.t = side.in(t),
                          .q_norm = side.in(q_norm),
                          .kv = side.in(kv),
                          .kv_norm = side.in(kv_norm),
                          .rope = side.in(rope),
                          .rms_eps = 1e-20f,
                          .r = side.out(out.r),
                          .fresh = side.out(out.fresh)}));
  return out;
}

TEST_F(CudaAttention, QkvFinish) {
  Random random(1);
  struct Case {
    int64_t t, q, k, half;
  };
  for (const Case& c : {Case{1, 64, 32, 4}, {5, 97, 64, 8}, {9, 128, 40, 16}, {3, 1280, 512, 32}}) {
    for (DType act : kActs) {
      const Buffer t = random.activations(act, {c.t, c.q});
      const Buffer kv = random.activations(act, {c.t, c.k});
      const Buffer q_norm = random.normals(DType::kBF16, {c.q}, 0.1, 1.0);
      const Buffer kv_norm = random.normals(DType::kF32, {c.k}, 0.1, 0.4);
      const Buffer rope = test::rope_rows(TestStep({{.start = 1000, .rows = c.t}}), c.half);
      const auto both =
          on_both([&](Side& side) { return run_qkv(side, t, q_norm, kv, kv_norm, rope); });
      EXPECT_TRUE(close(both.got.r, both.want.r, test::row_tolerance(act)));
      EXPECT_LE(test::differing_share(both.got.fresh.bytes, both.want.fresh.bytes),
                code_share(act));
    }
  }
}

TEST_F(CudaAttention, WindowRowsWithoutQueries) {
  Random random(3);
  for (DType act : kActs) {
    const Buffer kv = random.activations(act, {5, 512});
    const Buffer kv_norm = random.normals(DType::kBF16, {512}, 0.1, 0.4);
    const Buffer rope = test::rope_rows(TestStep({{.start = 1000, .rows = 5}}), 32);
    const auto both = on_both([&](Side& side) {
      Buffer fresh(DType::kU8, {5, quant::window_row_bytes(512)});
      side.finish(qkv_finish(side.ctx(),
                             {.kv = side.in(kv),
                              .kv_norm = side.in(kv_norm),
                              .rope = side.in(rope),
                              .rms_eps = 1e-20f,
                              .fresh = side.out(fresh)}));
      return fresh;
    });
    EXPECT_LE(test::differing_share(both.got.bytes, both.want.bytes), code_share(act));
  }
}

// Rows of +-1 have an RMS of exactly 1 and no rotation is applied, so that the norm weight reaches
// the quantizer unchanged: the codes must then be those of the reference, bit for bit.
TEST_F(CudaAttention, QuantizersAreExact) {
  Random random(2);
  const int64_t k = 512;
  for (int trial = 0; trial < 8; ++trial) {
    Buffer ones(DType::kF32, {1, k}), values(DType::kF32, {k});
    for (int64_t i = 0; i < k; ++i) {
      ones.set(i, random.integer(0, 2) == 0 ? 1.0f : -1.0f);
      // Many binades, exact ties of every format, zeros and tiny values.
      const double scale = std::exp2(random.uniform(-30, 8));
      const double value = i % 3 == 0 ? random.normal(scale)
                                      : std::exp2(random.integer(-20, 6)) *
                                            static_cast<double>(random.integer(-32, 33)) / 16.0;
      values.set(i, static_cast<float>(i % 17 == 0 ? 0.0 : value));
    }
    Buffer rope(DType::kF32, {1, 16, 2});
    for (int64_t i = 0; i < 16; ++i) {
      rope.set(2 * i, 1.0f);
      rope.set(2 * i + 1, 0.0f);
    }
    const auto window =
        on_both([&](Side& side) { return run_qkv(side, ones, values, ones, values, rope); });
    EXPECT_TRUE(same_bits(window.got.fresh, window.want.fresh));

    const auto cache = on_both([&](Side& side) {
      Random pages(3);
      Pages main(pages, 1, 4, 2, quant::main_row_bytes(k));
      Pages index(pages, 1, 4, 2, quant::index_row_bytes(k));
      Buffer zero(DType::kI32, {1}), entry(DType::kI32, {1}), latent(DType::kF32, {1, k});
      ints(zero)[0] = 0;
      ints(entry)[0] = 3;
      for (int64_t i = 0; i < k; ++i) {
        latent.set(i, ones.at(i) * values.at(i));
      }
      CompressStoreArgs args;
      args.groups = {1, 1, side.in(zero), side.in(zero), side.in(entry)};
      args.latent = side.in(latent);
      args.key = side.in(ones);
      args.k_norm = side.in(values);
      args.rope = side.in(rope);
      args.rms_eps = 1e-20f;
      args.main = side.pages(main, 1);
      args.index = side.pages(index, 1);
      side.finish(compress_store(side.ctx(), args));
      std::vector<uint8_t> bytes = main.memory();
      bytes.insert(bytes.end(), index.memory().begin(), index.memory().end());
      return bytes;
    });
    EXPECT_EQ(cache.got, cache.want);
  }
}

// Groups that pad a step to a fixed shape touch no page.
TEST_F(CudaAttention, PaddingGroupsAreNotStored) {
  Random random(4);
  const int64_t k = 64, groups = 3;
  const Buffer latent = random.normals(DType::kF32, {groups, k});
  const Buffer key = random.normals(DType::kF32, {groups, k});
  const Buffer norm = random.normals(DType::kF32, {k}),
               rope = random.normals(DType::kF32, {groups, 8, 2});
  const auto pages = on_both([&](Side& side) {
    Random content(5);
    Pages main(content, 1, 4, 2, quant::main_row_bytes(k));
    Pages index(content, 1, 4, 2, quant::index_row_bytes(k));
    Buffer zero(DType::kI32, {groups}), entry(DType::kI32, {groups});
    std::fill_n(ints(zero), groups, 0);
    std::fill_n(ints(entry), groups, -1);
    ints(entry)[1] = 2;
    CompressStoreArgs args;
    args.groups = {1, groups, side.in(zero), side.in(zero), side.in(entry)};
    args.latent = side.in(latent);
    args.key = side.in(key);
    args.k_norm = side.in(norm);
    args.rope = side.in(rope);
    args.rms_eps = 1e-20f;
    args.main = side.pages(main, 1);
    args.index = side.pages(index, 1);
    const std::vector<uint8_t> before = main.memory();
    side.finish(compress_store(side.ctx(), args));
    int64_t changed = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      changed += before[i] != main.memory()[i] ? 1 : 0;
    }
    return changed;
  });
  EXPECT_GT(pages.got, 0);
  EXPECT_LE(pages.got, quant::main_row_bytes(k));
  EXPECT_LE(pages.want, quant::main_row_bytes(k));
}

TEST_F(CudaAttention, Commit) {
  // More windows and groups than one launch takes.
  constexpr size_t kWindows = 70, kGroups = 33;
  const TestStep step({{.start = 0, .rows = 3},
                       {.start = 7, .rows = 20},
                       {.start = 130, .rows = 1},
                       {.start = 6, .rows = 2}});
  Buffer accepted(DType::kI32, {4});
  const int32_t counts[] = {1, 19, 0, 1};
  std::copy_n(counts, 4, ints(accepted));
  for (int64_t window : {4, 8, 128}) {
    for (int64_t k : {64, 512}) {
      const auto both = on_both([&](Side& side) {
        Random same(3);
        std::deque<TestWindow> rings;
        std::vector<WindowView> windows;
        for (size_t i = 0; i < (k == 64 ? kWindows : 2); ++i) {
          windows.push_back(side.window(rings.emplace_back(same, step, window, k)));
        }
        std::deque<Buffer> open, rows;
        std::deque<std::vector<float*>> lists;
        std::vector<OpenGroupView> groups;
        for (size_t i = 0; i < (k == 64 ? kGroups : 1); ++i) {
          const TensorView to = side.out(open.emplace_back(same.normals(DType::kF32, {4, 2, k})));
          std::vector<float*> pointers;
          for (int64_t s = 0; s < 4; ++s) {
            pointers.push_back(to.as<float>() + s * 2 * k);
          }
          lists.push_back(pointers);
          const auto input = [&] {
            return side.in(rows.emplace_back(same.normals(DType::kF32, {step.count(), k})));
          };
          groups.push_back({.kv = input(),
                            .gate = input(),
                            .open = side.in(lists.back().data(), lists.back().size())});
        }
        side.finish(commit(side.ctx(),
                           {.rows = side.rows(step),
                            .windows = windows,
                            .groups = groups,
                            .accepted = side.in(accepted)}));
        std::vector<std::vector<uint8_t>> all;
        for (TestWindow& ring : rings) {
          all.insert(all.end(), ring.rings().begin(), ring.rings().end());
        }
        for (const Buffer& group : open) {
          all.push_back(group.bytes);
        }
        return all;
      });
      EXPECT_EQ(both.got, both.want);
    }
  }
}

// Compressor
// ----------------------------------------------------------------------------------------

TEST_F(CudaAttention, Compressor) {
  for (int64_t ratio : {1, 2}) {
    for (DType act : kActs) {
      for (int64_t c : {64, 512}) {
        const int64_t di = c / 4, half = 8;
        const TestStep step({{.start = 0, .rows = 9},
                             {.start = 5, .rows = 1},
                             {.start = 6, .rows = 2},
                             {.start = 3, .rows = 30}});
        Random random(4);
        std::vector<int32_t> row, sequence, entry;
        std::vector<int64_t> positions;
        for (int64_t t = 0; t < step.count(); ++t) {
          const int64_t p = step.position(t);
          if ((p + 1) % ratio == 0) {
            row.push_back(static_cast<int32_t>(t));
            sequence.push_back(static_cast<int32_t>(step.sequence(t)));
            entry.push_back(static_cast<int32_t>(p / ratio));
            positions.push_back(p / ratio * ratio);
          }
        }
        const auto g = static_cast<int64_t>(row.size()), t = step.count();
        const auto list = [&](const std::vector<int32_t>& values) {
          Buffer buffer(DType::kI32, {g});
          std::copy(values.begin(), values.end(), ints(buffer));
          return buffer;
        };
        const Buffer rows = list(row), sequences = list(sequence), entries = list(entry);
        const Buffer kv = random.activations(ratio == 2 ? DType::kF32 : act, {t, c});
        const Buffer gates = random.normals(DType::kF32, {t, c}, 2.0);
        const Buffer open = random.normals(DType::kF32, {4, 2, c});
        const Buffer norm = random.normals(DType::kBF16, {c}, 0.1, 0.6);
        const Buffer key = random.activations(act, {g, di});
        const Buffer k_norm = random.normals(DType::kBF16, {di}, 0.1, 0.5);
        const Buffer rope = test::rope_rows(positions, half);
        const auto groups = [&](Side& side) {
          return GroupRows{ratio, g, side.in(rows), side.in(sequences), side.in(entries)};
        };
        const auto pooled = on_both([&](Side& side) {
          Buffer latent(act, {g, c});
          CompressPoolArgs args;
          args.groups = groups(side);
          args.rows = side.rows(step);
          args.kv = side.in(kv);
          std::vector<const float*> pointers;
          if (ratio == 2) {
            args.gate = side.in(gates);
            const auto* base = static_cast<const float*>(side.in(open).data);
            for (int64_t s = 0; s < 4; ++s) {
              pointers.push_back(base + s * 2 * c);
            }
            args.open = side.in(pointers.data(), pointers.size());
          }
          args.norm = side.in(norm);
          args.rms_eps = 1e-20f;
          args.latent = side.out(latent);
          side.finish(compress_pool(side.ctx(), args));
          return latent;
        });
        EXPECT_TRUE(close(pooled.got, pooled.want, test::row_tolerance(act)));

        const auto cache = on_both([&](Side& side) {
          Random same(5);
          Pages main(same, 4, 40, 7, quant::main_row_bytes(c));
          Pages index(same, 4, 40, 5, quant::index_row_bytes(di));
          CompressStoreArgs args;
          args.groups = groups(side);
          args.latent = side.in(pooled.want);
          args.key = side.in(key);
          args.k_norm = side.in(k_norm);
          args.rope = side.in(rope);
          args.rms_eps = 1e-20f;
          args.main = side.pages(main, 4);
          args.index = side.pages(index, 4);
          side.finish(compress_store(side.ctx(), args));
          std::vector<uint8_t> bytes = main.memory();
          bytes.insert(bytes.end(), index.memory().begin(), index.memory().end());
          return bytes;
        });
        EXPECT_LE(test::differing_share(cache.got, cache.want), code_share(act));
      }
    }
  }
}

// Attention
// -----------------------------------------------------------------------------------------

struct AttendInput {
  AttendInput(Random& random,
              std::vector<SequenceSpec> specs,
              DType act,
              int64_t h,
              int64_t k,
              int64_t rotary_half,
              int64_t width,
              int64_t window_rows,
              int64_t entries,
              int64_t block = 0)
      : step(std::move(specs)),
        q(random.activations(act, {step.count(), h * k}, 0.5)),
        rope(test::rope_rows(step, rotary_half)),
        sink(random.normals(DType::kF32, {h})),
        window(random, step, window_rows, k, block),
        pages(random,
              static_cast<int64_t>(step.specs().size()),
              entries,
              3,
              quant::main_row_bytes(k)),
        selected(DType::kI32, {step.count(), width}) {
    for (int64_t row = 0; row < step.count(); ++row) {
      // A random half of what the row sees, ascending, -1 behind.
      std::vector<int32_t> ids;
      for (int64_t e = 0; e <= step.position(row) && e < entries; ++e) {
        if (random.integer(0, 2) == 0 && static_cast<int64_t>(ids.size()) < width) {
          ids.push_back(static_cast<int32_t>(e));
        }
      }
      std::copy(ids.begin(), ids.end(), ints(selected) + row * width);
    }
    for (size_t s = 0; s < step.specs().size(); ++s) {
      for (int64_t e = 0; e < std::min(entries, step.specs()[s].start + step.specs()[s].rows);
           ++e) {
        const Buffer row = random.normals(DType::kBF16, {k}, 0.7);
        quant::main_row_encode(row.floats().data(), k, pages.views()[s].row(e));
      }
    }
  }

  TestStep step;
  Buffer q, rope, sink;
  TestWindow window;
  Pages pages;
  Buffer selected;
};

Buffer run_attend(Side& side, AttendInput& in, bool with_main) {
  Buffer o(in.q.dtype, in.q.shape);
  AttendArgs args;
  args.rows = side.rows(in.step);
  args.q = side.in(in.q);
  args.rope = side.in(in.rope);
  args.window = side.window(in.window);
  if (with_main) {
    args.main = side.pages(in.pages, in.step.specs().size());
    args.selected = side.in(in.selected);
  }
  args.sink = side.in(in.sink);
  args.o = side.out(o);
  side.finish(attend(side.ctx(), args));
  return o;
}

struct AttendCase {
  std::vector<SequenceSpec> specs;
  int64_t h, k, half, width, window, entries;
};

std::vector<AttendCase> attend_cases() {
  return {
      {{{.start = 0, .rows = 1}}, 3, 64, 8, 4, 8, 40},
      {{{.start = 5, .rows = 20}, {.start = 30, .rows = 2}}, 2, 48, 8, 6, 8, 60},
      {{{.start = 0, .rows = 3}, {.start = 200, .rows = 2}}, 16, 512, 32, 20, 128, 220},
      {{{.start = 250, .rows = 1}, {.start = 70, .rows = 3, .floor = 60}},
       64,
       512,
       32,
       70,
       128,
       260},
      {{{.start = 1100, .rows = 1}}, 16, 512, 32, 512, 128, 1110},
      // Clusters of four and of two blocks: the first keys of a sequence, a window part that ends
      // inside a block of keys, heads that fill no tile.
      {{{.start = 0, .rows = 5}, {.start = 90, .rows = 9, .floor = 60}, {.start = 250, .rows = 3}},
       64,
       512,
       32,
       70,
       128,
       260},
      {{{.start = 20, .rows = 40, .floor = 7}, {.start = 170, .rows = 2}},
       5,
       512,
       32,
       90,
       128,
       180},
      // More keys than a cluster takes.
      {{{.start = 1400, .rows = 1}}, 16, 512, 32, 600, 128, 1410},
  };
}

TEST_F(CudaAttention, Attend) {
  Random random(20);
  for (const AttendCase& c : attend_cases()) {
    for (DType act : kActs) {
      AttendInput in(random, c.specs, act, c.h, c.k, c.half, c.width, c.window, c.entries);
      for (bool with_main : {true, false}) {
        const auto both = on_both([&](Side& side) { return run_attend(side, in, with_main); });
        EXPECT_TRUE(
            close(both.got, both.want, act == DType::kF32 ? test::kAttendF32 : test::kAttendBf16))
            << "h " << c.h << " k " << c.k << " main " << with_main;
      }
    }
  }
}

TEST_F(CudaAttention, DraftBlocks) {
  Random random(24);
  const std::vector<AttendCase> cases = {
      {{{.start = 1, .rows = 3}, {.start = 40, .rows = 3}}, 2, 48, 8, 1, 8, 50},
      {{{.start = 7, .rows = 5}, {.start = 300, .rows = 5}}, 64, 512, 32, 1, 128, 310},
  };
  for (const AttendCase& c : cases) {
    for (DType act : kActs) {
      AttendInput in(
          random, c.specs, act, c.h, c.k, c.half, c.width, c.window, c.entries, c.specs[0].rows);
      const auto both = on_both([&](Side& side) { return run_attend(side, in, false); });
      EXPECT_TRUE(
          close(both.got, both.want, act == DType::kF32 ? test::kAttendF32 : test::kAttendBf16));
    }
  }
}

// One block per token, clusters for 32 heads and clusters for 16 give the same bits, with as many
// keys as a cluster takes and with fewer.
TEST_F(CudaAttention, AttendIsBatchInvariant) {
  constexpr int64_t kHeads = 64, kDim = 512, kHalf = 32, kWidth = 512, kWindow = 128, kEnd = 1100;
  constexpr int64_t kRows = 140;
  const auto input = [&](int64_t rows, uint64_t seed) {
    Random random(seed);
    return AttendInput(random,
                       {{.start = kEnd - rows, .rows = rows}},
                       DType::kBF16,
                       kHeads,
                       kDim,
                       kHalf,
                       kWidth,
                       kWindow,
                       kEnd);
  };
  for (const bool with_main : {true, false}) {
    AttendInput many = input(kRows, 21);
    Side side(Side::Kind::kCuda);
    const Buffer all = run_attend(side, many, with_main);
    for (const int64_t rows : {132, 40, 20, 7, 6, 3, 1}) {
      // The last rows alone: the rows before them come from the ring.
      AttendInput few = input(rows, 22);
      std::fill(few.pages.memory().begin(), few.pages.memory().end(), uint8_t{0xFF});
      const int64_t main_bytes = quant::main_row_bytes(kDim),
                    window_bytes = quant::window_row_bytes(kDim);
      for (int64_t e = 0; e < kEnd; ++e) {
        std::copy_n(many.pages.views()[0].row(e), main_bytes, few.pages.views()[0].row(e));
      }
      const auto row_of = [&](AttendInput& in, int64_t first, int64_t p) {
        return p >= first ? in.window.fresh().bytes.data() + (p - first) * window_bytes
                          : in.window.rings()[0].data() + p % kWindow * window_bytes;
      };
      for (int64_t p = kEnd - rows - kWindow + 1; p < kEnd; ++p) {
        std::copy_n(row_of(many, kEnd - kRows, p), window_bytes, row_of(few, kEnd - rows, p));
      }
      const auto tail = [](const Buffer& from, Buffer& to) {
        std::copy(from.bytes.end() - static_cast<int64_t>(to.bytes.size()),
                  from.bytes.end(),
                  to.bytes.begin());
      };
      tail(many.q, few.q);
      tail(many.rope, few.rope);
      tail(many.selected, few.selected);
      few.sink = many.sink;
      Side other(Side::Kind::kCuda);
      const Buffer last = run_attend(other, few, with_main);
      for (int64_t row = 0; row < rows; ++row) {
        ASSERT_EQ(row_bytes(last, row), row_bytes(all, kRows - rows + row))
            << rows << " rows, row " << row;
      }
    }
  }
}

// no key at all gives zeros, with any sink; one key behind nothing else gives its value.
TEST_F(CudaAttention, AttendWithoutKeys) {
  Random random(23);
  for (int64_t k : {64, 512}) {
    AttendInput in(
        random, {{.start = 9, .rows = 1, .floor = 50}}, DType::kBF16, 16, k, 8, 4, 8, 20);
    std::fill_n(ints(in.selected), 4, -1);
    Side side(Side::Kind::kCuda);
    const Buffer o = run_attend(side, in, true);
    for (int64_t i = 0; i < 16 * k; ++i) {
      ASSERT_EQ(o.at(i), 0.0f);
    }
    ints(in.selected)[0] = 3;
    const auto both = on_both([&](Side& each) { return run_attend(each, in, true); });
    EXPECT_TRUE(close(both.got, both.want, test::kAttendBf16));
  }
}

}  // namespace
}  // namespace cachalot::ops
