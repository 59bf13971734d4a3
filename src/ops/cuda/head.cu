// Logits of chosen rows: h = norm(collapse(expand(x), pre)), logits = h W^T in FP32.
//
// in   select [N] i32, x [T, M, D] act, pending, pre [T, M], norm [D], weight [V, D] bf16|f32
// out  logits [N, V] f32
// One block of 256 threads per chosen row makes h (D floats of shared memory); the product is the
// linear of linear_mma.cu. Bound by the weight: 2 V D bytes (1.32 GB) for up to about 100 rows.
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/linear.cuh"
#include "ops/cuda/streams.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;

template <class Act, int kStreams, int kVector>
__global__ void __launch_bounds__(kThreads) head_rows_kernel(const int32_t* select,
                                                             const Act* x,
                                                             PendingRows<Act> pending,
                                                             const float* pre,
                                                             Param norm,
                                                             int m,
                                                             int64_t d,
                                                             float eps,
                                                             Act* h) {
  __shared__ float slots[kThreads / kWarp];
  auto* row = reinterpret_cast<float*>(dynamic_shared());  // [D]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = select[blockIdx.x];
  float square = 0;
  for (int64_t i = threadIdx.x * kVector; i < d; i += kThreads * kVector) {
    float v[kStreams][kVector], c[kVector];
    expand_columns<Act, kStreams, kVector>(x + token * m * d, pending.row(token, m, d), m, d, i, v);
    collapse_columns<Act, kStreams, kVector>(v, pre + token * m, m, c);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      row[i + e] = c[e];
      square = fmaf(c[e], c[e], square);
    }
  }
  const float factor = rms_factor(block_sum(square, slots), d, eps);
  for (int64_t i = threadIdx.x; i < d; i += kThreads) {
    h[blockIdx.x * d + i] = from_float<Act>(row[i] * factor * norm[i]);
  }
}

}  // namespace

Status head(OpContext& ctx, const HeadArgs& args) {
  const int64_t n = args.select.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  Scratch scratch(ctx);
  return with_act(args.x.dtype, [&](auto act) -> Status {
    using Act = decltype(act);
    auto* h = scratch.array<Act>(n * d);
    CACHALOT_RETURN_IF_ERROR(scratch.status("head"));
    const bool vector = d % 8 == 0 && m <= 4;
    CACHALOT_RETURN_IF_ERROR(
        launch(ctx,
               "head_rows",
               vector ? head_rows_kernel<Act, 4, 8> : head_rows_kernel<Act, kMaxStreams, 1>,
               extent(n),
               kThreads,
               d * static_cast<int64_t>(sizeof(float)),
               args.select.as<int32_t>(),
               static_cast<const Act*>(args.x.data),
               pending_rows<Act>(args.pending),
               args.pre.as<float>(),
               param(args.norm),
               static_cast<int>(m),
               d,
               args.rms_eps,
               h));
    const LinearTarget target{&args.weight, args.logits};
    return linear_any(ctx,
                      {.x = {h, args.x.dtype, {n, d}, Device::kCuda}, .targets = {&target, 1}});
  });
}

}  // namespace cachalot::ops::cuda
