// Blocks that multiply many tokens by many weight rows: persistent warpgroups with 64 weight rows
// each, unpacked in registers as the A operand of wgmma, and the input rows of 64 columns of K at a
// time in shared memory as the B operand. Same order of sums as device/weights.cuh, so the same
// bits as with few tokens.
//
//   feeding warp 0      waits for a free block of input | starts its bulk copy | ...
//   feeding warp 1 + g  waits for a free stage of weights | starts the copies of group g's 64 rows
//   multiplying warps   wgmma 64 columns | unpack the next 64 | ...     a chunk of 256: wait, add
//
// All of it goes on into the next tile without a stop. The warpgroups of a block either have rows
// of their own and share the input, or have the same rows and take turns at the chunks: then a
// chunk's sums are added to those before it, in shared memory, when all of those are there. They
// wait for copies and turns, never for each other's products, so one adds up or stores while
// another multiplies.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/gemm.cuh"
#include "ops/cuda/device/num.cuh"
#include "ops/cuda/device/warpgroup.cuh"
#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

constexpr int kBlockColumns = 64;  // of an input block
constexpr int kChunkBlocks = kChunk / kBlockColumns;
constexpr int kGroupWarps = 4;  // of a warpgroup
constexpr int kGroupThreads = kGroupWarps * 32;

// Input in shared memory: kSlots chunks of four blocks. The loading thread goes round them, and so
// does every warp that reads, kStride at a time; kReaders warps read a slot.
template <int kTokens, int kSlots, int kStride, int kReaders>
class InputSlots {
 public:
  static constexpr int kBlockBytes = kTokens * kBlockColumns * 2;
  static constexpr int kSlotBytes = kChunkBlocks * kBlockBytes;
  static constexpr int kBytes = kSlots * kSlotBytes;
  struct Barriers {
    uint64_t full[kSlots][kChunkBlocks];
    uint64_t empty[kSlots][kChunkBlocks];
  };

  // From slot `first` on.
  __device__ __forceinline__ InputSlots(uint8_t* memory, Barriers* barriers, int first)
      : memory_(memory), barriers_(barriers), slot_(first) {}

  // By one thread, before a barrier of the block.
  static __device__ __forceinline__ void init(Barriers& barriers) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int block = 0; block < kChunkBlocks; ++block) {
        barrier_init(&barriers.full[i][block], 1);
        barrier_init(&barriers.empty[i][block], kReaders);
      }
    }
  }

  // By the loading thread: all chunks of an image of `rows` rows, at most kTokens. Rows past the
  // image keep what they held: their results are not stored.
  __device__ __forceinline__ void load(const uint8_t* image, int rows, int chunks) {
    const int bytes = rows * (kBlockColumns * 2);
    for (int c = 0; c < chunks; ++c) {
#pragma unroll
      for (int block = 0; block < kChunkBlocks; ++block) {
        uint64_t* full = &barriers_->full[slot_][block];
        barrier_wait(&barriers_->empty[slot_][block], phase_ ^ 1);
        barrier_arrive_expect(full, bytes);
        copy_bulk(memory_ + slot_ * kSlotBytes + block * kBlockBytes, image, bytes, full);
        image += bytes;
      }
      step<1>();
    }
  }

  // A block of the chunk as wgmma operand, and its release by a warp.
  template <int kBlock>
  __device__ __forceinline__ uint64_t wait() const {
    barrier_wait(&barriers_->full[slot_][kBlock], phase_);
    return wgmma_operand(memory_ + slot_ * kSlotBytes) + operand_bytes(kBlock * kBlockBytes);
  }
  template <int kBlock>
  __device__ __forceinline__ void release() const {
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(&barriers_->empty[slot_][kBlock]);
    }
  }
  __device__ __forceinline__ void advance() { step<kStride>(); }

 private:
  template <int kBy>
  __device__ __forceinline__ void step() {
    slot_ += kBy;
    if (slot_ >= kSlots) {
      slot_ -= kSlots;
      phase_ ^= 1;
    }
  }

  uint8_t* memory_;
  Barriers* barriers_;
  int slot_;
  int phase_ = 0;
};

// Steps of a warpgroup's weights in shared memory. The feeding warp and each warp of the group go
// round the stages in the same order; a lane of the first copies for the same lane of the others.
template <class W, int kStages>
class WeightStages {
 public:
  static constexpr int kWarpBytes = WeightStage<W>::kBytes;
  static constexpr int kStageBytes = kGroupWarps * kWarpBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  struct Barriers {
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };

  // `memory` is the group's.
  __device__ __forceinline__ WeightStages(uint8_t* memory, Barriers* barriers)
      : memory_(memory), barriers_(barriers) {}

  // By one thread, before a barrier of the block.
  static __device__ __forceinline__ void init(Barriers& barriers) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&barriers.full[i], 32);
      barrier_init(&barriers.empty[i], kGroupWarps);
    }
  }

  // By the feeding warp: the next step of every warp's rows.
  __device__ __forceinline__ void fill(TileRows (&rows)[kGroupWarps]) {
    barrier_wait(&barriers_->empty[stage_], phase_ ^ 1);
#pragma unroll
    for (int warp = 0; warp < kGroupWarps; ++warp) {
      WeightStage<W>::copy(memory_ + stage_ * kStageBytes + warp * kWarpBytes, rows[warp]);
    }
    barrier_arrive_after_copies(&barriers_->full[stage_]);
    advance();
  }
  // A step that is waited for but not used.
  __device__ __forceinline__ void fill_nothing() {
    barrier_wait(&barriers_->empty[stage_], phase_ ^ 1);
    barrier_arrive(&barriers_->full[stage_]);
    advance();
  }

  // By a warp of the group.
  __device__ __forceinline__ void wait() const { barrier_wait(&barriers_->full[stage_], phase_); }
  template <int kGroup>
  __device__ __forceinline__ void read(int warp, typename W::Raw& raw) const {
    WeightStage<W>::template read<kGroup>(memory_ + stage_ * kStageBytes + warp * kWarpBytes, raw);
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(&barriers_->empty[stage_]);
    }
    advance();
  }

 private:
  __device__ __forceinline__ void advance() {
    phase_ ^= stage_ + 1 == kStages ? 1 : 0;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  uint8_t* memory_;
  Barriers* barriers_;
  int stage_ = 0;
  int phase_ = 0;
};

// A warp's next 64 columns of weights as A operands, in two parts, so that the reads from shared
// memory can be under way before the unpacking has its turn. Blocks of a chunk in order.
template <class W, class Stages>
struct WeightBlock {
  static constexpr int kGroupColumns = W::kStep / W::kGroups;

  typename W::Raw raw;
  uint32_t a[kBlockColumns / 16][W::kParts][4];

  template <int kBlock>
  __device__ __forceinline__ void fetch(Stages& stages, int warp) {
    if constexpr (kGroupColumns >= kBlockColumns) {
      constexpr int kColumn = kBlock * kBlockColumns % W::kStep;
      if constexpr (kColumn == 0) {
        stages.wait();
      }
      if constexpr (kColumn % kGroupColumns == 0) {
        stages.template read<kColumn / kGroupColumns>(warp, raw);
      }
    }
  }
  template <int kBlock>
  __device__ __forceinline__ void unpack(Stages& stages, int warp, const Lane& lane) {
    if constexpr (kGroupColumns >= kBlockColumns) {
      constexpr int kColumn = kBlock * kBlockColumns % W::kStep;
      unrolled<kBlockColumns / 16>([&]<int i>() __attribute__((always_inline)) {
        W::template fragment<kColumn % kGroupColumns / 16 + i>(a[i], raw, lane);
      });
      if constexpr (kColumn == W::kStep - kGroupColumns) {
        stages.release();  // its last group is in `raw`
      }
    } else {
      unrolled<kBlockColumns / kGroupColumns>([&]<int g>() __attribute__((always_inline)) {
        stages.wait();
        stages.template read<0>(warp, raw);
        constexpr int kMmas = kGroupColumns / 16;
        unrolled<kMmas>([&]<int i>() __attribute__((always_inline)) {
          W::template fragment<i>(a[g * kMmas + i], raw, lane);
        });
        stages.release();
      });
    }
  }
};

// part = a warp's tile times kTiles token tiles over a chunk. `next` has the chunk's first block on
// entry and that of the next chunk on return.
template <class W, int kTiles, class Weights, class Inputs>
__device__ __forceinline__ void multiply_chunk(WeightBlock<W, Weights>& next,
                                               Weights& weights,
                                               Inputs& inputs,
                                               int warp,
                                               const Lane& lane,
                                               float (&part)[kTiles][4]) {
  unrolled<kChunkBlocks>([&]<int block>() __attribute__((always_inline)) {
    const uint64_t b = inputs.template wait<block>();
    wgmma_fence();
    unrolled<kBlockColumns / 16>([&]<int i>() __attribute__((always_inline)) {
      unrolled<W::kParts>([&]<int q>() __attribute__((always_inline)) {
        wgmma_bf16<block + i + q != 0>(part, next.a[i][q], b + operand_bytes(i * 32));
      });
    });
    wgmma_commit();
    constexpr int kNext = (block + 1) % kChunkBlocks;
    next.template fetch<kNext>(weights, warp);
    if constexpr (block > 0) {
      wgmma_wait<1>();
      inputs.template release<block - 1>();
    }
    next.template unpack<kNext>(weights, warp, lane);
  });
  wgmma_wait<0>();
  inputs.template release<kChunkBlocks - 1>();
  inputs.advance();
}

// What a block is made of: kRowGroups warpgroups with rows of their own, or kTurns that take turns
// at the chunks of the same rows, and one that feeds them. Registers move from it to the others.
template <int kTokens_, int kRowGroups_, int kTurns_>
struct GemmBlock {
  static_assert(kRowGroups_ == 1 || kTurns_ == 1);
  static constexpr int kTokens = kTokens_;
  static constexpr int kTurns = kTurns_;
  static constexpr int kGroups = kRowGroups_ * kTurns;
  static constexpr int kRowWarps = kRowGroups_ * kGroupWarps;  // tiles of 16 rows
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static_assert(kGroups == 2 || kGroups == 3);
  static constexpr int kFeedRegisters = 56;
  static constexpr int kGroupRegisters = kGroups == 2 ? 224 : 152;
  using Inputs = InputSlots<kTokens, kTurns == 1 ? 2 : kTurns, kTurns, kRowWarps>;
  // Where sums wait for the next turn, and where store_tile() transposes the results of a warp.
  static constexpr int kTotalBytes = kTurns == 1 ? 0 : kTileRows * kGroupWarps * kTokens * 4;
  static constexpr int kStoreTokens = kTokens < 64 ? kTokens : 64;
  static constexpr int kStoreBytes = kStoreTokens * kTileRows * 2;
};

// The sums of 64 rows, which kTurns warpgroups add to in turn; every thread has places of its own
// in `memory`. Barriers 1 .. kTurns of the block belong to it.
template <int kTurns, int kTiles>
class TurnSums {
 public:
  __device__ __forceinline__ TurnSums(uint8_t* memory, int turn)
      : own_(reinterpret_cast<float4*>(memory) + threadIdx.x % kGroupThreads), turn_(turn) {}

  // Waits for the group before; not at the first chunk of all.
  __device__ __forceinline__ void wait() const { group_barrier(1 + turn_, 2 * kGroupThreads); }
  // Lets the next group go on; not at the last one.
  __device__ __forceinline__ void pass() const {
    group_barrier_arrive(1 + (turn_ + 1 == kTurns ? 0 : turn_ + 1), 2 * kGroupThreads);
  }
  // part += the sums so far, which are zero in front of a tile's first chunk.
  __device__ __forceinline__ void add_to(float (&part)[kTiles][4], bool first) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 sum = first ? float4{} : own_[n * kGroupThreads];
      part[n][0] = sum.x + part[n][0];
      part[n][1] = sum.y + part[n][1];
      part[n][2] = sum.z + part[n][2];
      part[n][3] = sum.w + part[n][3];
    }
  }
  __device__ __forceinline__ void keep(const float (&sum)[kTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      own_[n * kGroupThreads] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
    }
  }

 private:
  float4* own_;
  int turn_;
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
