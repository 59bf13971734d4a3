// What the drafter needs beside the ops of a layer.
//
//   hc_collapse  out[t, column ..] = sum_j pre_j X_j over the expanded streams
//   rms_norm     y = x rsqrt(mean(x^2) + eps) norm
//   draft_head   logits = base + Wh We[previous], confidence = Wc [x; We[previous]], FP32
//
// in   x [T, M, D] or [T, D] act, pending, pre [T, M], norm [D]; base [T, V], We and Wh [V, R],
//      Wc [1, D + R] bf16|f32
// out  out [T, N] act, y [T, D] act; logits [N, V], confidence [N] f32
// One block of 256 threads per row, one element per thread and step; rms_norm keeps its row in
// shared memory (D floats). The product with Wh runs in linear_simt.cu over FP32 rows, which reads
// it once per row (66 MB): the head's bound, at a few rows per draft step, is that weight.
// Ids outside [0, V), which only padding rows have, give zero rows.
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/linear.cuh"
#include "ops/cuda/streams.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;

template <class Act>
__global__ void __launch_bounds__(kThreads) hc_collapse_kernel(const Act* x,
                                                               PendingRows<Act> pending,
                                                               const float* pre,
                                                               int m,
                                                               int64_t d,
                                                               int64_t width,
                                                               Act* out) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  for (int64_t i = threadIdx.x; i < d; i += kThreads) {
    float v[kMaxStreams][1], c[1];
    expand_columns<Act, kMaxStreams, 1>(x + token * m * d, pending.row(token, m, d), m, d, i, v);
    collapse_columns<Act, kMaxStreams, 1>(v, pre + token * m, m, c);
    out[token * width + i] = from_float<Act>(c[0]);
  }
}

template <class Act>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const Act* x, Param norm, float eps, int64_t d, Act* y) {
  __shared__ float slots[kThreads / kWarp];
  auto* row = reinterpret_cast<float*>(dynamic_shared());  // [D]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  norm_row(x + token * d, d, norm, eps, row, slots);
  for (int64_t i = threadIdx.x; i < d; i += kThreads) {
    y[token * d + i] = from_float<Act>(row[i]);
  }
}

// embed[n] = We[previous[n]], and the confidence of row n.
template <class Act>
__global__ void __launch_bounds__(kThreads) draft_rows_kernel(const int32_t* select,
                                                              const int32_t* previous,
                                                              const Act* x,
                                                              Param table,
                                                              Param proj,
                                                              int64_t vocabulary,
                                                              int64_t d,
                                                              int64_t r,
                                                              float* embed,
                                                              float* confidence) {
  __shared__ float slots[kThreads / kWarp];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t n = blockIdx.x, row = select[n], id = previous[n];
  const bool known = id >= 0 && id < vocabulary;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < d + r; i += kThreads) {
    float value = 0;
    if (i < d) {
      value = to_float(x[row * d + i]);
    } else {
      value = known ? table[id * r + i - d] : 0.0f;
      embed[n * r + i - d] = value;
    }
    sum = fmaf(value, proj[i], sum);
  }
  sum = block_sum(sum, slots);
  if (threadIdx.x == 0) {
    confidence[n] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    add_base_kernel(const int32_t* select, const float* base, int64_t v, float* logits) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t n = blockIdx.y, row = select[n];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < v) {
    logits[n * v + i] += base[row * v + i];
  }
}

}  // namespace

Status hc_collapse(OpContext& ctx, const HcCollapseArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  return with_act(args.x.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "hc_collapse",
                  hc_collapse_kernel<Act>,
                  extent(t),
                  kThreads,
                  0,
                  static_cast<const Act*>(args.x.data),
                  pending_rows<Act>(args.pending),
                  args.pre.as<float>(),
                  static_cast<int>(m),
                  d,
                  args.out.dim(1),
                  static_cast<Act*>(args.out.data) + args.column);
  });
}

Status rms_norm(OpContext& ctx, const RmsNormArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1);
  return with_act(args.x.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "rms_norm",
                  rms_norm_kernel<Act>,
                  extent(t),
                  kThreads,
                  d * static_cast<int64_t>(sizeof(float)),
                  static_cast<const Act*>(args.x.data),
                  param(args.norm),
                  args.rms_eps,
                  d,
                  static_cast<Act*>(args.y.data));
  });
}

Status draft_head(OpContext& ctx, const DraftHeadArgs& args) {
  const int64_t n = args.select.dim(0), d = args.x.dim(1), v = args.base.dim(1);
  const int64_t r = args.embed.in;
  Scratch scratch(ctx);
  auto* embed = scratch.array<float>(n * r);
  CACHALOT_RETURN_IF_ERROR(scratch.status("draft_head"));
  CACHALOT_RETURN_IF_ERROR(with_act(args.x.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "draft_rows",
                  draft_rows_kernel<Act>,
                  extent(n),
                  kThreads,
                  0,
                  args.select.as<int32_t>(),
                  args.previous.as<int32_t>(),
                  static_cast<const Act*>(args.x.data),
                  param(args.embed.values),
                  param(args.proj.values),
                  v,
                  d,
                  r,
                  embed,
                  args.confidence.as<float>());
  }));
  const LinearTarget target{&args.head, args.logits};
  CACHALOT_RETURN_IF_ERROR(
      linear_any(ctx, {.x = {embed, DType::kF32, {n, r}, Device::kCuda}, .targets = {&target, 1}}));
  return launch(ctx,
                "draft_base",
                add_base_kernel,
                dim3(extent(ceil_div(v, kThreads)), extent(n)),
                kThreads,
                0,
                args.select.as<int32_t>(),
                args.base.as<float>(),
                v,
                args.logits.as<float>());
}

}  // namespace cachalot::ops::cuda
