// How the CPU kernels use the pool and the scratch of a context.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/math.h"
#include "ops/context.h"

namespace cachalot::ops::cpu {

inline int64_t thread_count(const OpContext& ctx) {
  return ctx.pool == nullptr ? 1 : ctx.pool->threads();
}

// body(begin, end) over [0, n): equal shares per thread.
template <class Body>
void parallel_for(const OpContext& ctx, int64_t n, int64_t grain, Body&& body) {
  if (ctx.pool == nullptr) {
    if (n > 0) {
      body(int64_t{0}, n);
    }
    return;
  }
  ctx.pool->parallel_for(n, grain, std::forward<Body>(body));
}

// body(index) for each index of [0, n), claimed as in parallel_for_dynamic.
template <class Body>
void parallel_tasks(const OpContext& ctx, int64_t n, Body&& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      body(i);
    }
  };
  if (ctx.pool == nullptr) {
    range(0, n);
    return;
  }
  ctx.pool->parallel_for_dynamic(n, 1, range);
}

// What a kernel takes from the context's scratch, given back when it returns.
class Scratch {
 public:
  explicit Scratch(OpContext& ctx) : arena_(*ctx.scratch), mark_(arena_.mark()) {}
  ~Scratch() { arena_.release(mark_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* array(int64_t count) {
    return arena_.allocate_array<T>(std::max<int64_t>(count, 1));
  }

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

// body(begin, end, memory) over [0, n), claimed as in parallel_for_dynamic; a thread has `floats`
// of scratch to itself.
template <class Body>
void parallel_rows(
    const OpContext& ctx, Scratch& scratch, int64_t n, int64_t floats, const Body& body) {
  if (ctx.pool == nullptr || n <= 1) {
    if (n > 0) {
      body(int64_t{0}, n, scratch.array<float>(floats));
    }
    return;
  }
  // Cache lines apart.
  const int64_t stride = (floats + 31) / 16 * 16;
  float* memory = scratch.array<float>(ctx.pool->threads() * stride);
  ctx.pool->parallel_for_threads(n, 1, [&](int thread, int64_t begin, int64_t end) {
    body(begin, end, memory + thread * stride);
  });
}

}  // namespace cachalot::ops::cpu
