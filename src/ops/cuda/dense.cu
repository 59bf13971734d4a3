// y = residual + f(x W^T + bias): a linear of the image encoder.
//
// in   x [N, K] act, weight [out, K] bf16|f32, bias [out], residual [N, width] act
// out  y [N, width] act, width = out or, of SwiGLU, out / 2
//
// The product is linear()'s, with FP32 outputs for as many rows as kSumsBytes hold; a pass behind
// it adds, applies f and rounds. K that is no multiple of 256 (the pixels of a patch) is filled up
// with zeros for the tensor cores. Bound: the products; the pass moves 4 to 8 bytes per output.
// Measured on an H200 with 8649 rows: 158 to 238 TFLOP/s, 76 where K = 588 is filled up.
#include <algorithm>
#include <array>

#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kSumsBytes = int64_t{32} << 20;
constexpr int64_t kRowTile = 128;

// out [rows, to] = in [rows, from] with zeros behind. The linear reads its weights before it waits,
// so the kernel in front of it, which pads the input, lets it start only after its own wait, which
// covers the weights.
template <class T>
__global__ void __launch_bounds__(kThreads)
    pad_kernel(const T* in, int64_t rows, int64_t from, int64_t to, T* out) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < rows * to) {
    const int64_t column = i % to;
    out[i] = column < from ? in[i / to * from + column] : T{};
  }
}

template <class T>
Status pad(const OpContext& ctx, const T* in, int64_t rows, int64_t from, int64_t to, T* out) {
  return launch(ctx,
                "dense_pad",
                pad_kernel<T>,
                extent(ceil_div(rows * to, kThreads)),
                kThreads,
                0,
                in,
                rows,
                from,
                to,
                out);
}

template <class Act>
struct Output {
  const float* sums;  // [rows, out]
  Param bias;
  const Act* residual;  // [rows, width] or null
  Act* y;               // [rows, width]
  int64_t rows, out, width;
  DenseFunction function;
};

template <class Act>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Output<Act> p) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.rows * p.width) {
    return;
  }
  const int64_t row = i / p.width, column = i % p.width;
  const auto product = [&](int64_t o) {
    const float bias = p.bias.data == nullptr ? 0.0f : p.bias[o];
    return rounded<Act>(p.sums[row * p.out + o] + bias);
  };
  float value = product(column);
  if (p.function == DenseFunction::kGelu) {
    value = 0.5f * value * erfcf(-value * 0.70710678f);
  } else if (p.function == DenseFunction::kSwiglu) {
    value = rounded<Act>(value / (1.0f + expf(-value))) * product(p.width + column);
  }
  if (p.residual != nullptr) {
    value = rounded<Act>(value) + to_float(p.residual[i]);
  }
  p.y[i] = from_float<Act>(value);
}

// Rows [first, first + rows) of y.
template <class Act>
Status dense_rows(
    OpContext& ctx, const DenseArgs& args, const Weight& w, int64_t first, int64_t rows) {
  const int64_t in = args.x.dim(1), width = args.y.dim(1);
  Scratch scratch(ctx);
  auto* sums = scratch.array<float>(rows * w.out);
  auto* padded = w.in == in ? nullptr : scratch.array<Act>(rows * w.in);
  CACHALOT_RETURN_IF_ERROR(scratch.status("dense"));
  TensorView x = args.x.rows(first, rows);
  if (padded != nullptr) {
    CACHALOT_RETURN_IF_ERROR(pad(ctx, static_cast<const Act*>(x.data), rows, in, w.in, padded));
    x = {padded, x.dtype, {rows, w.in}, x.device};
  }
  const std::array<LinearTarget, 1> target = {
      LinearTarget{&w, {sums, DType::kF32, {rows, w.out}, x.device}}};
  CACHALOT_RETURN_IF_ERROR(linear_any(ctx, {.x = x, .targets = target}));
  const Output<Act> output{
      .sums = sums,
      .bias = param(args.bias),
      .residual = args.residual.empty()
                      ? nullptr
                      : static_cast<const Act*>(args.residual.data) + first * width,
      .y = static_cast<Act*>(args.y.data) + first * width,
      .rows = rows,
      .out = w.out,
      .width = width,
      .function = args.function};
  return launch(ctx,
                "dense_finish",
                finish_kernel<Act>,
                extent(ceil_div(rows * width, kThreads)),
                kThreads,
                0,
                output);
}

}  // namespace

Status dense(OpContext& ctx, const DenseArgs& args) {
  const int64_t n = args.x.dim(0), in = args.weight.in, out = args.weight.out;
  Scratch scratch(ctx);
  Weight w = args.weight;
  if (args.x.dtype == DType::kBF16 && in % kChunk != 0) {
    const int64_t width = round_up(in, kChunk);
    const auto padded = [&]<class T>(const T* values) -> Status {
      auto* to = scratch.array<T>(out * width);
      CACHALOT_RETURN_IF_ERROR(scratch.status("dense"));
      w.values = {to, w.values.dtype, {out, width}, w.values.device};
      w.in = width;
      return pad(ctx, values, out, in, width, to);
    };
    CACHALOT_RETURN_IF_ERROR(w.format == WeightFormat::kBF16
                                 ? padded(static_cast<const Bf16*>(w.values.data))
                                 : padded(static_cast<const float*>(w.values.data)));
  }
  const int64_t most =
      std::max<int64_t>(kSumsBytes / (4 * std::max(out, w.in)) / kRowTile * kRowTile, kRowTile);
  for (int64_t first = 0; first < n; first += most) {
    const int64_t rows = std::min(most, n - first);
    CACHALOT_RETURN_IF_ERROR(with_act(args.x.dtype, [&](auto act) {
      return dense_rows<decltype(act)>(ctx, args, w, first, rows);
    }));
  }
  return {};
}

}  // namespace cachalot::ops::cuda
