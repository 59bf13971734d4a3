// Inputs of the tensor-core linears: rows in the column order of the weight format, quantized to
// FP8 blocks and back where the model does so.
#pragma once

#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {

// out = x [rows, width] (act BF16, width a multiple of 256) in `layout`; with `quantize`, each
// block of 32 columns as it reads back from FP8.
Status prepare_input(const OpContext& ctx,
                     const Bf16* x,
                     int64_t rows,
                     int64_t width,
                     InputLayout layout,
                     bool quantize,
                     Bf16* out);

// The same as images (device/gemm.cuh) of tiles of `tile` rows, a multiple of eight: those of the
// first `in` columns, then those of the next, ... Group g and tile t begin at row g
// image_rows(rows) + t tile of out [groups * image_rows(rows), in].
Status prepare_image(const OpContext& ctx,
                     const Bf16* x,
                     int64_t rows,
                     int64_t width,
                     int64_t in,
                     int tile,
                     InputLayout layout,
                     bool quantize,
                     Bf16* out);

// x quantized in both layouts: fp4 for FP4 weights and, unless it is null, fp8 for FP8 weights.
Status prepare_experts_input(
    const OpContext& ctx, const Bf16* x, int64_t rows, int64_t width, Bf16* fp4, Bf16* fp8);

// Element-wise forms for the kernels without tensor cores: out [rows, width] in natural order,
// quantized to FP8 blocks and back (the last block may be short).
Status quantize_rows(const OpContext& ctx, const Bf16* x, int64_t rows, int64_t width, Bf16* out);

}  // namespace cachalot::ops::cuda
