// Row primitives: conversions, block quantizers, norms, rotation, residual streams, activations.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/rows.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/contrib/math/math-inl.h"
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

// Conversions
// --------------------------------------------------------------------------------------

template <class T>
void load_row_as(const T* source, int64_t n, float* row) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_vec(load_at(source, i, n), row + i);
  }
  for (int64_t i = (n + kLanes - 1) / kLanes * kLanes; i < padded(n); i += kLanes) {
    store_vec(hn::Zero(F32()), row + i);
  }
}

void load_row(const void* source, DType dtype, int64_t n, float* row) {
  if (dtype == DType::kBF16) {
    load_row_as(static_cast<const bf16*>(source), n, row);
  } else {
    load_row_as(static_cast<const float*>(source), n, row);
  }
}

template <class T>
void store_row_as(const float* row, int64_t n, T* target) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_at(load_at(row, i, n), target, i, n);
  }
}

void store_row(const float* row, int64_t n, void* target, DType dtype) {
  if (dtype == DType::kBF16) {
    store_row_as(row, n, static_cast<bf16*>(target));
  } else {
    store_row_as(row, n, static_cast<float*>(target));
  }
}

void round_row(float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_vec(round_bf16_vec(load_vec(row + i)), row + i);
  }
}

// Quantizers
// ---------------------------------------------------------------------------------------

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
    decode_e2m1(whole_block<16>(bytes + begin / 2, (n - begin + 1) / 2, copy), kOne, w);
    const bool two = begin + 16 < n;
    store_group(w, kE4m3[scales[begin / 16]], row + begin);
    store_group(w + kBlockVecs / 2, two ? kE4m3[scales[begin / 16 + 1]] : 0.0f, row + begin + 16);
  }
}

template <class D>
HWY_INLINE void transpose_groups(D d, float* row, int64_t n) {
  constexpr int64_t kN = static_cast<int64_t>(hn::MaxLanes(D()));
  for (float* x = row; x < row + n; x += 4 * kN) {
    hn::Vec<D> a, b, c, e;
    hn::LoadInterleaved4(d, x, a, b, c, e);
    hn::StoreU(a, d, x);
    hn::StoreU(b, d, x + kN);
    hn::StoreU(c, d, x + 2 * kN);
    hn::StoreU(e, d, x + 3 * kN);
  }
}

void arrange_row(float* row, int64_t n, RowOrder order) {
  if (order == RowOrder::kBytes) {
    transpose_groups(F32(), row, n);
  } else if (order == RowOrder::kNibbles) {
    transpose_groups(hn::CappedTag<float, 4>(), row, n);
  }
}

// Norm and rotation
// --------------------------------------------------------------------------------

float sum_squares(const float* row, int64_t n) {
  Vec sum[kBlockVecs];
  for (int64_t v = 0; v < kBlockVecs; ++v) {
    sum[v] = hn::Zero(F32());
  }
  for (int64_t i = 0; i < n; i += 32) {
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      const auto x = load_vec(row + i + v * kLanes);
      sum[v] = hn::MulAdd(x, x, sum[v]);
    }
  }
  for (int64_t v = 1; v < kBlockVecs; ++v) {
    sum[0] = hn::Add(sum[0], sum[v]);
  }
  return lane_sum(sum[0]);
}

template <class T>
void norm_row_as(const float* x, const T* weight, int64_t n, float eps, float* out) {
  const float mean = sum_squares(x, n) / static_cast<float>(n);
  const auto scale = hn::Set(F32(), 1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    store_vec(hn::Mul(hn::Mul(load_vec(x + i), scale), load_at(weight, i, n)), out + i);
  }
}

void norm_row(const float* x, const TensorView& weight, int64_t n, float eps, float* out) {
  if (weight.dtype == DType::kBF16) {
    norm_row_as(x, static_cast<const bf16*>(weight.data), n, eps, out);
  } else {
    norm_row_as(x, static_cast<const float*>(weight.data), n, eps, out);
  }
}

void rotate_row(float* row, int64_t n, const float* cos_sin, int64_t half, float sign) {
  float* x = row + n - 2 * half;
  alignas(32) static constexpr float kSigns[8] = {-1, 1, -1, 1, -1, 1, -1, 1};
  const auto signs = hn::Mul(hn::Load(F32(), kSigns), hn::Set(F32(), sign));
  int64_t i = 0;
  for (; i + kLanes <= 2 * half; i += kLanes) {
    const auto pair = load_vec(x + i);
    const auto table = load_vec(cos_sin + i);
    const auto s = hn::Mul(hn::DupOdd(table), signs);
    const auto turned = hn::Mul(pair, hn::DupEven(table));
    store_vec(hn::MulAdd(hn::Shuffle2301(pair), s, turned), x + i);
  }
  for (; i < 2 * half; i += 2) {
    const float c = cos_sin[i], s = sign * cos_sin[i + 1], a = x[i], b = x[i + 1];
    x[i] = a * c - b * s;
    x[i + 1] = b * c + a * s;
  }
}

// Residual streams
// ---------------------------------------------------------------------------------

template <class T>
void expand_as(const T* x,
               const T* y,
               const float* post,
               const float* comb,
               int64_t m,
               int64_t d,
               float* out) {
  constexpr int64_t kMost = 8;
  for (int64_t i = 0; i < d; i += kLanes) {
    Vec streams[kMost];
    for (int64_t j = 0; j < m; ++j) {
      streams[j] = load_at(x + j * d, i, d);
    }
    const auto added = load_at(y, i, d);
    for (int64_t k = 0; k < m; ++k) {
      auto sum = hn::Mul(hn::Set(F32(), post[k]), added);
      for (int64_t j = 0; j < m; ++j) {
        sum = hn::MulAdd(hn::Set(F32(), comb[j * m + k]), streams[j], sum);
      }
      store_at(round_to(sum, x), out + k * d, i, d);
    }
  }
}

void expand_streams(const void* x,
                    const void* y,
                    DType act,
                    const float* post,
                    const float* comb,
                    int64_t m,
                    int64_t d,
                    float* out) {
  if (act == DType::kBF16) {
    expand_as(static_cast<const bf16*>(x), static_cast<const bf16*>(y), post, comb, m, d, out);
  } else {
    expand_as(static_cast<const float*>(x), static_cast<const float*>(y), post, comb, m, d, out);
  }
  for (int64_t i = m * d; i < padded(m * d); ++i) {
    out[i] = 0;
  }
}

void collapse_streams(
    const float* x, const float* pre, int64_t m, int64_t d, DType act, float* out) {
  for (int64_t i = 0; i < d; i += kLanes) {
    auto sum = hn::Mul(hn::Set(F32(), pre[0]), load_at(x, i, d));
    for (int64_t j = 1; j < m; ++j) {
      sum = hn::MulAdd(hn::Set(F32(), pre[j]), load_at(x + j * d, i, d), sum);
    }
    store_vec(act == DType::kBF16 ? round_bf16_vec(sum) : sum, out + i);
  }
  for (int64_t i = (d + kLanes - 1) / kLanes * kLanes; i < padded(d); i += kLanes) {
    store_vec(hn::Zero(F32()), out + i);
  }
}

// 1 / (1 + e^-x) and its complement, each to a few ulp.
HWY_INLINE void logistic(Vec x, Vec& value, Vec& complement) {
  const F32 d;
  const auto one = hn::Set(d, 1.0f);
  const auto e = hn::Exp(d, hn::Neg(hn::Abs(x)));
  const auto large = hn::Div(one, hn::Add(one, e));
  const auto small = hn::Mul(e, large);
  const auto negative = hn::Lt(x, hn::Zero(d));
  value = hn::IfThenElse(negative, small, large);
  complement = hn::IfThenElse(negative, large, small);
}
HWY_INLINE Vec logistic(Vec x) {
  Vec value, complement;
  logistic(x, value, complement);
  return value;
}

// Normalizes the rows (kRows) or columns of the m x m matrices in the lanes.
template <bool kRows>
HWY_INLINE void normalize(Vec* c, int64_t m, Vec eps) {
  const int64_t along = kRows ? 1 : m, across = kRows ? m : 1;
  for (int64_t a = 0; a < m; ++a) {
    auto sum = eps;
    for (int64_t b = 0; b < m; ++b) {
      sum = hn::Add(sum, c[a * across + b * along]);
    }
    const auto inverse = hn::Div(hn::Set(F32(), 1.0f), sum);
    for (int64_t b = 0; b < m; ++b) {
      c[a * across + b * along] = hn::Mul(c[a * across + b * along], inverse);
    }
  }
}

// Lanes are tokens: a token's coefficients never depend on its neighbours.
void site_coefficients(const SiteCoefficients& site,
                       const float* mix,
                       const float* factor,
                       int64_t count,
                       float* pre,
                       float* post,
                       float* comb) {
  constexpr int64_t kMost = 8;
  const F32 d;
  const int64_t m = site.m, width = (2 + m) * m;
  const auto eps = hn::Set(d, site.eps);
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t tokens = std::min(kLanes, count - first);
    alignas(32) float lane[kLanes];
    // m_i * scale + base of coefficient i, a token per lane.
    const auto gather = [&](int64_t i, int64_t part) HWY_ATTR {
      for (int64_t t = 0; t < kLanes; ++t) {
        lane[t] = t < tokens ? mix[(first + t) * width + i] * factor[first + t] : 0.0f;
      }
      return hn::MulAdd(hn::Load(d, lane), hn::Set(d, site.scale[part]), hn::Set(d, site.base[i]));
    };
    const auto scatter = [&](Vec v, int64_t i, int64_t row_floats, float* out) HWY_ATTR {
      hn::Store(v, d, lane);
      for (int64_t t = 0; t < tokens; ++t) {
        out[(first + t) * row_floats + i] = lane[t];
      }
    };
    for (int64_t j = 0; j < m; ++j) {
      scatter(hn::Add(logistic(gather(j, 0)), eps), j, m, pre);
      scatter(hn::Mul(hn::Set(d, 2.0f), logistic(gather(m + j, 1))), j, m, post);
    }
    Vec c[kMost * kMost];
    for (int64_t j = 0; j < m; ++j) {
      Vec* row = c + j * m;
      for (int64_t k = 0; k < m; ++k) {
        row[k] = gather(2 * m + j * m + k, 2);
      }
      auto best = row[0];
      for (int64_t k = 1; k < m; ++k) {
        best = hn::Max(best, row[k]);
      }
      auto sum = hn::Zero(d);
      for (int64_t k = 0; k < m; ++k) {
        row[k] = hn::Exp(d, hn::Sub(row[k], best));
        sum = hn::Add(sum, row[k]);
      }
      const auto inverse = hn::Div(hn::Set(d, 1.0f), sum);
      for (int64_t k = 0; k < m; ++k) {
        row[k] = hn::MulAdd(row[k], inverse, eps);
      }
    }
    normalize<false>(c, m, eps);
    for (int iter = 1; iter < site.iters; ++iter) {
      normalize<true>(c, m, eps);
      normalize<false>(c, m, eps);
    }
    for (int64_t i = 0; i < m * m; ++i) {
      scatter(c[i], i, m * m, comb);
    }
  }
}

// Activations
// --------------------------------------------------------------------------------------

HWY_INLINE Vec rounded(Vec v, DType act) {
  return act == DType::kBF16 ? round_bf16_vec(v) : v;
}

void swiglu_row(
    const float* gate, const float* up, int64_t n, float limit, float weight, DType act, float* h) {
  const auto most = hn::Set(F32(), limit);
  const auto factor = hn::Set(F32(), weight);
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto g = at_most(rounded(load_at(gate, i, n), act), most);
    const auto u = at_least(at_most(rounded(load_at(up, i, n), act), most), hn::Neg(most));
    const auto product = hn::Mul(hn::Mul(hn::Mul(g, logistic(g)), u), factor);
    store_at(rounded(product, act), h, i, n);
  }
}

void add_rounded(const float* values, int64_t n, DType act, float* sum) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_at(hn::Add(load_at(sum, i, n), rounded(load_at(values, i, n), act)), sum, i, n);
  }
}

void pool_pair(const float* kv0,
               const float* gate0,
               const float* kv1,
               const float* gate1,
               int64_t n,
               float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec w1, w0;
    logistic(hn::Sub(load_at(gate1, i, n), load_at(gate0, i, n)), w1, w0);
    store_vec(hn::MulAdd(load_at(kv1, i, n), w1, hn::Mul(load_at(kv0, i, n), w0)), out + i);
  }
  for (int64_t i = (n + kLanes - 1) / kLanes * kLanes; i < padded(n); i += kLanes) {
    store_vec(hn::Zero(F32()), out + i);
  }
}

void router_scores(float* row, int64_t n, float temperature) {
  const F32 d;
  const auto divisor = hn::Set(d, temperature);
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto x = hn::Div(load_at(row, i, n), divisor);
    // ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|). Far below zero it is e^x to within FP32, and its
    // root e^(x/2) stays a normal float where e^x no longer is one.
    const auto tail = hn::Exp(d, hn::Mul(x, hn::Set(d, 0.5f)));
    const auto e = hn::Exp(d, hn::Neg(hn::Abs(x)));
    const auto root = hn::Sqrt(hn::Add(at_least(x, hn::Zero(d)), hn::Log1p(d, e)));
    store_at(hn::IfThenElse(hn::Lt(x, hn::Set(d, -17.0f)), tail, root), row, i, n);
  }
}

float exp_mass(const float* row, int64_t n, float best, float scale) {
  // Chains of kBlock values in FP32, their sums in double.
  constexpr int64_t kBlock = 4096;
  const F32 d;
  const auto top = hn::Set(d, best), factor = hn::Set(d, scale), one = hn::Set(d, 1.0f);
  const auto terms = [&](int64_t i) HWY_ATTR {
    const auto x = load_at(row, i, n);
    return hn::IfThenElse(hn::Eq(x, top), one, hn::Exp(d, hn::Mul(hn::Sub(x, top), factor)));
  };
  double mass = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock), whole = end - (end - begin) % kLanes;
    auto sum = hn::Zero(d);
    for (int64_t i = begin; i < whole; i += kLanes) {
      sum = hn::Add(sum, terms(i));
    }
    mass += lane_sum(sum);
    if (whole < end) {
      alignas(32) float lane[kLanes];
      hn::Store(terms(whole), d, lane);
      for (int64_t i = whole; i < end; ++i) {
        mass += lane[i - whole];
      }
    }
  }
  return static_cast<float>(mass);
}

// Engram
// -------------------------------------------------------------------------------------------

template <class T, class Q, class K>
EngramSums engram_sums_as(const T* x, const T* key, const Q* q, const K* k, int64_t n) {
  constexpr int64_t kChains = 2;
  Vec xx[kChains], kk[kChains], xk[kChains];
  for (int64_t c = 0; c < kChains; ++c) {
    xx[c] = kk[c] = xk[c] = hn::Zero(F32());
  }
  for (int64_t i = 0; i < n; i += kChains * kLanes) {
    for (int64_t c = 0; c < kChains; ++c) {
      const int64_t j = i + c * kLanes;
      if (j >= n) {
        break;
      }
      const auto a = load_at(x, j, n), b = load_at(key, j, n);
      const auto gain = hn::Mul(load_at(q, j, n), load_at(k, j, n));
      xx[c] = hn::MulAdd(a, a, xx[c]);
      kk[c] = hn::MulAdd(b, b, kk[c]);
      xk[c] = hn::MulAdd(hn::Mul(a, gain), b, xk[c]);
    }
  }
  return {lane_sum(hn::Add(xx[0], xx[1])),
          lane_sum(hn::Add(kk[0], kk[1])),
          lane_sum(hn::Add(xk[0], xk[1]))};
}

template <class T, class Q>
EngramSums engram_sums_k(
    const T* x, const T* key, const Q* q, const TensorView& k, int64_t begin, int64_t n) {
  return k.dtype == DType::kBF16
             ? engram_sums_as(x, key, q, static_cast<const bf16*>(k.data) + begin, n)
             : engram_sums_as(x, key, q, static_cast<const float*>(k.data) + begin, n);
}

template <class T>
EngramSums engram_sums_qk(
    const T* x, const T* key, const TensorView& q, const TensorView& k, int64_t begin, int64_t n) {
  return q.dtype == DType::kBF16
             ? engram_sums_k(x, key, static_cast<const bf16*>(q.data) + begin, k, begin, n)
             : engram_sums_k(x, key, static_cast<const float*>(q.data) + begin, k, begin, n);
}

EngramSums engram_sums(const void* x,
                       const void* key,
                       DType act,
                       const TensorView& q_weight,
                       const TensorView& k_weight,
                       int64_t weight_begin,
                       int64_t n) {
  return act == DType::kBF16 ? engram_sums_qk(static_cast<const bf16*>(x),
                                              static_cast<const bf16*>(key),
                                              q_weight,
                                              k_weight,
                                              weight_begin,
                                              n)
                             : engram_sums_qk(static_cast<const float*>(x),
                                              static_cast<const float*>(key),
                                              q_weight,
                                              k_weight,
                                              weight_begin,
                                              n);
}

template <class T>
void engram_add_as(const T* x, const T* value, float gate, int64_t n, T* out) {
  const auto factor = hn::Set(F32(), gate);
  for (int64_t i = 0; i < n; i += kLanes) {
    store_at(hn::MulAdd(factor, load_at(value, i, n), load_at(x, i, n)), out, i, n);
  }
}

void engram_add(const void* x, const void* value, DType act, float gate, int64_t n, void* out) {
  if (act == DType::kBF16) {
    engram_add_as(static_cast<const bf16*>(x),
                  static_cast<const bf16*>(value),
                  gate,
                  n,
                  static_cast<bf16*>(out));
  } else {
    engram_add_as(static_cast<const float*>(x),
                  static_cast<const float*>(value),
                  gate,
                  n,
                  static_cast<float*>(out));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(load_row);
HWY_EXPORT(store_row);
HWY_EXPORT(round_row);
HWY_EXPORT(fp8_round_row);
HWY_EXPORT(fp4_index_round_row);
HWY_EXPORT(encode_window_row);
HWY_EXPORT(encode_main_row);
HWY_EXPORT(encode_index_row);
HWY_EXPORT(decode_window_row);
HWY_EXPORT(decode_main_row);
HWY_EXPORT(arrange_row);
HWY_EXPORT(norm_row);
HWY_EXPORT(sum_squares);
HWY_EXPORT(rotate_row);
HWY_EXPORT(expand_streams);
HWY_EXPORT(collapse_streams);
HWY_EXPORT(site_coefficients);
HWY_EXPORT(swiglu_row);
HWY_EXPORT(add_rounded);
HWY_EXPORT(pool_pair);
HWY_EXPORT(router_scores);
HWY_EXPORT(exp_mass);
HWY_EXPORT(engram_sums);
HWY_EXPORT(engram_add);

void load_row(const void* source, DType dtype, int64_t n, float* row) {
  HWY_DYNAMIC_DISPATCH(load_row)(source, dtype, n, row);
}
void store_row(const float* row, int64_t n, void* target, DType dtype) {
  HWY_DYNAMIC_DISPATCH(store_row)(row, n, target, dtype);
}
void round_row(float* row, int64_t n, DType act) {
  if (act == DType::kBF16) {
    HWY_DYNAMIC_DISPATCH(round_row)(row, n);
  }
}
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
void arrange_row(float* row, int64_t n, RowOrder order) {
  HWY_DYNAMIC_DISPATCH(arrange_row)(row, n, order);
}
void norm_row(const float* x, const TensorView& weight, int64_t n, float eps, float* out) {
  HWY_DYNAMIC_DISPATCH(norm_row)(x, weight, n, eps, out);
}
float sum_squares(const float* row, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(sum_squares)(row, n);
}
void rotate_row(float* row, int64_t n, const float* cos_sin, int64_t half, float sign) {
  HWY_DYNAMIC_DISPATCH(rotate_row)(row, n, cos_sin, half, sign);
}
void expand_streams(const void* x,
                    const void* y,
                    DType act,
                    const float* post,
                    const float* comb,
                    int64_t m,
                    int64_t d,
                    float* out) {
  HWY_DYNAMIC_DISPATCH(expand_streams)(x, y, act, post, comb, m, d, out);
}
void collapse_streams(
    const float* x, const float* pre, int64_t m, int64_t d, DType act, float* out) {
  HWY_DYNAMIC_DISPATCH(collapse_streams)(x, pre, m, d, act, out);
}
void site_coefficients(const SiteCoefficients& site,
                       const float* mix,
                       const float* factor,
                       int64_t count,
                       float* pre,
                       float* post,
                       float* comb) {
  HWY_DYNAMIC_DISPATCH(site_coefficients)(site, mix, factor, count, pre, post, comb);
}
void swiglu_row(
    const float* gate, const float* up, int64_t n, float limit, float weight, DType act, float* h) {
  HWY_DYNAMIC_DISPATCH(swiglu_row)(gate, up, n, limit, weight, act, h);
}
void add_rounded(const float* values, int64_t n, DType act, float* sum) {
  HWY_DYNAMIC_DISPATCH(add_rounded)(values, n, act, sum);
}
void pool_pair(const float* kv0,
               const float* gate0,
               const float* kv1,
               const float* gate1,
               int64_t n,
               float* out) {
  HWY_DYNAMIC_DISPATCH(pool_pair)(kv0, gate0, kv1, gate1, n, out);
}
void router_scores(float* row, int64_t n, float temperature) {
  HWY_DYNAMIC_DISPATCH(router_scores)(row, n, temperature);
}
float exp_mass(const float* row, int64_t n, float best, float scale) {
  return HWY_DYNAMIC_DISPATCH(exp_mass)(row, n, best, scale);
}
EngramSums engram_sums(const void* x,
                       const void* key,
                       DType act,
                       const TensorView& q_weight,
                       const TensorView& k_weight,
                       int64_t weight_begin,
                       int64_t n) {
  return HWY_DYNAMIC_DISPATCH(engram_sums)(x, key, act, q_weight, k_weight, weight_begin, n);
}
void engram_add(const void* x, const void* value, DType act, float gate, int64_t n, void* out) {
  HWY_DYNAMIC_DISPATCH(engram_add)(x, value, act, gate, n, out);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
