// What a warp does with index rows: it copies them to shared memory, unpacks them to E4M3 and
// weighs their products with queries (index_score.cu).
#pragma once

#include "ops/cuda/index_split.cuh"

namespace cachalot::ops::cuda {

constexpr int kIndexHeads = 32;
constexpr int kTileSlots = 64;  // rows of a product
constexpr int kTileWarpSlots = kTileSlots / 4;
constexpr int kRun = 4;  // slots whose rows are copied at once, at least
constexpr int kKeyBytes = 68;
constexpr uint32_t kShifts = 20;  // binades from which on a block's codes vanish beside the largest
constexpr int kHeadroom = 6;      // 6 * 2^6 is below E4M3's 448
// Of both operands, and of relu(x) = (x + |x|) / 2.
constexpr float kLate = 0x1.0p-13f;

// The scale of a block `shift` binades below its row's largest one, as 2^(headroom - shift).
__device__ __forceinline__ float shifted_scale(uint32_t shift) {
  return __uint_as_float((127 + kHeadroom - min(shift, kShifts - 1)) << 23);
}
__device__ __forceinline__ uint32_t e4m3_four(const float (&v)[4]) {
  return e4m3_pair(v[0], v[1]) | static_cast<uint32_t>(e4m3_pair(v[2], v[3])) << 16;
}

// Slots of a warp whose rows lie behind each other, in multiples of 16 bytes: what one bulk copy
// brings. 0: rows must be copied word by word, four slots per thread.
template <int kWarpSlots>
__device__ __forceinline__ int contiguous_slots(const PagedRows& pages, bool restricted) {
  if (reinterpret_cast<uintptr_t>(pages.pages[0]) % 16 != 0 || pages.page_rows % kRun != 0) {
    return 0;
  }
  if (!restricted && pages.page_rows % kWarpSlots == 0) {
    return kWarpSlots;
  }
  return pages.page_rows % kCandidateBlock == 0 ? kCandidateBlock : kRun;
}

// The rows of one sequence, as the lanes of a warp see them. They look up a batch of steps
// together, a run per lane. `step` is the warp's first slot of one.
template <int kWarpSlots>
struct IndexRows {
  uint8_t* const* pages;
  uint32_t page_rows;
  const int32_t* candidates;  // blocks that restrict the slots, or null
  int slots;
  int visible;
  int run_slots;
  bool bulk;   // runs are copied as a whole
  int stride;  // from a step to the next one of the warpgroup

  // Steps of a batch, the lane's step in it, and the first of the warp's slots of its run there.
  __device__ __forceinline__ int batch() const { return kWarp * run_slots / kWarpSlots; }
  __device__ __forceinline__ int turn() const { return first() / kWarpSlots; }
  __device__ __forceinline__ int place() const { return first() % kWarpSlots; }
  // Slot of the lane's run in a batch that begins at slot `step`.
  __device__ __forceinline__ int slot(int step) const { return step + turn() * stride + place(); }
  // Its candidate block, or 0.
  __device__ __forceinline__ int block(int step) const {
    return candidates != nullptr && slot(step) < slots ? candidates[slot(step) / kCandidateBlock]
                                                       : 0;
  }

 private:
  __device__ __forceinline__ int first() const {
    return static_cast<int>(threadIdx.x) % kWarp * run_slots;
  }
};

// Slots whose entries follow each other. `page` is only loaded here, so that nobody waits for it.
struct IndexRun {
  int entry = -1;       // of the first slot, or -1
  int count = 0;        // slots that have an entry; 0: none is copied
  uint32_t offset = 0;  // of the first row in its page
  const uint8_t* page = nullptr;

  template <int kWarpSlots>
  __device__ __forceinline__ void find(const IndexRows<kWarpSlots>& rows, int step, int block) {
    const int slot = rows.slot(step);
    entry = rows.candidates == nullptr ? slot : block * kCandidateBlock + slot % kCandidateBlock;
    count = slot < rows.slots && block >= 0 ? min(rows.run_slots, rows.visible - entry) : 0;
    if (count <= 0) {
      entry = -1;
      count = 0;
      return;
    }
    const uint32_t index = static_cast<uint32_t>(entry) / rows.page_rows;
    page = rows.pages[index];
    offset = (static_cast<uint32_t>(entry) - index * rows.page_rows) * uint32_t{kKeyBytes};
  }

  // A warp: the runs of step `turn` of the batch go to shared memory. `arrived` counts as many
  // arrivals as there are runs of the shortest kind.
  template <int kWarpSlots>
  __device__ __forceinline__ void copy(const IndexRows<kWarpSlots>& rows,
                                       int turn,
                                       uint8_t* stage,
                                       int* entries,
                                       uint64_t* arrived) const {
    if (rows.turn() != turn) {
      return;
    }
    uint8_t* to = stage + rows.place() * kKeyBytes;
    if (rows.candidates != nullptr && rows.place() % kCandidateBlock == 0) {
      entries[rows.place() / kCandidateBlock] = entry;
    }
    const bool bulk = count > 0 && rows.bulk;
    if (count > 0 && !rows.bulk) {
#pragma unroll 1
      for (int i = 0; i < count * (kKeyBytes / 4); ++i) {
        const auto row = static_cast<uint32_t>(entry + i / (kKeyBytes / 4));
        reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(
            rows.pages[row / rows.page_rows] +
            row % rows.page_rows * kKeyBytes)[i % (kKeyBytes / 4)];
      }
    }
    const int bytes = rows.run_slots * kKeyBytes;
    if (bulk) {
      barrier_expect(arrived, bytes);
      copy_bulk(to, page + offset, bytes, arrived);
    }
    barrier_arrive(arrived, rows.run_slots / kRun);
  }
};

// The operand `pieces` of 16 bytes behind another in the same 256 KiB of shared memory.
__device__ __forceinline__ uint64_t operand_at(uint64_t operand, int pieces) {
  const uint32_t low = static_cast<uint32_t>(operand) + static_cast<uint32_t>(pieces);
  return operand >> 32 << 32 | low;
}

// Keeps the compiler from computing a pointer to global memory again at every use.
__device__ __forceinline__ uint32_t* keep(uint32_t* pointer) {
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

template <class T>
__device__ __forceinline__ T keep(T value) {
  asm("" : "+r"(value));
  return value;
}

// A lane's two rows of a tile, 32 codes each, as operand A, and what their finished sums need.
struct IndexKeys {
  uint32_t a[4][4];
  float factor[2];

  // `row` is the address of the lane's first row of the tile, `table` that of the magnitudes.
  __device__ __forceinline__ void load(uint32_t row,
                                       uint32_t table,
                                       const Lane& lane,
                                       float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t words = row + static_cast<uint32_t>(8 * r * kKeyBytes);
      uint32_t codes[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        codes[i] = load_shared_word(words + 16 * lane.t + 4 * i);
      }
      const uint32_t block = pick_bytes(
          load_shared_word(words + kIndexMmaDim / 2), 0, static_cast<uint32_t>(0x4440 + lane.t));
      uint32_t most = max(block, __shfl_xor_sync(kAllLanes, block, 1));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
      const uint2 magnitudes = load_shared_pair(table + 8 * min(most - block, kShifts - 1));
      factor[r] = __uint_as_float(most << 23) * scale;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Lookup by the low three bits of a nibble; the signs of even nibbles move up to those of
        // the odd ones, from where they reach the same bytes.
        const uint32_t select = codes[i] & 0x77777777u, even = codes[i] << 4;
        a[i][r] = merge_bits(pick_bytes(codes[i], even, 0x1504),
                             0x80808080u,
                             pick_bytes(magnitudes.x, magnitudes.y, select));
        a[i][2 + r] = merge_bits(pick_bytes(codes[i], even, 0x3726),
                                 0x80808080u,
                                 pick_bytes(magnitudes.x, magnitudes.y, select >> 16));
      }
    }
  }
};

// The weighted sums of a lane's eight heads, of a token, for rows g and g + 8: products `acc` from
// tile kFirst of eight columns on.
template <int kFirst, int kTiles>
__device__ __forceinline__ void weigh_heads(const float (&acc)[kTiles][4],
                                            const float4 (&w)[2],
                                            float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto twice_relu = [&](int n, int e) {
      const float d = acc[kFirst + n][2 * r + e];
      return d + fabsf(d);
    };
    float x = twice_relu(0, 0) * w[0].x;
    x = fmaf(twice_relu(0, 1), w[0].y, x);
    x = fmaf(twice_relu(1, 0), w[0].z, x);
    x = fmaf(twice_relu(1, 1), w[0].w, x);
    x = fmaf(twice_relu(2, 0), w[1].x, x);
    x = fmaf(twice_relu(2, 1), w[1].y, x);
    x = fmaf(twice_relu(3, 0), w[1].z, x);
    sum[r] = fmaf(twice_relu(3, 1), w[1].w, x);
  }
}
__device__ __forceinline__ void load_weights(const float* weights, float4 (&w)[2]) {
  w[0] = *reinterpret_cast<const float4*>(weights);
  w[1] = *reinterpret_cast<const float4*>(weights + 4);
}
// Lanes t and t ^ `step` exchange what the other keeps, so that nothing is summed twice.
__device__ __forceinline__ float exchange(bool upper, float low_value, float high_value, int step) {
  const float sent = upper ? low_value : high_value;
  return (upper ? high_value : low_value) + __shfl_xor_sync(kAllLanes, sent, step);
}

// Products of a tile and kCount tokens.
template <int kCount>
struct IndexPiece {
  static_assert(kCount == 1 || kCount == 2);
  float acc[kCount * kIndexHeads / 8][4];

  // `query` is the operand of the first token.
  __device__ __forceinline__ void start(const IndexKeys& keys, uint64_t query) {
    wgmma_fp8<false>(acc, keys.a[0], query);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      wgmma_fp8<true>(acc, keys.a[i], operand_at(query, i * 2));
    }
    wgmma_commit();
  }
  // After the wait for it: its products are read behind this.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (auto& four : acc) {
      asm volatile("" : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])::"memory");
    }
  }
};

}  // namespace cachalot::ops::cuda
