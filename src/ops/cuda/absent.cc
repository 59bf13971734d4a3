// Builds without CUDA: the backend exists and has no kernels and no memory.
#include "base/format.h"
#include "ops/memory.h"
#include "ops/registry.h"

namespace cachalot::ops {

const KernelSet& cuda_kernels() {
  static const KernelSet kNone;
  return kNone;
}

Result<Memory*> cuda_memory() {
  return error(Code::kUnimplemented, "backend cuda is not part of this build");
}

}  // namespace cachalot::ops
