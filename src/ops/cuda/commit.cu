// Keeps what the accepted rows of a step leave behind: fresh window rows go into the rings
// (position p to slot p % W), kv and gate of a last row at an even position open a ratio-2 group.
//
// in   fresh [T, row_bytes] u8 per window, kv, gate [T, C] f32 per group, accepted [S] i32
// out  rings [S] -> [W, row_bytes] u8 per window, open [S] -> [2, C] f32 per group
// One launch for all layers: a block per row of the step and window or group. A row beyond the
// accepted ones, or one that a later accepted row would overwrite, does nothing, so no two blocks
// write the same place. Copy-bound.
#include <algorithm>

#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 64;
constexpr size_t kMostWindows = 64, kMostGroups = 32;  // of a launch

struct Window {
  const uint8_t* fresh;
  uint8_t* const* rings;
};
struct Group {
  const float* kv;
  const float* gate;
  float* const* open;
  int64_t c;
};
struct Commit {
  const int32_t* sequence;
  const int32_t* row_begin;
  const int32_t* start;
  const int32_t* accepted;
  int64_t window;
  int64_t row_bytes;
  int windows;
  int groups;
  Window to[kMostWindows];
  Group open[kMostGroups];
};

__device__ void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  if ((bits | static_cast<uintptr_t>(bytes)) % 16 == 0) {
    for (int64_t i = threadIdx.x * 16; i < bytes; i += kThreads * 16) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += kThreads) {
      to[i] = from[i];
    }
  }
}

__global__ void commit_kernel(const __grid_constant__ Commit a) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = blockIdx.x;
  const int32_t s = a.sequence[row];
  const int64_t index = row - a.row_begin[s], count = a.accepted[s], position = a.start[s] + index;
  const auto target = static_cast<int>(blockIdx.y);
  if (index >= count) {
    return;
  }
  if (target < a.windows) {
    if (index >= count - a.window) {
      const Window& window = a.to[target];
      copy_row(window.rings[s] + position % a.window * a.row_bytes,
               window.fresh + row * a.row_bytes,
               a.row_bytes);
    }
  } else if (index == count - 1 && position % 2 == 0) {
    const Group& group = a.open[target - a.windows];
    const int64_t bytes = group.c * static_cast<int64_t>(sizeof(float));
    auto* to = reinterpret_cast<uint8_t*>(group.open[s]);
    copy_row(to, reinterpret_cast<const uint8_t*>(group.kv + row * group.c), bytes);
    copy_row(to + bytes, reinterpret_cast<const uint8_t*>(group.gate + row * group.c), bytes);
  }
}

}  // namespace

Status commit(OpContext& ctx, const CommitArgs& args) {
  size_t windows = 0, groups = 0;
  while (windows < args.windows.size() || groups < args.groups.size()) {
    Commit launched{.sequence = args.rows.sequence.as<int32_t>(),
                    .row_begin = args.rows.row_begin.as<int32_t>(),
                    .start = args.rows.start.as<int32_t>(),
                    .accepted = args.accepted.as<int32_t>(),
                    .window = 1,
                    .row_bytes = 0,
                    .windows = 0,
                    .groups = 0,
                    .to = {},
                    .open = {}};
    for (const WindowView& window :
         args.windows.subspan(windows, std::min(kMostWindows, args.windows.size() - windows))) {
      launched.window = window.window;
      launched.row_bytes = window.fresh.dim(1);
      launched.to[launched.windows++] = {window.fresh.as<uint8_t>(), window.rings};
    }
    for (const OpenGroupView& group :
         args.groups.subspan(groups, std::min(kMostGroups, args.groups.size() - groups))) {
      launched.open[launched.groups++] = {
          group.kv.as<float>(), group.gate.as<float>(), group.open, group.kv.dim(1)};
    }
    CACHALOT_RETURN_IF_ERROR(
        launch(ctx,
               "commit",
               commit_kernel,
               dim3(extent(args.rows.rows), extent(launched.windows + launched.groups)),
               kThreads,
               0,
               launched));
    windows += static_cast<size_t>(launched.windows);
    groups += static_cast<size_t>(launched.groups);
  }
  return {};
}

}  // namespace cachalot::ops::cuda
