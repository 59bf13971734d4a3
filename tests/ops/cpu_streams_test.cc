// Embedding, hyper-connection sites, head and Engram of the CPU backend against the reference.
#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/context.h"
#include "tests/support/random.h"
#include "tests/support/step.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::Random;
using test::random_weight;
using test::same_bits;
using test::WeightBuffer;

struct Shape3 {
  int64_t t, m, d;
};
constexpr Shape3 kShapes[] = {{1, 4, 32},
                              {1, 4, 256},
                              {3, 2, 64},
                              {5, 1, 40},
                              {9, 4, 96},
                              {2, 3, 33},
                              {70, 4, 64},
                              {1, 4, 5120}};

// Streams and what is pending for them.
struct SiteInput {
  Buffer x, y, post, comb, pre, fn, base, scale, norm;
  bool pending = true;

  Pending view() const { return pending ? Pending{y.view(), post.view(), comb.view()} : Pending{}; }
};

SiteInput random_site(Random& random, DType act, const Shape3& s, DType norm) {
  SiteInput in;
  in.x = random.activations(act, {s.t, s.m, s.d}, 0.5);
  in.y = random.activations(act, {s.t, s.d}, 0.5);
  in.post = random.normals(DType::kF32, {s.t, s.m}, 0.3, 1.0);
  in.comb = random.normals(DType::kF32, {s.t, s.m, s.m}, 0.2, 0.25);
  in.pre = random.normals(DType::kF32, {s.t, s.m}, 0.2, 0.5);
  in.fn =
      random.normals(DType::kF32, {(2 + s.m) * s.m, s.m * s.d}, 1.0 / std::sqrt(double(s.m * s.d)));
  in.base = random.normals(DType::kF32, {(2 + s.m) * s.m});
  in.scale = random.normals(DType::kF32, {3}, 0.2, 1.0);
  in.norm = random.normals(norm, {s.d}, 0.02, 0.03);
  return in;
}

struct SiteOutput {
  Buffer x, pre, post, comb, u;
};

SiteOutput run_site(OpContext& ctx, const SiteInput& in, int64_t begin = 0, int64_t count = -1) {
  const int64_t m = in.x.shape[1], d = in.x.shape[2];
  count = count < 0 ? in.x.shape[0] : count;
  SiteOutput out{Buffer(in.x.dtype, {count, m, d}),
                 Buffer(DType::kF32, {count, m}),
                 Buffer(DType::kF32, {count, m}),
                 Buffer(DType::kF32, {count, m, m}),
                 Buffer(in.x.dtype, {count, d})};
  HcSiteArgs args;
  args.x = in.x.view().rows(begin, count);
  if (in.pending) {
    args.pending = {in.y.view().rows(begin, count),
                    in.post.view().rows(begin, count),
                    in.comb.view().rows(begin, count)};
  }
  args.pre = in.pre.view().rows(begin, count);
  args.fn = in.fn.view();
  args.base = in.base.view();
  args.scale = in.scale.view();
  args.norm = in.norm.view();
  args.rms_eps = 1e-20f;
  args.hc_eps = 1e-6f;
  args.sinkhorn_iters = 20;
  args.x_out = out.x.view();
  args.pre_out = out.pre.view();
  args.post_out = out.post.view();
  args.comb_out = out.comb.view();
  args.u = out.u.view();
  const Status status = hc_site(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

void expect_close(const SiteOutput& got, const SiteOutput& want, DType act) {
  EXPECT_TRUE(close(got.x, want.x, test::row_tolerance(act)));
  EXPECT_TRUE(close(got.u, want.u, test::row_tolerance(act)));
  EXPECT_TRUE(close(got.pre, want.pre, test::kCoefficients));
  EXPECT_TRUE(close(got.post, want.post, test::kCoefficients));
  EXPECT_TRUE(close(got.comb, want.comb, test::kCoefficients));
}

TEST(CpuHcSite, MatchesRef) {
  Random random(1);
  for (const Shape3& s : kShapes) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      for (bool pending : {true, false}) {
        SCOPED_TRACE(testing::Message() << s.t << " x " << s.m << " x " << s.d << " "
                                        << dtype_name(act) << " pending " << pending);
        SiteInput in = random_site(random, act, s, pending ? DType::kBF16 : DType::kF32);
        in.pending = pending;
        const SiteOutput want = run_site(test::ref(), in);
        test::on_every_instruction_set([&] { expect_close(run_site(test::cpu(), in), want, act); });
      }
    }
  }
}

TEST(CpuHcSite, InPlaceWithoutPending) {
  Random random(2);
  SiteInput in = random_site(random, DType::kBF16, {3, 4, 64}, DType::kBF16);
  in.pending = false;
  const SiteOutput want = run_site(test::cpu(), in);
  EXPECT_TRUE(same_bits(want.x, in.x));
}

TEST(CpuHcSite, A19_RowsDoNotDependOnTheirBatch) {
  Random random(3);
  const SiteInput in = random_site(random, DType::kBF16, {150, 4, 288}, DType::kBF16);
  const SiteOutput all = run_site(test::cpu(2), in);
  for (int threads : {0, 1, 3}) {
    for (const auto& [begin, count] : {std::pair{0, 150}, {0, 1}, {77, 1}, {5, 3}, {100, 50}}) {
      const SiteOutput some = run_site(test::cpu(threads), in, begin, count);
      const auto same = [&](const Buffer& a, const Buffer& b) {
        const TensorView part = b.view().rows(begin, count);
        return std::memcmp(a.bytes.data(), part.data, a.bytes.size()) == 0;
      };
      EXPECT_TRUE(same(some.x, all.x) && same(some.u, all.u) && same(some.pre, all.pre) &&
                  same(some.post, all.post) && same(some.comb, all.comb))
          << threads << " threads, rows " << begin << " + " << count;
    }
  }
}

// Saturated logits: no overflow in exp, sums at least near one.
TEST(CpuHcSite, ExtremeCoefficientsStayFinite) {
  Random random(4);
  SiteInput in = random_site(random, DType::kF32, {9, 4, 64}, DType::kF32);
  for (int64_t i = 0; i < 24; ++i) {
    in.base.set(i, i % 2 == 0 ? 300.0f : -300.0f);
  }
  expect_close(run_site(test::cpu(), in), run_site(test::ref(), in), DType::kF32);
}

TEST(CpuHcExpand, MatchesRef) {
  Random random(5);
  for (const Shape3& s : kShapes) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      const SiteInput in = random_site(random, act, s, DType::kF32);
      const auto run = [&](OpContext& ctx) {
        Buffer out(act, in.x.shape);
        EXPECT_TRUE(
            hc_expand(ctx, {.x = in.x.view(), .pending = in.view(), .out = out.view()}).ok());
        return out;
      };
      EXPECT_TRUE(close(run(test::cpu()), run(test::ref()), test::row_tolerance(act)));
      EXPECT_TRUE(same_bits(run(test::cpu(3)), run(test::cpu(0))));
    }
  }
}

TEST(CpuEmbed, MatchesRef) {
  Random random(6);
  for (WeightFormat format : {WeightFormat::kF32, WeightFormat::kBF16}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      const WeightBuffer w = random_weight(random, format, 50, 72, 0.1);
      Buffer token(DType::kI32, {11});
      for (int64_t i = 0; i < 11; ++i) {
        token.view().as<int32_t>()[i] = static_cast<int32_t>(random.integer(0, 50));
      }
      const auto run = [&](OpContext& ctx, const TensorView& images) {
        Buffer x(act, {11, 4, 72});
        EXPECT_TRUE(
            embed(ctx, {.token = token.view(), .weight = w.view(), .images = images, .x = x.view()})
                .ok());
        return x;
      };
      EXPECT_TRUE(same_bits(run(test::cpu(), {}), run(test::ref(), {})));
      // Rows of images, in any order.
      token.view().as<int32_t>()[4] = -2;
      token.view().as<int32_t>()[9] = -1;
      const Buffer images = random.activations(act, {2, 72});
      const Buffer got = run(test::cpu(), images.view());
      EXPECT_TRUE(same_bits(got, run(test::ref(), images.view())));
      EXPECT_EQ(got.at((9 * 4 + 3) * 72 + 71), images.at(71));
      EXPECT_EQ(got.at(4 * 4 * 72), images.at(72));
    }
  }
}

TEST(CpuHead, MatchesRef) {
  Random random(7);
  for (const Shape3& s : {Shape3{1, 4, 64}, {6, 4, 160}, {9, 2, 40}}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      for (bool pending : {true, false}) {
        SiteInput in = random_site(random, act, s, DType::kBF16);
        in.pending = pending;
        for (int64_t n : {int64_t{1}, s.t}) {
          Buffer select(DType::kI32, {n});
          for (int64_t i = 0; i < n; ++i) {
            select.view().as<int32_t>()[i] = static_cast<int32_t>(s.t - 1 - i);
          }
          const WeightBuffer w = random_weight(random, WeightFormat::kBF16, 101, s.d, 0.5);
          const auto run = [&](OpContext& ctx) {
            Buffer logits(DType::kF32, {n, 101});
            HeadArgs args;
            args.select = select.view();
            args.x = in.x.view();
            args.pending = in.view();
            args.pre = in.pre.view();
            args.norm = in.norm.view();
            args.rms_eps = 1e-20f;
            args.weight = w.view();
            args.logits = logits.view();
            const Status status = head(ctx, args);
            EXPECT_TRUE(status.ok()) << status.message();
            return logits;
          };
          // One BF16 flip of a normalized value among D moves a logit by 2^-8 / sqrt(D) of its RMS.
          EXPECT_TRUE(
              close(run(test::cpu()),
                    run(test::ref()),
                    act == DType::kF32 ? test::kDotF32 : test::Tolerance{3e-3, 1e-6, 1e-5}));
          EXPECT_TRUE(same_bits(run(test::cpu(0)), run(test::cpu(3))));
        }
      }
    }
  }
}

// Drafter
// ------------------------------------------------------------------------------------------

TEST(CpuHcCollapse, MatchesRef) {
  Random random(20);
  for (const Shape3& s : kShapes) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      for (bool pending : {true, false}) {
        SiteInput in = random_site(random, act, s, DType::kBF16);
        in.pending = pending;
        const auto run = [&](OpContext& ctx) {
          Buffer out(act, {s.t, s.d + 7});
          const Status status = hc_collapse(ctx,
                                            {.x = in.x.view(),
                                             .pending = in.view(),
                                             .pre = in.pre.view(),
                                             .column = 4,
                                             .out = out.view()});
          EXPECT_TRUE(status.ok()) << status.message();
          return out;
        };
        const Buffer got = run(test::cpu());
        // The columns around it keep their NaN.
        EXPECT_TRUE(close(got, run(test::ref()), test::row_tolerance(act)));
        EXPECT_TRUE(same_bits(run(test::cpu(0)), got));
        EXPECT_TRUE(same_bits(run(test::cpu(3)), got));
      }
    }
  }
  Buffer x(DType::kF32, {1, 4, 8}), pre(DType::kF32, {1, 4}), out(DType::kF32, {1, 15});
  EXPECT_EQ(
      hc_collapse(test::cpu(), {.x = x.view(), .pre = pre.view(), .column = 8, .out = out.view()})
          .code(),
      Code::kInvalidArgument);
}

TEST(CpuRmsNorm, MatchesRef) {
  Random random(21);
  for (int64_t d : {1, 33, 64, 5120}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      for (DType weight : {DType::kF32, DType::kBF16}) {
        const Buffer x = random.activations(act, {5, d}),
                     norm = random.normals(weight, {d}, 0.1, 1);
        const auto run = [&](OpContext& ctx, int64_t begin, int64_t count) {
          Buffer y(act, {count, d});
          EXPECT_TRUE(rms_norm(ctx,
                               {.x = x.view().rows(begin, count),
                                .norm = norm.view(),
                                .rms_eps = 1e-20f,
                                .y = y.view()})
                          .ok());
          return y;
        };
        const Buffer got = run(test::cpu(), 0, 5);
        EXPECT_TRUE(close(got, run(test::ref(), 0, 5), test::row_tolerance(act)));
        EXPECT_EQ(run(test::cpu(0), 4, 1).floats().back(), got.floats().back());
      }
    }
  }
}

TEST(CpuDraftHead, MatchesRef) {
  Random random(22);
  struct Case {
    int64_t n, t, d, v, r;
  };
  for (const Case& c : {Case{1, 3, 64, 101, 16}, {4, 20, 40, 37, 5}, {9, 45, 96, 200, 33}}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      for (WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF32}) {
        const Buffer x = random.activations(act, {c.t, c.d});
        const Buffer base = random.normals(DType::kF32, {c.t, c.v}, 2);
        const WeightBuffer embed = random_weight(random, format, c.v, c.r, 0.5);
        const WeightBuffer head = random_weight(random, format, c.v, c.r, 0.3);
        const WeightBuffer proj = random_weight(random, format, 1, c.d + c.r, 0.3);
        Buffer select(DType::kI32, {c.n}), previous(DType::kI32, {c.n});
        for (int64_t i = 0; i < c.n; ++i) {
          select.view().as<int32_t>()[i] = static_cast<int32_t>(random.integer(0, c.t));
          previous.view().as<int32_t>()[i] = static_cast<int32_t>(random.integer(0, c.v));
        }
        const auto run = [&](OpContext& ctx) {
          std::pair<Buffer, Buffer> out{Buffer(DType::kF32, {c.n, c.v}),
                                        Buffer(DType::kF32, {c.n})};
          const Status status = draft_head(ctx,
                                           {.select = select.view(),
                                            .previous = previous.view(),
                                            .x = x.view(),
                                            .base = base.view(),
                                            .embed = embed.view(),
                                            .head = head.view(),
                                            .proj = proj.view(),
                                            .logits = out.first.view(),
                                            .confidence = out.second.view()});
          EXPECT_TRUE(status.ok()) << status.message();
          return out;
        };
        const auto got = run(test::cpu()), want = run(test::ref());
        EXPECT_TRUE(close(got.first, want.first, test::kDotF32));
        // One sum may cancel: in units of the spread of such sums.
        const double spread = 0.3 * std::sqrt(static_cast<double>(c.d + c.r));
        for (int64_t i = 0; i < c.n; ++i) {
          EXPECT_NEAR(got.second.at(i), want.second.at(i), test::kDotF32.of_rms * spread);
        }
        for (int threads : {0, 3}) {
          EXPECT_TRUE(same_bits(run(test::cpu(threads)).first, got.first));
          EXPECT_TRUE(same_bits(run(test::cpu(threads)).second, got.second));
        }
      }
    }
  }
}

// Engram
// -------------------------------------------------------------------------------------------

TEST(CpuEngram, HashMatchesRef) {
  Random random(8);
  const test::TestStep step(
      {{.start = 0, .rows = 7}, {.start = 3, .rows = 1}, {.start = 9, .rows = 5}});
  const int64_t n = 4, heads = 8, t = step.count(), s = 3;
  Buffer classes(DType::kI32, {t + s * (n - 1)}), ids(DType::kI32, {t, (n - 1) * heads});
  for (int64_t i = 0; i < classes.shape[0]; ++i) {
    classes.view().as<int32_t>()[i] =
        static_cast<int32_t>(random.integer(0, 5) == 0 ? -1 : random.integer(0, 99092));
  }
  Buffer multiplier(DType::kI64, {n}), prime(DType::kI64, {n - 1, heads}),
      offset(DType::kI64, {n - 1, heads});
  for (int64_t i = 0; i < n; ++i) {
    multiplier.view().as<int64_t>()[i] = random.integer(0, int64_t{1} << 31) * 20000 + 1;
  }
  for (int64_t i = 0; i < (n - 1) * heads; ++i) {
    prime.view().as<int64_t>()[i] = 16000057 + 2 * i;
    offset.view().as<int64_t>()[i] = 16000000 * i;
  }
  const auto run = [&](OpContext& ctx) {
    EngramHashArgs args;
    args.rows = step.rows();
    args.classes = classes.view();
    args.multiplier = multiplier.view();
    args.prime = prime.view();
    args.offset = offset.view();
    args.blocked_class = 2;
    args.ids = ids.view();
    EXPECT_TRUE(engram_hash(ctx, args).ok());
    return ids;
  };
  const Buffer want = run(test::ref());
  EXPECT_TRUE(same_bits(run(test::cpu()), want));
}

TEST(CpuEngram, GatherMatchesRef) {
  Random random(9);
  for (WeightFormat format : {WeightFormat::kFp8Row, WeightFormat::kF32}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      for (int64_t width : {32, 64, 256}) {
        const WeightBuffer table = random_weight(random, format, 300, width, 0.1);
        Buffer ids(DType::kI32, {5, 24});
        for (int64_t i = 0; i < 5 * 24; ++i) {
          ids.view().as<int32_t>()[i] = static_cast<int32_t>(random.integer(0, 300));
        }
        const auto run = [&](OpContext& ctx) {
          Buffer e(act, {5, 24 * width});
          EXPECT_TRUE(
              engram_gather(ctx, {.ids = ids.view(), .table = table.view(), .e = e.view()}).ok());
          return e;
        };
        EXPECT_TRUE(same_bits(run(test::cpu()), run(test::ref())));
        // Row after row of the table itself.
        const auto in_order = [&](OpContext& ctx) {
          Buffer e(act, {100, 3 * width});
          EXPECT_TRUE(engram_gather(ctx, {.table = table.view(), .e = e.view()}).ok());
          return e;
        };
        Buffer all(DType::kI32, {100, 3});
        for (int32_t i = 0; i < 300; ++i) {
          all.view().as<int32_t>()[i] = i;
        }
        Buffer e(act, {100, 3 * width});
        EXPECT_TRUE(
            engram_gather(test::ref(), {.ids = all.view(), .table = table.view(), .e = e.view()})
                .ok());
        EXPECT_TRUE(same_bits(in_order(test::cpu()), e));
        EXPECT_TRUE(same_bits(in_order(test::ref()), e));
      }
    }
  }
}

TEST(CpuEngram, InjectMatchesRef) {
  Random random(10);
  for (const Shape3& s : kShapes) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      for (DType weight : {DType::kBF16, DType::kF32}) {
        test::TestStep step({{.start = 0, .rows = s.t}});
        for (int64_t i = 0; i < s.t; ++i) {
          step.is_image().bytes[static_cast<size_t>(i)] = i % 4 == 2;
        }
        const Buffer x = random.activations(act, {s.t, s.m, s.d});
        const Buffer kv = random.activations(act, {s.t, (s.m + 1) * s.d});
        const Buffer q = random.normals(weight, {s.m, s.d}, 0.5, 1.0);
        const Buffer k = random.normals(weight, {s.m, s.d}, 0.5, 1.0);
        const auto run = [&](OpContext& ctx, bool alias, int64_t begin, int64_t count) {
          Buffer out(act, {count, s.m, s.d});
          EngramInjectArgs args;
          args.rows.is_image = step.is_image().view().rows(begin, count);
          args.x = x.view().rows(begin, count);
          args.kv = kv.view().rows(begin, count);
          args.q_weight = q.view();
          args.k_weight = k.view();
          args.rms_eps = 1e-20f;
          args.out = out.view();
          if (alias) {
            std::memcpy(out.bytes.data(), args.x.data, out.bytes.size());
            args.x = out.view();
          }
          EXPECT_TRUE(engram_inject(ctx, args).ok());
          return out;
        };
        const Buffer all = run(test::cpu(), false, 0, s.t);
        EXPECT_TRUE(close(all, run(test::ref(), false, 0, s.t), test::row_tolerance(act)));
        EXPECT_TRUE(same_bits(run(test::cpu(3), true, 0, s.t), all));
        const Buffer last = run(test::cpu(0), false, s.t - 1, 1);
        EXPECT_EQ(
            std::memcmp(last.bytes.data(), all.view().rows(s.t - 1, 1).data, last.bytes.size()), 0);
      }
    }
  }
}

}  // namespace
}  // namespace cachalot::ops
