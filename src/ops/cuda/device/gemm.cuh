// Blocks that multiply many tokens: eight warps with a tile of 16 weight rows each, and the input
// rows of one chunk of K for all of them in shared memory. Same fragments and order of sums as
// device/weights.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

constexpr int kGemmWarps = 8;
constexpr int kGemmThreads = kGemmWarps * 32;

template <class W, int kTiles>
struct Gemm {
  static constexpr int kStages = 3;
  static constexpr int kTokens = kTiles * kTokenTile;
  static constexpr int kSteps = kChunk / W::kStep;  // of a chunk
  // Input chunks travel kAhead chunks ahead, in the same copy groups as the weights of their first
  // step.
  static constexpr int kAhead = (kStages - 2 + kSteps) / kSteps;
  static constexpr int kInputStages = kAhead + 1;
  static constexpr int kRowBytes =
      kChunk * 2 + 64;  // of a token in shared memory: no bank conflicts
  static constexpr int kInputBytes = kTokens * kRowBytes;
  using Ring = WeightRing<W, 1, kStages>;
  static constexpr int kShared = kInputStages * kInputBytes + kGemmWarps * Ring::kBytes;

  uint8_t* memory;                   // dynamic shared memory, kShared bytes
  const uint16_t* const* token_row;  // shared [kTokens]: input rows; null past the last token

  __device__ __forceinline__ uint8_t* ring_memory() const {
    return memory + kInputStages * kInputBytes + threadIdx.x / 32 * Ring::kBytes;
  }

  // Starts the copies of one chunk of every token.
  __device__ __forceinline__ void copy_chunk(int chunk, int chunks) const {
    if (chunk >= chunks) {
      return;
    }
    uint8_t* to = memory + chunk % kInputStages * kInputBytes;
    const int piece = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kTokens / kGemmWarps; ++i) {
      const int token = static_cast<int>(threadIdx.x) / 32 + i * kGemmWarps;
      const uint16_t* row = token_row[token];
      copy_async(to + token * kRowBytes + piece * 16,
                 row + static_cast<int64_t>(chunk) * kChunk + piece * 8,
                 row != nullptr);
    }
  }

  // total[n] = this warp's 16 rows times token tile n, over all chunks. `active` false: the warp
  // only helps to copy. All threads of the block call it; token_row must be visible to them.
  __device__ __forceinline__ void run(
      Ring& ring, int chunks, bool active, const Lane& lane, float (&total)[1][kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      copy_chunk(i, chunks);
    }
    copy_async_commit();
    copy_async_wait<0>();
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      float part[1][kTiles][4] = {};
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        ring.wait();
        if (step == 0) {
          // All have their copies of chunk c, and have left the stage that chunk c + kAhead goes
          // to.
          __syncthreads();
          copy_chunk(c + kAhead, chunks);
        }
        typename W::Raw raw[1];
        ring.read(raw);
        const uint8_t* stage = memory + c % kInputStages * kInputBytes + lane.g * kRowBytes +
                               lane.t * 16 + step * (W::kStep * 2);
        if (active) {
          multiply_step<W, 1, kTiles>(
              raw,
              [&](int n, int p) {
                return *reinterpret_cast<const uint4*>(stage + n * (kTokenTile * kRowBytes) +
                                                       p * 64);
              },
              lane,
              part);
        }
      }
      add_part(total, part);
    }
  }
};

}  // namespace cachalot::ops::cuda
