// The SIMD primitives of the CPU kernels, dispatched to the machine's instruction set.
//
// A "row" is FP32 scratch of padded(n) floats, 16-byte aligned, whose floats behind n are zero
// unless a function says otherwise; primitives may read and write all padded(n) floats. Memory of
// tensors is touched only inside its n elements.
//
// Every result depends on the arguments alone: a sum runs in 8 (SSE4, NEON: 4) interleaved partial
// sums in ascending order, then over the lanes in a fixed tree.
#pragma once

#include <cstdint>

#include "ops/weight.h"
#include "tensor/tensor.h"

namespace cachalot::ops::cpu {

constexpr int64_t kPad = 32;
constexpr int64_t padded(int64_t n) {
  return (n + kPad - 1) / kPad * kPad;
}

// How far apart rows of a matrix lie that weight_dots reads. Rows a multiple of 4 KiB apart would
// share few sets of the caches; 17 lines more spread them.
constexpr int64_t row_stride(int64_t n) {
  return padded(n) % 1024 == 0 ? padded(n) + 272 : padded(n);
}

// Rows -------------------------------------------------------------------------------------------

void load_row(const void* source, DType dtype, int64_t n, float* row);
// One rounding per value.
void store_row(const float* row, int64_t n, void* target, DType dtype);
// Rounds to the grid of `act`: BF16, or nothing for F32.
void round_row(float* row, int64_t n, DType act);
// Quantizes to FP8 blocks of 32 and back: quant::fp8_quantize, then fp8_dequantize.
void fp8_round_row(float* row, int64_t n);
// Quantizes to FP4 blocks of 32 and back: quant::fp4_index_quantize, then _dequantize.
void fp4_index_round_row(float* row, int64_t n);
// As quant::window_row_encode, main_row_encode and index_row_encode; n is a multiple of the block.
void encode_window_row(const float* row, int64_t n, uint8_t* bytes);
void encode_main_row(const float* row, int64_t n, uint8_t* bytes);
void encode_index_row(const float* row, int64_t n, uint8_t* bytes);
void decode_window_row(const uint8_t* bytes, int64_t n, float* row);
void decode_main_row(const uint8_t* bytes, int64_t n, float* row);

// The orders in which a row meets decoded weights of a format. Groups of values are transposed as 4
// columns: value 4 i + c of a group of 4 n goes to position c n + i.
enum class RowOrder : uint8_t {
  kNatural,
  kBytes,    // FP8 tiles: groups of 32 (of 16 with 4 lanes)
  kNibbles,  // FP4: groups of 16
};
RowOrder row_order(WeightFormat format);
void arrange_row(float* row, int64_t n, RowOrder order);

// out = x * rsqrt(mean(x^2) + eps) * weight; out may be x.
void norm_row(const float* x, const TensorView& weight, int64_t n, float eps, float* out);
float sum_squares(const float* row, int64_t n);
// Rotates the last 2 * half of n values by the table's row; sign -1 rotates back.
void rotate_row(float* row, int64_t n, const float* cos_sin, int64_t half, float sign);

// out_k = post_k y + sum_j comb_jk x_j, rounded to act: M streams, each a row (padded(d) apart).
void expand_streams(const void* x,
                    const void* y,
                    DType act,
                    const float* post,
                    const float* comb,
                    int64_t m,
                    int64_t d,
                    float* out);
// out = sum_j pre_j x_j, rounded to act.
void collapse_streams(
    const float* x, const float* pre, int64_t m, int64_t d, DType act, float* out);

// The coefficients of one hyper-connection site for `count` tokens. mix [count, (2 + m) m] holds
// fn . x; factor [count] the RMS factors. comb [count, m, m].
struct SiteCoefficients {
  int64_t m = 0;
  const float* base = nullptr;
  const float* scale = nullptr;
  float eps = 0;
  int iters = 0;
};
void site_coefficients(const SiteCoefficients& site,
                       const float* mix,
                       const float* factor,
                       int64_t count,
                       float* pre,
                       float* post,
                       float* comb);

// h = silu(min(gate, limit)) * clamp(up, +-limit) * weight; gate and up are first rounded to act, h
// is rounded to act.
void swiglu_row(
    const float* gate, const float* up, int64_t n, float limit, float weight, DType act, float* h);
// h = silu(gate) * up; gate, up, silu(gate) and h are rounded to act. h may be gate.
void silu_product_row(const float* gate, const float* up, int64_t n, DType act, float* h);
// sum += values rounded to act.
void add_rounded(const float* values, int64_t n, DType act, float* sum);

// kv0 (1 - w) + kv1 w with w = sigmoid(gate1 - gate0), per channel.
void pool_pair(const float* kv0,
               const float* gate0,
               const float* kv1,
               const float* gate1,
               int64_t n,
               float* out);

// sqrt(ln(1 + e^(x / temperature))) in place.
void router_scores(float* row, int64_t n, float temperature);

// Logits as values that compare: -inf for NaN, +0 for -0. Only n elements of row are written.
void rank_form(const float* logits, int64_t n, float* row);
// The ids, ascending, of all values of a rank_form() row that are not below some bound which k of
// them reach; 0 if it found no finite bound. work: n floats, ids: n.
int64_t best_candidates(const float* row, int64_t n, int64_t k, float* work, int32_t* ids);

// sum_i e^((x_i - best) scale), where a value equal to `best`, the largest, counts 1. No NaN.
float exp_mass(const float* row, int64_t n, float best, float scale);

// The three sums of an Engram gate over one stream: x.x, key.key, x.(q k gains).key.
struct EngramSums {
  float xx = 0;
  float kk = 0;
  float xk = 0;
};
EngramSums engram_sums(const void* x,
                       const void* key,
                       DType act,
                       const TensorView& q_weight,
                       const TensorView& k_weight,
                       int64_t weight_begin,
                       int64_t n);
// out = x + gate * value, rounded to act; out may be x.
void engram_add(const void* x, const void* value, DType act, float gate, int64_t n, void* out);

// Weights ----------------------------------------------------------------------------------------

// FP32 rows of one length at `base`, `stride` floats apart, in the order that an index list gives.
struct RowSet {
  const float* base = nullptr;
  int64_t stride = 0;
  const int32_t* index = nullptr;  // null: 0, 1, 2, ...

  const float* row(int64_t i) const { return base + (index == nullptr ? i : index[i]) * stride; }
};

// result[r * ld + o] = x_r . W[begin + o] for r < rows, o < count. x rows are padded(weight.in)
// long, in the weight's row_order().
void weight_dots(const Weight& weight,
                 int64_t begin,
                 int64_t count,
                 const RowSet& x,
                 int64_t rows,
                 float* result,
                 int64_t ld);
// The same for few rows (rows <= kDecodeRows) and kStreams runs of outputs at once, `apart` apart:
// result[r * ld + s * count + i] = x_r . W[begin + s * apart + i] for s < kStreams, i < count.
void weight_streams(const Weight& weight,
                    int64_t begin,
                    int64_t apart,
                    int64_t count,
                    const RowSet& x,
                    int64_t rows,
                    float* result,
                    int64_t ld);
constexpr int kStreams = 4;
// How many outputs and rows weight_dots handles at a time: good sizes for a task. One decoded panel
// has kPanelOutputs outputs; the rows' stretch of K stays in L2 for all panels of a tile.
constexpr int64_t kPanelOutputs = 12;
constexpr int64_t kTileOutputs = 4 * kPanelOutputs;
constexpr int64_t kTileRows = 96;
// Up to this many rows, weight_dots decodes weights in registers instead of into a panel.
constexpr int64_t kDecodeRows = 2;

// Row `row` of an FP8 (kFp8Row) or F32 table, as a row.
void decode_weight_row(const Weight& weight, int64_t row, float* out);

// Attention --------------------------------------------------------------------------------------

// Softmax attention of `heads` queries (rows padded(k) apart) over `count` keys and their values,
// which may be the keys, in blocks of 64 keys. With act = BF16 the unnormalized probabilities are
// rounded to BF16. o: rows padded(k) apart, already divided by the denominator; zeros without keys.
// work: see attend_work_floats.
struct HeadGroup {
  const float* q = nullptr;
  const float* sink = nullptr;
  int64_t heads = 0;
  int64_t k = 0;
  DType act = DType::kF32;
};
int64_t attend_work_floats(int64_t heads);
void attend_heads(const HeadGroup& group,
                  const float* const* keys,
                  const float* const* values,
                  int64_t count,
                  float* o,
                  float* work);

// Index ------------------------------------------------------------------------------------------

// Index queries of one row, heads side by side: element (i, h) at q[i * padded_heads + h] with the
// values of a head in FP4 order.
constexpr int64_t padded_heads(int64_t heads) {
  return (heads + 7) / 8 * 8;
}

// Entries per call of score_entries: their decoded keys fill L1.
constexpr int64_t kIndexTileFloats = 8192;
inline int64_t index_tile(int64_t dim) {
  return kIndexTileFloats / padded(dim);
}
// scores[r][e] = sum_h weights_rh relu(q_rh . key_e) for `count` <= index_tile(dim) index rows.
struct IndexQueries {
  const float* const* q = nullptr;        // per row: [padded(dim), padded_heads]
  const float* const* weights = nullptr;  // per row: [padded_heads], zero behind the heads
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t dim = 0;
};
void score_entries(const IndexQueries& queries,
                   const uint8_t* const* entries,
                   int64_t count,
                   float* const* scores);

}  // namespace cachalot::ops::cpu
