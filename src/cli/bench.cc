// cachalot bench: speed against the machine's measured limits.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <set>

#include "base/clock.h"
#include "base/format.h"
#include "base/json.h"
#include "base/math.h"
#include "base/rng.h"
#include "cli/bench_serve.h"
#include "cli/command.h"
#include "cli/run_flags.h"
#include "engine/logits.h"
#include "model/accounting.h"
#include "model/vision.h"
#include "ops/cpu/machine.h"
#include "ops/op_timer.h"
#include "ops/ops.h"
#include "ops/registry.h"
#include "quant/block.h"

namespace cachalot::cli {
namespace {

struct BenchFlags {
  RunFlags run;
  std::vector<int64_t> batch = {1};
  std::vector<int64_t> context = {512};
  int64_t tokens = 512;
  std::vector<int64_t> size = {546};
  int repeats = 7;
};

struct Measurement {
  std::string name, backend, shape;
  std::vector<double> seconds;
  double bytes = 0;
  double flops = 0;  // multiply and add counted apart
  // Bytes or flops per second that the machine reached right before each of `seconds`.
  std::vector<double> ceilings;
  bool bound_by_bytes = true;
  int64_t launches = 0;  // kernels of a step that is one graph
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The fraction is the median over the repeats, each against its own ceiling: on a shared machine
// both change from one second to the next, together.
void print(const Measurement& m) {
  std::vector<double> fractions;
  for (size_t i = 0; i < m.seconds.size(); ++i) {
    fractions.push_back((m.bound_by_bytes ? m.bytes : m.flops) / m.seconds[i] / m.ceilings[i]);
  }
  const double middle = median(m.seconds);
  JsonWriter w;
  w.begin_object()
      .field("name", m.name)
      .field("backend", m.backend)
      .field("shape", m.shape)
      .field("median_s", middle)
      .field("min_s", *std::min_element(m.seconds.begin(), m.seconds.end()))
      .field("max_s", *std::max_element(m.seconds.begin(), m.seconds.end()))
      .field("bytes", m.bytes)
      .field("flops", m.flops)
      .field("gbps", m.bytes / middle / 1e9)
      .field("tflops", m.flops / middle / 1e12)
      .field("ceiling", median(m.ceilings))
      .field("fraction", median(fractions));
  if (m.launches > 0) {
    w.field("launches", m.launches);
  }
  w.end_object();
  std::fputs((w.text() + "\n").c_str(), stdout);
  std::fflush(stdout);
}

std::vector<int32_t> random_tokens(int64_t count, int64_t vocab, uint64_t seed) {
  std::vector<int32_t> tokens;
  const Philox rng(seed);
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(
        static_cast<int32_t>(rng.uniform(static_cast<uint64_t>(i)) * static_cast<double>(vocab)));
  }
  return tokens;
}

// Copies inside a device's memory, read and written counted.
class CopyMeter {
 public:
  static Result<CopyMeter> create(ops::Memory& memory) {
    CACHALOT_TRY(ops::Buffer from, ops::Buffer::allocate(memory, kBytes));
    CACHALOT_TRY(ops::Buffer to, ops::Buffer::allocate(memory, kBytes));
    return CopyMeter(memory, std::move(from), std::move(to));
  }

  // Bytes per second of one pass.
  Result<double> pass() {
    uint8_t last = 0;
    const double begin = now_seconds();
    for (int i = 0; i < kCopies; ++i) {
      CACHALOT_RETURN_IF_ERROR(memory_->copy(to_.data(), from_.data(), kBytes, nullptr));
    }
    // A read returns when everything before it is done.
    CACHALOT_RETURN_IF_ERROR(memory_->read(&last, to_.data(), 1, nullptr));
    return 2.0 * kCopies * kBytes / (now_seconds() - begin);
  }

 private:
  static constexpr int64_t kBytes = int64_t{1} << 30;
  static constexpr int kCopies = 10;

  CopyMeter(ops::Memory& memory, ops::Buffer from, ops::Buffer to)
      : memory_(&memory), from_(std::move(from)), to_(std::move(to)) {}

  ops::Memory* memory_;
  ops::Buffer from_, to_;
};

// One pass of what bounds a step: units per second.
using Ceiling = std::function<Result<double>()>;

// For a step that reads every weight once.
Result<Ceiling> read_ceiling(engine::Runtime& runtime) {
  ops::Memory& memory = runtime.pages().memory();
  if (memory.device() == Device::kCpu) {
    auto meter = std::make_shared<ops::cpu::ReadMeter>(runtime.threads());
    return Ceiling([meter]() -> Result<double> { return meter->pass(); });
  }
  CACHALOT_TRY(CopyMeter meter, CopyMeter::create(memory));
  auto shared = std::make_shared<CopyMeter>(std::move(meter));
  CACHALOT_RETURN_IF_ERROR(shared->pass());  // the first touches the memory
  return Ceiling([shared] { return shared->pass(); });
}

// Counts the routed experts that a step touches, per layer.
class ExpertCounter : public model::Observer {
 public:
  void visit(const std::string& name, const TensorView& rows, const model::ObservedRows&) override {
    if (!name.ends_with(".experts")) {
      return;
    }
    std::set<int32_t> distinct(rows.as<int32_t>(), rows.as<int32_t>() + rows.shape.elements());
    experts_ += static_cast<int64_t>(distinct.size());
  }
  bool forced_experts(int64_t, const TensorView&, const model::ObservedRows&) override {
    return false;
  }
  int64_t experts() const { return experts_; }

 private:
  int64_t experts_ = 0;
};

int64_t expert_bytes(const ops::ExpertView& e) {
  return ops::weight_bytes(e.w1) + ops::weight_bytes(e.w2) + ops::weight_bytes(e.w3);
}

// Bytes of weights that the layers read once, whatever their rows; routed experts apart.
int64_t dense_bytes(const std::vector<model::LayerWeights>& layers) {
  int64_t bytes = 0;
  for (const model::LayerWeights& l : layers) {
    for (const ops::Weight* w : model::matrices(l)) {
      bytes += ops::weight_bytes(*w);
    }
    bytes += l.hc_attn.fn.bytes() + l.hc_ffn.fn.bytes();
    for (const ops::ExpertView& shared : l.moe.shared) {
      bytes += expert_bytes(shared);
    }
  }
  return bytes;
}

// Of a step over the target.
int64_t dense_bytes(const model::Model& model) {
  return ops::weight_bytes(model.weights.head) + dense_bytes(model.weights.layers);
}

// Of a draft block and its sequential part.
int64_t draft_bytes(const model::Model& model) {
  const model::DraftWeights& draft = model.weights.draft;
  return ops::weight_bytes(model.weights.head) + dense_bytes(draft.stages) +
         model.config.dspark_block_size * ops::weight_bytes(draft.markov_head);
}

// A repeat takes at least this long.
constexpr double kRepeatSeconds = 0.2;
// Steps whose ops are timed one by one.
constexpr int kBudgetSteps = 5;
// Positions that are computed; longer contexts repeat their cache rows.
constexpr int64_t kComputedContext = 4096;

// The best tokens of logits, as many as a sampler asks for: what ends a step, in a device too.
Status read_best(model::StepRunner& runner, const TensorView& logits) {
  const std::vector<float> temperature(static_cast<size_t>(logits.dim(0)), 1.0f);
  return engine::StepLogits::read(runner, logits, engine::kRankedTokens, temperature).status();
}

// Runs a step up to what sampling reads of it.
Status run_step(model::StepRunner& runner, std::span<const model::StepSequence> sequences) {
  CACHALOT_TRY(const TensorView logits, runner.run(sequences));
  return read_best(runner, logits);
}

// One step over prepared sequences; rows are not committed, so every repeat does the same work.
struct StepBench {
  std::vector<std::unique_ptr<kvcache::SequenceCache>> caches;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<model::StepSequence> sequences;
};

Status prefill(engine::Runtime& runtime,
               model::StepRunner& runner,
               const BenchFlags& flags,
               int64_t context,
               kvcache::SequenceCache& cache) {
  const std::vector<int32_t> prompt =
      random_tokens(context, runtime.model().config.vocab_size, 100);
  for (int64_t begin = 0; begin < context; begin += flags.run.chunk) {
    const int64_t n = std::min(flags.run.chunk, context - begin);
    CACHALOT_RETURN_IF_ERROR(cache.reserve(begin + n));
    const model::StepSequence sequence{.view = &cache.view(),
                                       .tokens = {prompt.data() + begin, static_cast<size_t>(n)},
                                       .no_logits = true};
    CACHALOT_RETURN_IF_ERROR(runner.run({&sequence, 1}));
    const auto accepted = static_cast<int32_t>(n);
    CACHALOT_RETURN_IF_ERROR(runner.commit({&accepted, 1}));
  }
  return {};
}

// Makes `to` a sequence of `context` positions in memory of its own: `from` over and over, from its
// page `shift` on.
Status repeat_rows(engine::Runtime& runtime,
                   const ops::SequenceView& from,
                   int64_t shift,
                   int64_t context,
                   ops::SequenceView& to) {
  ops::Memory& memory = runtime.pages().memory();
  const kvcache::CacheLayout& layout = runtime.layout();
  for (size_t i = 0; i < to.rings.size(); ++i) {
    if (to.rings[i] != from.rings[i]) {
      CACHALOT_RETURN_IF_ERROR(memory.copy(
          to.rings[i], from.rings[i], layout.window * layout.window_row_bytes, nullptr));
    }
  }
  for (size_t s = 0; s < to.sources.size(); ++s) {
    const int64_t filled = ceil_div(from.length, layout.page_tokens);
    if (to.sources[s].open_group != from.sources[s].open_group) {
      CACHALOT_RETURN_IF_ERROR(memory.copy(to.sources[s].open_group,
                                           from.sources[s].open_group,
                                           2 * layout.compressed_dim * 4,
                                           nullptr));
    }
    for (auto rows : {&ops::SourceView::main, &ops::SourceView::index}) {
      const ops::PagedRows& target = to.sources[s].*rows;
      for (int64_t page = 0; page < to.sources[s].page_count; ++page) {
        const uint8_t* source = (from.sources[s].*rows).pages[(page + shift) % filled];
        if (source != target.pages[page]) {
          CACHALOT_RETURN_IF_ERROR(memory.copy(
              target.pages[page], source, target.page_rows * target.row_bytes, nullptr));
        }
      }
    }
  }
  to.lookback = from.lookback;
  to.length = context;
  return {};
}

Result<StepBench> prepare_step(engine::Runtime& runtime,
                               model::StepRunner& runner,
                               const BenchFlags& flags,
                               int64_t batch,
                               int64_t context,
                               int64_t rows) {
  StepBench bench;
  for (int64_t i = 0; i < batch; ++i) {
    CACHALOT_TRY(std::unique_ptr<kvcache::SequenceCache> cache, runtime.make_cache());
    bench.caches.push_back(std::move(cache));
    kvcache::SequenceCache& first = *bench.caches[0];
    if (i == 0) {
      CACHALOT_RETURN_IF_ERROR(
          prefill(runtime, runner, flags, std::min(context, kComputedContext), first));
    }
    kvcache::SequenceCache& own = *bench.caches.back();
    CACHALOT_RETURN_IF_ERROR(own.reserve(context + rows));
    if (context > 0) {
      const ops::SequenceView from = first.view();
      CACHALOT_RETURN_IF_ERROR(repeat_rows(runtime, from, i, context, own.view()));
    }
    bench.tokens.push_back(
        random_tokens(rows, runtime.model().config.vocab_size, static_cast<uint64_t>(900 + i)));
  }
  for (size_t i = 0; i < bench.caches.size(); ++i) {
    bench.sequences.push_back({.view = &bench.caches[i]->view(), .tokens = bench.tokens[i]});
  }
  return bench;
}

// What machines reach, for the floors of a budget.
struct Rates {
  double bytes = 0;
  double flops = 0;  // 0: not measured
};

// One line per op: its time in a step, its share of all ops, and the floor that its bytes and flops
// set. Ops are timed apart, so on a device they add up to more than the step.
Status print_budget(engine::Runtime& runtime,
                    model::StepRunner& runner,
                    const StepBench& bench,
                    const Rates& rates,
                    const Measurement& step) {
  CACHALOT_TRY(const std::unique_ptr<ops::OpTimer> timer,
               ops::make_op_timer({.backend = runtime.options().backend}));
  struct Line {
    std::string name;
    int64_t calls = 0;
    ops::OpCost cost;
    std::vector<double> seconds;  // of every step
  };
  std::vector<Line> lines;  // in the order of the first call
  runner.set_timer(timer.get());
  for (size_t i = 0; i < kBudgetSteps; ++i) {
    const Status status = run_step(runner, bench.sequences);
    if (!status.ok()) {
      runner.set_timer(nullptr);
      return status;
    }
    CACHALOT_TRY(const std::vector<ops::OpRecord> records, timer->take());
    for (const ops::OpRecord& record : records) {
      auto line = std::find_if(
          lines.begin(), lines.end(), [&](const Line& l) { return l.name == record.name; });
      if (line == lines.end()) {
        line = lines.insert(lines.end(), {.name = record.name, .cost = {}, .seconds = {}});
      }
      line->seconds.resize(kBudgetSteps);
      line->seconds[i] += record.seconds;
      if (i == 0) {
        ++line->calls;
        line->cost.bytes += record.cost.bytes;
        line->cost.flops += record.cost.flops;
      }
    }
  }
  runner.set_timer(nullptr);
  double total = 0;
  for (const Line& line : lines) {
    total += median(line.seconds);
  }
  std::stable_sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) {
    return median(a.seconds) > median(b.seconds);
  });
  for (const Line& line : lines) {
    const double seconds = median(line.seconds);
    const double floor = std::max(line.cost.bytes / rates.bytes,
                                  rates.flops > 0 ? line.cost.flops / rates.flops : 0.0);
    JsonWriter w;
    w.begin_object()
        .field("name", step.name + " / " + line.name)
        .field("backend", step.backend)
        .field("shape", step.shape)
        .field("calls", line.calls)
        .field("median_s", seconds)
        .field("min_s", *std::min_element(line.seconds.begin(), line.seconds.end()))
        .field("max_s", *std::max_element(line.seconds.begin(), line.seconds.end()))
        .field("share", seconds / total)
        .field("bytes", line.cost.bytes)
        .field("flops", line.cost.flops)
        .field("gbps", line.cost.bytes / seconds / 1e9)
        .field("tflops", line.cost.flops / seconds / 1e12)
        .field("floor_s", floor)
        .field("fraction", floor / seconds)
        .end_object();
    std::fputs((w.text() + "\n").c_str(), stdout);
  }
  std::fflush(stdout);
  return {};
}

// `step` returns a Status or a Result.
template <class Step>
Status time_step(const BenchFlags& flags,
                 const Ceiling& ceiling,
                 const Step& step,
                 Measurement& m) {
  m.backend = flags.run.backend;
  CACHALOT_RETURN_IF_ERROR(step());
  for (int i = 0; i < flags.repeats; ++i) {
    CACHALOT_TRY(const double rate, ceiling());
    m.ceilings.push_back(rate);
    // Steps follow each other, as they do in use; the first finds the caches full of other data.
    const double begin = now_seconds();
    double seconds = 0;
    int steps = 0;
    while (steps == 0 || seconds < kRepeatSeconds) {
      CACHALOT_RETURN_IF_ERROR(step());
      ++steps;
      seconds = now_seconds() - begin;
    }
    m.seconds.push_back(seconds / steps);
  }
  return {};
}

// Multiply-adds per second on a host; a device's are not measured here.
double flop_rate(engine::Runtime& runtime) {
  return runtime.options().backend == ops::Backend::kCuda
             ? 0
             : 2 * ops::cpu::multiply_add_pass(runtime.threads());
}

// What one round of speculation costs: the drafts, and the target over all of them.
Status bench_round(engine::Runtime& runtime,
                   model::StepRunner& runner,
                   const BenchFlags& flags,
                   int64_t batch,
                   int64_t context,
                   const Ceiling& ceiling) {
  const model::Model& model = runtime.model();
  const int64_t block = model.config.dspark_block_size;
  const auto shape = [&](int64_t rows) {
    return fmt::format("batch {} context {} rows {}", batch, context, rows);
  };
  CACHALOT_TRY(const StepBench anchors, prepare_step(runtime, runner, flags, batch, context, 1));
  const std::vector<int32_t> previous(anchors.sequences.size(), 5);
  ExpertCounter draft_experts, experts;
  CACHALOT_RETURN_IF_ERROR(runner.draft(anchors.sequences, &draft_experts));
  Measurement draft;
  draft.name = "draft";
  draft.shape = shape(block);
  draft.bytes = static_cast<double>(draft_bytes(model) +
                                    draft_experts.experts() *
                                        expert_bytes(model.weights.draft.stages[0].moe.experts[0]));
  const auto run_draft = [&]() -> Status {
    CACHALOT_RETURN_IF_ERROR(runner.draft(anchors.sequences));
    for (int64_t k = 0; k < block; ++k) {
      CACHALOT_TRY(const model::DraftLogits next, runner.next_draft(previous));
      CACHALOT_RETURN_IF_ERROR(read_best(runner, next.logits));
    }
    return {};
  };
  CACHALOT_RETURN_IF_ERROR(time_step(flags, ceiling, run_draft, draft));
  print(draft);
  CACHALOT_TRY(StepBench rows, prepare_step(runtime, runner, flags, batch, context, block + 1));
  for (model::StepSequence& sequence : rows.sequences) {
    sequence.all_logits = true;
  }
  CACHALOT_RETURN_IF_ERROR(runner.run(rows.sequences, &experts));
  Measurement verify;
  verify.name = "verify";
  verify.shape = shape(block + 1);
  verify.bytes =
      static_cast<double>(dense_bytes(model) +
                          experts.experts() * expert_bytes(model.weights.layers[0].moe.experts[0]));
  CACHALOT_RETURN_IF_ERROR(
      time_step(flags, ceiling, [&] { return run_step(runner, rows.sequences); }, verify));
  print(verify);
  return {};
}

Status bench_decode(const BenchFlags& flags) {
  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.run));
  CACHALOT_TRY(const std::unique_ptr<model::StepRunner> runner, runtime->make_runner());
  CACHALOT_TRY(const Ceiling ceiling, read_ceiling(*runtime));
  const model::Model& model = runtime->model();
  for (const int64_t context : flags.context) {
    for (const int64_t batch : flags.batch) {
      CACHALOT_TRY(const StepBench bench,
                   prepare_step(*runtime, *runner, flags, batch, context, 1));
      ExpertCounter counter;
      CACHALOT_RETURN_IF_ERROR(runner->run(bench.sequences, &counter));
      Measurement m;
      m.name = "decode";
      m.shape = fmt::format("batch {} context {}", batch, context);
      m.bytes = static_cast<double>(dense_bytes(model) +
                                    counter.experts() *
                                        expert_bytes(model.weights.layers[0].moe.experts[0]));
      CACHALOT_RETURN_IF_ERROR(
          time_step(flags, ceiling, [&] { return run_step(*runner, bench.sequences); }, m));
      m.launches = runner->launches();
      print(m);
      const Rates rates{median(m.ceilings), flop_rate(*runtime)};
      CACHALOT_RETURN_IF_ERROR(print_budget(*runtime, *runner, bench, rates, m));
      if (!model.draft.empty()) {
        CACHALOT_RETURN_IF_ERROR(bench_round(*runtime, *runner, flags, batch, context, ceiling));
      }
    }
  }
  return {};
}

Status bench_prefill(const BenchFlags& flags) {
  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.run));
  CACHALOT_TRY(const std::unique_ptr<model::StepRunner> runner, runtime->make_runner());
  CACHALOT_TRY(const Ceiling reads, read_ceiling(*runtime));
  const bool on_device = runtime->options().backend == ops::Backend::kCuda;
  const Ceiling ceiling =
      on_device ? reads : Ceiling([&]() -> Result<double> { return flop_rate(*runtime); });
  for (const int64_t context : flags.context) {
    CACHALOT_TRY(const StepBench bench,
                 prepare_step(*runtime, *runner, flags, 1, context, flags.tokens));
    Measurement m;
    m.name = "prefill";
    m.shape = fmt::format("tokens {} context {}", flags.tokens, context);
    m.bytes = static_cast<double>(dense_bytes(runtime->model()));
    // Products with weights alone: attention and index scores come on top. Only one row has logits.
    const model::ModelConfig& config = runtime->model().config;
    const int64_t head = config.vocab_size * config.hidden_size;
    m.flops =
        2.0 * static_cast<double>(
                  (model::account(config).parameters.active_decode - head) * flags.tokens + head);
    m.bound_by_bytes = on_device;
    CACHALOT_RETURN_IF_ERROR(
        time_step(flags, ceiling, [&] { return run_step(*runner, bench.sequences); }, m));
    print(m);
    CACHALOT_TRY(const double bytes, reads());
    CACHALOT_RETURN_IF_ERROR(
        print_budget(*runtime, *runner, bench, {bytes, flop_rate(*runtime)}, m));
  }
  return {};
}

// Square images of random pixels through the image encoder.
Status bench_vision(const BenchFlags& flags) {
  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.run));
  const bool on_device = runtime->options().backend == ops::Backend::kCuda;
  ops::OpContext context{.backend = runtime->options().backend, .pool = &runtime->threads()};
  CACHALOT_TRY(const std::unique_ptr<ops::OpTimer> timer, ops::make_op_timer(context));
  context.timer = timer.get();
  CACHALOT_TRY(const model::VisionTower tower,
               model::VisionTower::create(runtime->model(), context, runtime->options().precision));
  CACHALOT_TRY(const Ceiling reads, read_ceiling(*runtime));
  const Ceiling ceiling =
      on_device ? reads : Ceiling([&]() -> Result<double> { return flop_rate(*runtime); });
  const model::VisionConfig& config = runtime->config().vision;
  for (const int64_t size : flags.size) {
    const model::ImageGrid grid{size / config.patch_size, size / config.patch_size};
    const int64_t n = grid.rows * grid.columns, width = 3 * config.patch_size * config.patch_size;
    std::vector<float> pixels(static_cast<size_t>(n * width));
    const Philox rng(1);
    for (size_t i = 0; i < pixels.size(); ++i) {
      pixels[i] = static_cast<float>(2 * rng.uniform(i) - 1);
    }
    int64_t images = 0;
    const auto encode = [&]() -> Status {
      ++images;
      CACHALOT_TRY(const model::ImageRows rows,
                   tower.encode({pixels.data(), DType::kF32, {n, width}}, grid));
      return {};
    };
    Measurement m;
    m.name = "vision";
    m.shape = fmt::format("patches {} blocks {}", n, config.num_hidden_layers);
    m.bound_by_bytes = on_device;
    CACHALOT_RETURN_IF_ERROR(time_step(flags, ceiling, encode, m));
    CACHALOT_TRY(const std::vector<ops::OpRecord> records, timer->take());
    for (const ops::OpRecord& record : records) {
      m.bytes += record.cost.bytes / static_cast<double>(images);
      m.flops += record.cost.flops / static_cast<double>(images);
    }
    print(m);
  }
  return {};
}

// Random weights of one format, as the checkpoint would hold them.
struct RandomWeight {
  std::vector<uint8_t> values, scales;
  ops::Weight weight;
};

RandomWeight random_weight(ops::WeightFormat format, int64_t out, int64_t in, uint64_t seed) {
  RandomWeight r;
  const Philox rng(seed);
  const bool fp4 = format == ops::WeightFormat::kFp4Row;
  const int64_t bytes = format == ops::WeightFormat::kBF16 ? out * in * 2
                        : fp4                              ? out * in / 2
                                                           : out * in;
  r.values.resize(static_cast<size_t>(bytes));
  for (size_t i = 0; i < r.values.size(); ++i) {
    const auto word = rng.words(i)[0];
    // FP8 codes below NaN; BF16 high bytes near 1 so that products stay finite.
    r.values[i] = static_cast<uint8_t>(word);
    if (format == ops::WeightFormat::kFp8Block && (word & 0x7F) == 0x7F) {
      r.values[i] ^= 1;
    }
    if (format == ops::WeightFormat::kBF16 && i % 2 == 1) {
      r.values[i] = static_cast<uint8_t>((word & 0x80) | 0x3C);
    }
  }
  r.weight = {.format = format, .out = out, .in = in};
  const DType dtype = format == ops::WeightFormat::kBF16 ? DType::kBF16
                      : fp4                              ? DType::kI8
                                                         : DType::kF8E4M3;
  r.weight.values = TensorView(r.values.data(), dtype, {out, fp4 ? in / 2 : in});
  if (format != ops::WeightFormat::kBF16) {
    const int64_t rows = fp4 ? out : quant::blocks(out, 32);
    r.scales.assign(static_cast<size_t>(rows * quant::blocks(in, 32)), 120);
    r.weight.scales = TensorView(r.scales.data(), DType::kF8E8M0, {rows, quant::blocks(in, 32)});
  }
  return r;
}

// Linears over rotating weights: more bytes than any cache holds.
Status bench_ops(const BenchFlags& flags) {
  if (flags.run.backend == "cuda") {
    return error(Code::kUnimplemented, "bench ops measures the host backends, ref and cpu");
  }
  ThreadPool pool(flags.run.threads);
  Arena scratch;
  ops::OpContext context{
      .backend = flags.run.backend == "ref" ? ops::Backend::kRef : ops::Backend::kCpu,
      .pool = &pool,
      .scratch = &scratch};
  ops::cpu::ReadMeter reads(pool);
  constexpr int64_t kOut = 2048, kIn = 2048;
  constexpr int64_t kRotate = int64_t{256} << 20;
  struct Format {
    const char* name;
    ops::WeightFormat format;
  };
  for (const Format& f : {Format{"bf16", ops::WeightFormat::kBF16},
                          Format{"fp8", ops::WeightFormat::kFp8Block},
                          Format{"fp4", ops::WeightFormat::kFp4Row}}) {
    std::vector<RandomWeight> weights;
    for (int64_t total = 0; total < kRotate;) {
      weights.push_back(random_weight(f.format, kOut, kIn, weights.size()));
      total += ops::weight_bytes(weights.back().weight);
    }
    for (int64_t t : {int64_t{1}, int64_t{4}, int64_t{64}, int64_t{512}}) {
      std::vector<bf16> x(static_cast<size_t>(t * kIn)), y(static_cast<size_t>(t * kOut));
      const Philox rng(7);
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = bf16(static_cast<float>(rng.normal(i)));
      }
      // A pass over all weights for few rows, a single product for many.
      const size_t per_repeat = t <= 4 ? weights.size() : 1;
      Measurement m{.name = fmt::format("linear {}", f.name),
                    .backend = flags.run.backend,
                    .shape = fmt::format("T {} in {} out {}", t, kIn, kOut)};
      m.bound_by_bytes = t <= 4;
      for (int repeat = 0; repeat < flags.repeats; ++repeat) {
        m.ceilings.push_back(m.bound_by_bytes ? reads.pass()
                                              : 2 * ops::cpu::multiply_add_pass(pool));
        const double begin = now_seconds();
        for (size_t i = 0; i < per_repeat; ++i) {
          const size_t w = (static_cast<size_t>(repeat) + i) % weights.size();
          const ops::LinearTarget target{&weights[w].weight,
                                         TensorView(y.data(), DType::kBF16, {t, kOut})};
          CACHALOT_RETURN_IF_ERROR(ops::linear(
              context,
              {.x = TensorView(x.data(), DType::kBF16, {t, kIn}), .targets = {&target, 1}}));
        }
        m.seconds.push_back((now_seconds() - begin) / static_cast<double>(per_repeat));
      }
      m.bytes = static_cast<double>(ops::weight_bytes(weights[0].weight));
      m.flops = 2.0 * static_cast<double>(t * kIn * kOut);
      print(m);
    }
  }
  return {};
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand("bench", "Speed against measured limits, as JSON lines");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* text, Status (*body)(const BenchFlags&)) {
    CLI::App* sub = command->add_subcommand(name, text);
    flags->run.add_to(*sub);
    sub->add_option("--repeats", flags->repeats, "Timed runs")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    sub->callback([flags, &action, body] { action = [flags, body] { return body(*flags); }; });
    return sub;
  };
  add("ops", "Linears of every weight format at decode and prefill sizes", bench_ops);
  CLI::App* decode =
      add("decode", "One decode step; bytes of weights read against read bandwidth", bench_decode);
  decode->add_option("--batch", flags->batch, "Sequences; several: one measurement each")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  decode->add_option("--context", flags->context, "Tokens before the step; likewise")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str();
  CLI::App* prefill =
      add("prefill", "One prefill step; multiply-adds against the peak rate", bench_prefill);
  prefill->add_option("--tokens", flags->tokens, "Tokens of the step")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  prefill->add_option("--context", flags->context, "Tokens before the step; several: one each")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str();
  CLI::App* vision = add("vision", "The image encoder over square images; likewise", bench_vision);
  vision->add_option("--size", flags->size, "Width in pixels; several: one measurement each")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  add_bench_serve(*command, action);
  add_bench_speculation(*command, action);
}

}  // namespace cachalot::cli
