// Logits and cross-entropy in one: logits exist for a few rows at a time.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace cachalot::train {

template <class Real>
struct HeadRows {
  int64_t rows = 0, width = 0, vocab = 0;
  const Real* h = nullptr;          // [T, D]
  const Real* weight = nullptr;     // [V, D]
  const int32_t* target = nullptr;  // [T]; -1: no loss
};

// The gradient of scale * sum of the losses, added to dh and dweight. Null pointers: not wanted.
template <class Real>
struct HeadGradients {
  Real scale = 1;
  Real* dh = nullptr;
  Real* dweight = nullptr;
};

// loss [T] = -log p(target), 0 without a target. `logits` [T, V] may be null.
template <class Real>
void cross_entropy(ThreadPool* pool,
                   const HeadRows<Real>& args,
                   const HeadGradients<Real>& gradients,
                   Real* loss,
                   Real* logits);

}  // namespace cachalot::train
