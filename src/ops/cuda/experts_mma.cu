// Routed (FP4) and shared (FP8) experts on tensor cores, for BF16 inputs.
//
//   hidden = round(silu(min(w1 x, limit)) clamp(w3 x, +-limit) weight), quantized to FP8 blocks
//   y = round(sum over slots, ascending, of round(w2 hidden) + round(shared))
//
// in   x [T, D] bf16, experts [T, k] i32, weights [T, k] f32, w1, w3 [F, D], w2 [D, F]
// out  y [T, D] bf16
//
// prepare   x quantized, in the FP4 and the FP8 column order            -> scratch [T, D] each
// route     (token, slot) pairs sorted by expert, cut into groups of at most 8 kTiles tokens
// hidden    block = 32 rows of w1 and w3 of one group: warp (f, s) multiplies rows 16 f .. of both
// by
//           segment s of the group's inputs; sums, SwiGLU and quantization in shared memory
// out       block = 32 rows of w2, the same split
// combine   slots added in ascending order
//
// Tiles and rings as in device/weights.cuh; inputs come from L1/L2:
//
//   warp   fill stages 0 .. n - 2 | fill n - 1 . mma 0 | fill 0 . mma 1 | ...
//   block  partial sums -> shared | SwiGLU, quantize | next tile
//
// Shared: rings of 80 (hidden) and 70 KiB (out); 8 warps x matrices x kTiles x 640 B partial sums.
// Bound by weight bytes: 18.8 MB per routed expert that has a token. Many tokens per expert repeat
// the weight reads through L2 and are bound by that.
#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/expert_table.cuh"
#include "ops/cuda/input.cuh"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kBlockRows = 2 * kTileRows;  // 32: one quantization block of the hidden values
constexpr int kTokenPad = 20;
constexpr int kRouteThreads = 1024;
constexpr int kMaxExperts = 2048;
constexpr int64_t kMaxBlocks = 8192;

// Pairs pair_of[begin .. begin + count) go to one expert.
struct Group {
  int expert;
  int begin;
  int count;
};

struct Routing {
  const int* pair_of;  // [T k]: token * k + slot
  const Group* groups;
  const int* count;  // of groups
};

struct Problem {
  const ExpertPointers* table;
  ExpertPointers shared;
  bool has_shared;
  int experts;
  int64_t tokens;
  int64_t d;
  int64_t f;
  int k;
  float limit;
  const float* weights;  // [T, k]
  Routing routing;
  const Bf16* x_fp4;    // [T, D] in FP4 order
  const Bf16* x_fp8;    // [T, D] in FP8 order
  Bf16* hidden_routed;  // [T k, F] in FP4 order
  Bf16* hidden_shared;  // [T, F] in FP8 order
  Bf16* out_routed;     // [T k, D]
  Bf16* out_shared;     // [T, D]
  Bf16* y;
};

// One block: sorts the pairs by expert. The order inside an expert does not matter: every pair's
// result depends on the pair alone.
__global__ void __launch_bounds__(kRouteThreads) route_kernel(const int32_t* experts,
                                                              int pairs,
                                                              int expert_count,
                                                              int group_tokens,
                                                              int* pair_of,
                                                              Group* groups,
                                                              int* group_count) {
  __shared__ int count[kMaxExperts];
  __shared__ int begin[kMaxExperts];
  __shared__ int group_begin[kMaxExperts];
  __shared__ int totals[2];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < expert_count; e += kRouteThreads) {
    count[e] = 0;
  }
  __syncthreads();
  for (int i = thread; i < pairs; i += kRouteThreads) {
    const int e = experts[i];
    if (e >= 0 && e < expert_count) {
      atomicAdd(&count[e], 1);
    }
  }
  __syncthreads();
  // One warp scans the counts, 32 experts at a time.
  if (thread < kWarp) {
    int pair_sum = 0, group_sum = 0;
    for (int e0 = 0; e0 < expert_count; e0 += kWarp) {
      const int e = e0 + thread;
      const int n = e < expert_count ? count[e] : 0;
      const int g = (n + group_tokens - 1) / group_tokens;
      int n_scan = n, g_scan = g;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int n_up = __shfl_up_sync(kAllLanes, n_scan, step);
        const int g_up = __shfl_up_sync(kAllLanes, g_scan, step);
        n_scan += thread >= step ? n_up : 0;
        g_scan += thread >= step ? g_up : 0;
      }
      if (e < expert_count) {
        begin[e] = pair_sum + n_scan - n;
        group_begin[e] = group_sum + g_scan - g;
      }
      pair_sum += __shfl_sync(kAllLanes, n_scan, kWarp - 1);
      group_sum += __shfl_sync(kAllLanes, g_scan, kWarp - 1);
    }
    if (thread == 0) {
      totals[0] = pair_sum;
      totals[1] = group_sum;
    }
  }
  __syncthreads();
  if (thread == 0) {
    *group_count = totals[1];
  }
  for (int e = thread; e < expert_count; e += kRouteThreads) {
    for (int g = 0; g * group_tokens < count[e]; ++g) {
      groups[group_begin[e] + g] = {
          e, begin[e] + g * group_tokens, min(group_tokens, count[e] - g * group_tokens)};
    }
  }
  __syncthreads();
  for (int i = thread; i < pairs; i += kRouteThreads) {
    const int e = experts[i];
    if (e >= 0 && e < expert_count) {
      pair_of[atomicAdd(&begin[e], 1)] = i;
    }
  }
}

// What one block multiplies: rows [row, row + 32) of one expert by the tokens of one group.
struct Tile {
  bool shared;
  Group group;  // shared: tokens begin .. begin + count
  int64_t row;
};

// Tiles of the shared expert, which take longest, come first.
template <int kTiles>
__device__ __forceinline__ bool find_tile(const Problem& p,
                                          int64_t index,
                                          int64_t row_blocks,
                                          Tile& tile) {
  constexpr int kGroup = kTiles * kTokenTile;
  const int64_t shared_groups = p.has_shared ? (p.tokens + kGroup - 1) / kGroup : 0;
  const int64_t group = index / row_blocks;
  tile.row = index % row_blocks * kBlockRows;
  tile.shared = group < shared_groups;
  if (tile.shared) {
    tile.group = {0,
                  static_cast<int>(group * kGroup),
                  static_cast<int>(min(p.tokens - group * kGroup, static_cast<int64_t>(kGroup)))};
    return true;
  }
  const int64_t g = group - shared_groups;
  if (g >= *p.routing.count) {
    return false;
  }
  tile.group = p.routing.groups[g];
  return true;
}

// Row of token n of a tile in the [T k] (routed) or [T] (shared) arrays; -1 past the last token.
__device__ __forceinline__ int64_t pair_row(const Problem& p, const Tile& tile, int n) {
  if (n >= tile.group.count) {
    return -1;
  }
  return tile.shared ? tile.group.begin + n : p.routing.pair_of[tile.group.begin + n];
}

template <int kMats, int kTiles>
using Partial = float[kWarps][kMats][kTiles][kTokenTile][kTokenPad];

// Rings of `hidden` (two matrices) and `out` (one): about 80 and 70 KiB per block.
using HiddenFp4 = WeightRing<Fp4Weights, 2, 4>;
using HiddenFp8 = WeightRing<Fp8Weights, 2, 2>;
using OutFp4 = WeightRing<Fp4Weights, 1, 6>;
using OutFp8 = WeightRing<Fp8Weights, 1, 4>;
constexpr int kHiddenShared = kWarps * std::max(HiddenFp4::kBytes, HiddenFp8::kBytes);
constexpr int kOutShared = kWarps * std::max(OutFp4::kBytes, OutFp8::kBytes);

// Partial sums of kMats matrices: warp w does rows 16 (w / 4) .. and segment w % 4.
template <class W, int kMats, int kStages, int kTiles>
__device__ __forceinline__ void multiply_tile(WeightRing<W, kMats, kStages> ring,
                                              const uint8_t* const (&values)[kMats],
                                              const uint8_t* const (&scales)[kMats],
                                              const uint16_t* const (&inputs)[kTiles],
                                              int64_t row,
                                              int64_t out,
                                              int64_t in,
                                              Partial<kMats, kTiles>& part) {
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32, s = warp % kMaxSegments;
  const int chunks = static_cast<int>(in / kChunk);
  if (s >= segment_count(chunks)) {
    return;
  }
  ring.base = dynamic_shared() + warp * ring.kBytes;
  TileRows rows[kMats];
#pragma unroll
  for (int m = 0; m < kMats; ++m) {
    rows[m] =
        W::tile_rows(values[m], scales[m], row + warp / kMaxSegments * kTileRows, out, in, lane);
  }
  const SegmentRange range(chunks, s, s + 1);
  start_ring(ring, rows, range);
  ChunkSum<kMats, kTiles, false> sum;
  sum_range(sum, ring, rows, inputs, range, lane);
#pragma unroll
  for (int m = 0; m < kMats; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        part[warp][m][n][2 * lane.t + i % 2][lane.g + 8 * (i / 2)] = sum.value(m, n, i);
      }
    }
  }
}

// The finished sum of row r (0..31) and token n of matrix m.
template <int kMats, int kTiles>
__device__ __forceinline__ float tile_sum(
    const Partial<kMats, kTiles>& part, int m, int n, int r, int64_t in) {
  const int first = r / kTileRows * kMaxSegments;
  const int segments = segment_count(static_cast<int>(in / kChunk));
  float sum = part[first][m][n / kTokenTile][n % kTokenTile][r % kTileRows];
  for (int s = 1; s < segments; ++s) {
    sum += part[first + s][m][n / kTokenTile][n % kTokenTile][r % kTileRows];
  }
  return sum * kLateScale;
}

// Input rows of this lane's tokens; `pair_shift` turns a pair into its token (k) or keeps it (1).
template <int kTiles>
__device__ __forceinline__ void tile_inputs(const Problem& p,
                                            const Tile& tile,
                                            const Bf16* base,
                                            int64_t width,
                                            int divisor,
                                            const uint16_t* (&inputs)[kTiles]) {
  const Lane lane;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int64_t row = pair_row(p, tile, n * kTokenTile + lane.g);
    inputs[n] = row < 0
                    ? nullptr
                    : reinterpret_cast<const uint16_t*>(base + row / divisor * width) + 8 * lane.t;
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 4 ? 1 : 2)
    hidden_kernel(const __grid_constant__ Problem p, int64_t tiles) {
  __shared__ Partial<2, kTiles> part;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row_blocks = p.f / kBlockRows;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    Tile tile;
    if (!find_tile<kTiles>(p, index, row_blocks, tile)) {
      break;
    }
    const uint16_t* inputs[kTiles];
    const ExpertPointers expert = tile.shared ? p.shared : p.table[tile.group.expert];
    const uint8_t* const values[2] = {expert.w1, expert.w3};
    const uint8_t* const scales[2] = {expert.w1_scales, expert.w3_scales};
    if (tile.shared) {
      tile_inputs<kTiles>(p, tile, p.x_fp8, p.d, 1, inputs);
      multiply_tile(HiddenFp8{}, values, scales, inputs, tile.row, p.f, p.d, part);
    } else {
      tile_inputs<kTiles>(p, tile, p.x_fp4, p.d, p.k, inputs);
      multiply_tile(HiddenFp4{}, values, scales, inputs, tile.row, p.f, p.d, part);
    }
    __syncthreads();
    // Warp per token, lane per row: the 32 rows are one quantization block.
    const int r = static_cast<int>(threadIdx.x) % 32;
    for (int n = static_cast<int>(threadIdx.x) / 32; n < tile.group.count; n += kWarps) {
      const int64_t pair = pair_row(p, tile, n);
      const float g = fminf(rounded<Bf16>(tile_sum<2, kTiles>(part, 0, n, r, p.d)), p.limit);
      const float u = clamp_abs(rounded<Bf16>(tile_sum<2, kTiles>(part, 1, n, r, p.d)), p.limit);
      const float weight = tile.shared ? 1.0f : p.weights[pair];
      float h = rounded<Bf16>(g / (1.0f + expf(-g)) * u * weight), unused = 0;
      fp8_round_pair(h, unused, fp8_scale(__reduce_max_sync(kAllLanes, magnitude_bits(h))));
      const InputLayout layout = tile.shared ? InputLayout::kFp8 : InputLayout::kFp4;
      const int column = static_cast<int>(tile.row % kChunk) + r;
      const int64_t place = tile.row / kChunk * kChunk + layout_piece(layout, column / 8) * 8 +
                            layout_slot(layout, column % 8);
      Bf16* to = tile.shared ? p.hidden_shared : p.hidden_routed;
      to[pair * p.f + place] = from_float<Bf16>(h);
    }
    __syncthreads();
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 4 ? 1 : 2)
    out_kernel(const __grid_constant__ Problem p, int64_t tiles) {
  __shared__ Partial<1, kTiles> part;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row_blocks = p.d / kBlockRows;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    Tile tile;
    if (!find_tile<kTiles>(p, index, row_blocks, tile)) {
      break;
    }
    const uint16_t* inputs[kTiles];
    const ExpertPointers expert = tile.shared ? p.shared : p.table[tile.group.expert];
    const uint8_t* const values[1] = {expert.w2};
    const uint8_t* const scales[1] = {expert.w2_scales};
    if (tile.shared) {
      tile_inputs<kTiles>(p, tile, p.hidden_shared, p.f, 1, inputs);
      multiply_tile(OutFp8{}, values, scales, inputs, tile.row, p.d, p.f, part);
    } else {
      tile_inputs<kTiles>(p, tile, p.hidden_routed, p.f, 1, inputs);
      multiply_tile(OutFp4{}, values, scales, inputs, tile.row, p.d, p.f, part);
    }
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x) % 32;
    for (int n = static_cast<int>(threadIdx.x) / 32; n < tile.group.count; n += kWarps) {
      Bf16* to = tile.shared ? p.out_shared : p.out_routed;
      to[pair_row(p, tile, n) * p.d + tile.row + r] =
          from_float<Bf16>(tile_sum<1, kTiles>(part, 0, n, r, p.f));
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Problem p, const int32_t* experts) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= p.tokens * p.d) {
    return;
  }
  const int64_t token = i / p.d, column = i % p.d;
  float sum[8] = {}, v[8];
  for (int s = 0; s < p.k; ++s) {
    const int32_t expert = experts[token * p.k + s];
    if (expert < 0 || expert >= p.experts) {
      continue;  // a padding row: nothing was computed for it
    }
    load_elements<8>(p.out_routed + (token * p.k + s) * p.d + column, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum[e] += v[e];
    }
  }
  if (p.has_shared) {
    load_elements<8>(p.out_shared + i, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum[e] += v[e];
    }
  }
  store_elements<8>(p.y + i, sum);
}

template <int kTiles>
Status launch_experts(const OpContext& ctx, const Problem& p, int64_t groups) {
  const int64_t all = groups + (p.has_shared ? ceil_div(p.tokens, kTiles * kTokenTile) : 0);
  const int64_t hidden_tiles = all * (p.f / kBlockRows), out_tiles = all * (p.d / kBlockRows);
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "experts_hidden",
                                  hidden_kernel<kTiles>,
                                  extent(std::min(hidden_tiles, kMaxBlocks)),
                                  kThreads,
                                  kHiddenShared,
                                  p,
                                  hidden_tiles));
  return launch(ctx,
                "experts_out",
                out_kernel<kTiles>,
                extent(std::min(out_tiles, kMaxBlocks)),
                kThreads,
                kOutShared,
                p,
                out_tiles);
}

}  // namespace

bool experts_mma_supports(const ExpertsArgs& args) {
  const auto fits = [](std::span<const ExpertView> experts, WeightFormat format) {
    for (const ExpertView& expert : experts) {
      for (const Weight* w : {&expert.w1, &expert.w3, &expert.w2}) {
        if (w->format != format || !fragments_support(*w)) {
          return false;
        }
      }
    }
    return true;
  };
  return args.x.dtype == DType::kBF16 && args.routed.size() <= kMaxExperts &&
         fits(args.routed, WeightFormat::kFp4Row) && fits(args.shared, WeightFormat::kFp8Block) &&
         (args.shared.empty() || args.shared[0].w1.out == args.routed[0].w1.out) &&
         reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(args.y.data) % 16 == 0;
}

Status experts_mma(OpContext& ctx, const ExpertsArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1), k = args.experts.dim(1);
  const int64_t f = args.routed[0].w1.out, pairs = t * k;
  const auto experts = static_cast<int64_t>(args.routed.size());
  CACHALOT_TRY(const ExpertPointers* table, expert_table(ctx.stream, args.routed));
  // Token tiles by the mean number of tokens of an expert that has any.
  const int64_t per_expert = pairs / experts;
  const int64_t tiles = per_expert <= 4 ? 1 : per_expert <= 12 ? 2 : 4;
  const int64_t groups = std::min(pairs, experts + pairs / (tiles * kTokenTile));

  Scratch scratch(ctx);
  auto* pair_of = scratch.array<int>(pairs);
  auto* group_list = scratch.array<Group>(groups);
  auto* group_count = scratch.array<int>(1);
  auto* x_fp4 = scratch.array<Bf16>(t * d);
  auto* x_fp8 = scratch.array<Bf16>(args.shared.empty() ? 1 : t * d);
  Problem p{.table = table,
            .shared = args.shared.empty() ? ExpertPointers{} : expert_pointers(args.shared[0]),
            .has_shared = !args.shared.empty(),
            .experts = static_cast<int>(experts),
            .tokens = t,
            .d = d,
            .f = f,
            .k = static_cast<int>(k),
            .limit = args.limit,
            .weights = args.weights.as<float>(),
            .routing = {pair_of, group_list, group_count},
            .x_fp4 = x_fp4,
            .x_fp8 = x_fp8,
            .hidden_routed = scratch.array<Bf16>(pairs * f),
            .hidden_shared = scratch.array<Bf16>(t * f),
            .out_routed = scratch.array<Bf16>(pairs * d),
            .out_shared = scratch.array<Bf16>(t * d),
            .y = static_cast<Bf16*>(args.y.data)};
  CACHALOT_RETURN_IF_ERROR(scratch.status("experts"));

  const auto* x = static_cast<const Bf16*>(args.x.data);
  CACHALOT_RETURN_IF_ERROR(prepare_input(ctx, x, t, d, InputLayout::kFp4, true, x_fp4));
  if (p.has_shared) {
    CACHALOT_RETURN_IF_ERROR(prepare_input(ctx, x, t, d, InputLayout::kFp8, true, x_fp8));
  }
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "experts_route",
                                  route_kernel,
                                  1,
                                  kRouteThreads,
                                  0,
                                  args.experts.as<int32_t>(),
                                  static_cast<int>(pairs),
                                  static_cast<int>(experts),
                                  static_cast<int>(tiles * kTokenTile),
                                  pair_of,
                                  group_list,
                                  group_count));
  const Status status = tiles == 1   ? launch_experts<1>(ctx, p, groups)
                        : tiles == 2 ? launch_experts<2>(ctx, p, groups)
                                     : launch_experts<4>(ctx, p, groups);
  CACHALOT_RETURN_IF_ERROR(status);
  return launch(ctx,
                "experts_combine",
                combine_kernel,
                extent(ceil_div(t * d, kThreads * 8)),
                kThreads,
                0,
                p,
                args.experts.as<int32_t>());
}

}  // namespace cachalot::ops::cuda
