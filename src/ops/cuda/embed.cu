// Token embedding: x[t, m, :] = weight[token[t]], or images[-1 - token[t]], for every stream m.
//
// in   token [T] i32, weight [V, D] bf16|f32, images [I, D] act        out  x [T, M, D] act
// One block per token, 16 bytes per thread and step where D allows it; no shared memory.
// Bytes: D reads and M D writes per token. Ids outside [-I, V), which only padding rows have, give
// zero rows: nothing outside the tables is read.
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;

template <class Act, class W, int kVector>
__global__ void __launch_bounds__(kThreads) embed_kernel(const int32_t* token,
                                                         const W* weight,
                                                         int64_t vocabulary,
                                                         const Act* images,
                                                         int64_t image_rows,
                                                         Act* x,
                                                         int64_t m,
                                                         int64_t d) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t id = token[blockIdx.x];
  for (int64_t i = threadIdx.x * kVector; i < d; i += kThreads * kVector) {
    float v[kVector] = {};
    if (id >= 0 && id < vocabulary) {
      load_elements<kVector>(weight + id * d + i, v);
    } else if (id < 0 && -1 - id < image_rows) {
      load_elements<kVector>(images + (-1 - id) * d + i, v);
    }
    for (int64_t j = 0; j < m; ++j) {
      store_elements<kVector>(x + (blockIdx.x * m + j) * d + i, v);
    }
  }
}

template <class Act, class W>
Status run(OpContext& ctx, const EmbedArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  return launch(ctx,
                "embed",
                d % 8 == 0 ? embed_kernel<Act, W, 8> : embed_kernel<Act, W, 1>,
                extent(t),
                kThreads,
                0,
                args.token.as<int32_t>(),
                static_cast<const W*>(args.weight.values.data),
                args.weight.out,
                static_cast<const Act*>(args.images.data),
                args.images.empty() ? 0 : args.images.dim(0),
                static_cast<Act*>(args.x.data),
                m,
                d);
}

}  // namespace

Status embed(OpContext& ctx, const EmbedArgs& args) {
  return with_act(args.x.dtype, [&](auto act) {
    using Act = decltype(act);
    return args.weight.format == WeightFormat::kBF16 ? run<Act, Bf16>(ctx, args)
                                                     : run<Act, float>(ctx, args);
  });
}

}  // namespace cachalot::ops::cuda
