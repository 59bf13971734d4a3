// Rotary tables: table[n, i] = (cos a, sin a) with a = FP32(position[n] * frequency[i]).
//
// in   position [N] i32, frequency [R/2] f32        out  table [N, R/2, 2] f32
// One thread per (row, pair); no shared memory. A table of a step is a few kilobytes: launch-bound.
// NOTE: the FP32 product is part of the model; cos and sin of it are taken in double, because the
// arguments reach 2^20 and the fast FP32 forms reduce them inexactly.
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void rope_table_kernel(
    const int32_t* position, const float* frequency, float2* table, int64_t count, int64_t half) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) {
    return;
  }
  const float angle = __fmul_rn(static_cast<float>(position[i / half]), frequency[i % half]);
  table[i] = make_float2(static_cast<float>(cos(static_cast<double>(angle))),
                         static_cast<float>(sin(static_cast<double>(angle))));
}

}  // namespace

Status rope_table(OpContext& ctx, const RopeTableArgs& args) {
  const int64_t half = args.frequency.dim(0), count = args.position.dim(0) * half;
  return launch(ctx,
                "rope_table",
                rope_table_kernel,
                extent(ceil_div(count, kThreads)),
                kThreads,
                0,
                args.position.as<int32_t>(),
                args.frequency.as<float>(),
                static_cast<float2*>(args.table.data),
                count,
                half);
}

}  // namespace cachalot::ops::cuda
