// Routed and shared experts for any width, input type and weight format.
//
// in   x [T, D] act, experts [T, k] i32, weights [T, k] f32, per expert w1, w3 [F, D], w2 [D, F]
// out  y [T, D] act
// Per (token, slot), slot k being the shared expert: one warp per element.
//   hidden = round(silu(min(gate, limit)) clamp(up, limit) weight)  -> scratch [T, slots, F] act
//   hidden quantized to FP8 blocks if w2 is stored in a block format
//   out = round(w2 hidden)                                          -> scratch [T, slots, D] act
//   y = round(sum of out over slots in ascending order)
// No shared memory. The fallback of experts_mma.cu: reads the weights once per token.
#include "ops/cuda/device/reduce.cuh"
#include "ops/cuda/device/weight_value.cuh"
#include "ops/cuda/expert_table.cuh"
#include "ops/cuda/input.cuh"
#include "ops/cuda/kernels.h"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// A set of experts of one format and width.
struct Slots {
  const ExpertPointers* table;  // [E], device
  ExpertPointers shared;        // the only expert if table is null
  const int32_t* ids;           // [T, k]; null: shared
  const float* weights;         // [T, k]; null: 1
  int64_t experts;
  int64_t k;      // slots of this set
  int64_t first;  // index of its first slot
  int64_t slots;  // slots of all sets
  int64_t d;
  int64_t f;
};

// The expert of a slot; false for ids outside the table, which only padding rows have.
__device__ __forceinline__ bool find_expert(const Slots& s, int64_t pair, ExpertPointers& expert) {
  if (s.table == nullptr) {
    expert = s.shared;
    return true;
  }
  const int64_t id = s.ids[pair];
  if (id < 0 || id >= s.experts) {
    return false;
  }
  expert = s.table[id];
  return true;
}

template <class Act, Storage kStorage>
__device__ float warp_dot(
    const Act* x, const uint8_t* w, const uint8_t* scales, int64_t row, int64_t n) {
  float sum = 0;
  for (int64_t i = threadIdx.x % kWarp; i < n; i += kWarp) {
    sum = fmaf(to_float(x[i]), weight_value<kStorage>(w, scales, row, i, n), sum);
  }
  return warp_sum(sum);
}

template <class Act, Storage kStorage>
__global__ void __launch_bounds__(kThreads)
    hidden_kernel(const __grid_constant__ Slots s, const Act* x, float limit, Act* hidden) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.x / kWarp;
  const int64_t pair = blockIdx.x, token = pair / s.k;
  if (row >= s.f) {
    return;
  }
  Act* out = hidden + (token * s.slots + s.first + pair % s.k) * s.f + row;
  ExpertPointers expert;
  float h = 0;
  if (find_expert(s, pair, expert)) {
    const Act* input = x + token * s.d;
    const float gate = warp_dot<Act, kStorage>(input, expert.w1, expert.w1_scales, row, s.d);
    const float up = warp_dot<Act, kStorage>(input, expert.w3, expert.w3_scales, row, s.d);
    const float g = fminf(rounded<Act>(gate), limit);
    const float u = clamp_abs(rounded<Act>(up), limit);
    h = g / (1.0f + expf(-g)) * u * (s.weights == nullptr ? 1.0f : s.weights[pair]);
  }
  if (threadIdx.x % kWarp == 0) {
    *out = from_float<Act>(h);
  }
}

template <class Act, Storage kStorage>
__global__ void __launch_bounds__(kThreads)
    out_kernel(const __grid_constant__ Slots s, const Act* hidden, Act* out) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.x / kWarp;
  const int64_t pair = blockIdx.x, slot = pair / s.k * s.slots + s.first + pair % s.k;
  if (row >= s.d) {
    return;
  }
  ExpertPointers expert;
  float sum = 0;
  if (find_expert(s, pair, expert)) {
    sum = warp_dot<Act, kStorage>(hidden + slot * s.f, expert.w2, expert.w2_scales, row, s.f);
  }
  if (threadIdx.x % kWarp == 0) {
    out[slot * s.d + row] = from_float<Act>(sum);
  }
}

template <class Act>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const Act* out, int64_t count, int64_t slots, int64_t d, Act* y) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) {
    return;
  }
  const Act* row = out + i / d * slots * d + i % d;
  float sum = 0;
  for (int64_t s = 0; s < slots; ++s) {
    sum += to_float(row[s * d]);
  }
  y[i] = from_float<Act>(sum);
}

// Calls body.operator()<storage>().
template <class Body>
Status with_storage(WeightFormat format, const Body& body) {
  switch (format) {
    case WeightFormat::kF32:
      return body.template operator()<Storage::kF32>();
    case WeightFormat::kBF16:
      return body.template operator()<Storage::kBf16>();
    case WeightFormat::kFp4Row:
      return body.template operator()<Storage::kFp4Row>();
    default:
      return body.template operator()<Storage::kFp8Block>();
  }
}

template <class Act>
Status run_set(const OpContext& ctx,
               const ExpertsArgs& args,
               const Slots& s,
               WeightFormat format,
               Act* quantized,
               Act* hidden,
               Act* out) {
  const int64_t t = args.x.dim(0);
  const bool quantize = std::is_same_v<Act, Bf16> &&
                        (format == WeightFormat::kFp8Block || format == WeightFormat::kFp4Row);
  const auto* x = static_cast<const Act*>(args.x.data);
  if constexpr (std::is_same_v<Act, Bf16>) {
    if (quantize) {
      CACHALOT_RETURN_IF_ERROR(quantize_rows(ctx, x, t, s.d, quantized));
      x = quantized;
    }
  }
  return with_storage(format, [&]<Storage kStorage>() -> Status {
    CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                    "experts_hidden_simt",
                                    hidden_kernel<Act, kStorage>,
                                    dim3(extent(t * s.k), extent(ceil_div(s.f, kWarps))),
                                    kThreads,
                                    0,
                                    s,
                                    x,
                                    args.limit,
                                    hidden));
    if constexpr (std::is_same_v<Act, Bf16>) {
      if (quantize) {
        // Slots of other sets are quantized too; they are written again, or were read already.
        CACHALOT_RETURN_IF_ERROR(quantize_rows(ctx, hidden, t * s.slots, s.f, hidden));
      }
    }
    return launch(ctx,
                  "experts_out_simt",
                  out_kernel<Act, kStorage>,
                  dim3(extent(t * s.k), extent(ceil_div(s.d, kWarps))),
                  kThreads,
                  0,
                  s,
                  static_cast<const Act*>(hidden),
                  out);
  });
}

}  // namespace

Status experts_simt(OpContext& ctx, const ExpertsArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1), k = args.experts.dim(1);
  const bool has_shared = !args.shared.empty();
  const int64_t slots = k + (has_shared ? 1 : 0);
  const int64_t f = args.routed[0].w1.out;
  const int64_t shared_f = has_shared ? args.shared[0].w1.out : 0;
  CACHALOT_TRY(const ExpertPointers* table, expert_table(ctx.stream, args.routed));
  return with_act(args.x.dtype, [&](auto act) -> Status {
    using Act = decltype(act);
    Scratch scratch(ctx);
    auto* quantized = scratch.array<Act>(t * d);
    auto* hidden = scratch.array<Act>(t * slots * std::max(f, shared_f));
    auto* out = scratch.array<Act>(t * slots * d);
    CACHALOT_RETURN_IF_ERROR(scratch.status("experts"));
    Slots s{.table = table,
            .ids = args.experts.as<int32_t>(),
            .weights = args.weights.as<float>(),
            .experts = static_cast<int64_t>(args.routed.size()),
            .k = k,
            .first = 0,
            .slots = slots,
            .d = d,
            .f = f};
    CACHALOT_RETURN_IF_ERROR(
        run_set<Act>(ctx, args, s, args.routed[0].w1.format, quantized, hidden, out));
    if (has_shared) {
      s.table = nullptr;
      s.shared = expert_pointers(args.shared[0]);
      s.ids = nullptr;
      s.weights = nullptr;
      s.k = 1;
      s.first = k;
      s.f = shared_f;
      CACHALOT_RETURN_IF_ERROR(
          run_set<Act>(ctx, args, s, args.shared[0].w1.format, quantized, hidden, out));
    }
    return launch(ctx,
                  "experts_add",
                  add_kernel<Act>,
                  extent(ceil_div(t * d, kThreads)),
                  kThreads,
                  0,
                  static_cast<const Act*>(out),
                  t * d,
                  slots,
                  d,
                  static_cast<Act*>(args.y.data));
  });
}

}  // namespace cachalot::ops::cuda
