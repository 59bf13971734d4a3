// What every op call needs besides its tensors.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "tensor/arena.h"

namespace cachalot::ops {

class OpTimer;

enum class Backend : uint8_t {
  kRef,   // plain loops, double accumulation: the executable definition
  kCpu,   // SIMD and threads
  kCuda,  // sm_90a
};

// One per executor; not thread-safe. Ops never allocate device memory and never synchronize: their
// temporaries come from `scratch`, which they release before they return.
struct OpContext {
  Backend backend = Backend::kCpu;
  ThreadPool* pool = nullptr;  // kCpu; kCuda: of ops::HostRows
  Arena* scratch = nullptr;    // kRef, kCpu
  void* stream = nullptr;      // kCuda: the cudaStream_t
  OpTimer* timer = nullptr;    // times every op, if there is one
};

}  // namespace cachalot::ops
