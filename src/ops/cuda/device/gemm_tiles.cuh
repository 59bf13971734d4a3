// Blocks that multiply many tokens by many weight rows: persistent warps with a tile of 16 weight
// rows each, unpacked in registers as the A operand of wgmma, and the input rows of 64 columns of K
// at a time in shared memory for all, as the B operand. Same order of sums as device/weights.cuh,
// so the same bits as with few tokens.
//
//   loader warp   waits for a free stage | starts the bulk copy of the next 64 columns of input
//   other warps   wgmma 64 columns | unpack the next 64 | ...     a chunk of 256: wait, add
//
// Weights run through a ring of every warp (cp.async) that does not stop between tiles, nor do the
// stages of input. Warpgroups wait for input, never for each other, so one adds up or stores while
// the other multiplies.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/device/num.cuh"
#include "ops/cuda/device/warpgroup.cuh"
#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

constexpr int kBlockColumns = 64;  // of an input stage
constexpr int kChunkBlocks = kChunk / kBlockColumns;

// Stages of input in shared memory. The loader warp and every other thread have a copy each and go
// through the stages in the same order.
template <int kTokens, int kStages, int kWarps>
class InputStages {
 public:
  static constexpr int kStageBytes = kTokens * kBlockColumns * 2;
  static constexpr int kBytes = kStages * kStageBytes;
  struct Barriers {
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };

  __device__ __forceinline__ InputStages(uint8_t* memory, Barriers* barriers)
      : memory_(memory), barriers_(barriers) {}

  // By one thread, before a barrier of the block.
  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&barriers_->full[i], 1);
      barrier_init(&barriers_->empty[i], kWarps);
    }
    async_proxy_fence();
  }

  // By one thread of the loader warp: all chunks of an image of `rows` rows, at most kTokens. Rows
  // past the image keep what they held: their results are not stored.
  __device__ __forceinline__ void load(const uint8_t* image, int rows, int chunks) {
    const int bytes = rows * (kBlockColumns * 2);
    for (int block = 0; block < chunks * kChunkBlocks; ++block) {
      barrier_wait(&barriers_->empty[stage_], phase_ ^ 1);
      barrier_arrive_expect(&barriers_->full[stage_], bytes);
      copy_bulk(memory_ + stage_ * kStageBytes,
                image + static_cast<int64_t>(block) * bytes,
                bytes,
                &barriers_->full[stage_]);
      advance();
    }
  }

  // The next block of columns, and its release by a warp, in order.
  __device__ __forceinline__ const uint8_t* wait() const {
    barrier_wait(&barriers_->full[stage_], phase_);
    return memory_ + stage_ * kStageBytes;
  }
  __device__ __forceinline__ void advance() {
    phase_ ^= stage_ + 1 == kStages ? 1 : 0;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }
  // Of the block `back` blocks before the next one.
  template <int kBack>
  __device__ __forceinline__ void release() const {
    const int stage = stage_ >= kBack ? stage_ - kBack : stage_ + kStages - kBack;
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(&barriers_->empty[stage]);
    }
  }

 private:
  uint8_t* memory_;
  Barriers* barriers_;
  int stage_ = 0;
  int phase_ = 0;
};

// A warp's next 64 columns of weights as A operands.
template <class W>
struct WeightBlock {
  static constexpr int kGroupColumns = W::kStep / W::kGroups;

  typename W::Raw raw;
  uint32_t a[kBlockColumns / 16][W::kParts][4];

  // Takes block kBlock of a chunk, the one after the last one taken.
  template <int kBlock, class Ring>
  __device__ __forceinline__ void take(Ring& ring, const Lane& lane) {
    if constexpr (kGroupColumns >= kBlockColumns) {
      constexpr int kColumn = kBlock * kBlockColumns % W::kStep;
      if constexpr (kColumn == 0) {
        ring.wait();
        ring.advance();
      }
      if constexpr (kColumn % kGroupColumns == 0) {
        ring.template read<kColumn / kGroupColumns>(raw);
      }
      unrolled<kBlockColumns / 16>([&]<int i>() __attribute__((always_inline)) {
        W::template fragment<kColumn % kGroupColumns / 16 + i>(a[i], raw, lane);
      });
    } else {
      unrolled<kBlockColumns / kGroupColumns>([&]<int g>() __attribute__((always_inline)) {
        ring.wait();
        ring.advance();
        ring.template read<0>(raw);
        constexpr int kMmas = kGroupColumns / 16;
        unrolled<kMmas>([&]<int i>() __attribute__((always_inline)) {
          W::template fragment<i>(a[g * kMmas + i], raw, lane);
        });
      });
    }
  }
};

// total = a warp's tile times kTiles token tiles. `next` has the tile's first block on entry and
// the next tile's on return.
template <class W, int kTiles, class Ring, class Stages>
__device__ __forceinline__ void multiply_tile(WeightBlock<W>& next,
                                              Ring& ring,
                                              Stages& stages,
                                              int chunks,
                                              const Lane& lane,
                                              float (&total)[kTiles][4]) {
  float part[kTiles][4] = {};
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    unrolled<kChunkBlocks>([&]<int block>() __attribute__((always_inline)) {
      const uint8_t* input = stages.wait();
      stages.advance();
      const uint64_t b = wgmma_operand(input);
      wgmma_fence();
      unrolled<kBlockColumns / 16>([&]<int i>() __attribute__((always_inline)) {
        unrolled<W::kParts>([&]<int q>() __attribute__((always_inline)) {
          wgmma_bf16<block + i + q != 0>(part, next.a[i][q], b + 2 * i);  // 32 bytes
        });
      });
      wgmma_commit();
      if constexpr (block > 0) {
        wgmma_wait<1>();
        stages.template release<2>();
      }
      next.template take<(block + 1) % kChunkBlocks>(ring, lane);
    });
    wgmma_wait<0>();
    stages.template release<1>();
    add_part(total, part);
  }
}

// What a block is made of. Warpgroups of kWarps warps multiply; one more, of which one thread
// works, loads. Registers move from it to the others.
template <int kMostTokens, int kWarps_>
struct GemmBlock {
  static constexpr int kWarps = kWarps_;
  static constexpr int kTokens = kMostTokens;
  static constexpr int kThreads = (kWarps + 4) * 32;
  // Two warpgroups need more registers each than the block has for each of its three.
  static constexpr bool kMovesRegisters = kWarps == 8;
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kWarpRegisters = 232;
  using Inputs = InputStages<kTokens, 8, kWarps>;
  // Where store_tile() transposes the results of a warp.
  static constexpr int kStoreTokens = kTokens < 64 ? kTokens : 64;
  static constexpr int kStoreBytes = kStoreTokens * kTileRows * 2;

  // load(inputs) in one thread, multiply(inputs, warp) in the warps that multiply.
  template <class Load, class Multiply>
  static __device__ __forceinline__ void run(const Load& load, const Multiply& multiply) {
    __shared__ typename Inputs::Barriers barriers;
    Inputs inputs(dynamic_shared(), &barriers);
    if (threadIdx.x == 0) {
      inputs.init();
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp >= kWarps) {
      if constexpr (kMovesRegisters) {
        lower_registers<kLoaderRegisters>();
      }
      wait_for_previous_kernels();
      allow_next_kernel();
      if (threadIdx.x == kWarps * 32) {
        load(inputs);
      }
    } else {
      if constexpr (kMovesRegisters) {
        raise_registers<kWarpRegisters>();
      }
      multiply(inputs, warp);
    }
  }
};

// Stores a warp's 16 rows as BF16: row(n) is where those of token n go, null past the last token.
// Of the rows only the first `rows` exist; `whole` if all do and every place is 16-byte aligned.
// `memory` is the warp's, 32 bytes for each of kStoreTokens tokens, whose halves swap places every
// four tokens.
template <int kStoreTokens, int kTiles, class Row>
__device__ __forceinline__ void store_tile(uint8_t* memory,
                                           const float (&total)[kTiles][4],
                                           float late,
                                           int rows,
                                           bool whole,
                                           const Row& row) {
  static_assert(kTiles % 2 == 0);
  constexpr int kPart = kStoreTokens / kTokenTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto place = [&](int token, int half) {
    return memory + token * 32 + (half ^ token / 4 % 2) * 16;
  };
#pragma unroll
  for (int first = 0; first < kTiles; first += kPart) {
    constexpr auto kLast = [](int from) { return from + kPart < kTiles ? from + kPart : kTiles; };
#pragma unroll
    for (int n = first; n < kLast(first); n += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&sum)[4] = total[n + i / 2];
        pairs[i] = bf16_pair(sum[i % 2 * 2] * late, sum[i % 2 * 2 + 1] * late);
      }
      store_matrices_transposed(
          place((n - first + lane / 16) * kTokenTile + lane % 8, lane / 8 % 2), pairs);
    }
    __syncwarp();
    for (int i = lane; i < (kLast(first) - first) * kTokenTile * 2; i += 32) {
      const int n = i / 2, half = i % 2;
      Bf16* to = row(first * kTokenTile + n);
      if (to == nullptr) {
        break;
      }
      const uint8_t* from = place(n, half);
      if (whole) {
        *reinterpret_cast<uint4*>(to + half * 8) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int r = 0; r < min(8, rows - half * 8); ++r) {
          to[half * 8 + r] = reinterpret_cast<const Bf16*>(from)[r];
        }
      }
    }
    __syncwarp();
  }
}

}  // namespace cachalot::ops::cuda
