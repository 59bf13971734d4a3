// A look at (and a hand in) the intermediate values of a step, for dumps and forced comparisons.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tensor/tensor.h"

namespace cachalot::model {

// Where the rows of the visited tensors belong.
struct ObservedRows {
  std::span<const int32_t> row_begin;  // [S + 1]
  std::span<const int32_t> start;      // [S]
};

class Observer {
 public:
  virtual ~Observer() = default;

  // A named tensor in host memory, before anything reads it: T rows, or the entries that this step
  // appended ("layers.2.main_codes"). Names are those of the dump format. The observer may replace
  // the ids of "layers.L.selected".
  virtual void visit(const std::string& name,
                     const TensorView& rows,
                     const ObservedRows& where) = 0;

  // Fills `experts` [T, k] i32 with the router choices to use in a layer; false: none are
  // prescribed.
  virtual bool forced_experts(int64_t layer,
                              const TensorView& experts,
                              const ObservedRows& where) = 0;
};

}  // namespace cachalot::model
