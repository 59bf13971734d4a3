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
  bool in_segment = false;

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
//
// A segment is a part of the forward that is forgotten and made again in the backward: what is made
// between begin_segment() and end_segment() lives no longer than that, but for keep() and
// keep_array().
template <class Real>
class Tape {
 public:
  // Uninitialized values.
  Var<Real> make(int64_t rows, int64_t width) { return make_in(*now_, rows, width); }
  Var<Real> make_ids(int64_t rows, int64_t width) { return make_ids_in(*now_, rows, width); }
  // A node with the values of `of` and a gradient of its own that goes nowhere.
  Var<Real> detached(Var<Real> of) {
    now_->nodes.push_back({.rows = of.rows(),
                           .width = of.width(),
                           .value = of.value(),
                           .in_segment = now_ == &segment_});
    return {&now_->nodes.back()};
  }
  // Memory that lives as long as the nodes that are made now.
  Real* array(int64_t count) { return array_in(*now_, count); }
  // Memory that outlives the segment.
  Real* keep_array(int64_t count) { return array_in(whole_, count); }

  // The gradient to add to, zeroed when it is first asked for.
  Real* grad(Var<Real> var) {
    Node<Real>& node = *var.node;
    if (node.grad == nullptr) {
      node.grad = array_in(node.in_segment ? segment_ : whole_, node.size());
      std::fill_n(node.grad, node.size(), Real{0});
    }
    return node.grad;
  }

  void record(std::function<void()> rule) { now_->rules.push_back(std::move(rule)); }

  // Segments do not nest.
  void begin_segment() { now_ = &segment_; }
  void end_segment() {
    segment_.clear();
    now_ = &whole_;
  }
  // A copy of a node of the segment that outlives it.
  Var<Real> keep(Var<Real> var) {
    if (var.empty() || !var.node->in_segment) {
      return var;
    }
    const Node<Real>& from = *var.node;
    if (from.ids != nullptr) {
      const Var<Real> kept = make_ids_in(whole_, from.rows, from.width);
      std::copy_n(from.ids, from.size(), kept.node->ids);
      return kept;
    }
    const Var<Real> kept = make_in(whole_, from.rows, from.width);
    std::copy_n(from.value, from.size(), kept.node->value);
    return kept;
  }
  // `again`, made once more, takes over the gradient that its kept copy has been given.
  void take_gradient(Var<Real> again, Var<Real> kept) {
    if (again.node != kept.node) {
      again.node->grad = grad(kept);
    }
  }

  // Runs the rules of the segment, or of the whole forward, the last one first.
  void backward() {
    std::vector<std::function<void()>>& rules = now_->rules;
    for (size_t i = rules.size(); i-- > 0;) {
      rules[i]();
    }
  }

  // Forgets everything; memory is kept for the next forward.
  void reset() {
    whole_.clear();
    end_segment();
    most_bytes_ = 0;
  }
  // The most that nodes and arrays took at a time since the last reset().
  int64_t most_bytes() const { return most_bytes_; }

 private:
  struct Store {
    Arena arena{int64_t{1} << 24};
    std::deque<Node<Real>> nodes;
    std::vector<std::function<void()>> rules;
    int64_t bytes = 0;

    void clear() {
      rules.clear();
      nodes.clear();
      arena.reset();
      bytes = 0;
    }
  };

  template <class T>
  T* allocate(Store& store, int64_t count) {
    const int64_t n = std::max<int64_t>(1, count);
    store.bytes += n * static_cast<int64_t>(sizeof(T));
    most_bytes_ = std::max(most_bytes_, whole_.bytes + segment_.bytes);
    return store.arena.template allocate_array<T>(n);
  }
  Real* array_in(Store& store, int64_t count) { return allocate<Real>(store, count); }
  Var<Real> make_in(Store& store, int64_t rows, int64_t width) {
    store.nodes.push_back({.rows = rows,
                           .width = width,
                           .value = array_in(store, rows * width),
                           .in_segment = &store == &segment_});
    return {&store.nodes.back()};
  }
  Var<Real> make_ids_in(Store& store, int64_t rows, int64_t width) {
    store.nodes.push_back({.rows = rows,
                           .width = width,
                           .ids = allocate<int32_t>(store, rows * width),
                           .in_segment = &store == &segment_});
    return {&store.nodes.back()};
  }

  Store whole_, segment_;
  Store* now_ = &whole_;
  int64_t most_bytes_ = 0;
};

}  // namespace cachalot::train
