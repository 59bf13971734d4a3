// Experts with many tokens: groups of at most 32 or 128, whose inputs a block of 8 warps copies to
// shared memory chunk by chunk and multiplies with wgmma (device/gemm.cuh), as many columns as the
// group needs. Same formulas, tiles and order of sums as experts_few.cu.
//
// hidden_kernel  block = 64 hidden columns of one group; a warp's tile is 8 rows of w1 above the 8
//                rows of w3 of the same columns
// out_kernel     block = 128 rows of w2 of one group
//
// Shared: two or three chunks of inputs (512 bytes per token) and 8 weight rings.
// Bound by weight bytes as long as the groups are small, then by mma: 2 * 3 D F FLOP per token and
// expert.
#include <algorithm>

#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/experts.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kColumns = 8;
constexpr int kHiddenBlock = kGemmWarps * kColumns;  // 64
constexpr int kOutBlock = kGemmWarps * kTileRows;    // 128
constexpr int kHiddenStride = kHiddenBlock + 1;      // floats
constexpr int kOutStride = kOutBlock + 4;            // floats

constexpr int kGemmThreads = kGemmWarps * 32;

using Fp8Pair = Fp8Weights<false, 2>;
using Fp8Rows = Fp8Weights<false>;

// total = this warp's tile times the group's tokens.
template <class W, int kTiles>
__device__ __forceinline__ void multiply(const ExpertProblem& p,
                                         const ExpertTile& tile,
                                         const TileRows& place,
                                         bool hidden,
                                         int chunks,
                                         const Lane& lane,
                                         float (&total)[kTiles][4]) {
  using Block = Gemm<W, kTiles>;
  __shared__ typename Block::Barriers barriers;
  typename Block::Ring ring(Block::ring_memory(), place, chunks * (kChunk / W::kStep));
  wait_for_previous_kernels();
  allow_next_kernel();
  const Bf16* input = hidden        ? (tile.shared ? p.hidden_shared : p.hidden_routed)
                      : tile.shared ? p.x_fp8
                                    : p.x_fp4;
  input += static_cast<int64_t>(tile.group.begin) * chunks * kChunk;
  const Block block{dynamic_shared(),
                    &barriers,
                    reinterpret_cast<const uint8_t*>(input),
                    static_cast<int>(image_rows(tile.group.count))};
  block.run(ring, chunks, lane, total);
  __syncthreads();
}

// Calls body.operator()<token tiles>() for a group of `count` tokens, at most kMostTiles tiles.
template <int kMostTiles, class Body>
__device__ __forceinline__ void with_tiles(int count, const Body& body) {
  if constexpr (kMostTiles == 4) {
    body.template operator()<4>();
  } else if (count <= 4 * kTokenTile) {
    body.template operator()<4>();
  } else if (count <= 8 * kTokenTile) {
    body.template operator()<8>();
  } else if (count <= 10 * kTokenTile) {
    body.template operator()<10>();
  } else if (count <= 12 * kTokenTile) {
    body.template operator()<12>();
  } else {
    body.template operator()<16>();
  }
}

template <class W, int kTiles>
__device__ __forceinline__ void hidden_tile(const ExpertProblem& p,
                                            const ExpertTile& tile,
                                            const Lane& lane) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float total[kTiles][4] = {};
  multiply<W, kTiles>(p,
                      tile,
                      gate_up_rows<W>(tile.expert, tile.row + warp * kColumns, p.d, lane),
                      false,
                      static_cast<int>(p.d / kChunk),
                      lane,
                      total);
  auto* hidden = reinterpret_cast<float*>(dynamic_shared());  // [token][kHiddenStride]
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = m * kTokenTile + 2 * lane.t + i;
      if (n < tile.group.count) {
        hidden[n * kHiddenStride + warp * kColumns + lane.g] =
            hidden_value(p, tile, pair_row(p, tile, n), total[m][i], total[m][2 + i]);
      }
    }
  }
}

template <int kMostTiles>
__global__ void __launch_bounds__(kGemmThreads, 1)
    hidden_kernel(const __grid_constant__ ExpertProblem p) {
  const Lane lane;
  const ExpertTile tile = expert_tile(p, p.f / kHiddenBlock, kHiddenBlock);
  if (!tile.valid) {
    return;
  }
  with_tiles<kMostTiles>(tile.group.count, [&]<int kTiles>() {
    if (tile.shared) {
      hidden_tile<Fp8Pair, kTiles>(p, tile, lane);
    } else {
      hidden_tile<Fp4Weights, kTiles>(p, tile, lane);
    }
  });
  __syncthreads();
  const auto* hidden = reinterpret_cast<const float*>(dynamic_shared());
  for (int i = static_cast<int>(threadIdx.x) / 32; i < tile.group.count * (kHiddenBlock / 32);
       i += kGemmWarps) {
    const int n = i / (kHiddenBlock / 32), half = i % (kHiddenBlock / 32) * 32;
    store_hidden(p,
                 tile,
                 n,
                 tile.row + half,
                 hidden[n * kHiddenStride + half + static_cast<int>(threadIdx.x) % 32]);
  }
}

template <class W, int kTiles>
__device__ __forceinline__ void out_tile(const ExpertProblem& p,
                                         const ExpertTile& tile,
                                         const Lane& lane) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float total[kTiles][4] = {};
  multiply<W, kTiles>(
      p,
      tile,
      tile_rows<W>(
          tile.expert.w2, tile.expert.w2_scales, tile.row + warp * kTileRows, p.d, p.f, lane),
      true,
      static_cast<int>(p.f / kChunk),
      lane,
      total);
  auto* sums = reinterpret_cast<float*>(dynamic_shared());  // [token][kOutStride]
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[(m * kTokenTile + 2 * lane.t + i % 2) * kOutStride + warp * kTileRows + lane.g +
           8 * (i / 2)] = total[m][i];
    }
  }
}

template <int kMostTiles>
__global__ void __launch_bounds__(kGemmThreads, 1)
    out_kernel(const __grid_constant__ ExpertProblem p) {
  const Lane lane;
  const ExpertTile tile = expert_tile(p, p.d / kOutBlock, kOutBlock);
  if (!tile.valid) {
    return;
  }
  with_tiles<kMostTiles>(tile.group.count, [&]<int kTiles>() {
    if (tile.shared) {
      out_tile<Fp8Rows, kTiles>(p, tile, lane);
    } else {
      out_tile<Fp4Weights, kTiles>(p, tile, lane);
    }
  });
  __syncthreads();
  const auto* sums = reinterpret_cast<const float*>(dynamic_shared());
  Bf16* out = tile.shared ? p.out_shared : p.out_routed;
  for (int i = static_cast<int>(threadIdx.x); i < tile.group.count * kOutBlock; i += kGemmThreads) {
    const int n = i / kOutBlock, r = i % kOutBlock;
    out[pair_row(p, tile, n) * p.d + tile.row + r] =
        from_float<Bf16>(sums[n * kOutStride + r] * kLateScale);
  }
}

// Shared memory of the largest product of W among those that with_tiles() may choose.
template <class W, int kMostTiles>
constexpr int kMostShared = kMostTiles == 4 ? Gemm<W, 4>::kShared
                                            : std::max({Gemm<W, 4>::kShared,
                                                        Gemm<W, 8>::kShared,
                                                        Gemm<W, 12>::kShared,
                                                        Gemm<W, 16>::kShared});

template <int kMostTiles>
Status run(const OpContext& ctx, const ExpertProblem& p, int64_t groups) {
  constexpr int kHidden =
      std::max(kMostShared<Fp8Pair, kMostTiles>, kMostShared<Fp4Weights, kMostTiles>);
  constexpr int kOut =
      std::max(kMostShared<Fp8Rows, kMostTiles>, kMostShared<Fp4Weights, kMostTiles>);
  static_assert(kHidden <= kSharedCapacity - 1024 && kOut <= kSharedCapacity - 1024);
  static_assert(kMostTiles * kTokenTile * kOutStride * 4 <= kOut);
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "experts_hidden",
                                  hidden_kernel<kMostTiles>,
                                  extent(groups * (p.f / kHiddenBlock)),
                                  kGemmThreads,
                                  kHidden,
                                  p));
  return launch(ctx,
                "experts_out",
                out_kernel<kMostTiles>,
                extent(groups * (p.d / kOutBlock)),
                kGemmThreads,
                kOut,
                p);
}

}  // namespace

Status experts_many(const OpContext& ctx, const ExpertProblem& p, int64_t groups) {
  return p.group_tokens <= 32 ? run<4>(ctx, p, groups) : run<16>(ctx, p, groups);
}

}  // namespace cachalot::ops::cuda
