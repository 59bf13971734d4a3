// What the wgmma attention kernel (attend_mma.cu) has in shared memory, and the role that fills it:
// cache rows to BF16 keys.
#pragma once

#include "ops/cuda/attend_tiles.cuh"

namespace cachalot::ops::cuda::attention {

constexpr int kOthers = 3 * kGroup;  // threads of scores and of two groups of values

constexpr int kUnpackers = 4;  // warps
constexpr int kThreads = kOthers + kUnpackers * 32;
constexpr int kStages = 2;  // blocks of keys under way

// Barrier of the group of scores.
constexpr int kQueriesReady = 1;

// Where the rows of a token's keys lie.
struct RowPlaces {
  const uint8_t* ring;
  const uint8_t* fresh;
  const int32_t* selected;  // of the token, moved so that an index of a key is one of it
  uint8_t* const* pages;
  uint32_t page_rows, inverse;  // 2^32 / page_rows, rounded down
  uint32_t row_bytes;
  uint32_t window, window_bytes;
  int first, start;  // positions: of the first window key, of the step
};

struct Shared {
  uint8_t q[kTiles][kTile];                        // [512 / 64][heads][64] bf16, swizzled
  uint8_t k[kStages][kTiles][kTile];               // [512 / 64][keys][64] bf16, swizzled
  uint8_t p[kStages][kTile];                       // [heads][keys] bf16, swizzled
  uint8_t output[2 * kGroup / 32][kOutputBuffer];  // of the warps of values
  float sum[kStages][kHeads], rescale[kStages][kHeads];
  // Of the token that a block works on and of the next one.
  QueryKeys keys[2];
  RowPlaces places[2];
  float best[2][kHeads];
  uint64_t announced[2], summed[2], finished[2];
  uint64_t unpacked[kStages], consumed[kStages], scored[kStages];
};

// Unpacking
// -------------------------------------------------------------------------------------------

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
    places.inverse = 0xFFFFFFFFu / places.page_rows;
    places.row_bytes = static_cast<uint32_t>(a.main[s].row_bytes);
  }
}

// Where a lane's row of every block of keys lies. A row is found in two loads, its entry and its
// page, and each begins one block ahead of its use.
class RowStream {
 public:
  __device__ __forceinline__ RowStream(const RowPlaces& places, const QueryKeys& keys, int row)
      : places_(places), keys_(keys), next_key_(row) {
    find_entry();
    find_page();
    find_entry();
  }

  // The row of a block of keys; any row past the last key.
  __device__ __forceinline__ const uint8_t* row() const { return page_ + offset_; }
  __device__ __forceinline__ void advance() {
    find_page();
    find_entry();
  }

 private:
  __device__ __forceinline__ void find_entry() {
    key_ = next_key_;
    next_key_ += kKeyBlock;
    if (key_ >= keys_.window_keys && key_ < keys_.keys) {
      entry_ = static_cast<uint32_t>(places_.selected[key_]);
    }
  }
  __device__ __forceinline__ void find_page() {
    page_ = places_.fresh;
    offset_ = 0;
    if (key_ < keys_.window_keys) {
      const int position = places_.first + key_;
      const bool fresh = position >= places_.start;
      const uint32_t row = fresh ? static_cast<uint32_t>(position - places_.start)
                                 : static_cast<uint32_t>(position) % places_.window;
      page_ = fresh ? places_.fresh : places_.ring;
      offset_ = row * places_.window_bytes;
    } else if (key_ < keys_.keys) {
      // The quotient or one less.
      uint32_t page = __umulhi(entry_, places_.inverse);
      uint32_t row = entry_ - page * places_.page_rows;
      const bool less = row >= places_.page_rows;
      page += less ? 1 : 0;
      row -= less ? places_.page_rows : 0;
      page_ = places_.pages[page];
      offset_ = row * places_.row_bytes;
    }
  }

  const RowPlaces& places_;
  const QueryKeys keys_;
  int next_key_;
  int key_ = 0;  // of entry_
  uint32_t entry_ = 0;
  const uint8_t* page_ = nullptr;  // of row()
  uint32_t offset_ = 0;
};

// What a lane unpacks in one go: 64 bytes of codes of one of eight keys, lane % 8, whose row the
// quarters of the warp share. They are columns 128 quarter .. + 127 of a main row, 64 quarter
// .. + 63 of one half of a window row.
struct RowPass {
  const uint8_t* row;
  int key;  // of 64
  bool is_window;
  bool is_absent;  // past the last key: `row` is any, its scales count as zeros
  bool is_second;  // half
};
struct RawRow {
  uint4 codes[4];
  uint2 scales;  // of a main row the lane's, of a window row those of the half
};

// Not as read-only data: the kernel before this one may write rows after this one has started.
__device__ __forceinline__ void load_row(const RowPass& pass, int quarter, RawRow& raw) {
  const bool upper = pass.is_window && pass.is_second;
  const auto* codes =
      reinterpret_cast<const uint4*>(pass.row + 64 * quarter + (upper ? kDim / 2 : 0));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    raw.codes[i] = __ldca(codes + i);
  }
  const int scales = pass.is_window ? kDim + (upper ? 8 : 0) : kDim / 2 + 8 * quarter;
  raw.scales = __ldca(reinterpret_cast<const uint2*>(pass.row + scales));
}

// Items kFirst .. kEnd - 1 of four.
template <int kFirst, int kEnd>
__device__ __forceinline__ void unpack_window_row(const RawRow& raw,
                                                  const RowPass& pass,
                                                  int quarter,
                                                  uint8_t (&to)[kTiles][kTile]) {
  const uint32_t scales = (quarter < 2 ? raw.scales.x : raw.scales.y) >> (quarter % 2 * 16);
  uint8_t* tile = to[(pass.is_second ? 4 : 0) + quarter];
  const int at = tile_place(pass.key, 0);
#pragma unroll
  for (int i = kFirst; i < kEnd; ++i) {
    const uint32_t byte = scales >> (i / 2 * 8) & 0xFFu;
    const uint32_t multiplier = byte == 255u ? 0x7FC07FC0u : ((byte + 113u) << 7) * 0x00010001u;
    store_piece_at(tile, at, 2 * i, unpack_window(raw.codes[i].x, raw.codes[i].y, multiplier));
    store_piece_at(tile, at, 2 * i + 1, unpack_window(raw.codes[i].z, raw.codes[i].w, multiplier));
  }
}
template <int kFirst, int kEnd>
__device__ __forceinline__ void unpack_main_row(const RawRow& raw,
                                                const RowPass& pass,
                                                int quarter,
                                                uint8_t (&to)[kTiles][kTile]) {
  const int at = tile_place(pass.key, 0);
#pragma unroll
  for (int i = kFirst; i < kEnd; ++i) {
    const uint32_t two = (i < 2 ? raw.scales.x : raw.scales.y) >> (i % 2 * 16);
    const uint32_t multipliers = main_multipliers(pass.is_absent ? 0u : two);
    const uint32_t low = __byte_perm(multipliers, 0, 0x1010);
    const uint32_t high = __byte_perm(multipliers, 0, 0x3232);
    uint4 v[4];
    v[0] = unpack_main(raw.codes[i].x, low);
    v[1] = unpack_main(raw.codes[i].y, low);
    v[2] = unpack_main(raw.codes[i].z, high);
    v[3] = unpack_main(raw.codes[i].w, high);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_piece_at(to[2 * quarter + i / 2], at, i % 2 * 4 + j, v[j]);
    }
  }
}

// Unpacks the keys of a token; `blocks` counts the blocks of keys of all tokens. A warp has 16 keys
// of each, in pairs of passes: the halves of eight keys if the block has window rows, else eight
// keys and eight keys. The loads of a pass begin one pass ahead.
__device__ __forceinline__ void unpack_blocks(const QueryKeys& keys,
                                              const RowPlaces& places,
                                              int& blocks,
                                              Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x - kOthers) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, quarter = lane / 8;
  RowStream rows(places, keys, 16 * warp + lane % 16);
  const uint8_t* lane_row = nullptr;  // of the lane's key of the block, for all lanes
  const auto pass = [&](int begin, int octet, bool is_second) {
    const int in_warp = octet * 8 + lane % 8, key = 16 * warp + in_warp;
    return RowPass{.row = reinterpret_cast<const uint8_t*>(
                       __shfl_sync(kAllLanes, reinterpret_cast<uintptr_t>(lane_row), in_warp)),
                   .key = key,
                   .is_window = begin + key < keys.window_keys,
                   .is_absent = begin + key >= keys.keys,
                   .is_second = is_second};
  };
  // Unpacks a pass and loads the next one behind the first item: the wait for that item's registers
  // would else be one for the loads just begun, too.
  const auto unpack = [&](const RawRow& of, const RowPass& at, int stage, auto&& load_next) {
    if (at.is_window) {
      unpack_window_row<0, 1>(of, at, quarter, shared.k[stage]);
    } else if (!at.is_second) {
      unpack_main_row<0, 1>(of, at, quarter, shared.k[stage]);
    }
    __syncwarp();
    load_next();
    if (at.is_window) {
      unpack_window_row<1, 4>(of, at, quarter, shared.k[stage]);
    } else if (!at.is_second) {
      unpack_main_row<1, 4>(of, at, quarter, shared.k[stage]);
    }
  };
  RawRow raw[2];
  lane_row = rows.row();
  RowPass first = pass(0, 0, false);
  load_row(first, quarter, raw[0]);
  rows.advance();
#pragma unroll 1
  for (int begin = 0; begin < keys.keys; begin += kKeyBlock, ++blocks) {
    const int stage = blocks % kStages;
    if (blocks >= kStages) {
      barrier_wait(&shared.consumed[stage], (blocks / kStages - 1) % 2);
    }
    const bool any_window = begin < keys.window_keys;
#pragma unroll 1
    for (int octet = 0; octet < 2; ++octet) {
      const RowPass second = any_window ? pass(begin, octet, true) : pass(begin, 1, false);
      unpack(raw[0], first, stage, [&] { load_row(second, quarter, raw[1]); });
      const bool is_last = !any_window || octet == 1;
      unpack(raw[1], second, stage, [&] {
        if (is_last) {
          lane_row = rows.row();
        }
        first = is_last ? pass(begin + kKeyBlock, 0, false) : pass(begin, 1, false);
        load_row(first, quarter, raw[0]);
        if (is_last) {
          rows.advance();
        }
      });
      octet += is_last ? 1 : 0;
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(&shared.unpacked[stage]);
    }
  }
}

}  // namespace cachalot::ops::cuda::attention
