// Builds without CUDA: the backend exists and has no kernels.
#include "ops/registry.h"

namespace cachalot::ops {

const KernelSet& cuda_kernels() {
  static const KernelSet kNone;
  return kNone;
}

}  // namespace cachalot::ops
