// Gated injection of Engram rows into the streams, forward and backward.
//
// Letters: T rows, M streams, D hidden; kv holds M keys and then the value, [T, (M + 1) D].
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "train/streams.h"

namespace cachalot::train {

template <class Real>
struct InjectRows {
  StreamShape shape;
  double eps = 0;
  const uint8_t* is_image = nullptr;  // [T]: their gate is 0
  const Real* x = nullptr;            // [T, M, D]
  const Real* kv = nullptr;           // [T, (M + 1) D]
  const Real* q_weight = nullptr;     // [M, D]
  const Real* k_weight = nullptr;     // [M, D]
};

// Kept per row and stream, [T, M] each.
template <class Real>
struct GateRows {
  Real* dot = nullptr;
  Real* gate = nullptr;
  Real* x_factor = nullptr;    // 1 / rms(x)
  Real* key_factor = nullptr;  // 1 / rms(key)
};

// out = x + gate * value.
template <class Real>
void inject(ThreadPool* pool, const InjectRows<Real>& args, const GateRows<Real>& kept, Real* out);

template <class Real>
void inject_backward(ThreadPool* pool,
                     const InjectRows<Real>& args,
                     const GateRows<Real>& kept,
                     const Real* dout,
                     Real* dx,
                     Real* dkv,
                     Real* dq_weight,
                     Real* dk_weight);

}  // namespace cachalot::train
