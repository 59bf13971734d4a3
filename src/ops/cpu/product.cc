#include "ops/cpu/product.h"

#include <vector>

namespace cachalot::ops::cpu {
namespace {

// Bytes of weights per task in decode: short enough to balance. A thread claims several tasks in a
// row, so that it streams for longer.
constexpr int64_t kDecodeTaskBytes = 64 << 10;
constexpr int64_t kDecodeTaskOutputs = 256;
constexpr int64_t kTasksPerThread = 3;
constexpr int64_t kLeastRowChunk = 16;

// The tasks of one product: tiles of outputs (inside a group) x chunks of rows. With few rows, a
// tile is `runs` runs of outputs in equal parts of the group: memory delivers the most when it is
// read as few long streams, pages apart, that go on from task to task.
struct Split {
  int64_t rows = 0;
  int64_t runs = 1;
  int64_t part = 0;       // outputs per part
  int64_t tile = 0;       // outputs per task and run
  int64_t tiles = 0;      // per group
  int64_t row_chunk = 0;  // rows per task
  int64_t row_chunks = 0;
  int64_t tasks = 0;
};

Split split(const Product& product, int64_t threads) {
  Split s;
  s.rows = product.y.dim(0);
  const int64_t outputs = product.weight->out / product.groups;
  if (s.rows <= kDecodeRows) {
    const int64_t row_bytes = std::max<int64_t>(
        1, product.weight->values.bytes() / std::max<int64_t>(1, product.weight->out));
    s.runs = outputs % kStreams == 0 ? kStreams : 1;
    s.tile = std::clamp<int64_t>(kDecodeTaskBytes / row_bytes, kStreams, kDecodeTaskOutputs) /
             kStreams * (kStreams / s.runs);
    s.row_chunk = s.rows;
  } else {
    // Weights are decoded once per chunk of rows, and rows pass once per tile of outputs: both
    // shrink only as far as all threads need it.
    int64_t chunks = ceil_div(s.rows, kTileRows);
    const int64_t wanted = kTasksPerThread * threads;
    s.tile = kTileOutputs;
    while (s.tile > kPanelOutputs && ceil_div(outputs, s.tile) * product.groups * chunks < wanted) {
      s.tile /= 2;
    }
    const int64_t columns = ceil_div(outputs, s.tile) * product.groups;
    chunks = std::max(chunks, ceil_div(wanted, columns));
    s.row_chunk = std::max(ceil_div(ceil_div(s.rows, chunks), 4) * 4, kLeastRowChunk);
  }
  s.part = outputs / s.runs;
  s.tiles = ceil_div(s.part, s.tile);
  s.row_chunks = ceil_div(s.rows, s.row_chunk);
  s.tasks = s.tiles * product.groups * s.row_chunks;
  return s;
}

void run_task(const Product& product, const Split& s, int64_t task) {
  const int64_t first_row = task % s.row_chunks * s.row_chunk;
  const int64_t tile = task / s.row_chunks % s.tiles;
  const int64_t group = task / s.row_chunks / s.tiles;
  const int64_t n_rows = std::min(s.row_chunk, s.rows - first_row);
  const int64_t begin = group * s.runs * s.part + tile * s.tile;
  const int64_t count = std::min(s.tile, s.part - tile * s.tile);
  RowSet x = product.x;
  x.base += group * padded(product.weight->in);
  if (x.index == nullptr) {
    x.base += first_row * x.stride;
  } else {
    x.index += first_row;
  }
  constexpr int64_t kMost = std::max(kDecodeTaskOutputs * kDecodeRows, kTileOutputs * kTileRows);
  alignas(64) float result[kMost];
  const int64_t ld = s.runs * count;
  if (s.runs == 1) {
    weight_dots(*product.weight, begin, count, x, n_rows, result, ld);
  } else {
    weight_streams(*product.weight, begin, s.part, count, x, n_rows, result, ld);
  }
  const int64_t out = product.weight->out, width = dtype_bytes(product.y.dtype);
  for (int64_t r = 0; r < n_rows; ++r) {
    auto* row = static_cast<uint8_t*>(product.y.data) + ((first_row + r) * out + begin) * width;
    for (int64_t run = 0; run < s.runs; ++run) {
      store_row(result + r * ld + run * count, count, row + run * s.part * width, product.y.dtype);
    }
  }
}

}  // namespace

RowSet InputRows::get(const Weight& weight) {
  const bool quantized = quantize_ && x_.dtype == DType::kBF16 && weight.quantizes_input();
  const RowOrder order = row_order(weight.format);
  for (size_t i = 0; i < count_; ++i) {
    if (forms_[i].quantized == quantized && forms_[i].order == order) {
      return forms_[i].rows;
    }
  }
  const int64_t t = x_.dim(0), in = x_.dim(1) / groups_;
  const int64_t stride = row_stride(groups_ * padded(in));
  float* base = scratch_.array<float>(t * stride);
  const int64_t width = dtype_bytes(x_.dtype);
  parallel_for(ctx_, t * groups_, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = base + i / groups_ * stride + i % groups_ * padded(in);
      load_row(static_cast<const uint8_t*>(x_.data) + i * in * width, x_.dtype, in, row);
      if (quantized) {
        fp8_round_row(row, in);
      }
      arrange_row(row, in, order);
    }
  });
  forms_[count_] = {quantized, order, {base, stride, nullptr}};
  return forms_[count_++].rows;
}

void run_products(OpContext& ctx, std::span<const Product> products) {
  std::vector<Split> splits;
  int64_t tasks = 0;
  for (const Product& product : products) {
    splits.push_back(split(product, thread_count(ctx)));
    tasks += splits.back().tasks;
  }
  parallel_tasks(ctx, tasks, [&](int64_t task) {
    size_t i = 0;
    while (task >= splits[i].tasks) {
      task -= splits[i++].tasks;
    }
    run_task(products[i], splits[i], task);
  });
}

}  // namespace cachalot::ops::cpu
