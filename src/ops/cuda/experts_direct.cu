// Experts of one or two tokens: every (token, slot) pair is multiplied by itself, and nothing but
// the two products is launched.
//
//   hidden = round(silu(min(w1 x, limit)) clamp(w3 x, +-limit) weight), quantized to FP8 blocks
//   y = round(sum over slots, ascending, of round(w2 hidden) + round(shared))
//
// in   x [T, D] bf16, FP4 (routed) or FP8 (shared) w1, w3 [F, D], w2 [D, F]
//
// out  hidden_routed [T k, F], hidden_shared [T, F], y [T, D] bf16
//
// hidden_kernel: a block has 32 hidden columns of a pair, or of the shared expert for all tokens,
// in 4 warps with 8 columns each, as in experts_few.cu. It quantizes its own input.
//
// out_kernel: a block has 16 rows of w2 of all experts of a token: a warp per routed expert, two
// for the shared one, which share the columns of K. It adds the experts.
//
//   warp   fill stages of weights | wait for the inputs | fill . mma | fill . mma | ...
//
// The shared expert's weights, and all of the second product's, fill the rings while the kernel in
// front drains; which experts are routed may be what that kernel writes.
//
// Shared: a ring per warp, 11 (hidden) or 7 KiB (out), and 10 KiB of input per token (hidden).
// Bound by instructions (23 per 8 FP4 weights, 16 of them to unpack) and, not far behind, by weight
// bytes: 18.8 MB per pair and 35.4 MB for the shared expert. Blocks of 8 warps for hidden_kernel
// took 12 us more: two on most multiprocessors, but three on some.
#include "ops/cuda/device/few_tokens.cuh"
#include "ops/cuda/device/pieces.cuh"
#include "ops/cuda/experts.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kHiddenWarps = 4;
constexpr int kHiddenThreads = kHiddenWarps * 32;
constexpr int kHiddenBlocks = 4;  // of a multiprocessor
constexpr int kHiddenStages = 5;
constexpr int kColumns = 8;                            // hidden columns of a warp
constexpr int kHiddenBlock = kHiddenWarps * kColumns;  // 32
static_assert(kHiddenBlock == 32, "one quantization block");
constexpr int kPiecesAhead = 5;  // of the input, per thread

constexpr int kOutWarps = 8;  // at most
constexpr int kOutBlocks = 3;
constexpr int kOutStages = 3;

using Fp8Pair = Fp8Weights<false, 2>;
using Fp8Rows = Fp8Weights<true>;
constexpr int kHiddenRing =
    std::max(TileRing<Fp4Weights, kHiddenStages>::kBytes, TileRing<Fp8Pair, kHiddenStages>::kBytes);
constexpr int kOutRing =
    std::max(TileRing<Fp4Weights, kOutStages>::kBytes, TileRing<Fp8Rows, kOutStages>::kBytes);

// The chunks of the first and of the second warp that share a tile.
struct Halves {
  int first;
  int count;

  __device__ __forceinline__ Halves(int chunks, bool second)
      : first(second ? (chunks + 1) / 2 : 0), count(second ? chunks / 2 : (chunks + 1) / 2) {}
};

// x of `columns` columns (of one row or more), quantized, to shared memory. All threads of a block.
template <InputLayout kLayout>
__device__ __forceinline__ void quantize_input(Bf16* to, const Bf16* x, int64_t columns) {
  const int pieces = static_cast<int>(columns / 8), thread = static_cast<int>(threadIdx.x);
  for (int i0 = thread; i0 < pieces; i0 += kPiecesAhead * kHiddenThreads) {
    float v[kPiecesAhead][8];
#pragma unroll
    for (int j = 0; j < kPiecesAhead; ++j) {
      if (i0 + j * kHiddenThreads < pieces) {
        load_elements<8>(x + (i0 + j * kHiddenThreads) * 8, v[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kPiecesAhead; ++j) {
      if (i0 + j * kHiddenThreads < pieces) {
        uint32_t pairs[4];
        quantize_and_order_piece<kLayout>(v[j], pairs);
        store_pairs<kLayout>(to, i0 + j * kHiddenThreads, pairs);
      }
    }
  }
  __syncthreads();
}

template <class W, int kStages>
__device__ __forceinline__ void multiply(TileRing<W, kStages>& ring,
                                         const Bf16* x,
                                         bool has_token,
                                         int chunks,
                                         const Lane& lane,
                                         const auto& end) {
  const uint16_t* const row[1] = {has_token ? reinterpret_cast<const uint16_t*>(x) + 8 * lane.t
                                            : nullptr};
  run_chunks(ring, row, chunks, lane, end);
}

__global__ void __launch_bounds__(kHiddenThreads, kHiddenBlocks)
    hidden_kernel(const __grid_constant__ ExpertProblem p) {
  __shared__ float hidden[kDirectTokens][kHiddenBlock];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32, column = warp * kColumns;
  const int chunks = static_cast<int>(p.d / kChunk), tokens = static_cast<int>(p.tokens);
  const int row_blocks = static_cast<int>(p.f / kHiddenBlock);
  const int shared_blocks = p.has_shared ? row_blocks : 0;
  const int block = static_cast<int>(blockIdx.x);
  uint8_t* memory = dynamic_shared() + warp * kHiddenRing;
  auto* x = reinterpret_cast<Bf16*>(dynamic_shared() + kHiddenWarps * kHiddenRing);
  float total[1][4] = {};
  const auto add = [&](int, const float (&part)[1][4]) { add_part(total, part); };
  ExpertTile tile{.valid = true, .shared = block < shared_blocks};
  tile.row = static_cast<int64_t>(block % row_blocks) * kHiddenBlock;
  if (tile.shared) {
    tile.group = {0, 0, tokens};
    const TileRows rows = gate_up_rows<Fp8Pair>(p.shared, tile.row + column, p.d, lane);
    TileRing<Fp8Pair, kHiddenStages> ring(memory, rows, chunks * (kChunk / Fp8Pair::kStep));
    wait_for_previous_kernels();
    allow_next_kernel();
    quantize_input<InputLayout::kFp8>(x, p.x, p.tokens * p.d);
    multiply(ring, x + lane.g * p.d, lane.g < tokens, chunks, lane, add);
  } else {
    wait_for_previous_kernels();
    allow_next_kernel();
    const int pair = (block - shared_blocks) / row_blocks, expert = p.ids[pair];
    if (expert < 0 || expert >= p.experts) {
      return;
    }
    tile.group = {expert, pair, 1};
    const TileRows rows = gate_up_rows<Fp4Weights>(p.table[expert], tile.row + column, p.d, lane);
    TileRing<Fp4Weights, kHiddenStages> ring(memory, rows, chunks);
    quantize_input<InputLayout::kFp4>(x, p.x + pair / p.k * p.d, p.d);
    multiply(ring, x, lane.g == 0, chunks, lane, add);
  }
  if (lane.t == 0) {
#pragma unroll
    for (int n = 0; n < kDirectTokens; ++n) {
      if (n < tile.group.count) {
        hidden[n][column + lane.g] =
            hidden_value(p, tile, pair_row(p, tile, n), total[0][n], total[0][2 + n]);
      }
    }
  }
  __syncthreads();
  if (warp < tile.group.count) {
    store_hidden(p, tile, warp, tile.row, hidden[warp][threadIdx.x % 32]);
  }
}

__global__ void __launch_bounds__(kOutWarps * 32, kOutBlocks)
    out_kernel(const __grid_constant__ ExpertProblem p) {
  __shared__ float routed[kOutWarps][kTileRows];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int chunks = static_cast<int>(p.f / kChunk);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows, token = blockIdx.y;
  uint8_t* memory = dynamic_shared() + warp * kOutRing;
  auto* sums = reinterpret_cast<float*>(dynamic_shared() + blockDim.x / 32 * kOutRing);  // [chunks]
  // The routing is older than the kernel in front, which has waited for it.
  const auto valid = [&](int slot) {
    const int32_t expert = p.ids[token * p.k + slot];
    return expert >= 0 && expert < p.experts;
  };
  if (warp >= p.k) {
    const Halves half(chunks, warp > p.k);
    TileRows rows = tile_rows<Fp8Rows>(p.shared.w2, p.shared.w2_scales, row, p.d, p.f, lane);
    seek<Fp8Rows>(rows, half.first * kChunk);
    TileRing<Fp8Rows, kOutStages> ring(memory, rows, half.count * (kChunk / Fp8Rows::kStep));
    wait_for_previous_kernels();
    allow_next_kernel();
    multiply(ring,
             p.hidden_shared + token * p.f + half.first * kChunk,
             lane.g == 0,
             half.count,
             lane,
             [&](int c, const float (&part)[1][4]) {
               if (lane.t == 0) {
                 float* to = sums + (half.first + c) * kTileRows + lane.g;
                 to[0] = part[0][0];
                 to[kTokenTile] = part[0][2];
               }
             });
  } else if (valid(warp)) {
    const int64_t pair = token * p.k + warp;
    const ExpertPointers expert = p.table[p.ids[pair]];
    const TileRows rows = tile_rows<Fp4Weights>(expert.w2, expert.w2_scales, row, p.d, p.f, lane);
    TileRing<Fp4Weights, kOutStages> ring(memory, rows, chunks);
    wait_for_previous_kernels();
    allow_next_kernel();
    float total[1][4] = {};
    multiply(ring,
             p.hidden_routed + pair * p.f,
             lane.g == 0,
             chunks,
             lane,
             [&](int, const float (&part)[1][4]) { add_part(total, part); });
    if (lane.t == 0) {
      routed[warp][lane.g] = rounded<Bf16>(total[0][0] * kLateScale);
      routed[warp][lane.g + kTokenTile] = rounded<Bf16>(total[0][2] * kLateScale);
    }
  } else {
    wait_for_previous_kernels();
  }
  __syncthreads();
  if (const int r = static_cast<int>(threadIdx.x); r < kTileRows) {
    float y = 0;
    for (int slot = 0; slot < p.k; ++slot) {
      y += valid(slot) ? routed[slot][r] : 0.0f;
    }
    if (p.has_shared) {
      float sum = 0;
      for (int c = 0; c < chunks; ++c) {
        sum += sums[c * kTileRows + r];
      }
      y += rounded<Bf16>(sum * kLateScale);
    }
    p.y[token * p.d + row + r] = from_float<Bf16>(y);
  }
}

int64_t hidden_bytes(const ExpertProblem& p) {
  return kHiddenWarps * kHiddenRing + p.tokens * p.d * static_cast<int64_t>(sizeof(Bf16));
}

int out_warps(const ExpertProblem& p) {
  return p.k + (p.has_shared ? 2 : 0);
}

}  // namespace

bool experts_direct_supports(const ExpertProblem& p) {
  return p.tokens <= kDirectTokens && out_warps(p) <= kOutWarps &&
         hidden_bytes(p) <= kSharedCapacity;
}

Status experts_direct(const OpContext& ctx, const ExpertProblem& p) {
  const int64_t groups = p.tokens * p.k + (p.has_shared ? 1 : 0);
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "experts_hidden",
                                  hidden_kernel,
                                  extent(groups * (p.f / kHiddenBlock)),
                                  kHiddenThreads,
                                  hidden_bytes(p),
                                  p));
  return launch(
      ctx,
      "experts_out",
      out_kernel,
      dim3(extent(p.d / kTileRows), extent(p.tokens)),
      out_warps(p) * 32,
      out_warps(p) * kOutRing + p.f / kChunk * kTileRows * static_cast<int64_t>(sizeof(float)),
      p);
}

}  // namespace cachalot::ops::cuda
