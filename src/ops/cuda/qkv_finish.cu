// The small work between the attention projections: r = q_norm(t), and the window row
// FP8(RoPE(kv_norm(kv))) of every token.
//
// in   t [T, Q] act, q_norm [Q], kv [T, K] act, kv_norm [K], rope [T, R/2, 2] f32
// out  r [T, Q] act, fresh [T, K + K/32] u8: K E4M3 codes, then the E8M0 scales
// Blocks: blockIdx.y = 0 makes the window row, 1 norms t if there is one; 256 threads per token.
// Shared: the row as FP32 (K floats) and 8 reduction slots.
// Bytes: 2 (Q + K) in and 2 Q + K out per token; at decode it is launch-bound.
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "quant/block.h"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;

template <class Act>
__global__ void __launch_bounds__(kThreads) qkv_finish_kernel(const Act* t,
                                                              const Act* kv,
                                                              Param q_norm,
                                                              Param kv_norm,
                                                              const float* rope,
                                                              float eps,
                                                              int64_t q,
                                                              int64_t k,
                                                              int64_t half,
                                                              int64_t row_bytes,
                                                              Act* r,
                                                              uint8_t* fresh) {
  __shared__ float slots[kThreads / kWarp];
  auto* row = reinterpret_cast<float*>(dynamic_shared());
  allow_next_kernel();
  const int64_t token = blockIdx.x;
  if (token == 0 && blockIdx.y == 1) {
    prefetch_norm(q_norm, q);
  } else if (token == 0) {
    prefetch_norm(kv_norm, k);
  }
  wait_for_previous_kernels();
  if (blockIdx.y == 1) {
    const Act* x = t + token * q;
    float square = 0;
    for (int64_t i = threadIdx.x; i < q; i += kThreads) {
      const float v = to_float(x[i]);
      square = fmaf(v, v, square);
    }
    const float factor = rms_factor(block_sum(square, slots), q, eps);
    for (int64_t i = threadIdx.x; i < q; i += kThreads) {
      r[token * q + i] = from_float<Act>(to_float(x[i]) * factor * q_norm[i]);
    }
  } else {
    norm_row(kv + token * k, k, kv_norm, eps, row, slots);
    rotate_row<Act>(row, k, rope + token * half * 2, half);
    encode_row<RowFormat::kWindow>(row, k, fresh + token * row_bytes);
  }
}

}  // namespace

Status qkv_finish(OpContext& ctx, const QkvFinishArgs& args) {
  const bool has_query = !args.t.empty();
  const int64_t t = args.kv.dim(0), k = args.kv.dim(1), q = has_query ? args.t.dim(1) : 0;
  return with_act(args.kv.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "qkv_finish",
                  qkv_finish_kernel<Act>,
                  dim3(extent(t), has_query ? 2 : 1),
                  kThreads,
                  k * static_cast<int64_t>(sizeof(float)),
                  static_cast<const Act*>(args.t.data),
                  static_cast<const Act*>(args.kv.data),
                  param(args.q_norm),
                  param(args.kv_norm),
                  args.rope.as<float>(),
                  args.rms_eps,
                  q,
                  k,
                  args.rope.dim(1),
                  quant::window_row_bytes(k),
                  static_cast<Act*>(args.r.data),
                  args.fresh.as<uint8_t>());
  });
}

}  // namespace cachalot::ops::cuda
