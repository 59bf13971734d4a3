// Routed and shared experts.
//
// Rows are grouped by expert. Phase 1, tasks of (expert, tile of F, chunk of rows): gate and up
// products, SwiGLU, the FP8 rounding of h; h lies in the order that w2 wants. Phase 2, tasks of
// tiles of D: every expert's w2 product in ascending order, summed per row in FP32, then the shared
// expert, then one rounding. A weight is read once per phase whatever the number of its rows (up to
// kRowChunk).
//
// With so few rows that reading the weights is what takes the time, each product is one of its own
// (product.h), which reads its weight in long streams; sums run in the same order.
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/product.h"

namespace cachalot::ops::cpu {
namespace {

// At most: whole FP8 blocks of h and whole panels of outputs.
constexpr int64_t kHiddenTile = 96;
static_assert(kHiddenTile % 32 == 0 && kHiddenTile % kTileOutputs == 0);
constexpr int64_t kRowChunk = kTileRows;
// Tasks per thread that the tiles are cut for, as far as few rows need it.
constexpr int64_t kHiddenTasks = 24;
constexpr int64_t kOutputTasks = 8;
// Outputs whose sums over the experts are worth another thread.
constexpr int64_t kSumGrain = 512;
constexpr int64_t kOutputFloats = kRowChunk * kHiddenTile;  // of a tile of a chunk of rows

// One expert with its rows.
struct Job {
  const ExpertView* expert = nullptr;
  const int32_t* rows = nullptr;   // of x and y; null: all rows in order
  const float* weights = nullptr;  // per row; null: 1
  int64_t count = 0;
  float* hidden = nullptr;  // [count, row_stride(F)]
  int64_t first_task = 0;
};

struct Grouping {
  std::vector<int32_t> rows;   // [T * k], by expert
  std::vector<float> weights;  // [T * k]
  std::vector<int64_t> begin;  // [E + 1]
};

Grouping group_rows(const ExpertsArgs& args) {
  const int64_t t = args.x.dim(0), k = args.experts.dim(1);
  const auto* expert = args.experts.as<int32_t>();
  const float* weight = args.weights.as<float>();
  Grouping g;
  g.rows.resize(static_cast<size_t>(t * k));
  g.weights.resize(static_cast<size_t>(t * k));
  g.begin.assign(args.routed.size() + 1, 0);
  for (int64_t i = 0; i < t * k; ++i) {
    ++g.begin[static_cast<size_t>(expert[i]) + 1];
  }
  for (size_t e = 0; e < args.routed.size(); ++e) {
    g.begin[e + 1] += g.begin[e];
  }
  std::vector<int64_t> next(g.begin.begin(), g.begin.end() - 1);
  for (int64_t i = 0; i < t * k; ++i) {
    const auto at = static_cast<size_t>(next[static_cast<size_t>(expert[i])]++);
    g.rows[at] = static_cast<int32_t>(i / k);
    g.weights[at] = weight[i];
  }
  return g;
}

// h of the hidden channels [begin, begin + count) of one row of an expert, from their gate and up.
void finish_hidden(const Job& job,
                   int64_t row,
                   const float* gate,
                   const float* up,
                   int64_t begin,
                   int64_t count,
                   float limit,
                   DType act) {
  const Weight& w2 = job.expert->w2;
  float* h = job.hidden + row * row_stride(job.expert->w1.out) + begin;
  swiglu_row(gate, up, count, limit, job.weights == nullptr ? 1.0f : job.weights[row], act, h);
  std::fill(h + count, h + padded(count), 0.0f);
  if (act == DType::kBF16 && w2.quantizes_input()) {
    fp8_round_row(h, count);
  }
  arrange_row(h, count, row_order(w2.format));
}

// h of the hidden channels [begin, begin + count) of one expert for a chunk of its rows, from
// `first` on.
void hidden_tile(const Job& job,
                 const RowSet& x1,
                 const RowSet& x3,
                 int64_t first,
                 int64_t begin,
                 int64_t count,
                 float limit,
                 DType act) {
  alignas(64) float gate[kRowChunk * kHiddenTile];
  alignas(64) float up[kRowChunk * kHiddenTile];
  const int64_t rows = std::min(kRowChunk, job.count - first);
  const auto part = [&](RowSet x) {
    if (job.rows == nullptr) {
      x.base += first * x.stride;
    } else {
      x.index = job.rows + first;
    }
    return x;
  };
  weight_dots(job.expert->w1, begin, count, part(x1), rows, gate, kHiddenTile);
  weight_dots(job.expert->w3, begin, count, part(x3), rows, up, kHiddenTile);
  for (int64_t r = 0; r < rows; ++r) {
    finish_hidden(
        job, first + r, gate + r * kHiddenTile, up + r * kHiddenTile, begin, count, limit, act);
  }
}

// Adds one expert's outputs [begin, begin + count) to its rows of sum [T, count].
void add_outputs(const Job& job, int64_t begin, int64_t count, DType act, float* sum) {
  alignas(64) float y[kOutputFloats];
  const int64_t stride = row_stride(job.expert->w1.out);
  for (int64_t first = 0; first < job.count; first += kRowChunk) {
    const int64_t rows = std::min(kRowChunk, job.count - first);
    const RowSet h = {job.hidden + first * stride, stride};
    weight_dots(job.expert->w2, begin, count, h, rows, y, count);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = job.rows == nullptr ? first + r : job.rows[first + r];
      add_rounded(y + r * count, count, act, sum + row * count);
    }
  }
}

// y of at most kDecodeRows rows.
void few_rows(OpContext& ctx,
              Scratch& scratch,
              InputRows& inputs,
              const std::vector<Job>& jobs,
              const ExpertsArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1);
  const DType act = args.x.dtype;
  std::vector<Product> in, out;  // per job: w1 and w3; w2
  for (const Job& job : jobs) {
    for (const Weight* weight : {&job.expert->w1, &job.expert->w3}) {
      RowSet x = inputs.get(*weight);
      x.index = job.rows;
      float* y = scratch.array<float>(job.count * weight->out);
      in.push_back({weight, x, {y, DType::kF32, {job.count, weight->out}}});
    }
    const RowSet h = {job.hidden, row_stride(job.expert->w1.out)};
    float* y = scratch.array<float>(job.count * d);
    out.push_back({&job.expert->w2, h, {y, DType::kF32, {job.count, d}}});
  }
  run_products(ctx, in);
  parallel_for(ctx, static_cast<int64_t>(jobs.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Job& job = jobs[static_cast<size_t>(i)];
      const auto at = static_cast<size_t>(2 * i);
      const int64_t f = job.expert->w1.out;
      for (int64_t row = 0; row < job.count; ++row) {
        const float* gate = in[at].y.as<float>() + row * f;
        const float* up = in[at + 1].y.as<float>() + row * f;
        finish_hidden(job, row, gate, up, 0, f, args.limit, act);
      }
    }
  });
  run_products(ctx, out);
  float* sum = scratch.array<float>(t * d);
  parallel_for(ctx, d, kSumGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < t; ++row) {
      std::fill(sum + row * d + begin, sum + row * d + end, 0.0f);
    }
    for (size_t i = 0; i < jobs.size(); ++i) {
      for (int64_t r = 0; r < jobs[i].count; ++r) {
        const int64_t row = jobs[i].rows == nullptr ? r : jobs[i].rows[r];
        const float* y = out[i].y.as<float>() + r * d + begin;
        add_rounded(y, end - begin, act, sum + row * d + begin);
      }
    }
    const int64_t width = dtype_bytes(act);
    for (int64_t row = 0; row < t; ++row) {
      auto* y = static_cast<uint8_t*>(args.y.data) + (row * d + begin) * width;
      store_row(sum + row * d + begin, end - begin, y, act);
    }
  });
}

}  // namespace

Status experts(OpContext& ctx, const ExpertsArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1);
  const DType act = args.x.dtype;
  Scratch scratch(ctx);
  const Grouping grouping = group_rows(args);
  std::vector<Job> jobs;
  for (size_t e = 0; e < args.routed.size(); ++e) {
    const int64_t begin = grouping.begin[e], count = grouping.begin[e + 1] - begin;
    if (count > 0) {
      jobs.push_back(
          {&args.routed[e], grouping.rows.data() + begin, grouping.weights.data() + begin, count});
    }
  }
  for (const ExpertView& shared : args.shared) {
    jobs.push_back({&shared, nullptr, nullptr, t});
  }

  for (Job& job : jobs) {
    job.hidden = scratch.array<float>(job.count * row_stride(job.expert->w1.out));
  }

  InputRows inputs(ctx, scratch, args.x, 1, true);
  if (t <= kDecodeRows) {
    few_rows(ctx, scratch, inputs, jobs, args);
    return {};
  }
  std::vector<std::array<RowSet, 2>> x;
  int64_t channels = 0, tasks = 0;
  for (const Job& job : jobs) {
    channels += job.expert->w1.out;
  }
  const int64_t hidden =
      std::clamp<int64_t>(channels / (kHiddenTasks * thread_count(ctx)) / 32 * 32, 32, kHiddenTile);
  for (Job& job : jobs) {
    x.push_back({inputs.get(job.expert->w1), inputs.get(job.expert->w3)});
    job.first_task = tasks;
    tasks += ceil_div(job.expert->w1.out, hidden) * ceil_div(job.count, kRowChunk);
  }
  parallel_tasks(ctx, tasks, [&](int64_t task) {
    const auto after =
        std::upper_bound(jobs.begin(), jobs.end(), task, [](int64_t value, const Job& job) {
          return value < job.first_task;
        });
    const auto index = static_cast<size_t>(after - jobs.begin() - 1);
    const Job& job = jobs[index];
    const int64_t chunks = ceil_div(job.count, kRowChunk);
    const int64_t first = (task - job.first_task) % chunks * kRowChunk;
    const int64_t begin = (task - job.first_task) / chunks * hidden;
    const int64_t count = std::min(hidden, job.expert->w1.out - begin);
    hidden_tile(job, x[index][0], x[index][1], first, begin, count, args.limit, act);
  });

  // Small enough that all threads have work, in whole panels or register tiles.
  const int64_t share =
      ceil_div(d, kOutputTasks * thread_count(ctx) * kPanelOutputs) * kPanelOutputs;
  const int64_t tile =
      std::clamp(share, kPanelOutputs, kOutputFloats / std::clamp<int64_t>(t, 1, kRowChunk));
  // A thread's sums lie together: rows of y are often a power of two apart, which share few sets of
  // the caches.
  parallel_rows(
      ctx, scratch, ceil_div(d, tile), t * tile, [&](int64_t first, int64_t last, float* sum) {
        const int64_t width = dtype_bytes(act);
        for (int64_t begin = first * tile; begin < std::min(d, last * tile); begin += tile) {
          const int64_t count = std::min(tile, d - begin);
          std::fill_n(sum, t * count, 0.0f);
          for (const Job& job : jobs) {
            add_outputs(job, begin, count, act, sum);
          }
          for (int64_t row = 0; row < t; ++row) {
            auto* y = static_cast<uint8_t*>(args.y.data) + (row * d + begin) * width;
            store_row(sum + row * count, count, y, act);
          }
        }
      });
  return {};
}

}  // namespace cachalot::ops::cpu
