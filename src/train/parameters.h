// The trainable weights of a model: master values, gradients, and how a checkpoint will store them.
#pragma once

#include <cstdint>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/model.h"

namespace cachalot::train {

// Which stored formats the forward already uses in training. Values are rounded on the way in, the
// gradient passes unchanged (straight-through).
struct QuantSwitches {
  bool window = false;   // FP8 window rows
  bool main = false;     // FP4 compressed rows
  bool index = false;    // FP4 index keys and queries
  bool experts = false;  // FP4 routed experts
  bool engram = false;   // FP8 Engram rows
  bool linears = false;  // FP8 linears
  bool plain = false;    // BF16 of what the release stores so
  bool operator==(const QuantSwitches&) const = default;

  // As an exported checkpoint computes in precision f32.
  static QuantSwitches exported() { return {true, true, true, true, true, true, true}; }
};

template <class Real>
struct Parameter {
  model::WeightSpec spec;    // its kind and dtype are those of the official storage
  std::vector<Real> value;   // master
  std::vector<Real> grad;    // as long as value
  std::vector<Real> stored;  // value as its storage rounds it; empty: not simulated
  int64_t rows() const { return spec.shape[0]; }
  int64_t columns() const { return static_cast<int64_t>(value.size()) / rows(); }
  const Real* used() const { return stored.empty() ? value.data() : stored.data(); }
};

// `count` rows of values of a weight from `first_row` on, rounded to the storage of `spec`. For
// kFp8Block, first_row must be a multiple of 32.
void round_to_storage(const model::WeightSpec& spec, int64_t rows, int64_t columns, float* values);

// All weights of the backbone, Engram and drafter; a vision tower is not trained here.
//
// The model's views carry a parameter's identity, not its values: their data pointers are those of
// the master values, which are doubles in gradient checks. Only TrainExec may use such a model.
template <class Real>
class ParameterSet {
 public:
  // Errors: a config with a vision tower.
  static Result<std::unique_ptr<ParameterSet>> create(const model::ModelConfig& config,
                                                      std::vector<int32_t> token_class);
  // Of a config that need not be valid: gradient checks use odd extents.
  explicit ParameterSet(const model::ModelConfig& config);

  const model::Model& model() const { return model_; }
  std::deque<Parameter<Real>>& all() { return parameters_; }
  const std::deque<Parameter<Real>>& all() const { return parameters_; }
  // The parameter called `name`, which must exist.
  Parameter<Real>& named(std::string_view name);
  // The parameter behind a view of the model's weights.
  Parameter<Real>& of(const TensorView& view) { return *by_data_.at(view.data); }
  Parameter<Real>& of(const ops::Weight& weight) { return of(weight.values); }

  void zero_gradients(ThreadPool* pool);
  // Recomputes `stored` where a switch asks for it.
  void apply(const QuantSwitches& switches, ThreadPool* pool);

 private:
  std::deque<Parameter<Real>> parameters_;  // in checkpoint order
  std::unordered_map<const void*, Parameter<Real>*> by_data_;
  model::Model model_;
};

// Random initial values: projections N(0, 1/in), those that write into the streams divided by
// sqrt(2 layers); norms 1; streams that keep most of themselves, or with `free_mixing` all. Same
// seed, same values.
void initialize(ParameterSet<float>& parameters, uint64_t seed, bool free_mixing = false);

}  // namespace cachalot::train
