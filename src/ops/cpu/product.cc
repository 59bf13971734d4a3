#include "ops/cpu/product.h"

#include <vector>

namespace cachalot::ops::cpu {
namespace {

// Bytes of weights per task in decode: short enough to balance. A thread claims several tasks in a
// row, so that it streams for longer.
constexpr int64_t kDecodeTaskBytes = 16 << 10;
constexpr int64_t kDecodeTaskOutputs = 256;
constexpr int64_t kTasksPerThread = 3;
constexpr int64_t kLeastRowChunk = 16;

// The tasks of one product: tiles of outputs (inside a group) x chunks of rows.
struct Split {
  int64_t tile = 0;       // outputs per task
  int64_t tiles = 0;      // per group
  int64_t row_chunk = 0;  // rows per task
  int64_t row_chunks = 0;
  int64_t group_outputs = 0;
  int64_t tasks = 0;
};

Split split(const Product& product, int64_t rows, int64_t threads) {
  Split s;
  s.group_outputs = product.weight->out / product.groups;
  if (rows <= kDecodeRows) {
    const int64_t row_bytes = std::max<int64_t>(
        1, product.weight->values.bytes() / std::max<int64_t>(1, product.weight->out));
    s.tile = std::clamp<int64_t>(kDecodeTaskBytes / row_bytes / 4 * 4, 4, kDecodeTaskOutputs);
    s.row_chunk = rows;
  } else {
    // Weights are decoded once per chunk of rows, and rows pass once per tile of outputs: both
    // shrink only as far as all threads need it.
    int64_t chunks = ceil_div(rows, kTileRows);
    const int64_t wanted = kTasksPerThread * threads;
    s.tile = kTileOutputs;
    while (s.tile > kPanelOutputs &&
           ceil_div(s.group_outputs, s.tile) * product.groups * chunks < wanted) {
      s.tile /= 2;
    }
    const int64_t columns = ceil_div(s.group_outputs, s.tile) * product.groups;
    chunks = std::max(chunks, ceil_div(wanted, columns));
    s.row_chunk = std::max(ceil_div(ceil_div(rows, chunks), 4) * 4, kLeastRowChunk);
  }
  s.tiles = ceil_div(s.group_outputs, s.tile);
  s.row_chunks = ceil_div(rows, s.row_chunk);
  s.tasks = s.tiles * product.groups * s.row_chunks;
  return s;
}

void run_task(const Product& product, const Split& s, int64_t task, int64_t rows) {
  const int64_t first_row = task % s.row_chunks * s.row_chunk;
  const int64_t tile = task / s.row_chunks % s.tiles;
  const int64_t group = task / s.row_chunks / s.tiles;
  const int64_t n_rows = std::min(s.row_chunk, rows - first_row);
  const int64_t begin = group * s.group_outputs + tile * s.tile;
  const int64_t count = std::min(s.tile, s.group_outputs - tile * s.tile);
  RowSet x = product.x;
  x.base += first_row * x.stride + group * padded(product.weight->in);
  constexpr int64_t kMost = std::max(kDecodeTaskOutputs * kDecodeRows, kTileOutputs * kTileRows);
  alignas(64) float result[kMost];
  weight_dots(*product.weight, begin, count, x, n_rows, result, count);
  const int64_t out = product.weight->out, width = dtype_bytes(product.y.dtype);
  for (int64_t r = 0; r < n_rows; ++r) {
    uint8_t* target =
        static_cast<uint8_t*>(product.y.data) + ((first_row + r) * out + begin) * width;
    store_row(result + r * count, count, target, product.y.dtype);
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

void run_products(OpContext& ctx, std::span<const Product> products, int64_t rows) {
  std::vector<Split> splits;
  int64_t tasks = 0;
  for (const Product& product : products) {
    splits.push_back(split(product, rows, thread_count(ctx)));
    tasks += splits.back().tasks;
  }
  parallel_tasks(ctx, tasks, [&](int64_t task) {
    size_t i = 0;
    while (task >= splits[i].tasks) {
      task -= splits[i++].tasks;
    }
    run_task(products[i], splits[i], task, rows);
  });
}

}  // namespace cachalot::ops::cpu
