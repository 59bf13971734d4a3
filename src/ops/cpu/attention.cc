// Softmax attention over decoded key rows, and index scores.
//
// attend_heads: scores are FP32 dot products along K (4 heads x 3 keys in registers), softmax runs
// in blocks of 64 keys against a running maximum, values accumulate along the keys in ascending
// order (4 heads x 3 vectors in registers). A block's 64 rows of 512 floats, the queries and the
// outputs of 64 heads are 128 KiB each: the loop lives in L2. 2/3 of the work is FMAs at 7 loads
// per 12.
//
// score_entries: lanes are heads, so a key value is one broadcast for 3 entries x 4 vectors of
// heads, and a head's dot product runs over the key in ascending (transposed) order in one lane.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/attention.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which sets the target that these are compiled for.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/cpu/simd_inl.h"

#include <algorithm>
#include <cmath>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace cachalot::ops::cpu {
namespace HWY_NAMESPACE {

constexpr int64_t kKeyBlock = 64;

// scores[r * kKeyBlock + c] = scale * q_r . key_c
template <int kRows, int kKeys>
HWY_NOINLINE void score_tile(
    const float* q, int64_t depth, const float* const* keys, float scale, float* scores) {
  Vec acc[kRows][kKeys];
  CACHALOT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    CACHALOT_UNROLL
    for (int c = 0; c < kKeys; ++c) {
      acc[r][c] = hn::Zero(F32());
    }
  }
  for (int64_t block = 0; block < depth; block += 32) {
    CACHALOT_UNROLL
    for (int64_t v = 0; v < kBlockVecs; ++v) {
      const int64_t i = block + v * kLanes;
      Vec key[kKeys];
      CACHALOT_UNROLL
      for (int c = 0; c < kKeys; ++c) {
        key[c] = load_vec(keys[c] + i);
      }
      CACHALOT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto value = load_vec(q + r * depth + i);
        CACHALOT_UNROLL
        for (int c = 0; c < kKeys; ++c) {
          acc[r][c] = hn::MulAdd(key[c], value, acc[r][c]);
        }
      }
    }
  }
  store_sums(acc, scale, scores, kKeyBlock);
}

using ScoreTile = void (*)(const float*, int64_t, const float* const*, float, float*);
constexpr ScoreTile kScoreTiles[4][3] = {
    {score_tile<1, 1>, score_tile<1, 2>, score_tile<1, 3>},
    {score_tile<2, 1>, score_tile<2, 2>, score_tile<2, 3>},
    {score_tile<3, 1>, score_tile<3, 2>, score_tile<3, 3>},
    {score_tile<4, 1>, score_tile<4, 2>, score_tile<4, 3>},
};

// o_h = o_h * rescale_h + sum_j p_hj value_j over one block, for kVecs vectors of channels from
// `offset`.
template <int kRows, int kVecs>
HWY_NOINLINE void value_tile(const float* p,
                             const float* rescale,
                             const float* const* values,
                             int64_t count,
                             int64_t offset,
                             int64_t depth,
                             float* o) {
  Vec acc[kRows][kVecs];
  CACHALOT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const auto factor = hn::Set(F32(), rescale[r]);
    CACHALOT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = hn::Mul(load_vec(o + r * depth + offset + v * kLanes), factor);
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    const float* channels = values[j] + offset;
    Vec value[kVecs];
    CACHALOT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      value[v] = load_vec(channels + v * kLanes);
    }
    CACHALOT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto probability = hn::Set(F32(), p[r * kKeyBlock + j]);
      CACHALOT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = hn::MulAdd(probability, value[v], acc[r][v]);
      }
    }
  }
  CACHALOT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    CACHALOT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      store_vec(acc[r][v], o + r * depth + offset + v * kLanes);
    }
  }
}

using ValueTile =
    void (*)(const float*, const float*, const float* const*, int64_t, int64_t, int64_t, float*);
constexpr ValueTile kValueTiles[4][3] = {
    {value_tile<1, 1>, value_tile<1, 2>, value_tile<1, 3>},
    {value_tile<2, 1>, value_tile<2, 2>, value_tile<2, 3>},
    {value_tile<3, 1>, value_tile<3, 2>, value_tile<3, 3>},
    {value_tile<4, 1>, value_tile<4, 2>, value_tile<4, 3>},
};

// The softmax state of one head between blocks.
struct HeadState {
  float best = -1e30f;
  float sum = 0;
};

// Turns `count` scores into unnormalized probabilities; returns the factor for what was summed
// before.
float softmax_block(float* scores, int64_t count, DType act, HeadState& state) {
  const F32 d;
  for (int64_t j = count; j < (count + kLanes - 1) / kLanes * kLanes; ++j) {
    scores[j] = -std::numeric_limits<float>::infinity();
  }
  auto most = hn::Set(d, state.best);
  for (int64_t j = 0; j < count; j += kLanes) {
    most = hn::Max(most, load_vec(scores + j));
  }
  const float best = hn::GetLane(hn::MaxOfLanes(d, most));
  const auto shift = hn::Set(d, best);
  auto sum = hn::Zero(d);
  for (int64_t j = 0; j < count; j += kLanes) {
    const auto score = load_vec(scores + j);
    // Exp() maps NaN to zero; a NaN score must stay visible.
    const auto probability =
        hn::IfThenElse(hn::IsNaN(score), score, hn::Exp(d, hn::Sub(score, shift)));
    sum = hn::Add(sum, probability);
    store_vec(act == DType::kBF16 ? round_bf16_vec(probability) : probability, scores + j);
  }
  const float rescale = std::exp(state.best - best);
  state.best = best;
  state.sum = state.sum * rescale + lane_sum(sum);
  return rescale;
}

void attend_heads(const HeadGroup& group,
                  const float* const* keys,
                  const float* const* values,
                  int64_t count,
                  float* o,
                  float* work) {
  const int64_t depth = padded(group.k), heads = group.heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(group.k));
  float* p = work;
  float* rescale = p + heads * kKeyBlock;
  auto* state = reinterpret_cast<HeadState*>(rescale + heads);
  for (int64_t i = 0; i < heads * depth; i += kLanes) {
    store_vec(hn::Zero(F32()), o + i);
  }
  std::fill_n(state, heads, HeadState());
  for (int64_t begin = 0; begin < count; begin += kKeyBlock) {
    const int64_t n = std::min(kKeyBlock, count - begin);
    const float* const* block = keys + begin;
    for (int64_t h = 0; h < heads; h += 4) {
      const int64_t rows = std::min<int64_t>(4, heads - h);
      for (int64_t j = 0; j < n; j += 3) {
        kScoreTiles[rows - 1][std::min<int64_t>(3, n - j) - 1](
            group.q + h * depth, depth, block + j, scale, p + h * kKeyBlock + j);
      }
      for (int64_t r = h; r < h + rows; ++r) {
        rescale[r] = softmax_block(p + r * kKeyBlock, n, group.act, state[r]);
      }
    }
    constexpr int64_t kTile = 3 * kLanes;
    for (int64_t i = 0; i < depth; i += kTile) {
      const int64_t vecs = std::min(kTile, depth - i) / kLanes;
      for (int64_t h = 0; h < heads; h += 4) {
        kValueTiles[std::min<int64_t>(4, heads - h) - 1][vecs - 1](
            p + h * kKeyBlock, rescale + h, values + begin, n, i, depth, o + h * depth);
      }
    }
  }
  if (count == 0) {
    return;
  }
  for (int64_t h = 0; h < heads; ++h) {
    const float sum = state[h].sum + std::exp(group.sink[h] - state[h].best);
    const auto divisor = hn::Set(F32(), sum);
    for (int64_t i = 0; i < depth; i += kLanes) {
      store_vec(hn::Div(load_vec(o + h * depth + i), divisor), o + h * depth + i);
    }
  }
}

// total[e] += sum over kVecs vectors of heads of weight * relu(q . key_e), kEntries entries.
template <int kEntries, int kVecs>
HWY_INLINE void head_tile(const float* q,
                          int64_t heads,
                          const float* weights,
                          const float* keys,
                          int64_t depth,
                          Vec (&total)[kEntries]) {
  Vec acc[kEntries][kVecs];
  for (int e = 0; e < kEntries; ++e) {
    for (int v = 0; v < kVecs; ++v) {
      acc[e][v] = hn::Zero(F32());
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    Vec key[kEntries];
    for (int e = 0; e < kEntries; ++e) {
      key[e] = hn::Set(F32(), keys[e * depth + i]);
    }
    for (int v = 0; v < kVecs; ++v) {
      const auto value = load_vec(q + i * heads + v * kLanes);
      for (int e = 0; e < kEntries; ++e) {
        acc[e][v] = hn::MulAdd(value, key[e], acc[e][v]);
      }
    }
  }
  for (int v = 0; v < kVecs; ++v) {
    const auto weight = load_vec(weights + v * kLanes);
    for (int e = 0; e < kEntries; ++e) {
      total[e] = hn::MulAdd(at_least(acc[e][v], hn::Zero(F32())), weight, total[e]);
    }
  }
}

template <int kEntries>
HWY_NOINLINE void score_group(const float* q,
                              const float* weights,
                              int64_t heads,
                              const float* keys,
                              int64_t depth,
                              float* scores) {
  constexpr int kVecs = 4;
  Vec total[kEntries];
  for (int e = 0; e < kEntries; ++e) {
    total[e] = hn::Zero(F32());
  }
  int64_t h = 0;
  for (; h + kVecs * kLanes <= heads; h += kVecs * kLanes) {
    head_tile<kEntries, kVecs>(q + h, heads, weights + h, keys, depth, total);
  }
  for (; h < heads; h += kLanes) {
    head_tile<kEntries, 1>(q + h, heads, weights + h, keys, depth, total);
  }
  for (int e = 0; e < kEntries; ++e) {
    scores[e] = lane_sum(total[e]);
  }
}

void score_entries(const IndexQueries& queries,
                   const uint8_t* const* entries,
                   int64_t count,
                   float* const* scores) {
  const int64_t depth = padded(queries.dim), heads = padded_heads(queries.heads);
  alignas(64) float keys[kIndexTileFloats];
  for (int64_t e = 0; e < count; ++e) {
    const uint8_t* bytes = entries[e];
    for (int64_t block = 0; block < depth / 32; ++block) {
      Vec w[kBlockVecs];
      const int64_t left = (queries.dim + 1) / 2 - block * 16;
      uint8_t copy[16] = {};
      const uint8_t* codes = bytes + block * 16;
      if (left < 16) {
        std::copy_n(codes, left, copy);
        codes = copy;
      }
      decode_block<WeightFormat::kFp4Row>(codes, bytes[(queries.dim + 1) / 2 + block], w);
      for (int64_t v = 0; v < kBlockVecs; ++v) {
        store_vec(w[v], keys + e * depth + block * 32 + v * kLanes);
      }
    }
  }
  for (int64_t r = 0; r < queries.rows; ++r) {
    int64_t e = 0;
    for (; e + 3 <= count; e += 3) {
      score_group<3>(
          queries.q[r], queries.weights[r], heads, keys + e * depth, depth, scores[r] + e);
    }
    for (; e < count; ++e) {
      score_group<1>(
          queries.q[r], queries.weights[r], heads, keys + e * depth, depth, scores[r] + e);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cachalot::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cachalot::ops::cpu {

HWY_EXPORT(attend_heads);
HWY_EXPORT(score_entries);

// Probabilities of one key block, rescaling factors, and the softmax state (two floats) per head.
int64_t attend_work_floats(int64_t heads) {
  return heads * (64 + 1 + 2);
}

void attend_heads(const HeadGroup& group,
                  const float* const* keys,
                  const float* const* values,
                  int64_t count,
                  float* o,
                  float* work) {
  HWY_DYNAMIC_DISPATCH(attend_heads)(group, keys, values, count, o, work);
}
void score_entries(const IndexQueries& queries,
                   const uint8_t* const* entries,
                   int64_t count,
                   float* const* scores) {
  HWY_DYNAMIC_DISPATCH(score_entries)(queries, entries, count, scores);
}

}  // namespace cachalot::ops::cpu
#endif  // HWY_ONCE
