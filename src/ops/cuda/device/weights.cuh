// Weights as the A operand of mma.m16n8k16: 16 rows of a matrix, straight from the checkpoint's
// storage to BF16 registers.
//
// K runs in chunks of kChunk columns. Inside a chunk the 16 columns of one mma are chosen so that a
// lane's loads are 16 contiguous bytes and unpacking needs no byte permutation; the input is laid
// out to match (InputLayout below) by the kernel that quantizes it. Every kernel that multiplies
// weights uses these fragments and sums in the same order: the columns of a chunk in one mma
// accumulator that starts at zero, then the chunks in ascending order. So a row's result does not
// depend on how many rows there are, on who else works on it, or on which kernel ran.
//
// Weights travel through stages in shared memory, filled by cp.async. Where a lane copies exactly
// the bytes that it will read, no barrier is needed: waiting for one's own copies is enough.
//
// FP8 and FP4 codes become BF16 by bit placement: the code's magnitude bits at the right place are
// the value times 2^-120 (E4M3) or 2^-126 (E2M1), subnormals included, and one BF16 multiplication
// brings in the block scale exactly: on the weights or, for FP8 where a tile's 16 rows share it, on
// the fewer input values. The product is kept 2^-40 too small so that scale bytes from 50 (2^-77)
// to 169 (2^42) stay in BF16's range; the FP32 sum is multiplied by 2^40 at the end. Scale bytes
// outside that range, which no checkpoint has, give infinity or lose bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/ptx.cuh"

namespace cachalot::ops::cuda {

constexpr int kChunk = 256;    // columns of K that one accumulator sums
constexpr int kTileRows = 16;  // rows of one mma
constexpr int kTokenTile = 8;  // columns of one mma
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

// The pieces put what one lane multiplies side by side. wgmma reads its input from shared memory
// instead, K in order: place there ("wide order") of what is at place q of a chunk in lane order.
__host__ __device__ constexpr int wide_place(int q) {
  return q / 32 * 32 + q % 8 / 4 * 16 + q % 4 / 2 * 8 + q % 32 / 8 * 2 + q % 2;
}

// Lane coordinates of an mma operand.
struct Lane {
  int g;  // row of A (and g + 8), column of B
  int t;  // quarter of K
  __device__ __forceinline__ Lane()
      : g(static_cast<int>(threadIdx.x % 32) / 4), t(static_cast<int>(threadIdx.x) % 4) {}
};

// Where the 16 rows of a tile lie: this lane's bytes of its two rows and their scales. Moves along
// K as the ring fills.
struct TileRows {
  const uint8_t* value[2];
  const uint8_t* scale[2];
};

__device__ __forceinline__ uint32_t merge_bits(uint32_t a, uint32_t mask, uint32_t b) {
  return (a & mask) | b;
}
// Byte i of `bytes` plus `bias`, as the exponent of a pair of BF16 powers of two.
__device__ __forceinline__ uint32_t bf16_scale(uint32_t bytes, int i, uint32_t bias) {
  const auto selector = static_cast<uint32_t>(0x4040 + i * 0x0101);  // (i, 0, i, 0)
  return (__byte_perm(bytes, 0, selector) + bias * 0x00010001u) << 7;
}

// Component i of a vector register.
template <int i>
__device__ __forceinline__ uint32_t word(const uint4& v) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A format provides
//   kStep          columns of one stage
//   kGroups        groups of a stage that are unpacked one after the other
//   kSlots         16-byte pieces of a lane in a stage; slot 2 j + h is column group j of row half
//   h kGroupBytes    distance of a row's column groups kStepBytes     bytes of a row in a stage
//   kScaleRows     rows whose scales a lane needs, kStep / 32 bytes each
//   kLayout        input layout
//   kLate          factor that the finished sum still needs
//   kParts         BF16 numbers that a weight is the sum of
//   Raw            a group's registers
//   place()        this lane's place in row half h
//   fragment<i>()  the A operands of mma i of a group
//   input_scale()  what multiplies piece p of the input if kScaleInput

// kInput: block scales go to the input (few tokens) instead of the weights. kRows 2: the row halves
// of a tile come from different matrices and have scales of their own.
template <bool kInput, int kRows = 1>
struct Fp8Weights {
  static_assert(!kInput || kRows == 1);
  static constexpr int kStep = 128;
  static constexpr int kGroups = 1;
  static constexpr int kSlots = 4;
  static constexpr int kGroupBytes = 64;
  static constexpr int kStepBytes = kStep;
  static constexpr int kScaleRows = kRows;
  static constexpr bool kScaleInput = kInput;
  static constexpr InputLayout kLayout = InputLayout::kFp8;
  static constexpr float kLate = kLateScale;
  static constexpr int kParts = 1;
  struct Raw {
    uint4 v[kSlots];
    uint32_t scale[kScaleRows];  // of four blocks
  };

  static __device__ __forceinline__ void place(TileRows& rows,
                                               int h,
                                               const uint8_t* values,
                                               const uint8_t* scales,
                                               int64_t row,
                                               int64_t in,
                                               const Lane& lane) {
    rows.value[h] = values + row * in + 16 * lane.t;
    rows.scale[h] = scales + row / 32 * (in / 32);  // one row of blocks holds the tile
  }
  static __device__ __forceinline__ uint32_t scale(uint32_t bytes, int j, const Lane& lane) {
    return bf16_scale(bytes, 2 * j + lane.t / 2, 80);
  }
  static __device__ __forceinline__ uint32_t input_scale(const Raw& raw, int p, const Lane& lane) {
    return scale(raw.scale[0], p / 2, lane);
  }
  // BF16 pairs of the bytes 0, 2 and 1, 3 of a word, times 2^-120.
  static __device__ __forceinline__ uint32_t even(uint32_t w) {
    return merge_bits(w << 8, 0x80008000u, (w << 4) & 0x07F007F0u);
  }
  static __device__ __forceinline__ uint32_t odd(uint32_t w) {
    return merge_bits(w, 0x80008000u, (w >> 4) & 0x07F007F0u);
  }
  template <int kIndex>
  static __device__ __forceinline__ void fragment(uint32_t (&a)[1][4],
                                                  const Raw& raw,
                                                  const Lane& lane) {
    constexpr int j = kIndex / 4, i = kIndex % 4;
    const uint32_t low = word<i>(raw.v[2 * j]), high = word<i>(raw.v[2 * j + 1]);
    a[0][0] = even(low);
    a[0][1] = even(high);
    a[0][2] = odd(low);
    a[0][3] = odd(high);
    if constexpr (!kScaleInput) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[0][r] = mul_bf16x2(a[0][r], scale(raw.scale[r % 2 * (kRows - 1)], j, lane));
      }
    }
  }
};

struct Fp4Weights {
  static constexpr int kStep = 256;
  static constexpr int kGroups = 2;
  static constexpr int kSlots = 4;
  static constexpr int kGroupBytes = 64;
  static constexpr int kStepBytes = kStep / 2;
  static constexpr int kScaleRows = 2;
  static constexpr bool kScaleInput = false;
  static constexpr InputLayout kLayout = InputLayout::kFp4;
  static constexpr float kLate = kLateScale;
  static constexpr int kParts = 1;
  struct Raw {
    uint4 v[kSlots / kGroups];
    uint32_t scale[kScaleRows];  // of four blocks
  };

  static __device__ __forceinline__ void place(TileRows& rows,
                                               int h,
                                               const uint8_t* values,
                                               const uint8_t* scales,
                                               int64_t row,
                                               int64_t in,
                                               const Lane& lane) {
    rows.value[h] = values + row * (in / 2) + 16 * lane.t;
    rows.scale[h] = scales + row * (in / 32);
  }
  // BF16 pair of the nibbles n and n + 4 of a word, times 2^-126: sign to bit 15, magnitude to
  // bits 8..6. A multiplication makes both copies of an isolated nibble at once; nibble 3 has its
  // sign in place.
  template <int n>
  static __device__ __forceinline__ uint32_t nibbles(uint32_t w) {
    if constexpr (n == 0) {
      return ((w & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
    } else if constexpr (n == 1) {
      return ((w & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
    } else if constexpr (n == 2) {
      return (((w >> 6) & 0x003C003Cu) * 0x0410u) & 0x81C081C0u;
    } else {
      return merge_bits(w, 0x80008000u, (w >> 6) & 0x01C001C0u);
    }
  }
  template <int kIndex>
  static __device__ __forceinline__ void fragment(uint32_t (&a)[1][4],
                                                  const Raw& raw,
                                                  const Lane& lane) {
    constexpr int q = kIndex / 2, n = kIndex % 2 * 2;
    const uint32_t scale0 = bf16_scale(raw.scale[0], lane.t, 86);
    const uint32_t scale1 = bf16_scale(raw.scale[1], lane.t, 86);
    const uint32_t low = word<q>(raw.v[0]), high = word<q>(raw.v[1]);
    a[0][0] = mul_bf16x2(nibbles<n>(low), scale0);
    a[0][1] = mul_bf16x2(nibbles<n>(high), scale1);
    a[0][2] = mul_bf16x2(nibbles<n + 1>(low), scale0);
    a[0][3] = mul_bf16x2(nibbles<n + 1>(high), scale1);
  }
};

struct Bf16Weights {
  static constexpr int kStep = 64;
  static constexpr int kGroups = 1;
  static constexpr int kSlots = 4;
  static constexpr int kGroupBytes = 64;
  static constexpr int kStepBytes = kStep * 2;
  static constexpr int kScaleRows = 0;
  static constexpr bool kScaleInput = false;
  static constexpr InputLayout kLayout = InputLayout::kNatural;
  static constexpr float kLate = 1.0f;
  static constexpr int kParts = 1;
  struct Raw {
    uint4 v[kSlots];
  };

  static __device__ __forceinline__ void place(TileRows& rows,
                                               int h,
                                               const uint8_t* values,
                                               const uint8_t*,
                                               int64_t row,
                                               int64_t in,
                                               const Lane& lane) {
    rows.value[h] = values + (row * in + 8 * lane.t) * 2;
    rows.scale[h] = nullptr;
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
  static constexpr int kGroups = 1;
  static constexpr int kSlots = 4;
  static constexpr int kGroupBytes = 16;
  static constexpr int kStepBytes = kStep * 4;
  static constexpr int kScaleRows = 0;
  static constexpr bool kScaleInput = false;
  static constexpr InputLayout kLayout = InputLayout::kNatural;
  static constexpr float kLate = 1.0f;
  static constexpr int kParts = 3;
  struct Raw {
    uint4 v[kSlots];
  };

  static __device__ __forceinline__ void place(TileRows& rows,
                                               int h,
                                               const uint8_t* values,
                                               const uint8_t*,
                                               int64_t row,
                                               int64_t in,
                                               const Lane& lane) {
    rows.value[h] = values + (row * in + 8 * lane.t) * 4;
    rows.scale[h] = nullptr;
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

// This lane's places in the tile of rows row .. row + 15. Rows past the matrix repeat its last row:
// their results are not stored.
template <class W>
__device__ __forceinline__ TileRows tile_rows(const uint8_t* values,
                                              const uint8_t* scales,
                                              int64_t row,
                                              int64_t out,
                                              int64_t in,
                                              const Lane& lane) {
  TileRows rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    W::place(rows, h, values, scales, min(row + lane.g + 8 * h, out - 1), in, lane);
  }
  return rows;
}

// Moves a tile's places to column k, a multiple of kStep.
template <class W>
__device__ __forceinline__ void seek(TileRows& rows, int k) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.value[h] += static_cast<int64_t>(k / W::kStep) * W::kStepBytes;
    rows.scale[h] += k / 32;
  }
}

// One step of a warp's tile in shared memory: a lane copies exactly the bytes that it, or the same
// lane of another warp, will read.
template <class W>
struct WeightStage {
  static constexpr int kScaleBytes = W::kStep / 32;  // of one row
  static constexpr int kBytes = 32 * (16 * W::kSlots + kScaleBytes * W::kScaleRows);

  // Starts the copies and moves on along K.
  static __device__ __forceinline__ void copy(uint8_t* stage, TileRows& rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      copy_async_stream(stage + slot * 512 + lane * 16,
                        rows.value[slot % 2] + slot / 2 * W::kGroupBytes);
    }
#pragma unroll
    for (int i = 0; i < W::kScaleRows; ++i) {
      copy_async_small<kScaleBytes>(
          stage + W::kSlots * 512 + i * (32 * kScaleBytes) + lane * kScaleBytes, rows.scale[i]);
    }
    seek<W>(rows, W::kStep);
  }
  template <int kGroup>
  static __device__ __forceinline__ void read(const uint8_t* stage, typename W::Raw& raw) {
    constexpr int kGroupSlots = W::kSlots / W::kGroups;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kGroupSlots; ++i) {
      raw.v[i] =
          *reinterpret_cast<const uint4*>(stage + (kGroup * kGroupSlots + i) * 512 + lane * 16);
    }
    if constexpr (W::kScaleRows > 0) {
      const uint8_t* scales = stage + W::kSlots * 512 + lane * kScaleBytes + kGroup * 4;
#pragma unroll
      for (int i = 0; i < W::kScaleRows; ++i) {
        raw.scale[i] = *reinterpret_cast<const uint32_t*>(scales + i * (32 * kScaleBytes));
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

// Pieces (32 columns: two mmas) of a group.
template <class W>
constexpr int kGroupPieces = W::kStep / W::kGroups / 32;

// part[n] += a group's columns of the tile times the same columns of token tile n. input(n, p)
// gives this lane's piece p of the group of its token (8 n + g) of tile n.
template <class W, int kTiles, class Input>
__device__ __forceinline__ void multiply_group(const typename W::Raw& raw,
                                               const Input& input,
                                               const Lane& lane,
                                               float (&part)[kTiles][4]) {
  unrolled<kGroupPieces<W>>([&]<int p>() {
    uint4 b[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      b[n] = input(n, p);
      if constexpr (W::kScaleInput) {
        const uint32_t scale = W::input_scale(raw, p, lane);
        b[n] = make_uint4(mul_bf16x2(b[n].x, scale),
                          mul_bf16x2(b[n].y, scale),
                          mul_bf16x2(b[n].z, scale),
                          mul_bf16x2(b[n].w, scale));
      }
    }
    unrolled<2>([&]<int i>() {
      uint32_t a[W::kParts][4];
      W::template fragment<2 * p + i>(a, raw, lane);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int q = 0; q < W::kParts; ++q) {
          mma_bf16(part[n],
                   a[q][0],
                   a[q][1],
                   a[q][2],
                   a[q][3],
                   i == 0 ? b[n].x : b[n].z,
                   i == 0 ? b[n].y : b[n].w);
        }
      }
    });
  });
}

template <int kTiles>
__device__ __forceinline__ void add_part(float (&total)[kTiles][4],
                                         const float (&part)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[n][i] += part[n][i];
    }
  }
}

}  // namespace cachalot::ops::cuda
