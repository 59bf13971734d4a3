// y = x W^T on tensor cores, for BF16 inputs: FP8 (32 x 32 blocks), FP4 (row blocks), BF16 and F32
// weights, expanded to BF16 in registers. The result equals the block-scaled product up to the
// order of FP32 sums: E4M3 and E2M1 times a power of two are exact in BF16, and so are their
// inputs.
//
// in   x [T, groups * K] bf16, weights [N, K]        out  y [T, N] bf16|f32, up to four weights per
// call Tiles: an mma takes 16 rows of W as its A operand and 8 tokens as B. A block has 8 warps;
// kSplit (1 or 4) warps share a tile, one segment of K each. blockIdx.y runs over groups of 8
// kTiles tokens. Shared: 5 stages of at most 2.1 KiB per warp for weights (87 KiB), 5 KiB per token
// tile for the partial sums. Input fragments come from L1/L2.
//
//   warp   fill stages 0 .. 3 | wait for x | fill 4 . mma 0 | fill 0 . mma 1 | ...
//   block  partial sums -> shared, segments added in order -> y
//
// Bound by weight bytes up to about 64 tokens. The order of every sum is that of device/weights.cuh
// and depends on K alone.
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/input.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kMaxTargets = 4;
constexpr int kStages = 5;
constexpr int kTokenPad = 20;  // floats per token in shared memory: 16 rows without bank conflicts

struct Target {
  const uint8_t* values;
  const uint8_t* scales;
  void* y;
  int64_t out;
  int64_t group_rows;
  int first_tile;
  bool y_is_bf16;
};

struct Problem {
  const Bf16* x;  // [T, groups * K] in the format's layout
  int64_t tokens;
  int64_t width;  // groups * K
  int64_t in;     // K
  int tiles;      // of all targets
  int targets;
  Target target[kMaxTargets];
};

template <class W>
using Ring = WeightRing<W, 1, kStages>;

template <class W, int kTiles, int kSplit>
__global__ void __launch_bounds__(kThreads, kTiles == 4 ? 1 : 2)
    linear_kernel(const __grid_constant__ Problem p) {
  constexpr int kBlockTiles = kWarps / kSplit;
  __shared__ float part[kWarps][kTiles][kTokenTile][kTokenPad];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Ring<W> ring{dynamic_shared() + warp * Ring<W>::kBytes};
  const int tile = static_cast<int>(blockIdx.x) * kBlockTiles + warp / kSplit;
  const int chunks = static_cast<int>(p.in / kChunk);
  const int segments = segment_count(chunks);
  const int first = kSplit == 1 ? 0 : warp % kSplit;
  const int last = kSplit == 1 ? segments : first + 1;
  const SegmentRange range(chunks, first, last);
  const bool active = tile < p.tiles;

  allow_next_kernel();
  int index = 0;
  while (index + 1 < p.targets && tile >= p.target[index + 1].first_tile) {
    ++index;
  }
  const Target& target = p.target[index];
  const int64_t row = static_cast<int64_t>(tile - target.first_tile) * kTileRows;
  TileRows rows[1];
  if (active) {
    rows[0] = W::tile_rows(target.values, target.scales, row, target.out, p.in, lane);
    start_ring(ring, rows, range);
  }
  wait_for_previous_kernels();
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * (kTiles * kTokenTile);
  if (active) {
    const int64_t column = row / target.group_rows * p.in + 8 * lane.t;
    const uint16_t* inputs[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int64_t token = token0 + n * kTokenTile + lane.g;
      inputs[n] = token < p.tokens
                      ? reinterpret_cast<const uint16_t*>(p.x + token * p.width + column)
                      : nullptr;
    }
    ChunkSum<1, kTiles, kSplit == 1> sum;
    sum_range(sum, ring, rows, inputs, range, lane);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        part[warp][n][2 * lane.t + i % 2][lane.g + 8 * (i / 2)] = sum.value(0, n, i);
      }
    }
  }
  __syncthreads();
  const int adders = kSplit == 1 ? 1 : segments;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockTiles * kTiles * kTokenTile * kTileRows;
       i += kThreads) {
    const int r = i % kTileRows, n = i / kTileRows % (kTiles * kTokenTile);
    const int t = i / (kTileRows * kTiles * kTokenTile);
    const int out_tile = static_cast<int>(blockIdx.x) * kBlockTiles + t;
    const int64_t token = token0 + n;
    if (out_tile >= p.tiles || token >= p.tokens) {
      continue;
    }
    float sum = part[t * kSplit][n / kTokenTile][n % kTokenTile][r];
    for (int s = 1; s < adders; ++s) {
      sum += part[t * kSplit + s][n / kTokenTile][n % kTokenTile][r];
    }
    sum *= W::kLate;
    int owner = 0;
    while (owner + 1 < p.targets && out_tile >= p.target[owner + 1].first_tile) {
      ++owner;
    }
    const Target& to = p.target[owner];
    const int64_t o = static_cast<int64_t>(out_tile - to.first_tile) * kTileRows + r;
    if (o < to.out) {
      if (to.y_is_bf16) {
        static_cast<Bf16*>(to.y)[token * to.out + o] = from_float<Bf16>(sum);
      } else {
        static_cast<float*>(to.y)[token * to.out + o] = sum;
      }
    }
  }
}

// Tiles of K split over four warps give short K, or few rows, enough loads under way.
template <class W, int kTiles>
Status launch_tiles(const OpContext& ctx, const Problem& p) {
  const bool split = p.tiles <= 1024 && p.in >= 4 * kChunk;
  const int block_tiles = split ? kWarps / 4 : kWarps;
  const dim3 grid(extent(ceil_div(p.tiles, block_tiles)),
                  extent(ceil_div(p.tokens, kTiles * kTokenTile)));
  return launch(ctx,
                "linear",
                split ? linear_kernel<W, kTiles, 4> : linear_kernel<W, kTiles, 1>,
                grid,
                kThreads,
                kWarps * Ring<W>::kBytes,
                p);
}

template <class W>
Status launch_format(const OpContext& ctx, const Problem& p) {
  if (p.tokens <= kTokenTile) {
    return launch_tiles<W, 1>(ctx, p);
  }
  if (p.tokens <= 2 * kTokenTile) {
    return launch_tiles<W, 2>(ctx, p);
  }
  return launch_tiles<W, 4>(ctx, p);
}

// One weight format's targets: prepares their common input and multiplies.
Status run_format(OpContext& ctx,
                  const LinearArgs& args,
                  WeightFormat format,
                  std::span<const LinearTarget> targets) {
  const int64_t tokens = args.x.dim(0), width = args.x.dim(1), in = width / args.groups;
  const InputLayout layout = format == WeightFormat::kFp8Block ? InputLayout::kFp8
                             : format == WeightFormat::kFp4Row ? InputLayout::kFp4
                                                               : InputLayout::kNatural;
  const bool quantize = args.quantize_input && targets[0].weight->quantizes_input();
  Scratch scratch(ctx);
  const auto* x = static_cast<const Bf16*>(args.x.data);
  if (layout != InputLayout::kNatural || quantize) {
    auto* prepared = scratch.array<Bf16>(tokens * width);
    CACHALOT_RETURN_IF_ERROR(scratch.status("linear"));
    CACHALOT_RETURN_IF_ERROR(prepare_input(ctx, x, tokens, width, layout, quantize, prepared));
    x = prepared;
  }
  for (size_t begin = 0; begin < targets.size(); begin += kMaxTargets) {
    Problem p{.x = x, .tokens = tokens, .width = width, .in = in};
    for (size_t i = begin; i < targets.size() && p.targets < kMaxTargets; ++i) {
      const Weight& w = *targets[i].weight;
      p.target[p.targets++] = {.values = static_cast<const uint8_t*>(w.values.data),
                               .scales = static_cast<const uint8_t*>(w.scales.data),
                               .y = targets[i].y.data,
                               .out = w.out,
                               .group_rows = w.out / args.groups,
                               .first_tile = p.tiles,
                               .y_is_bf16 = targets[i].y.dtype == DType::kBF16};
      p.tiles += static_cast<int>(ceil_div(w.out, kTileRows));
    }
    CACHALOT_RETURN_IF_ERROR(format == WeightFormat::kFp8Block ? launch_format<Fp8Weights>(ctx, p)
                             : format == WeightFormat::kFp4Row ? launch_format<Fp4Weights>(ctx, p)
                             : format == WeightFormat::kBF16   ? launch_format<Bf16Weights>(ctx, p)
                                                               : launch_format<F32Weights>(ctx, p));
  }
  return {};
}

bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace

bool fragments_support(const Weight& weight) {
  constexpr int64_t kMostBytes = (int64_t{1} << 32) - 4096;  // of 32-bit offsets
  return weight.in % kChunk == 0 && weight.in > 0 && weight.format != WeightFormat::kFp8Row &&
         weight.values.bytes() <= kMostBytes && aligned(weight.values.data, 16) &&
         aligned(weight.scales.data, 4);
}

bool linear_mma_supports(const LinearArgs& args) {
  if (args.x.dtype != DType::kBF16 || !aligned(args.x.data, 16)) {
    return false;
  }
  for (const LinearTarget& target : args.targets) {
    const Weight& w = *target.weight;
    if (!fragments_support(w) || (args.groups > 1 && w.out / args.groups % kTileRows != 0)) {
      return false;
    }
  }
  return true;
}

Status linear_mma(OpContext& ctx, const LinearArgs& args) {
  // Weights of one format share a launch.
  size_t begin = 0;
  while (begin < args.targets.size()) {
    const WeightFormat format = args.targets[begin].weight->format;
    size_t end = begin + 1;
    while (end < args.targets.size() && args.targets[end].weight->format == format) {
      ++end;
    }
    CACHALOT_RETURN_IF_ERROR(
        run_format(ctx, args, format, args.targets.subspan(begin, end - begin)));
    begin = end;
  }
  return {};
}

Status linear_any(OpContext& ctx, const LinearArgs& args) {
  return linear_mma_supports(args) ? linear_mma(ctx, args) : linear_simt(ctx, args);
}

}  // namespace cachalot::ops::cuda
