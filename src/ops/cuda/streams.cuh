// Host helpers for stream kernels.
#pragma once

#include "ops/cuda/device/streams.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/ops.h"

namespace cachalot::ops::cuda {

constexpr int kMaxStreams = 8;

template <class Act>
PendingRows<Act> pending_rows(const Pending& pending) {
  return {static_cast<const Act*>(pending.y.data),
          static_cast<const float*>(pending.post.data),
          static_cast<const float*>(pending.comb.data)};
}

}  // namespace cachalot::ops::cuda
