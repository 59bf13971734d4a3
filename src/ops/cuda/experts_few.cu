// Experts with few tokens: groups of at most 8, one warp per tile of 16 weight rows.
//
//   hidden = round(silu(min(w1 x, limit)) clamp(w3 x, +-limit) weight), quantized to FP8 blocks
//   out = round(w2 hidden)
//
// in   x_fp4, x_fp8 [T, D], FP4 (routed) or FP8 (shared) w1, w3 [F, D], w2 [D, F]
//
// out  hidden_routed [T k, F], hidden_shared [T, F], out_routed [T k, D], out_shared [T, D]
//
// hidden_kernel: a block has 32 hidden columns of one group, 4 warps with 8 columns each. A warp's
// tile is 8 rows of w1 above the 8 rows of w3 of the same columns, so that SwiGLU needs no
// exchange; the 32 columns are one quantization block.
//
// out_kernel: a block has 64 rows of w2 of one group, 4 warps with 16 rows each.
//
//   warp   fill stages of weights | wait for the inputs | fill . mma | fill . mma | ...
//
// The weights of a block are known before the kernel in front has ended (routing is older), so the
// rings fill while it drains. Inputs come from L1/L2, half a chunk ahead of their use.
//
// Shared: 4 rings of 3 stages, 7 (FP4) or 6.5 KiB (FP8) each; six blocks per multiprocessor.
//
// Bound by weight bytes: 18.8 MB per routed expert with a token, 35.4 MB for the shared one. With
// 64 tokens HBM gives 3.7 TB/s and L2 is at 90 to 95 % of what it can do, while 0.7 instructions
// are issued per cycle, 24 for 8 FP4 weights (16 of them unpack).
#include "ops/cuda/device/few_tokens.cuh"
#include "ops/cuda/experts.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = 8;                      // hidden columns of a warp
constexpr int kHiddenBlock = kWarps * kColumns;  // 32
constexpr int kOutBlock = kWarps * kTileRows;    // 64
static_assert(kHiddenBlock == 32, "one quantization block");

using Fp8Pair = Fp8Weights<false, 2>;
using Fp8Rows = Fp8Weights<true>;
constexpr int kStages = 3;
// Bytes of a warp's ring.
constexpr int kHiddenRing =
    std::max(TileRing<Fp4Weights, kStages>::kBytes, TileRing<Fp8Pair, kStages>::kBytes);
constexpr int kOutRing =
    std::max(TileRing<Fp4Weights, kStages>::kBytes, TileRing<Fp8Rows, kStages>::kBytes);

// Blocks of a multiprocessor: as many as registers and rings allow.
constexpr int kBlocks = 6;

// Input row of token n, for the first (x) or the second (hidden) product; null past the last token.
__device__ __forceinline__ const uint16_t* expert_input(const ExpertProblem& p,
                                                        const ExpertTile& tile,
                                                        int n,
                                                        bool hidden) {
  const int64_t row = pair_row(p, tile, n);
  if (row < 0) {
    return nullptr;
  }
  const Bf16* base = hidden        ? (tile.shared ? p.hidden_shared : p.hidden_routed) + row * p.f
                     : tile.shared ? p.x_fp8 + row * p.d
                                   : p.x_fp4 + row / p.k * p.d;
  return reinterpret_cast<const uint16_t*>(base);
}

template <class W>
__device__ __forceinline__ void multiply(TileRing<W, kStages>& ring,
                                         const ExpertProblem& p,
                                         const ExpertTile& tile,
                                         bool hidden,
                                         int chunks,
                                         const Lane& lane,
                                         float (&total)[1][4]) {
  const uint16_t* input = expert_input(p, tile, lane.g, hidden);
  const uint16_t* row[1] = {input == nullptr ? nullptr : input + 8 * lane.t};
  run_chunks(
      ring, row, chunks, lane, [&](int, const float (&part)[1][4]) { add_part(total, part); });
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    hidden_kernel(const __grid_constant__ ExpertProblem p) {
  __shared__ float hidden[kTokenTile][kHiddenBlock + 1];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const ExpertTile tile = expert_tile(p, p.f / kHiddenBlock, kHiddenBlock);
  if (!tile.valid) {
    return;
  }
  const int chunks = static_cast<int>(p.d / kChunk);
  const int64_t row = tile.row + warp * kColumns;
  uint8_t* memory = dynamic_shared() + warp * kHiddenRing;
  float total[1][4] = {};
  if (tile.shared) {
    const TileRows rows = gate_up_rows<Fp8Pair>(tile.expert, row, p.d, lane);
    TileRing<Fp8Pair, kStages> ring(memory, rows, chunks * (kChunk / Fp8Pair::kStep));
    wait_for_previous_kernels();
    allow_next_kernel();
    multiply(ring, p, tile, false, chunks, lane, total);
  } else {
    const TileRows rows = gate_up_rows<Fp4Weights>(tile.expert, row, p.d, lane);
    TileRing<Fp4Weights, kStages> ring(memory, rows, chunks);
    wait_for_previous_kernels();
    allow_next_kernel();
    multiply(ring, p, tile, false, chunks, lane, total);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = 2 * lane.t + i;
    if (n < tile.group.count) {
      hidden[n][warp * kColumns + lane.g] =
          hidden_value(p, tile, pair_row(p, tile, n), total[0][i], total[0][2 + i]);
    }
  }
  __syncthreads();
  for (int n = warp; n < tile.group.count; n += kWarps) {
    store_hidden(p, tile, n, tile.row, hidden[n][threadIdx.x % 32]);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    out_kernel(const __grid_constant__ ExpertProblem p) {
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const ExpertTile tile = expert_tile(p, p.d / kOutBlock, kOutBlock);
  if (!tile.valid) {
    return;
  }
  const int chunks = static_cast<int>(p.f / kChunk);
  const int64_t row = tile.row + warp * kTileRows;
  uint8_t* memory = dynamic_shared() + warp * kOutRing;
  float total[1][4] = {};
  if (tile.shared) {
    const TileRows rows =
        tile_rows<Fp8Rows>(tile.expert.w2, tile.expert.w2_scales, row, p.d, p.f, lane);
    TileRing<Fp8Rows, kStages> ring(memory, rows, chunks * (kChunk / Fp8Rows::kStep));
    wait_for_previous_kernels();
    allow_next_kernel();
    multiply(ring, p, tile, true, chunks, lane, total);
  } else {
    const TileRows rows =
        tile_rows<Fp4Weights>(tile.expert.w2, tile.expert.w2_scales, row, p.d, p.f, lane);
    TileRing<Fp4Weights, kStages> ring(memory, rows, chunks);
    wait_for_previous_kernels();
    allow_next_kernel();
    multiply(ring, p, tile, true, chunks, lane, total);
  }
  Bf16* out = tile.shared ? p.out_shared : p.out_routed;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = 2 * lane.t + i % 2;
    if (n < tile.group.count) {
      out[pair_row(p, tile, n) * p.d + row + lane.g + 8 * (i / 2)] =
          from_float<Bf16>(total[0][i] * kLateScale);
    }
  }
}

}  // namespace

Status experts_few(const OpContext& ctx, const ExpertProblem& p, int64_t groups) {
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "experts_hidden",
                                  hidden_kernel,
                                  extent(groups * (p.f / kHiddenBlock)),
                                  kThreads,
                                  kWarps * kHiddenRing,
                                  p));
  return launch(ctx,
                "experts_out",
                out_kernel,
                extent(groups * (p.d / kOutBlock)),
                kThreads,
                kWarps * kOutRing,
                p);
}

}  // namespace cachalot::ops::cuda
