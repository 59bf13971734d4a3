// Attention of a token by a cluster of two or four blocks, for batches that leave multiprocessors
// idle when a block has a whole token; with the bits of attend_mma.cu.
//
// in   as attend_mma.cu: q [T, H, 512] bf16, window rows (528 B) and main rows (288 B), 16-byte
//      aligned; selected [T, k]; sink [H] f32
// out  o [T, H, 512] bf16, rotated back
//
// A cluster has all 64 heads of a token. Its blocks take turns at blocks of 64 keys for the scores
// and split the columns for the values. A block so unpacks its own keys whole and its columns of
// the others' keys. Roles, once per token:
//
//   unpacking, 8   per round of the ranks: own block of keys; columns of the others' blocks
//   scores, 4      Q rotated; S = Q K^T -> maxima to all blocks -> P, rounded against the running
//                  maximum; P, its sums and that maximum to all blocks
//   values, 4      selected rows found, Q rotated; O[64][columns] = O * rescale + P V over all
//                  blocks of keys, in order
//
//   unpacking  | own 0 | others 0 | own 1   | others 1 | ..     shared: Q 64 KiB; of the own keys
//   scores             | S 0 | P 0 | . . . | S 1 | P 1          the others' columns, 32 or 48 KiB;
//   values                   . . . | 0 | ..    . . . | 2 | ..   3 or 4 blocks of values, 96 or 64
//                                                               KiB, and of P, 24 or 32 KiB
//
// Where rows may lie is read while the kernels in front still run, so that window rows are loaded
// right behind them; the warps of values find the selected ones meanwhile.
//
// Bound: with two blocks per token, 10,240 cycles (5.5 us) of the tensor cores for 640 keys, about
// as many of shared memory, 6,000 of the instructions that unpack. A profile by clock has 36,000
// cycles: 6,100 until the selected rows are known, then five rounds of 3,500 to 6,000, in which S
// takes 1,100 to 1,900, its maxima and P 1,700 to 2,500, the values of a block of keys 1,000, and
// the loads of the next rows 2,000 to issue; 3,000 to store.
// Measured on an H200 with 128 + 512 keys: 22 us for 16 tokens (four blocks each), 27 for 32 and
// for 64 (two); a block per token takes 37 to 38. Window only: 8.6, 9.2 and 11.7 us.
// Limits: no more tokens than clusters run at once; two waves (54 us for 128 tokens) are slower
// than a block per token.
#include "ops/cuda/attend_rows.cuh"
#include "ops/cuda/attend_tiles.cuh"
#include "ops/cuda/device/cluster.cuh"

namespace cachalot::ops::cuda {
namespace attention {
namespace {

constexpr int kMostKeys = 640, kBlocks = kMostKeys / kKeyBlock;
constexpr int kUnpackers = 8;  // warps
constexpr int kThreads = 2 * kGroup + kUnpackers * 32;
constexpr int kProductColumns = 128;  // of values
constexpr int kQuarters = 4, kQuarterColumns = kDim / kQuarters, kQuarterTiles = kTiles / kQuarters;

// Clusters of two and of four blocks that run at once on an H200.
constexpr int64_t kPairs = 66, kFours = 30;

// Barriers of the groups of scores and values, of the group of scores.
constexpr int kQueriesReady = 1, kScoresStored = 2;

template <int kRanks>
struct Shared {
  static constexpr int kColumns = kDim / kRanks, kOwnTiles = kTiles / kRanks;
  static constexpr int kSlots = kRanks == 2 ? 3 : 4;  // blocks of values, and of P, under way
  // Per thread of each role.
  static constexpr int kScoreRegisters = kRanks == 2 ? 112 : 144;
  static constexpr int kValueRegisters = kRanks == 2 ? 160 : 112;
  static constexpr int kUnpackRegisters = kRanks == 2 ? 120 : 128;
  struct Factors {
    float sum[kHeads];   // of the probabilities of a block of keys
    float best[kHeads];  // running maximum with it
  };
  // [512 / 64][heads][64] bf16, swizzled, the half without the block's columns first; then outputs.
  uint8_t q[kTiles][kTile];
  uint8_t k[kTiles - kOwnTiles][kTile];  // the other columns of the own keys
  uint8_t v[kSlots][kOwnTiles][kTile];   // the own columns: [columns / 64][keys][64] bf16, swizzled
  uint8_t p[kSlots][kTile];              // [heads][keys] bf16, swizzled
  Factors factors[kSlots];
  float2 best[kBlocks]
             [kHeads / 2];  // of the scores of a block of keys, heads g and g + 8 of a warp
  const uint8_t* rows[kMostKeys];
  int selected[4];  // keys that each warp of values found
  uint64_t rows_found, keys_unpacked, keys_scored;
  uint64_t best_known[kBlocks];
  uint64_t value_unpacked[kSlots], value_summed[kSlots];
  // P and its sums are here; all ranks are done with them.
  uint64_t scored[kSlots], summed[kSlots];

  // Of a quarter of the columns of the own keys, two tiles.
  __device__ __forceinline__ uint8_t* quarter(int rank, int slot, int q) {
    constexpr int kOwn = kQuarters / kRanks;
    const int others = q / kOwn > rank ? q - kOwn : q;
    return q / kOwn == rank ? v[slot][q % kOwn * kQuarterTiles] : k[others * kQuarterTiles];
  }
};

constexpr int kLaunchRegisters = 65536 / kThreads;
template <int kRegisters>
__device__ __forceinline__ void set_registers() {
  if constexpr (kRegisters > kLaunchRegisters) {
    raise_registers<kRegisters>();
  } else if constexpr (kRegisters < kLaunchRegisters) {
    lower_registers<kRegisters>();
  }
}

// The half of the columns that has those of a block.
template <int kRanks>
__device__ __forceinline__ int near_half(int rank) {
  return rank * 2 / kRanks;
}

// In a rank's ring of values its own block of keys comes first in a round of all ranks' blocks.
template <int kRanks>
__device__ __forceinline__ int value_index(int b, int rank) {
  const int owner = b % kRanks;
  return b - owner + (owner == rank ? 0 : owner < rank ? owner + 1 : owner);
}

// A lane's share of kColumns columns of a row, as stored: in 64 bytes of codes, 16 from byte 16
// quarter on. A main row has half the codes.
template <int kColumns>
struct RawColumns {
  static constexpr int kWindowPieces = kColumns / 64, kMainPieces = kColumns / 128;
  uint4 codes[kWindowPieces];
  uint32_t scales[kColumns / 128];
};

// Not as read-only data: the kernel before this one may write rows after this one has started.
template <int kColumns>
__device__ __forceinline__ void load_columns(
    const uint8_t* row, bool is_window, int column, int quarter, RawColumns<kColumns>& raw) {
  using Raw = RawColumns<kColumns>;
  if (is_window) {
    const uint8_t* codes = row + column + 16 * quarter;
#pragma unroll
    for (int i = 0; i < Raw::kWindowPieces; ++i) {
      raw.codes[i] = __ldca(reinterpret_cast<const uint4*>(codes + 64 * i));
    }
    const uint8_t* scales = row + kDim + column / 32;
#pragma unroll
    for (int i = 0; i < kColumns / 128; ++i) {
      raw.scales[i] = __ldca(reinterpret_cast<const uint32_t*>(scales + 4 * i));
    }
  } else {
    const uint8_t* codes = row + column / 2 + 16 * quarter;
    const uint8_t* scales = row + kDim / 2 + column / 16 + 2 * quarter;
#pragma unroll
    for (int i = 0; i < Raw::kMainPieces; ++i) {
      raw.codes[i] = __ldca(reinterpret_cast<const uint4*>(codes + 64 * i));
      raw.scales[i] = __ldca(reinterpret_cast<const uint16_t*>(scales + 8 * i));
    }
  }
}
// Calls put(i, offset, piece) with the 16-byte pieces of what load_columns() has loaded, unpacked,
// and their places: from the first of the two tiles of columns 128 i .. 128 i + 127 on.
template <int kColumns, class Put>
__device__ __forceinline__ void unpack_columns(
    const RawColumns<kColumns>& raw, bool is_window, int quarter, int key, const Put& put) {
  using Raw = RawColumns<kColumns>;
  // Keeps the places from being held in registers.
  const auto opaque = [](int at) {
    asm volatile("" : "+r"(at));
    return at;
  };
  if (is_window) {
    const int at = opaque(tile_place(key, 2 * quarter));
#pragma unroll
    for (int i = 0; i < Raw::kWindowPieces; ++i) {
      const uint32_t byte = raw.scales[i / 2] >> (i % 2 * 16 + quarter / 2 * 8) & 0xFFu;
      const uint32_t multiplier = byte == 255u ? 0x7FC07FC0u : ((byte + 113u) << 7) * 0x00010001u;
      const int tile = i % 2 * kTile;
      put(i / 2, tile + at, unpack_window(raw.codes[i].x, raw.codes[i].y, multiplier));
      put(i / 2, tile + (at ^ 16), unpack_window(raw.codes[i].z, raw.codes[i].w, multiplier));
    }
  } else {
    const int at = opaque(quarter / 2 * kTile + tile_place(key, quarter % 2 * 4));
#pragma unroll
    for (int i = 0; i < Raw::kMainPieces; ++i) {
      const uint32_t multipliers = main_multipliers(raw.scales[i]);
      const uint32_t low = __byte_perm(multipliers, 0, 0x1010);
      const uint32_t high = __byte_perm(multipliers, 0, 0x3232);
      put(i, at, unpack_main(raw.codes[i].x, low));
      put(i, at ^ 16, unpack_main(raw.codes[i].y, low));
      put(i, at ^ 32, unpack_main(raw.codes[i].z, high));
      put(i, at ^ 48, unpack_main(raw.codes[i].w, high));
    }
  }
}

// Keys of the token, as soon as their rows are known.
template <int kRanks>
__device__ __forceinline__ int known_keys(Shared<kRanks>& shared, int window_keys) {
  barrier_wait(&shared.rows_found, 0);
  return window_keys + shared.selected[0] + shared.selected[1] + shared.selected[2] +
         shared.selected[3];
}

// A warp has eight keys of every block: all columns of the own ones, the block's columns of the
// others. The loads of a block begin when the registers of the one before are free.
template <int kRanks>
__device__ __forceinline__ void unpack_blocks(Shared<kRanks>& shared, int window_keys, int rank) {
  using Memory = Shared<kRanks>;
  constexpr int kSlots = Memory::kSlots;
  const int warp = static_cast<int>(threadIdx.x - 2 * kGroup) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, quarter = lane / 8;
  const int key = 8 * warp + lane % 8;
  const auto other_block = [&](int round, int j) {
    return round * kRanks + (j < rank ? j : j + 1);
  };
  int keys = window_keys;
  RawColumns<kDim> own{};
  RawColumns<Memory::kColumns> others[kRanks - 1]{};
  const auto load = [&](int b, int column, auto& raw) {
    const int i = b * kKeyBlock + key;
    if (i < keys) {
      load_columns(shared.rows[i], i < window_keys, column, quarter, raw);
    } else {
      raw = {};
    }
  };
  // Waits for the place of value block `index`.
  const auto value_slot = [&](int index) {
    if (index >= kSlots) {
      barrier_wait(&shared.value_summed[index % kSlots], (index / kSlots - 1) % 2);
    }
    return index % kSlots;
  };
  // Window rows alone need not wait.
  const bool is_early = (rank + 1) * kKeyBlock <= window_keys;
  if (is_early) {
    load(rank, 0, own);
  }
  if (window_keys < kRanks * kKeyBlock) {
    keys = known_keys(shared, window_keys);
  }
  if (!is_early) {
    load(rank, 0, own);
  }
#pragma unroll
  for (int j = 0; j < kRanks - 1; ++j) {
    load(other_block(0, j), rank * Memory::kColumns, others[j]);
  }
#pragma unroll 1
  for (int round = 0; round * kRanks * kKeyBlock < keys; ++round) {
    const int b = round * kRanks + rank;
    if (b * kKeyBlock < keys) {
      const int slot = value_slot(round * kRanks);
      if (round > 0) {
        barrier_wait(&shared.keys_scored, (round - 1) % 2);
      }
      unpack_columns(own,
                     b * kKeyBlock + key < window_keys,
                     quarter,
                     key,
                     [&](int i, int offset, const uint4& piece) {
                       *reinterpret_cast<uint4*>(shared.quarter(rank, slot, i) + offset) = piece;
                     });
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.keys_unpacked);
        barrier_arrive(&shared.value_unpacked[slot]);
      }
      if (round > 0) {
        load(b + kRanks, 0, own);
      }
    }
#pragma unroll
    for (int j = 0; j < kRanks - 1; ++j) {
      const int other = other_block(round, j);
      if (other * kKeyBlock < keys) {
        const int slot = value_slot(round * kRanks + j + 1);
        unpack_columns(others[j],
                       other * kKeyBlock + key < window_keys,
                       quarter,
                       key,
                       [&](int i, int offset, const uint4& piece) {
                         *reinterpret_cast<uint4*>(shared.v[slot][2 * i] + offset) = piece;
                       });
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(&shared.value_unpacked[slot]);
        }
        if (round > 0) {
          load(other + kRanks, rank * Memory::kColumns, others[j]);
        }
      }
    }
    if (round == 0) {
      keys = known_keys(shared, window_keys);
      load(b + kRanks, 0, own);
#pragma unroll
      for (int j = 0; j < kRanks - 1; ++j) {
        load(other_block(1, j), rank * Memory::kColumns, others[j]);
      }
    }
  }
}

// s = Q K^T over two quarters of the columns, from `q`, `k0` and `k1` on.
__device__ __forceinline__ void multiply_keys(uint64_t q,
                                              uint64_t k0,
                                              uint64_t k1,
                                              float (&s)[8][4]) {
  // Keeps the sums below from being held in registers throughout a loop.
  asm volatile("" : "+l"(q), "+l"(k0), "+l"(k1));
  const auto at = [](int c) { return operand_bytes(c / 4 * kTile + c % 4 * 32); };
  constexpr int kSteps = kQuarterColumns / 16;
  wgmma_bf16<false>(s, q, k0);
#pragma unroll
  for (int c = 1; c < kSteps; ++c) {
    wgmma_bf16<true>(s, q + at(c), k0 + at(c));
  }
#pragma unroll
  for (int c = 0; c < kSteps; ++c) {
    wgmma_bf16<true>(s, q + at(kSteps + c), k1 + at(c));
  }
}

// The group of scores. Waits for the other blocks to run before it reaches them.
template <int kRanks>
__device__ __forceinline__ void score_blocks(Shared<kRanks>& shared, int keys, int rank) {
  using Memory = Shared<kRanks>;
  constexpr float kScale = kCacheScale * kLog2e * 0.04419417382415922f;  // 512^-1/2
  const Lane place;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int head = thread / 32 * 16 + place.g, pair = thread / 32 * 8 + place.g;
  const int blocks = (keys + kKeyBlock - 1) / kKeyBlock;
  const uint64_t q = wgmma_operand(shared.q);
  float running[2] = {-1e30f, -1e30f};
  const int near = near_half<kRanks>(rank), far = 1 - near;
  // Products of the half of the columns that has the own ones, and of the other half, whose place
  // is awaited: it comes first.
  float near_part[8][4], far_part[8][4];
  const auto multiply = [&](int round) {
    const int slot = round * kRanks % Memory::kSlots;
    const auto place_of = [&](int quarter) {
      return wgmma_operand(shared.quarter(rank, slot, quarter));
    };
    barrier_wait(&shared.keys_unpacked, round % 2);
    wgmma_fence();
    multiply_keys(q, place_of(2 * far), place_of(2 * far + 1), far_part);
    wgmma_commit();
    multiply_keys(q + operand_bytes(kTiles / 2 * kTile),
                  place_of(2 * near),
                  place_of(2 * near + 1),
                  near_part);
    wgmma_commit();
  };
  // Waits for the products: scores of a round's own block of keys in units of log2, and its maxima,
  // to all blocks.
  float s[8][4], mine[2];
  const auto collect = [&](int round) {
    const int b = round * kRanks + rank, count = keys - b * kKeyBlock;
    if constexpr (kRanks == 2) {
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    if (lane == 0) {
      barrier_arrive(&shared.keys_scored);
    }
    wgmma_wait<0>();
    mine[0] = mine[1] = -INFINITY;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = (near_part[n][i] + far_part[n][i]) * kScale;
      }
    }
    if (count < kKeyBlock) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = 8 * n + 2 * place.t + i % 2 < count ? s[n][i] : -INFINITY;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mine[i / 2] = fmaxf(mine[i / 2], s[n][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mine[h] = fmaxf(mine[h], __shfl_xor_sync(kAllLanes, mine[h], 1));
      mine[h] = fmaxf(mine[h], __shfl_xor_sync(kAllLanes, mine[h], 2));
    }
    // Whoever has a later block of keys awaits them.
    const int ahead = place.t + 1;
    if (ahead < kRanks && b + ahead < blocks) {
      remote_store_counted(
          &shared.best[b][pair], mine[0], mine[1], &shared.best_known[b], (rank + ahead) % kRanks);
    }
  };
  // P and its sums of 16 keys, in order, to all blocks.
  const auto finish = [&](int round) {
    const int b = round * kRanks + rank, slot = b % Memory::kSlots;
    // Those of the blocks of keys since the own one before this.
    for (int j = max(b - kRanks + 1, 0); j < b; ++j) {
      cluster_barrier_wait(&shared.best_known[j], 0);
      const float2 known = shared.best[j][pair];
      running[0] = fmaxf(running[0], known.x);
      running[1] = fmaxf(running[1], known.y);
    }
    running[0] = fmaxf(running[0], mine[0]);
    running[1] = fmaxf(running[1], mine[1]);
    if (b >= Memory::kSlots) {
      // Own blocks of keys alone wait for a slot, each time for another or every time for the same.
      constexpr int kPeriod = kRanks == Memory::kSlots ? kRanks : kRanks * Memory::kSlots;
      cluster_barrier_wait(&shared.summed[slot], (b - Memory::kSlots) / kPeriod % 2);
    }
    uint8_t* p = shared.p[slot];
    exponentiate(s, running, head, p, shared.factors[slot].sum);
    if (place.t == 0) {
      shared.factors[slot].best[head] = running[0];
      shared.factors[slot].best[head + 8] = running[1];
    }
    async_proxy_fence();
    group_barrier(kScoresStored, kGroup);
    if (thread < kRanks - 1) {
      const int to = thread < rank ? thread : thread + 1;
      remote_copy_bulk(p, kTile, &shared.scored[slot], to);
      remote_copy_bulk(
          &shared.factors[slot], sizeof(shared.factors[slot]), &shared.scored[slot], to);
    }
    __syncwarp();
    if (thread == 0) {
      barrier_arrive(&shared.scored[slot]);
    }
  };
  const int rounds = (blocks - rank + kRanks - 1) / kRanks;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    multiply(round);
    collect(round);
    finish(round);
  }
}

// acc = acc * rescale + P V over all keys for the block's columns; the sums of the probabilities
// and the maxima of all scores. The group of values.
template <int kRanks>
__device__ __forceinline__ void sum_values(Shared<kRanks>& shared,
                                           int blocks,
                                           int rank,
                                           float (&acc)[Shared<kRanks>::kColumns / 8][4],
                                           float (&sum)[2],
                                           float (&best)[2]) {
  using Memory = Shared<kRanks>;
  constexpr int kSlots = Memory::kSlots;
  const Lane place;
  const int thread = static_cast<int>(threadIdx.x) - kGroup, lane = thread % 32;
  const int head = thread / 32 * 16 + place.g;
  float rescale[2];
  // Waits for the scores of a block of keys.
  const auto receive = [&](int b) {
    const int slot = b % kSlots;
    if (b % kRanks != rank && thread == 0) {
      barrier_arrive_expect(&shared.scored[slot], kTile + sizeof(shared.factors[slot]));
    }
    barrier_wait(&shared.scored[slot], b / kSlots % 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = shared.factors[slot].best[head + 8 * h];
      rescale[h] = exp2_flushed(best[h] - next);
      best[h] = next;
      sum[h] = fmaf(sum[h], rescale[h], shared.factors[slot].sum[head + 8 * h]);
    }
  };
  const auto multiply = [&](int b) {
    const uint64_t p = wgmma_operand(shared.p[b % kSlots]);
    const int index = value_index<kRanks>(b, rank);
    barrier_wait(&shared.value_unpacked[index % kSlots], index / kSlots % 2);
    const uint64_t v = wgmma_operand_transposed(shared.v[index % kSlots], kTile);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeyBlock / 16; ++c) {
#pragma unroll
      for (int i = 0; i < Memory::kColumns / kProductColumns; ++i) {
        wgmma_bf16_transposed(
            reinterpret_cast<float (&)[kProductColumns / 8][4]>(acc[i * kProductColumns / 8]),
            p + operand_bytes(c * 32),
            v + operand_bytes(c * 2048 + i * (kProductColumns / 64) * kTile));
      }
    }
    wgmma_commit();
  };
  if (blocks == 0) {
    return;
  }
  receive(0);
#pragma unroll 1
  for (int b = 0; b < blocks - 1; ++b) {
    multiply(b);
    receive(b + 1);
    wgmma_wait<0>();
    if (lane == 0) {
      barrier_arrive(&shared.value_summed[value_index<kRanks>(b, rank) % kSlots]);
      if (b + kSlots < blocks) {
        remote_arrive(&shared.summed[b % kSlots], (b + kSlots) % kRanks);
      }
    }
    rescale_sums(acc, rescale[0], rescale[1]);
  }
  multiply(blocks - 1);
  wgmma_wait<0>();
}

// Rows of the selected keys, and their number. The group of values. `entry` is what find_entries()
// has loaded.
constexpr int kEntries = (kMostKeys + kGroup - 1) / kGroup;  // of a thread
__device__ __forceinline__ void find_entries(const AttendProblem& a,
                                             int64_t token,
                                             int (&entry)[kEntries]) {
  const int thread = static_cast<int>(threadIdx.x) % kGroup, width = static_cast<int>(a.width);
  const int32_t* selected = a.selected + token * width;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const int at = thread + i * kGroup;
    entry[i] = at < width ? selected[at] : -1;
  }
}
template <int kRanks>
__device__ __forceinline__ void find_selected(Shared<kRanks>& shared,
                                              const Places& places,
                                              const int (&entry)[kEntries]) {
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    if (entry[i] >= 0) {
      shared.rows[places.window_keys + thread + i * kGroup] =
          places.main_row(static_cast<uint32_t>(entry[i]));
      ++count;
    }
  }
  count = __reduce_add_sync(kAllLanes, count);
  __syncwarp();
  if (thread % 32 == 0) {
    shared.selected[thread / 32] = count;
    barrier_arrive(&shared.rows_found);
  }
  __syncwarp();
}

// Q, rotated and rounded, in the column order of the unpacked rows. The groups of scores and
// values: to registers, and from them to shared memory.
constexpr int kPieces = kDim / 8, kRowStep = 2 * kGroup / kPieces, kQueryRows = kHeads / kRowStep;
static_assert(8 % kRowStep == 0);
__device__ __forceinline__ void load_queries(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             uint4 (&q)[kQueryRows]) {
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const int first = head0 + static_cast<int>(threadIdx.x) / kPieces;
  const auto* from = static_cast<const Bf16*>(a.q) + (token * a.heads + first) * kDim + 8 * piece;
#pragma unroll
  for (int i = 0; i < kQueryRows; ++i) {
    q[i] = first + i * kRowStep < a.heads
               ? *reinterpret_cast<const uint4*>(from + i * kRowStep * kDim)
               : make_uint4(0, 0, 0, 0);
  }
}
template <int kRanks>
__device__ __forceinline__ void store_queries(Shared<kRanks>& shared,
                                              int rank,
                                              const Turn& turn,
                                              const uint4 (&q)[kQueryRows]) {
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const int tile = (piece / 8 + (near_half<kRanks>(rank) == 0 ? kTiles / 2 : 0)) % kTiles;
#pragma unroll
  for (int i = 0; i < kQueryRows; ++i) {
    // Rows that are kRowStep i apart have their pieces swizzled by that much more.
    store_piece_at(shared.q[tile] + i * kRowStep * 128,
                   tile_place(first, piece % 8),
                   i * kRowStep % 8,
                   turned_piece(q[i], turn));
  }
  async_proxy_fence();
}

template <int kRanks>
__global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 1)
    attend_split_kernel(const __grid_constant__ AttendProblem a) {
  using Memory = Shared<kRanks>;
  auto& shared = *reinterpret_cast<Memory*>(dynamic_shared());
  allow_next_kernel();
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&shared.rows_found, 4);
    barrier_init(&shared.keys_unpacked, kUnpackers);
    barrier_init(&shared.keys_scored, 4);
    for (int i = 0; i < Memory::kSlots; ++i) {
      barrier_init(&shared.value_unpacked[i], kUnpackers);
      barrier_init(&shared.value_summed[i], 4);
      barrier_init(&shared.scored[i], 1);
      barrier_init(&shared.summed[i], 4 * kRanks);
    }
    for (int b = 0; b < kBlocks; ++b) {
      barrier_init(&shared.best_known[b], 1);
    }
    cluster_barriers_fence();
    for (int b = 0; b < kBlocks; ++b) {
      barrier_arrive_expect(&shared.best_known[b], sizeof(shared.best[b]));
    }
  }
  __syncwarp();
  cluster_arrive();  // the barriers stand

  const int thread = static_cast<int>(threadIdx.x), group = thread / kGroup;
  const int head_groups = (a.heads + kHeads - 1) / kHeads;
  const int item = static_cast<int>(blockIdx.x) / kRanks;
  const int64_t token = item / head_groups;
  const int head0 = item % head_groups * kHeads;

  const Places places(a, token);
  const int window_keys = places.window_keys;
  for (int key = thread; key < window_keys; key += kThreads) {
    shared.rows[key] = places.window_row(key);
  }
  wait_for_previous_kernels();
  __syncthreads();

  if (group == 0) {
    set_registers<Memory::kScoreRegisters>();
    uint4 q[kQueryRows];
    load_queries(a, token, head0, q);
    store_queries(shared, rank, Turn(a, token, thread % kPieces), q);
    group_barrier(kQueriesReady, 2 * kGroup);
    cluster_wait();
    score_blocks<kRanks>(shared, known_keys(shared, window_keys), rank);
    __syncwarp();
    cluster_arrive();
  } else if (group == 1) {
    set_registers<Memory::kValueRegisters>();
    const int warp = thread / 32 - 4, lane = thread % 32, head = warp * 16 + lane / 4;
    {
      int entry[kEntries];
      uint4 q[kQueryRows];
      find_entries(a, token, entry);
      load_queries(a, token, head0, q);
      find_selected(shared, places, entry);
      store_queries(shared, rank, Turn(a, token, thread % kPieces), q);
    }
    float sink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = head0 + head + 8 * h;
      sink[h] = row < a.heads ? a.sink[row] : 0.0f;
    }
    group_barrier(kQueriesReady, 2 * kGroup);
    const int keys = known_keys(shared, window_keys);
    cluster_wait();
    float acc[Memory::kColumns / 8][4] = {};
    float sum[2] = {0, 0}, best[2] = {-1e30f, -1e30f};
    sum_values<kRanks>(shared, (keys + kKeyBlock - 1) / kKeyBlock, rank, acc, sum, best);
    cluster_arrive();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float denominator = sum[h] + exp2f(fmaf(sink[h], kLog2e, -best[h]));
      // No key at all: the sums are zero, and so is the row.
      sum[h] = keys > 0 ? kCacheScale / denominator : 0.0f;
    }
    store_output<Memory::kColumns>(a,
                                   token,
                                   head0 + warp * 16,
                                   rank * (Memory::kColumns / 8),
                                   acc,
                                   sum,
                                   &shared.q[0][0] + warp * kOutputBuffer);
  } else {
    set_registers<Memory::kUnpackRegisters>();
    unpack_blocks<kRanks>(shared, window_keys, rank);
    __syncwarp();
    cluster_wait();
    cluster_arrive();
  }
  cluster_wait();
}

template <int kRanks>
Status run(const OpContext& ctx, const AttendProblem& a) {
  static_assert(sizeof(Shared<kRanks>) <= kSharedCapacity);
  return launch(ctx,
                "attend",
                attend_split_kernel<kRanks>,
                dim3(extent(a.tokens * ceil_div(a.heads, kHeads) * kRanks)),
                kThreads,
                static_cast<int64_t>(sizeof(Shared<kRanks>)),
                a);
}

}  // namespace
}  // namespace attention

bool attend_split_fits(const AttendProblem& a) {
  return attention::most_keys(a) <= attention::kMostKeys &&
         a.tokens * ceil_div(a.heads, attention::kHeads) <= attention::kPairs;
}

Status attend_split(const OpContext& ctx, const AttendProblem& a) {
  return a.tokens * ceil_div(a.heads, attention::kHeads) <= attention::kFours
             ? attention::run<4>(ctx, a)
             : attention::run<2>(ctx, a);
}

}  // namespace cachalot::ops::cuda
