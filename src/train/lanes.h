// Forwards and backwards of several batches side by side.
//
// A batch is worked on by one thread where there are as many batches as threads, and by all threads
// otherwise: the first way has no barriers. Its weight gradients are summed on their own and added
// to the parameters' in the order of the batches, so the bits are the same either way.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "train/train_exec.h"

namespace cachalot::train {

// Not thread-safe. Memory of a lane is kept for the next call.
class Lanes {
 public:
  // Both must outlive the object.
  Lanes(ParameterSet<float>& parameters, ThreadPool& pool) : parameters_(parameters), pool_(pool) {}

  using Options = std::function<ForwardOptions(const Batch&)>;
  using Forward = std::function<void(TrainExec<float>&)>;
  using Done = std::function<void(const Batch&, const TrainExec<float>&)>;
  // Runs `forward` with every batch, its backward if the options ask for gradients, and `done` in
  // the order of the batches. `options` and `forward` are called from several threads.
  void run(std::span<const Batch> batches,
           const Options& options,
           const Forward& forward,
           const Done& done);

 private:
  struct Lane {
    Tape<float> tape;
    Arena scratch;
    std::optional<TrainExec<float>> exec;
  };
  void add_gradients(size_t lanes);

  ParameterSet<float>& parameters_;
  ThreadPool& pool_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace cachalot::train
