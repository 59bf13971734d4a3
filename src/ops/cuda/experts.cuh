// What the expert kernels share: the call's arrays, and who computes what.
#pragma once

#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/device/quantize.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/expert_table.cuh"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {

// Tokens pair_of[begin .. begin + count) of one expert; begin is a multiple of 8.
struct ExpertGroup {
  int expert;
  int begin;
  int count;
};

struct ExpertProblem {
  const ExpertPointers* table;
  ExpertPointers shared;
  bool has_shared;
  int experts;
  int64_t tokens;
  int64_t d;
  int64_t f;
  int k;
  float limit;
  const int32_t* ids;    // [T, k]
  const float* weights;  // [T, k]
  // [positions]: token * k + slot, sorted by expert, groups padded to whole token tiles; null:
  // every pair is a group.
  const int* pair_of;
  const ExpertGroup* groups;
  const int* group_count;
  int group_tokens;  // at most, in a group
  // Where groups may have more than kTokenTile tokens ("wide"), x_fp4, x_fp8 and hidden are images
  // (device/gemm.cuh), one after the other; routed ones in the order of pair_of.
  const Bf16* x;        // [T, D]
  const Bf16* x_fp4;    // [T, D] (wide: [positions, D]) quantized, in FP4 order
  const Bf16* x_fp8;    // [T, D] quantized, in FP8 order
  Bf16* hidden_routed;  // [T k, F] (wide: [positions, F]) quantized, in FP4 order
  Bf16* hidden_shared;  // [T, F] quantized, in FP8 order
  Bf16* out_routed;     // [T k, D]
  Bf16* out_shared;     // [T, D]
  Bf16* y;
};

// What one block multiplies: some rows of one expert by the tokens of one group.
struct ExpertTile {
  bool valid;
  bool shared;
  ExpertGroup group;  // shared: tokens begin .. begin + count
  ExpertPointers expert;
  int64_t row;
};

// Groups of the shared expert.
__device__ __forceinline__ int shared_groups(const ExpertProblem& p) {
  return p.has_shared ? (static_cast<int>(p.tokens) + p.group_tokens - 1) / p.group_tokens : 0;
}

// Rows `row` and after of group `index`. Groups of the shared expert, which take longest, come
// first.
__device__ __forceinline__ ExpertTile expert_rows(const ExpertProblem& p, int index, int64_t row) {
  ExpertTile tile;
  tile.row = row;
  tile.shared = index < shared_groups(p);
  tile.valid = true;
  if (tile.shared) {
    const int begin = index * p.group_tokens;
    tile.group = {0, begin, static_cast<int>(min(p.tokens - begin, int64_t{p.group_tokens}))};
    tile.expert = p.shared;
    return tile;
  }
  const int g = index - shared_groups(p);
  if (p.pair_of == nullptr) {
    tile.group = {p.ids[g], g, 1};
    tile.valid = tile.group.expert >= 0 && tile.group.expert < p.experts;
  } else {
    tile.valid = g < *p.group_count;
    if (tile.valid) {
      tile.group = p.groups[g];
    }
  }
  if (tile.valid) {
    tile.expert = p.table[tile.group.expert];
  }
  return tile;
}

// The tile of this block, where every group has `row_blocks` blocks.
__device__ __forceinline__ ExpertTile expert_tile(const ExpertProblem& p,
                                                  int64_t row_blocks,
                                                  int block_rows) {
  return expert_rows(p,
                     static_cast<int>(blockIdx.x / row_blocks),
                     static_cast<int64_t>(blockIdx.x % row_blocks) * block_rows);
}

// Row of token n of a tile in the [T k] (routed) or [T] (shared) arrays; -1 past the last token.
__device__ __forceinline__ int64_t pair_row(const ExpertProblem& p, const ExpertTile& tile, int n) {
  if (n >= tile.group.count) {
    return -1;
  }
  return tile.shared || p.pair_of == nullptr ? tile.group.begin + n
                                             : p.pair_of[tile.group.begin + n];
}

// Rows row + g of w1 (half 0) and of w3 (half 1): a lane gets gate and up of the same hidden
// column.
template <class W>
__device__ __forceinline__ TileRows
gate_up_rows(const ExpertPointers& expert, int64_t row, int64_t in, const Lane& lane) {
  TileRows rows;
  W::place(rows, 0, expert.w1, expert.w1_scales, row + lane.g, in, lane);
  W::place(rows, 1, expert.w3, expert.w3_scales, row + lane.g, in, lane);
  return rows;
}

// What a pair's hidden values are multiplied by.
__device__ __forceinline__ float pair_weight(const ExpertProblem& p,
                                             const ExpertTile& tile,
                                             int64_t pair) {
  return tile.shared ? 1.0f : p.weights[pair];
}

// x / (1 + e^-x), below -80 next to 0. The quotient takes the steps of an FP32 division without its
// branch for extreme exponents, whose call would keep the compiler from overlapping wgmma.
__device__ __forceinline__ float silu(float x) {
  x = fmaxf(x, -80.0f);
  const float d = 1.0f + expf(-x);
  float y = reciprocal(d);
  y = fmaf(fmaf(-d, y, 1.0f), y, y);
  float q = x * y;
  q = fmaf(fmaf(-d, q, x), y, q);
  return fmaf(fmaf(-d, q, x), y, q);
}

// One hidden value from the sums of gate and up.
__device__ __forceinline__ float hidden_value(float limit, float weight, float gate, float up) {
  const float g = fminf(rounded<Bf16>(gate * kLateScale), limit);
  const float u = clamp_abs(rounded<Bf16>(up * kLateScale), limit);
  return rounded<Bf16>(silu(g) * u * weight);
}
__device__ __forceinline__ float hidden_value(
    const ExpertProblem& p, const ExpertTile& tile, int64_t pair, float gate, float up) {
  return hidden_value(p.limit, pair_weight(p, tile, pair), gate, up);
}

// One warp: quantizes 32 hidden values of token n of a tile (lane l has column `column` + l, a
// multiple of 32) and stores them in the order of the second product's weights.
__device__ __forceinline__ void store_hidden(
    const ExpertProblem& p, const ExpertTile& tile, int n, int64_t column, float h) {
  float unused = 0;
  fp8_round_pair(h, unused, fp8_scale(__reduce_max_sync(kAllLanes, magnitude_bits(h))));
  const InputLayout layout = tile.shared ? InputLayout::kFp8 : InputLayout::kFp4;
  const int c = static_cast<int>(column % kChunk) + static_cast<int>(threadIdx.x) % 32;
  const int lane_place = layout_piece(layout, c / 8) * 8 + layout_slot(layout, c % 8);
  Bf16* to = tile.shared ? p.hidden_shared : p.hidden_routed;
  to[pair_row(p, tile, n) * p.f + column / kChunk * kChunk + lane_place] = from_float<Bf16>(h);
}

constexpr int64_t kDirectTokens = 2;

// The two products for groups of at most kTokenTile tokens, and for groups of at most 32, 80 or
// 160.
Status experts_few(const OpContext& ctx, const ExpertProblem& p, int64_t groups);
Status experts_many(const OpContext& ctx, const ExpertProblem& p, int64_t groups);

// The whole of a call with at most kDirectTokens tokens from x to y, without routing, if a block
// has warps for all experts of a token and shared memory for the input.
bool experts_direct_supports(const ExpertProblem& p);
Status experts_direct(const OpContext& ctx, const ExpertProblem& p);

}  // namespace cachalot::ops::cuda
