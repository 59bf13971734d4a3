// Prepares the input rows of linears: quantization to FP8 blocks and back, and the column order
// that the weight fragments expect (device/weights.cuh).
//
// in   x [T, K] bf16        out  [T, K] bf16, K permuted within chunks of 256
// Eight columns per thread; four neighbouring threads hold a block of 32 and agree on its amax by
// shuffles. No shared memory. Bytes: 4 K per row; at decode the launch dominates.
#include "ops/cuda/input.cuh"

#include "ops/cuda/device/pieces.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 128;

template <InputLayout kLayout, bool kWide, bool kQuantize>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const Bf16* x, int64_t pieces, Bf16* out) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  // Whole chunks of 32 pieces: a warp has either all its threads here or none.
  if (i >= pieces) {
    return;
  }
  float v[8];
  load_elements<8>(x + i * 8, v);
  if constexpr (kQuantize) {
    quantize_piece(v);
  }
  store_piece<kLayout, kWide>(out, i, v);
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads)
    prepare_experts_kernel(const Bf16* x, int64_t pieces, Bf16* fp4, Bf16* fp8) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= pieces) {
    return;
  }
  float v[8];
  load_elements<8>(x + i * 8, v);
  quantize_piece(v);
  store_piece<InputLayout::kFp4, kWide>(fp4, i, v);
  if (fp8 != nullptr) {
    store_piece<InputLayout::kFp8, kWide>(fp8, i, v);
  }
}

__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const Bf16* x, int64_t rows, int64_t width, Bf16* out) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t blocks = (width + 31) / 32;
  const int64_t b = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (b >= rows * blocks) {
    return;
  }
  const int64_t column = b % blocks * 32 + threadIdx.x % kWarp, i = b / blocks * width + column;
  float v = column < width ? to_float(x[i]) : 0.0f, unused = 0.0f;
  const uint32_t amax = __reduce_max_sync(kAllLanes, magnitude_bits(v));
  fp8_round_pair(v, unused, fp8_scale(amax));
  if (column < width) {
    out[i] = from_float<Bf16>(v);
  }
}

template <InputLayout kLayout>
auto pick(bool wide, bool quantize) {
  return wide       ? (quantize ? prepare_kernel<kLayout, true, true>
                                : prepare_kernel<kLayout, true, false>)
         : quantize ? prepare_kernel<kLayout, false, true>
                    : prepare_kernel<kLayout, false, false>;
}

}  // namespace

Status prepare_input(const OpContext& ctx,
                     const Bf16* x,
                     int64_t rows,
                     int64_t width,
                     InputLayout layout,
                     bool wide,
                     bool quantize,
                     Bf16* out) {
  const auto kernel = layout == InputLayout::kFp8   ? pick<InputLayout::kFp8>(wide, quantize)
                      : layout == InputLayout::kFp4 ? pick<InputLayout::kFp4>(wide, quantize)
                                                    : pick<InputLayout::kNatural>(wide, quantize);
  const int64_t pieces = rows * width / 8;
  return launch(ctx,
                "prepare_input",
                kernel,
                extent(ceil_div(pieces, kThreads)),
                kThreads,
                0,
                x,
                pieces,
                out);
}

Status prepare_experts_input(const OpContext& ctx,
                             const Bf16* x,
                             int64_t rows,
                             int64_t width,
                             bool wide,
                             Bf16* fp4,
                             Bf16* fp8) {
  const int64_t pieces = rows * width / 8;
  return launch(ctx,
                "prepare_input",
                wide ? prepare_experts_kernel<true> : prepare_experts_kernel<false>,
                extent(ceil_div(pieces, kThreads)),
                kThreads,
                0,
                x,
                pieces,
                fp4,
                fp8);
}

Status quantize_rows(const OpContext& ctx, const Bf16* x, int64_t rows, int64_t width, Bf16* out) {
  const int64_t blocks = rows * ceil_div(width, 32);
  return launch(ctx,
                "quantize_rows",
                quantize_kernel,
                extent(ceil_div(blocks, kThreads / kWarp)),
                kThreads,
                0,
                x,
                rows,
                width,
                out);
}

}  // namespace cachalot::ops::cuda
