// Linears, router and experts of the CPU backend against the reference, and their invariances.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/cpu/simd.h"
#include "tests/support/compare.h"
#include "tests/support/context.h"
#include "tests/support/random.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::Random;
using test::random_weight;
using test::same_bits;
using test::WeightBuffer;

constexpr WeightFormat kFormats[] = {
    WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kFp8Block, WeightFormat::kFp4Row};

Buffer run_linear(OpContext& ctx,
                  const TensorView& x,
                  const Weight& weight,
                  DType y_dtype,
                  int64_t groups = 1,
                  bool quantize = true) {
  Buffer y(y_dtype, {x.dim(0), weight.out});
  const LinearTarget target{&weight, y.view()};
  LinearArgs args;
  args.x = x;
  args.targets = {&target, 1};
  args.groups = groups;
  args.quantize_input = quantize;
  const Status status = linear(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return y;
}

struct LinearCase {
  int64_t rows, out, in, groups;
};
constexpr LinearCase kLinearCases[] = {
    {1, 1, 32, 1},     {1, 3, 64, 1},   {2, 5, 96, 1},     {3, 25, 32, 1},    {4, 48, 288, 1},
    {5, 47, 320, 1},   {7, 24, 512, 1}, {1, 512, 1024, 1}, {16, 130, 544, 1}, {33, 96, 256, 1},
    {131, 27, 160, 1}, {3, 128, 64, 2}, {1, 96, 96, 3},    {6, 256, 128, 8},  {1, 200, 5120, 1},
    {4, 30, 5120, 1},  {1, 16, 40, 1},  {3, 33, 40, 1},    {5, 10, 6, 1},
};

TEST(CpuLinear, MatchesRef) {
  Random random(1);
  for (const LinearCase& c : kLinearCases) {
    for (WeightFormat format : kFormats) {
      const WeightBuffer w = random_weight(random, format, c.out, c.in, 0.03);
      for (DType act : {DType::kF32, DType::kBF16}) {
        const Buffer x = random.activations(act, {c.rows, c.groups * c.in});
        for (DType y : {act, DType::kF32}) {
          for (bool quantize : {true, false}) {
            SCOPED_TRACE(testing::Message()
                         << "rows " << c.rows << " out " << c.out << " in " << c.in << " groups "
                         << c.groups << " format " << static_cast<int>(format) << " act "
                         << dtype_name(act) << " quantize " << quantize);
            const Buffer want = run_linear(test::ref(), x.view(), w.view(), y, c.groups, quantize);
            test::on_every_instruction_set([&] {
              EXPECT_TRUE(close(run_linear(test::cpu(), x.view(), w.view(), y, c.groups, quantize),
                                want,
                                test::dot_tolerance(y)));
            });
          }
        }
      }
    }
  }
}

TEST(CpuLinear, SharesInputBetweenTargets) {
  Random random(2);
  std::vector<WeightBuffer> weights;
  std::vector<Weight> views;
  std::vector<Buffer> got, want;
  const Buffer x = random.activations(DType::kBF16, {5, 192});
  for (WeightFormat format : kFormats) {
    weights.push_back(random_weight(random, format, 40, 192, 0.05));
  }
  for (const WeightBuffer& w : weights) {
    views.push_back(w.view());
    got.emplace_back(DType::kBF16, Shape{5, 40});
  }
  std::vector<LinearTarget> targets;
  for (size_t i = 0; i < views.size(); ++i) {
    targets.push_back({&views[i], got[i].view()});
  }
  ASSERT_TRUE(linear(test::cpu(), {.x = x.view(), .targets = targets}).ok());
  for (size_t i = 0; i < views.size(); ++i) {
    EXPECT_TRUE(same_bits(got[i], run_linear(test::cpu(), x.view(), views[i], DType::kBF16)));
  }
}

// one reduction order, whatever the number of rows, threads and tasks.
TEST(CpuLinear, A19_RowsDoNotDependOnTheirBatch) {
  Random random(3);
  struct Case {
    int64_t out, in;
    DType act;
  };
  // Few rows read outputs as one stretch (77) or as several (200), and FP8 tiles by copies of x
  // that carry their scales, if these are short (352).
  constexpr Case kCases[] = {{77, 1184, DType::kF32},
                             {77, 1184, DType::kBF16},
                             {200, 1184, DType::kF32},
                             {77, 352, DType::kF32},
                             {200, 352, DType::kF32},
                             {200, 352, DType::kBF16}};
  for (WeightFormat format : kFormats) {
    for (const auto& [out, in, act] : kCases) {
      const int64_t rows = 150;
      const WeightBuffer w = random_weight(random, format, out, in, 0.03);
      const Buffer x = random.activations(act, {rows, in});
      const Buffer all = run_linear(test::cpu(2), x.view(), w.view(), act);
      for (int threads : {0, 1, 3}) {
        EXPECT_TRUE(same_bits(run_linear(test::cpu(threads), x.view(), w.view(), act), all));
      }
      for (int64_t count : {1, 2, 3, 4, 9, 64}) {
        for (int64_t begin : {int64_t{0}, int64_t{37}, rows - count}) {
          const Buffer some = run_linear(test::cpu(3), x.view().rows(begin, count), w.view(), act);
          Buffer expected(act, {count, out});
          const TensorView part = all.view().rows(begin, count);
          std::memcpy(expected.bytes.data(), part.data, expected.bytes.size());
          EXPECT_TRUE(same_bits(some, expected))
              << "format " << static_cast<int>(format) << " rows " << count << " from " << begin;
        }
      }
    }
  }
}

// AVX2 and AVX-512 machines compute the same bits: both sum in 8 lanes with fused multiply-adds.
TEST(CpuLinear, SetsWithFusedMultiplyAddAgree) {
  Random random(5);
  for (WeightFormat format : kFormats) {
    const WeightBuffer w = random_weight(random, format, 77, 1184, 0.03);
    for (int64_t rows : {1, 5}) {
      const Buffer x = random.activations(DType::kBF16, {rows, 1184});
      const Buffer want = run_linear(test::cpu(), x.view(), w.view(), DType::kF32);
      for (const std::string& set : cpu::instruction_sets()) {
        if (set != "SSE4") {
          ASSERT_TRUE(cpu::use_instruction_set(set));
          EXPECT_TRUE(same_bits(run_linear(test::cpu(), x.view(), w.view(), DType::kF32), want));
        }
      }
      cpu::use_instruction_set("");
    }
  }
}

TEST(CpuLinear, ExtremeScalesAndZeros) {
  Random random(4);
  for (WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kFp4Row}) {
    WeightBuffer w = random_weight(random, format, 64, 128, 1.0);
    for (size_t i = 0; i < w.scales.bytes.size(); ++i) {
      w.scales.bytes[i] = static_cast<uint8_t>(i % 3 == 0 ? 10 : i % 3 == 1 ? 127 : 190);
    }
    std::fill_n(w.values.bytes.begin(), w.values.bytes.size() / 2, uint8_t{0x80});
    const Buffer x = random.activations(DType::kBF16, {3, 128});
    EXPECT_TRUE(close(run_linear(test::cpu(), x.view(), w.view(), DType::kF32),
                      run_linear(test::ref(), x.view(), w.view(), DType::kF32),
                      test::kDotF32));
  }
}

// Router
// -------------------------------------------------------------------------------------------

struct GateOutput {
  Buffer experts;
  Buffer weights;
};
struct GateInput {
  Buffer x;
  WeightBuffer weight;
  Buffer bias;
  Buffer bias_vl;
  Buffer is_image;
  int64_t k = 1;
  float temperature = 1;
  float scale = 1.5f;
};

GateOutput run_gate(OpContext& ctx, const GateInput& in, const TensorView& forced = {}) {
  const int64_t t = in.x.shape[0];
  GateOutput out{Buffer(DType::kI32, {t, in.k}), Buffer(DType::kF32, {t, in.k})};
  GateArgs args;
  args.rows.is_image = in.is_image.view();
  args.x = in.x.view();
  args.weight = in.weight.view();
  args.bias = in.bias.view();
  args.bias_vl = in.bias_vl.view();
  args.temperature = in.temperature;
  args.scale = in.scale;
  args.forced = forced;
  args.experts = out.experts.view();
  args.weights = out.weights.view();
  const Status status = gate(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

GateInput random_gate(Random& random, DType act, int64_t t, int64_t e, int64_t d, int64_t k) {
  GateInput in;
  in.x = random.activations(act, {t, d});
  in.weight = random_weight(random, WeightFormat::kBF16, e, d, 1.0 / std::sqrt(double(d)));
  in.bias = random.normals(DType::kF32, {e}, 0.3);
  in.bias_vl = random.normals(DType::kF32, {e}, 0.3);
  in.is_image = Buffer(DType::kU8, {t});
  for (int64_t i = 0; i < t; ++i) {
    in.is_image.bytes[static_cast<size_t>(i)] = i % 3 == 1;
  }
  in.k = k;
  return in;
}

TEST(CpuGate, MatchesRef) {
  Random random(10);
  struct Case {
    int64_t t, e, d, k;
  };
  for (const Case& c :
       {Case{1, 8, 64, 2}, {7, 16, 96, 3}, {40, 33, 160, 6}, {3, 384, 512, 6}, {9, 4, 64, 1}}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      GateInput in = random_gate(random, act, c.t, c.e, c.d, c.k);
      in.temperature = 1.25f;
      const GateOutput want = run_gate(test::ref(), in);
      test::on_every_instruction_set([&] {
        const GateOutput got = run_gate(test::cpu(), in);
        EXPECT_TRUE(same_bits(got.experts, want.experts));
        EXPECT_TRUE(close(got.weights, want.weights, {1e-5, 1e-5}));
        EXPECT_TRUE(same_bits(run_gate(test::cpu(), in, want.experts.view()).weights, got.weights));
      });
    }
  }
}

// Several experts share routed_scaling_factor; a single one keeps its score, which normalized would
// be the constant 1.
TEST(CpuGate, ASingleExpertKeepsItsScore) {
  Random random(13);
  for (OpContext* ctx : {&test::ref(), &test::cpu()}) {
    for (int64_t k : {1, 2, 4}) {
      GateInput in = random_gate(random, DType::kF32, 6, 4, 32, k);
      const GateOutput got = run_gate(*ctx, in);
      for (int64_t t = 0; t < 6; ++t) {
        double sum = 0, score = 0;
        for (int64_t i = 0; i < k; ++i) {
          sum += got.weights.at(t * k + i);
          double logit = 0;
          for (int64_t j = 0; j < 32; ++j) {
            logit += static_cast<double>(in.x.at(t * 32 + j)) *
                     in.weight.values.at(got.experts.view().as<int32_t>()[t * k + i] * 32 + j);
          }
          score = std::sqrt(std::log1p(std::exp(logit)));
        }
        EXPECT_NEAR(sum, k == 1 ? 1.5 * score : 1.5, 1e-5 * sum);
      }
    }
  }
}

TEST(CpuGate, TiesTakeTheLowerExpert) {
  Random random(11);
  GateInput in = random_gate(random, DType::kF32, 5, 24, 32, 4);
  std::fill(in.x.bytes.begin(), in.x.bytes.end(), uint8_t{0});
  for (int64_t i = 0; i < 24; ++i) {
    in.bias.set(i, i >= 10 && i < 20 ? 0.5f : 0.25f);
    in.bias_vl.set(i, i % 2 == 0 ? -0.0f : 0.0f);
  }
  const GateOutput got = run_gate(test::cpu(), in);
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t first = in.is_image.bytes[static_cast<size_t>(t)] ? 0 : 10;
      EXPECT_EQ(got.experts.view().as<int32_t>()[t * 4 + i], first + i);
    }
  }
}

TEST(CpuGate, A10_ScoresAreAccurateEverywhere) {
  constexpr int64_t kCount = 304 * 64 + 1;
  std::vector<float> x(static_cast<size_t>(cpu::padded(kCount)));
  for (int64_t i = 0; i < kCount; ++i) {
    x[static_cast<size_t>(i)] = -104.0f + static_cast<float>(i) / 64.0f;
  }
  test::on_every_instruction_set([&] {
    std::vector<float> scores = x;
    cpu::router_scores(scores.data(), kCount, 1.0f);
    for (int64_t i = 0; i < kCount; ++i) {
      const double value = x[static_cast<size_t>(i)];
      const double want = std::sqrt(std::max(value, 0.0) + std::log1p(std::exp(-std::fabs(value))));
      ASSERT_NEAR(scores[static_cast<size_t>(i)], want, 1e-6 * want) << "at " << value;
    }
  });
}

TEST(CpuGate, A10_UnderflowingRowsStayFinite) {
  Random random(12);
  for (float logit : {-50.0f, -200.0f}) {
    for (int64_t t : {1, 4}) {
      GateInput in = random_gate(random, DType::kF32, t, 16, 32, 4);
      for (int64_t i = 0; i < t * 32; ++i) {
        in.x.set(i, i % 32 == 0 ? 1.0f : 0.0f);
      }
      for (int64_t e = 0; e < 16; ++e) {
        in.weight.values.set(e * 32, logit + static_cast<float>(e % 3));
      }
      const GateOutput want = run_gate(test::ref(), in), got = run_gate(test::cpu(), in);
      for (int64_t i = 0; i < t * 4; ++i) {
        if (logit == -50.0f) {
          EXPECT_NEAR(got.weights.at(i), want.weights.at(i), 2e-6 * want.weights.at(i));
          EXPECT_GT(got.weights.at(i), 0.1f);
        } else {
          EXPECT_LT(got.weights.at(i), 1e-20f);
          EXPECT_GE(got.weights.at(i), 0.0f);
        }
      }
    }
  }
}

// Experts
// ------------------------------------------------------------------------------------------

struct ExpertBuffers {
  WeightBuffer w1, w3, w2;
};
struct ExpertsInput {
  Buffer x;
  Buffer experts;
  Buffer weights;
  std::vector<ExpertBuffers> routed, shared;
  float limit = 10;
};

std::vector<ExpertBuffers> random_experts(
    Random& random, WeightFormat format, int64_t count, int64_t d, int64_t f) {
  std::vector<ExpertBuffers> experts;
  for (int64_t i = 0; i < count; ++i) {
    experts.push_back({random_weight(random, format, f, d, 1.0 / std::sqrt(double(d))),
                       random_weight(random, format, f, d, 1.0 / std::sqrt(double(d))),
                       random_weight(random, format, d, f, 1.0 / std::sqrt(double(f)))});
  }
  return experts;
}

std::vector<ExpertView> views(const std::vector<ExpertBuffers>& experts) {
  std::vector<ExpertView> result;
  for (const ExpertBuffers& e : experts) {
    result.push_back({e.w1.view(), e.w3.view(), e.w2.view()});
  }
  return result;
}

Buffer run_experts(OpContext& ctx, const ExpertsInput& in, int64_t begin = 0, int64_t count = -1) {
  count = count < 0 ? in.x.shape[0] : count;
  Buffer y(in.x.dtype, {count, in.x.shape[1]});
  const std::vector<ExpertView> routed = views(in.routed), shared = views(in.shared);
  ExpertsArgs args;
  args.x = in.x.view().rows(begin, count);
  args.experts = in.experts.view().rows(begin, count);
  args.weights = in.weights.view().rows(begin, count);
  args.routed = routed;
  args.shared = shared;
  args.limit = in.limit;
  args.y = y.view();
  const Status status = experts(ctx, args);
  EXPECT_TRUE(status.ok()) << status.message();
  return y;
}

ExpertsInput random_experts_input(Random& random,
                                  DType act,
                                  WeightFormat routed,
                                  WeightFormat shared,
                                  int64_t t,
                                  int64_t e,
                                  int64_t k,
                                  int64_t d,
                                  int64_t f) {
  ExpertsInput in;
  in.x = random.activations(act, {t, d});
  in.experts = Buffer(DType::kI32, {t, k});
  in.weights = Buffer(DType::kF32, {t, k});
  for (int64_t row = 0; row < t; ++row) {
    // k ascending ids, crowded at the low end so that group sizes differ.
    int64_t id = 0;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t room = e - k + i - id;
      id += room > 0 ? random.integer(0, std::min<int64_t>(room, 3) + 1) : 0;
      in.experts.view().as<int32_t>()[row * k + i] = static_cast<int32_t>(id++);
      in.weights.set(row * k + i, static_cast<float>(random.uniform(0.1, 0.6)));
    }
  }
  in.routed = random_experts(random, routed, e, d, f);
  in.shared = random_experts(random, shared, 1, d, f);
  return in;
}

TEST(CpuExperts, MatchesRef) {
  Random random(20);
  struct Case {
    int64_t t, e, k, d, f;
  };
  for (const Case& c : {Case{1, 4, 2, 64, 32},
                        {1, 16, 6, 256, 128},
                        {2, 4, 3, 96, 160},
                        {9, 8, 3, 128, 96},
                        {70, 3, 2, 160, 224},
                        {210, 3, 2, 160, 224}}) {
    for (const auto& [routed, shared] : {std::pair{WeightFormat::kFp4Row, WeightFormat::kFp8Block},
                                         std::pair{WeightFormat::kF32, WeightFormat::kF32},
                                         std::pair{WeightFormat::kBF16, WeightFormat::kFp4Row}}) {
      for (DType act : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(testing::Message() << "t " << c.t << " e " << c.e << " act " << dtype_name(act)
                                        << " routed " << static_cast<int>(routed));
        const ExpertsInput in =
            random_experts_input(random, act, routed, shared, c.t, c.e, c.k, c.d, c.f);
        const Buffer want = run_experts(test::ref(), in);
        test::on_every_instruction_set([&] {
          EXPECT_TRUE(close(run_experts(test::cpu(), in),
                            want,
                            act == DType::kBF16 ? test::kExpertsBf16 : test::kExpertsF32));
        });
      }
    }
  }
}

TEST(CpuExperts, A19_RowsDoNotDependOnTheirBatch) {
  constexpr int64_t kRows = 210;  // two chunks and a part
  Random random(21);
  for (DType act : {DType::kF32, DType::kBF16}) {
    const ExpertsInput in = random_experts_input(
        random, act, WeightFormat::kFp4Row, WeightFormat::kFp8Block, kRows, 6, 3, 128, 288);
    const Buffer all = run_experts(test::cpu(2), in);
    for (int threads : {0, 1, 3}) {
      EXPECT_TRUE(same_bits(run_experts(test::cpu(threads), in), all));
    }
    for (int64_t count : {1, 2, 5, 64}) {
      for (int64_t begin : {int64_t{0}, int64_t{13}, kRows - count}) {
        Buffer expected(act, {count, 128});
        std::memcpy(
            expected.bytes.data(), all.view().rows(begin, count).data, expected.bytes.size());
        EXPECT_TRUE(same_bits(run_experts(test::cpu(3), in, begin, count), expected));
      }
    }
  }
}

// Gate and up far beyond the limit: routed and shared, one row and many, must clamp alike.
TEST(CpuExperts, A11_EveryPathClamps) {
  Random random(22);
  for (DType act : {DType::kF32, DType::kBF16}) {
    for (int64_t t : {1, 40}) {
      ExpertsInput in = random_experts_input(
          random, act, WeightFormat::kFp4Row, WeightFormat::kFp8Block, t, 4, 2, 64, 64);
      for (int64_t i = 0; i < t * 64; ++i) {
        in.x.set(i, in.x.at(i) * 40.0f);
      }
      in.limit = 2;
      const Buffer clamped = run_experts(test::cpu(), in);
      EXPECT_TRUE(close(clamped,
                        run_experts(test::ref(), in),
                        act == DType::kBF16 ? test::kExpertsBf16 : test::kExpertsF32));
      in.limit = 1e6f;
      EXPECT_FALSE(close(run_experts(test::cpu(), in), clamped, test::kExpertsBf16));
      // The shared expert alone: routing weights of zero.
      std::fill(in.weights.bytes.begin(), in.weights.bytes.end(), uint8_t{0});
      in.limit = 2;
      EXPECT_TRUE(close(run_experts(test::cpu(), in),
                        run_experts(test::ref(), in),
                        act == DType::kBF16 ? test::kExpertsBf16 : test::kExpertsF32));
    }
  }
}

}  // namespace
}  // namespace cachalot::ops
