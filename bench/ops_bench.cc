// Speed of the CPU kernels against the ceilings of this machine, measured in the same run.
//
//   ops_bench [threads [filter]]
//
// CSV: op, shape, rows, median ms of 7 passes, GB/s of weight (or cache) bytes, GFLOP/s, and the
// share of the binding ceiling: streaming read bandwidth where rows are few, the FP32 multiply-add
// rate else. A pass walks argument sets that together exceed the last-level cache at least
// threefold, unless the shape is a prefill's, which computes for longer than it reads.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "ops/cpu/machine.h"
#include "ops/ops.h"
#include "quant/block.h"
#include "tests/support/random.h"
#include "tests/support/step.h"

namespace cachalot {
namespace {

using ops::WeightFormat;
using test::Buffer;
using test::Pages;
using test::Random;
using test::TestStep;
using test::TestWindow;
using test::WeightBuffer;

constexpr int kPasses = 7;
constexpr double kSeconds = 0.4;
constexpr int64_t kColdBytes = int64_t{128} << 20;

struct Machine {
  std::unique_ptr<ThreadPool> pool;
  Arena arena;
  ops::OpContext ctx;
  double bandwidth = 0;
  double flops = 0;
  std::string filter;
};

// Weights whose values do not matter, only that they are finite and not all alike.
WeightBuffer fast_weight(Random& random, WeightFormat format, int64_t out, int64_t in) {
  WeightBuffer w = test::random_weight(random, format, 32, in, 0.02);
  const auto widen = [&](Buffer& buffer, int64_t rows) {
    if (buffer.bytes.empty()) {
      return;
    }
    const std::vector<uint8_t> pattern = buffer.bytes;
    buffer.shape.extent[0] = rows;
    buffer.bytes.resize(static_cast<size_t>(rows * buffer.shape[1] * dtype_bytes(buffer.dtype)));
    for (size_t i = 0; i < buffer.bytes.size(); ++i) {
      buffer.bytes[i] = pattern[i % pattern.size()];
    }
  };
  widen(w.values, out);
  widen(w.scales, format == WeightFormat::kFp8Block ? quant::blocks(out, 32) : out);
  w.out = out;
  return w;
}

double weight_bytes(const WeightBuffer& w) {
  return static_cast<double>(w.values.bytes.size() + w.scales.bytes.size());
}

// Runs body(set) for every set, kPasses times or for kSeconds; prints per-set figures of the median
// pass.
void report(Machine& m,
            const std::string& op,
            const std::string& shape,
            int64_t rows,
            int64_t sets,
            double bytes,
            double flops,
            bool bound_by_bytes,
            const std::function<Status(int64_t)>& body) {
  std::vector<double> seconds;
  const double start = now_seconds();
  for (int pass = -1; pass < kPasses || now_seconds() - start < kSeconds; ++pass) {
    const double begin = now_seconds();
    for (int64_t set = 0; set < sets; ++set) {
      const Status status = body(set);
      if (!status.ok()) {
        std::fprintf(stderr, "%s: %s\n", op.c_str(), status.message().c_str());
        std::exit(1);
      }
    }
    if (pass >= 0) {
      seconds.push_back((now_seconds() - begin) / static_cast<double>(sets));
    }
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double ceiling = bound_by_bytes ? m.bandwidth : m.flops;
  const double work = (bound_by_bytes ? bytes : flops) / ceiling;
  std::printf("%s,%s,%lld,%.4f,%.4f,%.2f,%.1f,%s,%.2f,%.2f\n",
              op.c_str(),
              shape.c_str(),
              static_cast<long long>(rows),
              median * 1e3,
              seconds.front() * 1e3,
              bytes / median / 1e9,
              flops / median / 1e9,
              bound_by_bytes ? "bytes" : "flops",
              work / median,
              work / seconds.front());
  std::fflush(stdout);
}

const char* name(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return "f32";
    case WeightFormat::kBF16:
      return "bf16";
    case WeightFormat::kFp8Block:
      return "fp8";
    case WeightFormat::kFp8Row:
      return "fp8row";
    case WeightFormat::kFp4Row:
      return "fp4";
  }
  return "";
}

bool wanted(const Machine& m, const std::string& op) {
  return op.find(m.filter) != std::string::npos;
}

void bench_linear(Machine& m, WeightFormat format, int64_t out, int64_t in, int64_t rows) {
  const std::string op = std::string("linear ") + name(format);
  if (!wanted(m, op)) {
    return;
  }
  Random random(1);
  const bool decode = rows <= 8;
  std::vector<WeightBuffer> weights;
  double total = 0;
  do {
    weights.push_back(fast_weight(random, format, out, in));
    total += weight_bytes(weights.back());
  } while (decode && total < kColdBytes);
  const Buffer x = random.activations(DType::kBF16, {rows, in});
  const Buffer y(DType::kBF16, {rows, out});
  report(m,
         op,
         std::to_string(out) + "x" + std::to_string(in),
         rows,
         static_cast<int64_t>(weights.size()),
         weight_bytes(weights[0]),
         2.0 * static_cast<double>(rows * out * in),
         decode,
         [&](int64_t set) {
           const ops::Weight weight = weights[static_cast<size_t>(set)].view();
           const ops::LinearTarget target{&weight, y.view()};
           return ops::linear(m.ctx, {.x = x.view(), .targets = {&target, 1}});
         });
}

void bench_experts(Machine& m, int64_t d, int64_t f, int64_t e, int64_t k, int64_t rows) {
  if (!wanted(m, "experts")) {
    return;
  }
  Random random(2);
  std::vector<WeightBuffer> weights;
  weights.reserve(static_cast<size_t>(3 * e + 3));
  const auto make = [&](WeightFormat format) {
    ops::ExpertView view;
    for (ops::Weight* w : {&view.w1, &view.w3, &view.w2}) {
      const bool down = w == &view.w2;
      weights.push_back(fast_weight(random, format, down ? d : f, down ? f : d));
      *w = weights.back().view();
    }
    return view;
  };
  std::vector<ops::ExpertView> routed;
  for (int64_t i = 0; i < e; ++i) {
    routed.push_back(make(WeightFormat::kFp4Row));
  }
  const std::vector<ops::ExpertView> shared = {make(WeightFormat::kFp8Block)};
  const Buffer x = random.activations(DType::kBF16, {rows, d});
  const Buffer y(DType::kBF16, {rows, d});
  // Set i routes to other experts than set i - 1, so that decode finds them cold.
  const bool decode = rows <= 4;
  const int64_t sets = decode ? e / k : 1;
  std::vector<Buffer> ids;
  Buffer gates(DType::kF32, {rows, k});
  for (int64_t i = 0; i < rows * k; ++i) {
    gates.set(i, 0.2f);
  }
  for (int64_t set = 0; set < sets; ++set) {
    ids.emplace_back(DType::kI32, Shape{rows, k});
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t first = decode ? set * k : 0, step = decode ? 1 : e / k;
        const int64_t id = decode ? first + i : i * step + row % step;
        ids.back().view().as<int32_t>()[row * k + i] = static_cast<int32_t>(id);
      }
    }
  }
  const double routed_bytes =
      weight_bytes(weights[0]) + weight_bytes(weights[1]) + weight_bytes(weights[2]);
  const size_t last = weights.size() - 3;
  const double shared_bytes = weight_bytes(weights[last]) + weight_bytes(weights[last + 1]) +
                              weight_bytes(weights[last + 2]);
  const auto touched = static_cast<double>(decode ? k : e);
  report(m,
         "experts",
         std::to_string(d) + "x" + std::to_string(f) + " top " + std::to_string(k) + "/" +
             std::to_string(e),
         rows,
         sets,
         touched * routed_bytes + shared_bytes,
         6.0 * static_cast<double>(rows * (k + 1) * d * f),
         decode,
         [&](int64_t set) {
           return ops::experts(m.ctx,
                               {.x = x.view(),
                                .experts = ids[static_cast<size_t>(set)].view(),
                                .weights = gates.view(),
                                .routed = routed,
                                .shared = shared,
                                .limit = 10,
                                .y = y.view()});
         });
}

void bench_attend(Machine& m, int64_t h, int64_t k, int64_t window, int64_t picks, int64_t rows) {
  if (!wanted(m, "attend")) {
    return;
  }
  Random random(3);
  const int64_t entries = std::max<int64_t>(4096, picks);
  const TestStep step({{.start = 2 * entries, .rows = rows}});
  const TestWindow ring(random, step, window, k);
  Pages main(random, 1, entries, 64, quant::main_row_bytes(k));
  const Buffer x = random.normals(DType::kF32, {k}, 0.7);
  for (int64_t i = 0; i < entries; ++i) {
    quant::main_row_encode(x.floats().data(), k, main.views()[0].row(i));
  }
  Buffer selected(DType::kI32, {rows, picks});
  for (int64_t i = 0; i < rows * picks; ++i) {
    const int64_t row = i / picks;
    selected.view().as<int32_t>()[i] =
        static_cast<int32_t>(i % picks * (entries / picks) + row % (entries / picks));
  }
  const Buffer q = random.normals(DType::kBF16, {rows, h * k});
  const Buffer o(DType::kBF16, {rows, h * k});
  const Buffer rope = test::rope_rows(step, 32), sink = random.normals(DType::kF32, {h});
  const int64_t keys = window + picks;
  report(m,
         "attend",
         std::to_string(h) + "x" + std::to_string(k) + " keys " + std::to_string(keys),
         rows,
         1,
         static_cast<double>(
             rows * (window * quant::window_row_bytes(k) + picks * quant::main_row_bytes(k))),
         4.0 * static_cast<double>(rows * h * k * keys),
         false,
         [&](int64_t) {
           return ops::attend(m.ctx,
                              {.rows = step.rows(),
                               .q = q.view(),
                               .rope = rope.view(),
                               .window = ring.view(),
                               .main = main.views(),
                               .selected = selected.view(),
                               .sink = sink.view(),
                               .o = o.view()});
         });
}

void bench_index(Machine& m, int64_t hi, int64_t di, int64_t entries, int64_t picks, int64_t rows) {
  if (!wanted(m, "index_select")) {
    return;
  }
  Random random(4);
  const TestStep step({{.start = entries - rows, .rows = rows}});
  Pages index(random, 1, entries, 64, quant::index_row_bytes(di));
  const Buffer pool = random.normals(DType::kF32, {64, di});
  for (int64_t i = 0; i < entries; ++i) {
    quant::index_row_encode(pool.view().as<float>() + i % 64 * di, di, index.views()[0].row(i));
  }
  const Buffer q = random.normals(DType::kBF16, {rows, hi * di});
  const Buffer w = random.normals(DType::kBF16, {rows, hi});
  const Buffer rope = test::rope_rows(step, 32);
  const Buffer selected(DType::kI32, {rows, picks});
  report(m,
         "index_select",
         std::to_string(hi) + "x" + std::to_string(di) + " entries " + std::to_string(entries),
         rows,
         1,
         static_cast<double>(entries * quant::index_row_bytes(di)),
         2.0 * static_cast<double>(rows * hi * di * entries),
         false,
         [&](int64_t) {
           return ops::index_select(m.ctx,
                                    {.rows = step.rows(),
                                     .ratio = 1,
                                     .q = q.view(),
                                     .w = w.view(),
                                     .rope = rope.view(),
                                     .index = index.views(),
                                     .selected = selected.view()});
         });
}

void bench_site(Machine& m, int64_t streams, int64_t d, int64_t rows) {
  if (!wanted(m, "hc_site")) {
    return;
  }
  Random random(5);
  const int64_t coefficients = (2 + streams) * streams;
  const Buffer x = random.normals(DType::kBF16, {rows, streams, d});
  const Buffer y = random.normals(DType::kBF16, {rows, d});
  const Buffer post = random.normals(DType::kF32, {rows, streams});
  const Buffer comb = random.normals(DType::kF32, {rows, streams, streams}, 0.3);
  const Buffer base = random.normals(DType::kF32, {coefficients});
  const Buffer scale = random.normals(DType::kF32, {3});
  const Buffer norm = random.normals(DType::kBF16, {d});
  const Buffer x_out(DType::kBF16, {rows, streams, d}), u(DType::kBF16, {rows, d});
  const Buffer pre_out(DType::kF32, {rows, streams}), post_out(DType::kF32, {rows, streams});
  const Buffer comb_out(DType::kF32, {rows, streams, streams});
  const bool decode = rows <= 4;
  std::vector<Buffer> fns;
  double total = 0;
  do {
    fns.push_back(random.normals(DType::kF32, {coefficients, streams * d}, 0.01));
    total += static_cast<double>(fns.back().bytes.size());
  } while (decode && total < kColdBytes && fns.size() < 64);
  report(m,
         "hc_site",
         std::to_string(streams) + "x" + std::to_string(d),
         rows,
         static_cast<int64_t>(fns.size()),
         static_cast<double>(fns[0].bytes.size()),
         2.0 * static_cast<double>(rows * coefficients * streams * d),
         decode,
         [&](int64_t set) {
           return ops::hc_site(m.ctx,
                               {.x = x.view(),
                                .pending = {y.view(), post.view(), comb.view()},
                                .pre = post.view(),
                                .fn = fns[static_cast<size_t>(set)].view(),
                                .base = base.view(),
                                .scale = scale.view(),
                                .norm = norm.view(),
                                .rms_eps = 1e-20f,
                                .hc_eps = 1e-6f,
                                .sinkhorn_iters = 20,
                                .x_out = x_out.view(),
                                .pre_out = pre_out.view(),
                                .post_out = post_out.view(),
                                .comb_out = comb_out.view(),
                                .u = u.view()});
         });
}

void run(Machine& m) {
  std::printf("# read %.2f GB/s, multiply-add %.1f GFLOP/s, %d threads, %s\n",
              m.bandwidth / 1e9,
              m.flops / 1e9,
              m.pool->threads(),
              ops::cpu::instruction_sets().front().c_str());
  std::printf("op,shape,rows,median ms,best ms,GB/s,GFLOP/s,bound by,share,best share\n");
  constexpr WeightFormat kFormats[] = {
      WeightFormat::kFp8Block, WeightFormat::kFp4Row, WeightFormat::kBF16, WeightFormat::kF32};
  for (WeightFormat format : kFormats) {
    for (int64_t rows : {1, 2, 4, 64, 256}) {
      bench_linear(m, format, 1024, 1024, rows);
      bench_linear(m, format, 2048, 1024, rows);
    }
    for (int64_t rows : {1, 32, 128}) {
      bench_linear(m, format, 5120, 5120, rows);
    }
  }
  bench_experts(m, 1024, 512, 96, 6, 1);
  bench_experts(m, 1024, 512, 96, 6, 2);
  bench_experts(m, 1024, 512, 24, 6, 128);
  bench_experts(m, 5120, 2304, 12, 6, 1);
  bench_experts(m, 5120, 2304, 12, 6, 64);
  bench_attend(m, 16, 128, 128, 128, 1);
  bench_attend(m, 16, 128, 128, 128, 64);
  bench_attend(m, 64, 512, 128, 512, 1);
  bench_attend(m, 64, 512, 128, 512, 16);
  bench_index(m, 32, 128, 16384, 512, 1);
  bench_index(m, 32, 128, 16384, 512, 32);
  bench_site(m, 4, 1024, 1);
  bench_site(m, 4, 5120, 1);
  bench_site(m, 4, 1024, 128);
  bench_site(m, 4, 5120, 128);
}

}  // namespace
}  // namespace cachalot

int main(int argc, char** argv) {
  cachalot::Machine m;
  m.pool = std::make_unique<cachalot::ThreadPool>(argc > 1 ? std::atoi(argv[1]) : 0);
  m.filter = argc > 2 ? argv[2] : "";
  m.ctx.backend = cachalot::ops::Backend::kCpu;
  m.ctx.pool = m.pool.get();
  m.ctx.scratch = &m.arena;
  m.bandwidth = cachalot::ops::cpu::ReadMeter(*m.pool).best_of(5);
  m.flops = 2 * cachalot::ops::cpu::best_multiply_add_rate(*m.pool, 5);
  cachalot::run(m);
}
