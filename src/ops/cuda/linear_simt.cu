// y = x W^T for any width, input type and weight format: the fallback of linear_mma.cu, and the
// only form for F32 inputs.
//
// in   x [T, groups * K] act, weight [N, K] of any matrix format      out  y [T, N] bf16|f32
// One warp per output element, 32 columns per step, FP32 accumulation and a shuffle sum. No shared
// memory. Reads the weight once per token: for tests and small models, not for speed.
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/weight_value.cuh"
#include "ops/cuda/input.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

template <class Act, Storage kStorage>
__global__ void __launch_bounds__(kThreads) linear_simt_kernel(const Act* x,
                                                               int64_t width,
                                                               const void* values,
                                                               const uint8_t* scales,
                                                               int64_t out,
                                                               int64_t in,
                                                               int64_t group_rows,
                                                               void* y,
                                                               bool y_is_bf16) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int64_t token = blockIdx.y;
  if (row >= out) {
    return;
  }
  const Act* input = x + token * width + row / group_rows * in;
  float sum = 0;
  for (int64_t k = threadIdx.x % kWarp; k < in; k += kWarp) {
    sum = fmaf(to_float(input[k]), weight_value<kStorage>(values, scales, row, k, in), sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) {
    if (y_is_bf16) {
      static_cast<Bf16*>(y)[token * out + row] = from_float<Bf16>(sum);
    } else {
      static_cast<float*>(y)[token * out + row] = sum;
    }
  }
}

template <class Act>
auto pick(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return linear_simt_kernel<Act, Storage::kF32>;
    case WeightFormat::kBF16:
      return linear_simt_kernel<Act, Storage::kBf16>;
    case WeightFormat::kFp4Row:
      return linear_simt_kernel<Act, Storage::kFp4Row>;
    default:
      return linear_simt_kernel<Act, Storage::kFp8Block>;
  }
}

}  // namespace

Status linear_simt(OpContext& ctx, const LinearArgs& args) {
  const int64_t tokens = args.x.dim(0), width = args.x.dim(1);
  return with_act(args.x.dtype, [&](auto act) -> Status {
    using Act = decltype(act);
    for (const LinearTarget& target : args.targets) {
      const Weight& w = *target.weight;
      Scratch scratch(ctx);
      const auto* x = static_cast<const Act*>(args.x.data);
      if constexpr (std::is_same_v<Act, Bf16>) {
        if (args.quantize_input && w.quantizes_input()) {
          auto* quantized = scratch.array<Bf16>(tokens * width);
          CACHALOT_RETURN_IF_ERROR(scratch.status("linear"));
          CACHALOT_RETURN_IF_ERROR(quantize_rows(ctx, x, tokens, width, quantized));
          x = quantized;
        }
      }
      CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                      "linear_simt",
                                      pick<Act>(w.format),
                                      dim3(extent(ceil_div(w.out, kWarps)), extent(tokens)),
                                      kThreads,
                                      0,
                                      x,
                                      width,
                                      w.values.data,
                                      static_cast<const uint8_t*>(w.scales.data),
                                      w.out,
                                      w.in,
                                      w.out / args.groups,
                                      target.y.data,
                                      target.y.dtype == DType::kBF16));
    }
    return {};
  });
}

}  // namespace cachalot::ops::cuda
