// What the tensor-core linear kernels share: the call's targets, and who computes what.
#pragma once

#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {

constexpr int kMaxTargets = 4;  // of a launch

struct LinearPart {
  const uint8_t* values;
  const uint8_t* scales;
  void* y;
  int64_t out;
  int64_t group_rows;
  int first_tile;
  bool y_is_bf16;
};

struct LinearProblem {
  // Few tokens: [T, groups * K] in the format's layout, or as it came. Many: images of tiles of
  // many_tokens() tokens (prepare_image).
  const Bf16* x;
  bool quantize;  // x as it came: to FP8 blocks and back
  int64_t tokens;
  int64_t width;  // groups * K
  int64_t in;     // K
  int tiles;      // of all targets
  int targets;
  LinearPart target[kMaxTargets];
};

// The target of a tile, and the tile's first row in it.
struct TilePlace {
  int target;
  int64_t row;

  __device__ __forceinline__ TilePlace(const LinearProblem& p, int tile) : target(0) {
    while (target + 1 < p.targets && tile >= p.target[target + 1].first_tile) {
      ++target;
    }
    row = static_cast<int64_t>(tile - p.target[target].first_tile) * kTileRows;
  }
};

__device__ __forceinline__ void store_y(const LinearPart& to,
                                        int64_t token,
                                        int64_t row,
                                        float value) {
  if (row < to.out) {
    if (to.y_is_bf16) {
      static_cast<Bf16*>(to.y)[token * to.out + row] = from_float<Bf16>(value);
    } else {
      static_cast<float*>(to.y)[token * to.out + row] = value;
    }
  }
}

// The product for many tokens; whole blocks of rows lie in one group.
Status linear_many(const OpContext& ctx, WeightFormat format, const LinearProblem& p);
// Tokens of a tile of it, for a problem of so many tiles of rows.
int many_tokens(WeightFormat format, int64_t tiles, int64_t tokens);

}  // namespace cachalot::ops::cuda
