// Hyper-connections for any width and type: hc_expand, and hc_site without tensor cores.
//
// hc_expand  out_k = post_k y + sum_j comb_jk x_j
//   in   x [T, M, D] act, y [T, D] act, post [T, M], comb [T, M, M] f32     out  out [T, M, D] act
//   One thread per 8 columns (1 where D asks for it) and token. Bytes: (2 M + 1) D elements per
//   token.
// hc_site    the formula of ops.h in three kernels: expand; coefficients (one block per token,
// eight
//   rows of fn at a time, then the Sinkhorn iterations on M x M threads); collapse and norm.
//   in   fn [(2 + M) M, M D] f32, base, scale, pre [T, M], norm [D]
//   out  x_out, pre_out, post_out, comb_out, u
//   Shared: the collapsed row (D floats), 8 x 8 coefficients, reduction slots. For F32 streams and
//   small models; hc_mma.cu is the form for the real one.
#include "ops/cuda/device/rows.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/streams.cuh"

namespace cachalot::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;  // rows of fn per pass

template <class Act, int kStreams, int kVector>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const Act* x, PendingRows<Act> pending, int m, int64_t d, Act* out) {
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.y;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (i >= d) {
    return;
  }
  float v[kStreams][kVector];
  expand_columns<Act, kStreams, kVector>(x + token * m * d, pending.row(token, m, d), m, d, i, v);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    if (j < m) {
      store_elements<kVector>(out + (token * m + j) * d + i, v[j]);
    }
  }
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

// One thread per element of c [M, M] in shared memory; all threads of the block call it.
__device__ void sinkhorn(float* c, int m, float eps, int iters) {
  const int i = static_cast<int>(threadIdx.x), j = i / m, k = i % m;
  const bool mine = i < m * m;
  const auto normalize = [&](int begin, int stride, float floor) {
    float sum = floor;
    for (int e = 0; mine && e < m; ++e) {
      sum += c[begin + e * stride];
    }
    __syncthreads();
    if (mine) {
      c[i] /= sum;
    }
    __syncthreads();
  };
  float best = -INFINITY;
  for (int e = 0; mine && e < m; ++e) {
    best = fmaxf(best, c[j * m + e]);
  }
  __syncthreads();
  if (mine) {
    c[i] = expf(c[i] - best);
  }
  __syncthreads();
  normalize(j * m, 1, 0.0f);
  if (mine) {
    c[i] += eps;
  }
  __syncthreads();
  for (int iter = 0; iter < iters; ++iter) {
    if (iter > 0) {
      normalize(j * m, 1, eps);
    }
    normalize(k, m, eps);
  }
}

template <class Act>
__global__ void __launch_bounds__(kThreads) coefficient_kernel(const Act* x,
                                                               const float* fn,
                                                               const float* base,
                                                               const float* scale,
                                                               int m,
                                                               int64_t width,
                                                               float rms_eps,
                                                               float hc_eps,
                                                               int iters,
                                                               float* pre_out,
                                                               float* post_out,
                                                               float* comb_out) {
  __shared__ float slots[(kRows + 1) * kThreads / kWarp];
  __shared__ float coefficient[(2 + kMaxStreams) * kMaxStreams];
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  const int count = (2 + m) * m;
  const Act* v = x + token * width;
  for (int first = 0; first < count; first += kRows) {
    float sums[kRows + 1] = {};  // the last one is the sum of squares
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const float value = to_float(v[i]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first + r < count) {
          sums[r] = fmaf(fn[(first + r) * width + i], value, sums[r]);
        }
      }
      sums[kRows] = fmaf(value, value, sums[kRows]);
    }
    block_sum(sums, slots);
    const float factor = rms_factor(sums[kRows], width, rms_eps);
    if (threadIdx.x == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first + r < count) {
          const int kind = first + r < m ? 0 : first + r < 2 * m ? 1 : 2;
          coefficient[first + r] = sums[r] * factor * scale[kind] + base[first + r];
        }
      }
    }
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i < m) {
    pre_out[token * m + i] = sigmoid(coefficient[i]) + hc_eps;
    post_out[token * m + i] = 2.0f * sigmoid(coefficient[m + i]);
  }
  float* comb = coefficient + 2 * m;
  sinkhorn(comb, m, hc_eps, iters);
  if (i < m * m) {
    comb_out[token * m * m + i] = comb[i];
  }
}

template <class Act>
__global__ void __launch_bounds__(kThreads) collapse_kernel(
    const Act* x, const float* pre, Param norm, int m, int64_t d, float eps, Act* u) {
  __shared__ float slots[kThreads / kWarp];
  auto* row = reinterpret_cast<float*>(dynamic_shared());  // [D]
  allow_next_kernel();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  float square = 0;
  for (int64_t i = threadIdx.x; i < d; i += kThreads) {
    float v = 0;
    for (int j = 0; j < m; ++j) {
      v = fmaf(pre[token * m + j], to_float(x[(token * m + j) * d + i]), v);
    }
    v = rounded<Act>(v);
    row[i] = v;
    square = fmaf(v, v, square);
  }
  const float factor = rms_factor(block_sum(square, slots), d, eps);
  for (int64_t i = threadIdx.x; i < d; i += kThreads) {
    u[token * d + i] = from_float<Act>(row[i] * factor * norm[i]);
  }
}

template <class Act>
Status expand(OpContext& ctx, const TensorView& x, const Pending& pending, const TensorView& out) {
  const int64_t t = x.dim(0), m = x.dim(1), d = x.dim(2);
  const bool vector = d % 8 == 0 && m <= 4;
  return launch(ctx,
                "hc_expand",
                vector ? expand_kernel<Act, 4, 8> : expand_kernel<Act, kMaxStreams, 1>,
                dim3(extent(ceil_div(d, kThreads * (vector ? 8 : 1))), extent(t)),
                kThreads,
                0,
                static_cast<const Act*>(x.data),
                pending_rows<Act>(pending),
                static_cast<int>(m),
                d,
                static_cast<Act*>(out.data));
}

}  // namespace

Status hc_expand(OpContext& ctx, const HcExpandArgs& args) {
  return with_act(args.x.dtype, [&](auto act) {
    return expand<decltype(act)>(ctx, args.x, args.pending, args.out);
  });
}

Status hc_site_simt(OpContext& ctx, const HcSiteArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  return with_act(args.x.dtype, [&](auto act) -> Status {
    using Act = decltype(act);
    if (args.x_out.data != args.x.data) {
      CACHALOT_RETURN_IF_ERROR(expand<Act>(ctx, args.x, args.pending, args.x_out));
    }
    CACHALOT_RETURN_IF_ERROR(launch(ctx,
                                    "hc_coefficients",
                                    coefficient_kernel<Act>,
                                    extent(t),
                                    kThreads,
                                    0,
                                    static_cast<const Act*>(args.x_out.data),
                                    args.fn.as<float>(),
                                    args.base.as<float>(),
                                    args.scale.as<float>(),
                                    static_cast<int>(m),
                                    m * d,
                                    args.rms_eps,
                                    args.hc_eps,
                                    args.sinkhorn_iters,
                                    args.pre_out.as<float>(),
                                    args.post_out.as<float>(),
                                    args.comb_out.as<float>()));
    return launch(ctx,
                  "hc_collapse",
                  collapse_kernel<Act>,
                  extent(t),
                  kThreads,
                  d * static_cast<int64_t>(sizeof(float)),
                  static_cast<const Act*>(args.x_out.data),
                  args.pre.as<float>(),
                  param(args.norm),
                  static_cast<int>(m),
                  d,
                  args.rms_eps,
                  static_cast<Act*>(args.u.data));
  });
}

}  // namespace cachalot::ops::cuda
