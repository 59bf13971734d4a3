// Builds without CUDA: the backend exists and has no kernels, no memory, no timer and no graphs.
#include "base/format.h"
#include "ops/memory.h"
#include "ops/op_graph.h"
#include "ops/op_timer.h"
#include "ops/registry.h"

namespace cachalot::ops {

const KernelSet& cuda_kernels() {
  static const KernelSet kNone;
  return kNone;
}

Result<Memory*> cuda_memory() {
  return error(Code::kUnimplemented, "backend cuda is not part of this build");
}

Result<std::unique_ptr<OpTimer>> cuda_op_timer(void*) {
  return error(Code::kUnimplemented, "backend cuda is not part of this build");
}

Result<std::unique_ptr<OpGraph>> cuda_record_ops(OpContext&, const std::function<Status()>&) {
  return error(Code::kUnimplemented, "backend cuda is not part of this build");
}

}  // namespace cachalot::ops
