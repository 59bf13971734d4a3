// What sampling needs of logits.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/select.h"
#include "ops/cpu/simd.h"

namespace cachalot::ops::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// The ids of the k <= v best of `row`, best first. `work` has v words.
void rank_best(const float* row, int64_t v, int64_t k, int32_t* ids, uint32_t* work) {
  int64_t count = select_best(row, v, k, ids, work);
  for (int64_t i = 0; i < v && count < k; ++i) {
    if (row[i] == kNone) {
      ids[count++] = static_cast<int32_t>(i);
    }
  }
  std::sort(ids, ids + k, [row](int32_t a, int32_t b) {
    return row[a] > row[b] || (row[a] == row[b] && a < b);
  });
}

// One row; `row` and `work` have v places.
void top_of_row(const TopLogitsArgs& args, int64_t r, float* row, uint32_t* work) {
  const int64_t v = args.logits.dim(1), k = args.value.dim(1), known = std::min(k, v);
  const float* logits = args.logits.as<float>() + r * v;
  for (int64_t i = 0; i < v; ++i) {
    row[i] = std::isnan(logits[i]) ? kNone : logits[i] + 0.0f;
  }
  int32_t* ids = args.id.as<int32_t>() + r * k;
  float* values = args.value.as<float>() + r * k;
  rank_best(row, v, known, ids, work);
  for (int64_t i = 0; i < known; ++i) {
    values[i] = row[ids[i]];
  }
  std::fill(ids + known, ids + k, -1);
  std::fill(values + known, values + k, kNone);
  float* mass = args.mass.as<float>() + 2 * r;
  mass[0] = exp_mass(row, v, values[0], 1.0f);
  mass[1] = exp_mass(row, v, values[0], 1.0f / args.temperature.as<float>()[r]);
}

}  // namespace

Status top_logits(OpContext& ctx, const TopLogitsArgs& args) {
  const int64_t n = args.logits.dim(0), v = args.logits.dim(1);
  const int64_t shares = std::clamp<int64_t>(n, 1, thread_count(ctx));
  Scratch scratch(ctx);
  auto* rows = scratch.array<float>(shares * v);
  auto* work = scratch.array<uint32_t>(shares * v);
  parallel_for(ctx, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t share = first; share < last; ++share) {
      for (int64_t r = n * share / shares; r < n * (share + 1) / shares; ++r) {
        top_of_row(args, r, rows + share * v, work + share * v);
      }
    }
  });
  return {};
}

}  // namespace cachalot::ops::cpu
