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
// ring in shared memory (device/few_tokens.cuh), inputs come from L1/L2; for one or two tokens
// every block makes its own from x, so that no launch is needed in front.
//
//   warp   fill stages 0 .. 2 | wait for x | fill 3 . mma 0 | fill 0 . mma 1 | ...
//   block  chunk sums -> shared, added in order -> y     (shared tiles only)
//
// More tokens: linear_many.cu, from inputs that a kernel in front has laid out as images.
//
// Shared: at most 13 KiB per warp (4 stages, and 5 KiB of input) and 640 B per chunk. The order of
// every sum is that of device/weights.cuh and depends on K alone.
//
// One token is bound by what comes one after the other: 0.5 us from the kernel in front, 1.2 to 4
// until x is ready, the instructions of the multiprocessors that have most tiles (3 where the mean
// is 2.4, say), and 0.7 for the sums.
#include "ops/cuda/device/few_tokens.cuh"
#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/device/pieces.cuh"
#include "ops/cuda/input.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear.cuh"
#include "ops/cuda/linear_mma.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kFewWarps = 4;           // of a block whose warps have a tile each
constexpr int kMaxSharing = 20;        // warps that share a tile
constexpr int kMaxSharingTokens = 10;  // with several token tiles, which fill the device themselves
constexpr int kMostWarps = 16 * kMultiprocessors;
// linear_many() reads weights once for all tokens, few_kernel once for 8, but from many more warps:
// up to this product of tokens and blocks of 128 rows it is the faster one.
constexpr int64_t kFewBlockTokens = 256;
constexpr int kStages = 4;
constexpr int kRawAhead = 8;  // chunks of raw input under way together

// A tile's sums go to shared memory as [token][kTokenPad], so that a token's 16 rows are written
// together.
__device__ __forceinline__ void store_sums(float* to,
                                           int tokens,
                                           const float (&sum)[4],
                                           const Lane& lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = 2 * lane.t + i % 2;
    if (n < tokens) {
      to[n * kTokenPad + lane.g + 8 * (i / 2)] = sum[i];
    }
  }
}

// Floats of few_kernel's sums, and columns of one token that a warp of it needs.
__host__ __device__ constexpr int64_t sums_floats(int sharing, int chunks, int tokens) {
  const int n = tokens < kTokenTile ? tokens : kTokenTile;
  return int64_t{kTokenPad} * (sharing == 1 ? kFewWarps * kTokenTile : chunks * n);
}
__host__ __device__ constexpr int raw_columns(int sharing, int chunks) {
  return (chunks + sharing - 1) / sharing * kChunk;
}

// `sharing` warps per tile: 1, and a block has kFewWarps tiles, or more, and a block has one tile.
// kRaw: p.x is in natural order; every warp quantizes its columns of it, or only reorders them.
template <class W, bool kRaw>
__global__ void __launch_bounds__(kMaxSharing * 32, 1)
    few_kernel(const __grid_constant__ LinearProblem p, int sharing) {
  using Ring = TileRing<W, kStages>;
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int tile =
      static_cast<int>(blockIdx.x) * (sharing == 1 ? kFewWarps : 1) + (sharing == 1 ? warp : 0);
  const int chunks = static_cast<int>(p.in / kChunk);
  const int first = sharing == 1 ? 0 : warp * chunks / sharing;
  const int last = sharing == 1 ? chunks : (warp + 1) * chunks / sharing;
  auto* sums = reinterpret_cast<float*>(dynamic_shared() + warps * Ring::kBytes);
  if (tile >= p.tiles) {
    return;  // warps that no barrier waits for
  }
  const TilePlace place(p, tile);
  const LinearPart& target = p.target[place.target];
  TileRows rows = tile_rows<W>(target.values, target.scales, place.row, target.out, p.in, lane);
  seek<W>(rows, first * kChunk);
  Ring ring(dynamic_shared() + warp * Ring::kBytes, rows, (last - first) * (kChunk / W::kStep));
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * kTokenTile, token = token0 + lane.g;
  const int tokens = static_cast<int>(min(p.tokens - token0, int64_t{kTokenTile}));
  const int64_t column = place.row / target.group_rows * p.in + first * kChunk;
  const auto* input =
      token < p.tokens
          ? reinterpret_cast<const uint16_t*>(p.x + token * p.width + column + 8 * lane.t)
          : nullptr;
  if constexpr (kRaw) {
    auto* own = reinterpret_cast<Bf16*>(dynamic_shared() + warps * Ring::kBytes +
                                        sums_floats(sharing, chunks, static_cast<int>(p.tokens)) *
                                            sizeof(float)) +
                warp * raw_columns(sharing, chunks) * tokens;
    const int64_t width = raw_columns(sharing, chunks);
    const int piece = static_cast<int>(threadIdx.x) % 32;
    for (int n = 0; n < tokens; ++n) {
      const Bf16* from = p.x + (token0 + n) * p.width + column + piece * 8;
      for (int c0 = 0; c0 < last - first; c0 += kRawAhead) {
        uint4 raw[kRawAhead];
#pragma unroll
        for (int c = 0; c < kRawAhead; ++c) {
          if (c0 + c < last - first) {
            raw[c] = *reinterpret_cast<const uint4*>(from + (c0 + c) * kChunk);
          }
        }
#pragma unroll
        for (int c = 0; c < kRawAhead; ++c) {
          if (c0 + c < last - first) {
            float v[8];
            unpack_elements(raw[c], v);
            uint32_t pairs[4];
            if (p.quantize) {
              quantize_and_order_piece<W::kLayout>(v, pairs);
            } else {
              order_piece<W::kLayout>(v, pairs);
            }
            store_pairs<W::kLayout>(own + n * width + (c0 + c) * kChunk, piece, pairs);
          }
        }
      }
    }
    __syncwarp();
    input = token < p.tokens ? reinterpret_cast<const uint16_t*>(own + lane.g * width) + 8 * lane.t
                             : nullptr;
  }
  const uint16_t* const inputs[1] = {input};
  if (sharing == 1) {
    float total[1][4] = {};
    run_chunks(
        ring, inputs, chunks, lane, [&](int, const float (&part)[1][4]) { add_part(total, part); });
    sums += warp * (kTokenTile * kTokenPad);
    store_sums(sums, tokens, total[0], lane);
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x) % 32; i < tokens * kTileRows; i += 32) {
      const int n = i / kTileRows, r = i % kTileRows;
      store_y(target, token0 + n, place.row + r, sums[n * kTokenPad + r] * W::kLate);
    }
    return;
  }
  run_chunks(ring, inputs, last - first, lane, [&](int c, const float (&part)[1][4]) {
    store_sums(sums + (first + c) * (tokens * kTokenPad), tokens, part[0], lane);
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tokens * kTileRows;
       i += static_cast<int>(blockDim.x)) {
    const int n = i / kTileRows, r = i % kTileRows;
    const float sum = sum_of_chunks(sums, chunks, tokens, n, r);
    store_y(target, token0 + n, place.row + r, sum * W::kLate);
  }
}

// Warps per tile: as many as keep the device full of them, at most `most`, an equal number of
// chunks each.
int tile_sharing(int tiles, int chunks, int most) {
  int sharing = 1;
  for (int n = 2; n <= std::min(chunks, most); ++n) {
    if (chunks % n == 0 && tiles * n <= kMostWarps) {
      sharing = n;
    }
  }
  return sharing;
}

// Warps per tile of a problem. Chunk sums of a shared tile must fit into shared memory.
int sharing_of(const LinearProblem& p) {
  const int chunks = static_cast<int>(p.in / kChunk);
  const int most = p.tokens <= kTokenTile ? kMaxSharing : kMaxSharingTokens;
  return chunks <= 64 ? tile_sharing(p.tiles, chunks, most) : 1;
}

int few_warps(int sharing) {
  return sharing == 1 ? kFewWarps : sharing;
}

// Shared memory of a block of few_kernel.
template <class W>
int64_t few_bytes(const LinearProblem& p, bool raw) {
  const int chunks = static_cast<int>(p.in / kChunk), sharing = sharing_of(p);
  const int warps = few_warps(sharing);
  return warps * TileRing<W, kStages>::kBytes +
         4 * sums_floats(sharing, chunks, static_cast<int>(p.tokens)) +
         (raw ? 2 * warps * p.tokens * raw_columns(sharing, chunks) : 0);
}

template <class W, bool kRaw>
Status launch_few(const OpContext& ctx, const LinearProblem& p) {
  const int sharing = sharing_of(p);
  return launch(ctx,
                "linear",
                few_kernel<W, kRaw>,
                dim3(extent(sharing == 1 ? ceil_div(p.tiles, kFewWarps) : p.tiles),
                     extent(ceil_div(p.tokens, kTokenTile))),
                few_warps(sharing) * 32,
                few_bytes<W>(p, kRaw),
                p,
                sharing);
}

enum class Path : uint8_t { kRaw, kFew, kMany };

Status launch_format(const OpContext& ctx, WeightFormat format, const LinearProblem& p, Path path) {
  if (path == Path::kMany) {
    return linear_many(ctx, format, p);
  }
  switch (format) {
    case WeightFormat::kFp8Block:
      return path == Path::kRaw ? launch_few<Fp8Weights<true>, true>(ctx, p)
                                : launch_few<Fp8Weights<true>, false>(ctx, p);
    case WeightFormat::kFp4Row:
      return launch_few<Fp4Weights, false>(ctx, p);
    case WeightFormat::kBF16:
      return launch_few<Bf16Weights, false>(ctx, p);
    default:
      return launch_few<F32Weights, false>(ctx, p);
  }
}

// Whether few_kernel takes the input as it is: FP8 weights, and little of it per warp.
bool takes_raw(WeightFormat format, const LinearProblem& p) {
  constexpr int64_t kMostBytes = 5 << 10;  // of a warp's input
  const int chunks = static_cast<int>(p.in / kChunk);
  return format == WeightFormat::kFp8Block && p.tokens <= 2 &&
         2 * p.tokens * raw_columns(sharing_of(p), chunks) <= kMostBytes &&
         few_bytes<Fp8Weights<true>>(p, true) <= kSharedCapacity;
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
  Bf16* prepared = nullptr;
  for (size_t begin = 0; begin < targets.size(); begin += kMaxTargets) {
    LinearProblem p{.x = x, .quantize = quantize, .tokens = tokens, .width = width, .in = in};
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
    // A block of linear_many() lies in one group.
    const bool few = tokens <= kTokenTile || !whole_groups ||
                     ceil_div(p.tiles, kGemmWarps) * tokens <= kFewBlockTokens;
    const Path path = takes_raw(format, p) ? Path::kRaw : few ? Path::kFew : Path::kMany;
    if (path == Path::kMany ||
        (path == Path::kFew && (layout != InputLayout::kNatural || quantize))) {
      if (prepared == nullptr) {
        prepared = scratch.array<Bf16>(image_rows(tokens) * width);
        CACHALOT_RETURN_IF_ERROR(scratch.status("linear"));
      }
      CACHALOT_RETURN_IF_ERROR(
          path == Path::kMany ? prepare_image(ctx,
                                              x,
                                              tokens,
                                              width,
                                              in,
                                              many_tokens(format, p.tiles, tokens),
                                              layout,
                                              quantize,
                                              prepared)
                              : prepare_input(ctx, x, tokens, width, layout, quantize, prepared));
      p.x = prepared;
    }
    CACHALOT_RETURN_IF_ERROR(launch_format(ctx, format, p, path));
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
