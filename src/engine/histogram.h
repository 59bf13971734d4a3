// Times by their size, as Prometheus counts them.
#pragma once

#include <cstdint>
#include <vector>

namespace cachalot::engine {

struct Histogram {
  std::vector<double> bounds;    // upper bounds, seconds, ascending; +Inf is implied
  std::vector<uint64_t> counts;  // bounds.size() + 1, not cumulative
  double sum = 0;

  // 1 ms to 1000 s, three bounds per decade.
  static Histogram of_latencies();
  void record(double seconds);
};

}  // namespace cachalot::engine
