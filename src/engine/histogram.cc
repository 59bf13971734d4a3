#include "engine/histogram.h"

#include <algorithm>

namespace cachalot::engine {

Histogram Histogram::of_latencies() {
  Histogram histogram;
  for (double decade = 1e-3; decade < 1e3; decade *= 10) {
    for (double step : {1.0, 2.0, 5.0}) {
      histogram.bounds.push_back(decade * step);
    }
  }
  histogram.counts.resize(histogram.bounds.size() + 1);
  return histogram;
}

void Histogram::record(double seconds) {
  const auto bound = std::lower_bound(bounds.begin(), bounds.end(), seconds);
  ++counts[static_cast<size_t>(bound - bounds.begin())];
  sum += seconds;
}

}  // namespace cachalot::engine
