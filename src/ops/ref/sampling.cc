// What sampling needs of logits.
#include <algorithm>
#include <limits>

#include "ops/ref/common.h"
#include "ops/ref/kernels.h"

namespace cachalot::ops::ref {

Status top_logits(OpContext&, const TopLogitsArgs& args) {
  const int64_t n = args.logits.dim(0), v = args.logits.dim(1), k = args.value.dim(1);
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::vector<float> row(static_cast<size_t>(v));
  std::vector<int32_t> order(row.size());
  for (int64_t r = 0; r < n; ++r) {
    for (size_t i = 0; i < row.size(); ++i) {
      const float logit = args.logits.as<float>()[r * v + static_cast<int64_t>(i)];
      row[i] = std::isnan(logit) ? kNone : logit + 0.0f;
      order[i] = static_cast<int32_t>(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)];
    });
    for (int64_t i = 0; i < k; ++i) {
      const int32_t id = i < v ? order[static_cast<size_t>(i)] : -1;
      args.id.as<int32_t>()[r * k + i] = id;
      args.value.as<float>()[r * k + i] = id < 0 ? kNone : row[static_cast<size_t>(id)];
    }
    const double best = row[static_cast<size_t>(order[0])];
    const double temperatures[] = {1.0, args.temperature.as<float>()[r]};
    for (int64_t i = 0; i < 2; ++i) {
      double mass = 0;
      for (float logit : row) {
        mass += logit == best ? 1.0 : std::exp((logit - best) / temperatures[i]);
      }
      args.mass.as<float>()[2 * r + i] = static_cast<float>(mass);
    }
  }
  return {};
}

}  // namespace cachalot::ops::ref
