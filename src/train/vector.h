// Vector primitives of training, for float (SIMD, the production path) and double (gradient
// checks).
//
// Sums have one order that depends on the length and the instruction set alone, never on threads.
#pragma once

#include <cstdint>

namespace cachalot::train {

// sum_i a_i b_i.
float dot(const float* a, const float* b, int64_t n);
double dot(const double* a, const double* b, int64_t n);

// y += alpha x.
void axpy(float alpha, const float* x, int64_t n, float* y);
void axpy(double alpha, const double* x, int64_t n, double* y);

// out_r = x . rows_r for `count` rows of length n.
void dots(const float* x, const float* const* rows, int64_t count, int64_t n, float* out);
void dots(const double* x, const double* const* rows, int64_t count, int64_t n, double* out);

// out = sum_r w_r rows_r, added to what `out` holds if `accumulate` is set.
void combine(const float* w,
             const float* const* rows,
             int64_t count,
             int64_t n,
             bool accumulate,
             float* out);
void combine(const double* w,
             const double* const* rows,
             int64_t count,
             int64_t n,
             bool accumulate,
             double* out);

// out_i = exp(x_i - shift); returns their sum. `out` may be `x`.
float exp_sum(const float* x, int64_t n, float shift, float* out);
double exp_sum(const double* x, int64_t n, double shift, double* out);

}  // namespace cachalot::train
