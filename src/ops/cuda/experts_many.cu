// Experts with many tokens: groups of at most 32, 80 or 160, whose inputs lie as images. Same
// formulas and order of sums as experts_few.cu.
//
// hidden_kernel  a warpgroup has 32 hidden columns of a group, which are one quantization block; a
//                warp's tile is 8 rows of w1 above the 8 rows of w3 of the same columns
// out_kernel     a warpgroup has 64 rows of w2 of a group
//
// One block per multiprocessor takes tiles in turn, the rows of its two or three warpgroups by all
// tokens of a group: first those of the shared expert (FP8), then the routed ones (FP4).
//
//   multiplying warps  wgmma 64 columns | unpack the next 64 | ...    a chunk of 256: wait, add
//   feeding warps      wait for a free stage | start the copies of a warpgroup's weights | ...
//   loading warp       notes what the next tiles are | bulk copies of 64 columns of input | ...
//
// (128 columns with 32 tokens, and 32 of weights with 160.) Neither inputs nor weights stop between
// tiles. Warpgroups wait for copies, never for each other: one finishes its tile while the others
// multiply.
//
// Shared: two or three chunks of input (512 bytes per token each), two or four stages of weights
// (2.5 KiB per warp), a place per warpgroup in which results are put together, and the notes.
//
// Bound by instructions beside wgmma, by L2 and by power. Whatever a warp issues delays wgmma by
// about as many cycles: 4 wgmma of 64 tokens with 48, 80, 112 or 144 other instructions per warp
// take 143, 184, 219 or 255 cycles with nothing to wait for. Here it is 104 (16 wgmma take some 270
// to unpack their weights). With 64 tokens per expert hidden_kernel keeps the matrix units busy in
// 53 % of the cycles and reads 6.1 TB/s from L2. Two warpgroups of 128 rows have 10 % fewer
// instructions and took 6 % longer.
#include <algorithm>

#include "ops/cuda/device/gemm_tiles.cuh"
#include "ops/cuda/device/pieces.cuh"
#include "ops/cuda/device/wgmma_wide.cuh"
#include "ops/cuda/experts.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kColumns = 8;        // hidden columns of a warp
constexpr int kHiddenStride = 40;  // BF16 values of a token: 32, without bank conflicts

// A place in a ring; who writes it and who reads it have one each.
template <int kSize>
struct RingPlace {
  int slot = 0;
  int phase = 0;

  __device__ __forceinline__ void advance() {
    phase ^= slot + 1 == kSize ? 1 : 0;
    slot = slot + 1 == kSize ? 0 : slot + 1;
  }
};

// One arrival of this warp, for what its lanes have done before a __syncwarp().
__device__ __forceinline__ void arrive_once(uint64_t* barrier) {
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(barrier);
  }
}

// What a block is made of, for groups of at most kTokens tokens. Sums of 80 tokens leave registers
// for three warpgroups that multiply, sums of 160 for two. What multiplies needs more registers
// than the launch gives to each warp, and takes them from what feeds.
template <int kTokens_>
struct Block {
  static constexpr int kTokens = kTokens_;
  static constexpr int kWarpgroups = kTokens <= 80 ? 3 : 2;  // that multiply
  static constexpr int kWarps = 4 * kWarpgroups;
  static constexpr int kThreads = kWarps * 32 + 128;
  static constexpr int kWarpRegisters = kWarpgroups == 3 ? 152 : 232;
  static constexpr int kFeedRegisters = kWarpgroups == 3 ? 56 : 40;
  static constexpr int kChunks = kTokens <= 32 ? 3 : 2;     // of input
  static constexpr int kStages = kWarpgroups == 2 ? 2 : 4;  // of weights
  // Columns of weights that are unpacked, and of input that are waited for, at a time.
  static constexpr int kUnpacked = kTokens <= 32 ? 128 : kTokens <= 80 ? 64 : 32;
  static constexpr int kPieceColumns = kTokens <= 32 ? 128 : 64;
  static constexpr int kPieces = kChunk / kPieceColumns;
  // Before the input of a tile is copied, the notes of the next kLead tiles are written, over those
  // of kNotes tiles earlier, which must be done.
  static constexpr int kNotes = kWarpgroups == 2 ? 4 : 6;
  static constexpr int kLead = 2;
  static_assert(kNotes > kLead + 1, "a tile can be done when the next one has its note");

  // What is known of a tile.
  struct Note {
    ExpertTile tile;  // not valid: there are no more
    int pair[kTokens];
    float weight[kTokens];
  };
  struct Barriers {
    uint64_t input_full[kChunks][kPieces];
    uint64_t input_empty[kChunks][kPieces];
    uint64_t weights_full[kWarpgroups][kStages];
    uint64_t weights_empty[kWarpgroups][kStages];
    uint64_t note_full[kNotes];
    uint64_t note_empty[kNotes];
  };

  // Shared memory. store_tile() takes kStoreTokens at a time, Hidden::finish() kHiddenTokens.
  static constexpr int kBlockBytes = kTokens * kBlockColumns * 2;
  static constexpr int kPieceBytes = kPieceColumns / kBlockColumns * kBlockBytes;
  static constexpr int kChunkBytes = kPieces * kPieceBytes;
  static constexpr int kStoreTokens = kTokens <= 32 ? 32 : 48;
  static constexpr int kHiddenTokens = std::min(kTokens, 80);
  static constexpr int kWarpResults =
      std::max(kStoreTokens * kTileRows * 2, kHiddenTokens * kHiddenStride * 2 / 4);
  static constexpr int kWarpStage =
      std::max(WeightStage<Fp4Weights>::kBytes, WeightStage<Fp8Weights<false, 2>>::kBytes);
  static constexpr int kWeights = kChunks * kChunkBytes;
  static constexpr int kResults = kWeights + kWarps * kStages * kWarpStage;
  static constexpr int kNoteBegin = kResults + kWarps * kWarpResults;
  static constexpr int kBytes = kNoteBegin + kNotes * static_cast<int>(sizeof(Note));
  static_assert(kWarpResults % 16 == 0 && kBytes <= kSharedCapacity - 1024);

  // The weights of a warp in a stage of its warpgroup.
  static __device__ __forceinline__ uint8_t* stage(int warpgroup, int slot, int warp) {
    return dynamic_shared() + kWeights + ((warpgroup * kStages + slot) * 4 + warp) * kWarpStage;
  }
  static __device__ __forceinline__ Note& note(int slot) {
    return reinterpret_cast<Note*>(dynamic_shared() + kNoteBegin)[slot];
  }

  static __device__ __forceinline__ void init(Barriers& barriers) {
    for (int i = 0; i < kChunks * kPieces; ++i) {
      barrier_init(&barriers.input_full[0][0] + i, 1);
      barrier_init(&barriers.input_empty[0][0] + i, kWarps);
    }
    for (int i = 0; i < kWarpgroups * kStages; ++i) {
      barrier_init(&barriers.weights_full[0][0] + i, 32);
      barrier_init(&barriers.weights_empty[0][0] + i, 4);
    }
    for (int i = 0; i < kNotes; ++i) {
      barrier_init(&barriers.note_full[i], 1);
      barrier_init(&barriers.note_empty[i], kWarps + kWarpgroups);
    }
    async_proxy_fence();
  }
};

// A warp that multiplies.
template <class Block>
struct Multiplier {
  typename Block::Barriers& barriers;
  int warpgroup;
  int warp;  // in it
  Lane lane;
  RingPlace<Block::kChunks> input;
  RingPlace<Block::kStages> weights;
  RingPlace<Block::kNotes> note;
};

// A warp's next kColumns columns of weights: read from shared memory, then unpacked as A operands.
// Units of a chunk in order.
template <class W, int kColumns>
struct NextWeights {
  static constexpr int kGroupColumns = W::kStep / W::kGroups;
  static_assert(kGroupColumns % kColumns == 0);

  typename W::Raw raw;
  uint32_t a[kColumns / 16][1][4];

  template <int kUnit, class Block>
  __device__ __forceinline__ void read(Multiplier<Block>& m) {
    constexpr int kColumn = kUnit * kColumns % W::kStep;
    if constexpr (kColumn == 0) {
      barrier_wait(&m.barriers.weights_full[m.warpgroup][m.weights.slot], m.weights.phase);
    }
    if constexpr (kColumn % kGroupColumns == 0) {
      WeightStage<W>::template read<kColumn / kGroupColumns>(
          Block::stage(m.warpgroup, m.weights.slot, m.warp), raw);
    }
    if constexpr (kColumn == W::kStep - kGroupColumns) {
      __syncwarp();
      arrive_once(&m.barriers.weights_empty[m.warpgroup][m.weights.slot]);
      m.weights.advance();
    }
  }
  template <int kUnit>
  __device__ __forceinline__ void unpack(const Lane& lane) {
    constexpr int kFirst = kUnit * kColumns % kGroupColumns / 16;
    unrolled<kColumns / 16>([&]<int i>() __attribute__((always_inline)) {
      W::template fragment<kFirst + i>(a[i], raw, lane);
      // Here, while wgmma runs, not where they are used, behind the wait for it.
      asm volatile("" : "+r"(a[i][0][0]), "+r"(a[i][0][1]), "+r"(a[i][0][2]), "+r"(a[i][0][3]));
    });
  }
};

// store_tile() takes pairs of token tiles.
template <int kTiles>
constexpr int kEven = kTiles + kTiles % 2;

// total = a warp's tile times kTiles token tiles. `next` has the tile's first unit on entry and
// the next tile's on return.
template <int kTiles, class W, class Block>
__device__ __forceinline__ void multiply_tile(Multiplier<Block>& m,
                                              NextWeights<W, Block::kUnpacked>& next,
                                              int chunks,
                                              float (&total)[kEven<kTiles>][4]) {
  constexpr int kUnits = kChunk / Block::kUnpacked, kUnitsOfPiece = kUnits / Block::kPieces;
  constexpr auto place = [](int column) {  // of the chunk, in the operand
    return operand_bytes(column / kBlockColumns * Block::kBlockBytes + column % kBlockColumns * 2);
  };
  float part[kTiles][4] = {};
  barrier_wait(m.barriers.input_full[m.input.slot], m.input.phase);
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const uint64_t input = wgmma_operand(dynamic_shared() + m.input.slot * Block::kChunkBytes);
    uint64_t* full = m.barriers.input_full[m.input.slot];
    uint64_t* empty = m.barriers.input_empty[m.input.slot];
    unrolled<kUnits>([&]<int unit>() __attribute__((always_inline)) {
      wgmma_fence();
      unrolled<Block::kUnpacked / 16>([&]<int i>() __attribute__((always_inline)) {
        wgmma_bf16<unit + i != 0>(
            part, next.a[i][0], input + place(unit * Block::kUnpacked + i * 16));
      });
      wgmma_commit();
      constexpr int kNext = (unit + 1) % kUnits;
      next.template read<kNext>(m);
      wgmma_wait<1>();
      if constexpr (unit > 0 && unit % kUnitsOfPiece == 0) {
        arrive_once(empty + unit / kUnitsOfPiece - 1);
      }
      next.template unpack<kNext>(m.lane);
      if constexpr (kNext != 0 && kNext % kUnitsOfPiece == 0) {
        barrier_wait(full + kNext / kUnitsOfPiece, m.input.phase);
      }
    });
    m.input.advance();
    if (c + 1 < chunks) {
      barrier_wait(m.barriers.input_full[m.input.slot], m.input.phase);
    }
    wgmma_wait<0>();
    arrive_once(empty + Block::kPieces - 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[n][i] += part[n][i];
      }
    }
  }
}

// Stores piece i of row n in the image of a group of `rows` rows: four words of different 16-byte
// pieces, because a warpgroup has a quarter of the 128 columns that share them.
template <InputLayout kLayout>
__device__ __forceinline__ void store_hidden_piece(
    Bf16* image, int rows, int n, int64_t i, const float (&v)[8]) {
  uint32_t pairs[4];
  order_piece<kLayout>(v, pairs);
  const int piece = layout_piece(kLayout, static_cast<int>(i % 32));
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int64_t place = i / 32 * kChunk + wide_place(piece * 8 + 2 * e);
    *reinterpret_cast<uint32_t*>(image + image_place(rows, n, place)) = pairs[e];
  }
}

// One of the two products: kRows rows (of w1 and w3, or of w2) for a warpgroup.
struct Hidden {
  using Fp8 = Fp8Weights<false, 2>;
  static constexpr int kRows = 4 * kColumns;
  static __device__ __forceinline__ int64_t in(const ExpertProblem& p) { return p.d; }
  static __host__ __device__ __forceinline__ int64_t out(const ExpertProblem& p) { return p.f; }
  static __device__ __forceinline__ const Bf16* input(const ExpertProblem& p, bool shared) {
    return shared ? p.x_fp8 : p.x_fp4;
  }
  template <class W>
  static __device__ __forceinline__ TileRows rows(const ExpertProblem& p,
                                                  const ExpertPointers& expert,
                                                  int64_t row,
                                                  int warp,
                                                  const Lane& lane) {
    return gate_up_rows<W>(expert, row + warp * kColumns, p.d, lane);
  }

  // `warp` is this one's place in its warpgroup, whose `results` are and whose first row is `row`.
  template <class Block, int kTiles>
  static __device__ __forceinline__ void finish(const ExpertProblem& p,
                                                const typename Block::Note& note,
                                                int64_t row,
                                                uint8_t* results,
                                                int warp,
                                                int barrier,
                                                const Lane& lane,
                                                const float (&total)[kEven<kTiles>][4]) {
    auto* hidden = reinterpret_cast<Bf16*>(results);  // [token][kHiddenStride]
    const ExpertTile& tile = note.tile;
    const int count = tile.group.count, rows = static_cast<int>(image_rows(count));
    Bf16* image =
        (tile.shared ? p.hidden_shared : p.hidden_routed) + int64_t{tile.group.begin} * p.f;
    // Four lanes per token.
    const int piece = static_cast<int>(threadIdx.x) % 4;
    constexpr int kPart = Block::kHiddenTokens / kTokenTile;
#pragma unroll
    for (int m0 = 0; m0 < kTiles; m0 += kPart) {
#pragma unroll
      for (int m = m0; m < (m0 + kPart < kTiles ? m0 + kPart : kTiles); ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int n = m * kTokenTile + 2 * lane.t + i;
          hidden[(n - m0 * kTokenTile) * kHiddenStride + warp * kColumns + lane.g] =
              from_float<Bf16>(hidden_value(p.limit, note.weight[n], total[m][i], total[m][2 + i]));
        }
      }
      group_barrier(barrier, 128);
      const int last = min(count, (m0 + kPart) * kTokenTile);
      for (int first = (m0 + warp) * kTokenTile; first < last; first += 4 * kTokenTile) {
        const int n = first + static_cast<int>(threadIdx.x) % 32 / 4;
        float v[8];
        load_elements<8>(hidden + (n - m0 * kTokenTile) * kHiddenStride + piece * 8, v);
        quantize_piece(v);
        if (n >= count) {
          continue;
        }
        if (tile.shared) {
          store_hidden_piece<InputLayout::kFp8>(image, rows, n, row / 8 + piece, v);
        } else {
          store_hidden_piece<InputLayout::kFp4>(image, rows, n, row / 8 + piece, v);
        }
      }
      group_barrier(barrier, 128);
    }
  }
};

struct Out {
  using Fp8 = Fp8Weights<false>;
  static constexpr int kRows = 4 * kTileRows;
  static __device__ __forceinline__ int64_t in(const ExpertProblem& p) { return p.f; }
  static __host__ __device__ __forceinline__ int64_t out(const ExpertProblem& p) { return p.d; }
  static __device__ __forceinline__ const Bf16* input(const ExpertProblem& p, bool shared) {
    return shared ? p.hidden_shared : p.hidden_routed;
  }
  template <class W>
  static __device__ __forceinline__ TileRows rows(const ExpertProblem& p,
                                                  const ExpertPointers& expert,
                                                  int64_t row,
                                                  int warp,
                                                  const Lane& lane) {
    return tile_rows<W>(expert.w2, expert.w2_scales, row + warp * kTileRows, p.d, p.f, lane);
  }

  template <class Block, int kTiles>
  static __device__ __forceinline__ void finish(const ExpertProblem& p,
                                                const typename Block::Note& note,
                                                int64_t row,
                                                uint8_t* results,
                                                int warp,
                                                int,
                                                const Lane&,
                                                const float (&total)[kEven<kTiles>][4]) {
    const int count = note.tile.group.count;
    Bf16* out = (note.tile.shared ? p.out_shared : p.out_routed) + row + warp * kTileRows;
    store_tile<Block::kStoreTokens>(results + warp * Block::kWarpResults,
                                    total,
                                    kLateScale,
                                    kTileRows,
                                    true,
                                    [&](int n) __attribute__((always_inline)) -> Bf16* {
                                      return n < count ? out + int64_t{note.pair[n]} * p.d
                                                       : nullptr;
                                    });
  }
};

// First row of a warpgroup in a tile; past the matrix its last rows, once more.
template <class Product>
__device__ __forceinline__ int64_t first_row(const ExpertProblem& p,
                                             const ExpertTile& tile,
                                             int warpgroup) {
  return min(tile.row + warpgroup * Product::kRows, Product::out(p) - Product::kRows);
}

// Calls body.operator()<token tiles>() for a group of `count` tokens, at most kMostTokens.
template <int kMostTokens, class Body>
__device__ __forceinline__ void with_tiles(int count, const Body& body) {
  if constexpr (kMostTokens == 32) {
    if (count <= 2 * kTokenTile) {
      body.template operator()<2>();
    } else {
      body.template operator()<4>();
    }
  } else if constexpr (kMostTokens == 160) {
    if (count <= 8 * kTokenTile) {
      body.template operator()<8>();
    } else if (count <= 12 * kTokenTile) {
      body.template operator()<12>();
    } else if (count <= 14 * kTokenTile) {
      body.template operator()<14>();
    } else if (count <= 16 * kTokenTile) {
      body.template operator()<16>();
    } else if (count <= 18 * kTokenTile) {
      body.template operator()<18>();
    } else {
      body.template operator()<20>();
    }
  } else if (count <= 4 * kTokenTile) {
    body.template operator()<4>();
  } else if (count <= 6 * kTokenTile) {
    body.template operator()<6>();
  } else if (count <= 8 * kTokenTile) {
    body.template operator()<8>();
  } else if (count <= 9 * kTokenTile) {
    body.template operator()<9>();
  } else {
    body.template operator()<10>();
  }
}

// The tiles of one format, those of the notes from this one on.
template <class Product, class W, bool kShared, class Block>
__device__ __forceinline__ void multiply_tiles(const ExpertProblem& p, Multiplier<Block>& m) {
  const int chunks = static_cast<int>(Product::in(p) / kChunk);
  uint8_t* results = dynamic_shared() + Block::kResults + m.warpgroup * (4 * Block::kWarpResults);
  NextWeights<W, Block::kUnpacked> next;
  for (bool first = true;; first = false) {
    barrier_wait(&m.barriers.note_full[m.note.slot], m.note.phase);
    const typename Block::Note& note = Block::note(m.note.slot);
    if (!note.tile.valid || note.tile.shared != kShared) {
      return;
    }
    if (first) {
      next.template read<0>(m);
      next.template unpack<0>(m.lane);
    }
    const int64_t row = first_row<Product>(p, note.tile, m.warpgroup);
    const bool exists = row == note.tile.row + m.warpgroup * Product::kRows;
    with_tiles<Block::kTokens>(
        note.tile.group.count, [&]<int kTiles>() __attribute__((always_inline)) {
          float total[kEven<kTiles>][4] = {};
          multiply_tile<kTiles>(m, next, chunks, total);
          if (exists) {
            Product::template finish<Block, kTiles>(
                p, note, row, results, m.warp, 1 + m.warpgroup, m.lane, total);
          }
        });
    __syncwarp();
    arrive_once(&m.barriers.note_empty[m.note.slot]);
    m.note.advance();
  }
}

// A warp that copies the weights of one warpgroup.
template <class Block>
struct Feeder {
  typename Block::Barriers& barriers;
  int warpgroup;
  Lane lane;
  RingPlace<Block::kStages> weights;
  RingPlace<Block::kNotes> note;
};

// The tiles of one format, those of the notes from this one on.
template <class Product, class W, bool kShared, class Block>
__device__ __forceinline__ void feed_tiles(const ExpertProblem& p, Feeder<Block>& f) {
  const auto wait = [&]() __attribute__((always_inline)) {
    barrier_wait(&f.barriers.weights_empty[f.warpgroup][f.weights.slot], f.weights.phase ^ 1);
  };
  for (bool first = true;; first = false) {
    barrier_wait(&f.barriers.note_full[f.note.slot], f.note.phase);
    const ExpertTile& tile = Block::note(f.note.slot).tile;
    if (!tile.valid || tile.shared != kShared) {
      if (!first) {
        // The multiplying warps read one step more than there are.
        wait();
        barrier_arrive(&f.barriers.weights_full[f.warpgroup][f.weights.slot]);
        f.weights.advance();
      }
      return;
    }
    TileRows rows = Product::template rows<W>(
        p, tile.expert, first_row<Product>(p, tile, f.warpgroup), 0, f.lane);
    __syncwarp();
    arrive_once(&f.barriers.note_empty[f.note.slot]);
    f.note.advance();
    const int64_t in = Product::in(p);
#pragma unroll 1
    for (auto steps = static_cast<int>(in / W::kStep); steps > 0; --steps) {
      wait();
#pragma unroll 1
      for (int warp = 0; warp < 4; ++warp) {
        // FP8 has a row of scales for 32 rows.
        const int64_t down = warp * (Product::kRows / 4);
        TileRows own = rows;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          own.value[h] += down * (in / W::kStep * W::kStepBytes);
          own.scale[h] += (kShared ? down / 32 : down) * (in / 32);
        }
        WeightStage<W>::copy(Block::stage(f.warpgroup, f.weights.slot, warp), own);
      }
      barrier_arrive_after_copies(&f.barriers.weights_full[f.warpgroup][f.weights.slot]);
      f.weights.advance();
      seek<W>(rows, W::kStep);
    }
  }
}

// One warp: notes this block's tiles and copies their inputs.
template <class Product, class Block>
__device__ __forceinline__ void load_tiles(const ExpertProblem& p,
                                           typename Block::Barriers& barriers) {
  constexpr int kBlockRows = Block::kWarpgroups * Product::kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto row_blocks = static_cast<int>((Product::out(p) + kBlockRows - 1) / kBlockRows);
  const int tiles = (shared_groups(p) + *p.group_count) * row_blocks;
  RingPlace<Block::kNotes> written;
  int index = static_cast<int>(blockIdx.x);
  // Writes the next note; after the last one, that there are no more.
  const auto write = [&]() __attribute__((always_inline)) {
    if (index >= tiles + static_cast<int>(gridDim.x)) {
      return;
    }
    barrier_wait(&barriers.note_empty[written.slot], written.phase ^ 1);
    typename Block::Note& note = Block::note(written.slot);
    ExpertTile tile{};
    if (index < tiles) {
      tile = expert_rows(p, index / row_blocks, int64_t{index % row_blocks} * kBlockRows);
      for (int n = lane; n < Block::kTokens; n += 32) {
        const int64_t pair = pair_row(p, tile, n);
        note.pair[n] = static_cast<int>(pair);
        note.weight[n] = pair < 0 ? 0.0f : pair_weight(p, tile, pair);
      }
    }
    if (lane == 0) {
      note.tile = tile;
    }
    __syncwarp();
    arrive_once(&barriers.note_full[written.slot]);
    written.advance();
    index += static_cast<int>(gridDim.x);
  };
  for (int i = 0; i < Block::kLead; ++i) {
    write();
  }
  // The routing is older than the kernel in front, which has waited for it; inputs are not.
  wait_for_previous_kernels();
  allow_next_kernel();
  const auto in = static_cast<int>(Product::in(p));
  RingPlace<Block::kChunks> input;
  for (RingPlace<Block::kNotes> at;; at.advance()) {
    write();
    __syncwarp();
    const ExpertTile& tile = Block::note(at.slot).tile;
    if (!tile.valid) {
      return;
    }
    const auto* from = reinterpret_cast<const uint8_t*>(Product::input(p, tile.shared) +
                                                        int64_t{tile.group.begin} * in);
    constexpr int kBlocks = Block::kPieceColumns / kBlockColumns;
    const int bytes = static_cast<int>(image_rows(tile.group.count)) * (kBlockColumns * 2);
    for (int c = 0; c < in / kChunk; ++c) {
#pragma unroll
      for (int piece = 0; piece < Block::kPieces; ++piece) {
        barrier_wait(&barriers.input_empty[input.slot][piece], input.phase ^ 1);
        if (lane == 0) {
          uint64_t* full = &barriers.input_full[input.slot][piece];
          barrier_arrive_expect(full, kBlocks * bytes);
          uint8_t* to =
              dynamic_shared() + input.slot * Block::kChunkBytes + piece * Block::kPieceBytes;
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            copy_bulk(to + block * Block::kBlockBytes, from + block * bytes, bytes, full);
          }
        }
        from += kBlocks * bytes;
      }
      input.advance();
    }
  }
}

template <class Product, class Block>
__device__ __forceinline__ void run_product(const ExpertProblem& p) {
  __shared__ typename Block::Barriers barriers;
  if (threadIdx.x == 0) {
    Block::init(barriers);
  }
  __syncthreads();
  const int warp = uniform_warp();
  if (warp >= Block::kWarps) {
    lower_registers<Block::kFeedRegisters>();
    if (warp == Block::kWarps + Block::kWarpgroups) {
      load_tiles<Product, Block>(p, barriers);
    } else if (warp < Block::kWarps + Block::kWarpgroups) {
      Feeder<Block> feeder{.barriers = barriers, .warpgroup = warp - Block::kWarps};
      feed_tiles<Product, typename Product::Fp8, true>(p, feeder);
      feed_tiles<Product, Fp4Weights, false>(p, feeder);
    }
  } else {
    raise_registers<Block::kWarpRegisters>();
    Multiplier<Block> multiplier{.barriers = barriers, .warpgroup = warp / 4, .warp = warp % 4};
    multiply_tiles<Product, typename Product::Fp8, true>(p, multiplier);
    multiply_tiles<Product, Fp4Weights, false>(p, multiplier);
  }
}

template <int kTokens>
__global__ void __launch_bounds__(Block<kTokens>::kThreads, 1)
    hidden_kernel(const __grid_constant__ ExpertProblem p) {
  run_product<Hidden, Block<kTokens>>(p);
}

template <int kTokens>
__global__ void __launch_bounds__(Block<kTokens>::kThreads, 1)
    out_kernel(const __grid_constant__ ExpertProblem p) {
  run_product<Out, Block<kTokens>>(p);
}

template <class Product, class Block>
unsigned blocks(const ExpertProblem& p, int64_t groups) {
  return extent(std::min(groups * ceil_div(Product::out(p), Block::kWarpgroups * Product::kRows),
                         kMultiprocessors));
}

template <int kTokens>
Status run(const OpContext& ctx, const ExpertProblem& p, int64_t groups) {
  CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                  "experts_hidden",
                                  hidden_kernel<kTokens>,
                                  blocks<Hidden, Block<kTokens>>(p, groups),
                                  Block<kTokens>::kThreads,
                                  Block<kTokens>::kBytes,
                                  p));
  return launch(ctx,
                "experts_out",
                out_kernel<kTokens>,
                blocks<Out, Block<kTokens>>(p, groups),
                Block<kTokens>::kThreads,
                Block<kTokens>::kBytes,
                p);
}

}  // namespace

Status experts_many(const OpContext& ctx, const ExpertProblem& p, int64_t groups) {
  return p.group_tokens <= 32   ? run<32>(ctx, p, groups)
         : p.group_tokens <= 80 ? run<80>(ctx, p, groups)
                                : run<160>(ctx, p, groups);
}

}  // namespace cachalot::ops::cuda
