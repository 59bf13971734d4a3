// Blocks that multiply many tokens: one or two warpgroups with a tile of 16 weight rows per warp,
// unpacked in registers, and the input rows of one chunk of K in shared memory for all, as the B
// operand of wgmma. Same order of sums as device/weights.cuh, so the same bits as with few tokens.
//
//   copies    inputs kAhead chunks ahead, weights kStages - 1 steps ahead (cp.async)
//   warp      unpack 64 columns | wgmma ... | unpack the next 64 | ...
//   tensor    wgmma of one warpgroup while the other unpacks
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

constexpr int kGemmWarps = 8;

// Input rows are in wide order (wide_place()).
template <class W, int kTiles, int kWarps = kGemmWarps>
struct Gemm {
  static_assert(kWarps % 4 == 0);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTokens = kTiles * kTokenTile;
  static constexpr int kSteps = kChunk / W::kStep;  // of a chunk
  // Input chunks travel kAhead chunks ahead and are a copy group each, committed before the weights
  // of their step. Waiting for all but the kUnderWay youngest groups is waiting for the inputs of
  // the chunk that begins; the weights, kStages - 1 steps ahead, are then there as well.
  static constexpr int kAhead = kTokens > 64 || kSteps > 2 ? 1 : 2;
  static constexpr int kInputStages = kAhead + 1;
  static constexpr int kStages = kAhead * kSteps + 2;
  static constexpr int kUnderWay = kAhead * kSteps + kAhead - 1;
  static constexpr int kRowBytes = 128;  // 64 columns of a token
  static constexpr int kBlockBytes = kTokens * kRowBytes;
  static constexpr int kInputBytes = kChunk / 64 * kBlockBytes;
  using Ring = WeightRing<W, kStages>;
  static constexpr int kShared = kInputStages * kInputBytes + kWarps * Ring::kBytes;

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
    const int piece = static_cast<int>(threadIdx.x) % 32;
    uint8_t* to = memory + chunk % kInputStages * kInputBytes + piece / 8 * kBlockBytes;
#pragma unroll
    for (int i = 0; i < kTokens / kWarps; ++i) {
      const int token = static_cast<int>(threadIdx.x) / 32 + i * kWarps;
      const uint16_t* row = token_row[token];
      copy_async(to + token * kRowBytes + (piece % 8 ^ token % 8) * 16,
                 row + static_cast<int64_t>(chunk) * kChunk + piece * 8,
                 row != nullptr);
    }
  }

  // total[n] = this warp's 16 rows times token tile n, over all chunks. All threads of the block
  // call it; token_row must be visible to them.
  __device__ __forceinline__ void run(Ring& ring,
                                      int chunks,
                                      const Lane& lane,
                                      float (&total)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      copy_chunk(i, chunks);
    }
    copy_async_commit();
    copy_async_wait<0>();
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      float part[kTiles][4] = {};
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        ring.wait();
        if (step == 0) {
          // All have their copies of chunk c, and have left the stage that chunk c + kAhead goes
          // to.
          async_proxy_fence();
          __syncthreads();
          copy_chunk(c + kAhead, chunks);
        }
        ring.advance();
        const uint8_t* stage = memory + c % kInputStages * kInputBytes;
        unrolled<W::kGroups>([&]<int g>() {
          typename W::Raw raw;
          ring.template read<g>(raw);
          constexpr int kColumns = W::kStep / W::kGroups;
          unrolled<(kColumns + 63) / 64>([&]<int block>() {
            const int column = step * W::kStep + g * kColumns + block * 64;
            multiply_block < block,
                kColumns<64 ? kColumns / 16 : 4>(
                    raw, stage + column / 64 * kBlockBytes + column % 64 * 2, lane, part);
          });
        });
        wgmma_wait<0>();
      }
      add_part(total, part);
    }
  }

 private:
  // The mmas of 64 columns (or fewer) of a group, from mma 4 kBlock on.
  template <int kBlock, int kMmas>
  static __device__ __forceinline__ void multiply_block(const typename W::Raw& raw,
                                                        const uint8_t* input,
                                                        const Lane& lane,
                                                        float (&part)[kTiles][4]) {
    uint32_t a[kMmas][W::kParts][4];
    unrolled<kMmas>([&]<int i>() { W::template fragment<4 * kBlock + i>(a[i], raw, lane); });
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
      const uint64_t b = wgmma_operand(input + i * 32);
#pragma unroll
      for (int q = 0; q < W::kParts; ++q) {
        wgmma_bf16(part, a[i][q], b);
      }
    }
    wgmma_commit();
  }
};

}  // namespace cachalot::ops::cuda
