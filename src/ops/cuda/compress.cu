// The compressor: closing groups become latents, latents and keys become cache rows.
//
// compress_pool   ratio 2: pooled = sum_i kv_i softmax_i(gate_i) per channel over the group's two
//                 tokens; ratio 1: pooled = kv. latent = norm(pooled).
//   in   kv, gate [T, C] f32 (ratio 2) or kv [T, C] act (ratio 1), open [S] -> [2, C] f32
//   out  latent [G, C] act
// compress_store  main row = FP4(RoPE(latent)), index row = FP4(RoPE(k_norm(key)))
//   in   latent [G, C] act, key [G, DI] act, rope [G, R/2, 2] f32
//   out  row `entry` of the pages of the group's sequence
// One block of 128 threads per group (and, in the store, per kind of row). Shared: one row as FP32
// and the reduction slots. Bytes: a few kilobytes per group; launch-bound at decode.
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 128;

// kv and gate of the two tokens of a ratio-2 group.
struct GroupRow {
  const float* kv[2];
  const float* gate[2];
};

template <class Act>
__global__ void __launch_bounds__(kThreads) pool_kernel(const int32_t* group_row,
                                                        const int32_t* group_sequence,
                                                        const int32_t* row_begin,
                                                        const void* kv,
                                                        const float* gate,
                                                        const float* const* open,
                                                        int64_t ratio,
                                                        int64_t c,
                                                        Param norm,
                                                        float eps,
                                                        Act* latent) {
  __shared__ float slots[kThreads / kWarp];
  auto* pooled = reinterpret_cast<float*>(dynamic_shared());  // [C]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t last = group_row[blockIdx.x];
  GroupRow group{};
  if (ratio == 2) {
    const int32_t s = group_sequence[blockIdx.x];
    const bool carried = last == row_begin[s];
    const auto* rows = static_cast<const float*>(kv);
    group.kv[0] = carried ? open[s] : rows + (last - 1) * c;
    group.gate[0] = carried ? open[s] + c : gate + (last - 1) * c;
    group.kv[1] = rows + last * c;
    group.gate[1] = gate + last * c;
  }
  float square = 0;
  for (int64_t i = threadIdx.x; i < c; i += kThreads) {
    float v;
    if (ratio == 2) {
      // Softmax over two is a sigmoid of the difference.
      const float w = 1.0f / (1.0f + expf(group.gate[0][i] - group.gate[1][i]));
      v = rounded<Act>(group.kv[0][i] * (1.0f - w) + group.kv[1][i] * w);
    } else {
      v = to_float(static_cast<const Act*>(kv)[last * c + i]);
    }
    pooled[i] = v;
    square = fmaf(v, v, square);
  }
  const float factor = rms_factor(block_sum(square, slots), c, eps);
  for (int64_t i = threadIdx.x; i < c; i += kThreads) {
    latent[blockIdx.x * c + i] = from_float<Act>(pooled[i] * factor * norm[i]);
  }
}

template <class Act>
__global__ void __launch_bounds__(kThreads) store_kernel(const int32_t* group_sequence,
                                                         const int32_t* group_entry,
                                                         const Act* latent,
                                                         const Act* key,
                                                         int64_t c,
                                                         int64_t di,
                                                         Param k_norm,
                                                         const float* rope,
                                                         int64_t half,
                                                         float eps,
                                                         const PagedRows* main_pages,
                                                         const PagedRows* index_pages) {
  __shared__ float slots[kThreads / kWarp];
  auto* row = reinterpret_cast<float*>(dynamic_shared());  // [max(C, DI)]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t g = blockIdx.x;
  const int32_t s = group_sequence[g];
  const int64_t entry = group_entry[g];
  if (entry < 0) {
    return;
  }
  const float* cos_sin = rope + g * half * 2;
  if (blockIdx.y == 0) {
    for (int64_t i = threadIdx.x; i < c; i += kThreads) {
      row[i] = to_float(latent[g * c + i]);
    }
    __syncthreads();
    rotate_row<Act>(row, c, cos_sin, half);
    encode_row<RowFormat::kMain>(row, c, main_pages[s].row(entry));
  } else {
    norm_row(key + g * di, di, k_norm, eps, row, slots);
    rotate_row<Act>(row, di, cos_sin, half);
    encode_row<RowFormat::kIndex>(row, di, index_pages[s].row(entry));
  }
}

}  // namespace

Status compress_pool(OpContext& ctx, const CompressPoolArgs& args) {
  const int64_t c = args.norm.dim(0);
  return with_act(args.latent.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "compress_pool",
                  pool_kernel<Act>,
                  extent(args.groups.groups),
                  kThreads,
                  c * static_cast<int64_t>(sizeof(float)),
                  args.groups.row.as<int32_t>(),
                  args.groups.sequence.as<int32_t>(),
                  args.rows.row_begin.as<int32_t>(),
                  args.kv.data,
                  static_cast<const float*>(args.gate.data),
                  args.open,
                  args.groups.ratio,
                  c,
                  param(args.norm),
                  args.rms_eps,
                  static_cast<Act*>(args.latent.data));
  });
}

Status compress_store(OpContext& ctx, const CompressStoreArgs& args) {
  const int64_t c = args.latent.dim(1), di = args.key.dim(1);
  return with_act(args.latent.dtype, [&](auto act) {
    using Act = decltype(act);
    return launch(ctx,
                  "compress_store",
                  store_kernel<Act>,
                  dim3(extent(args.groups.groups), 2),
                  kThreads,
                  std::max(c, di) * static_cast<int64_t>(sizeof(float)),
                  args.groups.sequence.as<int32_t>(),
                  args.groups.entry.as<int32_t>(),
                  static_cast<const Act*>(args.latent.data),
                  static_cast<const Act*>(args.key.data),
                  c,
                  di,
                  param(args.k_norm),
                  args.rope.as<float>(),
                  args.rope.dim(1),
                  args.rms_eps,
                  args.main,
                  args.index);
  });
}

}  // namespace cachalot::ops::cuda
