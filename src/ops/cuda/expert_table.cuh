// Device tables of the expert weights of a layer.
#pragma once

#include <span>

#include "ops/cuda/launch.cuh"
#include "ops/ops.h"

namespace cachalot::ops::cuda {

struct ExpertPointers {
  const uint8_t* w1;
  const uint8_t* w1_scales;
  const uint8_t* w3;
  const uint8_t* w3_scales;
  const uint8_t* w2;
  const uint8_t* w2_scales;

  bool operator==(const ExpertPointers&) const = default;
};

ExpertPointers expert_pointers(const ExpertView& expert);

// The device table of `experts`. Tables are made once per set of weights, keyed by the span,
// checked against the weights on every call, and kept until the process ends: making one allocates
// and copies, which is not possible while `stream` is being captured (kFailedPrecondition then).
Result<const ExpertPointers*> expert_table(void* stream, std::span<const ExpertView> experts);

}  // namespace cachalot::ops::cuda
