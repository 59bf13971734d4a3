// Engram: row ids by n-gram hash, gathered rows, gated injection into the streams.
//
// engram_hash    in   classes [T + S (N-1)] i32, multiplier [N], prime, offset [N-1, heads] i64
//                out  ids [T, (N-1) heads] i32; one thread per token
// engram_gather  in   ids [T, columns] i32 or none, table [rows, width] FP8 + E8M0 per 32, or f32
//                out  e [T, columns width] act; one warp per id; random reads of width + width/32 B
// engram_inject  in   x [T, M, D] act, kv [T, (M+1) D] act (M keys, then the value), is_image [T]
//                out  out [T, M, D] act: x_i + gate_i value, one rounding,
//                     gate_i = sigmoid(signed_sqrt(rms(x_i) . rms(key_i))), 0 in image spans
//                one block per (token, stream); two passes over x_i, the second one hits L1/L2
// Bound by bytes: (2M + 1 + M) D elements per token for the injection. An id outside the table,
// which only padding rows have, gives a zero row.
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void hash_kernel(const int32_t* sequence,
                            const int32_t* classes,
                            const int64_t* multiplier,
                            const int64_t* prime,
                            const int64_t* offset,
                            int32_t blocked_class,
                            int64_t rows,
                            int64_t n,
                            int64_t heads,
                            int32_t* ids) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) {
    return;
  }
  const int32_t* current = classes + row + (sequence[row] + 1) * (n - 1);
  bool blocked = false;
  int64_t hash = 0;
  for (int64_t back = 0; back < n; ++back) {
    const int32_t id = current[-back];
    blocked = blocked || id < 0;
    hash ^= (blocked ? blocked_class : id) * multiplier[back];
    for (int64_t h = 0; back > 0 && h < heads; ++h) {
      const int64_t column = (back - 1) * heads + h;
      ids[row * (n - 1) * heads + column] =
          static_cast<int32_t>(hash % prime[column] + offset[column]);
    }
  }
}

template <class Act>
__global__ void __launch_bounds__(kThreads) gather_kernel(const int32_t* ids,
                                                          int64_t count,
                                                          const void* values,
                                                          const uint8_t* scales,
                                                          int64_t table_rows,
                                                          int64_t width,
                                                          Act* e) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (i >= count) {
    return;
  }
  const int64_t id = ids == nullptr ? i : ids[i];
  const bool known = id >= 0 && id < table_rows;
  for (int64_t j = threadIdx.x % kWarp; j < width; j += kWarp) {
    float v = 0;
    if (known && scales != nullptr) {
      v = e4m3_value(static_cast<const uint8_t*>(values)[id * width + j]) *
          e8m0_value(scales[id * ((width + 31) / 32) + j / 32]);
    } else if (known) {
      v = static_cast<const float*>(values)[id * width + j];
    }
    e[i * width + j] = from_float<Act>(v);
  }
}

template <class Act, int kVector>
__global__ void __launch_bounds__(kThreads) inject_kernel(const Act* x,
                                                          const Act* kv,
                                                          Param q_weight,
                                                          Param k_weight,
                                                          const uint8_t* is_image,
                                                          int64_t m,
                                                          int64_t d,
                                                          float eps,
                                                          Act* out) {
  __shared__ float slots[3 * kThreads / kWarp];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x, stream = blockIdx.y;
  const Act* row = x + (token * m + stream) * d;
  const Act* key = kv + (token * (m + 1) + stream) * d;
  const Act* value = kv + (token * (m + 1) + m) * d;
  float sums[3] = {};  // x x, key key, x gain key
  for (int64_t i = threadIdx.x * kVector; i < d; i += kThreads * kVector) {
    float a[kVector], b[kVector];
    load_elements<kVector>(row + i, a);
    load_elements<kVector>(key + i, b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float gain = q_weight[stream * d + i + j] * k_weight[stream * d + i + j];
      sums[0] = fmaf(a[j], a[j], sums[0]);
      sums[1] = fmaf(b[j], b[j], sums[1]);
      sums[2] = fmaf(a[j] * gain, b[j], sums[2]);
    }
  }
  block_sum(sums, slots);
  const float dot = sums[2] * rms_factor(sums[0], d, eps) * rms_factor(sums[1], d, eps) *
                    static_cast<float>(1.0 / sqrt(static_cast<double>(d)));
  const float z = copysignf(sqrtf(fmaxf(fabsf(dot), 1e-6f)), dot);
  const float gate = is_image[token] != 0 ? 0.0f : 1.0f / (1.0f + expf(-z));
  for (int64_t i = threadIdx.x * kVector; i < d; i += kThreads * kVector) {
    float a[kVector], v[kVector];
    load_elements<kVector>(row + i, a);
    load_elements<kVector>(value + i, v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      a[j] = fmaf(gate, v[j], a[j]);
    }
    store_elements<kVector>(out + (token * m + stream) * d + i, a);
  }
}

}  // namespace

Status engram_hash(OpContext& ctx, const EngramHashArgs& args) {
  return launch(ctx,
                "engram_hash",
                hash_kernel,
                extent(ceil_div(args.rows.rows, 128)),
                128,
                0,
                args.rows.sequence.as<int32_t>(),
                args.classes.as<int32_t>(),
                args.multiplier.as<int64_t>(),
                args.prime.as<int64_t>(),
                args.offset.as<int64_t>(),
                args.blocked_class,
                args.rows.rows,
                args.multiplier.dim(0),
                args.prime.dim(1),
                args.ids.as<int32_t>());
}

Status engram_gather(OpContext& ctx, const EngramGatherArgs& args) {
  const int64_t count = args.e.shape.elements() / args.table.in;
  return with_act(args.e.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "engram_gather",
                  gather_kernel<Act>,
                  extent(ceil_div(count, kThreads / kWarp)),
                  kThreads,
                  0,
                  args.ids.empty() ? nullptr : args.ids.as<int32_t>(),
                  count,
                  args.table.values.data,
                  static_cast<const uint8_t*>(args.table.scales.data),
                  args.table.out,
                  args.table.in,
                  static_cast<Act*>(args.e.data));
  });
}

Status engram_inject(OpContext& ctx, const EngramInjectArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  return with_act(args.x.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "engram_inject",
                  d % 8 == 0 ? inject_kernel<Act, 8> : inject_kernel<Act, 1>,
                  dim3(extent(t), extent(m)),
                  kThreads,
                  0,
                  static_cast<const Act*>(args.x.data),
                  static_cast<const Act*>(args.kv.data),
                  param(args.q_weight),
                  param(args.k_weight),
                  args.rows.is_image.as<uint8_t>(),
                  m,
                  d,
                  args.rms_eps,
                  static_cast<Act*>(args.out.data));
  });
}

}  // namespace cachalot::ops::cuda
