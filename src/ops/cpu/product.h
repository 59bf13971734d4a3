// Matrix products over all threads: prepares input rows and splits outputs and rows into tasks.
#pragma once

#include <array>
#include <span>

#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"

namespace cachalot::ops::cpu {

// x [T, groups * in] as FP32 rows in the forms that weights ask for, made on first use.
class InputRows {
 public:
  InputRows(OpContext& ctx, Scratch& scratch, const TensorView& x, int64_t groups, bool quantize)
      : ctx_(ctx), scratch_(scratch), x_(x), groups_(groups), quantize_(quantize) {}

  // The rows for `weight`: group g of row t starts at row(t) + g * padded(in).
  RowSet get(const Weight& weight);

 private:
  struct Form {
    bool quantized;
    RowOrder order;
    RowSet rows;
  };
  OpContext& ctx_;
  Scratch& scratch_;
  const TensorView& x_;
  int64_t groups_;
  bool quantize_;
  std::array<Form, 6> forms_{};
  size_t count_ = 0;
};

// y = x W^T, rounded to y's dtype; rows are those of y.
struct Product {
  const Weight* weight = nullptr;
  RowSet x;
  TensorView y;  // [T, out]
  int64_t groups = 1;
};
void run_products(OpContext& ctx, std::span<const Product> products);

}  // namespace cachalot::ops::cpu
