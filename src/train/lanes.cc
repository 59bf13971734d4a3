#include "train/lanes.h"

#include <algorithm>

#include "train/parallel.h"
#include "train/vector.h"

namespace cachalot::train {
namespace {

// Values of a weight that one thread adds at a time.
constexpr int64_t kPiece = 1 << 15;

}  // namespace

void Lanes::run(std::span<const Batch> batches,
                const Options& options,
                const Forward& forward,
                const Done& done) {
  const auto threads = static_cast<size_t>(pool_.threads());
  const size_t width = batches.size() >= threads ? threads : 1;
  while (lanes_.size() < width) {
    lanes_.push_back(std::make_unique<Lane>());
  }
  for (size_t first = 0; first < batches.size(); first += width) {
    const size_t count = std::min(width, batches.size() - first);
    const auto work = [&](int64_t index, ThreadPool* pool) {
      Lane& lane = *lanes_[static_cast<size_t>(index)];
      const Batch& batch = batches[first + static_cast<size_t>(index)];
      const ForwardOptions own = options(batch);
      lane.exec.reset();
      lane.tape.reset();
      lane.exec.emplace(parameters_, own, batch, lane.tape, lane.scratch, pool);
      forward(*lane.exec);
      if (own.gradients) {
        lane.tape.backward();
      }
    };
    if (width == 1) {
      work(0, &pool_);
    } else {
      parallel_tasks(
          &pool_, static_cast<int64_t>(count), [&](int64_t index) { work(index, nullptr); });
    }
    add_gradients(count);
    for (size_t i = 0; i < count; ++i) {
      done(batches[first + i], *lanes_[i]->exec);
    }
  }
}

void Lanes::add_gradients(size_t lanes) {
  struct Piece {
    Parameter<float>* parameter;
    int64_t begin;
  };
  std::vector<Piece> pieces;
  for (Parameter<float>& parameter : parameters_.all()) {
    for (int64_t i = 0; i < static_cast<int64_t>(parameter.grad.size()); i += kPiece) {
      pieces.push_back({&parameter, i});
    }
  }
  parallel_tasks(&pool_, static_cast<int64_t>(pieces.size()), [&](int64_t index) {
    const auto [parameter, begin] = pieces[static_cast<size_t>(index)];
    const int64_t n = std::min(kPiece, static_cast<int64_t>(parameter->grad.size()) - begin);
    for (size_t i = 0; i < lanes; ++i) {
      const float* gradient = lanes_[i]->exec->gradient(*parameter);
      if (gradient != nullptr) {
        axpy(1.0f, gradient + begin, n, parameter->grad.data() + begin);
      }
    }
  });
}

}  // namespace cachalot::train
