// Monotonic time in seconds, for measurements.
#pragma once

#include <chrono>

namespace cachalot {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace cachalot
