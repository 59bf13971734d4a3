// Moves the accepted fresh rows of every sequence into its ring: position p goes to slot p % W.
//
// in   fresh [T, row_bytes] u8, accepted [S] i32        out  rings [S] -> [W, row_bytes] u8
// One block per row of the step; a row beyond the accepted ones, or one that a later accepted row
// would overwrite, does nothing, so no two blocks write the same slot. Copy-bound.
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 64;

__global__ void window_commit_kernel(const int32_t* sequence,
                                     const int32_t* row_begin,
                                     const int32_t* start,
                                     const int32_t* accepted,
                                     const uint8_t* fresh,
                                     uint8_t* const* rings,
                                     int64_t window,
                                     int64_t row_bytes) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int32_t s = sequence[blockIdx.x];
  const int64_t index = static_cast<int64_t>(blockIdx.x) - row_begin[s], count = accepted[s];
  if (index >= count || index < count - window) {
    return;
  }
  const uint8_t* from = fresh + blockIdx.x * row_bytes;
  uint8_t* to = rings[s] + (start[s] + index) % window * row_bytes;
  const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  if ((bits | static_cast<uintptr_t>(row_bytes)) % 16 == 0) {
    for (int64_t i = threadIdx.x * 16; i < row_bytes; i += kThreads * 16) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
    for (int64_t i = threadIdx.x; i < row_bytes; i += kThreads) {
      to[i] = from[i];
    }
  }
}

}  // namespace

Status window_commit(OpContext& ctx, const WindowCommitArgs& args) {
  return launch(ctx,
                "window_commit",
                window_commit_kernel,
                extent(args.rows.rows),
                kThreads,
                0,
                args.rows.sequence.as<int32_t>(),
                args.rows.row_begin.as<int32_t>(),
                args.rows.start.as<int32_t>(),
                args.accepted.as<int32_t>(),
                args.window.fresh.as<uint8_t>(),
                args.window.rings,
                args.window.window,
                args.window.fresh.dim(1));
}

}  // namespace cachalot::ops::cuda
