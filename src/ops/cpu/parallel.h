// How the CPU kernels use the pool and the scratch of a context.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

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

// body(begin, end, memory) over [0, n) in equal shares; every share has `floats` of scratch to
// itself.
template <class Body>
void parallel_rows(
    const OpContext& ctx, Scratch& scratch, int64_t n, int64_t floats, const Body& body) {
  const int64_t shares = std::clamp<int64_t>(n, 1, thread_count(ctx));
  // Shares lie a cache line apart.
  const int64_t stride = (floats + 31) / 16 * 16;
  float* memory = scratch.array<float>(shares * stride);
  parallel_for(ctx, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t share = first; share < last; ++share) {
      const int64_t begin = n * share / shares, end = n * (share + 1) / shares;
      if (begin < end) {
        body(begin, end, memory + share * stride);
      }
    }
  });
}

}  // namespace cachalot::ops::cpu
