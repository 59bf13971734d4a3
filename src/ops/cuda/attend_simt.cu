// Attention over the window and the selected entries for any head size and type.
//
//   o_h = sum_j e^(s_j - m) v_j / (sum_j e^(s_j - m) + e^(sink_h - m)),  s_j = (RoPE(q_h) . k_j)
//   K^-1/2
//
// in   q [T, H, K] act, window rows and main rows (quant/block.h), selected [T, k], sink [H] f32
// out  o [T, H, K] act, rotated back
// One block of 128 threads per (token, head). Blocks of 64 keys: a warp per key takes the dot
// product, a thread per channel accumulates the output; rows are decoded twice. BF16 rounds the
// probabilities of a block against the running maximum. Shared: q and o (2 K floats), 64 scores,
// reduction slots. The fallback of attend_mma.cu.
#include "ops/cuda/attend.cuh"
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "quant/block.h"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

__device__ __forceinline__ float key_value(const uint8_t* row,
                                           bool is_window,
                                           int64_t n,
                                           int64_t i) {
  if (is_window) {
    return e4m3_value(row[i]) * e8m0_value(row[n + i / 32]);
  }
  return e2m1_value((row[i / 2] >> (4 * (i % 2))) & 15u) * e4m3_value(row[(n + 1) / 2 + i / 16]);
}

template <class Act>
__global__ void __launch_bounds__(kThreads) attend_kernel(const __grid_constant__ AttendProblem a) {
  __shared__ const uint8_t* rows[kKeyBlock];
  __shared__ bool in_window[kKeyBlock];
  __shared__ float scores[kKeyBlock];
  const int64_t n = a.head_dim;
  auto* q = reinterpret_cast<float*>(dynamic_shared());  // [K]
  float* o = q + n;                                      // [K]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const Act* query = static_cast<const Act*>(a.q) + (token * a.heads + head) * n;
  for (int64_t i = thread; i < n; i += kThreads) {
    q[i] = to_float(query[i]);
    o[i] = 0;
  }
  __syncthreads();
  const float* cos_sin = a.rope + token * a.half * 2;
  rotate_row<Act>(q, n, cos_sin, a.half);
  const QueryKeys keys = query_keys(a, token);
  const float scale = static_cast<float>(1.0 / sqrt(static_cast<double>(n)));
  float best = -1e30f, sum = 0;
  for (int begin = 0; begin < keys.keys; begin += kKeyBlock) {
    const int count = min(kKeyBlock, keys.keys - begin);
    if (thread < count) {
      rows[thread] = key_row(a, token, keys, begin + thread, in_window[thread]);
    }
    __syncthreads();
    for (int j = warp; j < count; j += kWarps) {
      float dot = 0;
      for (int64_t i = lane; i < n; i += kWarp) {
        dot = fmaf(q[i], key_value(rows[j], in_window[j], n, i), dot);
      }
      dot = warp_sum(dot);
      if (lane == 0) {
        scores[j] = dot * scale;
      }
    }
    __syncthreads();
    // Every thread keeps the running maximum and sum; the order is the same in all of them.
    float block_best = best;
    for (int j = 0; j < count; ++j) {
      block_best = fmaxf(block_best, scores[j]);
    }
    const float rescale = expf(best - block_best);
    best = block_best;
    sum *= rescale;
    for (int j = 0; j < count; ++j) {
      sum += expf(scores[j] - best);
    }
    for (int64_t i = thread; i < n; i += kThreads) {
      float value = o[i] * rescale;
      for (int j = 0; j < count; ++j) {
        value = fmaf(
            rounded<Act>(expf(scores[j] - best)), key_value(rows[j], in_window[j], n, i), value);
      }
      o[i] = value;
    }
    __syncthreads();
  }
  const float denominator = keys.keys > 0 ? sum + expf(a.sink[head] - best) : 1.0f;
  for (int64_t i = thread; i < n; i += kThreads) {
    o[i] = rounded<Act>(o[i] / denominator);
  }
  __syncthreads();
  Act* out = static_cast<Act*>(a.o) + (token * a.heads + head) * n;
  const int64_t tail = n - 2 * a.half;
  for (int64_t i = thread; i < tail; i += kThreads) {
    out[i] = from_float<Act>(o[i]);
  }
  for (int64_t i = thread; i < a.half; i += kThreads) {
    const float2 v =
        rotate_pair(o[tail + 2 * i], o[tail + 2 * i + 1], cos_sin[2 * i], -cos_sin[2 * i + 1]);
    out[tail + 2 * i] = from_float<Act>(v.x);
    out[tail + 2 * i + 1] = from_float<Act>(v.y);
  }
}

}  // namespace

AttendProblem attend_problem(const AttendArgs& args) {
  const int64_t h = args.sink.dim(0), k = args.q.dim(1) / h;
  const bool has_main = args.main != nullptr;
  return {.position = args.rows.position.as<int32_t>(),
          .sequence = args.rows.sequence.as<int32_t>(),
          .row_begin = args.rows.row_begin.as<int32_t>(),
          .start = args.rows.start.as<int32_t>(),
          .floor = args.window.floor.as<int32_t>(),
          .fresh = args.window.fresh.as<uint8_t>(),
          .rings = args.window.rings,
          .main = args.main,
          .selected = has_main ? args.selected.as<int32_t>() : nullptr,
          .rope = args.rope.as<float>(),
          .sink = args.sink.as<float>(),
          .q = args.q.data,
          .o = args.o.data,
          .window = args.window.window,
          .block = args.window.block,
          .window_row_bytes = quant::window_row_bytes(k),
          .width = has_main ? args.selected.dim(1) : 0,
          .half = args.rope.dim(1),
          .tokens = args.rows.rows,
          .heads = static_cast<int>(h),
          .head_dim = static_cast<int>(k)};
}

Status attend_simt(OpContext& ctx, const AttendArgs& args) {
  const AttendProblem a = attend_problem(args);
  return with_act(args.q.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "attend_simt",
                  attend_kernel<Act>,
                  dim3(extent(a.tokens), extent(a.heads)),
                  kThreads,
                  2 * a.head_dim * static_cast<int64_t>(sizeof(float)),
                  a);
  });
}

}  // namespace cachalot::ops::cuda
