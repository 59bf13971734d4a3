// Residual streams: expansion of a sublayer's output, collapse with a norm, and the coefficients of
// a hyper-connection site, forward and backward.
//
// Letters: T rows, M streams, D hidden; x is [T, M, D]. Backward functions add to the gradients.
// Weight gradients are summed over rows in a fixed order.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/thread_pool.h"

namespace cachalot::train {

struct StreamShape {
  int64_t rows = 0, streams = 0, width = 0;
  int64_t row_size() const { return streams * width; }
  // Coefficients of a site per row: pre, post, comb.
  int64_t coefficients() const { return (2 + streams) * streams; }
};

// What a site's coefficients may be. All but kManifold exist to be compared with it.
enum class Mixing : uint8_t {
  kManifold,  // comb is about doubly stochastic: a Sinkhorn iteration makes it
  kFree,      // comb is what the site predicts
  kPlain,     // one stream and constants of 1: a residual connection
};
inline constexpr std::array<std::string_view, 3> kMixingNames = {"manifold", "free", "plain"};

// A sublayer's output that is not yet in the streams; in a backward, their gradients.
template <class Real>
struct PendingRows {
  Real* y = nullptr;     // [T, D]
  Real* post = nullptr;  // [T, M]
  Real* comb = nullptr;  // [T, M, M]: row = source stream, column = destination
};

// out_k = post_k y + sum_j comb_jk x_j.
template <class Real>
void expand(ThreadPool* pool,
            const StreamShape& shape,
            const Real* x,
            const PendingRows<Real>& pending,
            Real* out);
template <class Real>
void expand_backward(ThreadPool* pool,
                     const StreamShape& shape,
                     const Real* x,
                     const PendingRows<Real>& pending,
                     const Real* dout,
                     Real* dx,
                     const PendingRows<Real>& dpending);

// u = norm(c), c = sum_j pre_j x_j; c [T, D] and the norm's factors [T] are kept for the backward.
template <class Real>
struct CollapseRows {
  Real* c = nullptr;
  Real* factor = nullptr;
};
template <class Real>
void collapse(ThreadPool* pool,
              const StreamShape& shape,
              const Real* x,
              const Real* pre,
              const Real* norm,
              double eps,
              const CollapseRows<Real>& kept,
              Real* u);
// dpre null: the coefficients are constants.
template <class Real>
void collapse_backward(ThreadPool* pool,
                       const StreamShape& shape,
                       const Real* x,
                       const Real* pre,
                       const Real* norm,
                       const CollapseRows<Real>& kept,
                       const Real* du,
                       Real* dx,
                       Real* dpre,
                       Real* dnorm);

// The coefficients that a site predicts from its streams.
template <class Real>
struct SiteWeights {
  Real* fn = nullptr;     // [(2 + M) M, M D]
  Real* base = nullptr;   // [(2 + M) M]
  Real* scale = nullptr;  // [3]
};
struct SiteConstants {
  double rms_eps = 0, hc_eps = 0;
  int iterations = 0;
  Mixing mixing = Mixing::kManifold;
};
template <class Real>
struct SiteRows {
  Real* predicted = nullptr;  // [T, (2 + M) M]: fn . x / rms(x)
  Real* factor = nullptr;     // [T]: 1 / rms(x)
  Real* pre = nullptr;        // [T, M]
  Real* post = nullptr;       // [T, M]
  Real* comb = nullptr;       // [T, M, M]
};
template <class Real>
void site_coefficients(ThreadPool* pool,
                       const StreamShape& shape,
                       const SiteConstants& constants,
                       const Real* x,
                       const SiteWeights<Real>& w,
                       const SiteRows<Real>& out);
// `d` holds the gradients of pre, post and comb; null: zero.
template <class Real>
void site_coefficients_backward(ThreadPool* pool,
                                const StreamShape& shape,
                                const SiteConstants& constants,
                                const Real* x,
                                const SiteWeights<Real>& w,
                                const SiteRows<Real>& out,
                                const SiteRows<Real>& d,
                                Real* dx,
                                const SiteWeights<Real>& dw);

// How much the streams can grow from the first site to the last: the largest absolute column sum
// (forward, as comb acts transposed) and row sum (backward) of a product of combs.
struct MixingGain {
  double forward = 1, backward = 1;
};
// Multiplies `product` [T, M, M] by comb and returns the gain of the result over all rows.
template <class Real>
MixingGain extend_mixing(ThreadPool* pool,
                         const StreamShape& shape,
                         const Real* comb,
                         Real* product);

}  // namespace cachalot::train
