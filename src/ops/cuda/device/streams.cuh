// Residual streams: what a sublayer's pending output makes of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/device/num.cuh"

namespace cachalot::ops::cuda {

// The pending output of one token; y is null if nothing is pending.
template <class Act>
struct PendingRow {
  const Act* y;       // [D]
  const float* post;  // [M]
  const float* comb;  // [M, M]: row = source, column = destination
};

// The same for all tokens.
template <class Act>
struct PendingRows {
  const Act* y;       // [T, D]
  const float* post;  // [T, M]
  const float* comb;  // [T, M, M]

  __device__ __forceinline__ PendingRow<Act> row(int64_t token, int64_t m, int64_t d) const {
    return y == nullptr ? PendingRow<Act>{}
                        : PendingRow<Act>{y + token * d, post + token * m, comb + token * m * m};
  }
};

// out_k = post_k y + sum_j comb_jk x_j of kVector columns, not yet rounded, for the first m
// streams.
template <int kStreams, int kVector>
__device__ __forceinline__ void mix_columns(const float (&x)[kStreams][kVector],
                                            const float (&y)[kVector],
                                            const float* post,
                                            const float* comb,
                                            int m,
                                            float (&out)[kStreams][kVector]) {
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    if (k < m) {
      const float weight = post[k];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        out[k][e] = weight * y[e];
      }
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        if (j < m) {
          const float share = comb[j * m + k];
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            out[k][e] = fmaf(share, x[j][e], out[k][e]);
          }
        }
      }
    }
  }
}

// sum_j pre_j x_j, not yet rounded.
template <int kStreams, int kVector>
__device__ __forceinline__ void sum_streams(const float (&x)[kStreams][kVector],
                                            const float* pre,
                                            int m,
                                            float (&out)[kVector]) {
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    out[e] = 0;
  }
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    if (j < m) {
      const float weight = pre[j];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        out[e] = fmaf(weight, x[j][e], out[e]);
      }
    }
  }
}

// Columns [i, i + kVector) of all m <= kStreams streams of one token with the pending output
// applied, rounded to Act.
template <class Act, int kStreams, int kVector>
__device__ __forceinline__ void expand_columns(const Act* x,
                                               const PendingRow<Act>& pending,
                                               int m,
                                               int64_t d,
                                               int64_t i,
                                               float (&out)[kStreams][kVector]) {
  float v[kStreams][kVector];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    if (j < m) {
      load_elements<kVector>(x + j * d + i, v[j]);
    }
  }
  if (pending.y == nullptr) {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        out[j][e] = v[j][e];
      }
    }
    return;
  }
  float y[kVector];
  load_elements<kVector>(pending.y + i, y);
  mix_columns(v, y, pending.post, pending.comb, m, out);
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    if (k < m) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        out[k][e] = rounded<Act>(out[k][e]);
      }
    }
  }
}

// sum_j pre_j x_j, rounded to Act.
template <class Act, int kStreams, int kVector>
__device__ __forceinline__ void collapse_columns(const float (&x)[kStreams][kVector],
                                                 const float* pre,
                                                 int m,
                                                 float (&out)[kVector]) {
  sum_streams(x, pre, m, out);
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    out[e] = rounded<Act>(out[e]);
  }
}

}  // namespace cachalot::ops::cuda
