// Dense matrix products for training: C (+)= A B with strided A and B.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace cachalot::train {

// Element (i, k) of A lies at a[i * a_row + k * a_column], element (k, j) of B at
// b[k * b_row + j * b_column], element (i, j) of C at c[i * c_row + j].
template <class Real>
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  const Real* a = nullptr;
  int64_t a_row = 0, a_column = 1;
  const Real* b = nullptr;
  int64_t b_row = 0, b_column = 1;
  Real* c = nullptr;
  int64_t c_row = 0;
  bool accumulate = false;
};

// Every element of C is one sum in ascending k, whatever the threads. `pool` null: this thread.
void gemm(ThreadPool* pool, const Gemm<float>& args);
void gemm(ThreadPool* pool, const Gemm<double>& args);

// The three products of a linear y = x W^T over `rows` rows; W is [out, in], x rows are x_row apart
// (the group of a block-diagonal map is a slice of a longer row).
template <class Real>
struct LinearShape {
  int64_t rows = 0, out = 0, in = 0;
  int64_t x_row = 0, y_row = 0;
};

// y = x W^T.
template <class Real>
void linear_forward(
    ThreadPool* pool, const LinearShape<Real>& s, const Real* x, const Real* w, Real* y) {
  gemm(pool, Gemm<Real>{s.rows, s.out, s.in, x, s.x_row, 1, w, 1, s.in, y, s.y_row, false});
}
// dx += dy W.
template <class Real>
void linear_input_gradient(
    ThreadPool* pool, const LinearShape<Real>& s, const Real* dy, const Real* w, Real* dx) {
  gemm(pool, Gemm<Real>{s.rows, s.in, s.out, dy, s.y_row, 1, w, s.in, 1, dx, s.x_row, true});
}
// dW += dy^T x.
template <class Real>
void linear_weight_gradient(
    ThreadPool* pool, const LinearShape<Real>& s, const Real* dy, const Real* x, Real* dw) {
  gemm(pool, Gemm<Real>{s.out, s.in, s.rows, dy, 1, s.y_row, x, s.x_row, 1, dw, s.in, true});
}

}  // namespace cachalot::train
