#include "train/head.h"

#include <cmath>
#include <vector>

#include "train/gemm.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

constexpr int64_t kChunk = 128;
constexpr int64_t kGrain = 4;

}  // namespace

template <class Real>
void cross_entropy(ThreadPool* pool,
                   const HeadRows<Real>& args,
                   const HeadGradients<Real>& gradients,
                   Real* loss,
                   Real* logits) {
  const int64_t v = args.vocab, d = args.width;
  std::vector<Real> buffer(static_cast<size_t>(std::min(args.rows, kChunk) * v));
  for (int64_t first = 0; first < args.rows; first += kChunk) {
    const int64_t rows = std::min(kChunk, args.rows - first);
    const int32_t* target = args.target + first;
    const bool wanted = std::any_of(target, target + rows, [](int32_t id) { return id >= 0; });
    if (!wanted && logits == nullptr) {
      std::fill_n(loss + first, rows, Real{0});
      continue;
    }
    const LinearShape<Real> shape{rows, v, d, d, v};
    linear_forward(pool, shape, args.h + first * d, args.weight, buffer.data());
    if (logits != nullptr) {
      std::copy_n(buffer.data(), rows * v, logits + first * v);
    }
    // Turns each row into the gradient of its loss.
    parallel_for(pool, rows, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        Real* row = buffer.data() + r * v;
        if (target[r] < 0) {
          loss[first + r] = 0;
          std::fill_n(row, v, Real{0});
          continue;
        }
        const Real best = *std::max_element(row, row + v), own = row[target[r]];
        const Real sum = exp_sum(row, v, best, row);
        loss[first + r] = std::log(sum) + best - own;
        const Real factor = gradients.scale / sum;
        for (int64_t i = 0; i < v; ++i) {
          row[i] *= factor;
        }
        row[target[r]] -= gradients.scale;
      }
    });
    if (gradients.dh != nullptr) {
      linear_input_gradient(pool, shape, buffer.data(), args.weight, gradients.dh + first * d);
      linear_weight_gradient(pool, shape, buffer.data(), args.h + first * d, gradients.dweight);
    }
  }
}

template void cross_entropy(
    ThreadPool*, const HeadRows<float>&, const HeadGradients<float>&, float*, float*);
template void cross_entropy(
    ThreadPool*, const HeadRows<double>&, const HeadGradients<double>&, double*, double*);

}  // namespace cachalot::train
