// What the tensor-core attention kernels (attend_mma.cu, attend_few.cu) share: operand tiles, codes
// to BF16, queries in, outputs out.
#pragma once

#include "ops/cuda/attend.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/warpgroup.cuh"
#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda::attention {

constexpr int kDim = 512;
constexpr int kHeads = 64;              // rows of a product
constexpr int kGroup = 128;             // threads of a warpgroup
constexpr int kTile = kKeyBlock * 128;  // bytes of 64 rows of 64 BF16
constexpr int kTiles = kDim / 64;       // of a row
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kCacheScale = 128.0f;  // both row kinds unpack to 2^-7 of their value
static_assert(kKeyBlock == 64 && kHeads == 64);

// Unpacking
// -------------------------------------------------------------------------------------------

// BF16 pairs (i, i + 4) of eight E4M3 codes; the multiplier is 2^113 times the scale.
__device__ __forceinline__ uint4 unpack_window(uint32_t low, uint32_t high, uint32_t multiplier) {
  const auto pair = [&](uint32_t selector) {
    const uint32_t w = __byte_perm(low, high, selector);  // the codes in bytes 1 and 3
    return mul_bf16x2(merge_bits(w, 0x80008000u, (w >> 4) & 0x07F007F0u), multiplier);
  };
  return make_uint4(pair(0x4404), pair(0x5515), pair(0x6626), pair(0x7737));
}
// The same of eight E2M1 codes; the multiplier is 2^119 times the scale.
__device__ __forceinline__ uint4 unpack_main(uint32_t codes, uint32_t multiplier) {
  return make_uint4(mul_bf16x2(Fp4Weights::nibbles<0>(codes), multiplier),
                    mul_bf16x2(Fp4Weights::nibbles<1>(codes), multiplier),
                    mul_bf16x2(Fp4Weights::nibbles<2>(codes), multiplier),
                    mul_bf16x2(Fp4Weights::nibbles<3>(codes), multiplier));
}
// Multipliers of two E4M3 scales. Their magnitude bits, placed, are the value times 2^-120.
__device__ __forceinline__ uint32_t main_multipliers(uint32_t scales) {
  constexpr uint32_t k2To120 = 0x7B807B80u, k2To119 = 0x7B007B00u;
  const uint32_t spread = __byte_perm(scales, 0, 0x4140);
  const uint32_t magnitude = spread & 0x007F007Fu;
  const uint32_t placed = merge_bits(spread << 8, 0x80008000u, magnitude << 4);
  const uint32_t nan = ((magnitude + 0x00010001u) & 0x00800080u) / 0x80u * 0x7FC0u;
  return mul_bf16x2(mul_bf16x2(placed, k2To120), k2To119) | nan;
}

// Store a 16-byte piece at piece i behind `at`, whose swizzle is that of `at` with the bits of i
// flipped. Eight lanes with the same columns of eight keys store at once, to different banks.
__device__ __forceinline__ void store_piece_at(uint8_t* to, int at, int i, const uint4& v) {
  *reinterpret_cast<uint4*>(to + (at ^ 16 * i)) = v;
}
// Rows in and out
// ----------------------------------------------------------------------------------------

// Cosines and sines of the pairs of columns 8 piece .. 8 piece + 7 of a head.
struct Turn {
  float cosine[4], sine[4];
  bool any;

  __device__ __forceinline__ Turn(const AttendProblem& a, int64_t token, int piece) : any(false) {
    const int first_rotated = kDim - 2 * static_cast<int>(a.half);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int pair = 8 * piece + 2 * e - first_rotated;
      cosine[e] = 1;
      sine[e] = 0;
      if (pair >= 0) {
        cosine[e] = a.rope[token * a.half * 2 + pair];
        sine[e] = a.rope[token * a.half * 2 + pair + 1];
        any = true;
      }
    }
  }
  __device__ __forceinline__ void apply(float (&v)[8], float sign) const {
    if (any) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 turned = rotate_pair(v[2 * e], v[2 * e + 1], cosine[e], sign * sine[e]);
        v[2 * e] = turned.x;
        v[2 * e + 1] = turned.y;
      }
    }
  }
};

// A 16-byte piece of a query in the column order of the unpacked rows, rotated and rounded.
__device__ __forceinline__ uint4 turned_piece(const uint4& raw, const Turn& turn) {
  float v[8] = {low_bf16(raw.x),
                high_bf16(raw.x),
                low_bf16(raw.y),
                high_bf16(raw.y),
                low_bf16(raw.z),
                high_bf16(raw.z),
                low_bf16(raw.w),
                high_bf16(raw.w)};
  turn.apply(v, 1.0f);
  return make_uint4(
      bf16_pair(v[0], v[4]), bf16_pair(v[1], v[5]), bf16_pair(v[2], v[6]), bf16_pair(v[3], v[7]));
}

constexpr int kOutputBuffer = 16 * 128;  // bytes: 16 heads, 64 columns

// The sums of a warp's 16 heads and kColumns columns, from group of eight columns `group` on, times
// `factor`, rounded, rotated back and stored. `head` is that of the first row, `buffer` the warp's.
template <int kColumns>
__device__ __forceinline__ void store_output(const AttendProblem& a,
                                             int64_t token,
                                             int head,
                                             int group,
                                             const float (&acc)[kColumns / 8][4],
                                             const float (&factor)[2],
                                             uint8_t* buffer) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto* o = static_cast<Bf16*>(a.o) + (token * a.heads + head + lane / 8) * kDim;
  const int rows = a.heads - head - lane / 8;
#pragma unroll
  for (int first = 0; first < kColumns / 8; first += 8) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i % 2, half = i / 2;
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float (&sums)[4] = acc[first + 4 * half + n];
        words[n] = bf16_pair(sums[2 * h] * factor[h], sums[2 * h + 1] * factor[h]);
      }
      store_matrices(buffer + tile_place(8 * h + lane % 8, 4 * half + lane / 8), words);
    }
    __syncwarp();
    const int piece = group + first + lane % 8;
    const Turn turn(a, token, piece);
#pragma unroll 1
    for (int row = 0; row < 16; row += 4) {
      // Words hold channels i and i + 4 of a group.
      const uint4 words =
          *reinterpret_cast<const uint4*>(buffer + tile_place(row + lane / 8, lane % 8));
      uint4 out = make_uint4(__byte_perm(words.x, words.y, 0x5410),
                             __byte_perm(words.z, words.w, 0x5410),
                             __byte_perm(words.x, words.y, 0x7632),
                             __byte_perm(words.z, words.w, 0x7632));
      if (turn.any) {
        float v[8] = {low_bf16(out.x),
                      high_bf16(out.x),
                      low_bf16(out.y),
                      high_bf16(out.y),
                      low_bf16(out.z),
                      high_bf16(out.z),
                      low_bf16(out.w),
                      high_bf16(out.w)};
        turn.apply(v, -1.0f);
        out = make_uint4(bf16_pair(v[0], v[1]),
                         bf16_pair(v[2], v[3]),
                         bf16_pair(v[4], v[5]),
                         bf16_pair(v[6], v[7]));
      }
      if (row < rows) {
        __stcg(reinterpret_cast<uint4*>(o + row * kDim + 8 * piece), out);
      }
    }
  }
}

// Probabilities of heads `head` and `head` + 8 and their sums: four of 16 keys, in order.
__device__ __forceinline__ void exponentiate(
    const float (&s)[8][4], const float (&best)[2], int head, uint8_t* p, float* sum) {
  const Lane place;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = 0;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      float part = 0;
#pragma unroll
      for (int n = 2 * g; n < 2 * g + 2; ++n) {
        const float p0 = exp2_flushed(s[n][2 * h] - best[h]);
        const float p1 = exp2_flushed(s[n][2 * h + 1] - best[h]);
        part += p0;
        part += p1;
        *reinterpret_cast<uint32_t*>(p + tile_place(head + 8 * h, n) + 4 * place.t) =
            bf16_pair(p0, p1);
      }
      part += __shfl_xor_sync(kAllLanes, part, 1);
      part += __shfl_xor_sync(kAllLanes, part, 2);
      total += part;
    }
    if (place.t == 0) {
      sum[head + 8 * h] = total;
    }
  }
}

// Sums of two rows, times the rows' factors. Most blocks of keys raise no maximum.
template <int kCount>
__device__ __forceinline__ void rescale_sums(float (&acc)[kCount][4], float first, float second) {
  if (__any_sync(kAllLanes, first != 1.0f || second != 1.0f)) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      acc[n][0] *= first;
      acc[n][1] *= first;
      acc[n][2] *= second;
      acc[n][3] *= second;
    }
  }
}

}  // namespace cachalot::ops::cuda::attention
