// Tiles of weights times few tokens: one warp multiplies 16 rows by 8 or 16 tokens with mma.sync,
// from a ring of its own in shared memory (device/weights.cuh has the fragments and the order of
// sums).
//
// A lane copies exactly the weights that it will read. Block scales come in pieces for four steps,
// of which each of the four lanes of a row copies one: fetched step by step, a sector would cross
// L2 four times for its 32 bytes, next to the 64 of the weights.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda {

template <class W, int kStages>
class TileRing {
 public:
  static constexpr int kStageBytes = 32 * 16 * W::kSlots;
  static constexpr int kScaleBytes = W::kStep / 32;                    // of one row in a step
  static constexpr int kSliceBytes = W::kScaleRows * 8 * kScaleBytes;  // of all rows in a step
  static constexpr int kScaleSteps = 4;                                // fetched together
  static constexpr int kBytes = kStages * kStageBytes + 2 * kScaleSteps * kSliceBytes;
  static_assert(kStages - 1 <= kScaleSteps, "scales of two fetches are kept");

  // `memory` is the warp's, kBytes long. Starts the first stages of the next `steps` steps of
  // `rows`.
  __device__ __forceinline__ TileRing(uint8_t* memory, const TileRows& rows, int steps)
      : lane_memory_(shared_address(memory) + threadIdx.x % 32 * 16),
        lane_scales_(shared_address(memory) + kStages * kStageBytes +
                     threadIdx.x % 32 / 4 * kScaleBytes),
        steps_(steps),
        rows_(rows) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      fill(i, i);
    }
  }

  // Goes on to the next step, and starts the copies of the one that is kStages - 1 ahead.
  __device__ __forceinline__ void advance() {
    copy_async_wait<kStages - 2>();
    __syncwarp();
    const int last = stage_;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    ++step_;
    fill(step_ + kStages - 1, last);
  }
  // A group of the current step.
  template <int kGroup>
  __device__ __forceinline__ void read(typename W::Raw& raw) const {
    constexpr int kGroupSlots = W::kSlots / W::kGroups;
    const uint32_t from = lane_memory_ + stage_ * kStageBytes;
#pragma unroll
    for (int i = 0; i < kGroupSlots; ++i) {
      raw.v[i] = load_shared(from + (kGroup * kGroupSlots + i) * 512);
    }
    if constexpr (W::kScaleRows > 0) {
      const uint32_t scales = lane_scales_ + step_ % (2 * kScaleSteps) * kSliceBytes;
#pragma unroll
      for (int i = 0; i < W::kScaleRows; ++i) {
        raw.scale[i] = load_shared_word(scales + i * (8 * kScaleBytes) + kGroup * 4);
      }
    }
  }

 private:
  // Starts the copies of step `step` to a stage.
  __device__ __forceinline__ void fill(int step, int stage) {
    if (step < steps_) {
      const uint32_t to = lane_memory_ + stage * kStageBytes;
#pragma unroll
      for (int slot = 0; slot < W::kSlots; ++slot) {
        copy_async_stream(to + slot * 512, rows_.value[slot % 2] + slot / 2 * W::kGroupBytes);
      }
      if constexpr (W::kScaleRows > 0) {
        const int piece = static_cast<int>(threadIdx.x) % 4;
        if (step % kScaleSteps == 0 && step + piece < steps_) {
          const uint32_t slice = lane_scales_ + (step % (2 * kScaleSteps) + piece) * kSliceBytes;
#pragma unroll
          for (int i = 0; i < W::kScaleRows; ++i) {
            copy_async_small<kScaleBytes>(slice + i * (8 * kScaleBytes),
                                          rows_.scale[i] + (step + piece) * kScaleBytes);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows_.value[h] += W::kStepBytes;
      }
    }
    copy_async_commit();
  }

  uint32_t lane_memory_;  // of slot 0 of stage 0
  uint32_t lane_scales_;  // of slice 0
  int steps_;
  int step_ = -1;            // the current one
  int stage_ = kStages - 1;  // of the current step
  TileRows rows_;            // values: of the next step to start; scales: of the first
};

// Multiplies a tile by kTiles token tiles. `row` has this lane's input row of every token tile in
// W::kLayout, offset by 8 t columns and to the column where the ring starts; null past the last
// token. end(c, part) gets the accumulators of chunk c = 0, 1, .. The registers of a group's input
// are loaded for the next chunk as soon as the group is multiplied.
template <class W, int kStages, int kTiles, class End>
__device__ __forceinline__ void run_chunks(TileRing<W, kStages>& ring,
                                           const uint16_t* const (&row)[kTiles],
                                           int chunks,
                                           const Lane& lane,
                                           const End& end) {
  constexpr int kPieces = kGroupPieces<W>, kGroups = kChunk / (32 * kPieces);
  uint4 b[kGroups][kTiles][kPieces] = {};
  const auto load = [&](uint4(&to)[kTiles][kPieces], int column) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (row[n] != nullptr) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          to[n][p] = *reinterpret_cast<const uint4*>(row[n] + column + 32 * p);
        }
      }
    }
  };
  if (chunks > 0) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      load(b[i], i * 32 * kPieces);
    }
  }
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    float part[kTiles][4] = {};
    unrolled<kGroups>([&]<int i>() {
      if constexpr (i % W::kGroups == 0) {
        ring.advance();
      }
      typename W::Raw raw;
      ring.template read<i % W::kGroups>(raw);
      multiply_group<W, kTiles>(raw, [&](int n, int p) { return b[i][n][p]; }, lane, part);
      if (c + 1 < chunks) {
        load(b[i], (c + 1) * kChunk + i * 32 * kPieces);
      }
    });
    end(c, part);
  }
}

// Sums of chunks that warps leave for others, [chunk][token][row of the tile]: floats per token in
// shared memory, 16 rows without bank conflicts.
constexpr int kTokenPad = 20;

// The sum of row r and token n of `tokens` over the chunks, in their order.
__device__ __forceinline__ float sum_of_chunks(
    const float* sums, int chunks, int tokens, int n, int r) {
  float sum = 0;
  for (int c = 0; c < chunks; ++c) {
    sum += sums[(c * tokens + n) * kTokenPad + r];
  }
  return sum;
}

}  // namespace cachalot::ops::cuda
