// The update rules of the optimizer, one matrix or vector at a time, and the learning rate.
//
// Muon and the Sinkhorn update keep one momentum each, but not the same: Muon accumulates
// gradients, Sinkhorn averages them. Real is float in training and double in checks.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace cachalot::train {

// Replaces x [rows, columns] by about its orthogonal polar factor: ten Newton-Schulz iterations,
// eight that spread the singular values towards 1 and two that settle them there. Zero stays zero.
template <class Real>
void hybrid_newton_schulz(ThreadPool* pool, int64_t rows, int64_t columns, Real* x);

struct MuonConstants {
  double momentum = 0.95;
  double weight_decay = 0.1;
  double update_rms = 0.18;
};
// M = momentum M + G; W = W (1 - rate decay) - rate rms sqrt(max(rows, columns)) NS(momentum M +
// G).
template <class Real>
void muon_update(ThreadPool* pool,
                 const MuonConstants& constants,
                 double rate,
                 int64_t rows,
                 int64_t columns,
                 const Real* gradient,
                 Real* momentum,
                 Real* weight);

struct SinkhornConstants {
  double average = 0.95;
  double update_rms = 0.18;
  int normalizations = 11;  // rows first and last
  double threshold = 1e-3;  // rows below this share of the mean row norm keep still
  double eps = 1e-20;
};
// M = average M + (1 - average) G; the Nesterov form of it, with quiet rows left out, normalized to
// unit rows and even columns; W = W - rms rate sqrt(columns) of that.
template <class Real>
void sinkhorn_update(const SinkhornConstants& constants,
                     double rate,
                     int64_t rows,
                     int64_t columns,
                     const Real* gradient,
                     Real* momentum,
                     Real* weight);

struct AdamConstants {
  double first = 0.9;
  double second = 0.95;
  double eps = 1e-20;
};
// With bias correction of step `step` (1 for the first) and decoupled decay.
template <class Real>
void adam_update(const AdamConstants& constants,
                 double rate,
                 double weight_decay,
                 int64_t step,
                 int64_t n,
                 const Real* gradient,
                 Real* first,
                 Real* second,
                 Real* weight);

// b_e += speed * sign(mean load - load_e), after an optimizer step.
void balance_bias(double speed, const std::vector<int64_t>& load, float* bias);
// max load / mean load - 1; 0 without load.
double max_violation(const std::vector<int64_t>& load);

// Linear warm-up over steps, then constant, then a decay over tokens, then constant.
struct Schedule {
  enum class Decay : uint8_t { kCosine, kLinear };
  double peak = 0;
  double last = 0;
  int64_t warmup_steps = 0;
  double decay_begin = 0;  // tokens
  double decay_end = 0;    // tokens; not above decay_begin: no decay
  Decay decay = Decay::kCosine;
};
double learning_rate(const Schedule& schedule, int64_t step, double tokens);

}  // namespace cachalot::train
