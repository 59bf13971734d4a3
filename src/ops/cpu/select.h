// Deterministic top-k in O(n).
#pragma once

#include <cstdint>

namespace cachalot::ops::cpu {

// Writes the indices of the best `k` of n scores to `out`, ascending, and returns their number:
// fewer than k only if fewer scores are above -inf. Ties: the lower index; -0 equals +0. `work` has
// n words.
int64_t select_best(const float* scores, int64_t n, int64_t k, int32_t* out, uint32_t* work);

}  // namespace cachalot::ops::cpu
