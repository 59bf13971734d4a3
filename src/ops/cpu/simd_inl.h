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

// The BF16 bits nearest to v (ties to even, NaN stays NaN), in the low half of each lane.
HWY_INLINE hn::Vec<U32> bf16_bits(Vec v) {
  const U32 du;
  const auto u = hn::BitCast(du, v);
  const auto upper = hn::ShiftRight<16>(u);
  const auto odd = hn::And(upper, hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7FFF))));
  const auto quiet = hn::Or(upper, hn::Set(du, 0x40));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

HWY_INLINE Vec round_bf16_vec(Vec v) {
  return hn::BitCast(F32(), hn::ShiftLeft<16>(bf16_bits(v)));
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
  hn::StoreU(hn::DemoteTo(d, hn::BitCast(I32(), bf16_bits(v))), d, reinterpret_cast<uint16_t*>(p));
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

HWY_INLINE float lane_sum(Vec v) {
  return hn::GetLane(hn::SumOfLanes(F32(), v));
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

// 32 packed E2M1 codes times the power of two of `scale`, in transposed order: position 4 c + i of
// each half holds value 4 i + c. The products come out of byte shuffles as BF16 patterns, so the
// scale is free; the interleaving of shuffle results is what fixes the order.
HWY_INLINE void decode_e2m1(const uint8_t* codes, uint8_t scale, Vec (&w)[kBlockVecs]) {
  const hn::Repartition<uint8_t, F32> d8;
  const U32 du;
  const Fp4Patterns& table = kFp4Patterns[scale];
  const auto high = hn::LoadDup128(d8, table.high);
  const auto low = hn::LoadDup128(d8, table.low);
  const auto odd_mask = hn::Set(du, 0xFFFF0000u);
#if HWY_MAX_BYTES >= 32
  // Low nibbles in the lower half, high nibbles in the upper half.
  alignas(32) static constexpr uint32_t kShifts[8] = {0, 0, 0, 0, 4, 4, 4, 4};
  const auto both = hn::BitCast(du, hn::LoadDup128(d8, codes));
  const auto nibbles =
      hn::And(hn::BitCast(d8, hn::Shr(both, hn::Load(du, kShifts))), hn::Set(d8, 0x0F));
  const auto h = hn::TableLookupBytes(high, nibbles);
  const auto l = hn::TableLookupBytes(low, nibbles);
  const auto first = hn::BitCast(du, hn::InterleaveLower(d8, l, h));
  const auto second = hn::BitCast(du, hn::InterleaveUpper(d8, l, h));
  w[0] = hn::BitCast(F32(), hn::ShiftLeft<16>(first));
  w[1] = hn::BitCast(F32(), hn::And(first, odd_mask));
  w[2] = hn::BitCast(F32(), hn::ShiftLeft<16>(second));
  w[3] = hn::BitCast(F32(), hn::And(second, odd_mask));
#else
  const auto both = hn::LoadU(d8, codes);
  const auto mask = hn::Set(d8, 0x0F);
  const decltype(both) nibbles[2] = {
      hn::And(both, mask),
      hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(du, both))), mask)};
  for (int64_t part = 0; part < 2; ++part) {
    const auto h = hn::TableLookupBytes(high, nibbles[part]);
    const auto l = hn::TableLookupBytes(low, nibbles[part]);
    const auto first = hn::BitCast(du, hn::InterleaveLower(d8, l, h));
    const auto second = hn::BitCast(du, hn::InterleaveUpper(d8, l, h));
    w[part] = hn::BitCast(F32(), hn::ShiftLeft<16>(first));
    w[2 + part] = hn::BitCast(F32(), hn::And(first, odd_mask));
    w[4 + part] = hn::BitCast(F32(), hn::ShiftLeft<16>(second));
    w[6 + part] = hn::BitCast(F32(), hn::And(second, odd_mask));
  }
#endif
}

// 32 E4M3 codes times the power of two of `scale` and 2^-60. A group of 4 kLanes codes is one
// vector of words; value 4 l + v of it goes to position v kLanes + l: byte v of lane l, shifted so
// that its bits fall on those of a float, is the code * 2^-120, subnormals included, and the
// product with scale * 2^60 is exact. Three integer operations beat the conversion through half
// floats by far on Zen 3. Subnormal codes are subnormal floats here, which some processors multiply
// slowly, but they are rare.
HWY_INLINE void decode_e4m3_words(const uint8_t* codes, uint8_t scale, Vec (&w)[kBlockVecs]) {
  const U32 du;
  const I32 di;
  const auto mask = hn::Set(di, static_cast<int32_t>(0x87F00000u));
  const auto factor = hn::Set(F32(), kE8m0Times2p60[scale]);
  for (int64_t group = 0; group < kBlockVecs / 4; ++group) {
    const hn::Repartition<uint8_t, F32> d8;
    const auto words = hn::BitCast(du, hn::LoadU(d8, codes + group * 4 * kLanes));
    const auto place = [&](hn::Vec<U32> top) HWY_ATTR {
      const auto bits = hn::And(hn::ShiftRight<4>(hn::BitCast(di, top)), mask);
      return hn::Mul(hn::BitCast(F32(), bits), factor);
    };
    w[group * 4] = place(hn::ShiftLeft<24>(words));
    w[group * 4 + 1] = place(hn::ShiftLeft<16>(words));
    w[group * 4 + 2] = place(hn::ShiftLeft<8>(words));
    w[group * 4 + 3] = place(words);
  }
}

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

// The 32 weights at `bytes` with their scale byte, in units of weight_unit(), in the format's order
// (row_order()); exact in FP32.
template <WeightFormat kFormat>
HWY_INLINE void decode_block(const uint8_t* bytes, uint8_t scale, Vec (&w)[kBlockVecs]) {
  if constexpr (kFormat == WeightFormat::kF32) {
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      w[v] = load_vec(reinterpret_cast<const float*>(bytes) + v * kLanes);
    }
  } else if constexpr (kFormat == WeightFormat::kBF16) {
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      w[v] = load_vec(reinterpret_cast<const bf16*>(bytes) + v * kLanes);
    }
  } else if constexpr (kFormat == WeightFormat::kFp4Row) {
    decode_e2m1(bytes, scale, w);
  } else if constexpr (kFormat == WeightFormat::kFp8Block) {
    decode_e4m3_words(bytes, scale, w);
  } else {
    const auto factor = hn::Set(F32(), kE8m0Times256[scale]);
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      w[v] = hn::Mul(decode_e4m3(bytes + v * kLanes), factor);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
