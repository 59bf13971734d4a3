// What a user of the CUDA backend does once, outside of steps.
#pragma once

#include <span>

#include "ops/ops.h"

namespace cachalot::ops::cuda {

// Makes the device-side pointer table that `experts` needs for this set of weights (the span of
// ExpertsArgs::routed; the views' data are device pointers). The op makes it itself on first use,
// except while its stream is being captured. Only in builds with CUDA.
Status prepare_experts(std::span<const ExpertView> experts);

}  // namespace cachalot::ops::cuda
