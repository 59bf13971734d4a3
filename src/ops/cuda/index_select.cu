// Indexer: scores of the visible entries and the best k of them.
//
//   S[p, j] = sum_h w_h relu(q_h . k_j) * DI^-1/2 HI^-1/2, q = FP4(RoPE(q)), in FP32
//
// in   q [T, HI * DI] act, w [T, HI] act, rope [T, R/2, 2], index rows (E2M1 codes, E8M0 per 32),
//      candidates [T, B] or none
// out  selected [T, k] i32 ascending, -1 behind; candidates_out [T, B] likewise, or none
//
// One block of 8 warps per token. Its query is quantized once; then tiles of 1024 entries are
// scored and pushed through a running top-k (device/top_k.cuh), so that no score leaves the block:
//
//   warps    scores of a tile -> shared                               | barrier
//   threads  keys above the threshold -> buffer; block maxima likewise | barrier
//   block    buffer full: radix select, threshold rises
//
// A thread scores an entry. Shared: queries (4 HI DI B), 4 KiB of scores, buffers of 8 (k + 4096)
// and 8 (B + 2048) B. Exact: ties go to the lower entry, and buffers cannot overflow. Bound by
// unpacking. The model's shape, with a bound of its entries, runs on tensor cores in
// index_split.cu.
#include <cmath>

#include "ops/cuda/index.cuh"
#include "ops/cuda/index_split.cuh"
#include "ops/cuda/kernels.h"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = kIndexThreads;
constexpr int kTile = 1024;
constexpr int kEntryRoom = 4 * kTile;
constexpr int kBlockRoom = 2 * kTile;

// Dynamic shared memory, in order.
struct Layout {
  int64_t query;    // f32 [HI, DI]
  int64_t weights;  // f32 [HI]
  int64_t scores;   // u32 [kTile]
  int64_t entries;  // u64 [k + kEntryRoom]
  int64_t blocks;   // u64 [B + kBlockRoom], or nothing
  int64_t bytes;
};
Layout shared_layout(int heads, int dim, int k, int blocks) {
  Layout layout{};
  layout.weights = layout.query + 4 * heads * dim;
  layout.scores = layout.weights + 4 * ceil_div(heads, 2) * 2;
  layout.entries = layout.scores + 4 * kTile;
  // A buffer also serves to sort its ids, padded to a power of two.
  const int64_t entry_bytes = std::max<int64_t>(8 * (k + kEntryRoom), 4 * power_of_two(k));
  const int64_t block_bytes =
      blocks == 0 ? 0 : std::max<int64_t>(8 * (blocks + kBlockRoom), 4 * power_of_two(blocks));
  layout.blocks = layout.entries + ceil_div(entry_bytes, 8) * 8;
  layout.bytes = layout.blocks + block_bytes;
  return layout;
}

template <class Act>
__global__ void __launch_bounds__(kThreads)
    index_select_kernel(const __grid_constant__ IndexProblem p, const Layout layout) {
  __shared__ TopKState entry_state, block_state;
  uint8_t* memory = dynamic_shared();
  auto* query = reinterpret_cast<float*>(memory + layout.query);
  auto* weights = reinterpret_cast<float*>(memory + layout.weights);
  auto* scores = reinterpret_cast<uint32_t*>(memory + layout.scores);
  const TopK entries{
      reinterpret_cast<uint64_t*>(memory + layout.entries), &entry_state, p.k + kEntryRoom, p.k};
  const bool publishes = p.candidates_out != nullptr;
  const TopK blocks{reinterpret_cast<uint64_t*>(memory + layout.blocks),
                    &block_state,
                    p.candidate_width + kBlockRoom,
                    p.candidate_width};
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  const int visible = static_cast<int>((p.position[token] + int64_t{1}) / p.ratio);
  const int block_count =
      p.candidate_block > 0 ? (visible + p.candidate_block - 1) / p.candidate_block : 0;
  int32_t* selected = p.selected + token * p.k;
  int32_t* published = publishes ? p.candidates_out + token * p.candidate_width : nullptr;
  if (p.candidates == nullptr && visible <= p.k &&
      (!publishes || block_count <= p.candidate_width)) {
    write_all(visible, selected, p.k);
    if (publishes) {
      write_all(block_count, published, p.candidate_width);
    }
    return;
  }

  const Act* w = static_cast<const Act*>(p.w) + token * p.heads;
  for (int i = threadIdx.x; i < p.heads; i += kThreads) {
    weights[i] = to_float(w[i]);
  }
  entries.reset();
  blocks.reset();
  load_query<Act>(p, token, query);
  const PagedRows pages = p.index[p.sequence[token]];
  const int slots = p.candidates == nullptr ? visible : p.candidate_width * p.candidate_block;
  // Tiles hold whole candidate blocks.
  const int tile = publishes ? kTile / p.candidate_block * p.candidate_block : kTile;
  for (int begin = 0; begin < slots; begin += tile) {
    const int count = min(tile, slots - begin);
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int entry = slot_entry(p, token, begin + i, visible);
      scores[i] = entry < 0 ? 0 : ordered_bits(score_thread(p, query, weights, pages.row(entry)));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int entry = slot_entry(p, token, begin + i, visible);
      entries.push(selection_key(scores[i], static_cast<uint32_t>(entry)),
                   p.k > 0 && entry >= 0 && scores[i] != kOrderedMinusInfinity);
    }
    if (publishes) {
      for (int b = threadIdx.x; b * p.candidate_block < count; b += kThreads) {
        uint32_t best = kOrderedMinusInfinity;
        for (int i = 0; i < p.candidate_block && b * p.candidate_block + i < count; ++i) {
          best = max(best, scores[b * p.candidate_block + i]);
        }
        const int id = begin / p.candidate_block + b;
        best = id == block_count - 1 ? 0xFFFFFFFFu : best;  // the newest entry's block
        blocks.push(selection_key(best, static_cast<uint32_t>(id)), best != kOrderedMinusInfinity);
      }
    }
    __syncthreads();
    entries.make_room(kTile);
    if (publishes) {
      blocks.make_room(kTile);
    }
  }
  write_ids(entries, selected, p.k);
  if (publishes) {
    __syncthreads();
    write_ids(blocks, published, p.candidate_width);
  }
}

}  // namespace

IndexProblem index_problem(const IndexSelectArgs& args) {
  const int64_t hi = args.w.dim(1), di = args.q.dim(1) / hi;
  const int64_t width = !args.candidates_out.empty() ? args.candidates_out.dim(1)
                        : !args.candidates.empty()   ? args.candidates.dim(1)
                                                     : 0;
  return {.position = args.rows.position.as<int32_t>(),
          .sequence = args.rows.sequence.as<int32_t>(),
          .q = args.q.data,
          .w = args.w.data,
          .rope = args.rope.as<float>(),
          .index = args.index,
          .candidates = static_cast<const int32_t*>(args.candidates.data),
          .candidates_out = static_cast<int32_t*>(args.candidates_out.data),
          .selected = args.selected.as<int32_t>(),
          .ratio = args.ratio,
          .half = args.rope.dim(1),
          .heads = static_cast<int>(hi),
          .dim = static_cast<int>(di),
          .k = static_cast<int>(args.selected.dim(1)),
          .candidate_width = static_cast<int>(width),
          .candidate_block = static_cast<int>(args.candidate_block),
          .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(di)) /
                                      std::sqrt(static_cast<double>(hi)))};
}

Status index_select(OpContext& ctx, const IndexSelectArgs& args) {
  if (index_split_supports(args)) {
    return index_split(ctx, args);
  }
  const IndexProblem p = index_problem(args);
  const bool publishes = p.candidates_out != nullptr;
  const Layout layout = shared_layout(p.heads, p.dim, p.k, publishes ? p.candidate_width : 0);
  if (layout.bytes > kSharedCapacity - 4096 || (publishes && p.candidate_block > kTile)) {
    return {Code::kUnimplemented,
            "op index_select: k " + std::to_string(p.k) + " and " +
                std::to_string(p.candidate_width) + " candidate blocks of " +
                std::to_string(p.candidate_block) + " exceed the shared memory of a block"};
  }
  return with_act(args.q.dtype, [&](auto act) {
    return launch(ctx,
                  "index_select",
                  index_select_kernel<decltype(act)>,
                  extent(args.rows.rows),
                  kThreads,
                  layout.bytes,
                  p,
                  layout);
  });
}

}  // namespace cachalot::ops::cuda
