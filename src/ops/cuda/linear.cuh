// What the linear kernels share with the ops that contain a linear.
#pragma once

#include "ops/cuda/kernels.h"

namespace cachalot::ops::cuda {

// linear_mma() if it supports the args, else linear_simt().
Status linear_any(OpContext& ctx, const LinearArgs& args);

// Whether the tensor-core fragments can read this weight: 16-byte aligned rows of whole chunks.
bool fragments_support(const Weight& weight);

}  // namespace cachalot::ops::cuda
