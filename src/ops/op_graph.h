// Ops of a device, recorded once and launched together many times.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "ops/context.h"

namespace cachalot::ops {

class OpGraph {
 public:
  virtual ~OpGraph() = default;
  // Launches the recorded ops on `stream`, over whatever the memory of their tensors holds by then.
  virtual Status launch(void* stream) = 0;
  // Kernels of a launch.
  virtual int64_t kernels() const = 0;
};

// Calls `body`, whose ops on this context are recorded and not run. The tensors and the scratch
// memory that they are given must stay where they are as long as the graph is launched. `body` must
// have run before with the same args: ops may make tables when they are called first. Errors: that
// of `body`; kUnimplemented on a backend without graphs.
Result<std::unique_ptr<OpGraph>> record_ops(OpContext& context,
                                            const std::function<Status()>& body);

// Of CUDA; defined with the CUDA backend, or by its absence.
Result<std::unique_ptr<OpGraph>> cuda_record_ops(OpContext& context,
                                                 const std::function<Status()>& body);

}  // namespace cachalot::ops
