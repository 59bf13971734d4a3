// Times the CUDA ops at the shapes of DeepSeek-V4.1-Flash on one GPU.
//
//   cachalot_cuda_bench [substring]...     only ops whose name contains one of the substrings
//
// One JSON object per line: name, shape, median_s, bytes, flops, gbps, tflops, and ceiling_s, the
// larger of bytes / copy bandwidth and flops / BF16 matrix rate, both measured first in the same
// run; fraction = ceiling_s / median_s. Bytes are those that must move once (weights, caches,
// rows).
//
// Method: random non-zero data made on the device; every op rotates through enough argument sets to
// move more than 200 MB before memory repeats; CUDA-graph replays of many calls; median of 9
// replays.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/rng.h"
#include "bench/cuda_bench.cuh"
#include "ops/host_rows.h"
#include "ops/ops.h"
#include "quant/block.h"

namespace cachalot {
namespace {

using ops::WeightFormat;

std::string tokens(int64_t t) {
  return "T=" + std::to_string(t);
}

double weight_bytes(const ops::Weight& w) {
  return static_cast<double>(w.values.bytes()) +
         (w.scales.empty() ? 0.0 : static_cast<double>(w.scales.bytes()));
}

// Dense linears
// ------------------------------------------------------------------------------------

struct LinearSpec {
  const char* name;
  int64_t in;
  std::vector<int64_t> outs;
  int64_t groups = 1;
  bool quantize = true;
  WeightFormat format = WeightFormat::kFp8Block;
  DType y = DType::kBF16;
};

void bench_linears(Bench& bench) {
  const LinearSpec specs[] = {
      {"linear.wq_a+wkv", 5120, {1280, 512}},
      {"linear.wq_b", 1280, {32768}},
      {"linear.wo_a", 4096, {8192}, 8, false},
      {"linear.wo_b", 8192, {5120}},
      {"linear.shared_w13", 5120, {2304, 2304}},
      {"linear.shared_w2", 2304, {5120}},
      {"linear.index_wq_b", 1280, {4096}},
      {"linear.engram_wkv", 6144, {25600}},
      {"linear.compressor", 5120, {512, 512}, 1, false, WeightFormat::kBF16, DType::kF32},
  };
  for (const int64_t t : {int64_t{1}, int64_t{8}, int64_t{64}, int64_t{4096}}) {
    double dense = 0;
    for (const LinearSpec& spec : specs) {
      if (!bench.wanted(spec.name)) {
        continue;
      }
      const size_t start = bench.mark();
      double bytes = 0, flops = 0;
      for (const int64_t out : spec.outs) {
        bytes += static_cast<double>(out * spec.in) *
                 (spec.format == WeightFormat::kBF16 ? 2.0 : 1.0 + 1.0 / 1024);
        flops += 2.0 * static_cast<double>(t * out * spec.in);
      }
      const int sets = static_cast<int>(std::min<double>(64, std::ceil(kRotateBytes / bytes)));
      const TensorView x = bench.tensor(DType::kBF16, {t, spec.groups * spec.in});
      std::vector<std::vector<ops::Weight>> weights(static_cast<size_t>(sets));
      std::vector<std::vector<ops::LinearTarget>> targets(static_cast<size_t>(sets));
      for (size_t s = 0; s < weights.size(); ++s) {
        for (const int64_t out : spec.outs) {
          weights[s].push_back(bench.weight(spec.format, out, spec.in));
        }
        for (size_t i = 0; i < spec.outs.size(); ++i) {
          targets[s].push_back({&weights[s][i], bench.tensor(spec.y, {t, spec.outs[i]})});
        }
      }
      const int calls = t >= 1024 ? 4 : std::max(20, sets);
      const double seconds = bench.time(calls, [&](int i) {
        return ops::linear(bench.ctx(),
                           {.x = x,
                            .targets = targets[static_cast<size_t>(i % sets)],
                            .groups = spec.groups,
                            .quantize_input = spec.quantize});
      });
      const bool dense_set = std::strncmp(spec.name, "linear.w", 8) == 0 ||
                             std::strncmp(spec.name, "linear.shared", 13) == 0;
      dense += dense_set ? seconds : 0;
      bench.report(spec.name, tokens(t), seconds, bytes, flops);
      bench.release(start);
    }
    if (bench.wanted("linear.dense_set")) {
      const double bytes = 126.617e6 + 35.4e6 - 1e3;
      bench.report("linear.dense_set", tokens(t), dense, bytes, 2 * bytes * static_cast<double>(t));
    }
  }
}

void bench_head(Bench& bench) {
  if (!bench.wanted("head")) {
    return;
  }
  const size_t start = bench.mark();
  const int64_t v = 129280, d = 5120;
  const ops::Weight w = bench.weight(WeightFormat::kBF16, v, d);
  for (const int64_t n : {int64_t{1}, int64_t{64}}) {
    const size_t inner = bench.mark();
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < n; ++i) {
      rows.push_back(static_cast<int32_t>(i));
    }
    ops::HeadArgs args;
    args.select = bench.ints(rows, {n});
    args.x = bench.tensor(DType::kBF16, {n, 4, d});
    args.pending = {bench.tensor(DType::kBF16, {n, d}),
                    bench.tensor(DType::kF32, {n, 4}),
                    bench.tensor(DType::kF32, {n, 4, 4})};
    args.pre = bench.tensor(DType::kF32, {n, 4});
    args.norm = bench.tensor(DType::kBF16, {d});
    args.rms_eps = 1e-20f;
    args.weight = w;
    args.logits = bench.tensor(DType::kF32, {n, v});
    const double seconds = bench.time(4, [&](int) { return ops::head(bench.ctx(), args); });
    bench.report("head", "N=" + std::to_string(n), seconds, weight_bytes(w), 2.0 * n * v * d);
    bench.release(inner);
  }
  bench.release(start);
}

void bench_top_logits(Bench& bench) {
  if (!bench.wanted("top_logits")) {
    return;
  }
  struct Case {
    int64_t n, k;
  };
  const int64_t v = 129280;
  for (const Case& c : {Case{1, 1}, {1, 256}, {64, 256}, {128, 1}, {128, 256}, {128, 1024}}) {
    const size_t start = bench.mark();
    const double bytes = 4.0 * static_cast<double>(c.n * v);
    const int sets = static_cast<int>(std::ceil(kRotateBytes / bytes));
    std::vector<ops::TopLogitsArgs> args(static_cast<size_t>(sets));
    for (ops::TopLogitsArgs& a : args) {
      a.logits = bench.tensor(DType::kF32, {c.n, v});
      const std::vector<float> temperatures(static_cast<size_t>(c.n), 0.7f);
      a.temperature = {bench.uploaded(temperatures), DType::kF32, {c.n}, Device::kCuda};
      a.value = bench.tensor(DType::kF32, {c.n, c.k});
      a.id = bench.ints(std::vector<int32_t>(static_cast<size_t>(c.n * c.k)), {c.n, c.k});
      a.mass = bench.tensor(DType::kF32, {c.n, 2});
    }
    const double seconds = bench.time(std::max(sets, 20), [&](int i) {
      return ops::top_logits(bench.ctx(), args[static_cast<size_t>(i % sets)]);
    });
    bench.report(
        "top_logits", "N=" + std::to_string(c.n) + " k=" + std::to_string(c.k), seconds, bytes, 0);
    bench.release(start);
  }
}

// Experts
// ------------------------------------------------------------------------------------------

void bench_experts(Bench& bench) {
  if (!bench.wanted("experts")) {
    return;
  }
  const size_t start = bench.mark();
  const int64_t d = 5120, f = 2304, e = 384, k = 6;
  std::vector<ops::ExpertView> routed, shared;
  for (int64_t i = 0; i < e; ++i) {
    routed.push_back({bench.weight(WeightFormat::kFp4Row, f, d),
                      bench.weight(WeightFormat::kFp4Row, f, d),
                      bench.weight(WeightFormat::kFp4Row, d, f)});
  }
  shared.push_back({bench.weight(WeightFormat::kFp8Block, f, d),
                    bench.weight(WeightFormat::kFp8Block, f, d),
                    bench.weight(WeightFormat::kFp8Block, d, f)});
  const double one = 3 * static_cast<double>(f * d) * (0.5 + 1.0 / 32);
  const Philox random(7);
  uint64_t draw = 0;
  for (const int64_t t : {1, 2, 8, 16, 64, 128, 512, 4096, 8192}) {
    for (const bool with_shared : {true, false}) {
      if (!with_shared && t != 1 && t != 64) {
        continue;
      }
      const size_t inner = bench.mark();
      const int sets = t <= 16 ? 16 : 4;
      std::vector<ops::ExpertsArgs> args(static_cast<size_t>(sets));
      double distinct = 0;
      for (ops::ExpertsArgs& a : args) {
        std::vector<int32_t> ids;
        std::vector<bool> used(static_cast<size_t>(e));
        for (int64_t row = 0; row < t; ++row) {
          std::vector<int32_t> chosen;
          while (static_cast<int64_t>(chosen.size()) < k) {
            const auto id =
                static_cast<int32_t>(random.words(draw++)[0] % static_cast<uint32_t>(e));
            if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) {
              chosen.push_back(id);
              distinct += used[static_cast<size_t>(id)] ? 0 : 1.0 / sets;
              used[static_cast<size_t>(id)] = true;
            }
          }
          std::sort(chosen.begin(), chosen.end());
          ids.insert(ids.end(), chosen.begin(), chosen.end());
        }
        a.x = bench.tensor(DType::kBF16, {t, d});
        a.experts = bench.ints(ids, {t, k});
        a.weights = bench.tensor(DType::kF32, {t, k});
        a.routed = routed;
        if (with_shared) {
          a.shared = shared;
        }
        a.limit = 10;
        a.y = bench.tensor(DType::kBF16, {t, d});
      }
      const int calls = t >= 512 ? 2 : t >= 64 ? 4 : 16;
      const double seconds = bench.time(calls, [&](int i) {
        return ops::experts(bench.ctx(), args[static_cast<size_t>(i % sets)]);
      });
      const double bytes = distinct * one + (with_shared ? 3.0 * f * d : 0.0);
      const double flops = 6.0 * static_cast<double>(t * f * d) * (k + (with_shared ? 1 : 0));
      bench.report(with_shared ? "experts" : "experts.routed_only",
                   tokens(t) + " distinct=" + std::to_string(static_cast<int>(distinct + 0.5)),
                   seconds,
                   bytes,
                   flops);
      bench.release(inner);
    }
  }
  bench.release(start);
}

// Attention and index
// ------------------------------------------------------------------------------

// Decode rows: one row per sequence at position `context` - 1, pages of 128 rows.
struct Decode {
  Decode(Bench& bench,
         int64_t batch,
         int64_t context,
         int64_t row_bytes,
         Fill fill,
         int64_t rows_each = 1) {
    std::vector<int32_t> position, sequence, begin, start;
    for (int64_t s = 0; s < batch; ++s) {
      begin.push_back(static_cast<int32_t>(s * rows_each));
      start.push_back(static_cast<int32_t>(context - rows_each));
      for (int64_t i = context - rows_each; i < context; ++i) {
        position.push_back(static_cast<int32_t>(i));
        sequence.push_back(static_cast<int32_t>(s));
      }
    }
    begin.push_back(static_cast<int32_t>(batch * rows_each));
    rows.rows = batch * rows_each;
    rows.sequences = batch;
    rows.position = bench.ints(position, {rows.rows});
    rows.sequence = bench.ints(sequence, {rows.rows});
    rows.row_begin = bench.ints(begin, {batch + 1});
    rows.start = bench.ints(start, {batch});
    rows.is_image = {bench.uploaded(std::vector<uint8_t>(static_cast<size_t>(rows.rows))),
                     DType::kU8,
                     {rows.rows},
                     Device::kCuda};
    const int64_t pages = (context + 127) / 128;
    uint8_t* memory = bench.filled(batch * pages * 128 * row_bytes, fill);
    std::vector<ops::PagedRows> views;
    for (int64_t s = 0; s < batch; ++s) {
      std::vector<uint8_t*> pointers;
      for (int64_t p = 0; p < pages; ++p) {
        // Pages of the sequences interleave.
        pointers.push_back(memory + (p * batch + s) * 128 * row_bytes);
      }
      views.push_back({bench.uploaded(pointers), 128, row_bytes});
    }
    main = bench.uploaded(views);
  }
  ops::StepRows rows;
  const ops::PagedRows* main = nullptr;
};

void bench_attend(Bench& bench) {
  // Decoding sequences of one row, and a chunk of a prompt.
  struct Case {
    int64_t batch, rows;
  };
  for (const bool with_main : {true, false}) {
    const std::string name = with_main ? "attend" : "attend.window_only";
    for (const Case& c :
         {Case{1, 1}, {6, 1}, {16, 1}, {32, 1}, {64, 1}, {128, 1}, {256, 1}, {64, 6}, {1, 4096}}) {
      const std::string shape = c.rows > 1 ? std::to_string(c.batch) + "x" + std::to_string(c.rows)
                                           : "batch=" + std::to_string(c.batch);
      if (!bench.wanted(name + " " + shape)) {
        continue;
      }
      const size_t start = bench.mark();
      const int64_t h = 64, k = 512, width = 512, context = 32768, half = 32;
      const int64_t t = c.batch * c.rows;
      const Decode decode(bench, c.batch, context, 288, Fill::kMainRow, c.rows);
      const Philox random(11);
      uint64_t draw = 0;
      const int sets = t > 1024 ? 1 : 4;
      std::vector<ops::AttendArgs> args(static_cast<size_t>(sets));
      for (ops::AttendArgs& a : args) {
        std::vector<int32_t> selected;
        std::vector<uint8_t*> rings;
        for (int64_t row = 0; row < t; ++row) {
          // Of what every row of the chunk sees.
          const int64_t step = (context - c.rows) / width;
          for (int64_t i = 0; i < width; ++i) {
            selected.push_back(static_cast<int32_t>(i * step + random.words(draw++)[0] % step));
          }
        }
        uint8_t* ring = bench.filled(c.batch * 128 * 528, Fill::kWindowRow);
        for (int64_t s = 0; s < c.batch; ++s) {
          rings.push_back(ring + s * 128 * 528);
        }
        a.rows = decode.rows;
        a.q = bench.tensor(DType::kBF16, {t, h * k});
        a.rope = bench.tensor(DType::kF32, {t, half, 2});
        a.window.window = 128;
        a.window.rings = bench.uploaded(rings);
        a.window.fresh = {
            bench.filled(t * 528, Fill::kWindowRow), DType::kU8, {t, 528}, Device::kCuda};
        a.window.floor = bench.ints(std::vector<int32_t>(static_cast<size_t>(c.batch)), {c.batch});
        if (with_main) {
          a.main = decode.main;
          a.selected = bench.ints(selected, {t, width});
        }
        a.sink = bench.tensor(DType::kF32, {h});
        a.o = bench.tensor(DType::kBF16, {t, h * k});
      }
      const double seconds = bench.time(t > 1024 ? 4 : 20, [&](int i) {
        return ops::attend(bench.ctx(), args[static_cast<size_t>(i % sets)]);
      });
      const double keys = with_main ? 640 : 128;
      const double bytes =
          static_cast<double>(t) * ((with_main ? 512 * 288 : 0) + 128 * 528 + 4 * h * k);
      bench.report(name, shape, seconds, bytes, 4.0 * static_cast<double>(t * h * k) * keys);
      bench.release(start);
    }
  }
}

void bench_index_select(Bench& bench) {
  struct Case {
    const char* name;
    int64_t batch, rows, context;
  };
  const Case cases[] = {{"index_select", 1, 1, 131072},
                        {"index_select", 1, 1, 524288},
                        {"index_select", 64, 1, 131072},
                        {"index_select", 64, 6, 131072},
                        {"index_select", 1, 4096, 131072},
                        {"index_select", 64, 1, 8192},
                        {"index_select.source", 1, 1, 131072},
                        {"index_select.source", 64, 1, 131072},
                        {"index_select.source", 1, 4096, 131072},
                        {"index_select.consumer", 1, 1, 131072},
                        {"index_select.consumer", 64, 1, 131072},
                        {"index_select.consumer", 1, 4096, 131072}};
  for (const Case& c : cases) {
    const std::string shape = std::to_string(c.batch) + "x" +
                              (c.rows == 1 ? "" : std::to_string(c.rows) + "x") +
                              std::to_string(c.context);
    if (!bench.wanted(std::string(c.name) + " " + shape)) {
      continue;
    }
    const size_t start = bench.mark();
    const int64_t hi = 32, di = 128, k = 512, blocks = 2048, t = c.batch * c.rows;
    const bool source = std::strstr(c.name, "source") != nullptr;
    const bool consumer = std::strstr(c.name, "consumer") != nullptr;
    const Decode decode(bench, c.batch, c.context, 68, Fill::kIndexRow, c.rows);
    ops::IndexSelectArgs args;
    args.rows = decode.rows;
    args.ratio = 1;
    args.q = bench.tensor(DType::kBF16, {t, hi * di});
    args.w = bench.tensor(DType::kBF16, {t, hi});
    args.rope = bench.tensor(DType::kF32, {t, 32, 2});
    args.index = decode.main;
    args.entries_bound = c.context;
    args.selected = bench.ints(std::vector<int32_t>(static_cast<size_t>(t * k)), {t, k});
    std::vector<int32_t> ids;
    for (int64_t s = 0; s < t; ++s) {
      for (int64_t i = 0; i < blocks; ++i) {
        ids.push_back(static_cast<int32_t>(i * (c.context / 8 / blocks)));
      }
    }
    if (source || consumer) {
      args.candidate_block = 8;
      (source ? args.candidates_out : args.candidates) = bench.ints(ids, {t, blocks});
    }
    const double seconds =
        bench.time(t == 1 ? 20 : 4, [&](int) { return ops::index_select(bench.ctx(), args); });
    const double entries = static_cast<double>(consumer ? blocks * 8 : c.context);
    bench.report(c.name,
                 shape,
                 seconds,
                 static_cast<double>(consumer ? t : c.batch) * entries * 68,
                 static_cast<double>(t) * entries * 8192);
    bench.release(start);
  }
}

// Streams and small ops
// ----------------------------------------------------------------------------

void bench_streams(Bench& bench) {
  const int64_t m = 4, d = 5120;
  for (const int64_t t : {1, 8, 64, 8192}) {
    const size_t start = bench.mark();
    if (bench.wanted("hc_site")) {
      const int sets = t >= 8192 ? 2 : 4;
      std::vector<ops::HcSiteArgs> args(static_cast<size_t>(sets));
      for (ops::HcSiteArgs& a : args) {
        a.x = bench.tensor(DType::kBF16, {t, m, d});
        a.pending = {bench.tensor(DType::kBF16, {t, d}),
                     bench.tensor(DType::kF32, {t, m}),
                     bench.tensor(DType::kF32, {t, m, m})};
        a.pre = bench.tensor(DType::kF32, {t, m});
        a.fn = bench.tensor(DType::kF32, {24, m * d});
        a.base = bench.tensor(DType::kF32, {24});
        a.scale = bench.tensor(DType::kF32, {3});
        a.norm = bench.tensor(DType::kBF16, {d});
        a.rms_eps = 1e-20f;
        a.hc_eps = 1e-6f;
        a.sinkhorn_iters = 20;
        a.x_out = bench.tensor(DType::kBF16, {t, m, d});
        a.pre_out = bench.tensor(DType::kF32, {t, m});
        a.post_out = bench.tensor(DType::kF32, {t, m});
        a.comb_out = bench.tensor(DType::kF32, {t, m, m});
        a.u = bench.tensor(DType::kBF16, {t, d});
      }
      const double seconds = bench.time(t >= 8192 ? 4 : 20, [&](int i) {
        return ops::hc_site(bench.ctx(), args[static_cast<size_t>(i % sets)]);
      });
      bench.report("hc_site",
                   tokens(t),
                   seconds,
                   20.0 * static_cast<double>(t * d) + 24.0 * 4 * m * d,
                   48.0 * static_cast<double>(t * m * d));
    }
    if (bench.wanted("gate")) {
      ops::GateArgs a;
      a.rows.is_image = {bench.uploaded(std::vector<uint8_t>(static_cast<size_t>(t))),
                         DType::kU8,
                         {t},
                         Device::kCuda};
      a.x = bench.tensor(DType::kBF16, {t, d});
      a.weight = bench.weight(WeightFormat::kBF16, 384, d);
      a.bias = bench.tensor(DType::kF32, {384});
      a.bias_vl = bench.tensor(DType::kF32, {384});
      a.scale = 1.5f;
      a.experts = bench.ints(std::vector<int32_t>(static_cast<size_t>(t * 6)), {t, 6});
      a.weights = bench.tensor(DType::kF32, {t, 6});
      const double seconds = bench.time(20, [&](int) { return ops::gate(bench.ctx(), a); });
      bench.report("gate",
                   tokens(t),
                   seconds,
                   2.0 * 384 * d + 2.0 * static_cast<double>(t * d),
                   768.0 * static_cast<double>(t * d));
    }
    if (bench.wanted("qkv_finish")) {
      ops::QkvFinishArgs a;
      a.t = bench.tensor(DType::kBF16, {t, 1280});
      a.q_norm = bench.tensor(DType::kBF16, {1280});
      a.kv = bench.tensor(DType::kBF16, {t, 512});
      a.kv_norm = bench.tensor(DType::kBF16, {512});
      a.rope = bench.tensor(DType::kF32, {t, 32, 2});
      a.rms_eps = 1e-20f;
      a.r = bench.tensor(DType::kBF16, {t, 1280});
      a.fresh = {bench.filled(t * 528, Fill::kWindowRow), DType::kU8, {t, 528}, Device::kCuda};
      const double seconds = bench.time(20, [&](int) { return ops::qkv_finish(bench.ctx(), a); });
      bench.report(
          "qkv_finish", tokens(t), seconds, static_cast<double>(t) * (4 * 1280 + 2 * 512 + 528), 0);
    }
    if (bench.wanted("engram_inject")) {
      ops::EngramInjectArgs a;
      a.rows.is_image = {bench.uploaded(std::vector<uint8_t>(static_cast<size_t>(t))),
                         DType::kU8,
                         {t},
                         Device::kCuda};
      a.x = bench.tensor(DType::kBF16, {t, m, d});
      a.kv = bench.tensor(DType::kBF16, {t, (m + 1) * d});
      a.q_weight = bench.tensor(DType::kBF16, {m, d});
      a.k_weight = bench.tensor(DType::kBF16, {m, d});
      a.rms_eps = 1e-20f;
      a.out = bench.tensor(DType::kBF16, {t, m, d});
      const double seconds =
          bench.time(20, [&](int) { return ops::engram_inject(bench.ctx(), a); });
      bench.report("engram_inject", tokens(t), seconds, 26.0 * static_cast<double>(t * d), 0);
    }
    bench.release(start);
  }
}

// Rows of an Engram table in host memory: from the call until they are on the device, which is at
// no other work. Their ceiling is the rate at which pinned memory is copied.
void bench_host_rows(Bench& bench) {
  if (!bench.wanted("host_rows")) {
    return;
  }
  constexpr int64_t kRows = 24'000'000, kWidth = 256, kScales = 8, kColumns = 24;
  constexpr int64_t kCopied = 256 << 20;
  const size_t start = bench.mark();
  auto* const device = static_cast<uint8_t*>(bench.allocate(kCopied));
  ops::Memory& memory = **ops::cuda_memory();
  const auto staging = std::move(*memory.staging(kCopied, 1));
  const double copy = bench.wall_time(
      [&](int) { return staging->send(device, *staging->next(), kCopied, bench.ctx().stream); });
  std::vector<uint8_t> values(kRows * kWidth, 0x38), scales(kRows * kScales, 120);
  ops::Weight table{.values = {values.data(), DType::kF8E4M3, {kRows, kWidth}},
                    .scales = {scales.data(), DType::kF8E8M0, {kRows, kScales}},
                    .format = WeightFormat::kFp8Row,
                    .out = kRows,
                    .in = kWidth};
  ThreadPool pool;
  ops::HostRows sender(memory, &pool);
  const Philox random(13);
  uint64_t draw = 0;
  for (const int64_t t : {1, 64, 8192}) {
    const int64_t n = t * kColumns;
    const double bytes = static_cast<double>(n * (kWidth + kScales));
    ops::Weight rows = table;
    rows.out = n;
    rows.values = {device, DType::kF8E4M3, {n, kWidth}, Device::kCuda};
    rows.scales = {device + n * kWidth, DType::kF8E8M0, {n, kScales}, Device::kCuda};
    std::vector<std::vector<int32_t>> ids(kReplays + 2);
    for (std::vector<int32_t>& call : ids) {
      for (int64_t i = 0; i < n; ++i) {
        call.push_back(static_cast<int32_t>(random.words(draw++)[0] % kRows));
      }
    }
    const double seconds = bench.wall_time([&](int i) {
      return sender.send(table, ids[static_cast<size_t>(i)], rows, bench.ctx().stream);
    });
    bench.report("host_rows", tokens(t), seconds, bytes, 0, bytes * copy / kCopied);
  }
  bench.release(start);
}

}  // namespace

void run(int argc, char** argv) {
  Bench bench(argc, argv);
  bench_linears(bench);
  bench_experts(bench);
  bench_attend(bench);
  bench_index_select(bench);
  bench_streams(bench);
  bench_head(bench);
  bench_top_logits(bench);
  bench_host_rows(bench);
}

}  // namespace cachalot

int main(int argc, char** argv) {
  cachalot::run(argc, argv);
  return 0;
}
