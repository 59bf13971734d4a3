// Vector helpers shared by the SIMD sources; compiled once per instruction set (no #pragma once).
#include "hwy/highway.h"
#include "ops/cpu/simd.h"
#include "ops/cpu/tables.h"

#if defined(CACHALOT_OPS_CPU_SIMD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef CACHALOT_OPS_CPU_SIMD_INL_H
#undef CACHALOT_OPS_CPU_SIMD_INL_H
#else
#define CACHALOT_OPS_CPU_SIMD_INL_H
#endif

// Before a loop over an array of vectors that is to stay in registers: GCC unrolls it on its own as
// well, but only after it has given the array a place in memory.
#undef CACHALOT_UNROLL
#if HWY_COMPILER_GCC_ACTUAL
#define CACHALOT_UNROLL _Pragma("GCC unroll 16")
#else
#define CACHALOT_UNROLL
#endif

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 8>;
using U32 = hn::Rebind<uint32_t, F32>;
using I32 = hn::Rebind<int32_t, F32>;
using Vec = hn::Vec<F32>;

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));
static_assert(kLanes == 4 || kLanes == 8);
// Vectors per block of 32 values.
constexpr int64_t kBlockVecs = 32 / kLanes;

// BF16
// ---------------------------------------------------------------------------------------------

// v rounded to BF16 (ties to even, NaN stays NaN), in the upper half of each lane; the rest is
// open.
HWY_INLINE hn::Vec<U32> bf16_upper(Vec v) {
  const U32 du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(u, hn::Set(du, 0x7FFF)), odd);
  const auto quiet = hn::Or(u, hn::Set(du, 0x400000));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

HWY_INLINE Vec round_bf16_vec(Vec v) {
  return hn::BitCast(F32(), hn::And(bf16_upper(v), hn::Set(U32(), 0xFFFF0000u)));
}

// Loads and stores of tensor memory
// ----------------------------------------------------------------

HWY_INLINE Vec load_vec(const float* p) {
  return hn::LoadU(F32(), p);
}
HWY_INLINE Vec load_vec(const bf16* p) {
  const hn::Rebind<hwy::bfloat16_t, F32> d;
  return hn::PromoteTo(F32(), hn::LoadU(d, reinterpret_cast<const hwy::bfloat16_t*>(p)));
}
HWY_INLINE void store_vec(Vec v, float* p) {
  hn::StoreU(v, F32(), p);
}
HWY_INLINE void store_vec(Vec v, bf16* p) {
  const hn::Rebind<uint16_t, F32> d;
  const auto bits = hn::ShiftRight<16>(bf16_upper(v));
  hn::StoreU(hn::DemoteTo(d, hn::BitCast(I32(), bits)), d, reinterpret_cast<uint16_t*>(p));
}

// Values i .. i + kLanes - 1 of n; zeros behind n.
template <class T>
HWY_INLINE Vec load_at(const T* p, int64_t i, int64_t n) {
  if (HWY_LIKELY(i + kLanes <= n)) {
    return load_vec(p + i);
  }
  T tail[kLanes] = {};
  for (int64_t j = i; j < n; ++j) {
    tail[j - i] = p[j];
  }
  return load_vec(tail);
}
template <class T>
HWY_INLINE void store_at(Vec v, T* p, int64_t i, int64_t n) {
  if (HWY_LIKELY(i + kLanes <= n)) {
    store_vec(v, p + i);
    return;
  }
  T tail[kLanes];
  store_vec(v, tail);
  for (int64_t j = i; j < n; ++j) {
    p[j] = tail[j - i];
  }
}

// v as it reads back from memory of type T.
HWY_INLINE Vec round_to(Vec v, const float*) {
  return v;
}
HWY_INLINE Vec round_to(Vec v, const bf16*) {
  return round_bf16_vec(v);
}

// min and max that keep a NaN in v; the hardware instructions differ there.
HWY_INLINE Vec at_most(Vec v, Vec limit) {
  return hn::IfThenElse(hn::Gt(v, limit), limit, v);
}
HWY_INLINE Vec at_least(Vec v, Vec limit) {
  return hn::IfThenElse(hn::Lt(v, limit), limit, v);
}

// The sum over the lanes, in this tree: the halves of 8 lanes, then lanes 2 apart, then 1 apart.
HWY_INLINE float lane_sum(Vec v) {
#if HWY_MAX_BYTES >= 32
  v = hn::Add(v, hn::ConcatLowerUpper(F32(), v, v));
#endif
  v = hn::Add(v, hn::Shuffle1032(v));
  return hn::GetLane(hn::Add(v, hn::Shuffle2301(v)));
}

// lane_sum of kLanes vectors, by the same tree for all at once.
HWY_INLINE Vec lane_sums(const Vec (&v)[kLanes]) {
  const F32 d;
  Vec half[4];
  CACHALOT_UNROLL
  for (int64_t i = 0; i < 4; ++i) {
#if HWY_MAX_BYTES >= 32
    half[i] =
        hn::Add(hn::ConcatLowerLower(d, v[4 + i], v[i]), hn::ConcatUpperUpper(d, v[4 + i], v[i]));
#else
    half[i] = v[i];
#endif
  }
  const auto pair = [&](const Vec& a, const Vec& b) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  return pair(pair(half[0], half[2]), pair(half[1], half[3]));
}

// out[r * out_ld + c] = lane_sum(v[r][c]) * factor.
template <int kRows, int kColumns>
HWY_INLINE void store_sums(const Vec (&v)[kRows][kColumns],
                           float factor,
                           float* out,
                           int64_t out_ld) {
  constexpr int64_t kCount = kRows * kColumns, kGroups = (kCount + kLanes - 1) / kLanes;
  alignas(32) float sums[kGroups * kLanes];
  CACHALOT_UNROLL
  for (int64_t g = 0; g < kGroups; ++g) {
    Vec group[kLanes];
    CACHALOT_UNROLL
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t at = g * kLanes + i;
      group[i] = at < kCount ? v[at / kColumns][at % kColumns] : hn::Zero(F32());
    }
    hn::Store(hn::Mul(lane_sums(group), hn::Set(F32(), factor)), F32(), sums + g * kLanes);
  }
  CACHALOT_UNROLL
  for (int64_t i = 0; i < kCount; ++i) {
    out[i / kColumns * out_ld + i % kColumns] = sums[i];
  }
}

// FP8 and FP4 decoding
// -----------------------------------------------------------------------------

// kLanes E4M3 codes * 2^-8. As a half float, the pattern s0eeeemmm0000000 has that value,
// subnormals included, so the hardware conversion does the work. Code 0x7F becomes 480 * 2^-8: rows
// that hold NaN carry it in their scale as well.
HWY_INLINE Vec decode_e4m3(const uint8_t* codes) {
  const hn::Rebind<int8_t, F32> d8;
  const hn::Rebind<int16_t, F32> d16;
  const hn::Rebind<hwy::float16_t, F32> half;
  const auto wide = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes)));
  const auto pattern = hn::And(hn::ShiftLeft<7>(wide), hn::Set(d16, static_cast<int16_t>(0xBF80)));
  return hn::PromoteTo(F32(), hn::BitCast(half, pattern));
}

// 32 packed E2M1 codes times the power of two of `scale`, as BF16 patterns in pairs, in transposed
// order: position 4 c + i of each half of the 32 holds value 4 i + c. The patterns come out of byte
// shuffles, so the scale is free; the interleaving of shuffle results is what fixes the order.
HWY_INLINE void decode_e2m1(const uint8_t* codes,
                            uint8_t scale,
                            hn::Vec<U32> (&pairs)[kBlockVecs / 2]) {
  const hn::Repartition<uint8_t, F32> d8;
  const U32 du;
  const Fp4Patterns& table = kFp4Patterns[scale];
  const auto high = hn::LoadDup128(d8, table.high);
  const auto low = hn::LoadDup128(d8, table.low);
#if HWY_MAX_BYTES >= 32
  // Low nibbles in the lower half, high nibbles in the upper half.
  alignas(32) static constexpr uint32_t kShifts[8] = {0, 0, 0, 0, 4, 4, 4, 4};
  const auto both = hn::BitCast(du, hn::LoadDup128(d8, codes));
  const auto nibbles =
      hn::And(hn::BitCast(d8, hn::Shr(both, hn::Load(du, kShifts))), hn::Set(d8, 0x0F));
  const auto h = hn::TableLookupBytes(high, nibbles);
  const auto l = hn::TableLookupBytes(low, nibbles);
  pairs[0] = hn::BitCast(du, hn::InterleaveLower(d8, l, h));
  pairs[1] = hn::BitCast(du, hn::InterleaveUpper(d8, l, h));
#else
  const auto both = hn::LoadU(d8, codes);
  const auto mask = hn::Set(d8, 0x0F);
  const decltype(both) nibbles[2] = {
      hn::And(both, mask),
      hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(du, both))), mask)};
  for (int64_t part = 0; part < 2; ++part) {
    const auto h = hn::TableLookupBytes(high, nibbles[part]);
    const auto l = hn::TableLookupBytes(low, nibbles[part]);
    pairs[part] = hn::BitCast(du, hn::InterleaveLower(d8, l, h));
    pairs[2 + part] = hn::BitCast(du, hn::InterleaveUpper(d8, l, h));
  }
#endif
}

// 32 E4M3 codes as the upper halves of floats, in pairs. A group of 4 kLanes codes is one vector of
// words; value 4 l + v of it goes to position v kLanes + l: byte v of lane l, shifted so that its
// bits fall on those of a float (and of its neighbour, which kE4m3Bits masks), is the code *
// 2^-120, subnormals included. Shifts and a mask beat the conversion through half floats by far on
// Zen 3. Subnormal codes are subnormal floats here, which some processors multiply slowly, but they
// are rare.
class E4m3Block {
 public:
  E4m3Block() = default;
  HWY_INLINE explicit E4m3Block(const uint8_t* codes) {
    const hn::Repartition<uint8_t, F32> d8;
    const hn::Repartition<int16_t, F32> d16;
    const U32 du;
    for (int64_t group = 0; group < kBlockVecs / 4; ++group) {
      const auto words = hn::BitCast(d16, hn::LoadU(d8, codes + group * 4 * kLanes));
      pairs_[2 * group] = hn::BitCast(du, hn::ShiftRight<4>(hn::ShiftLeft<8>(words)));
      pairs_[2 * group + 1] = hn::BitCast(du, hn::ShiftRight<4>(words));
    }
  }

  HWY_INLINE Vec vector(int64_t v) const {
    const auto& pairs = pairs_[v / 4 * 2 + v % 2];
    const auto bits = v % 4 < 2 ? hn::ShiftLeft<16>(pairs) : pairs;
    return hn::BitCast(F32(), hn::And(bits, hn::Set(U32(), kE4m3Bits)));
  }

 private:
  static constexpr uint32_t kE4m3Bits = 0x87F00000u;
  hn::Vec<U32> pairs_[kBlockVecs / 2];
};

// Storage of 32 values per format.
template <WeightFormat kFormat>
constexpr int64_t block_bytes() {
  switch (kFormat) {
    case WeightFormat::kF32:
      return 128;
    case WeightFormat::kBF16:
      return 64;
    case WeightFormat::kFp8Block:
    case WeightFormat::kFp8Row:
      return 32;
    case WeightFormat::kFp4Row:
      return 16;
  }
  return 0;
}

// What decoded weights are to be multiplied by.
template <WeightFormat kFormat>
constexpr float weight_unit() {
  return kFormat == WeightFormat::kFp8Block ? 0x1.0p60f : 1.0f;
}

// 32 weights in units of weight_unit(), in the format's order (row_order()), decoded in two steps:
// what it takes to have them all in few registers, then vector by vector. Exact in FP32.
template <WeightFormat kFormat>
class WeightBlock {
 public:
  WeightBlock() = default;
  HWY_INLINE WeightBlock(const uint8_t* bytes, uint8_t scale) : bytes_(bytes) {
    if constexpr (kFormat == WeightFormat::kFp4Row) {
      decode_e2m1(bytes, scale, pairs_);
    } else if constexpr (kFormat == WeightFormat::kFp8Block) {
      codes_ = E4m3Block(bytes);
      // 2^(scale - 127 + 60): with the unit of 2^60 it keeps the products exact.
      factor_ = hn::Set(F32(), kE8m0Times2p60[scale]);
    } else if constexpr (kFormat == WeightFormat::kFp8Row) {
      factor_ = hn::Set(F32(), kE8m0Times256[scale]);
    }
  }

  HWY_INLINE Vec vector(int64_t v) const {
    const U32 du;
    if constexpr (kFormat == WeightFormat::kF32) {
      return load_vec(reinterpret_cast<const float*>(bytes_) + v * kLanes);
    } else if constexpr (kFormat == WeightFormat::kBF16) {
      return load_vec(reinterpret_cast<const bf16*>(bytes_) + v * kLanes);
    } else if constexpr (kFormat == WeightFormat::kFp4Row) {
      // Vectors of the lower values of pairs, then of the upper ones, pair by pair of a half.
      constexpr int64_t kHalves = 8 / kLanes;
      const auto& pairs = pairs_[v / (2 * kHalves) * kHalves + v % kHalves];
      return hn::BitCast(F32(),
                         v / kHalves % 2 == 0 ? hn::ShiftLeft<16>(pairs)
                                              : hn::And(pairs, hn::Set(du, 0xFFFF0000u)));
    } else if constexpr (kFormat == WeightFormat::kFp8Block) {
      return hn::Mul(codes_.vector(v), factor_);
    } else {
      return hn::Mul(decode_e4m3(bytes_ + v * kLanes), factor_);
    }
  }

 private:
  const uint8_t* bytes_;
  Vec factor_;
  E4m3Block codes_;
  hn::Vec<U32> pairs_[kBlockVecs / 2];
};

template <WeightFormat kFormat>
HWY_INLINE void decode_block(const uint8_t* bytes, uint8_t scale, Vec (&w)[kBlockVecs]) {
  const WeightBlock<kFormat> block(bytes, scale);
  for (int64_t v = 0; v < kBlockVecs; ++v) {
    w[v] = block.vector(v);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
