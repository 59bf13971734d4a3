// The three block quantizers of the model function, and the rows that the caches hold.
//
//   quantizer   block  amax floor  scale                                   then
//   fp8         32     1e-4        ceil-pow2(amax * FP32(1/448)), E8M0     clamp(x/scale, +-448) ->
//   E4M3 fp4_index   32     6 * 2^-126  ceil-pow2(amax * FP32(1/6)), E8M0       clamp(x/scale, +-6)
//   -> E2M1 fp4_main    16     6 * 2^-9    E4M3(amax / 6)                          clamp(x/scale,
//   +-6) -> E2M1
//
// Source: official reference, kernel.py (activation and cache quantizers). Divisions are true FP32
// divisions: a reciprocal moves exact ties. A last short block is quantized alone. Non-finite input
// is a broken invariant of the forward pass; it yields a NaN scale byte (fp8, fp4_index: 255,
// fp4_main: 0x7F) so that the row decodes to NaN and the fault stays visible.
//
// Rows (bytes per row of n channels):
//   window row  n E4M3 codes, then ceil(n/32) E8M0 scales          n = 512: 528
//   main row    n/2 packed E2M1 codes, then ceil(n/16) E4M3 scales  n = 512: 288
//   index row   n/2 packed E2M1 codes, then ceil(n/32) E8M0 scales  n = 128: 68
// Packed: byte b holds channel 2b in its low nibble and 2b + 1 in its high nibble.
#pragma once

#include <cstdint>

namespace cachalot::quant {

constexpr int64_t kFp8Block = 32;
constexpr int64_t kFp4IndexBlock = 32;
constexpr int64_t kFp4MainBlock = 16;

constexpr int64_t blocks(int64_t n, int64_t block) {
  return (n + block - 1) / block;
}

// codes: n bytes; scales: blocks(n, 32) bytes.
void fp8_quantize(const float* x, int64_t n, uint8_t* codes, uint8_t* scales);
// codes: (n + 1) / 2 bytes; scales: blocks(n, 32) bytes.
void fp4_index_quantize(const float* x, int64_t n, uint8_t* codes, uint8_t* scales);
// codes: (n + 1) / 2 bytes; scales: blocks(n, 16) bytes.
void fp4_main_quantize(const float* x, int64_t n, uint8_t* codes, uint8_t* scales);

void fp8_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* x);
void fp4_index_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* x);
void fp4_main_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* x);

constexpr int64_t window_row_bytes(int64_t n) {
  return n + blocks(n, kFp8Block);
}
constexpr int64_t main_row_bytes(int64_t n) {
  return (n + 1) / 2 + blocks(n, kFp4MainBlock);
}
constexpr int64_t index_row_bytes(int64_t n) {
  return (n + 1) / 2 + blocks(n, kFp4IndexBlock);
}

inline void window_row_encode(const float* x, int64_t n, uint8_t* row) {
  fp8_quantize(x, n, row, row + n);
}
inline void window_row_decode(const uint8_t* row, int64_t n, float* x) {
  fp8_dequantize(row, row + n, n, x);
}
inline void main_row_encode(const float* x, int64_t n, uint8_t* row) {
  fp4_main_quantize(x, n, row, row + (n + 1) / 2);
}
inline void main_row_decode(const uint8_t* row, int64_t n, float* x) {
  fp4_main_dequantize(row, row + (n + 1) / 2, n, x);
}
inline void index_row_encode(const float* x, int64_t n, uint8_t* row) {
  fp4_index_quantize(x, n, row, row + (n + 1) / 2);
}
inline void index_row_decode(const uint8_t* row, int64_t n, float* x) {
  fp4_index_dequantize(row, row + (n + 1) / 2, n, x);
}

}  // namespace cachalot::quant
