// How training kernels use threads: fixed pieces of work, sums in one order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "train/vector.h"

namespace cachalot::train {

// body(begin, end) over [0, n). `pool` null: this thread.
template <class Body>
void parallel_for(ThreadPool* pool, int64_t n, int64_t grain, const Body& body) {
  if (pool == nullptr || n <= grain) {
    if (n > 0) {
      body(int64_t{0}, n);
    }
    return;
  }
  pool->parallel_for(n, grain, body);
}

// body(i) for each of [0, n), claimed one by one: for uneven work.
template <class Body>
void parallel_tasks(ThreadPool* pool, int64_t n, const Body& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      body(i);
    }
  };
  if (pool == nullptr) {
    range(0, n);
    return;
  }
  pool->parallel_for_dynamic(n, 1, range);
}

// Rows that share a partial sum of reduce_rows(): fixed, so that sums do not depend on threads.
constexpr int64_t kReduceRows = 64;

// sum[width] += what body(begin, end, partial[width]) adds to its zeroed partial, over all rows;
// partials are added in row order.
template <class Real, class Body>
void reduce_rows(ThreadPool* pool, int64_t rows, int64_t width, Real* sum, const Body& body) {
  const int64_t chunks = (rows + kReduceRows - 1) / kReduceRows;
  std::vector<Real> partials(static_cast<size_t>(chunks * width), Real{0});
  parallel_tasks(pool, chunks, [&](int64_t chunk) {
    body(chunk * kReduceRows,
         std::min(rows, (chunk + 1) * kReduceRows),
         partials.data() + chunk * width);
  });
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    axpy(Real{1}, partials.data() + chunk * width, width, sum);
  }
}

}  // namespace cachalot::train
