// Weights as the A operand of mma.m16n8k16: 16 rows of a matrix, straight from the checkpoint's
// storage to BF16 registers.
//
// K runs in chunks of kChunk columns. Inside a chunk the 16 columns of one mma are chosen so that a
// lane's loads are 16 contiguous bytes and unpacking needs no byte permutation; the input is laid
// out to match (InputLayout below), once per step by the kernel that quantizes it. Every kernel
// that multiplies weights uses these fragments and sums in the same order (see ChunkSum), so a
// row's result does not depend on how many rows there are or on which kernel ran.
//
// Weights travel through a ring of stages in shared memory, filled by cp.async. A lane copies
// exactly the bytes that it will read, so the ring needs no barrier: waiting for one's own copies
// is enough.
//
// FP8 and FP4 codes become BF16 by bit placement: the code's magnitude bits at the right place are
// the value times 2^-120 (E4M3) or 2^-126 (E2M1), subnormals included, and one BF16 multiplication
// brings in the block scale exactly. The product is kept 2^-40 too small so that every scale byte
// up to 174 (2^47) and down to 50 stays in BF16's range; the FP32 sum is multiplied by 2^40 at the
// end. Scale bytes outside that range, which no checkpoint has, give infinity or lose bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/ptx.cuh"

namespace cachalot::ops::cuda {

constexpr int kChunk = 256;      // columns of K that are summed in one go
constexpr int kTileRows = 16;    // rows of one mma
constexpr int kTokenTile = 8;    // columns of one mma
constexpr int kMaxSegments = 4;  // K is summed in at most this many segments of whole chunks
constexpr float kLateScale = 0x1.0p40f;

// Order of the columns of an input row in memory, in pieces of eight columns.
enum class InputLayout : uint8_t { kNatural, kFp8, kFp4 };

// Piece index within its chunk of columns 8 i .. 8 i + 7 of the chunk.
__host__ __device__ constexpr int layout_piece(InputLayout layout, int i) {
  if (layout == InputLayout::kFp8) {
    return (i / 8) * 8 + (i % 2) * 4 + (i / 2) % 4;  // k = 64 j + 16 t + 8 h: piece (2 j + h, t)
  }
  if (layout == InputLayout::kFp4) {
    return (i / 16) * 16 + (i % 4) * 4 + (i / 4) % 4;  // k = 128 j + 32 t + 8 q: piece (4 j + q, t)
  }
  return i;
}
// Place of column e (0..7) inside its piece.
__host__ __device__ constexpr int layout_slot(InputLayout layout, int e) {
  if (layout == InputLayout::kFp8) {
    return (e & 4) | (e & 1) << 1 | (e >> 1 & 1);  // pairs (0, 2), (1, 3), (4, 6), (5, 7)
  }
  if (layout == InputLayout::kFp4) {
    return (e & 3) << 1 | e >> 2;  // pairs (0, 4), (1, 5), (2, 6), (3, 7)
  }
  return e;
}

// Segment s of K covers chunks [segment_begin(s), segment_begin(s + 1)).
__host__ __device__ constexpr int segment_count(int chunks) {
  return chunks < kMaxSegments ? chunks : kMaxSegments;
}
__host__ __device__ constexpr int segment_begin(int chunks, int s) {
  return s * chunks / segment_count(chunks);
}

// Lane coordinates of an mma operand.
struct Lane {
  int g;  // row of A (and g + 8), column of B
  int t;  // quarter of K
  __device__ __forceinline__ Lane()
      : g(static_cast<int>(threadIdx.x % 32) / 4), t(static_cast<int>(threadIdx.x) % 4) {}
};

// Row of a lane's half h (0 or 1) of the tile at `row`. Rows past the matrix repeat its last row:
// their results are not stored.
__device__ __forceinline__ uint32_t tile_row(int64_t row, int h, int64_t out, const Lane& lane) {
  return static_cast<uint32_t>(min(row + lane.g + 8 * h, out - 1));
}

// Where a tile of 16 rows lies: this lane's bytes of its two rows, and their scales. Offsets are
// 32-bit: a matrix is below 4 GiB (checked by fragments_support).
struct TileRows {
  const uint8_t* values;
  const uint8_t* scales;
  uint32_t value[2];
  uint32_t scale[2];
};

__device__ __forceinline__ uint32_t merge_bits(uint32_t a, uint32_t mask, uint32_t b) {
  return (a & mask) | b;
}
// A BF16 scale, twice.
__device__ __forceinline__ uint32_t bf16_scale(uint32_t byte, uint32_t bias) {
  return ((byte + bias) << 7) * 0x00010001u;
}

// Component i of a vector register.
template <int i>
__device__ __forceinline__ uint32_t word(const uint4& v) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A format provides
//   kStep            columns of one stage
//   kSlots           16-byte pieces of a lane in a stage: of both rows for every group of columns
//   kGroupBytes      distance of a row's column groups
//   kScaleWords      4-byte pieces of scales of a lane in a stage
//   kLayout          input layout
//   kLate            factor that the finished sum still needs
//   kParts           BF16 numbers that a weight is the sum of
//   tile_rows()      this lane's places in a tile
//   fragment<i>()    the A operands of mma i of a stage
// Slot 2 j + h is column group j of row half h.

struct Fp8Weights {
  static constexpr int kStep = 128;
  static constexpr int kSlots = 4;
  static constexpr int kGroupBytes = 64;
  static constexpr int kStepBytes = kStep;
  static constexpr int kScaleWords = 1;
  static constexpr InputLayout kLayout = InputLayout::kFp8;
  static constexpr float kLate = kLateScale;
  static constexpr int kParts = 1;
  struct Raw {
    uint4 v[kSlots];
    uint32_t scale[kScaleWords];
  };

  static __device__ __forceinline__ TileRows tile_rows(const uint8_t* values,
                                                       const uint8_t* scales,
                                                       int64_t row,
                                                       int64_t out,
                                                       int64_t in,
                                                       const Lane& lane) {
    const auto k = static_cast<uint32_t>(in);
    TileRows rows{values, scales};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.value[h] = tile_row(row, h, out, lane) * k + 16 * lane.t;
      rows.scale[h] =
          static_cast<uint32_t>(row) / 32 * (k / 32);  // one row of blocks holds the tile
    }
    return rows;
  }
  // BF16 pairs of the bytes 0, 2 and 1, 3 of a word.
  static __device__ __forceinline__ uint32_t even(uint32_t w, uint32_t scale) {
    return mul_bf16x2(merge_bits(w << 8, 0x80008000u, (w << 4) & 0x07F007F0u), scale);
  }
  static __device__ __forceinline__ uint32_t odd(uint32_t w, uint32_t scale) {
    return mul_bf16x2(merge_bits(w, 0x80008000u, (w >> 4) & 0x07F007F0u), scale);
  }
  template <int kIndex>
  static __device__ __forceinline__ void fragment(uint32_t (&a)[1][4],
                                                  const Raw& raw,
                                                  const Lane& lane) {
    constexpr int j = kIndex / 4, i = kIndex % 4;
    const uint32_t block = 2 * j + lane.t / 2;
    const uint32_t scale = bf16_scale((raw.scale[0] >> (8 * block)) & 0xFFu, 80);
    const uint32_t low = word<i>(raw.v[2 * j]), high = word<i>(raw.v[2 * j + 1]);
    a[0][0] = even(low, scale);
    a[0][1] = even(high, scale);
    a[0][2] = odd(low, scale);
    a[0][3] = odd(high, scale);
  }
};

struct Fp4Weights {
  static constexpr int kStep = 128;
  static constexpr int kSlots = 2;
  static constexpr int kGroupBytes = 64;
  static constexpr int kStepBytes = kStep / 2;
  static constexpr int kScaleWords = 2;
  static constexpr InputLayout kLayout = InputLayout::kFp4;
  static constexpr float kLate = kLateScale;
  static constexpr int kParts = 1;
  struct Raw {
    uint4 v[kSlots];
    uint32_t scale[kScaleWords];
  };

  static __device__ __forceinline__ TileRows tile_rows(const uint8_t* values,
                                                       const uint8_t* scales,
                                                       int64_t row,
                                                       int64_t out,
                                                       int64_t in,
                                                       const Lane& lane) {
    const auto k = static_cast<uint32_t>(in);
    TileRows rows{values, scales};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.value[h] = tile_row(row, h, out, lane) * (k / 2) + 16 * lane.t;
      rows.scale[h] = tile_row(row, h, out, lane) * (k / 32);
    }
    return rows;
  }
  // BF16 pair of the nibbles n and n + 4 of a word.
  template <int n>
  static __device__ __forceinline__ uint32_t nibbles(uint32_t w, uint32_t scale) {
    const uint32_t sign = w << (12 - 4 * n);
    const uint32_t magnitude = n == 0 ? w << 6 : n == 1 ? w << 2 : n == 2 ? w >> 2 : w >> 6;
    return mul_bf16x2(merge_bits(sign, 0x80008000u, magnitude & 0x01C001C0u), scale);
  }
  template <int kIndex>
  static __device__ __forceinline__ void fragment(uint32_t (&a)[1][4],
                                                  const Raw& raw,
                                                  const Lane& lane) {
    constexpr int q = kIndex / 2, n = kIndex % 2 * 2;
    const uint32_t scale0 = bf16_scale((raw.scale[0] >> (8 * lane.t)) & 0xFFu, 86);
    const uint32_t scale1 = bf16_scale((raw.scale[1] >> (8 * lane.t)) & 0xFFu, 86);
    const uint32_t low = word<q>(raw.v[0]), high = word<q>(raw.v[1]);
    a[0][0] = nibbles<n>(low, scale0);
    a[0][1] = nibbles<n>(high, scale1);
    a[0][2] = nibbles<n + 1>(low, scale0);
    a[0][3] = nibbles<n + 1>(high, scale1);
  }
};

struct Bf16Weights {
  static constexpr int kStep = 64;
  static constexpr int kSlots = 4;
  static constexpr int kGroupBytes = 64;
  static constexpr int kStepBytes = kStep * 2;
  static constexpr int kScaleWords = 0;
  static constexpr InputLayout kLayout = InputLayout::kNatural;
  static constexpr float kLate = 1.0f;
  static constexpr int kParts = 1;
  struct Raw {
    uint4 v[kSlots];
  };

  static __device__ __forceinline__ TileRows tile_rows(const uint8_t* values,
                                                       const uint8_t*,
                                                       int64_t row,
                                                       int64_t out,
                                                       int64_t in,
                                                       const Lane& lane) {
    TileRows rows{values};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.value[h] = (tile_row(row, h, out, lane) * static_cast<uint32_t>(in) + 8 * lane.t) * 2;
    }
    return rows;
  }
  template <int kIndex>
  static __device__ __forceinline__ void fragment(uint32_t (&a)[1][4],
                                                  const Raw& raw,
                                                  const Lane&) {
    constexpr int j = kIndex / 2, h = kIndex % 2 * 2;
    a[0][0] = word<h>(raw.v[2 * j]);
    a[0][1] = word<h>(raw.v[2 * j + 1]);
    a[0][2] = word<h + 1>(raw.v[2 * j]);
    a[0][3] = word<h + 1>(raw.v[2 * j + 1]);
  }
};

// FP32 weights as the exact sum of three BF16 numbers. A lane has columns 8 t .. 8 t + 7 of 32; its
// two column groups are the halves of those.
struct F32Weights {
  static constexpr int kStep = 32;
  static constexpr int kSlots = 4;
  static constexpr int kGroupBytes = 16;
  static constexpr int kStepBytes = kStep * 4;
  static constexpr int kScaleWords = 0;
  static constexpr InputLayout kLayout = InputLayout::kNatural;
  static constexpr float kLate = 1.0f;
  static constexpr int kParts = 3;
  struct Raw {
    uint4 v[kSlots];
  };

  static __device__ __forceinline__ TileRows tile_rows(const uint8_t* values,
                                                       const uint8_t*,
                                                       int64_t row,
                                                       int64_t out,
                                                       int64_t in,
                                                       const Lane& lane) {
    TileRows rows{values};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.value[h] = (tile_row(row, h, out, lane) * static_cast<uint32_t>(in) + 8 * lane.t) * 4;
    }
    return rows;
  }
  // Splits a pair: each remainder is exact, and 3 x 8 significant bits hold all 24.
  static __device__ __forceinline__ void split(uint32_t (&parts)[3], uint32_t x, uint32_t y) {
    float a = __uint_as_float(x), b = __uint_as_float(y);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      parts[i] = bf16_pair(a, b);
      a -= __uint_as_float(parts[i] << 16);
      b -= __uint_as_float(parts[i] & 0xFFFF0000u);
    }
  }
  template <int kIndex>
  static __device__ __forceinline__ void fragment(uint32_t (&a)[3][4],
                                                  const Raw& raw,
                                                  const Lane&) {
    uint32_t parts[4][3];
    const uint4 &low = raw.v[2 * kIndex], &high = raw.v[2 * kIndex + 1];
    split(parts[0], low.x, low.y);
    split(parts[1], high.x, high.y);
    split(parts[2], low.z, low.w);
    split(parts[3], high.z, high.w);
#pragma unroll
    for (int p = 0; p < 3; ++p) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[p][r] = parts[r][p];
      }
    }
  }
};

// A warp's ring of kStages stages of kMats tiles in shared memory.
template <class W, int kMats, int kStages>
struct WeightRing {
  static constexpr int kMatBytes = 32 * (16 * W::kSlots + 4 * W::kScaleWords);
  static constexpr int kStageBytes = kMats * kMatBytes;
  static constexpr int kBytes = kStages * kStageBytes;

  uint8_t* base;  // of this warp

  // Starts the copies of columns [k, k + kStep) of every tile into a stage.
  __device__ __forceinline__ void fill(int stage, const TileRows (&rows)[kMats], int k) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t column = static_cast<uint32_t>(k / W::kStep) * W::kStepBytes;
#pragma unroll
    for (int m = 0; m < kMats; ++m) {
      uint8_t* to = base + stage * kStageBytes + m * kMatBytes;
#pragma unroll
      for (int slot = 0; slot < W::kSlots; ++slot) {
        copy_async_stream(
            to + (slot * 32 + lane) * 16,
            rows[m].values + (rows[m].value[slot % 2] + (slot / 2) * W::kGroupBytes + column));
      }
#pragma unroll
      for (int i = 0; i < W::kScaleWords; ++i) {
        copy_async_word(to + W::kSlots * 512 + (i * 32 + lane) * 4,
                        rows[m].scales + (rows[m].scale[i] + static_cast<uint32_t>(k) / 32));
      }
    }
  }
  __device__ __forceinline__ void read(int stage, int m, typename W::Raw& raw) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint8_t* from = base + stage * kStageBytes + m * kMatBytes;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      raw.v[slot] = *reinterpret_cast<const uint4*>(from + (slot * 32 + lane) * 16);
    }
    if constexpr (W::kScaleWords > 0) {
#pragma unroll
      for (int i = 0; i < W::kScaleWords; ++i) {
        raw.scale[i] =
            *reinterpret_cast<const uint32_t*>(from + W::kSlots * 512 + (i * 32 + lane) * 4);
      }
    }
  }
};

// Calls body.operator()<i>() for i = 0 .. kCount - 1.
template <int kCount, int kFirst = 0, class Body>
__device__ __forceinline__ void unrolled(const Body& body) {
  if constexpr (kFirst < kCount) {
    body.template operator()<kFirst>();
    unrolled<kCount, kFirst + 1>(body);
  }
}

// Input rows as the B operand: inputs[n] is this lane's row of token tile n (token 8 n + g, already
// offset by 8 t columns), in W::kLayout, or null past the last token.
//
// part[m][n] += tile m of the stage times columns [k, k + kStep) of token tile n.
template <class W, int kMats, int kTiles, int kStages>
__device__ __forceinline__ void multiply_stage(const WeightRing<W, kMats, kStages>& ring,
                                               int stage,
                                               const uint16_t* const (&inputs)[kTiles],
                                               int k,
                                               const Lane& lane,
                                               float (&part)[kMats][kTiles][4]) {
  constexpr int kPieces = W::kStep / 32;  // of 32 columns: two mmas
  // Pieces that are loaded ahead of their use; more token tiles leave fewer registers for them.
  constexpr int kAhead = kPieces * kTiles <= 8 ? kPieces : kTiles < 8 ? 8 / kTiles : 1;
  static_assert(kPieces % kAhead == 0);
  typename W::Raw raw[kMats];
#pragma unroll
  for (int m = 0; m < kMats; ++m) {
    ring.read(stage, m, raw[m]);
  }
  unrolled<kPieces / kAhead>([&]<int kGroup>() {
    uint4 b[kAhead][kTiles];
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        b[p][n] = inputs[n] == nullptr
                      ? make_uint4(0, 0, 0, 0)
                      : *reinterpret_cast<const uint4*>(inputs[n] + k + 32 * (kGroup * kAhead + p));
      }
    }
    unrolled<2 * kAhead>([&]<int i>() {
#pragma unroll
      for (int m = 0; m < kMats; ++m) {
        uint32_t a[W::kParts][4];
        W::template fragment<2 * kGroup * kAhead + i>(a, raw[m], lane);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4& piece = b[i / 2][n];
#pragma unroll
          for (int q = 0; q < W::kParts; ++q) {
            mma_bf16(part[m][n],
                     a[q][0],
                     a[q][1],
                     a[q][2],
                     a[q][3],
                     i % 2 == 0 ? piece.x : piece.z,
                     i % 2 == 0 ? piece.y : piece.w);
          }
        }
      }
    });
  });
}

// The order of every sum over K: the columns of a chunk in one mma accumulator, the chunks of a
// segment in ascending order, then the segments in ascending order. With kWhole a warp sums all
// segments; without, it sums one, and value() is that segment's sum.
template <int kMats, int kTiles, bool kWhole>
struct ChunkSum {
  float part[kMats][kTiles][4] = {};     // of the current chunk
  float segment[kMats][kTiles][4] = {};  // of the current segment
  float total[kWhole ? kMats : 1][kTiles][4] = {};

  __device__ __forceinline__ void end_chunk() {
    for_each([&](int m, int n, int i) {
      segment[m][n][i] += part[m][n][i];
      part[m][n][i] = 0;
    });
  }
  __device__ __forceinline__ void end_segment() {
    if constexpr (kWhole) {
      for_each([&](int m, int n, int i) {
        total[m][n][i] += segment[m][n][i];
        segment[m][n][i] = 0;
      });
    }
  }
  __device__ __forceinline__ float value(int m, int n, int i) const {
    return kWhole ? total[kWhole ? m : 0][n][i] : segment[m][n][i];
  }

 private:
  template <class Body>
  static __device__ __forceinline__ void for_each(const Body& body) {
#pragma unroll
    for (int m = 0; m < kMats; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          body(m, n, i);
        }
      }
    }
  }
};

// Columns [begin, end) of segments [first, last) of K.
struct SegmentRange {
  int chunks;
  int first;
  int begin;
  int end;

  __device__ __forceinline__ SegmentRange(int chunk_count, int first_segment, int last_segment)
      : chunks(chunk_count),
        first(first_segment),
        begin(segment_begin(chunk_count, first_segment) * kChunk),
        end(segment_begin(chunk_count, last_segment) * kChunk) {}
};

// Starts the first kStages - 1 stages of a range.
template <class W, int kMats, int kStages>
__device__ __forceinline__ void start_ring(const WeightRing<W, kMats, kStages>& ring,
                                           const TileRows (&rows)[kMats],
                                           const SegmentRange& range) {
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    const int k = range.begin + i * W::kStep;
    if (k < range.end) {
      ring.fill(i, rows, k);
    }
    copy_async_commit();
  }
}

// Adds the range, whose first stages start_ring() has started, to `sum`.
template <class W, int kMats, int kTiles, bool kWhole, int kStages>
__device__ __forceinline__ void sum_range(ChunkSum<kMats, kTiles, kWhole>& sum,
                                          const WeightRing<W, kMats, kStages>& ring,
                                          const TileRows (&rows)[kMats],
                                          const uint16_t* const (&inputs)[kTiles],
                                          const SegmentRange& range,
                                          const Lane& lane) {
  int segment = range.first, boundary = segment_begin(range.chunks, segment + 1) * kChunk;
  int stage = 0, filled = kStages - 1;
  for (int k = range.begin; k < range.end; k += W::kStep) {
    copy_async_wait<kStages - 2>();
    const int ahead = k + (kStages - 1) * W::kStep;
    if (ahead < range.end) {
      ring.fill(filled, rows, ahead);
    }
    copy_async_commit();
    multiply_stage<W, kMats, kTiles, kStages>(ring, stage, inputs, k, lane, sum.part);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    filled = filled + 1 == kStages ? 0 : filled + 1;
    const int next = k + W::kStep;
    if (next % kChunk == 0) {
      sum.end_chunk();
      if (next == boundary) {
        sum.end_segment();
        ++segment;
        boundary = segment_begin(range.chunks, segment + 1) * kChunk;
      }
    }
  }
}

}  // namespace cachalot::ops::cuda
