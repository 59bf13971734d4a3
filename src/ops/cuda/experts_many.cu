// Experts with many tokens: groups of at most 32 or 64, whose inputs a block of 8 warps copies to
// shared memory chunk by chunk (device/gemm.cuh). Same formulas, tiles and order of sums as
// experts_few.cu.
//
// hidden_kernel  block = 64 hidden columns of one group; a warp's tile is 8 rows of w1 above the 8
// rows of
//                w3 of the same columns
// out_kernel     block = 128 rows of w2 of one group
//
//   warp   fill weights c + 2 . mma chunk c             block  copy inputs c + 2 | barrier | ...
//
// Shared: three chunks of inputs (36 KiB each for 64 tokens) and 8 weight rings of 7.5 to 13 KiB.
// Bound by mma and shared-memory reads: 2 * 3 D F FLOP per token and expert; by weight bytes as
// long as the groups are small.
#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/experts.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kColumns = 8;
constexpr int kHiddenBlock = kGemmWarps * kColumns;  // 64
constexpr int kOutBlock = kGemmWarps * kTileRows;    // 128
constexpr int kHiddenStride = kHiddenBlock + 1;      // floats
constexpr int kOutStride = kOutBlock + 4;            // floats

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
                                         const uint16_t** token_row,
                                         float (&total)[1][kTiles][4]) {
  using Block = Gemm<W, kTiles>;
  const Block block{dynamic_shared(), token_row};
  const TileRows rows[1] = {place};
  typename Block::Ring ring(block.ring_memory(), rows, chunks * (kChunk / W::kStep));
  wait_for_previous_kernels();
  allow_next_kernel();
  if (threadIdx.x < Block::kTokens) {
    token_row[threadIdx.x] = expert_input(p, tile, static_cast<int>(threadIdx.x), hidden);
  }
  __syncthreads();
  block.run(ring, chunks, true, lane, total);
  __syncthreads();
}

template <int kTiles>
__global__ void __launch_bounds__(kGemmThreads, 1)
    hidden_kernel(const __grid_constant__ ExpertProblem p) {
  __shared__ const uint16_t* token_row[kTiles * kTokenTile];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const ExpertTile tile = expert_tile(p, p.f / kHiddenBlock, kHiddenBlock);
  if (!tile.valid) {
    return;
  }
  const int chunks = static_cast<int>(p.d / kChunk);
  const int64_t row = tile.row + warp * kColumns;
  float total[1][kTiles][4] = {};
  if (tile.shared) {
    multiply<Fp8Pair, kTiles>(p,
                              tile,
                              gate_up_rows<Fp8Pair>(tile.expert, row, p.d, lane),
                              false,
                              chunks,
                              lane,
                              token_row,
                              total);
  } else {
    multiply<Fp4Weights, kTiles>(p,
                                 tile,
                                 gate_up_rows<Fp4Weights>(tile.expert, row, p.d, lane),
                                 false,
                                 chunks,
                                 lane,
                                 token_row,
                                 total);
  }
  auto* hidden = reinterpret_cast<float*>(dynamic_shared());  // [token][kHiddenStride]
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = m * kTokenTile + 2 * lane.t + i;
      if (n < tile.group.count) {
        hidden[n * kHiddenStride + warp * kColumns + lane.g] =
            hidden_value(p, tile, pair_row(p, tile, n), total[0][m][i], total[0][m][2 + i]);
      }
    }
  }
  __syncthreads();
  for (int i = warp; i < tile.group.count * (kHiddenBlock / 32); i += kGemmWarps) {
    const int n = i / (kHiddenBlock / 32), half = i % (kHiddenBlock / 32) * 32;
    store_hidden(p,
                 tile,
                 pair_row(p, tile, n),
                 tile.row + half,
                 hidden[n * kHiddenStride + half + static_cast<int>(threadIdx.x) % 32]);
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kGemmThreads, 1)
    out_kernel(const __grid_constant__ ExpertProblem p) {
  __shared__ const uint16_t* token_row[kTiles * kTokenTile];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const ExpertTile tile = expert_tile(p, p.d / kOutBlock, kOutBlock);
  if (!tile.valid) {
    return;
  }
  const int chunks = static_cast<int>(p.f / kChunk);
  const int64_t row = tile.row + warp * kTileRows;
  float total[1][kTiles][4] = {};
  if (tile.shared) {
    multiply<Fp8Rows, kTiles>(
        p,
        tile,
        tile_rows<Fp8Rows>(tile.expert.w2, tile.expert.w2_scales, row, p.d, p.f, lane),
        true,
        chunks,
        lane,
        token_row,
        total);
  } else {
    multiply<Fp4Weights, kTiles>(
        p,
        tile,
        tile_rows<Fp4Weights>(tile.expert.w2, tile.expert.w2_scales, row, p.d, p.f, lane),
        true,
        chunks,
        lane,
        token_row,
        total);
  }
  auto* sums = reinterpret_cast<float*>(dynamic_shared());  // [token][kOutStride]
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[(m * kTokenTile + 2 * lane.t + i % 2) * kOutStride + warp * kTileRows + lane.g +
           8 * (i / 2)] = total[0][m][i];
    }
  }
  __syncthreads();
  Bf16* out = tile.shared ? p.out_shared : p.out_routed;
  for (int i = static_cast<int>(threadIdx.x); i < tile.group.count * kOutBlock; i += kGemmThreads) {
    const int n = i / kOutBlock, r = i % kOutBlock;
    out[pair_row(p, tile, n) * p.d + tile.row + r] =
        from_float<Bf16>(sums[n * kOutStride + r] * kLateScale);
  }
}

template <int kTiles>
Status run(const OpContext& ctx, const ExpertProblem& p, int64_t groups) {
  constexpr int kHidden =
      std::max(Gemm<Fp8Pair, kTiles>::kShared, Gemm<Fp4Weights, kTiles>::kShared);
  constexpr int kOut = std::max(Gemm<Fp8Rows, kTiles>::kShared, Gemm<Fp4Weights, kTiles>::kShared);
  static_assert(kHidden <= kSharedCapacity - 1024 && kOut <= kSharedCapacity - 1024);
  static_assert(kTiles * kTokenTile * kOutStride * 4 <= kOut);
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "experts_hidden",
                                  hidden_kernel<kTiles>,
                                  extent(groups * (p.f / kHiddenBlock)),
                                  kGemmThreads,
                                  kHidden,
                                  p));
  return launch(ctx,
                "experts_out",
                out_kernel<kTiles>,
                extent(groups * (p.d / kOutBlock)),
                kGemmThreads,
                kOut,
                p);
}

}  // namespace

Status experts_many(const OpContext& ctx, const ExpertProblem& p, int64_t groups) {
  return p.group_tokens <= 32 ? run<4>(ctx, p, groups) : run<8>(ctx, p, groups);
}

}  // namespace cachalot::ops::cuda
