// Row primitives: block quantizers and cache rows.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/cache_rows.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/highway.h"
#include "ops/cpu/simd_inl.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/block.h"
#include "quant/formats.h"

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

// The largest magnitude of kVecs vectors; NaN if there is one (as an integer, NaN beats infinity).
template <int64_t kVecs>
HWY_INLINE float block_amax(const float* x) {
  const I32 di;
  auto most = hn::Zero(di);
  for (int64_t v = 0; v < kVecs; ++v) {
    const auto magnitude = hn::Abs(load_vec(x + v * kLanes));
    most = hn::Max(most, hn::BitCast(di, magnitude));
  }
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(di, most)));
}

// v rounded to a grid with `kBits` significand bits above 2^kMinExponent and a fixed step below:
// adding the power of two whose ulp is the step rounds to nearest even.
template <int kMinExponent, int kBits>
HWY_INLINE Vec round_to_grid(Vec v) {
  const U32 du;
  const auto magnitude = hn::Abs(v);
  const auto exponent = hn::And(hn::BitCast(du, magnitude), hn::Set(du, 0x7F800000u));
  const auto least = hn::Set(du, static_cast<uint32_t>(kMinExponent + 127) << 23);
  const auto shift = hn::Set(du, static_cast<uint32_t>(24 - kBits) << 23);
  const auto magic = hn::BitCast(F32(), hn::Add(hn::Max(exponent, least), shift));
  return hn::CopySign(hn::Sub(hn::Add(magnitude, magic), magic), v);
}
HWY_INLINE Vec round_to_e4m3(Vec v) {
  return round_to_grid<-6, 4>(v);
}
HWY_INLINE Vec round_to_e2m1(Vec v) {
  return round_to_grid<0, 2>(v);
}

HWY_INLINE Vec clamp_to(Vec v, float limit) {
  return hn::Min(hn::Set(F32(), limit), hn::Max(hn::Set(F32(), -limit), v));
}

// The E8M0 scale byte of a block of 32; 255 for a block that is not finite.
HWY_INLINE uint8_t block_scale(const float* x, float floor, float reciprocal) {
  const float amax = block_amax<kBlockVecs>(x);
  return std::isfinite(amax) ? quant::e8m0_ceil(std::max(amax, floor) * reciprocal) : 255;
}
// 2^(127 - scale): multiplying by it is the true division by the scale, both being powers of two.
HWY_INLINE float inverse_scale(uint8_t scale) {
  return std::bit_cast<float>(static_cast<uint32_t>(254 - scale) << 23);
}

constexpr float kFp8Floor = 1e-4f, kFp8Reciprocal = 1.0f / 448.0f;
constexpr float kFp4Floor = 6.0f * 0x1.0p-126f, kFp4Reciprocal = 1.0f / 6.0f;

void fill_nan(float* x) {
  for (int64_t v = 0; v < kBlockVecs; ++v) {
    store_vec(hn::Set(F32(), kE8m0Times256[255]), x + v * kLanes);
  }
}

void fp8_round_row(float* row, int64_t n) {
  for (float* x = row; x < row + n; x += 32) {
    const uint8_t scale = block_scale(x, kFp8Floor, kFp8Reciprocal);
    if (scale == 255) {
      fill_nan(x);
      continue;
    }
    const auto inverse = hn::Set(F32(), inverse_scale(scale));
    const auto factor = hn::Set(F32(), quant::e8m0_decode(scale));
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      const auto scaled = clamp_to(hn::Mul(load_vec(x + v * kLanes), inverse), quant::kE4m3Max);
      store_vec(hn::Mul(round_to_e4m3(scaled), factor), x + v * kLanes);
    }
  }
}

void fp4_index_round_row(float* row, int64_t n) {
  for (float* x = row; x < row + n; x += 32) {
    const uint8_t scale = block_scale(x, kFp4Floor, kFp4Reciprocal);
    if (scale == 255) {
      fill_nan(x);
      continue;
    }
    const auto inverse = hn::Set(F32(), inverse_scale(scale));
    const auto factor = hn::Set(F32(), quant::e8m0_decode(scale));
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      const auto scaled = clamp_to(hn::Mul(load_vec(x + v * kLanes), inverse), quant::kE2m1Max);
      store_vec(hn::Mul(round_to_e2m1(scaled), factor), x + v * kLanes);
    }
  }
}

// The codes of grid values: a grid value's float bits end in its code, except below the least
// exponent, where the code counts steps.
HWY_INLINE void store_codes(hn::Vec<I32> magnitude, Vec value, int sign_shift, uint8_t* codes) {
  const U32 du;
  const I32 di;
  const hn::Rebind<uint8_t, F32> d8;
  const auto sign = hn::ShiftRight<31>(hn::BitCast(du, value));
  const auto placed = hn::BitCast(di, hn::ShiftLeftSame(sign, sign_shift));
  hn::StoreU(hn::DemoteTo(d8, hn::Or(magnitude, placed)), d8, codes);
}
HWY_INLINE void store_e4m3(Vec grid, uint8_t* codes) {
  const I32 di;
  const auto magnitude = hn::Abs(grid);
  const auto normal =
      hn::Sub(hn::ShiftRight<20>(hn::BitCast(di, magnitude)), hn::Set(di, 120 << 3));
  const auto steps = hn::ConvertTo(di, hn::Mul(magnitude, hn::Set(F32(), 512.0f)));
  const auto small = hn::RebindMask(di, hn::Lt(magnitude, hn::Set(F32(), 0x1.0p-6f)));
  store_codes(hn::IfThenElse(small, steps, normal), grid, 7, codes);
}
HWY_INLINE void store_e2m1(Vec grid, uint8_t* codes) {
  const I32 di;
  const auto magnitude = hn::Abs(grid);
  const auto normal =
      hn::Sub(hn::ShiftRight<22>(hn::BitCast(di, magnitude)), hn::Set(di, (127 << 1) - 2));
  const auto steps = hn::ConvertTo(di, hn::Mul(magnitude, hn::Set(F32(), 2.0f)));
  const auto small = hn::RebindMask(di, hn::Lt(magnitude, hn::Set(F32(), 1.0f)));
  store_codes(hn::IfThenElse(small, steps, normal), grid, 3, codes);
}

void pack_nibbles(const uint8_t* codes, int64_t n, uint8_t* packed) {
  for (int64_t i = 0; i < n; i += 2) {
    packed[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
  }
}

void encode_window_row(const float* row, int64_t n, uint8_t* bytes) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const float* x = row + begin;
    const uint8_t scale = block_scale(x, kFp8Floor, kFp8Reciprocal);
    bytes[n + begin / 32] = scale;
    uint8_t codes[32];
    if (scale == 255) {
      std::memset(codes, 0x7F, sizeof(codes));
    } else {
      const auto inverse = hn::Set(F32(), inverse_scale(scale));
      for (int64_t v = 0; v < kBlockVecs; ++v) {
        const auto scaled = clamp_to(hn::Mul(load_vec(x + v * kLanes), inverse), quant::kE4m3Max);
        store_e4m3(round_to_e4m3(scaled), codes + v * kLanes);
      }
    }
    std::memcpy(bytes + begin, codes, static_cast<size_t>(std::min<int64_t>(32, n - begin)));
  }
}

void encode_index_row(const float* row, int64_t n, uint8_t* bytes) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const float* x = row + begin;
    const uint8_t scale = block_scale(x, kFp4Floor, kFp4Reciprocal);
    bytes[(n + 1) / 2 + begin / 32] = scale;
    uint8_t codes[32] = {};
    if (scale != 255) {
      const auto inverse = hn::Set(F32(), inverse_scale(scale));
      for (int64_t v = 0; v < kBlockVecs; ++v) {
        const auto scaled = clamp_to(hn::Mul(load_vec(x + v * kLanes), inverse), quant::kE2m1Max);
        store_e2m1(round_to_e2m1(scaled), codes + v * kLanes);
      }
    }
    pack_nibbles(codes, std::min<int64_t>(32, n - begin), bytes + begin / 2);
  }
}

void encode_main_row(const float* row, int64_t n, uint8_t* bytes) {
  constexpr int64_t kVecs = 16 / kLanes;
  for (int64_t begin = 0; begin < n; begin += 16) {
    const float* x = row + begin;
    const float amax = block_amax<kVecs>(x);
    uint8_t codes[16] = {};
    uint8_t scale = 0x7F;
    if (std::isfinite(amax)) {
      scale = quant::e4m3_encode(std::max(amax, 6.0f * 0x1.0p-9f) / 6.0f);
      const auto divisor = hn::Set(F32(), kE4m3[scale]);
      for (int64_t v = 0; v < kVecs; ++v) {
        const auto scaled = clamp_to(hn::Div(load_vec(x + v * kLanes), divisor), quant::kE2m1Max);
        store_e2m1(round_to_e2m1(scaled), codes + v * kLanes);
      }
    }
    bytes[(n + 1) / 2 + begin / 16] = scale;
    pack_nibbles(codes, std::min<int64_t>(16, n - begin), bytes + begin / 2);
  }
}

// The bytes of block `begin` of a row with `bytes_left` bytes, behind which there are zeros.
template <int64_t kBytes>
HWY_INLINE const uint8_t* whole_block(const uint8_t* bytes, int64_t bytes_left, uint8_t* copy) {
  if (HWY_LIKELY(bytes_left >= kBytes)) {
    return bytes;
  }
  std::memset(copy, 0, static_cast<size_t>(kBytes));
  std::memcpy(copy, bytes, static_cast<size_t>(bytes_left));
  return copy;
}

void decode_window_row(const uint8_t* bytes, int64_t n, float* row) {
  uint8_t copy[32];
  for (int64_t begin = 0; begin < n; begin += 32) {
    Vec w[kBlockVecs];
    decode_block<WeightFormat::kFp8Row>(
        whole_block<32>(bytes + begin, n - begin, copy), bytes[n + begin / 32], w);
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      store_vec(w[v], row + begin + v * kLanes);
    }
  }
}

// A transposed group of 16 decoded values, times a factor, in natural order.
HWY_INLINE void store_group(const Vec* w, float factor, float* out) {
  const hn::CappedTag<float, 4> d;
  const auto f = hn::Set(d, factor);
#if HWY_MAX_BYTES >= 32
  hn::StoreInterleaved4(hn::Mul(hn::LowerHalf(d, w[0]), f),
                        hn::Mul(hn::UpperHalf(d, w[0]), f),
                        hn::Mul(hn::LowerHalf(d, w[1]), f),
                        hn::Mul(hn::UpperHalf(d, w[1]), f),
                        d,
                        out);
#else
  hn::StoreInterleaved4(
      hn::Mul(w[0], f), hn::Mul(w[1], f), hn::Mul(w[2], f), hn::Mul(w[3], f), d, out);
#endif
}

void decode_main_row(const uint8_t* bytes, int64_t n, float* row) {
  constexpr uint8_t kOne = 127;
  const uint8_t* scales = bytes + (n + 1) / 2;
  uint8_t copy[16];
  for (int64_t begin = 0; begin < n; begin += 32) {
    Vec w[kBlockVecs];
    decode_block<WeightFormat::kFp4Row>(
        whole_block<16>(bytes + begin / 2, (n - begin + 1) / 2, copy), kOne, w);
    const bool two = begin + 16 < n;
    store_group(w, kE4m3[scales[begin / 16]], row + begin);
    store_group(w + kBlockVecs / 2, two ? kE4m3[scales[begin / 16 + 1]] : 0.0f, row + begin + 16);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(fp8_round_row);
HWY_EXPORT(fp4_index_round_row);
HWY_EXPORT(encode_window_row);
HWY_EXPORT(encode_main_row);
HWY_EXPORT(encode_index_row);
HWY_EXPORT(decode_window_row);
HWY_EXPORT(decode_main_row);

void fp8_round_row(float* row, int64_t n) {
  HWY_DYNAMIC_DISPATCH(fp8_round_row)(row, n);
}
void fp4_index_round_row(float* row, int64_t n) {
  HWY_DYNAMIC_DISPATCH(fp4_index_round_row)(row, n);
}
void encode_window_row(const float* row, int64_t n, uint8_t* bytes) {
  HWY_DYNAMIC_DISPATCH(encode_window_row)(row, n, bytes);
}
void encode_main_row(const float* row, int64_t n, uint8_t* bytes) {
  HWY_DYNAMIC_DISPATCH(encode_main_row)(row, n, bytes);
}
void encode_index_row(const float* row, int64_t n, uint8_t* bytes) {
  HWY_DYNAMIC_DISPATCH(encode_index_row)(row, n, bytes);
}
void decode_window_row(const uint8_t* bytes, int64_t n, float* row) {
  HWY_DYNAMIC_DISPATCH(decode_window_row)(bytes, n, row);
}
void decode_main_row(const uint8_t* bytes, int64_t n, float* row) {
  HWY_DYNAMIC_DISPATCH(decode_main_row)(bytes, n, row);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
