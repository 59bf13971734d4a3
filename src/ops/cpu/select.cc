#include "ops/cpu/select.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace cachalot::ops::cpu {
namespace {

// Orders floats as unsigned integers; both zeros are one key.
uint32_t key_of(float score) {
  const uint32_t bits = score == 0.0f ? 0 : std::bit_cast<uint32_t>(score);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
constexpr uint32_t kNone = 0x007FFFFF;  // the key of -inf

constexpr int kBinShift = 21;
constexpr uint32_t kBins = 1u << (32 - kBinShift);

}  // namespace

int64_t select_best(const float* scores, int64_t n, int64_t k, int32_t* out, uint32_t* work) {
  // The k-th best lies in the bin where the count from the top reaches k; only that bin's members
  // need ordering.
  int64_t histogram[kBins] = {};
  int64_t valid = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = key_of(scores[i]);
    valid += key != kNone;
    ++histogram[key >> kBinShift];
  }
  uint32_t threshold = kNone;
  int64_t ties = 0;
  if (valid > k) {
    uint32_t bin = kBins - 1;
    int64_t above = 0;
    while (above + histogram[bin] < k) {
      above += histogram[bin--];
    }
    int64_t members = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = key_of(scores[i]);
      if (key >> kBinShift == bin) {
        work[members++] = key;
      }
    }
    const int64_t wanted = k - above;
    if (wanted == 0) {
      return 0;  // k = 0
    }
    std::nth_element(work, work + wanted - 1, work + members, std::greater<uint32_t>());
    threshold = work[wanted - 1];
    ties =
        wanted - std::count_if(work, work + members, [&](uint32_t key) { return key > threshold; });
  }
  int64_t count = 0;
  for (int64_t i = 0; i < n && count < k; ++i) {
    const uint32_t key = key_of(scores[i]);
    if (key > threshold || (key == threshold && ties > 0)) {
      ties -= key == threshold;
      out[count++] = static_cast<int32_t>(i);
    }
  }
  return count;
}

}  // namespace cachalot::ops::cpu
