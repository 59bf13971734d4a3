// y = x W^T on tensor cores, for BF16 inputs: FP8 (32 x 32 blocks), FP4 (row blocks), BF16 and F32
// weights, expanded to BF16 in registers. The result equals the block-scaled product up to the
// order of FP32 sums: E4M3 and E2M1 times a power of two are exact in BF16, and so are their
// inputs.
//
// in   x [T, groups * K] bf16, weights [N, K]        out  y [T, N] bf16|f32, up to four weights per
// call
//
// Up to 8 tokens (few_kernel): a tile of 16 rows belongs to one warp, or to several that share its
// chunks of 256 columns so that some 1000 to 2000 warps have loads under way. Weights go through a
// ring in shared memory, inputs come from L1/L2.
//
//   warp   fill stages 0, 1 | wait for x | fill 2 . mma 0 | fill 0 . mma 1 | ...
//   block  chunk sums -> shared, added in order -> y     (shared tiles only)
//
// More tokens (many_kernel): a block of 8 warps has 128 rows and 32 or 64 tokens, whose inputs it
// copies to shared memory chunk by chunk (device/gemm.cuh).
//
// Shared: few_kernel at most 13 KiB per warp (3 stages) and 640 B per chunk; many_kernel 214 KiB.
// Bound by weight bytes at few tokens, by mma and shared-memory reads at many. The order of every
// sum is that of device/weights.cuh and depends on K alone.
#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/input.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kFewWarps = 4;      // of a block whose warps have a tile each
constexpr int kMaxSharing = 10;   // warps that share a tile
constexpr int kMostWarps = 2112;  // 16 on each of 132 multiprocessors
constexpr int kMaxTargets = 4;
constexpr int kStages = 3;
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

// The target of a tile, and the tile's first row in it.
struct TilePlace {
  int target;
  int64_t row;

  __device__ __forceinline__ TilePlace(const Problem& p, int tile) : target(0) {
    while (target + 1 < p.targets && tile >= p.target[target + 1].first_tile) {
      ++target;
    }
    row = static_cast<int64_t>(tile - p.target[target].first_tile) * kTileRows;
  }
};

__device__ __forceinline__ void store_y(const Target& to, int64_t token, int64_t row, float value) {
  if (row < to.out) {
    if (to.y_is_bf16) {
      static_cast<Bf16*>(to.y)[token * to.out + row] = from_float<Bf16>(value);
    } else {
      static_cast<float*>(to.y)[token * to.out + row] = value;
    }
  }
}

// Sums of one tile in shared memory: [token][row].
using TileSums = float[kTokenTile][kTokenPad];

__device__ __forceinline__ void store_sums(TileSums& to, const float (&sum)[4], const Lane& lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * lane.t + i % 2][lane.g + 8 * (i / 2)] = sum[i];
  }
}

// `sharing` warps per tile: 1, and a block has kFewWarps tiles, or more, and a block has one tile.
template <class W>
__global__ void __launch_bounds__(kMaxSharing * 32, 1)
    few_kernel(const __grid_constant__ Problem p, int sharing) {
  using Ring = WeightRing<W, 1, kStages>;
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int tile =
      static_cast<int>(blockIdx.x) * (sharing == 1 ? kFewWarps : 1) + (sharing == 1 ? warp : 0);
  const int chunks = static_cast<int>(p.in / kChunk);
  const int first = sharing == 1 ? 0 : warp * chunks / sharing;
  const int last = sharing == 1 ? chunks : (warp + 1) * chunks / sharing;
  auto* sums = reinterpret_cast<TileSums*>(dynamic_shared() + warps * Ring::kBytes);
  if (tile >= p.tiles) {
    return;  // whole blocks, or warps that no barrier waits for
  }
  const TilePlace place(p, tile);
  const Target& target = p.target[place.target];
  TileRows rows[1] = {
      tile_rows<W>(target.values, target.scales, place.row, target.out, p.in, lane)};
  seek<W>(rows[0], first * kChunk);
  Ring ring(dynamic_shared() + warp * Ring::kBytes, rows, (last - first) * (kChunk / W::kStep));
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t token = lane.g;
  const InputRows<1> inputs = {
      {token < p.tokens ? reinterpret_cast<const uint16_t*>(p.x + token * p.width +
                                                            place.row / target.group_rows * p.in +
                                                            first * kChunk + 8 * lane.t)
                        : nullptr}};
  const int tokens = static_cast<int>(p.tokens);
  if (sharing == 1) {
    float total[1][1][4] = {};
    run_chunks<W, 1, 1>(ring, inputs, chunks, lane, [&](int, const float (&part)[1][1][4]) {
      add_part(total, part);
    });
    store_sums(sums[warp], total[0][0], lane);
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x) % 32; i < tokens * kTileRows; i += 32) {
      const int n = i / kTileRows, r = i % kTileRows;
      store_y(target, n, place.row + r, sums[warp][n][r] * W::kLate);
    }
    return;
  }
  run_chunks<W, 1, 1>(ring, inputs, last - first, lane, [&](int c, const float (&part)[1][1][4]) {
    store_sums(sums[first + c], part[0][0], lane);
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tokens * kTileRows;
       i += static_cast<int>(blockDim.x)) {
    const int n = i / kTileRows, r = i % kTileRows;
    float sum = 0;
    for (int c = 0; c < chunks; ++c) {
      sum += sums[c][n][r];
    }
    store_y(target, n, place.row + r, sum * W::kLate);
  }
}

template <class W, int kTiles>
__global__ void __launch_bounds__(kGemmThreads, 1) many_kernel(const __grid_constant__ Problem p) {
  using Block = Gemm<W, kTiles>;
  __shared__ const uint16_t* token_row[Block::kTokens];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int tile = static_cast<int>(blockIdx.x) * kGemmWarps + warp;
  const int chunks = static_cast<int>(p.in / kChunk);
  const bool active = tile < p.tiles;
  const TilePlace place(p, min(tile, p.tiles - 1));
  const Target& target = p.target[place.target];
  const Block block{dynamic_shared(), token_row};
  const TileRows rows[1] = {
      tile_rows<W>(target.values, target.scales, place.row, target.out, p.in, lane)};
  typename Block::Ring ring(block.ring_memory(), rows, active ? chunks * (kChunk / W::kStep) : 0);
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * Block::kTokens;
  // Tiles of a block lie in one group: the host gives blocks of whole groups only.
  const TilePlace first(p, static_cast<int>(blockIdx.x) * kGemmWarps);
  const int64_t column = first.row / p.target[first.target].group_rows * p.in;
  if (threadIdx.x < Block::kTokens) {
    const int64_t token = token0 + threadIdx.x;
    token_row[threadIdx.x] = token < p.tokens
                                 ? reinterpret_cast<const uint16_t*>(p.x + token * p.width + column)
                                 : nullptr;
  }
  __syncthreads();
  float total[1][kTiles][4] = {};
  block.run(ring, chunks, active, lane, total);
  __syncthreads();
  // The warp's sums go through shared memory, so that a token's 16 rows are written together.
  if (active) {
    auto* sums = reinterpret_cast<TileSums*>(block.memory) + warp * kTiles;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      store_sums(sums[n], total[0][n], lane);
    }
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x) % 32; i < Block::kTokens * kTileRows; i += 32) {
      const int n = i / kTileRows, r = i % kTileRows;
      if (token0 + n < p.tokens) {
        store_y(
            target, token0 + n, place.row + r, sums[n / kTokenTile][n % kTokenTile][r] * W::kLate);
      }
    }
  }
}

// Warps per tile: as many as keep the device full of them, an equal number of chunks each.
int tile_sharing(int tiles, int chunks) {
  int sharing = 1;
  for (int n = 2; n <= std::min(chunks, kMaxSharing); ++n) {
    if (chunks % n == 0 && tiles * n <= kMostWarps) {
      sharing = n;
    }
  }
  return sharing;
}

template <class W>
Status launch_few(const OpContext& ctx, const Problem& p) {
  const int chunks = static_cast<int>(p.in / kChunk);
  // Chunk sums of a shared tile must fit into shared memory.
  const int sharing = chunks <= 128 ? tile_sharing(p.tiles, chunks) : 1;
  const int warps = sharing == 1 ? kFewWarps : sharing;
  const int sums = sharing == 1 ? kFewWarps : chunks;
  return launch(
      ctx,
      "linear",
      few_kernel<W>,
      extent(sharing == 1 ? ceil_div(p.tiles, kFewWarps) : p.tiles),
      warps * 32,
      warps * WeightRing<W, 1, kStages>::kBytes + sums * static_cast<int64_t>(sizeof(TileSums)),
      p,
      sharing);
}

template <class W, int kTiles>
Status launch_many(const OpContext& ctx, const Problem& p) {
  using Block = Gemm<W, kTiles>;
  static_assert(Block::kShared <= kSharedCapacity - 1024);
  static_assert(kGemmWarps * kTiles * sizeof(TileSums) <= Block::kShared);
  return launch(
      ctx,
      "linear",
      many_kernel<W, kTiles>,
      dim3(extent(ceil_div(p.tiles, kGemmWarps)), extent(ceil_div(p.tokens, Block::kTokens))),
      kGemmThreads,
      Block::kShared,
      p);
}

template <class W>
Status launch_many(const OpContext& ctx, const Problem& p) {
  return p.tokens <= 32 ? launch_many<W, 4>(ctx, p) : launch_many<W, 8>(ctx, p);
}

Status launch_format(const OpContext& ctx, WeightFormat format, const Problem& p, bool few) {
  switch (format) {
    case WeightFormat::kFp8Block:
      return few ? launch_few<Fp8Weights<true>>(ctx, p) : launch_many<Fp8Weights<false>>(ctx, p);
    case WeightFormat::kFp4Row:
      return few ? launch_few<Fp4Weights>(ctx, p) : launch_many<Fp4Weights>(ctx, p);
    case WeightFormat::kBF16:
      return few ? launch_few<Bf16Weights>(ctx, p) : launch_many<Bf16Weights>(ctx, p);
    default:
      return few ? launch_few<F32Weights>(ctx, p) : launch_many<F32Weights>(ctx, p);
  }
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
    bool whole_groups = true;
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
      whole_groups =
          whole_groups && (args.groups == 1 || w.out / args.groups % (kGemmWarps * kTileRows) == 0);
    }
    if (tokens <= kTokenTile || whole_groups) {
      CACHALOT_RETURN_IF_ERROR(launch_format(ctx, format, p, tokens <= kTokenTile));
      continue;
    }
    // Small groups: eight tokens at a time.
    for (int64_t t = 0; t < tokens; t += kTokenTile) {
      Problem few = p;
      few.x = x + t * width;
      few.tokens = std::min<int64_t>(kTokenTile, tokens - t);
      for (int i = 0; i < p.targets; ++i) {
        few.target[i].y = static_cast<uint8_t*>(p.target[i].y) +
                          t * p.target[i].out * (p.target[i].y_is_bf16 ? 2 : 4);
      }
      CACHALOT_RETURN_IF_ERROR(launch_format(ctx, format, few, true));
    }
  }
  return {};
}

bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace

bool fragments_support(const Weight& weight) {
  return weight.in % kChunk == 0 && weight.in > 0 && weight.format != WeightFormat::kFp8Row &&
         aligned(weight.values.data, 16) && aligned(weight.scales.data, 8);
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
