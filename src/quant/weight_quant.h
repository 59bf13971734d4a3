// Weights to the stored formats of the checkpoint.
//
//   format     block     scale
//   fp8 tile   32 x 32   ceil-pow2(amax / 448), E8M0; W = code * scale
//   fp8 row    1 x 32    the same per row (Engram tables)
//   fp4 row    1 x 32    ceil-pow2(amax / 6), E8M0; two E2M1 codes per byte, even column low
//
// The ceil rule never clips. A block of zeros gets the scale 1. Short last blocks have their own
// scale. Input must be finite. Matrices are row-major [rows, columns]; the scales are [ceil(rows /
// 32), ceil(columns / 32)] for tiles and [rows, ceil(columns / 32)] for rows.
#pragma once

#include <cstdint>

namespace cachalot::quant {

constexpr int64_t kWeightBlock = 32;

// codes: rows * columns bytes.
void fp8_tile_quantize(
    const float* w, int64_t rows, int64_t columns, uint8_t* codes, uint8_t* scales);
void fp8_row_quantize(
    const float* w, int64_t rows, int64_t columns, uint8_t* codes, uint8_t* scales);
// codes: rows * columns / 2 bytes; `columns` must be even.
void fp4_row_quantize(
    const float* w, int64_t rows, int64_t columns, uint8_t* codes, uint8_t* scales);

void fp8_tile_dequantize(
    const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t columns, float* w);
void fp8_row_dequantize(
    const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t columns, float* w);
void fp4_row_dequantize(
    const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t columns, float* w);

}  // namespace cachalot::quant
