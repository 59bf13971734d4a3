// Prepares the input rows of linears: quantization to FP8 blocks and back, and the column order
// that the weight fragments expect (device/weights.cuh), as rows or as images for wgmma
// (device/gemm.cuh).
//
// in   x [T, K] bf16        out  [T, K] bf16, K permuted within chunks of 256
// Eight columns per thread; four neighbouring threads hold a block of 32 and agree on its amax by
// shuffles, and for images four threads exchange what makes whole 16-byte pieces. No shared memory.
// Bytes: 4 K per row; at decode the launch dominates.
#include "ops/cuda/input.cuh"

#include "ops/cuda/device/pieces.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kImageRows = 4;  // of a warp, loaded together; divides kTokenTile, so of one tile

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

// x [rows, width] in column groups of `in`: the images of a group's tiles follow each other. A warp
// takes chunk blockIdx.x of kImageRows rows.
template <InputLayout kLayout, bool kQuantize>
__global__ void __launch_bounds__(kThreads)
    image_kernel(const Bf16* x, int rows, int width, int in, int tile, Bf16* out) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const unsigned chunk = blockIdx.x, chunks = static_cast<unsigned>(in) / kChunk;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row =
      static_cast<int>(blockIdx.y * (kThreads / kWarp) + threadIdx.x / kWarp) * kImageRows;
  const int count = min(rows - row, kImageRows);
  if (count <= 0) {
    return;
  }
  const Bf16* from = x + static_cast<int64_t>(row) * width + chunk * kChunk + lane * 8;
  uint4 raw[kImageRows];
#pragma unroll
  for (int r = 0; r < kImageRows; ++r) {
    if (r < count) {
      raw[r] = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(r) * width);
    }
  }
  const int first = row / tile * tile;
  Bf16* image = out + (chunk / chunks * image_rows(rows) + first) * in;
  const int64_t tile_rows = image_rows(min(rows - first, tile));
#pragma unroll
  for (int r = 0; r < kImageRows; ++r) {
    if (r < count) {
      float v[8];
      load_elements<8>(reinterpret_cast<const Bf16*>(&raw[r]), v);
      uint32_t pairs[4];
      if constexpr (kQuantize) {
        quantize_and_order_piece<kLayout>(v, pairs);
      } else {
        order_piece<kLayout>(v, pairs);
      }
      store_image_pairs<kLayout>(image, tile_rows, row + r - first, chunk % chunks, pairs);
    }
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
    return launch(
        ctx,
        "prepare_image",
        image_kernel<kLayout, kQuantize>,
        dim3(extent(width / kChunk), extent(ceil_div(rows, kThreads / kWarp * kImageRows))),
        kThreads,
        0,
        x,
        static_cast<int>(rows),
        static_cast<int>(width),
        static_cast<int>(in),
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
