// Routed (FP4) and shared (FP8) experts on tensor cores, for BF16 inputs: routing, and the sum of
// the experts' outputs. The products are in experts_few.cu and experts_many.cu; experts_direct.cu
// does all of it for one or two tokens.
//
//   y = round(sum over slots, ascending, of round(w2 hidden) + round(shared))
//
// in   x [T, D] bf16, experts [T, k] i32, weights [T, k] f32, w1, w3 [F, D], w2 [D, F]
// out  y [T, D] bf16
//
// route     one block sorts the (token, slot) pairs by expert and cuts them into groups; a call of
//           one or two tokens needs none: every pair is a group
// prepare   x quantized, in the FP4 and the FP8 column order -> scratch; for many tokens as images,
//           a copy of its token for every pair
// hidden    see experts_few.cu
// out
// combine   slots added in ascending order; 8 columns per thread
//
// Shared: 32 KiB in route. Bound by the products; the small kernels cost a launch each.
// Ids outside the table, which only padding rows have, go to no group and add nothing.
#include "ops/cuda/device/pieces.cuh"
#include "ops/cuda/experts.cuh"
#include "ops/cuda/input.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/linear.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRouteThreads = 1024;
constexpr int kMaxExperts = 2048;

// One block: sorts the pairs by expert. An expert's groups have one size, so that none is nearly
// empty, and begin at whole token tiles; what lies between is -1. The order inside an expert does
// not matter: every pair's result depends on the pair alone.
__global__ void __launch_bounds__(kRouteThreads) route_kernel(const int32_t* experts,
                                                              int pairs,
                                                              int expert_count,
                                                              int group_tokens,
                                                              int positions,
                                                              int* pair_of,
                                                              int* group_of,
                                                              ExpertGroup* groups,
                                                              int* group_count) {
  __shared__ int count[kMaxExperts];
  __shared__ int begin[kMaxExperts];
  __shared__ int group_begin[kMaxExperts];
  __shared__ int taken[kMaxExperts];
  __shared__ int total;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < expert_count; e += kRouteThreads) {
    count[e] = 0;
  }
  for (int i = thread; i < positions; i += kRouteThreads) {
    pair_of[i] = -1;
  }
  __syncthreads();
  for (int i = thread; i < pairs; i += kRouteThreads) {
    const int e = experts[i];
    if (e >= 0 && e < expert_count) {
      atomicAdd(&count[e], 1);
    }
  }
  __syncthreads();
  const auto groups_of = [&](int n) { return (n + group_tokens - 1) / group_tokens; };
  // Tokens of a group, and places of it.
  const auto size_of = [&](int n) { return n == 0 ? 0 : (n + groups_of(n) - 1) / groups_of(n); };
  const auto room_of = [&](int n) {
    return (size_of(n) + kTokenTile - 1) / kTokenTile * kTokenTile;
  };
  // One warp scans the counts, 32 experts at a time.
  if (thread < kWarp) {
    int place_sum = 0, group_sum = 0;
    for (int e0 = 0; e0 < expert_count; e0 += kWarp) {
      const int e = e0 + thread;
      const int n = e < expert_count ? count[e] : 0;
      const int g = groups_of(n), places = g * room_of(n);
      int place_scan = places, g_scan = g;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int place_up = __shfl_up_sync(kAllLanes, place_scan, step);
        const int g_up = __shfl_up_sync(kAllLanes, g_scan, step);
        place_scan += thread >= step ? place_up : 0;
        g_scan += thread >= step ? g_up : 0;
      }
      if (e < expert_count) {
        begin[e] = place_sum + place_scan - places;
        group_begin[e] = group_sum + g_scan - g;
      }
      place_sum += __shfl_sync(kAllLanes, place_scan, kWarp - 1);
      group_sum += __shfl_sync(kAllLanes, g_scan, kWarp - 1);
    }
    if (thread == 0) {
      total = group_sum;
    }
  }
  __syncthreads();
  if (thread == 0) {
    *group_count = total;
  }
  for (int e = thread; e < expert_count; e += kRouteThreads) {
    const int n = count[e], size = size_of(n), room = room_of(n);
    for (int g = 0; g < groups_of(n); ++g) {
      groups[group_begin[e] + g] = {e, begin[e] + g * room, min(size, n - g * size)};
    }
    taken[e] = 0;
  }
  __syncthreads();
  for (int i = thread; i < pairs; i += kRouteThreads) {
    const int e = experts[i];
    if (e >= 0 && e < expert_count) {
      const int at = atomicAdd(&taken[e], 1), size = size_of(count[e]), g = at / size;
      const int place = begin[e] + g * room_of(count[e]) + at % size;
      pair_of[place] = i;
      group_of[place] = group_begin[e] + g;
    }
  }
}

// x as the images of the groups: eight columns of one place per thread.
__global__ void __launch_bounds__(kThreads) gather_kernel(const Bf16* x,
                                                          const int* pair_of,
                                                          const int* group_of,
                                                          const ExpertGroup* groups,
                                                          int64_t positions,
                                                          int k,
                                                          int64_t d,
                                                          Bf16* out) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, pieces = d / 8;
  const int64_t place = i / pieces, piece = i % pieces;
  // A warp is in one row: rows have whole chunks of 32 pieces.
  if (place >= positions || pair_of[place] < 0) {
    return;
  }
  const ExpertGroup group = groups[group_of[place]];
  float v[8];
  load_elements<8>(x + pair_of[place] / k * d + piece * 8, v);
  quantize_piece(v);
  store_image<InputLayout::kFp4>(
      out + group.begin * d, image_rows(group.count), place - group.begin, piece, v);
}

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ ExpertProblem p) {
  wait_for_previous_kernels();
  allow_next_kernel();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= p.tokens * p.d) {
    return;
  }
  const int64_t token = i / p.d, column = i % p.d;
  float sum[8] = {}, v[8];
  for (int s = 0; s < p.k; ++s) {
    const int32_t expert = p.ids[token * p.k + s];
    if (expert < 0 || expert >= p.experts) {
      continue;
    }
    load_elements<8>(p.out_routed + (token * p.k + s) * p.d + column, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum[e] += v[e];
    }
  }
  if (p.has_shared) {
    load_elements<8>(p.out_shared + i, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum[e] += v[e];
    }
  }
  store_elements<8>(p.y + i, sum);
}

// Tokens of a group, by the mean number of tokens of an expert.
int64_t group_tokens(int64_t pairs, int64_t experts) {
  const int64_t mean = pairs / experts;
  return mean <= 4 ? kTokenTile : mean <= 16 ? 32 : mean <= 70 ? 80 : 160;
}

}  // namespace

bool experts_mma_supports(const ExpertsArgs& args) {
  const auto fits = [](std::span<const ExpertView> experts, WeightFormat format) {
    for (const ExpertView& expert : experts) {
      for (const Weight* w : {&expert.w1, &expert.w3, &expert.w2}) {
        if (w->format != format || !fragments_support(*w)) {
          return false;
        }
      }
    }
    return true;
  };
  return args.x.dtype == DType::kBF16 && args.routed.size() <= kMaxExperts &&
         fits(args.routed, WeightFormat::kFp4Row) && fits(args.shared, WeightFormat::kFp8Block) &&
         (args.shared.empty() || args.shared[0].w1.out == args.routed[0].w1.out) &&
         reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(args.y.data) % 16 == 0;
}

Status experts_mma(OpContext& ctx, const ExpertsArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1), k = args.experts.dim(1);
  const int64_t f = args.routed[0].w1.out, pairs = t * k;
  const auto experts = static_cast<int64_t>(args.routed.size());
  const bool has_shared = !args.shared.empty(), direct = t <= kDirectTokens;
  CACHALOT_TRY(const ExpertPointers* table, expert_table(ctx.stream, args.routed));
  const int64_t tokens = direct ? kTokenTile : group_tokens(pairs, experts);
  // Groups of the routed experts at most, and of the shared one. Without routing, one per pair.
  const int64_t routed_groups = direct ? pairs : std::min(pairs, experts + pairs / tokens);
  const int64_t groups = routed_groups + (has_shared ? ceil_div(t, tokens) : 0);
  const bool wide = tokens > kTokenTile;
  // Places of pair_of, and rows of x and hidden.
  const int64_t positions = pairs + kTokenTile * routed_groups;
  const int64_t routed_rows = wide ? positions : pairs, shared_rows = wide ? image_rows(t) : t;

  Scratch scratch(ctx);
  auto* pair_of = scratch.array<int>(positions);
  auto* group_of = scratch.array<int>(positions);
  auto* group_list = scratch.array<ExpertGroup>(routed_groups);
  auto* group_count = scratch.array<int>(1);
  auto* x_fp4 = scratch.array<Bf16>((wide ? positions : t) * d);
  auto* x_fp8 = scratch.array<Bf16>(has_shared ? shared_rows * d : 1);
  const ExpertProblem p{.table = table,
                        .shared = has_shared ? expert_pointers(args.shared[0]) : ExpertPointers{},
                        .has_shared = has_shared,
                        .experts = static_cast<int>(experts),
                        .tokens = t,
                        .d = d,
                        .f = f,
                        .k = static_cast<int>(k),
                        .limit = args.limit,
                        .ids = args.experts.as<int32_t>(),
                        .weights = args.weights.as<float>(),
                        .pair_of = direct ? nullptr : pair_of,
                        .groups = group_list,
                        .group_count = group_count,
                        .group_tokens = static_cast<int>(tokens),
                        .x = static_cast<const Bf16*>(args.x.data),
                        .x_fp4 = x_fp4,
                        .x_fp8 = x_fp8,
                        .hidden_routed = scratch.array<Bf16>(routed_rows * f),
                        .hidden_shared = scratch.array<Bf16>(has_shared ? shared_rows * f : 1),
                        .out_routed = scratch.array<Bf16>(pairs * d),
                        .out_shared = scratch.array<Bf16>(has_shared ? t * d : 1),
                        .y = static_cast<Bf16*>(args.y.data)};
  CACHALOT_RETURN_IF_ERROR(scratch.status("experts"));

  if (experts_direct_supports(p)) {
    return experts_direct(ctx, p);
  }
  if (!direct) {
    CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                    "experts_route",
                                    route_kernel,
                                    1,
                                    kRouteThreads,
                                    0,
                                    p.ids,
                                    static_cast<int>(pairs),
                                    static_cast<int>(experts),
                                    static_cast<int>(tokens),
                                    static_cast<int>(positions),
                                    pair_of,
                                    group_of,
                                    group_list,
                                    group_count));
  }
  // The products read the routing before they wait. The kernels in front of them let them start
  // only after their own wait, which covers the routing.
  const auto* x = static_cast<const Bf16*>(args.x.data);
  if (!wide) {
    CACHALOT_RETURN_IF_ERROR(
        prepare_experts_input(ctx, x, t, d, x_fp4, has_shared ? x_fp8 : nullptr));
  } else {
    if (has_shared) {
      CACHALOT_RETURN_IF_ERROR(
          prepare_image(ctx, x, t, d, d, static_cast<int>(tokens), InputLayout::kFp8, true, x_fp8));
    }
    CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                    "experts_gather",
                                    gather_kernel,
                                    extent(ceil_div(positions * (d / 8), kThreads)),
                                    kThreads,
                                    0,
                                    x,
                                    pair_of,
                                    group_of,
                                    group_list,
                                    positions,
                                    static_cast<int>(k),
                                    d,
                                    x_fp4));
  }
  CACHALOT_RETURN_IF_ERROR(!wide ? experts_few(ctx, p, groups) : experts_many(ctx, p, groups));
  return launch(ctx,
                "experts_combine",
                combine_kernel,
                extent(ceil_div(t * d, kThreads * 8)),
                kThreads,
                0,
                p);
}

}  // namespace cachalot::ops::cuda
