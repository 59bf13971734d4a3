// Prepares the input rows of linears: quantization to FP8 blocks and back, and the column order
// that the weight fragments expect (device/weights.cuh).
//
// in   x [T, K] bf16        out  [T, K] bf16, K permuted within chunks of 256
// Eight columns per thread; four neighbouring threads hold a block of 32 and agree on its amax by
// shuffles. No shared memory. Bytes: 4 K per row; at decode the launch dominates.
#include "ops/cuda/input.cuh"

#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/reduce.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 128;

// Eight columns of a row; the four threads of a block of 32 agree on its scale.
__device__ __forceinline__ void quantize_piece(float (&v)[8]) {
  uint32_t amax = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    amax = max(amax, magnitude_bits(v[e]));
  }
  amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 2));
  const uint32_t scale = fp8_scale(amax);
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    fp8_round_pair(v[e], v[e + 1], scale);
  }
}

// Stores piece i (of the whole matrix) in a layout.
template <InputLayout kLayout>
__device__ __forceinline__ void store_piece(Bf16* out, int64_t i, const float (&v)[8]) {
  float ordered[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    ordered[layout_slot(kLayout, e)] = v[e];
  }
  const int64_t piece = i / 32 * 32 + layout_piece(kLayout, static_cast<int>(i % 32));
  store_elements<8>(out + piece * 8, ordered);
}

template <InputLayout kLayout, bool kQuantize>
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
  store_piece<kLayout>(out, i, v);
}

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
  store_piece<InputLayout::kFp4>(fp4, i, v);
  if (fp8 != nullptr) {
    store_piece<InputLayout::kFp8>(fp8, i, v);
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
auto pick(bool quantize) {
  return quantize ? prepare_kernel<kLayout, true> : prepare_kernel<kLayout, false>;
}

}  // namespace

Status prepare_input(const OpContext& ctx,
                     const Bf16* x,
                     int64_t rows,
                     int64_t width,
                     InputLayout layout,
                     bool quantize,
                     Bf16* out) {
  const auto kernel = layout == InputLayout::kFp8   ? pick<InputLayout::kFp8>(quantize)
                      : layout == InputLayout::kFp4 ? pick<InputLayout::kFp4>(quantize)
                                                    : pick<InputLayout::kNatural>(quantize);
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

Status prepare_experts_input(
    const OpContext& ctx, const Bf16* x, int64_t rows, int64_t width, Bf16* fp4, Bf16* fp8) {
  const int64_t pieces = rows * width / 8;
  return launch(ctx,
                "prepare_input",
                prepare_experts_kernel,
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
