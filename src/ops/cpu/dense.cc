// The ops of the image encoder, whose rows are the thousands of patches of one image.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/product.h"

namespace cachalot::ops::cpu {
namespace {

// Rows per pass: their FP32 products need not lie in memory for a whole image.
constexpr int64_t kDenseRows = 8 * kTileRows;
// Query rows of a head that meet its keys together: they and their outputs stay in L1 and L2.
constexpr int64_t kQueryRows = 64;

uint8_t* at(const TensorView& view, int64_t element) {
  return static_cast<uint8_t*>(view.data) + element * dtype_bytes(view.dtype);
}

void gelu(float* row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    row[i] = 0.5f * row[i] * std::erfc(-row[i] / std::numbers::sqrt2_v<float>);
  }
}

void add(const float* values, int64_t n, float* row) {
  for (int64_t i = 0; i < n; ++i) {
    row[i] += values[i];
  }
}

// Rows [first, first + rows) of y.
void dense_rows(OpContext& ctx, const DenseArgs& args, int64_t first, int64_t rows) {
  const int64_t out = args.weight.out, width = args.y.dim(1);
  const DType act = args.x.dtype;
  Scratch scratch(ctx);
  const TensorView x = args.x.rows(first, rows);
  InputRows inputs(ctx, scratch, x, 1, false);
  float* products = scratch.array<float>(rows * out);
  const std::array<Product, 1> product = {
      Product{&args.weight, inputs.get(args.weight), {products, DType::kF32, {rows, out}}}};
  run_products(ctx, product);
  float* bias = scratch.array<float>(padded(out));
  if (!args.bias.empty()) {
    load_row(args.bias.data, args.bias.dtype, out, bias);
  }
  const int64_t floats = padded(out) + padded(width);
  parallel_rows(ctx, scratch, rows, floats, [&](int64_t begin, int64_t end, float* row) {
    float* other = row + padded(out);
    for (int64_t r = begin; r < end; ++r) {
      load_row(products + r * out, DType::kF32, out, row);
      if (!args.bias.empty()) {
        add(bias, out, row);
      }
      if (args.function == DenseFunction::kSwiglu) {
        silu_product_row(row, row + width, width, act, row);
      } else {
        round_row(row, width, act);
      }
      if (args.function == DenseFunction::kGelu) {
        gelu(row, width);
        round_row(row, width, act);
      }
      if (!args.residual.empty()) {
        load_row(at(args.residual, (first + r) * width), act, width, other);
        add(other, width, row);
      }
      store_row(row, width, at(args.y, (first + r) * width), act);
    }
  });
}

}  // namespace

Status dense(OpContext& ctx, const DenseArgs& args) {
  const int64_t n = args.x.dim(0);
  for (int64_t first = 0; first < n; first += kDenseRows) {
    dense_rows(ctx, args, first, std::min(kDenseRows, n - first));
  }
  return {};
}

// Head by head, so that all threads read the same keys and values.
Status dense_attend(OpContext& ctx, const DenseAttendArgs& args) {
  const int64_t n = args.o.dim(0), width = args.o.dim(1), k = width / args.heads, half = k / 2;
  const int64_t depth = padded(k);
  const DType act = args.o.dtype;
  Scratch scratch(ctx);
  std::array<float*, 3> parts;  // q, k and v of the head, [N, depth]
  for (float*& part : parts) {
    part = scratch.array<float>(n * depth);
  }
  auto* keys = scratch.array<const float*>(n);
  auto* values = scratch.array<const float*>(n);
  for (int64_t row = 0; row < n; ++row) {
    keys[row] = parts[1] + row * depth;
    values[row] = parts[2] + row * depth;
  }
  const std::vector<float> no_sink(kQueryRows, -std::numeric_limits<float>::infinity());
  for (int64_t head = 0; head < args.heads; ++head) {
    Scratch of_head(ctx);
    parallel_rows(ctx, of_head, n, depth, [&](int64_t begin, int64_t end, float* halves) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t part = 0; part < 3; ++part) {
          const uint8_t* source = at(args.qkv, (row * 3 + part) * width + head * k);
          float* to = parts[static_cast<size_t>(part)] + row * depth;
          load_row(source, act, k, to);
          if (part == 2) {
            continue;
          }
          // Pairs side by side, as rotate_row() turns them: q and k change their order alike.
          std::copy_n(to, k, halves);
          for (int64_t i = 0; i < half; ++i) {
            to[2 * i] = halves[i];
            to[2 * i + 1] = halves[half + i];
          }
          rotate_row(to, k, args.rope.as<float>() + row * k, half, 1.0f);
          round_row(to, k, act);
        }
      }
    });
    const int64_t floats = kQueryRows * depth + attend_work_floats(kQueryRows);
    parallel_rows(
        ctx, of_head, ceil_div(n, kQueryRows), floats, [&](int64_t begin, int64_t end, float* o) {
          for (int64_t block = begin; block < end; ++block) {
            const int64_t first = block * kQueryRows, rows = std::min(kQueryRows, n - first);
            const HeadGroup group = {parts[0] + first * depth, no_sink.data(), rows, k, act};
            attend_heads(group, keys, values, n, o, o + kQueryRows * depth);
            for (int64_t r = 0; r < rows; ++r) {
              store_row(o + r * depth, k, at(args.o, (first + r) * width + head * k), act);
            }
          }
        });
  }
  return {};
}

}  // namespace cachalot::ops::cpu
