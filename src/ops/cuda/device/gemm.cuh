// Blocks that multiply many tokens of an expert: one or two warpgroups with a tile of 16 weight
// rows per warp, unpacked in registers, and the input rows of one chunk of K in shared memory for
// all, as the B operand of wgmma. Same order of sums as device/weights.cuh, so the same bits as
// with few tokens.
//
//   copies    an input chunk in one piece (cp.async.bulk) by the warp that leaves its stage last;
//             weights kStages - 1 steps ahead (cp.async)
//   warp      unpack 64 columns | wgmma ... | unpack the next 64 | ...
//   tensor    wgmma of one warpgroup while the other unpacks
//
// Warpgroups wait for input chunks, never for each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

constexpr int kGemmWarps = 8;

// Input rows of a tile as wgmma reads them, their "image": chunk after chunk, four blocks of 64
// columns in wide order (wide_place()), each [rows][64] with the pieces of eight swizzled. Where an
// element of `row` lies; `place` is its column in wide order.
__host__ __device__ constexpr int64_t image_place(int64_t rows, int64_t row, int64_t place) {
  return (place / 64 * rows + row) * 64 + (place % 64 / 8 ^ row % 8) * 8 + place % 8;
}
// Rows of the image of a tile of `count` tokens.
__host__ __device__ constexpr int64_t image_rows(int64_t count) {
  return (count + kTokenTile - 1) / kTokenTile * kTokenTile;
}

template <int kStages>
struct GemmBarriers {
  uint64_t arrived[kStages];
  int left[kStages];  // warps that are done with the stage
};

template <class W, int kTiles, int kWarps = kGemmWarps>
struct Gemm {
  static_assert(kWarps % 4 == 0);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTokens = kTiles * kTokenTile;
  static constexpr int kSteps = kChunk / W::kStep;  // of a chunk
  static constexpr int kInputStages = kTokens > 64 || kSteps > 2 ? 2 : 3;
  static constexpr int kStages = kSteps + 2;
  static constexpr int kBlockBytes = kTokens * 128;  // 64 columns
  static constexpr int kBlocks = kChunk / 64;
  static constexpr int kInputBytes = kBlocks * kBlockBytes;
  using Ring = WeightRing<W, kStages>;
  using Barriers = GemmBarriers<kInputStages>;
  static constexpr int kShared = kInputStages * kInputBytes + kWarps * Ring::kBytes;

  uint8_t* memory;       // dynamic shared memory, kShared bytes
  Barriers* barriers;    // shared
  const uint8_t* image;  // of the tile's input rows
  int rows;              // of the image, at most kTokens

  static __device__ __forceinline__ uint8_t* ring_memory() {
    return dynamic_shared() + kInputStages * kInputBytes + threadIdx.x / 32 * Ring::kBytes;
  }

  // One thread starts the copy of one chunk. Rows past the image keep what they held: their results
  // are not stored.
  __device__ __forceinline__ void copy_chunk(int chunk, int chunks) const {
    if (chunk >= chunks) {
      return;
    }
    const int stage = chunk % kInputStages, bytes = rows * 128;
    barrier_arrive_expect(&barriers->arrived[stage], kBlocks * bytes);
    const uint8_t* from = image + static_cast<int64_t>(chunk) * kBlocks * bytes;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      copy_bulk(memory + stage * kInputBytes + b * kBlockBytes,
                from + b * bytes,
                bytes,
                &barriers->arrived[stage]);
    }
  }

  // total[n] = this warp's 16 rows times token tile n, over all chunks. All threads of the block
  // call it.
  __device__ __forceinline__ void run(Ring& ring,
                                      int chunks,
                                      const Lane& lane,
                                      float (&total)[kTiles][4]) const {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kInputStages; ++i) {
        barrier_init(&barriers->arrived[i], 1);
        barriers->left[i] = 0;
      }
      async_proxy_fence();
#pragma unroll
      for (int i = 0; i < kInputStages; ++i) {
        copy_chunk(i, chunks);
      }
    }
    __syncthreads();
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      float part[kTiles][4] = {};
      const uint8_t* input = memory + stage * kInputBytes;
      barrier_wait(&barriers->arrived[stage], phase);
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        ring.wait();
        ring.advance();
        unrolled<W::kGroups>([&]<int g>() {
          typename W::Raw raw;
          ring.template read<g>(raw);
          constexpr int kColumns = W::kStep / W::kGroups;
          unrolled<(kColumns + 63) / 64>([&]<int block>() {
            const int column = step * W::kStep + g * kColumns + block * 64;
            multiply_block < block,
                kColumns<64 ? kColumns / 16 : 4>(
                    raw, input + column / 64 * kBlockBytes + column % 64 * 2, lane, part);
          });
        });
        wgmma_wait<0>();
      }
      if (threadIdx.x % 32 == 0 && atomicAdd(&barriers->left[stage], 1) == kWarps - 1) {
        barriers->left[stage] = 0;
        copy_chunk(c + kInputStages, chunks);
      }
      phase ^= stage + 1 == kInputStages ? 1 : 0;
      stage = stage + 1 == kInputStages ? 0 : stage + 1;
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
