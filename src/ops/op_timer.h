// Times the ops of a context one by one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/context.h"
#include "ops/cost.h"

namespace cachalot::ops {

struct OpRecord {
  std::string name;  // budget_name()
  OpCost cost;
  double seconds = 0;
};

// Put into OpContext::timer. Ops of a device then no longer overlap, so that their times add up to
// more than a step takes.
class OpTimer {
 public:
  virtual ~OpTimer() = default;
  // Around one op. Nesting is not allowed.
  virtual void begin(std::string name, const OpCost& cost) = 0;
  virtual void end() = 0;
  // The ops since the last call, in order; waits until they are done.
  virtual Result<std::vector<OpRecord>> take() = 0;
};

// kUnimplemented if the build lacks the backend.
Result<std::unique_ptr<OpTimer>> make_op_timer(const OpContext& context);

// Of a CUDA stream; defined with the CUDA backend, or by its absence.
Result<std::unique_ptr<OpTimer>> cuda_op_timer(void* stream);

}  // namespace cachalot::ops
