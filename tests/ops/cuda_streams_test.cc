// Embedding, residual streams, router, Engram and head of the CUDA backend against the reference.
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/device.h"
#include "tests/support/host_rows.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::on_both;
using test::Random;
using test::same_bits;
using test::Side;
using test::TestStep;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

class CudaStreams : public test::CudaTest {};

TEST_F(CudaStreams, RopeTable) {
  Buffer position(DType::kI32, {6}), frequency(DType::kF32, {32});
  const int32_t positions[] = {0, 1, 127, 4096, 65537, 1048575};
  std::copy_n(positions, 6, ints(position));
  for (int64_t i = 0; i < 32; ++i) {
    frequency.set(i, std::pow(160000.0f, -static_cast<float>(i) / 32.0f));
  }
  const auto both = on_both([&](Side& side) {
    Buffer table(DType::kF32, {6, 32, 2});
    side.finish(rope_table(side.ctx(),
                           {.position = side.in(position),
                            .frequency = side.in(frequency),
                            .table = side.out(table)}));
    return table;
  });
  EXPECT_TRUE(close(both.got, both.want, {1e-7, 1e-7}));
}

TEST_F(CudaStreams, Embed) {
  Random random(1);
  for (DType act : kActs) {
    for (WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF32}) {
      for (int64_t d : {20, 256, 5120}) {
        const auto weight = test::random_weight(random, format, 50, d, 0.1);
        const Buffer images = random.activations(act, {2, d});
        Buffer token(DType::kI32, {6});
        const int32_t ids[] = {0, 49, -2, 7, 7, -1};  // negative: rows of images
        std::copy_n(ids, 6, ints(token));
        const auto both = on_both([&](Side& side) {
          Buffer x(act, {6, 3, d});
          side.finish(embed(side.ctx(),
                            {.token = side.in(token),
                             .weight = side.weight(weight),
                             .images = side.in(images),
                             .x = side.out(x)}));
          return x;
        });
        EXPECT_TRUE(same_bits(both.got, both.want));
      }
    }
  }
}

// rows that only pad a captured graph read nothing outside the tables.
TEST_F(CudaStreams, EmbedTakesForeignIdsAsZeros) {
  Random random(2);
  const auto weight = test::random_weight(random, WeightFormat::kBF16, 50, 64, 0.1);
  Buffer token(DType::kI32, {3});
  const int32_t ids[] = {0x7FFFFFFF, -1, 3};
  std::copy_n(ids, 3, ints(token));
  Side side(Side::Kind::kCuda);
  Buffer x(DType::kBF16, {3, 2, 64});
  side.finish(embed(
      side.ctx(),
      {.token = side.in(token), .weight = side.weight(weight), .images = {}, .x = side.out(x)}));
  for (int64_t i = 0; i < 2 * 2 * 64; ++i) {
    EXPECT_EQ(x.at(i), 0.0f);
  }
}

struct StreamInput {
  StreamInput(Random& random, DType act, int64_t t, int64_t m, int64_t d)
      : x(random.activations(act, {t, m, d})),
        y(random.activations(act, {t, d}, 0.3)),
        post(random.normals(DType::kF32, {t, m}, 0.3, 1.0)),
        comb(random.normals(DType::kF32, {t, m, m}, 0.2, 0.25)),
        pre(random.normals(DType::kF32, {t, m}, 0.3, 0.5)) {}

  Pending pending(Side& side) const { return {side.in(y), side.in(post), side.in(comb)}; }

  Buffer x, y, post, comb, pre;
};

struct StreamCase {
  int64_t t, m, d;
};

TEST_F(CudaStreams, HcExpand) {
  Random random(3);
  for (DType act : kActs) {
    for (const StreamCase& c :
         {StreamCase{1, 4, 20}, {5, 4, 64}, {3, 2, 40}, {2, 8, 16}, {9, 4, 5120}}) {
      const StreamInput in(random, act, c.t, c.m, c.d);
      const auto both = on_both([&](Side& side) {
        Buffer out(act, in.x.shape);
        side.finish(hc_expand(
            side.ctx(), {.x = side.in(in.x), .pending = in.pending(side), .out = side.out(out)}));
        return out;
      });
      EXPECT_TRUE(close(both.got, both.want, test::row_tolerance(act)));
    }
  }
}

struct SiteOutput {
  Buffer x_out, pre, post, comb, u;
};

struct SiteWeights {
  SiteWeights(Random& random, int64_t m, int64_t d)
      : fn(random.normals(DType::kF32, {(2 + m) * m, m * d}, 1.0 / std::sqrt(m * d))),
        base(random.normals(DType::kF32, {(2 + m) * m}, 0.5)),
        scale(random.normals(DType::kF32, {3}, 0.1, 1.0)),
        norm(random.normals(DType::kBF16, {d}, 0.02, 0.03)) {}
  Buffer fn, base, scale, norm;
};

SiteOutput run_site(Side& side,
                    const StreamInput& in,
                    const SiteWeights& w,
                    bool pending,
                    int64_t begin,
                    int64_t count) {
  const DType act = in.x.dtype;
  const int64_t m = in.x.shape[1], d = in.x.shape[2];
  SiteOutput out{Buffer(act, {count, m, d}),
                 Buffer(DType::kF32, {count, m}),
                 Buffer(DType::kF32, {count, m}),
                 Buffer(DType::kF32, {count, m, m}),
                 Buffer(act, {count, d})};
  HcSiteArgs args;
  args.x = side.in(in.x.view().rows(begin, count));
  if (pending) {
    args.pending = {side.in(in.y.view().rows(begin, count)),
                    side.in(in.post.view().rows(begin, count)),
                    side.in(in.comb.view().rows(begin, count))};
  }
  args.pre = side.in(in.pre.view().rows(begin, count));
  args.fn = side.in(w.fn);
  args.base = side.in(w.base);
  args.scale = side.in(w.scale);
  args.norm = side.in(w.norm);
  args.rms_eps = 1e-20f;
  args.hc_eps = 1e-6f;
  args.sinkhorn_iters = 20;
  args.x_out = side.out(out.x_out);
  args.pre_out = side.out(out.pre);
  args.post_out = side.out(out.post);
  args.comb_out = side.out(out.comb);
  args.u = side.out(out.u);
  side.finish(hc_site(side.ctx(), args));
  return out;
}

TEST_F(CudaStreams, HcSite) {
  Random random(4);
  for (DType act : kActs) {
    for (const StreamCase& c : {StreamCase{1, 4, 20},
                                {3, 2, 40},
                                {2, 8, 16},
                                {1, 4, 256},
                                {8, 4, 256},
                                {9, 4, 512},
                                {37, 4, 256},
                                {5, 4, 1280},
                                {2, 4, 5120},
                                {8, 4, 5120},
                                {16, 4, 5120},
                                {17, 4, 5120},
                                {64, 4, 5120},
                                {3, 4, 8192},
                                {197, 4, 5120}}) {
      const StreamInput in(random, act, c.t, c.m, c.d);
      const SiteWeights w(random, c.m, c.d);
      for (bool pending : {true, false}) {
        const auto both =
            on_both([&](Side& side) { return run_site(side, in, w, pending, 0, c.t); });
        EXPECT_TRUE(close(both.got.x_out, both.want.x_out, test::row_tolerance(act)));
        // An expanded BF16 value on the other side of a rounding boundary moves a logit by 2^-8 of
        // one of its M D products.
        const test::Tolerance coefficients = act == DType::kBF16 && pending
                                                 ? test::Tolerance{3e-4, 3e-4, 1e-6}
                                                 : test::kCoefficients;
        EXPECT_TRUE(close(both.got.pre, both.want.pre, coefficients));
        EXPECT_TRUE(close(both.got.post, both.want.post, coefficients));
        EXPECT_TRUE(close(both.got.comb, both.want.comb, coefficients));
        // Rounded twice: the collapsed sum, or an expanded value in it, on the other side of a
        // boundary moves u by an ulp, and its own rounding by another.
        const test::Tolerance rounded_twice = {pending ? 0x1.0p-6 : 1.2e-5, 0x1.0p-6, 1e-5};
        EXPECT_TRUE(
            close(both.got.u, both.want.u, act == DType::kBF16 ? rounded_twice : test::kDotF32));
        // The last row alone gives the same bits.
        Side side(Side::Kind::kCuda);
        const SiteOutput last = run_site(side, in, w, pending, c.t - 1, 1);
        const auto tail = [](const Buffer& all) {
          return std::vector<uint8_t>(
              all.bytes.end() - static_cast<int64_t>(all.bytes.size()) / all.shape[0],
              all.bytes.end());
        };
        EXPECT_EQ(last.u.bytes, tail(both.got.u));
        EXPECT_EQ(last.comb.bytes, tail(both.got.comb));
        EXPECT_EQ(last.pre.bytes, tail(both.got.pre));
      }
    }
  }
}

TEST_F(CudaStreams, Head) {
  Random random(5);
  for (DType act : kActs) {
    for (const StreamCase& c : {StreamCase{3, 4, 20}, {5, 2, 64}, {4, 4, 256}}) {
      const StreamInput in(random, act, c.t, c.m, c.d);
      const Buffer norm = random.normals(DType::kBF16, {c.d}, 0.1, 1.0);
      Buffer select(DType::kI32, {2});
      ints(select)[0] = static_cast<int32_t>(c.t - 1);
      ints(select)[1] = 0;
      for (WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF32}) {
        const auto weight = test::random_weight(random, format, 101, c.d, 0.05);
        const auto both = on_both([&](Side& side) {
          Buffer logits(DType::kF32, {2, 101});
          side.finish(head(side.ctx(),
                           {.select = side.in(select),
                            .x = side.in(in.x),
                            .pending = in.pending(side),
                            .pre = side.in(in.pre),
                            .norm = side.in(norm),
                            .rms_eps = 1e-20f,
                            .weight = side.weight(weight),
                            .logits = side.out(logits)}));
          return logits;
        });
        // A norm output on the other side of a BF16 boundary moves a logit by 2^-8 of one product.
        const test::Tolerance tolerance =
            act == DType::kF32 ? test::kDotF32 : test::Tolerance{4e-3, 1e-3, 1e-5};
        EXPECT_TRUE(close(both.got, both.want, tolerance));
      }
    }
  }
}

// Drafter
// -------------------------------------------------------------------------------------------

TEST_F(CudaStreams, HcCollapse) {
  Random random(30);
  for (DType act : kActs) {
    for (const StreamCase& c : {StreamCase{1, 4, 20}, {3, 2, 40}, {9, 4, 5120}}) {
      const StreamInput in(random, act, c.t, c.m, c.d);
      const auto both = on_both([&](Side& side) {
        Buffer out(act, {c.t, c.d + 7});
        side.finish(hc_collapse(side.ctx(),
                                {.x = side.in(in.x),
                                 .pending = in.pending(side),
                                 .pre = side.in(in.pre),
                                 .column = 4,
                                 .out = side.out(out)}));
        return out;
      });
      EXPECT_TRUE(close(both.got, both.want, test::row_tolerance(act)));
    }
  }
}

TEST_F(CudaStreams, RmsNorm) {
  Random random(31);
  for (DType act : kActs) {
    for (int64_t d : {20, 256, 5120}) {
      const Buffer x = random.activations(act, {5, d});
      const Buffer norm = random.normals(DType::kBF16, {d}, 0.1, 1.0);
      const auto both = on_both([&](Side& side) {
        Buffer y(act, {5, d});
        side.finish(rms_norm(
            side.ctx(),
            {.x = side.in(x), .norm = side.in(norm), .rms_eps = 1e-20f, .y = side.out(y)}));
        return y;
      });
      EXPECT_TRUE(close(both.got, both.want, test::row_tolerance(act)));
    }
  }
}

struct DraftHeadOutput {
  Buffer logits, confidence;
};

TEST_F(CudaStreams, DraftHead) {
  Random random(32);
  for (DType act : kActs) {
    for (WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF32}) {
      const int64_t n = 4, t = 20, d = 96, v = 301, r = 48;
      const Buffer x = random.activations(act, {t, d});
      const Buffer base = random.normals(DType::kF32, {t, v}, 2);
      const auto embed = test::random_weight(random, format, v, r, 0.5);
      const auto head = test::random_weight(random, format, v, r, 0.3);
      const auto proj = test::random_weight(random, format, 1, d + r, 0.3);
      Buffer select(DType::kI32, {n}), previous(DType::kI32, {n});
      for (int64_t i = 0; i < n; ++i) {
        ints(select)[i] = static_cast<int32_t>(5 * i + 2);
        ints(previous)[i] = static_cast<int32_t>(random.integer(0, v));
      }
      const auto both = on_both([&](Side& side) {
        DraftHeadOutput out{Buffer(DType::kF32, {n, v}), Buffer(DType::kF32, {n})};
        side.finish(draft_head(side.ctx(),
                               {.select = side.in(select),
                                .previous = side.in(previous),
                                .x = side.in(x),
                                .base = side.in(base),
                                .embed = side.weight(embed),
                                .head = side.weight(head),
                                .proj = side.weight(proj),
                                .logits = side.out(out.logits),
                                .confidence = side.out(out.confidence)}));
        return out;
      });
      EXPECT_TRUE(close(both.got.logits, both.want.logits, test::kDotF32));
      // One sum may cancel: in units of the spread of such sums.
      const double spread = 0.3 * std::sqrt(static_cast<double>(d + r));
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_NEAR(
            both.got.confidence.at(i), both.want.confidence.at(i), test::kDotF32.of_rms * spread);
      }
    }
  }
}

// Router
// --------------------------------------------------------------------------------------------

struct GateOutput {
  Buffer experts, weights;
};

TEST_F(CudaStreams, Gate) {
  Random random(6);
  struct Case {
    int64_t t, d, e, k;
  };
  for (DType act : kActs) {
    for (const Case& c : {Case{1, 256, 384, 6},
                          {9, 40, 12, 3},
                          {33, 512, 64, 6},
                          {2, 32, 4, 4},
                          {9, 64, 4, 1},
                          {5, 5632, 40, 6},
                          {70, 256, 24, 3}}) {
      const Buffer x = random.activations(act, {c.t, c.d});
      const auto weight =
          test::random_weight(random, WeightFormat::kBF16, c.e, c.d, 1 / std::sqrt(c.d));
      Buffer bias = random.normals(DType::kF32, {c.e}, 0.3);
      const Buffer bias_vl = random.normals(DType::kF32, {c.e}, 0.3);
      TestStep step({{.start = 3, .rows = c.t}});
      step.is_image().bytes[0] = 1;
      Buffer forced(DType::kI32, {c.t, c.k});
      for (int64_t i = 0; i < c.t * c.k; ++i) {
        ints(forced)[i] = static_cast<int32_t>(i % c.k);
      }
      for (bool force : {false, true}) {
        const auto both = on_both([&](Side& side) {
          GateOutput out{Buffer(DType::kI32, {c.t, c.k}), Buffer(DType::kF32, {c.t, c.k})};
          GateArgs args;
          args.rows = side.rows(step);
          args.x = side.in(x);
          args.weight = side.weight(weight);
          args.bias = side.in(bias);
          args.bias_vl = side.in(bias_vl);
          args.temperature = 1.25f;
          args.scale = 1.5f;
          if (force) {
            args.forced = side.in(forced);
          }
          args.experts = side.out(out.experts);
          args.weights = side.out(out.weights);
          side.finish(gate(side.ctx(), args));
          return out;
        });
        EXPECT_TRUE(same_bits(both.got.experts, both.want.experts));
        EXPECT_TRUE(close(both.got.weights, both.want.weights, {1e-5, 1e-5}));
      }
    }
  }
}

TEST_F(CudaStreams, GateTiesGoToTheLowerExpert) {
  Random random(7);
  struct Case {
    DType act;
    WeightFormat format;
    int64_t d;
  };
  for (const Case& c :
       {Case{DType::kF32, WeightFormat::kF32, 32}, {DType::kBF16, WeightFormat::kBF16, 256}}) {
    const Buffer x = random.activations(c.act, {1, c.d});
    const auto weight = test::random_weight(random, c.format, 40, c.d, 0.0);
    Buffer bias(DType::kF32, {40});
    for (int64_t i = 0; i < 40; ++i) {
      bias.set(i, i == 7 || i >= 35 ? 1.0f : 0.5f);
    }
    TestStep step({{.start = 0, .rows = 1}});
    Side side(Side::Kind::kCuda);
    Buffer experts(DType::kI32, {1, 8}), weights(DType::kF32, {1, 8});
    GateArgs args;
    args.rows = side.rows(step);
    args.x = side.in(x);
    args.weight = side.weight(weight);
    args.bias = side.in(bias);
    args.bias_vl = side.in(bias);
    args.experts = side.out(experts);
    args.weights = side.out(weights);
    side.finish(gate(side.ctx(), args));
    const std::vector<int32_t> want = {0, 1, 7, 35, 36, 37, 38, 39};
    EXPECT_EQ(std::vector<int32_t>(ints(experts), ints(experts) + 8), want);
  }
}

// Engram
// --------------------------------------------------------------------------------------------

TEST_F(CudaStreams, EngramHash) {
  Random random(8);
  const TestStep step({{.start = 0, .rows = 5}, {.start = 40, .rows = 3}});
  const int64_t n = 4, heads = 8, t = step.count();
  Buffer classes(DType::kI32, {t + 2 * (n - 1)}), multiplier(DType::kI64, {n});
  Buffer prime(DType::kI64, {n - 1, heads}), offset(DType::kI64, {n - 1, heads});
  for (int64_t i = 0; i < classes.shape[0]; ++i) {
    ints(classes)[i] = i % 5 == 2 ? -1 : static_cast<int32_t>(random.integer(0, 99092));
  }
  for (int64_t i = 0; i < n; ++i) {
    multiplier.view().as<int64_t>()[i] = 2 * random.integer(0, 4000000000) * 11000 + 1;
  }
  for (int64_t i = 0; i < (n - 1) * heads; ++i) {
    prime.view().as<int64_t>()[i] = 16000057 + 2 * i;
    offset.view().as<int64_t>()[i] = 16000100 * i;
  }
  const auto both = on_both([&](Side& side) {
    Buffer ids(DType::kI32, {t, (n - 1) * heads});
    side.finish(engram_hash(side.ctx(),
                            {.rows = side.rows(step),
                             .classes = side.in(classes),
                             .multiplier = side.in(multiplier),
                             .prime = side.in(prime),
                             .offset = side.in(offset),
                             .blocked_class = 2,
                             .ids = side.out(ids)}));
    return ids;
  });
  EXPECT_TRUE(same_bits(both.got, both.want));
}

TEST_F(CudaStreams, EngramGather) {
  Random random(9);
  for (DType act : kActs) {
    for (WeightFormat format : {WeightFormat::kFp8Row, WeightFormat::kF32}) {
      for (int64_t width : {8, 40, 256}) {
        const auto table = test::random_weight(random, format, 70, width, 0.1);
        Buffer ids(DType::kI32, {3, 5});
        for (int64_t i = 0; i < 15; ++i) {
          ints(ids)[i] = static_cast<int32_t>(random.integer(0, 70));
        }
        const auto both = on_both([&](Side& side) {
          Buffer e(act, {3, 5 * width});
          side.finish(engram_gather(
              side.ctx(), {.ids = side.in(ids), .table = side.weight(table), .e = side.out(e)}));
          return e;
        });
        EXPECT_TRUE(same_bits(both.got, both.want));
      }
    }
  }
}

TEST_F(CudaStreams, EngramGatherInOrder) {
  Random random(11);
  for (DType act : kActs) {
    for (WeightFormat format : {WeightFormat::kFp8Row, WeightFormat::kF32}) {
      const auto table = test::random_weight(random, format, 12, 256, 0.1);
      const auto both = on_both([&](Side& side) {
        Buffer e(act, {3, 4 * 256});
        side.finish(engram_gather(side.ctx(), {.table = side.weight(table), .e = side.out(e)}));
        return e;
      });
      EXPECT_TRUE(same_bits(both.got, both.want));
    }
  }
}

TEST_F(CudaStreams, HostRowsArriveInOrder) {
  ThreadPool pool(2);
  test::check_host_rows(**cuda_memory(), &pool);
}

TEST_F(CudaStreams, EngramInject) {
  Random random(10);
  for (DType act : kActs) {
    for (const StreamCase& c : {StreamCase{3, 4, 20}, {5, 2, 64}, {2, 4, 5120}}) {
      const Buffer x = random.activations(act, {c.t, c.m, c.d});
      const Buffer kv = random.activations(act, {c.t, (c.m + 1) * c.d});
      const Buffer q_weight = random.normals(DType::kBF16, {c.m, c.d}, 0.3, 1.0);
      const Buffer k_weight = random.normals(DType::kF32, {c.m, c.d}, 0.3, 1.0);
      TestStep step({{.start = 0, .rows = c.t}});
      step.is_image().bytes[1] = 1;
      const auto both = on_both([&](Side& side) {
        Buffer out = x;
        const TensorView in_place = side.out(out);
        side.finish(engram_inject(side.ctx(),
                                  {.rows = side.rows(step),
                                   .x = in_place,
                                   .kv = side.in(kv),
                                   .q_weight = side.in(q_weight),
                                   .k_weight = side.in(k_weight),
                                   .rms_eps = 1e-20f,
                                   .out = in_place}));
        return out;
      });
      EXPECT_TRUE(close(both.got, both.want, test::dot_tolerance(act)));
    }
  }
}

}  // namespace
}  // namespace cachalot::ops
