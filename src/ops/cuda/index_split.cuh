// Index selection by several blocks per token.
#pragma once

#include "ops/cuda/launch.cuh"
#include "ops/ops.h"

namespace cachalot::ops::cuda {

// From here on one block per token fills the device.
constexpr int64_t kMaxSplitTokens = 256;

// Whether index_split() takes these args: it needs a bound of the entries and scratch for their
// scores.
bool index_split_supports(const OpContext& ctx, const IndexSelectArgs& args);
Status index_split(OpContext& ctx, const IndexSelectArgs& args);

}  // namespace cachalot::ops::cuda
