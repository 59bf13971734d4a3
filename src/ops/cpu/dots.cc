// Dot products of FP32 rows with weight rows in any format, one reduction order for all paths.
//
// result[r, o] = x_r . W_o:  x FP32 rows, W F32, BF16, FP8 (32 x 32 tiles) or FP4 (1 x 32 blocks).
//
// Order. Lane l of one accumulator vector sums, with fused multiply-adds, the products of positions
// l, l + 8, l + 16, ... in ascending order; a fixed tree adds the lanes at the end. Positions are
// those of row_order(): natural, except that groups of FP8 and FP4 codes are transposed, on both
// sides, so that codes widen without shuffles across lanes. Decoding is exact in FP32 (a code times
// a power of two), so it does not matter where it happens:
//   - up to kDecodeRows rows: weights are decoded in registers and read once, kStreams outputs at a
//     time, which take turns, so that no multiply-add waits for the one before;
//   - more rows: kPanelOutputs x kPanelDepth weights (24 KiB) are decoded into a panel that all
//     rows pass, 4 x 3 at a time; between stretches of K the accumulators rest in memory.
// Both give the same bits for a row, whatever other rows there are.
//
// Bounds: the first path is bound by the stream of weight bytes and by what decodes FP4, the second
// by FMAs (4 x 3 needs 7 loads per 12). bench/ops_bench measures both against machine ceilings.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/dots.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/cpu/simd_inl.h"

#include <algorithm>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

constexpr int64_t kPanelDepth = 512;
constexpr int64_t kLine = 64;
// How far ahead the decode path asks for values and scales of a stream: across the ends of pages,
// where hardware prefetchers stop.
constexpr int64_t kAheadBytes = 512;
constexpr int64_t kAheadScales = 128;
// Copies of x for four streams, a quarter of them each, stay in L1 up to this length.
constexpr int64_t kScaledDepth = 1024;

// Where the rows of a weight lie.
struct WeightRows {
  const uint8_t* values = nullptr;
  const uint8_t* scales = nullptr;
  int64_t in = 0;
  int64_t row_bytes = 0;
  int64_t row_scales = 0;
  int scale_shift = 0;  // log2 of the weight rows that share a row of scales

  explicit WeightRows(const Weight& weight)
      : values(static_cast<const uint8_t*>(weight.values.data)),
        scales(static_cast<const uint8_t*>(weight.scales.data)),
        in(weight.in),
        row_scales((weight.in + 31) / 32) {
    switch (weight.format) {
      case WeightFormat::kF32:
        row_bytes = in * 4;
        break;
      case WeightFormat::kBF16:
        row_bytes = in * 2;
        break;
      case WeightFormat::kFp8Block:
        row_bytes = in;
        scale_shift = 5;
        break;
      case WeightFormat::kFp8Row:
        row_bytes = in;
        break;
      case WeightFormat::kFp4Row:
        row_bytes = in / 2;
        break;
    }
  }
  const uint8_t* row(int64_t o) const { return values + o * row_bytes; }
  const uint8_t* row_scale(int64_t o) const {
    return scales == nullptr ? nullptr : scales + (o >> scale_shift) * row_scales;
  }
};

template <WeightFormat kFormat>
HWY_INLINE uint8_t scale_at(const uint8_t* scales, int64_t block) {
  if constexpr (kFormat == WeightFormat::kF32 || kFormat == WeightFormat::kBF16) {
    return 0;
  } else {
    return scales[block];
  }
}

// The last, short block of a weight row, filled up with zeros.
template <WeightFormat kFormat>
struct TailBlock {
  alignas(32) uint8_t bytes[static_cast<size_t>(block_bytes<kFormat>())] = {};

  void fill(const uint8_t* row, int64_t block, int64_t row_bytes) {
    const int64_t begin = block * block_bytes<kFormat>();
    std::memcpy(bytes, row + begin, static_cast<size_t>(row_bytes - begin));
  }
};

template <WeightFormat kFormat, int kRows, int kOutputs>
HWY_INLINE void accumulate_block(const uint8_t* const* bytes,
                                 const uint8_t* const* scales,
                                 int64_t offset,
                                 int64_t block,
                                 const float* const* x,
                                 Vec (&acc)[kOutputs][kRows]) {
  WeightBlock<kFormat> w[kOutputs];
  CACHALOT_UNROLL
  for (int c = 0; c < kOutputs; ++c) {
    w[c] = WeightBlock<kFormat>(bytes[c] + offset, scale_at<kFormat>(scales[c], block));
  }
  CACHALOT_UNROLL
  for (int64_t v = 0; v < kBlockVecs; ++v) {
    Vec value[kRows];
    CACHALOT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      value[r] = load_vec(x[r] + block * 32 + v * kLanes);
    }
    CACHALOT_UNROLL
    for (int c = 0; c < kOutputs; ++c) {
      const auto weights = w[c].vector(v);
      CACHALOT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        acc[c][r] = hn::MulAdd(weights, value[r], acc[c][r]);
      }
    }
  }
}

// Outputs o, o + apart, ..., kOutputs of them, for kRows rows, weights decoded in registers.
// Results lie result_apart apart.
template <WeightFormat kFormat, int kRows, int kOutputs>
void register_dots(const WeightRows& w,
                   int64_t o,
                   int64_t apart,
                   const float* const* x,
                   float* result,
                   int64_t result_apart,
                   int64_t ld) {
  Vec acc[kOutputs][kRows];
  const uint8_t* rows[kOutputs];
  const uint8_t* scales[kOutputs];
  CACHALOT_UNROLL
  for (int c = 0; c < kOutputs; ++c) {
    rows[c] = w.row(o + c * apart);
    scales[c] = w.row_scale(o + c * apart);
    if (scales[c] != nullptr) {
      hwy::Prefetch(scales[c] + kAheadScales);
    }
    CACHALOT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      acc[c][r] = hn::Zero(F32());
    }
  }
  constexpr int64_t kBytes = block_bytes<kFormat>();
  const int64_t whole = w.in / 32;
  for (int64_t block = 0; block < whole; ++block) {
    if (block * kBytes % kLine == 0) {
      for (int c = 0; c < kOutputs; ++c) {
        for (int64_t line = 0; line < kBytes; line += kLine) {
          hwy::Prefetch(rows[c] + kAheadBytes + block * kBytes + line);
        }
      }
    }
    accumulate_block<kFormat, kRows, kOutputs>(rows, scales, block * kBytes, block, x, acc);
  }
  if (whole * 32 < w.in) {
    TailBlock<kFormat> tails[kOutputs];
    const uint8_t* bytes[kOutputs];
    for (int c = 0; c < kOutputs; ++c) {
      tails[c].fill(rows[c], whole, w.row_bytes);
      bytes[c] = tails[c].bytes;
    }
    accumulate_block<kFormat, kRows, kOutputs>(bytes, scales, 0, whole, x, acc);
  }
  CACHALOT_UNROLL
  for (int c = 0; c < kOutputs; ++c) {
    CACHALOT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      result[r * ld + c * result_apart] = lane_sum(acc[c][r]) * weight_unit<kFormat>();
    }
  }
}

// FP8 tiles: 32 outputs share their scales, so rows of x take them on instead of the weights, a
// copy of the rows per stream. The factors are powers of two, so that the products stay what they
// are, for |x| below 2^60.
template <int kRows>
class ScaledRows {
 public:
  // Prepares stream c for the tiles whose scales these are.
  void scale(int c, const float* const* x, const uint8_t* scales, int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block) {
      const auto factor = hn::Set(F32(), kE8m0Times2p60[scales[block]]);
      for (int64_t i = block * 32; i < block * 32 + 32; i += kLanes) {
        for (int r = 0; r < kRows; ++r) {
          hn::Store(hn::Mul(load_vec(x[r] + i), factor), F32(), rows_[c][r] + i);
        }
      }
    }
  }

  // The products of one output per stream, whose rows begin at bytes[c].
  void dots(const uint8_t* const* bytes, int64_t in, float* result, int64_t apart, int64_t ld) {
    Vec acc[kStreams][kRows];
    CACHALOT_UNROLL
    for (int c = 0; c < kStreams; ++c) {
      CACHALOT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        acc[c][r] = hn::Zero(F32());
      }
    }
    const int64_t whole = in / 32 * 32;
    for (int64_t i = 0; i < whole; i += 32) {
      const uint8_t* at[kStreams];
      for (int c = 0; c < kStreams; ++c) {
        at[c] = bytes[c] + i;
        if (i % kLine == 0) {
          hwy::Prefetch(at[c] + kAheadBytes);
        }
      }
      accumulate(at, i, acc);
    }
    if (whole < in) {
      TailBlock<WeightFormat::kFp8Block> tails[kStreams];
      const uint8_t* at[kStreams];
      for (int c = 0; c < kStreams; ++c) {
        tails[c].fill(bytes[c], whole / 32, in);
        at[c] = tails[c].bytes;
      }
      accumulate(at, whole, acc);
    }
    CACHALOT_UNROLL
    for (int c = 0; c < kStreams; ++c) {
      CACHALOT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        result[r * ld + c * apart] = lane_sum(acc[c][r]) * weight_unit<WeightFormat::kFp8Block>();
      }
    }
  }

 private:
  HWY_INLINE void accumulate(const uint8_t* const* bytes,
                             int64_t begin,
                             Vec (&acc)[kStreams][kRows]) const {
    CACHALOT_UNROLL
    for (int c = 0; c < kStreams; ++c) {
      const E4m3Block w(bytes[c]);
      CACHALOT_UNROLL
      for (int64_t v = 0; v < kBlockVecs; ++v) {
        CACHALOT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const auto value = hn::Load(F32(), rows_[c][r] + begin + v * kLanes);
          acc[c][r] = hn::MulAdd(w.vector(v), value, acc[c][r]);
        }
      }
    }
  }

  // Rows a multiple of 4 KiB apart would share sets of the cache.
  alignas(64) float rows_[kStreams][kRows][kScaledDepth + 16];
};

template <int kRows>
void scaled_streams(const WeightRows& w,
                    int64_t begin,
                    int64_t apart,
                    int64_t count,
                    const float* const* x,
                    float* result,
                    int64_t ld) {
  ScaledRows<kRows> scaled;
  for (int64_t o = 0; o < count; ++o) {
    const uint8_t* rows[kStreams];
    for (int c = 0; c < kStreams; ++c) {
      const int64_t output = begin + c * apart + o;
      rows[c] = w.row(output);
      if (o == 0 || output % 32 == 0) {
        scaled.scale(c, x, w.row_scale(output), w.row_scales);
      }
    }
    scaled.dots(rows, w.in, result + o, count, ld);
  }
}

template <WeightFormat kFormat>
void weight_streams_as(const Weight& weight,
                       int64_t begin,
                       int64_t apart,
                       int64_t count,
                       const RowSet& x,
                       int64_t rows,
                       float* result,
                       int64_t ld) {
  static_assert(kDecodeRows == 2);
  const WeightRows w(weight);
  const float* pointers[2] = {x.row(0), rows == 2 ? x.row(1) : nullptr};
  if constexpr (kFormat == WeightFormat::kFp8Block) {
    if (w.in <= kScaledDepth) {
      const auto streams = rows == 1 ? scaled_streams<1> : scaled_streams<2>;
      streams(w, begin, apart, count, pointers, result, ld);
      return;
    }
  }
  const auto dots =
      rows == 1 ? register_dots<kFormat, 1, kStreams> : register_dots<kFormat, 2, kStreams>;
  for (int64_t o = 0; o < count; ++o) {
    dots(w, begin + o, apart, pointers, result + o, count, ld);
  }
}

// Up to kDecodeRows rows.
template <WeightFormat kFormat>
void decode_path(const Weight& weight,
                 int64_t begin,
                 int64_t count,
                 const RowSet& x,
                 int64_t rows,
                 float* result,
                 int64_t ld) {
  const WeightRows w(weight);
  const int64_t apart = count / kStreams;
  weight_streams_as<kFormat>(weight, begin, apart, apart, x, rows, result, ld);
  for (int64_t o = apart * kStreams; o < count; ++o) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = x.row(r);
      register_dots<kFormat, 1, 1>(w, begin + o, 0, &row, result + r * ld + o, 0, ld);
    }
  }
}

// Decodes blocks [first, last) of `count` weight rows from `o`; panel rows are kPanelDepth apart.
// Asks for as much of the panel behind, whose first row begins at `next`.
template <WeightFormat kFormat>
void decode_panel(const WeightRows& w,
                  int64_t o,
                  int64_t count,
                  int64_t first,
                  int64_t last,
                  const uint8_t* next,
                  float* panel) {
  for (int64_t c = 0; c < count; ++c) {
    const uint8_t* row = w.row(o + c);
    const uint8_t* scales = w.row_scale(o + c);
    float* out = panel + c * kPanelDepth;
    Vec v[kBlockVecs];
    const int64_t whole = std::min(last, w.in / 32);
    constexpr int64_t kBytes = block_bytes<kFormat>();
    for (int64_t block = first; block < whole; ++block) {
      if (block * kBytes % kLine == 0) {
        for (int64_t line = 0; line < kBytes; line += kLine) {
          hwy::Prefetch(next + (block - first) * kBytes + line);
        }
      }
      decode_block<kFormat>(row + block * kBytes, scale_at<kFormat>(scales, block), v);
      for (int64_t i = 0; i < kBlockVecs; ++i) {
        hn::Store(v[i], F32(), out + i * kLanes);
      }
      out += 32;
    }
    if (whole < last) {
      TailBlock<kFormat> tail;
      tail.fill(row, whole, w.row_bytes);
      decode_block<kFormat>(tail.bytes, scale_at<kFormat>(scales, whole), v);
      for (int64_t i = 0; i < kBlockVecs; ++i) {
        hn::Store(v[i], F32(), out + i * kLanes);
      }
    }
    next += w.row_bytes;
  }
}

struct TileArgs {
  const float* x[4];
  const float* panel;
  int64_t depth;
  float* rest;  // [4, rest_ld / kLanes, kLanes]: accumulators between stretches of K
  int64_t rest_ld;
  float* result;
  int64_t ld;
  float unit;
};

// One register tile over a stretch of K, the first or last one or not: kRows rows x kOutputs panel
// rows.
template <int kRows, int kOutputs, bool kFirst, bool kLast>
HWY_NOINLINE void run_tile(const TileArgs& args) {
  const int64_t depth = args.depth;
  Vec acc[kRows][kOutputs];
  CACHALOT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    CACHALOT_UNROLL
    for (int c = 0; c < kOutputs; ++c) {
      acc[r][c] =
          kFirst ? hn::Zero(F32()) : hn::Load(F32(), args.rest + r * args.rest_ld + c * kLanes);
    }
  }
  // Block by block: a loop of few turns, whose end the processor foresees.
  for (int64_t block = 0; block < depth; block += 32) {
    CACHALOT_UNROLL
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      const int64_t i = block + v * kLanes;
      Vec w[kOutputs];
      CACHALOT_UNROLL
      for (int c = 0; c < kOutputs; ++c) {
        w[c] = hn::Load(F32(), args.panel + c * kPanelDepth + i);
      }
      CACHALOT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto value = load_vec(args.x[r] + i);
        CACHALOT_UNROLL
        for (int c = 0; c < kOutputs; ++c) {
          acc[r][c] = hn::MulAdd(w[c], value, acc[r][c]);
        }
      }
    }
  }
  if constexpr (kLast) {
    store_sums(acc, args.unit, args.result, args.ld);
  } else {
    float* rest = args.rest;
    const int64_t ld = args.rest_ld;
    CACHALOT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CACHALOT_UNROLL
      for (int c = 0; c < kOutputs; ++c) {
        hn::Store(acc[r][c], F32(), rest + r * ld + c * kLanes);
      }
    }
  }
}

using TileFunction = void (*)(const TileArgs&);
template <bool kFirst, bool kLast>
constexpr TileFunction kTiles[4][3] = {
    {run_tile<1, 1, kFirst, kLast>, run_tile<1, 2, kFirst, kLast>, run_tile<1, 3, kFirst, kLast>},
    {run_tile<2, 1, kFirst, kLast>, run_tile<2, 2, kFirst, kLast>, run_tile<2, 3, kFirst, kLast>},
    {run_tile<3, 1, kFirst, kLast>, run_tile<3, 2, kFirst, kLast>, run_tile<3, 3, kFirst, kLast>},
    {run_tile<4, 1, kFirst, kLast>, run_tile<4, 2, kFirst, kLast>, run_tile<4, 3, kFirst, kLast>},
};

// At most kTileOutputs outputs and kTileRows rows.
template <WeightFormat kFormat>
void panel_path(const WeightRows& w,
                int64_t begin,
                int64_t count,
                const RowSet& x,
                int64_t first_row,
                int64_t rows,
                float* result,
                int64_t ld) {
  alignas(64) float panel[kPanelOutputs * kPanelDepth];
  alignas(64) float rest[kTileRows * kTileOutputs * kLanes];
  const int64_t blocks = (w.in + 31) / 32;
  constexpr int64_t kStep = kPanelDepth / 32, kBytes = block_bytes<kFormat>();
  TileArgs args;
  args.rest_ld = kTileOutputs * kLanes;
  args.ld = ld;
  args.unit = weight_unit<kFormat>();
  for (int64_t block = 0; block < blocks; block += kStep) {
    const int64_t end = std::min(blocks, block + kStep);
    args.depth = (end - block) * 32;
    const auto& tiles = block == 0 ? (end == blocks ? kTiles<true, true> : kTiles<true, false>)
                                   : (end == blocks ? kTiles<false, true> : kTiles<false, false>);
    for (int64_t o = 0; o < count; o += kPanelOutputs) {
      const int64_t outputs = std::min(kPanelOutputs, count - o);
      const uint8_t* next = o + outputs < count ? w.row(begin + o + outputs) + block * kBytes
                            : end < blocks      ? w.row(begin) + end * kBytes
                                                : w.row(begin + count);
      decode_panel<kFormat>(w, begin + o, outputs, block, end, next, panel);
      for (int64_t r = 0; r < rows; r += 4) {
        const int64_t tile_rows = std::min<int64_t>(4, rows - r);
        for (int64_t i = 0; i < tile_rows; ++i) {
          args.x[i] = x.row(first_row + r + i) + block * 32;
        }
        for (int64_t c = 0; c < outputs; c += 3) {
          args.panel = panel + c * kPanelDepth;
          args.rest = rest + r * args.rest_ld + (o + c) * kLanes;
          args.result = result + r * ld + o + c;
          tiles[tile_rows - 1][std::min<int64_t>(3, outputs - c) - 1](args);
        }
      }
    }
  }
}

template <WeightFormat kFormat>
void weight_dots_as(const Weight& weight,
                    int64_t begin,
                    int64_t count,
                    const RowSet& x,
                    int64_t rows,
                    float* result,
                    int64_t ld) {
  if (rows <= kDecodeRows) {
    decode_path<kFormat>(weight, begin, count, x, rows, result, ld);
    return;
  }
  const WeightRows w(weight);
  for (int64_t r = 0; r < rows; r += kTileRows) {
    for (int64_t o = 0; o < count; o += kTileOutputs) {
      panel_path<kFormat>(w,
                          begin + o,
                          std::min(kTileOutputs, count - o),
                          x,
                          r,
                          std::min(kTileRows, rows - r),
                          result + r * ld + o,
                          ld);
    }
  }
}

void weight_dots(const Weight& weight,
                 int64_t begin,
                 int64_t count,
                 const RowSet& x,
                 int64_t rows,
                 float* result,
                 int64_t ld) {
  switch (weight.format) {
    case WeightFormat::kF32:
      return weight_dots_as<WeightFormat::kF32>(weight, begin, count, x, rows, result, ld);
    case WeightFormat::kBF16:
      return weight_dots_as<WeightFormat::kBF16>(weight, begin, count, x, rows, result, ld);
    case WeightFormat::kFp8Block:
      return weight_dots_as<WeightFormat::kFp8Block>(weight, begin, count, x, rows, result, ld);
    case WeightFormat::kFp8Row:
      return weight_dots_as<WeightFormat::kFp8Row>(weight, begin, count, x, rows, result, ld);
    case WeightFormat::kFp4Row:
      return weight_dots_as<WeightFormat::kFp4Row>(weight, begin, count, x, rows, result, ld);
  }
}

void weight_streams(const Weight& weight,
                    int64_t begin,
                    int64_t apart,
                    int64_t count,
                    const RowSet& x,
                    int64_t rows,
                    float* result,
                    int64_t ld) {
  switch (weight.format) {
    case WeightFormat::kF32:
      return weight_streams_as<WeightFormat::kF32>(
          weight, begin, apart, count, x, rows, result, ld);
    case WeightFormat::kBF16:
      return weight_streams_as<WeightFormat::kBF16>(
          weight, begin, apart, count, x, rows, result, ld);
    case WeightFormat::kFp8Block:
      return weight_streams_as<WeightFormat::kFp8Block>(
          weight, begin, apart, count, x, rows, result, ld);
    case WeightFormat::kFp8Row:
      return weight_streams_as<WeightFormat::kFp8Row>(
          weight, begin, apart, count, x, rows, result, ld);
    case WeightFormat::kFp4Row:
      return weight_streams_as<WeightFormat::kFp4Row>(
          weight, begin, apart, count, x, rows, result, ld);
  }
}

template <WeightFormat kFormat>
void decode_row_as(const Weight& weight, int64_t row, float* out) {
  const WeightRows w(weight);
  const int64_t blocks = (w.in + 31) / 32;
  constexpr int64_t kStep = kPanelDepth / 32;
  alignas(64) float panel[kPanelDepth];
  for (int64_t block = 0; block < blocks; block += kStep) {
    const int64_t end = std::min(blocks, block + kStep);
    decode_panel<kFormat>(w, row, 1, block, end, w.row(row) + end * block_bytes<kFormat>(), panel);
    std::memcpy(out + block * 32, panel, static_cast<size_t>((end - block) * 32) * sizeof(float));
  }
}

void decode_weight_row(const Weight& weight, int64_t row, float* out) {
  switch (weight.format) {
    case WeightFormat::kF32:
      return decode_row_as<WeightFormat::kF32>(weight, row, out);
    case WeightFormat::kBF16:
      return decode_row_as<WeightFormat::kBF16>(weight, row, out);
    case WeightFormat::kFp8Block:
      return decode_row_as<WeightFormat::kFp8Block>(weight, row, out);
    case WeightFormat::kFp8Row:
      return decode_row_as<WeightFormat::kFp8Row>(weight, row, out);
    case WeightFormat::kFp4Row:
      return decode_row_as<WeightFormat::kFp4Row>(weight, row, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(weight_dots);
HWY_EXPORT(weight_streams);
HWY_EXPORT(decode_weight_row);

RowOrder row_order(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8Block:
      return RowOrder::kBytes;
    case WeightFormat::kFp4Row:
      return RowOrder::kNibbles;
    default:
      return RowOrder::kNatural;
  }
}

void weight_dots(const Weight& weight,
                 int64_t begin,
                 int64_t count,
                 const RowSet& x,
                 int64_t rows,
                 float* result,
                 int64_t ld) {
  HWY_DYNAMIC_DISPATCH(weight_dots)(weight, begin, count, x, rows, result, ld);
}
void weight_streams(const Weight& weight,
                    int64_t begin,
                    int64_t apart,
                    int64_t count,
                    const RowSet& x,
                    int64_t rows,
                    float* result,
                    int64_t ld) {
  HWY_DYNAMIC_DISPATCH(weight_streams)(weight, begin, apart, count, x, rows, result, ld);
}
void decode_weight_row(const Weight& weight, int64_t row, float* out) {
  HWY_DYNAMIC_DISPATCH(decode_weight_row)(weight, row, out);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
