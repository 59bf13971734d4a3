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

  // A named tensor of T rows in host memory, before anything reads it. Names are those of the dump
  // format: "embed", "layers.3.attn_in", "layers.3.window_codes", ... The observer may replace the ids
  // of "layers.L.selected".
  virtual void visit(const std::string& name, const TensorView& rows, const ObservedRows& where) = 0;

  // One appended cache row. Names: "layers.2.main_codes", "layers.2.index_codes".
  virtual void visit_entry(const std::string& name,
                           int64_t sequence,
                           int64_t entry,
                           std::span<const uint8_t> row) = 0;

  // Fills `experts` [T, k] i32 with the router choices to use in a layer; false: none are prescribed.
  virtual bool forced_experts(int64_t layer, const TensorView& experts, const ObservedRows& where) = 0;
};

}  // namespace cachalot::model
