// Weights in the memory of a backend that has its own.
#pragma once

#include "base/status.h"
#include "model/weights.h"
#include "ops/memory.h"

namespace cachalot::model {

struct DeviceWeights {
  ops::Buffer memory;
  ModelWeights weights;  // views into `memory`
};

// Copies every tensor of `weights`, as stored. Shows progress on a terminal.
Result<DeviceWeights> copy_to_device(const ModelWeights& weights, ops::Memory& memory);

}  // namespace cachalot::model
