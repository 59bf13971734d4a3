// RoPE table and window rows of the CPU backend against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/context.h"
#include "tests/support/step.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::Random;
using test::same_bits;
using test::TestStep;
using test::TestWindow;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

TEST(CpuRopeTable, MatchesRef) {
  Buffer position(DType::kI32, {6}), frequency(DType::kF32, {32});
  const int32_t positions[] = {0, 1, 127, 4096, 65537, 1048575};
  std::copy_n(positions, 6, ints(position));
  for (int64_t i = 0; i < 32; ++i) {
    frequency.set(i, std::pow(160000.0f, -static_cast<float>(i) / 32.0f));
  }
  const auto run = [&](OpContext& ctx) {
    Buffer table(DType::kF32, {6, 32, 2});
    EXPECT_TRUE(
        rope_table(
            ctx,
            {.position = position.view(), .frequency = frequency.view(), .table = table.view()})
            .ok());
    return table;
  };
  EXPECT_TRUE(same_bits(run(test::cpu()), run(test::ref())));
}

struct QkvOutput {
  Buffer r, fresh;
};

TEST(CpuQkvFinish, MatchesRef) {
  Random random(1);
  struct Case {
    int64_t t, q, k, half;
  };
  for (const Case& c :
       {Case{1, 64, 32, 4}, {5, 96, 64, 8}, {70, 128, 96, 16}, {3, 1280, 512, 32}}) {
    for (DType act : kActs) {
      const Buffer t = random.activations(act, {c.t, c.q}),
                   kv = random.activations(act, {c.t, c.k});
      const Buffer q_norm = random.normals(DType::kBF16, {c.q}, 0.1, 1.0);
      const Buffer kv_norm = random.normals(DType::kF32, {c.k}, 0.1, 0.4);
      const Buffer rope = test::rope_rows(TestStep({{.start = 1000, .rows = c.t}}), c.half);
      const auto run = [&](OpContext& ctx, int64_t begin, int64_t count) {
        QkvOutput out{Buffer(act, {count, c.q}),
                      Buffer(DType::kU8, {count, quant::window_row_bytes(c.k)})};
        QkvFinishArgs args;
        args.t = t.view().rows(begin, count);
        args.q_norm = q_norm.view();
        args.kv = kv.view().rows(begin, count);
        args.kv_norm = kv_norm.view();
        args.rope = rope.view().rows(begin, count);
        args.rms_eps = 1e-20f;
        args.r = out.r.view();
        args.fresh = out.fresh.view();
        EXPECT_TRUE(qkv_finish(ctx, args).ok());
        return out;
      };
      const QkvOutput got = run(test::cpu(), 0, c.t), want = run(test::ref(), 0, c.t);
      EXPECT_TRUE(close(got.r, want.r, test::row_tolerance(act)));
      EXPECT_LE(test::differing_share(got.fresh.bytes, want.fresh.bytes),
                act == DType::kF32 ? test::kCodesF32 : test::kCodesBf16);
      const QkvOutput last = run(test::cpu(3), c.t - 1, 1);
      EXPECT_TRUE(same_bits(last.r, part(got.r, c.t - 1, 1)));
      EXPECT_TRUE(same_bits(last.fresh, part(got.fresh, c.t - 1, 1)));
    }
  }
}

// Rows without a query, as the drafter's context has them, get the same window rows.
TEST(CpuQkvFinish, WindowRowsAlone) {
  Random random(4);
  for (DType act : kActs) {
    const Buffer t = random.activations(act, {5, 96}), kv = random.activations(act, {5, 64});
    const Buffer q_norm = random.normals(DType::kBF16, {96}, 0.1, 1.0);
    const Buffer kv_norm = random.normals(DType::kBF16, {64}, 0.1, 0.4);
    const Buffer rope = test::rope_rows(TestStep({{.start = 1000, .rows = 5}}), 8);
    for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
      Buffer r(act, {5, 96}), with_query(DType::kU8, {5, quant::window_row_bytes(64)});
      Buffer alone = with_query;
      QkvFinishArgs args{.t = t.view(),
                         .q_norm = q_norm.view(),
                         .kv = kv.view(),
                         .kv_norm = kv_norm.view(),
                         .rope = rope.view(),
                         .rms_eps = 1e-20f,
                         .r = r.view(),
                         .fresh = with_query.view()};
      EXPECT_TRUE(qkv_finish(*ctx, args).ok());
      args.t = args.q_norm = args.r = {};
      args.fresh = alone.view();
      EXPECT_TRUE(qkv_finish(*ctx, args).ok());
      EXPECT_TRUE(same_bits(alone, with_query));
    }
  }
}

TEST(CpuCommit, MatchesRef) {
  Random random(2);
  const int64_t c = 48;
  for (int64_t window : {4, 8, 128}) {
    const TestStep step({{.start = 0, .rows = 3},
                         {.start = 7, .rows = 20},
                         {.start = 130, .rows = 1},
                         {.start = 6, .rows = 2}});
    Buffer accepted(DType::kI32, {4});
    const int32_t counts[] = {1, 19, 0, 1};
    std::copy_n(counts, 4, ints(accepted));
    const Buffer kv = random.normals(DType::kF32, {step.count(), c});
    const Buffer gate = random.normals(DType::kF32, {step.count(), c});
    std::vector<std::vector<uint8_t>> results;
    for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
      Random same(3);
      TestWindow first(same, step, window, 64), second(same, step, window, 64);
      const WindowView windows[] = {first.view(), second.view()};
      Buffer open = same.normals(DType::kF32, {4, 2, c});
      std::vector<float*> pointers;
      for (int64_t s = 0; s < 4; ++s) {
        pointers.push_back(open.view().as<float>() + s * 2 * c);
      }
      const OpenGroupView group{kv.view(), gate.view(), pointers.data()};
      const Buffer before = open;
      EXPECT_TRUE(commit(*ctx,
                         {.rows = step.rows(),
                          .windows = windows,
                          .groups = {&group, 1},
                          .accepted = accepted.view()})
                      .ok());
      // Positions 0 and 6 are the first of their groups; 25 ends one, and nothing moved elsewhere.
      for (int64_t s = 0; s < 4; ++s) {
        const int64_t row = s == 0 ? 0 : 24;
        const bool opens = s == 0 || s == 3;
        for (int64_t i = 0; i < c; ++i) {
          EXPECT_EQ(open.at(s * 2 * c + i), opens ? kv.at(row * c + i) : before.at(s * 2 * c + i));
          EXPECT_EQ(open.at(s * 2 * c + c + i),
                    opens ? gate.at(row * c + i) : before.at(s * 2 * c + c + i));
        }
      }
      std::vector<uint8_t> all = open.bytes;
      for (TestWindow* rings : {&first, &second}) {
        for (const std::vector<uint8_t>& ring : rings->rings()) {
          all.insert(all.end(), ring.begin(), ring.end());
        }
      }
      results.push_back(all);
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

}  // namespace
}  // namespace cachalot::ops
