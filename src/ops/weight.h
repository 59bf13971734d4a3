// A weight matrix in the storage that the checkpoint gives it.
#pragma once

#include "tensor/tensor.h"

namespace cachalot::ops {

enum class WeightFormat : uint8_t {
  kF32,
  kBF16,
  kFp8Block,  // E4M3 [out, in], one E8M0 scale per 32 x 32 tile: W = code * scale
  kFp8Row,    // E4M3 [rows, width], one E8M0 scale per row and 32 columns (Engram tables)
  kFp4Row,    // packed E2M1 [out, in / 2], one E8M0 scale per row and 32 columns
};

struct Weight {
  TensorView values;  // see WeightFormat
  TensorView scales;  // e8m0; empty for kF32 and kBF16
  WeightFormat format = WeightFormat::kBF16;
  int64_t out = 0;
  int64_t in = 0;

  bool empty() const { return values.empty(); }
  // A linear quantizes its input to FP8 blocks if its weight is stored in a block format.
  bool quantizes_input() const {
    return format == WeightFormat::kFp8Block || format == WeightFormat::kFp4Row;
  }
};

}  // namespace cachalot::ops
