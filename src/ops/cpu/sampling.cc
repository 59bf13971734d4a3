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

}  // namespace

Status top_logits(OpContext& ctx, const TopLogitsArgs& args) {
  const int64_t n = args.logits.dim(0), v = args.logits.dim(1), k = args.value.dim(1);
  const int64_t known = std::min(k, v);
  Scratch scratch(ctx);
  auto* work = scratch.array<uint32_t>(n * v);
  parallel_rows(ctx, scratch, n, v, [&](int64_t begin, int64_t end, float* row) {
    for (int64_t r = begin; r < end; ++r) {
      const float* logits = args.logits.as<float>() + r * v;
      for (int64_t i = 0; i < v; ++i) {
        row[i] = std::isnan(logits[i]) ? kNone : logits[i] + 0.0f;
      }
      int32_t* ids = args.id.as<int32_t>() + r * k;
      float* values = args.value.as<float>() + r * k;
      rank_best(row, v, known, ids, work + r * v);
      for (int64_t i = 0; i < known; ++i) {
        values[i] = row[ids[i]];
      }
      std::fill(ids + known, ids + k, -1);
      std::fill(values + known, values + k, kNone);
      float* mass = args.mass.as<float>() + 2 * r;
      mass[0] = exp_mass(row, v, values[0], 1.0f);
      mass[1] = exp_mass(row, v, values[0], 1.0f / args.temperature.as<float>()[r]);
    }
  });
  return {};
}

}  // namespace cachalot::ops::cpu
