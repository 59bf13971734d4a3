// Router, balance and experts, forward and backward.
//
// Letters: T rows, D hidden, E experts, k chosen per row, F expert width. Backward functions add to
// the gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "tensor/arena.h"

namespace cachalot::train {

template <class Real>
struct RouterRows {
  int64_t rows = 0, experts = 0, chosen = 0;
  Real temperature = 1, scale = 1;
  const Real* logits = nullptr;       // [T, E]
  const Real* bias = nullptr;         // [E] of text tokens
  const Real* bias_image = nullptr;   // [E] of image tokens
  const uint8_t* is_image = nullptr;  // [T]
};

// The best of scores + bias (ties: the lower id), ascending ids [T, k], weights [T, k] from the
// unbiased scores.
template <class Real>
void route(ThreadPool* pool, const RouterRows<Real>& args, int32_t* ids, Real* weights);

// The load balance loss of the samples whose first rows are in `sample_begin` (its last element is
// T): the mean over rows of E/(k n) sum_e count_e P_e, where P_e is an expert's mean share of the
// scores in the row's sample of n rows. `coefficient` scales the gradient; counts have none.
template <class Real>
Real balance_loss(const RouterRows<Real>& args,
                  const int32_t* ids,
                  const std::vector<int32_t>& sample_begin);

// dlogits from the gradient of the weights (may be null) and of coefficient * balance_loss().
template <class Real>
void route_backward(ThreadPool* pool,
                    const RouterRows<Real>& args,
                    const int32_t* ids,
                    const Real* dweights,
                    Real coefficient,
                    const std::vector<int32_t>& sample_begin,
                    Real* dlogits);

// w1, w3 [F, D], w2 [D, F]; in a backward their gradients.
template <class Real>
struct ExpertWeights {
  Real* w1 = nullptr;
  Real* w3 = nullptr;
  Real* w2 = nullptr;
};

// Rows sorted by expert: those of expert e are begin[e] .. begin[e + 1].
struct ExpertRows {
  std::vector<int32_t> begin;  // [E + 1]
  std::vector<int32_t> row;    // [T k] source row
  std::vector<int32_t> slot;   // [T k] index into the chosen of all rows
  std::vector<int32_t> place;  // [T k] position of a slot
};
ExpertRows sort_by_expert(const int32_t* ids, int64_t rows, int64_t chosen, int64_t experts);

// SwiGLU with clamps over `rows` rows of x.
template <class Real>
struct SwigluRows {
  int64_t rows = 0, width = 0, hidden = 0;
  Real limit = 0;
  const Real* x = nullptr;        // [rows, D]
  const Real* weights = nullptr;  // [rows] multiplies the hidden values; null: 1
  Real* gate = nullptr;           // [rows, F] kept for the backward
  Real* up = nullptr;             // [rows, F]
  Real* product = nullptr;        // [rows, F]: what w2 reads
};
// y [rows, D].
template <class Real>
void swiglu(ThreadPool* pool, const SwigluRows<Real>& args, const ExpertWeights<Real>& w, Real* y);
// `scratch` [3 rows F]. dx [rows, D]; dweights [rows] is overwritten; null where weights are.
template <class Real>
void swiglu_backward(ThreadPool* pool,
                     const SwigluRows<Real>& args,
                     const ExpertWeights<Real>& w,
                     const Real* dy,
                     Real* scratch,
                     Real* dx,
                     Real* dweights,
                     const ExpertWeights<Real>& dw);

}  // namespace cachalot::train
