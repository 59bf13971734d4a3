// The last of several blocks to end: it goes on with what all of them have written.
#pragma once

#include <cuda_runtime.h>

namespace cachalot::ops::cuda {

// Whether this block is the last of `blocks` to call with `counter`, which is zero before the first
// of them and again after the last. All threads of the block call it. The last block's threads see
// what the others wrote before their calls, if they read it from L2 (__ldcg).
__device__ __forceinline__ bool last_block(unsigned* counter, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(blocks - 1)
                 : "memory");
    last = before == blocks - 1;
  }
  __syncthreads();
  return last;
}

}  // namespace cachalot::ops::cuda
