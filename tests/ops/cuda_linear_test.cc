// Linears and experts of the CUDA backend against the reference.
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/device.h"

namespace cachalot::ops {
namespace {

using test::Buffer;
using test::close;
using test::on_both;
using test::Random;
using test::same_bits;
using test::Side;
using test::WeightBuffer;

constexpr DType kActs[] = {DType::kF32, DType::kBF16};

std::vector<uint8_t> row_bytes(const Buffer& all, int64_t row) {
  const auto size = static_cast<int64_t>(all.bytes.size()) / all.shape[0];
  return {all.bytes.begin() + row * size, all.bytes.begin() + (row + 1) * size};
}

class CudaLinear : public test::CudaTest {};

struct LinearCase {
  int64_t in, out, groups;
};

Buffer run_linear(Side& side,
                  const TensorView& x,
                  const WeightBuffer& w,
                  DType y_type,
                  int64_t groups,
                  bool quantize) {
  Buffer y(y_type, {x.dim(0), w.out});
  const Weight weight = side.weight(w);
  const LinearTarget target{&weight, side.out(y)};
  side.finish(linear(
      side.ctx(),
      {.x = side.in(x), .targets = {&target, 1}, .groups = groups, .quantize_input = quantize}));
  return y;
}

TEST_F(CudaLinear, MatchesRefForEveryFormatAndIsBatchInvariant) {
  Random random(1);
  constexpr WeightFormat kFormats[] = {
      WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kFp8Block, WeightFormat::kFp4Row};
  // Whole chunks take the tensor cores; the others do not.
  const LinearCase cases[] = {{256, 48, 1},
                              {512, 33, 1},
                              {1280, 64, 1},
                              {2304, 32, 1},
                              {512, 1568, 1},
                              {256, 1536, 2},
                              {256, 64, 2},
                              {96, 40, 1},
                              {40, 17, 1}};
  for (WeightFormat format : kFormats) {
    for (const LinearCase& c : cases) {
      const WeightBuffer w = test::random_weight(random, format, c.out, c.in, 1 / std::sqrt(c.in));
      for (DType act : kActs) {
        const Buffer x = random.activations(act, {37, c.groups * c.in});
        for (DType y_type : kActs) {
          if (y_type == DType::kBF16 && act == DType::kF32) {
            continue;
          }
          const auto both = on_both(
              [&](Side& side) { return run_linear(side, x.view(), w, y_type, c.groups, true); });
          EXPECT_TRUE(close(both.got, both.want, test::dot_tolerance(y_type)))
              << "format " << static_cast<int>(format) << " in " << c.in;
          // Any number of rows gives a row the same bits.
          for (int64_t count : {1, 3, 9, 20}) {
            Side side(Side::Kind::kCuda);
            const Buffer few =
                run_linear(side, x.view().rows(37 - count, count), w, y_type, c.groups, true);
            EXPECT_EQ(row_bytes(few, count - 1), row_bytes(both.got, 36)) << count;
          }
        }
      }
    }
  }
}

// Every shape of block that the product for many tokens has, with rows and tokens that do not fill
// it: the bits of the product for few tokens, whatever the format.
TEST_F(CudaLinear, ManyTokensGiveTheBitsOfFew) {
  Random random(9);
  constexpr WeightFormat kFormats[] = {
      WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kFp8Block, WeightFormat::kFp4Row};
  struct Case {
    int64_t in, out, groups, tokens;
  };
  const Case cases[] = {{256, 2600, 1, 25},
                        {512, 2600, 1, 40},
                        {512, 17000, 1, 50},
                        {768, 8500, 1, 60},
                        {512, 8500, 1, 20},
                        {512, 33, 1, 300},
                        {256, 2048, 2, 300},
                        {1280, 2048, 1, 300},
                        {512, 8192, 8, 290},
                        {1280, 4968, 1, 400}};
  constexpr int64_t kFew = 8, kStep = 3 * kFew;  // which takes every tile of eight tokens in turn
  for (WeightFormat format : kFormats) {
    for (const Case& c : cases) {
      const WeightBuffer w = test::random_weight(random, format, c.out, c.in, 1 / std::sqrt(c.in));
      const Buffer x = random.activations(DType::kBF16, {c.tokens, c.groups * c.in});
      for (DType y_type : kActs) {
        Side all(Side::Kind::kCuda);
        const Buffer many = run_linear(all, x.view(), w, y_type, c.groups, true);
        for (int64_t row = 0; row < c.tokens; row += kStep) {
          const int64_t count = std::min(kFew, c.tokens - row);
          Side side(Side::Kind::kCuda);
          const Buffer few = run_linear(side, x.view().rows(row, count), w, y_type, c.groups, true);
          for (int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(row_bytes(few, i), row_bytes(many, row + i))
                << "format " << static_cast<int>(format) << " in " << c.in << " out " << c.out
                << " row " << row + i;
          }
        }
      }
    }
  }
}

TEST_F(CudaLinear, KeepsItsInputWhereAsked) {
  Random random(2);
  for (int64_t in : {256, 96}) {
    const WeightBuffer w = test::random_weight(random, WeightFormat::kFp8Block, 64, in, 0.05);
    const Buffer x = random.activations(DType::kBF16, {5, 2 * in});
    const auto both =
        on_both([&](Side& side) { return run_linear(side, x.view(), w, DType::kBF16, 2, false); });
    EXPECT_TRUE(close(both.got, both.want, test::kDotBf16));
  }
}

TEST_F(CudaLinear, SeveralTargetsOfMixedFormats) {
  Random random(3);
  const WeightBuffer a = test::random_weight(random, WeightFormat::kFp8Block, 96, 512, 0.05);
  const WeightBuffer b = test::random_weight(random, WeightFormat::kFp8Block, 32, 512, 0.05);
  const WeightBuffer c = test::random_weight(random, WeightFormat::kBF16, 24, 512, 0.05);
  const Buffer x = random.activations(DType::kBF16, {6, 512});
  struct Output {
    Buffer a, b, c;
  };
  const auto both = on_both([&](Side& side) {
    Output out{
        Buffer(DType::kBF16, {6, 96}), Buffer(DType::kBF16, {6, 32}), Buffer(DType::kF32, {6, 24})};
    const Weight wa = side.weight(a), wb = side.weight(b), wc = side.weight(c);
    const LinearTarget targets[] = {
        {&wa, side.out(out.a)}, {&wb, side.out(out.b)}, {&wc, side.out(out.c)}};
    side.finish(linear(side.ctx(), {.x = side.in(x), .targets = targets}));
    return out;
  });
  EXPECT_TRUE(close(both.got.a, both.want.a, test::kDotBf16));
  EXPECT_TRUE(close(both.got.b, both.want.b, test::kDotBf16));
  EXPECT_TRUE(close(both.got.c, both.want.c, test::kDotF32));
}

TEST_F(CudaLinear, RefusesWhatContradictsItself) {
  Random random(4);
  const WeightBuffer w = test::random_weight(random, WeightFormat::kBF16, 16, 64, 0.1);
  const Buffer x = random.activations(DType::kBF16, {2, 32});
  Buffer y(DType::kBF16, {2, 16});
  Side side(Side::Kind::kCuda);
  const Weight weight = side.weight(w);
  const LinearTarget target{&weight, side.out(y)};
  const Status status = linear(side.ctx(), {.x = side.in(x), .targets = {&target, 1}});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
}

TEST_F(CudaLinear, ReportsMissingScratch) {
  Random random(5);
  const WeightBuffer w = test::random_weight(random, WeightFormat::kFp8Block, 32, 256, 0.1);
  const Buffer x = random.activations(DType::kBF16, {64, 256});
  Buffer y(DType::kBF16, {64, 32});
  Side side(Side::Kind::kCuda);
  const Weight weight = side.weight(w);
  const LinearTarget target{&weight, side.out(y)};
  Arena small(side.in(Buffer(DType::kU8, {1024})).data, 1024, Device::kCuda);
  side.ctx().scratch = &small;
  const Status status = linear(side.ctx(), {.x = side.in(x), .targets = {&target, 1}});
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
}

// Experts
// -------------------------------------------------------------------------------------------

struct ExpertsInput {
  ExpertsInput(Random& random,
               DType act,
               int64_t t,
               int64_t k,
               int64_t d,
               int64_t f,
               int64_t experts,
               WeightFormat routed_format,
               WeightFormat shared_format,
               bool with_shared)
      : x(random.activations(act, {t, d})),
        ids(DType::kI32, {t, k}),
        weights(random.normals(DType::kF32, {t, k}, 0.1, 0.5)) {
    const auto add = [&](std::vector<WeightBuffer>& to, WeightFormat format) {
      to.push_back(test::random_weight(random, format, f, d, 1.5 / std::sqrt(d)));
      to.push_back(test::random_weight(random, format, f, d, 1.5 / std::sqrt(d)));
      to.push_back(test::random_weight(random, format, d, f, 1 / std::sqrt(f)));
    };
    for (int64_t e = 0; e < experts; ++e) {
      add(routed, routed_format);
    }
    if (with_shared) {
      add(shared, shared_format);
    }
    for (int64_t row = 0; row < t; ++row) {
      std::vector<int32_t> chosen;
      while (static_cast<int64_t>(chosen.size()) < k) {
        // Low ids are popular: some experts get many tokens, some none.
        const auto id =
            static_cast<int32_t>(std::min(random.integer(0, experts), random.integer(0, experts)));
        if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) {
          chosen.push_back(id);
        }
      }
      std::sort(chosen.begin(), chosen.end());
      std::copy(chosen.begin(), chosen.end(), ints(ids) + row * k);
    }
  }

  static std::vector<ExpertView> views(Side& side, const std::vector<WeightBuffer>& weights) {
    std::vector<ExpertView> views;
    for (size_t i = 0; i < weights.size(); i += 3) {
      views.push_back(
          {side.weight(weights[i]), side.weight(weights[i + 1]), side.weight(weights[i + 2])});
    }
    return views;
  }

  Buffer x, ids, weights;
  std::vector<WeightBuffer> routed, shared;
};

Buffer run_experts(Side& side, const ExpertsInput& in, int64_t begin, int64_t count) {
  Buffer y(in.x.dtype, {count, in.x.shape[1]});
  const std::vector<ExpertView> routed = ExpertsInput::views(side, in.routed);
  const std::vector<ExpertView> shared = ExpertsInput::views(side, in.shared);
  side.finish(experts(side.ctx(),
                      {.x = side.in(in.x.view().rows(begin, count)),
                       .experts = side.in(in.ids.view().rows(begin, count)),
                       .weights = side.in(in.weights.view().rows(begin, count)),
                       .routed = routed,
                       .shared = shared,
                       .limit = 2.0f,
                       .y = side.out(y)}));
  return y;
}

TEST_F(CudaLinear, Experts) {
  Random random(6);
  struct Case {
    DType act;
    int64_t t, k, d, f, experts;
    WeightFormat routed, shared;
    bool with_shared;
  };
  using enum WeightFormat;
  const Case cases[] = {
      // Tensor cores.
      {DType::kBF16, 1, 3, 256, 256, 8, kFp4Row, kFp8Block, true},
      {DType::kBF16, 9, 2, 512, 256, 6, kFp4Row, kFp8Block, true},
      {DType::kBF16, 4, 6, 1280, 768, 8, kFp4Row, kFp8Block, true},
      {DType::kBF16, 2, 7, 256, 512, 8, kFp4Row, kFp8Block, true},
      {DType::kBF16, 2, 10, 512, 256, 12, kFp4Row, kFp8Block, true},
      {DType::kBF16, 2, 2, 512, 256, 4, kFp4Row, kFp8Block, false},
      {DType::kBF16, 33, 3, 256, 512, 4, kFp4Row, kFp8Block, true},
      {DType::kBF16, 70, 2, 256, 256, 4, kFp4Row, kFp8Block, false},
      {DType::kBF16, 40, 2, 512, 256, 8, kFp4Row, kFp8Block, true},
      {DType::kBF16, 120, 3, 512, 768, 4, kFp4Row, kFp8Block, true},
      // More tiles than multiprocessors.
      {DType::kBF16, 330, 3, 256, 512, 24, kFp4Row, kFp8Block, true},
      // Element by element.
      {DType::kBF16, 5, 2, 96, 64, 4, kFp4Row, kFp8Block, true},
      {DType::kF32, 4, 2, 256, 256, 4, kFp4Row, kFp8Block, true},
      {DType::kBF16, 3, 2, 40, 24, 4, kBF16, kBF16, true},
      {DType::kF32, 3, 2, 40, 24, 4, kF32, kF32, false},
  };
  for (const Case& c : cases) {
    const ExpertsInput in(
        random, c.act, c.t, c.k, c.d, c.f, c.experts, c.routed, c.shared, c.with_shared);
    const auto both = on_both([&](Side& side) { return run_experts(side, in, 0, c.t); });
    EXPECT_TRUE(
        close(both.got, both.want, c.act == DType::kF32 ? test::kExpertsF32 : test::kExpertsBf16))
        << "t " << c.t << " d " << c.d;
    for (int64_t count : {int64_t{1}, (c.t + 1) / 2}) {
      Side side(Side::Kind::kCuda);
      const Buffer few = run_experts(side, in, c.t - count, count);
      EXPECT_EQ(row_bytes(few, count - 1), row_bytes(both.got, c.t - 1)) << count;
    }
  }
}

// Groups of every width, alone or beside experts without tokens.
TEST_F(CudaLinear, ExpertsWithAllTokensOnOne) {
  Random random(9);
  for (const int64_t experts : {1, 3}) {
    for (const int64_t t : {3,  8,  9,  16, 17,  32,  33,  48,  49,  64,  65,  70,  72, 73,
                            80, 81, 96, 97, 112, 113, 128, 144, 145, 160, 161, 200, 240}) {
      ExpertsInput in(random,
                      DType::kBF16,
                      t,
                      1,
                      256,
                      256,
                      experts,
                      WeightFormat::kFp4Row,
                      WeightFormat::kFp8Block,
                      true);
      std::fill_n(ints(in.ids), t, static_cast<int32_t>(experts / 2));
      Side side(Side::Kind::kCuda);
      const Buffer many = run_experts(side, in, 0, t);
      for (const int64_t row : {int64_t{0}, t / 2, t - 1}) {
        EXPECT_EQ(row_bytes(run_experts(side, in, row, 1), 0), row_bytes(many, row))
            << "t " << t << " row " << row;
      }
    }
  }
}

// rows that only pad a captured graph route nowhere and change no other row.
TEST_F(CudaLinear, ExpertsIgnoreForeignIds) {
  Random random(7);
  ExpertsInput in(random,
                  DType::kBF16,
                  8,
                  2,
                  256,
                  256,
                  4,
                  WeightFormat::kFp4Row,
                  WeightFormat::kFp8Block,
                  true);
  Side all(Side::Kind::kCuda);
  const Buffer want = run_experts(all, in, 0, 5);
  for (int64_t i = 5 * 2; i < 8 * 2; ++i) {
    ints(in.ids)[i] = i % 2 == 0 ? 0x7FFFFFFF : -1;
  }
  for (int64_t i = 5 * 256; i < 8 * 256; ++i) {
    in.x.set(i, std::nanf(""));
  }
  Side padded(Side::Kind::kCuda);
  const Buffer got = run_experts(padded, in, 0, 8);
  for (int64_t row = 0; row < 5; ++row) {
    EXPECT_EQ(row_bytes(got, row), row_bytes(want, row));
  }
  // A row and its padding.
  Side pair(Side::Kind::kCuda);
  EXPECT_EQ(row_bytes(run_experts(pair, in, 4, 2), 0), row_bytes(want, 4));
}

// A captured step replays to the same result; the expert table must not be made inside the capture.
TEST_F(CudaLinear, ExpertsInACapturedGraph) {
  Random random(8);
  const ExpertsInput in(random,
                        DType::kBF16,
                        3,
                        2,
                        256,
                        256,
                        7,  // as in no other test, whose table could serve here
                        WeightFormat::kFp4Row,
                        WeightFormat::kFp8Block,
                        true);
  Side side(Side::Kind::kCuda);
  Buffer y(DType::kBF16, {3, 256});
  const std::vector<ExpertView> routed = ExpertsInput::views(side, in.routed);
  const std::vector<ExpertView> shared = ExpertsInput::views(side, in.shared);
  const ExpertsArgs args{.x = side.in(in.x),
                         .experts = side.in(in.ids),
                         .weights = side.in(in.weights),
                         .routed = routed,
                         .shared = shared,
                         .limit = 2.0f,
                         .y = side.out(y)};
  auto stream = static_cast<cudaStream_t>(side.ctx().stream);
  cudaGraph_t graph = nullptr;
  test::cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  EXPECT_EQ(experts(side.ctx(), args).code(), Code::kFailedPrecondition);
  test::cuda_ok(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphDestroy(graph);

  side.finish(experts(side.ctx(), args));
  const Buffer want = y;
  test::cuda_ok(cudaMemset(args.y.data, 0xFF, y.bytes.size()), "memset");
  test::cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  EXPECT_TRUE(experts(side.ctx(), args).ok());
  test::cuda_ok(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t exec = nullptr;
  test::cuda_ok(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int replay = 0; replay < 3; ++replay) {
    test::cuda_ok(cudaGraphLaunch(exec, stream), "replay");
  }
  side.finish({});
  EXPECT_TRUE(same_bits(y, want));
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace cachalot::ops
