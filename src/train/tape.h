// What a training forward leaves behind: values, their gradients, and how to go back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "tensor/arena.h"

namespace cachalot::train {

// A result of an op: `rows` rows of `width` values, or of ids, which have no gradient.
template <class Real>
struct Node {
  int64_t rows = 0;
  int64_t width = 0;
  Real* value = nullptr;
  Real* grad = nullptr;  // null until a consumer asks for it
  int32_t* ids = nullptr;

  int64_t size() const { return rows * width; }
};

// A handle of a node, copied by value; valid until the tape is reset.
template <class Real>
struct Var {
  Node<Real>* node = nullptr;

  bool empty() const { return node == nullptr; }
  int64_t rows() const { return node->rows; }
  int64_t width() const { return node->width; }
  Real* value() const { return node->value; }
};

// Backward rules in the order in which the forward recorded them. Not thread-safe.
template <class Real>
class Tape {
 public:
  // Uninitialized values.
  Var<Real> make(int64_t rows, int64_t width) {
    nodes_.push_back({.rows = rows, .width = width, .value = array(rows * width)});
    return {&nodes_.back()};
  }
  Var<Real> make_ids(int64_t rows, int64_t width) {
    nodes_.push_back({.rows = rows,
                      .width = width,
                      .ids = arena_.allocate_array<int32_t>(std::max<int64_t>(1, rows * width))});
    return {&nodes_.back()};
  }
  // A node with the values of `of` and a gradient of its own that goes nowhere.
  Var<Real> detached(Var<Real> of) {
    nodes_.push_back({.rows = of.rows(), .width = of.width(), .value = of.value()});
    return {&nodes_.back()};
  }
  // Memory that lives as long as the nodes.
  Real* array(int64_t count) { return arena_.allocate_array<Real>(std::max<int64_t>(1, count)); }

  // The gradient to add to, zeroed when it is first asked for.
  Real* grad(Var<Real> var) {
    Node<Real>& node = *var.node;
    if (node.grad == nullptr) {
      node.grad = array(node.size());
      std::fill_n(node.grad, node.size(), Real{0});
    }
    return node.grad;
  }

  void record(std::function<void()> rule) { rules_.push_back(std::move(rule)); }

  // Runs all rules, the last one first.
  void backward() {
    for (auto rule = rules_.rbegin(); rule != rules_.rend(); ++rule) {
      (*rule)();
    }
  }

  // Forgets everything; memory is kept for the next forward.
  void reset() {
    rules_.clear();
    nodes_.clear();
    arena_.reset();
  }

 private:
  Arena arena_{int64_t{1} << 24};
  std::deque<Node<Real>> nodes_;
  std::vector<std::function<void()>> rules_;
};

}  // namespace cachalot::train
