// What the wgmma attention kernel (attend_mma.cu) has in shared memory, and the role that fills it:
// cache rows to BF16 keys.
#pragma once

#include "ops/cuda/attend.cuh"
#include "ops/cuda/device/cluster.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/warpgroup.cuh"
#include "ops/cuda/device/weights.cuh"

namespace cachalot::ops::cuda::attention {

constexpr int kDim = 512;
constexpr int kHeads = 64;              // rows of a product
constexpr int kGroup = 128;             // threads of a warpgroup
constexpr int kOthers = 3 * kGroup;     // threads of scores and of two groups of values
constexpr int kTile = kKeyBlock * 128;  // bytes of 64 rows of 64 BF16
constexpr int kTiles = kDim / 64;       // of a row
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kCacheScale = 128.0f;  // both row kinds unpack to 2^-7 of their value
static_assert(kKeyBlock == 64 && kHeads == 64);

// Barriers of kOthers threads, and of the group of scores.
constexpr int kQueriesReady = 1, kQueriesRenewed = 2, kScoresStored = 3;

// Where the rows of a token's keys lie.
struct RowPlaces {
  const uint8_t* ring;
  const uint8_t* fresh;
  const int32_t* selected;  // of the token, moved so that an index of a key is one of it
  uint8_t* const* pages;
  uint32_t page_rows, row_bytes;
  uint32_t window, window_bytes;
  int first, start;  // positions: of the first window key, of the step
};

// Columns of the keys that other blocks of the cluster score.
template <int kBlocks>
struct OtherValues {
  static constexpr int kStages = kBlocks / 2;
  uint8_t v[kStages][kTiles / kBlocks][kTile];  // [columns / 64][keys][64] bf16, swizzled
  uint64_t unpacked[kStages], consumed[kStages];
  float best[2][kBlocks][kHeads];  // of one block of keys
  uint64_t best_known, scores_freed;
};
template <>
struct OtherValues<1> {};

template <int kBlocks>
struct Shared {
  static constexpr int kUnpackers = kBlocks == 1 ? 4 : 8;  // warps
  static constexpr int kThreads = kOthers + kUnpackers * 32;
  static constexpr int kKeyStages = kBlocks == 1 ? 2 : 1;
  static constexpr int kScoreStages = kBlocks == 1 ? 2 : kBlocks;
  uint8_t q[kTiles][kTile];              // [512 / 64][heads][64] bf16, swizzled
  uint8_t k[kKeyStages][kTiles][kTile];  // [512 / 64][keys][64] bf16, swizzled
  uint8_t p[kScoreStages][kTile];        // [heads][keys] bf16, swizzled
  OtherValues<kBlocks> other;
  RowPlaces places[kUnpackers];                 // every warp's own copy
  alignas(16) float sum[kScoreStages][kHeads];  // 16: bulk copies
  float rescale[2][kBlocks][kHeads];
  // Of the token that a block works on and of the next one.
  int keys[2];
  float best[2][kHeads];
  uint64_t announced[2], summed[2], finished[2];
  uint64_t unpacked[kKeyStages], consumed[kKeyStages], scored[kScoreStages];
};

// Block of keys that a block unpacks in step `step`: of every round of kBlocks blocks of keys first
// its own, whose scores it computes, then the others in ascending order.
template <int kBlocks>
__device__ __forceinline__ int key_block(int step, int rank) {
  const int other = step % kBlocks - 1;
  return step / kBlocks * kBlocks + (other < 0 ? rank : other < rank ? other : other + 1);
}

// Byte of 16-byte piece `piece` of row `row` in a tile.
__device__ __forceinline__ int tile_place(int row, int piece) {
  return row * 128 + (piece ^ row % 8) * 16;
}

// 2^x; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Unpacking
// -------------------------------------------------------------------------------------------

// BF16 pairs (i, i + 4) of eight E4M3 codes; the multiplier is 2^113 times the scale.
__device__ __forceinline__ uint4 unpack_window(uint32_t low, uint32_t high, uint32_t multiplier) {
  const auto pair = [&](uint32_t selector) {
    const uint32_t w = __byte_perm(low, high, selector);  // the codes in bytes 1 and 3
    return mul_bf16x2(merge_bits(w, 0x80008000u, (w >> 4) & 0x07F007F0u), multiplier);
  };
  return make_uint4(pair(0x4404), pair(0x5515), pair(0x6626), pair(0x7737));
}
// The same of eight E2M1 codes; the multiplier is 2^119 times the scale.
__device__ __forceinline__ uint4 unpack_main(uint32_t codes, uint32_t multiplier) {
  return make_uint4(mul_bf16x2(Fp4Weights::nibbles<0>(codes), multiplier),
                    mul_bf16x2(Fp4Weights::nibbles<1>(codes), multiplier),
                    mul_bf16x2(Fp4Weights::nibbles<2>(codes), multiplier),
                    mul_bf16x2(Fp4Weights::nibbles<3>(codes), multiplier));
}
// Multipliers of two E4M3 scales. Their magnitude bits, placed, are the value times 2^-120.
__device__ __forceinline__ uint32_t main_multipliers(uint32_t scales) {
  constexpr uint32_t k2To120 = 0x7B807B80u, k2To119 = 0x7B007B00u;
  const uint32_t spread = __byte_perm(scales, 0, 0x4140);
  const uint32_t magnitude = spread & 0x007F007Fu;
  const uint32_t placed = merge_bits(spread << 8, 0x80008000u, magnitude << 4);
  const uint32_t nan = ((magnitude + 0x00010001u) & 0x00800080u) / 0x80u * 0x7FC0u;
  return mul_bf16x2(mul_bf16x2(placed, k2To120), k2To119) | nan;
}

// The keys of a token, counted by one warp.
__device__ __forceinline__ QueryKeys count_keys(const AttendProblem& a, int64_t token) {
  QueryKeys keys = window_part(a, token);
  if (a.main != nullptr) {
    // Ids are ascending with -1 behind them.
    int selected = 0;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x) % 32; i < a.width; i += 32) {
      selected += a.selected[token * a.width + i] >= 0 ? 1 : 0;
    }
    keys.keys += __reduce_add_sync(kAllLanes, selected);
  }
  return keys;
}

__device__ __forceinline__ void find_places(const AttendProblem& a,
                                            int64_t token,
                                            const QueryKeys& keys,
                                            RowPlaces& places) {
  const int32_t s = a.sequence[token];
  places.window = static_cast<uint32_t>(a.window);
  places.window_bytes = static_cast<uint32_t>(a.window_row_bytes);
  places.first = static_cast<int>(keys.first_position);
  places.start = a.start[s];
  places.ring = a.rings[s];
  places.fresh = a.fresh + a.row_begin[s] * a.window_row_bytes;
  if (a.main != nullptr) {
    places.selected = a.selected + token * a.width - keys.window_keys;
    places.pages = a.main[s].pages;
    places.page_rows = static_cast<uint32_t>(a.main[s].page_rows);
    places.row_bytes = static_cast<uint32_t>(a.main[s].row_bytes);
  }
}

// The rows of one lane of an unpacking warp, kParts per step and eight keys apart. A row is found
// in two loads, its entry and its page, and each begins one row ahead of its use.
template <int kBlocks, int kParts>
class RowStream {
 public:
  __device__ __forceinline__
  RowStream(const RowPlaces& places, int window_keys, int keys, int rank, int row)
      : places_(places), window_keys_(window_keys), keys_(keys), rank_(rank), in_block_(row) {
    find_entry();
    find_page();
    find_entry();
  }

  // The next row; null past the last key.
  __device__ __forceinline__ const uint8_t* next(bool& is_window) {
    const uint8_t* row = page_ == nullptr ? nullptr : page_ + offset_;
    is_window = is_window_;
    find_page();
    find_entry();
    return row;
  }

 private:
  __device__ __forceinline__ void find_entry() {
    key_ = key_block<kBlocks>(row_ / kParts, rank_) * kKeyBlock + row_ % kParts * 8 + in_block_;
    ++row_;
    if (key_ >= window_keys_ && key_ < keys_) {
      entry_ = static_cast<uint32_t>(places_.selected[key_]);
    }
  }
  __device__ __forceinline__ void find_page() {
    page_ = nullptr;
    is_window_ = key_ < window_keys_;
    if (is_window_) {
      const int position = places_.first + key_;
      const bool fresh = position >= places_.start;
      const uint32_t row = fresh ? static_cast<uint32_t>(position - places_.start)
                                 : static_cast<uint32_t>(position) % places_.window;
      page_ = fresh ? places_.fresh : places_.ring;
      offset_ = row * places_.window_bytes;
    } else if (key_ < keys_) {
      const uint32_t page = entry_ / places_.page_rows;
      page_ = places_.pages[page];
      offset_ = (entry_ - page * places_.page_rows) * places_.row_bytes;
    }
  }

  const RowPlaces& places_;
  int window_keys_, keys_, rank_, in_block_;
  int row_ = 0;
  int key_ = 0;  // of entry_
  uint32_t entry_ = 0;
  const uint8_t* page_ = nullptr;  // of the row of next()
  uint32_t offset_ = 0;
  bool is_window_ = false;
};

// What a lane unpacks of a row in one go: up to four items, 16 bytes of codes each. The quarters of
// a warp hold 8 keys each, lane % 8; item i of a window row is columns 64 i + 16 quarter .. + 15,
// of a main row columns 128 i + 32 quarter .. + 31.
struct RowPass {
  const uint8_t* row;
  bool is_window;
  bool is_absent;  // past the last key: `row` is any, its scales count as zeros
  int first;       // item
  int count;       // of items
  int tile;        // that the first item's columns go to
};
struct RawItem {
  uint4 codes;
  uint32_t scales;
};

// Not as read-only data: the kernel before this one may write rows after this one has started.
__device__ __forceinline__ RawItem load_item(const RowPass& pass, int i, int quarter) {
  const int at = pass.first + i;
  return {__ldca(reinterpret_cast<const uint4*>(pass.row + 64 * at + 16 * quarter)),
          __ldca(reinterpret_cast<const uint16_t*>(
              pass.row + (pass.is_window ? kDim + 2 * at : kDim / 2 + 8 * at + 2 * quarter)))};
}

// Store a 16-byte piece at piece i behind `at`, whose swizzle is that of `at` with the bits of i
// flipped. Eight lanes with the same columns of eight keys store at once, to different banks.
__device__ __forceinline__ void store_piece_at(uint8_t* to, int at, int i, const uint4& v) {
  *reinterpret_cast<uint4*>(to + (at ^ 16 * i)) = v;
}
__device__ __forceinline__ void unpack_window_item(
    const RawItem& item, const RowPass& pass, int i, int key, int quarter, uint8_t* to) {
  const uint32_t byte = item.scales >> (quarter / 2 * 8) & 0xFFu;
  const uint32_t multiplier = byte == 255u ? 0x7FC07FC0u : ((byte + 113u) << 7) * 0x00010001u;
  const int at = (pass.tile + i) * kTile + tile_place(key, 2 * quarter);
  store_piece_at(to, at, 0, unpack_window(item.codes.x, item.codes.y, multiplier));
  store_piece_at(to, at, 1, unpack_window(item.codes.z, item.codes.w, multiplier));
}
__device__ __forceinline__ void unpack_main_item(
    const RawItem& item, const RowPass& pass, int i, int key, int quarter, uint8_t* to) {
  const uint32_t multipliers = main_multipliers(pass.is_absent ? 0u : item.scales);
  const uint32_t low = __byte_perm(multipliers, 0, 0x1010);
  const uint32_t high = __byte_perm(multipliers, 0, 0x3232);
  const int at = (pass.tile + 2 * i + quarter / 2) * kTile + tile_place(key, quarter % 2 * 4);
  store_piece_at(to, at, 0, unpack_main(item.codes.x, low));
  store_piece_at(to, at, 1, unpack_main(item.codes.y, low));
  store_piece_at(to, at, 2, unpack_main(item.codes.z, high));
  store_piece_at(to, at, 3, unpack_main(item.codes.w, high));
}

// Unpacks what this block multiplies. A warp has eight or sixteen keys of every block of keys. The
// loads of a pass begin one pass ahead.
template <int kBlocks>
__device__ __forceinline__ void unpack_blocks(const QueryKeys& keys,
                                              const RowPlaces& places,
                                              int rank,
                                              int& own_blocks,
                                              Shared<kBlocks>& shared) {
  constexpr int kKeyStages = Shared<kBlocks>::kKeyStages;
  constexpr int kParts = kKeyBlock / 8 / Shared<kBlocks>::kUnpackers;
  const int warp = static_cast<int>(threadIdx.x - kOthers) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, quarter = lane / 8;
  const int key = 8 * kParts * warp + lane % 8;
  const int blocks = (keys.keys + kKeyBlock - 1) / kKeyBlock;
  const int steps = (blocks + kBlocks - 1) / kBlocks * kBlocks;
  RowStream<kBlocks, kParts> rows(places, keys.window_keys, keys.keys, rank, key);
  RowPass next{};
  bool second = false;  // `next` is the rest of a row of this block's own keys
  bool again = false;   // and has a rest itself
  const auto prepare = [&](int part) {
    if (!second) {
      next.row = rows.next(next.is_window);
      next.is_absent = next.row == nullptr;
      next.row = next.is_absent ? places.fresh : next.row;
    }
    const int step = part / kParts;
    const bool exists = key_block<kBlocks>(step, rank) < blocks;
    if (kBlocks == 1 || step % kBlocks == 0) {
      next.first = next.is_window && second ? 4 : 0;
      next.count = exists && (next.is_window || !second) ? 4 : 0;
      next.tile = next.first;
      again = !second && __any_sync(kAllLanes, next.is_window);
    } else {
      next.count = exists ? (next.is_window ? 8 : 4) / kBlocks : 0;
      next.first = rank * next.count;
      next.tile = 0;
      again = false;
    }
  };
  RawItem items[4];
  prepare(0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < next.count) {
      items[i] = load_item(next, i, quarter);
    }
  }
  [[maybe_unused]] int others = 0;  // blocks of keys before this one that are not ours
  uint8_t* to = nullptr;
  uint64_t* done = nullptr;
#pragma unroll 1
  for (int part = 0; part < steps * kParts;) {
    const int step = part / kParts, block = key_block<kBlocks>(step, rank);
    if (part % kParts == 0 && !second) {
      if (kBlocks == 1 || step % kBlocks == 0) {
        const int stage = own_blocks % kKeyStages;
        to = shared.k[stage][0];
        done = &shared.unpacked[stage];
        if (own_blocks >= kKeyStages) {
          barrier_wait(&shared.consumed[stage], (own_blocks / kKeyStages - 1) % 2);
        }
        ++own_blocks;
      } else if constexpr (kBlocks > 1) {
        constexpr int kStages = OtherValues<kBlocks>::kStages;
        const int stage = others % kStages;
        to = shared.other.v[stage][0];
        done = &shared.other.unpacked[stage];
        if (block < blocks && others >= kStages) {
          barrier_wait(&shared.other.consumed[stage], (others / kStages - 1) % 2);
        }
        ++others;
      }
    }
    const RowPass pass = next;
    const int row = key + part % kParts * 8;
    second = again;
    part += second ? 0 : 1;
    prepare(part);
    if (__any_sync(kAllLanes, pass.is_window)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < pass.count) {
          if (pass.is_window) {
            unpack_window_item(items[i], pass, i, row, quarter, to);
          } else {
            unpack_main_item(items[i], pass, i, row, quarter, to);
          }
        }
        if (kBlocks == 1 || i < next.count) {
          items[i] = load_item(next, i, quarter);
        }
      }
    } else if (pass.count == 4) {
      // Without branches, so that the items' instructions mix.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unpack_main_item(items[i], pass, i, row, quarter, to);
        if (kBlocks == 1 || i < next.count) {
          items[i] = load_item(next, i, quarter);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < pass.count) {
          unpack_main_item(items[i], pass, i, row, quarter, to);
        }
        if (i < next.count) {
          items[i] = load_item(next, i, quarter);
        }
      }
    }
    if (part % kParts == 0 && !second && block < blocks) {
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(done);
      }
    }
  }
}

}  // namespace cachalot::ops::cuda::attention
