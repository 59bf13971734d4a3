// What sampling needs of logits.
#include <algorithm>
#include <limits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/select.h"
#include "ops/cpu/simd.h"

namespace cachalot::ops::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// The ids of the k <= v best of `row`, best first. `work` has 2 v words.
void rank_best(const float* row, int64_t v, int64_t k, int32_t* ids, uint32_t* work) {
  const auto better = [row](int32_t a, int32_t b) {
    return row[a] > row[b] || (row[a] == row[b] && a < b);
  };
  auto* candidates = reinterpret_cast<int32_t*>(work + v);
  const int64_t found = best_candidates(row, v, k, reinterpret_cast<float*>(work), candidates);
  if (found > 0) {
    std::partial_sort_copy(candidates, candidates + found, ids, ids + k, better);
    return;
  }
  int64_t count = select_best(row, v, k, ids, work);
  for (int64_t i = 0; i < v && count < k; ++i) {
    if (row[i] == kNone) {
      ids[count++] = static_cast<int32_t>(i);
    }
  }
  std::sort(ids, ids + k, better);
}

// One row; `row` has v places, `work` 2 v.
void top_of_row(const TopLogitsArgs& args, int64_t r, float* row, uint32_t* work) {
  const int64_t v = args.logits.dim(1), k = args.value.dim(1), known = std::min(k, v);
  rank_form(args.logits.as<float>() + r * v, v, row);
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
  const float temperature = args.temperature.as<float>()[r];
  mass[1] = temperature == 1.0f ? mass[0] : exp_mass(row, v, values[0], 1.0f / temperature);
}

}  // namespace

Status top_logits(OpContext& ctx, const TopLogitsArgs& args) {
  const int64_t n = args.logits.dim(0), v = args.logits.dim(1);
  const int64_t shares = std::clamp<int64_t>(n, 1, thread_count(ctx));
  Scratch scratch(ctx);
  auto* rows = scratch.array<float>(shares * v);
  auto* work = scratch.array<uint32_t>(shares * 2 * v);
  parallel_for(ctx, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t share = first; share < last; ++share) {
      for (int64_t r = n * share / shares; r < n * (share + 1) / shares; ++r) {
        top_of_row(args, r, rows + share * v, work + share * 2 * v);
      }
    }
  });
  return {};
}

}  // namespace cachalot::ops::cpu
