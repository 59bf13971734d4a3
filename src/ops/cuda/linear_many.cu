// y = x W^T for many tokens (linear_mma.cu): a block has 128 rows and 32, 64 or 128 tokens at a
// time, whose inputs a kernel in front has laid out as images; device/gemm_tiles.cuh multiplies
// them.
//
// in   images of x, weights [N, K]        out  y [T, N] bf16|f32, up to four weights per call
//
// One block per multiprocessor takes tiles in turn: 16 blocks of rows for all tokens, then the next
// 16, so that what runs at one time fits into L2.
//
// Shared: eight stages of 64 columns of input (16 KiB each for 128 tokens), a ring of weights per
// warp, and 2 KiB per warp in which results are transposed. Bound by mma and by the reads from L2,
// 96 KB per 8.4 MFLOP: 4096 tokens of 8192 columns times 5120 rows run at 583 TFLOP/s with the
// matrix units busy 64 % of the cycles and 6.7 TB/s from L2 (the images are made in front of that).
// Clusters of two blocks that share their input by multicast were 1.6 times slower.
#include "ops/cuda/device/gemm_tiles.cuh"
#include "ops/cuda/linear_mma.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kPanel = 16;  // blocks of rows

// Tiles in the order in which they are taken.
struct TileOrder {
  int row_blocks;
  int token_tiles;

  __device__ __forceinline__ int count() const { return row_blocks * token_tiles; }
  __device__ __forceinline__ void at(int index, int& row_block, int& token_tile) const {
    const int first = index / (kPanel * token_tiles) * kPanel;
    const int within = index % (kPanel * token_tiles), width = min(kPanel, row_blocks - first);
    row_block = first + within % width;
    token_tile = within / width;
  }
};

template <class W>
constexpr int kRingStages = W::kStep >= 128  ? 4
                            : W::kStep == 64 ? 5
                                             : 6;

// Shared memory: stages of input, a ring of every warp, and its place to transpose results.
template <class W, class Block>
struct Layout {
  static constexpr int kRing = WeightRing<W, kRingStages<W>>::kBytes;
  static constexpr int kResults = Block::Inputs::kBytes + Block::kWarps * kRing;
  static constexpr int kBytes = kResults + Block::kWarps * Block::kStoreBytes;
  static_assert(kBytes <= kSharedCapacity - 1024);
};

// The rows of a warp in the tiles from `index` on.
template <class W, int kWarps>
struct NextRows {
  const LinearProblem& p;
  const TileOrder& order;
  const Lane& lane;
  int warp;
  int index;

  __device__ __forceinline__ int operator()(TileRows& rows) {
    if (index >= order.count()) {
      return 0;
    }
    int row_block, token_tile;
    order.at(index, row_block, token_tile);
    index += static_cast<int>(gridDim.x);
    const TilePlace place(p, min(row_block * kWarps + warp, p.tiles - 1));
    const LinearPart& part = p.target[place.target];
    rows = tile_rows<W>(part.values, part.scales, place.row, part.out, p.in, lane);
    return static_cast<int>(p.in / W::kStep);
  }
};

template <class W, int kTiles, class Block>
__global__ void __launch_bounds__(Block::kThreads, 1)
    many_kernel(const __grid_constant__ LinearProblem p, const __grid_constant__ TileOrder order) {
  using Shared = Layout<W, Block>;
  using More = NextRows<W, Block::kWarps>;
  using Inputs = typename Block::Inputs;
  const int chunks = static_cast<int>(p.in / kChunk);
  const int begin = static_cast<int>(blockIdx.x), stride = static_cast<int>(gridDim.x);
  const auto load = [&](Inputs& inputs) __attribute__((always_inline)) {
    for (int index = begin; index < order.count(); index += stride) {
      int row_block, token_tile;
      order.at(index, row_block, token_tile);
      const int64_t token0 = int64_t{token_tile} * Block::kTokens;
      // Tiles of a block lie in one group: the host gives blocks of whole groups only.
      const TilePlace place(p, row_block * Block::kWarps);
      const int64_t group = place.row / p.target[place.target].group_rows;
      inputs.load(
          reinterpret_cast<const uint8_t*>(p.x + (group * image_rows(p.tokens) + token0) * p.in),
          static_cast<int>(image_rows(min(p.tokens - token0, int64_t{Block::kTokens}))),
          chunks);
    }
  };
  const auto multiply = [&](Inputs& inputs, int warp) __attribute__((always_inline)) {
    const Lane lane;
    uint8_t* results = dynamic_shared() + Shared::kResults + warp * Block::kStoreBytes;
    WeightRing<W, kRingStages<W>, More> ring(
        dynamic_shared() + Inputs::kBytes + warp * Shared::kRing,
        TileRows{},
        0,
        More{p, order, lane, warp, begin});
    wait_for_previous_kernels();
    allow_next_kernel();
    WeightBlock<W> next;
    next.template take<0>(ring, lane);
    for (int index = begin; index < order.count(); index += stride) {
      float total[kTiles][4] = {};
      multiply_tile<W, kTiles>(next, ring, inputs, chunks, lane, total);
      int row_block, token_tile;
      order.at(index, row_block, token_tile);
      const int tile = row_block * Block::kWarps + warp;
      if (tile >= p.tiles) {
        continue;
      }
      const TilePlace place(p, tile);
      const LinearPart& to = p.target[place.target];
      const int64_t token0 = int64_t{token_tile} * Block::kTokens;
      if (to.y_is_bf16) {
        auto* y = static_cast<Bf16*>(to.y) + token0 * to.out + place.row;
        const bool whole = place.row + kTileRows <= to.out && to.out % 8 == 0 &&
                           reinterpret_cast<uintptr_t>(to.y) % 16 == 0;
        store_tile<Block::kStoreTokens>(
            results,
            total,
            W::kLate,
            static_cast<int>(to.out - place.row),
            whole,
            [&](int n) -> Bf16* { return token0 + n < p.tokens ? y + n * to.out : nullptr; });
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
  };
  Block::run(load, multiply);
}

template <class W, int kTiles, int kWarps>
Status launch_many(const OpContext& ctx, const LinearProblem& p) {
  using Block = GemmBlock<kTiles * kTokenTile, kWarps>;
  const TileOrder order{.row_blocks = static_cast<int>(ceil_div(p.tiles, kWarps)),
                        .token_tiles = static_cast<int>(ceil_div(p.tokens, Block::kTokens))};
  const int64_t tiles = int64_t{order.row_blocks} * order.token_tiles;
  return launch(ctx,
                "linear",
                many_kernel<W, kTiles, Block>,
                extent(std::min<int64_t>(tiles, kMultiprocessors)),
                Block::kThreads,
                Layout<W, Block>::kBytes,
                p,
                order);
}

// Half blocks where whole ones leave multiprocessors idle.
template <class W, int kTiles>
Status launch_many(const OpContext& ctx, const LinearProblem& p) {
  const int64_t blocks =
      ceil_div(p.tiles, kGemmWarps) * ceil_div(p.tokens, int64_t{kTiles * kTokenTile});
  return blocks < kMultiprocessors ? launch_many<W, kTiles, kGemmWarps / 2>(ctx, p)
                                   : launch_many<W, kTiles, kGemmWarps>(ctx, p);
}

template <class W>
Status launch_many(const OpContext& ctx, WeightFormat format, const LinearProblem& p) {
  const int tile = many_tokens(format, p.tokens);
  if constexpr (W::kParts == 1) {
    if (tile == 128) {
      return launch_many<W, 16>(ctx, p);
    }
  }
  return tile == 32 ? launch_many<W, 4>(ctx, p) : launch_many<W, 8>(ctx, p);
}

}  // namespace

// The three parts of F32 weights leave no room for 128.
int many_tokens(WeightFormat format, int64_t tokens) {
  return tokens <= 32 ? 32 : tokens <= 64 || format == WeightFormat::kF32 ? 64 : 128;
}

Status linear_many(const OpContext& ctx, WeightFormat format, const LinearProblem& p) {
  switch (format) {
    case WeightFormat::kFp8Block:
      return launch_many<Fp8Weights<false>>(ctx, format, p);
    case WeightFormat::kFp4Row:
      return launch_many<Fp4Weights>(ctx, format, p);
    case WeightFormat::kBF16:
      return launch_many<Bf16Weights>(ctx, format, p);
    default:
      return launch_many<F32Weights>(ctx, format, p);
  }
}

}  // namespace cachalot::ops::cuda
