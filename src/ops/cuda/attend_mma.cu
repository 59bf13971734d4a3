// Attention over the window and the selected entries on tensor cores: BF16, 512-dim heads.
//
//   o_h = sum_j e^(s_j - m) v_j / (sum_j e^(s_j - m) + e^(sink_h - m)),  s_j = (RoPE(q_h) . k_j)
//   512^-1/2
//
// in   q [T, H, 512] bf16, window rows (528 B: E4M3, E8M0 per 32) and main rows (288 B: E2M1, E4M3
//      per 16), 16-byte aligned, read as they lie in the caches; selected [T, k]; sink [H] f32
// out  o [T, H, 512] bf16, rotated back
//
// A block takes all 64 heads (the M of wgmma) of a token; heads past H are zeros. Its warpgroups
// have roles and run by themselves through blocks of 64 keys, in the model's order, and from token
// to token:
//
//   unpacking  rows -> registers, one pass (8 keys a warp) ahead -> K as BF16 [512 / 64][64][64],
//              swizzled, for both products: B with K inside a row, and B whose rows are keys
//   scores     S = Q K^T (two sums of 256 columns) -> running maximum -> P rounded to BF16
//   values, 2  O[64][256 columns] = O * rescale + P V, O in registers; at the end divided, rotated
//              back and stored
//
//   unpacking  | 0 | 1 | . . | 2       | 3       | ..      shared, per key block:
//   scores         | 0   | 1   | . . . . | 2   | 3 |         K 2 x 64 KiB, P 2 x 8 KiB; Q 64 KiB:
//   values             . | 0     | 1     | . . . . | 2       210 KiB in all
//
// Few tokens: a cluster of two or four blocks per token. Each scores every second or fourth block
// of keys and sums the values of its 256 or 128 columns over all keys; for that it unpacks its
// columns of the other blocks' keys, too. The blocks tell each other the maxima of their keys, then
// P and its sums, through distributed shared memory. Every sum has the same order as in one block,
// so a row's result does not depend on the number of tokens.
//
// Codes become BF16 by bit placement and one multiplication (kernels of weights.cuh): both kinds of
// rows come out 2^-7 too small, which the score and output factors put back. Columns are kept in
// the order (0, 4, 1, 5, 2, 6, 3, 7) inside groups of eight, which unpacking nibbles yields; Q is
// stored in the same order and the output is put back.
//
// Bound: 4 * 64 * 512 * keys FLOP per token, 32 cycles of the tensor cores per key; the bytes (215
// KB per token at 640 keys) take half of that. Shared memory has 36 cycles of work per key: K is
// written once and read twice, Q read once per block of keys.
// Measured on an H200 with 128 + 512 keys: 36 us for 1 to 16 tokens, 44 for 64, 54 for 128, 97 for
// 256, 1164 for a chunk of 4096 (295 TFLOP/s, 37 % of the BF16 rate). No unit is busy: a profile of
// the form with one token per block (1180 us) had 43 % of the issue slots, 55 % of L1 and 32 % of
// L2. The time is that of the roles one after the other.
#include <algorithm>

#include "ops/cuda/attend.cuh"
#include "ops/cuda/device/cluster.cuh"
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/device/warpgroup.cuh"
#include "ops/cuda/device/weights.cuh"
#include "ops/cuda/kernels.h"

namespace cachalot::ops::cuda {
namespace {

constexpr int kDim = 512;
constexpr int64_t kMultiprocessors = 132;  // of an H200
constexpr int kHeads = 64;                 // rows of a product
constexpr int kGroup = 128;                // threads of a warpgroup
constexpr int kOthers = 3 * kGroup;        // threads of scores and of two groups of values
constexpr int kTile = kKeyBlock * 128;     // bytes of 64 rows of 64 BF16
constexpr int kTiles = kDim / 64;          // of a row
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

// Scores and probabilities
// ----------------------------------------------------------------------------------------

// s = Q K^T over columns 256 half .. 256 half + 255.
__device__ __forceinline__ void multiply_keys(uint64_t q, uint64_t k, int half, float (&s)[8][4]) {
  const auto at = [&](int c) { return operand_bytes((4 * half + c / 4) * kTile + c % 4 * 32); };
  wgmma_bf16<false>(s, q + at(0), k + at(0));
#pragma unroll
  for (int c = 1; c < 16; ++c) {
    wgmma_bf16<true>(s, q + at(c), k + at(c));
  }
}

// Scores of a block of keys, in units of log2, minus infinity past `count`; maxima of a thread's
// heads.
__device__ __forceinline__ void score_keys(
    uint64_t q, uint64_t k, int count, float (&s)[8][4], float (&best)[2]) {
  constexpr float kScale = kCacheScale * kLog2e * 0.04419417382415922f;  // 512^-1/2
  const Lane place;
  float upper[8][4];
  wgmma_fence();
  multiply_keys(q, k, 0, s);
  multiply_keys(q, k, 1, upper);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * n + 2 * place.t + i % 2;
      s[n][i] = key < count ? (s[n][i] + upper[n][i]) * kScale : -INFINITY;
      best[i / 2] = fmaxf(best[i / 2], s[n][i]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    best[h] = fmaxf(best[h], __shfl_xor_sync(kAllLanes, best[h], 1));
    best[h] = fmaxf(best[h], __shfl_xor_sync(kAllLanes, best[h], 2));
  }
}

// Probabilities of heads `head` and `head` + 8 and their sums.
__device__ __forceinline__ void exponentiate(
    const float (&s)[8][4], const float (&best)[2], int head, uint8_t* p, float* sum) {
  const Lane place;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float p0 = exp2_flushed(s[n][2 * h] - best[h]);
      const float p1 = exp2_flushed(s[n][2 * h + 1] - best[h]);
      total += p0;
      total += p1;
      *reinterpret_cast<uint32_t*>(p + tile_place(head + 8 * h, n) + 4 * place.t) =
          bf16_pair(p0, p1);
    }
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (place.t == 0) {
      sum[head + 8 * h] = total;
    }
  }
}

// A warp has 16 heads; a thread keeps the running maximum of heads g and g + 8 of them.
template <int kBlocks>
__device__ __forceinline__ void score_blocks(
    int keys, int rank, int& own_blocks, Shared<kBlocks>& shared, float (&best)[2]) {
  constexpr int kKeyStages = Shared<kBlocks>::kKeyStages;
  const Lane place;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32 * 16 + place.g;
  const int blocks = (keys + kKeyBlock - 1) / kKeyBlock;
  const uint64_t q = wgmma_operand(shared.q);
#pragma unroll 1
  for (int round = 0; round * kBlocks < blocks; ++round, ++own_blocks) {
    const int own = round * kBlocks + rank;
    [[maybe_unused]] const int stage = own_blocks % kKeyStages;
    float s[8][4];
    if constexpr (kBlocks == 1) {
      const float before[2] = {best[0], best[1]};
      barrier_wait(&shared.unpacked[stage], own_blocks / kKeyStages % 2);
      score_keys(q, wgmma_operand(shared.k[stage]), keys - own * kKeyBlock, s, best);
      exponentiate(s, best, head, shared.p[stage], shared.sum[stage]);
      if (place.t == 0) {
        shared.rescale[stage][0][head] = exp2_flushed(before[0] - best[0]);
        shared.rescale[stage][0][head + 8] = exp2_flushed(before[1] - best[1]);
      }
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.scored[stage]);
      }
    } else {
      auto& other = shared.other;
      float mine[2] = {-1e30f, -1e30f};
      if (own < blocks) {
        barrier_wait(&shared.unpacked[0], round % 2);
        score_keys(q, wgmma_operand(shared.k[0]), keys - own * kKeyBlock, s, mine);
      }
      // All blocks learn the maxima of the round.
      if (place.t < kBlocks) {
        const uint32_t to = remote_address(&other.best[round % 2][rank][head], place.t);
        remote_store(to, mine[0]);
        remote_store(to + 8 * sizeof(float), mine[1]);
      }
      __syncwarp();
      if (lane < kBlocks) {
        remote_arrive(&other.best_known, lane);
      }
      cluster_barrier_wait(&other.best_known, round % 2);
      if (round > 0) {
        cluster_barrier_wait(&other.scores_freed, (round - 1) % 2);
      }
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (round * kBlocks + j < blocks) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float next = fmaxf(best[h], other.best[round % 2][j][head + 8 * h]);
            if (place.t == 0) {
              shared.rescale[round % 2][j][head + 8 * h] = exp2_flushed(best[h] - next);
            }
            best[h] = next;
            mine[h] = j == rank ? next : mine[h];
          }
        }
      }
      if (own < blocks) {
        exponentiate(s, mine, head, shared.p[rank], shared.sum[rank]);
      }
      async_proxy_fence();
      group_barrier(kScoresStored, kGroup);
      if (threadIdx.x < kBlocks && round * kBlocks + static_cast<int>(threadIdx.x) < blocks) {
        const int j = static_cast<int>(threadIdx.x);
        if (j == rank) {
          barrier_arrive(&shared.scored[j]);
        } else {
          barrier_arrive_expect(&shared.scored[j], kTile + kHeads * sizeof(float));
        }
      }
      if (threadIdx.x < kBlocks && static_cast<int>(threadIdx.x) != rank && own < blocks) {
        const int to = static_cast<int>(threadIdx.x);
        remote_copy_bulk(shared.p[rank], kTile, &shared.scored[rank], to);
        remote_copy_bulk(shared.sum[rank], kHeads * sizeof(float), &shared.scored[rank], to);
      }
    }
  }
}

// Values
// -------------------------------------------------------------------------------------------------

// acc[i] = acc[i] * rescale + P V over all keys, for a half of the block's columns; the sums of the
// probabilities.
template <int kBlocks, int kParts, int kColumnTiles>
__device__ __forceinline__ void sum_values(int keys,
                                           int rank,
                                           int half,
                                           int& blocks,
                                           Shared<kBlocks>& shared,
                                           float (&acc)[kParts][kColumnTiles][4],
                                           float (&sum)[2]) {
  constexpr int kScoreStages = Shared<kBlocks>::kScoreStages;
  constexpr int kKeyStages = Shared<kBlocks>::kKeyStages;
  constexpr int kOwnTiles = kTiles / kBlocks;
  const Lane place;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) % kGroup / 32 * 16 + place.g;
  [[maybe_unused]] int others = 0;
#pragma unroll 1
  for (int left = keys; left > 0; left -= kKeyBlock) {
    const int b = blocks++;
    const int round = b / kBlocks, j = b % kBlocks, p_stage = b % kScoreStages;
    const uint8_t* values = shared.k[round % kKeyStages][rank * kOwnTiles];
    uint64_t* consumed = &shared.consumed[round % kKeyStages];
    if (kBlocks == 1 || j == rank) {
      barrier_wait(&shared.unpacked[round % kKeyStages], round / kKeyStages % 2);
    }
    if constexpr (kBlocks > 1) {
      if (j != rank) {
        constexpr int kStages = OtherValues<kBlocks>::kStages;
        const int stage = others % kStages;
        values = shared.other.v[stage][0];
        consumed = &shared.other.consumed[stage];
        barrier_wait(&shared.other.unpacked[stage], others / kStages % 2);
        ++others;
      }
    }
    barrier_wait(&shared.scored[p_stage], b / kScoreStages % 2);
    const float r0 = shared.rescale[round % 2][j][head];
    const float r1 = shared.rescale[round % 2][j][head + 8];
    sum[0] = fmaf(sum[0], r0, shared.sum[p_stage][head]);
    sum[1] = fmaf(sum[1], r1, shared.sum[p_stage][head + 8]);
    // Most blocks raise no maximum.
    if (__any_sync(kAllLanes, r0 != 1.0f || r1 != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          acc[i][n][0] *= r0;
          acc[i][n][1] *= r0;
          acc[i][n][2] *= r1;
          acc[i][n][3] *= r1;
        }
      }
    }
    const uint64_t p = wgmma_operand(shared.p[p_stage]);
    const uint64_t v = wgmma_operand_transposed(values + half * (kOwnTiles / 2) * kTile, kTile);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeyBlock / 16; ++c) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        wgmma_bf16_transposed(acc[i],
                              p + operand_bytes(c * 32),
                              v + operand_bytes(c * 2048 + i * (kColumnTiles / 8) * kTile));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) {
      barrier_arrive(consumed);
      if constexpr (kBlocks > 1) {
        remote_arrive(&shared.other.scores_freed, j);
      }
    }
  }
}

// Rows in and out
// ----------------------------------------------------------------------------------------

// Cosines and sines of the pairs of columns 8 piece .. 8 piece + 7 of a head.
struct Turn {
  float cosine[4], sine[4];
  bool any;

  __device__ __forceinline__ Turn(const AttendProblem& a, int64_t token, int piece) : any(false) {
    const int first_rotated = kDim - 2 * static_cast<int>(a.half);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int pair = 8 * piece + 2 * e - first_rotated;
      cosine[e] = 1;
      sine[e] = 0;
      if (pair >= 0) {
        cosine[e] = a.rope[token * a.half * 2 + pair];
        sine[e] = a.rope[token * a.half * 2 + pair + 1];
        any = true;
      }
    }
  }
  __device__ __forceinline__ void apply(float (&v)[8], float sign) const {
    if (any) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 turned = rotate_pair(v[2 * e], v[2 * e + 1], cosine[e], sign * sine[e]);
        v[2 * e] = turned.x;
        v[2 * e + 1] = turned.y;
      }
    }
  }
};

// Q, rotated and rounded, in the column order of the unpacked rows. The first kCount threads.
template <int kCount>
__device__ __forceinline__ void load_queries(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             uint8_t (&to)[kTiles][kTile]) {
  constexpr int kPieces = kDim / 8;
  constexpr int kRowStep = kCount / kPieces;  // heads that the threads pass over at once
  constexpr int kRowSteps = (kHeads + kRowStep - 1) / kRowStep;
  constexpr int kBatch = kRowSteps > 16 ? 8 : kRowSteps;  // loads under way
  static_assert(kCount % kPieces == 0 && kRowSteps % kBatch == 0);
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const auto* q = static_cast<const Bf16*>(a.q) + (token * a.heads + head0) * kDim + 8 * piece;
  const Turn turn(a, token, piece);
#pragma unroll 1
  for (int step = 0; step < kRowSteps; step += kBatch) {
    uint4 raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int head = first + (step + i) * kRowStep;
      raw[i] = head < kHeads && head0 + head < a.heads
                   ? *reinterpret_cast<const uint4*>(q + head * kDim)
                   : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int head = first + (step + i) * kRowStep;
      if (head < kHeads) {
        float v[8] = {low_bf16(raw[i].x),
                      high_bf16(raw[i].x),
                      low_bf16(raw[i].y),
                      high_bf16(raw[i].y),
                      low_bf16(raw[i].z),
                      high_bf16(raw[i].z),
                      low_bf16(raw[i].w),
                      high_bf16(raw[i].w)};
        turn.apply(v, 1.0f);
        *reinterpret_cast<uint4*>(to[piece / 8] + tile_place(head, piece % 8)) =
            make_uint4(bf16_pair(v[0], v[4]),
                       bf16_pair(v[1], v[5]),
                       bf16_pair(v[2], v[6]),
                       bf16_pair(v[3], v[7]));
      }
    }
  }
  async_proxy_fence();
}

// Fetches Q into L2 for load_queries(). The unpacking threads.
template <int kBlocks>
__device__ __forceinline__ void prefetch_queries(const AttendProblem& a, int64_t token, int head0) {
  constexpr int kLine = 128 / sizeof(Bf16);
  const auto* q = static_cast<const Bf16*>(a.q) + (token * a.heads + head0) * kDim;
  const int elements = min(kHeads, a.heads - head0) * kDim;
  for (int i = static_cast<int>(threadIdx.x - kOthers) * kLine; i < elements;
       i += Shared<kBlocks>::kUnpackers * 32 * kLine) {
    prefetch_to_l2(q + i);
  }
}

// words[i] of lane t of a quad for words[t] of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (t & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) == 0) {
        const uint32_t given = upper ? words[i] : words[i + bit];
        const uint32_t taken = __shfl_xor_sync(kAllLanes, given, bit);
        words[i] = upper ? taken : words[i];
        words[i + bit] = upper ? words[i + bit] : taken;
      }
    }
  }
}

// The sums of a warpgroup's columns, divided, rounded, rotated back and stored. `group` is the
// first group of eight columns, `head` that of the thread's two.
template <int kParts, int kColumnTiles>
__device__ __forceinline__ void store_output(const AttendProblem& a,
                                             int64_t token,
                                             int head0,
                                             int head,
                                             int group,
                                             const float (&acc)[kParts][kColumnTiles][4],
                                             const float (&factor)[2]) {
  const Lane place;
#pragma unroll
  for (int n = 0; n < kParts * kColumnTiles; n += 4) {
    const int own = group + n + place.t;  // that the lane stores
    const Turn turn(a, token, own);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Columns 2 t and 2 t + 1 hold channels t and t + 4 of a group.
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& columns = acc[(n + i) / kColumnTiles][(n + i) % kColumnTiles];
        words[i] = bf16_pair(columns[2 * h] * factor[h], columns[2 * h + 1] * factor[h]);
      }
      transpose_quad(words, place.t);
      uint4 out = make_uint4(__byte_perm(words[0], words[1], 0x5410),
                             __byte_perm(words[2], words[3], 0x5410),
                             __byte_perm(words[0], words[1], 0x7632),
                             __byte_perm(words[2], words[3], 0x7632));
      if (turn.any) {
        float v[8] = {low_bf16(out.x),
                      high_bf16(out.x),
                      low_bf16(out.y),
                      high_bf16(out.y),
                      low_bf16(out.z),
                      high_bf16(out.z),
                      low_bf16(out.w),
                      high_bf16(out.w)};
        turn.apply(v, -1.0f);
        out = make_uint4(bf16_pair(v[0], v[1]),
                         bf16_pair(v[2], v[3]),
                         bf16_pair(v[4], v[5]),
                         bf16_pair(v[6], v[7]));
      }
      const int row = head0 + head + 8 * h;
      if (row < a.heads) {
        auto* o = static_cast<Bf16*>(a.o) + (token * a.heads + row) * kDim + 8 * own;
        __stcg(reinterpret_cast<uint4*>(o), out);
      }
    }
  }
}

template <int kBlocks>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(Shared<kBlocks>::kThreads, 1)
    attend_kernel(const __grid_constant__ AttendProblem a) {
  auto& shared = *reinterpret_cast<Shared<kBlocks>*>(dynamic_shared());
  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<kBlocks>::kKeyStages; ++i) {
      barrier_init(&shared.unpacked[i], Shared<kBlocks>::kUnpackers);
      barrier_init(&shared.consumed[i], 8);
    }
    for (int i = 0; i < Shared<kBlocks>::kScoreStages; ++i) {
      barrier_init(&shared.scored[i], kBlocks == 1 ? 4 : 1);
    }
    if constexpr (kBlocks > 1) {
      for (int i = 0; i < OtherValues<kBlocks>::kStages; ++i) {
        barrier_init(&shared.other.unpacked[i], Shared<kBlocks>::kUnpackers);
        barrier_init(&shared.other.consumed[i], 8);
      }
      barrier_init(&shared.other.best_known, 4 * kBlocks);
      barrier_init(&shared.other.scores_freed, 8 * kBlocks);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.announced[i], 1);
      barrier_init(&shared.summed[i], 4);
      barrier_init(&shared.finished[i], 8);
    }
    async_proxy_fence();
  }
  wait_for_previous_kernels();
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  const int rank = kBlocks == 1 ? 0 : cluster_rank();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / 4;
  const int head_groups = (a.heads + kHeads - 1) / kHeads;
  const int64_t first = blockIdx.x / kBlocks, step = gridDim.x / kBlocks;
  const int64_t items = a.tokens * head_groups;
  // Roles follow each other from item to item through barriers alone; `turn` counts the items.
  int turn = 0;
  const auto phase = [&] { return turn / 2 % 2; };
  if (group == 0) {
    lower_registers<kBlocks == 1 ? 104 : 96>();
    int own_blocks = 0;
    for (int64_t item = first; item < items; item += step, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      if (turn == 0) {
        load_queries<kOthers>(a, token, head0, shared.q);
        group_barrier(kQueriesReady, kOthers);
      } else {
        load_queries<kGroup>(a, token, head0, shared.q);
        group_barrier(kQueriesRenewed, kGroup);
      }
      float best[2] = {-1e30f, -1e30f};
      barrier_wait(&shared.announced[turn % 2], phase());
      score_blocks(shared.keys[turn % 2], rank, own_blocks, shared, best);
      if (lane % 4 == 0) {
        shared.best[turn % 2][warp * 16 + lane / 4] = best[0];
        shared.best[turn % 2][warp * 16 + lane / 4 + 8] = best[1];
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.summed[turn % 2]);
      }
      group_barrier(kQueriesRenewed, kGroup);  // all warps are done with Q
    }
  } else if (group >= 3) {
    lower_registers<kBlocks == 1 ? 88 : 80>();
    RowPlaces& places = shared.places[warp - kOthers / 32];
    int own_blocks = 0;
    for (int64_t item = first; item < items; item += step, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      const QueryKeys keys = count_keys(a, token);
      __syncwarp();
      if (lane == 0) {
        find_places(a, token, keys, places);
        if (warp == kOthers / 32) {
          if (turn >= 2) {
            barrier_wait(&shared.finished[turn % 2], (turn / 2 - 1) % 2);
          }
          shared.keys[turn % 2] = keys.keys;
          barrier_arrive(&shared.announced[turn % 2]);
        }
      }
      __syncwarp();
      if (turn > 0) {
        prefetch_queries<kBlocks>(a, token, head0);
      }
      unpack_blocks(keys, places, rank, own_blocks, shared);
    }
  } else {
    raise_registers<kBlocks == 1 ? 160 : 112>();
    // One wgmma takes 128 columns, or what there is.
    constexpr int kParts = kBlocks == 1 ? 2 : 1;
    constexpr int kColumnTiles = kDim / 8 / kBlocks / 2 / kParts;
    const int head = warp % 4 * 16 + lane / 4;
    int blocks = 0;
    for (int64_t item = first; item < items; item += step, ++turn) {
      const int64_t token = item / head_groups;
      const int head0 = static_cast<int>(item % head_groups) * kHeads;
      if (turn == 0) {
        load_queries<kOthers>(a, token, head0, shared.q);
        group_barrier(kQueriesReady, kOthers);
      }
      float acc[kParts][kColumnTiles][4] = {};
      float sum[2] = {0, 0};
      barrier_wait(&shared.announced[turn % 2], phase());
      const int keys = shared.keys[turn % 2];
      sum_values(keys, rank, group - 1, blocks, shared, acc, sum);
      barrier_wait(&shared.summed[turn % 2], phase());
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = head0 + head + 8 * h;
        const float sink = row < a.heads ? a.sink[row] : 0.0f;
        const float denominator =
            sum[h] + exp2f(fmaf(sink, kLog2e, -shared.best[turn % 2][head + 8 * h]));
        // No key at all: the sums are zero, and so is the row.
        sum[h] = keys > 0 ? kCacheScale / denominator : 0.0f;
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.finished[turn % 2]);
      }
      store_output(a, token, head0, head, (2 * rank + group - 1) * kParts * kColumnTiles, acc, sum);
    }
  }
  if constexpr (kBlocks > 1) {
    cluster_sync();  // others may still tell this block of what they have consumed
  }
}

template <int kBlocks>
Status run(const OpContext& ctx, const AttendProblem& a, int64_t blocks) {
  static_assert(sizeof(Shared<kBlocks>) <= kSharedCapacity);
  return launch(ctx,
                "attend",
                attend_kernel<kBlocks>,
                dim3(extent(blocks * kBlocks)),
                Shared<kBlocks>::kThreads,
                static_cast<int64_t>(sizeof(Shared<kBlocks>)),
                a);
}

}  // namespace

bool attend_mma_supports(const AttendArgs& args) {
  const int64_t h = args.sink.dim(0);
  const auto aligned = [](const TensorView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  };
  return args.q.dtype == DType::kBF16 && args.q.dim(1) == h * kDim &&
         args.rope.dim(1) <= kDim / 2 && aligned(args.q) && aligned(args.o) &&
         aligned(args.window.fresh);
}

Status attend_mma(OpContext& ctx, const AttendArgs& args) {
  const AttendProblem a = attend_problem(args);
  // Few tokens: more blocks for each, as long as all clusters run at once. Blocks of a cluster
  // share a GPC, which leaves up to three of its multiprocessors without one of four: 27 clusters
  // fit wherever 132 multiprocessors lie. Many tokens: one block on each multiprocessor takes a
  // token after the other.
  const int64_t items = a.tokens * ceil_div(a.heads, kHeads);
  return items <= 24   ? run<4>(ctx, a, items)
         : items <= 64 ? run<2>(ctx, a, items)
                       : run<1>(ctx, a, std::min(items, kMultiprocessors));
}

}  // namespace cachalot::ops::cuda
