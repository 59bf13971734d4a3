// Weights in the memory of a backend that has its own.
#pragma once

#include "base/status.h"
#include "model/weights.h"
#include "ops/memory.h"

namespace cachalot::model {

// Where the Engram tables lie that a device reads rows of.
enum class TablePlace : uint8_t {
  kAuto,    // on the device unless they would take more than a quarter of its free memory
  kDevice,  // there
  kHost,    // in the mapped checkpoint; the host sends each step the rows it reads
};

struct DeviceWeights {
  ops::Buffer memory;
  ModelWeights weights;  // views into `memory`
};

// Copies every tensor of `weights`, as stored, but for tables that stay where they are. Shows
// progress on a terminal. Errors: no memory.
Result<DeviceWeights> copy_to_device(const ModelWeights& weights,
                                     ops::Memory& memory,
                                     TablePlace tables);

}  // namespace cachalot::model
