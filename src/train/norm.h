// RMSNorm and rotation of rows, forward and backward. Gradients are added to what is there.
#pragma once

#include <cmath>
#include <cstdint>

#include "train/vector.h"

namespace cachalot::train {

// y = x * factor * weight with the returned factor = (mean(x^2) + eps)^-1/2.
template <class Real>
Real rms_norm(const Real* x, const Real* weight, int64_t n, double eps, Real* y) {
  const Real factor =
      Real{1} / std::sqrt(dot(x, x, n) / static_cast<Real>(n) + static_cast<Real>(eps));
  for (int64_t i = 0; i < n; ++i) {
    y[i] = x[i] * factor * weight[i];
  }
  return factor;
}

// dx += d/dx, dweight += d/dweight of rms_norm() for the gradient dy of its result.
template <class Real>
void rms_norm_backward(const Real* x,
                       const Real* weight,
                       Real factor,
                       const Real* dy,
                       int64_t n,
                       Real* dx,
                       Real* dweight) {
  Real along = 0;  // dy . (weight x)
  for (int64_t i = 0; i < n; ++i) {
    along += dy[i] * weight[i] * x[i];
    dweight[i] += dy[i] * x[i] * factor;
  }
  const Real shrink = along * factor * factor * factor / static_cast<Real>(n);
  for (int64_t i = 0; i < n; ++i) {
    dx[i] += dy[i] * weight[i] * factor - shrink * x[i];
  }
}

// Rotates the last 2 * half of n values in place; `sign` -1 rotates back.
template <class Real>
void rotate(Real* x, int64_t n, const Real* cos_sin, int64_t half, int sign) {
  Real* tail = x + n - 2 * half;
  for (int64_t i = 0; i < half; ++i) {
    const Real c = cos_sin[2 * i], s = static_cast<Real>(sign) * cos_sin[2 * i + 1];
    const Real a = tail[2 * i], b = tail[2 * i + 1];
    tail[2 * i] = a * c - b * s;
    tail[2 * i + 1] = a * s + b * c;
  }
}

template <class Real>
Real sigmoid(Real x) {
  return Real{1} / (Real{1} + std::exp(-x));
}

}  // namespace cachalot::train
