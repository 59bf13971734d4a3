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

template <InputLayout kLayout, bool kQuantize>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const Bf16* x, int64_t pieces, Bf16* out) {
  allow_next_kernel();  // before the wait: the linear behind reads weights alone before its own
  wait_for_previous_kernels();
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

// x [rows, width] in column groups of `in`: the images of a group's tiles follow each other.
template <InputLayout kLayout, bool kQuantize>
__global__ void __launch_bounds__(kThreads)
    image_kernel(const Bf16* x, int64_t rows, int64_t width, int64_t in, int tile, Bf16* out) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= rows * width / 8) {
    return;
  }
  float v[8];
  load_elements<8>(x + i * 8, v);
  if constexpr (kQuantize) {
    quantize_piece(v);
  }
  const int64_t row = i / (width / 8), column = i % (width / 8) * 8;
  const int64_t first = row / tile * tile;
  const int64_t tile_rows = image_rows(rows - first < tile ? rows - first : tile);
  store_image<kLayout>(out + (column / in * image_rows(rows) + first) * in,
                       tile_rows,
                       row - first,
                       column % in / 8,
                       v);
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

// Calls body.operator()<layout, quantize>().
template <class Body>
Status with_form(InputLayout layout, bool quantize, const Body& body) {
  switch (layout) {
    case InputLayout::kFp8:
      return quantize ? body.template operator()<InputLayout::kFp8, true>()
                      : body.template operator()<InputLayout::kFp8, false>();
    case InputLayout::kFp4:
      return quantize ? body.template operator()<InputLayout::kFp4, true>()
                      : body.template operator()<InputLayout::kFp4, false>();
    default:
      return quantize ? body.template operator()<InputLayout::kNatural, true>()
                      : body.template operator()<InputLayout::kNatural, false>();
  }
}

unsigned grid(int64_t pieces) {
  return extent(ceil_div(pieces, kThreads));
}

}  // namespace

Status prepare_input(const OpContext& ctx,
                     const Bf16* x,
                     int64_t rows,
                     int64_t width,
                     InputLayout layout,
                     bool quantize,
                     Bf16* out) {
  const int64_t pieces = rows * width / 8;
  return with_form(layout, quantize, [&]<InputLayout kLayout, bool kQuantize>() {
    return launch(ctx,
                  "prepare_input",
                  prepare_kernel<kLayout, kQuantize>,
                  grid(pieces),
                  kThreads,
                  0,
                  x,
                  pieces,
                  out);
  });
}

Status prepare_image(const OpContext& ctx,
                     const Bf16* x,
                     int64_t rows,
                     int64_t width,
                     int64_t in,
                     int tile,
                     InputLayout layout,
                     bool quantize,
                     Bf16* out) {
  return with_form(layout, quantize, [&]<InputLayout kLayout, bool kQuantize>() {
    return launch(ctx,
                  "prepare_image",
                  image_kernel<kLayout, kQuantize>,
                  grid(rows * width / 8),
                  kThreads,
                  0,
                  x,
                  rows,
                  width,
                  in,
                  tile,
                  out);
  });
}

Status prepare_experts_input(
    const OpContext& ctx, const Bf16* x, int64_t rows, int64_t width, Bf16* fp4, Bf16* fp8) {
  const int64_t pieces = rows * width / 8;
  return launch(
      ctx, "prepare_input", prepare_experts_kernel, grid(pieces), kThreads, 0, x, pieces, fp4, fp8);
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
