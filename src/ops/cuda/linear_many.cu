// y = x W^T for many tokens (linear_mma.cu), whose inputs a kernel in front has laid out as images;
// device/gemm_tiles.cuh multiplies them.
//
// in   images of x, weights [N, K]        out  y [T, N] bf16|f32, up to four weights per call
//
// Where that fills the device, a block has 128 rows and 128 tokens at a time (64 if there are no
// more and the weights are FP8), half of the rows per warpgroup. Otherwise it has 64 rows, and
// three warpgroups (two with 128 tokens) take turns at the chunks of K, because one alone would be
// bound by the latencies of its own unpacking. One block per multiprocessor takes tiles in order:
// 16 blocks of rows for all tokens, then the next 16, so that what runs at one time fits into L2.
//
// Shared: two or three chunks of 256 columns of input (64 KiB each for 128 tokens), three to six
// stages of weights per warpgroup, 2 KiB per warp in which results are transposed, and up to 32 KiB
// of sums that wait for their turn. Bound by mma and by the reads from L2, 96 KB per 8.4 MFLOP:
// 4096 tokens of 8192 columns times 5120 rows run at 643 TFLOP/s with the matrix units busy 76 % of
// the cycles and 8.3 TB/s from L2 (the images are made in front of that).
#include <algorithm>
#include <type_traits>

#include "ops/cuda/device/gemm_tiles.cuh"
#include "ops/cuda/linear_mma.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kPanel = 16;  // blocks of rows

// Tiles in the order in which they are taken; a block has every stride-th.
struct TileOrder {
  int row_blocks;
  int token_tiles;

  __device__ __forceinline__ int first() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int stride() const { return static_cast<int>(gridDim.x); }
  __device__ __forceinline__ int count() const { return row_blocks * token_tiles; }
  __device__ __forceinline__ void at(int index, int& row_block, int& token_tile) const {
    const int panel = index / (kPanel * token_tiles) * kPanel;
    const int within = index % (kPanel * token_tiles), width = min(kPanel, row_blocks - panel);
    row_block = panel + within % width;
    token_tile = within / width;
  }
};

// Shared memory: input, weights of every warpgroup, sums that wait, places to transpose results. As
// many stages of weights as fit beside the rest.
template <class W, class Block>
struct Layout {
  static constexpr int kCapacity = kSharedCapacity - 1024;
  static constexpr int kResultBytes = Block::kRowWarps * Block::kStoreBytes;
  static constexpr int kFree =
      kCapacity - Block::Inputs::kBytes - Block::kTotalBytes - kResultBytes;
  static constexpr int kStages = std::min(6, kFree / (Block::kGroups * WeightStages<W, 1>::kBytes));
  static_assert(kStages * W::kStep >= 2 * kBlockColumns);
  using Weights = WeightStages<W, kStages>;
  static constexpr int kWeights = Block::Inputs::kBytes;
  static constexpr int kTotals = kWeights + Block::kGroups * Weights::kBytes;
  static constexpr int kResults = kTotals + Block::kTotalBytes;
  static constexpr int kBytes = kResults + kResultBytes;
  static_assert(kBytes <= kCapacity);
};

// The chunks of this block's tiles that a warpgroup takes: every kTurns-th from `turn` on.
template <class Block>
struct ChunkWalk {
  const TileOrder& order;
  int chunks;  // of a tile
  int index;   // of the tile
  int chunk;

  __device__ __forceinline__ ChunkWalk(const TileOrder& tiles, int tile_chunks, int turn)
      : order(tiles), chunks(tile_chunks), index(tiles.first()), chunk(turn) {
    settle();
  }
  __device__ __forceinline__ bool done() const { return index >= order.count(); }
  // Returns whether it went on into another tile.
  __device__ __forceinline__ bool advance() {
    chunk += Block::kTurns;
    return settle();
  }

 private:
  __device__ __forceinline__ bool settle() {
    bool moved = false;
    while (chunk >= chunks) {
      chunk -= chunks;
      index += order.stride();
      moved = true;
    }
    return moved;
  }
};

template <class Block>
__device__ __forceinline__ void feed_inputs(const LinearProblem& p,
                                            const TileOrder& order,
                                            typename Block::Inputs inputs) {
  for (int index = order.first(); index < order.count(); index += order.stride()) {
    int row_block, token_tile;
    order.at(index, row_block, token_tile);
    const int64_t token0 = int64_t{token_tile} * Block::kTokens;
    // Tiles of a block lie in one group: the host gives blocks of whole groups only.
    const TilePlace place(p, row_block * Block::kRowWarps);
    const int64_t group = place.row / p.target[place.target].group_rows;
    inputs.load(
        reinterpret_cast<const uint8_t*>(p.x + (group * image_rows(p.tokens) + token0) * p.in),
        static_cast<int>(image_rows(min(p.tokens - token0, int64_t{Block::kTokens}))),
        static_cast<int>(p.in / kChunk));
  }
}

template <class W, class Block, class Weights>
__device__ __forceinline__ void feed_weights(const LinearProblem& p,
                                             const TileOrder& order,
                                             int group,
                                             Weights weights) {
  const Lane lane;
  TileRows rows[kGroupWarps];
  bool fresh = true;
  for (ChunkWalk<Block> walk(
           order, static_cast<int>(p.in / kChunk), Block::kTurns == 1 ? 0 : group);
       !walk.done();
       fresh = walk.advance()) {
    if (fresh) {
      int row_block, token_tile;
      order.at(walk.index, row_block, token_tile);
      const int tile0 =
          row_block * Block::kRowWarps + (Block::kTurns == 1 ? group * kGroupWarps : 0);
#pragma unroll
      for (int warp = 0; warp < kGroupWarps; ++warp) {
        const TilePlace place(p, min(tile0 + warp, p.tiles - 1));
        const LinearPart& part = p.target[place.target];
        rows[warp] = tile_rows<W>(part.values, part.scales, place.row, part.out, p.in, lane);
        seek<W>(rows[warp], walk.chunk * kChunk);
      }
    } else if constexpr (Block::kTurns > 1) {
#pragma unroll
      for (int warp = 0; warp < kGroupWarps; ++warp) {
        seek<W>(rows[warp], (Block::kTurns - 1) * kChunk);
      }
    }
    for (int step = 0; step < kChunk / W::kStep; ++step) {
      weights.fill(rows);
    }
  }
  // The group unpacks one block ahead.
  for (int column = 0; column < kBlockColumns; column += W::kStep) {
    weights.fill_nothing();
  }
  copy_async_commit();
  copy_async_wait<0>();
}

// Stores a warp's tile.
template <class W, int kTiles, class Block>
__device__ __forceinline__ void store_results(const LinearProblem& p,
                                              int tile,
                                              int token_tile,
                                              const Lane& lane,
                                              uint8_t* memory,
                                              const float (&total)[kTiles][4]) {
  if (tile >= p.tiles) {
    return;
  }
  const TilePlace place(p, tile);
  const LinearPart& to = p.target[place.target];
  const int64_t token0 = int64_t{token_tile} * Block::kTokens;
  if (to.y_is_bf16) {
    auto* y = static_cast<Bf16*>(to.y) + token0 * to.out + place.row;
    const bool whole = place.row + kTileRows <= to.out && to.out % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(to.y) % 16 == 0;
    store_tile<Block::kStoreTokens>(
        memory, total, W::kLate, static_cast<int>(to.out - place.row), whole, [&](int n) -> Bf16* {
          return token0 + n < p.tokens ? y + n * to.out : nullptr;
        });
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t token = token0 + n * kTokenTile + 2 * lane.t + i % 2;
        if (token < p.tokens) {
          store_y(to, token, place.row + lane.g + 8 * (i / 2), total[n][i] * W::kLate);
        }
      }
    }
  }
}

// A warp of a multiplying group.
template <class W, class Block, class Weights>
__device__ __forceinline__ void multiply(const LinearProblem& p,
                                         const TileOrder& order,
                                         int group,
                                         Weights weights,
                                         typename Block::Inputs inputs) {
  constexpr int kTiles = Block::kTokens / kTokenTile, kTurns = Block::kTurns;
  const Lane lane;
  const int warp = uniform_warp() % kGroupWarps;
  const int row_warp = kTurns == 1 ? group * kGroupWarps + warp : warp;
  uint8_t* results = dynamic_shared() + Layout<W, Block>::kResults + row_warp * Block::kStoreBytes;
  const int chunks = static_cast<int>(p.in / kChunk);
  ChunkWalk<Block> walk(order, chunks, kTurns == 1 ? 0 : group);
  if (walk.done()) {
    return;
  }
  WeightBlock<W, Weights> next;
  next.template fetch<0>(weights, warp);
  next.template unpack<0>(weights, warp, lane);
  const auto store = [&](int index,
                         const float (&total)[kTiles][4]) __attribute__((always_inline)) {
    int row_block, token_tile;
    order.at(index, row_block, token_tile);
    store_results<W, kTiles, Block>(
        p, row_block * Block::kRowWarps + row_warp, token_tile, lane, results, total);
  };
  if constexpr (kTurns == 1) {
    for (int index = order.first(); index < order.count(); index += order.stride()) {
      float total[kTiles][4] = {};
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        float part[kTiles][4];
        multiply_chunk<W, kTiles>(next, weights, inputs, warp, lane, part);
        add_part(total, part);
      }
      store(index, total);
    }
  } else {
    const TurnSums<kTurns, kTiles> sums(dynamic_shared() + Layout<W, Block>::kTotals, group);
    bool first = group == 0;  // chunk of the block
#pragma unroll 1
    while (!walk.done()) {
      float part[kTiles][4];
      multiply_chunk<W, kTiles>(next, weights, inputs, warp, lane, part);
      if (!first) {
        sums.wait();
      }
      first = false;
      sums.add_to(part, walk.chunk == 0);
      const int index = walk.index;
      const bool last = walk.chunk + 1 == chunks;
      if (last) {
        store(index, part);
      } else {
        sums.keep(part);
      }
      if (!last || index + order.stride() < order.count()) {
        sums.pass();
      }
      walk.advance();
    }
  }
}

template <class W, class Block>
__global__ void __launch_bounds__(Block::kThreads, 1)
    many_kernel(const __grid_constant__ LinearProblem p, const __grid_constant__ TileOrder order) {
  using Shared = Layout<W, Block>;
  using Weights = typename Shared::Weights;
  using Inputs = typename Block::Inputs;
  __shared__ typename Inputs::Barriers input_barriers;
  __shared__ typename Weights::Barriers weight_barriers[Block::kGroups];
  if (threadIdx.x == 0) {
    Inputs::init(input_barriers);
    for (auto& barriers : weight_barriers) {
      Weights::init(barriers);
    }
    async_proxy_fence();
  }
  __syncthreads();
  const int warp = uniform_warp(), group = warp / kGroupWarps;
  const auto weights_of = [&](int g) __attribute__((always_inline)) {
    return Weights(dynamic_shared() + Shared::kWeights + g * Weights::kBytes, &weight_barriers[g]);
  };
  if (group == Block::kGroups) {
    lower_registers<Block::kFeedRegisters>();
    const int feeder = warp % kGroupWarps;
    if (feeder > 0 && feeder <= Block::kGroups) {
      feed_weights<W, Block>(p, order, feeder - 1, weights_of(feeder - 1));
    } else if (threadIdx.x == Block::kGroups * kGroupThreads) {
      wait_for_previous_kernels();
      allow_next_kernel();
      feed_inputs<Block>(p, order, Inputs(dynamic_shared(), &input_barriers, 0));
    }
  } else {
    raise_registers<Block::kGroupRegisters>();
    wait_for_previous_kernels();
    allow_next_kernel();
    multiply<W, Block>(p,
                       order,
                       group,
                       weights_of(group),
                       Inputs(dynamic_shared(), &input_barriers, Block::kTurns == 1 ? 0 : group));
  }
}

template <class W, class Block>
Status launch_many(const OpContext& ctx, const LinearProblem& p) {
  const TileOrder order{.row_blocks = static_cast<int>(ceil_div(p.tiles, Block::kRowWarps)),
                        .token_tiles = static_cast<int>(ceil_div(p.tokens, Block::kTokens))};
  const int64_t tiles = int64_t{order.row_blocks} * order.token_tiles;
  return launch(ctx,
                "linear",
                many_kernel<W, Block>,
                extent(std::min<int64_t>(tiles, kMultiprocessors)),
                Block::kThreads,
                Layout<W, Block>::kBytes,
                p,
                order);
}

// The three parts of F32 weights leave no room for 128 tokens.
template <class W>
constexpr int kMostTokens = W::kParts == 1 ? 128 : 64;
template <class W>
using WholeBlock = GemmBlock<kMostTokens<W>, 2, 1>;

template <class W>
bool fills_device(int64_t tiles, int64_t tokens) {
  return tokens > 64 &&
         ceil_div(tiles, 2 * kGroupWarps) * ceil_div(tokens, kMostTokens<W>) >= kMultiprocessors;
}

// Whether one tile of 33 to 64 tokens leaves work for every multiprocessor in blocks of 128 rows,
// which read the input half as often as those of 64.
bool rows_fill_device(int64_t tiles, int64_t tokens) {
  return tokens > 32 && tokens <= 64 && ceil_div(tiles, 2 * kGroupWarps) >= kMultiprocessors;
}

// Calls body(W()) with the fragments of a format.
template <class Body>
auto with_weights(WeightFormat format, const Body& body) {
  switch (format) {
    case WeightFormat::kFp8Block:
      return body(Fp8Weights<false>());
    case WeightFormat::kFp4Row:
      return body(Fp4Weights());
    case WeightFormat::kBF16:
      return body(Bf16Weights());
    default:
      return body(F32Weights());
  }
}

}  // namespace

int many_tokens(WeightFormat format, int64_t tiles, int64_t tokens) {
  return with_weights(format, [&](auto w) {
    using W = decltype(w);
    const auto fit_at_once = [&](int64_t tile) {
      return ceil_div(tiles, kGroupWarps) * ceil_div(tokens, tile) <= kMultiprocessors;
    };
    return fills_device<W>(tiles, tokens)    ? kMostTokens<W>
           : tokens <= 32                    ? 32
           : tokens <= 64 || fit_at_once(64) ? 64
                                             : kMostTokens<W>;
  });
}

Status linear_many(const OpContext& ctx, WeightFormat format, const LinearProblem& p) {
  return with_weights(format, [&](auto w) {
    using W = decltype(w);
    const int tile = many_tokens(format, p.tiles, p.tokens);
    if (tile == 32) {
      return launch_many<W, GemmBlock<32, 1, 3>>(ctx, p);
    }
    if constexpr (std::is_same_v<W, Fp8Weights<false>>) {  // the format that was measured
      if (rows_fill_device(p.tiles, p.tokens)) {
        return launch_many<W, GemmBlock<64, 2, 1>>(ctx, p);
      }
    }
    if constexpr (W::kParts == 1) {
      if (!fills_device<W>(p.tiles, p.tokens)) {
        return tile == 64 ? launch_many<W, GemmBlock<64, 1, 3>>(ctx, p)
                          : launch_many<W, GemmBlock<128, 1, 2>>(ctx, p);
      }
    }
    return launch_many<W, WholeBlock<W>>(ctx, p);
  });
}

}  // namespace cachalot::ops::cuda
