// A bump allocator for the temporaries of one step: reset at the step's start, never freed between.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tensor/tensor.h"

namespace cachalot {

// Memory is 64-byte aligned and stays valid until reset() or until the mark is released. An arena
// of host memory grows when a step needs more than any step before; an arena over a given block, of
// host or device memory, does not grow: allocating more than fits() is a broken invariant.
class Arena {
 public:
  explicit Arena(int64_t block_bytes = int64_t{1} << 22) : block_bytes_(block_bytes) {}
  // Over `bytes` bytes at `memory`, which the caller owns and which lie on `device`.
  Arena(void* memory, int64_t bytes, Device device);

  TensorView allocate(DType dtype, const Shape& shape) {
    return {allocate_bytes(shape.elements() * dtype_bytes(dtype)), dtype, shape, device_};
  }
  // Whether allocate_bytes(bytes) succeeds now.
  bool fits(int64_t bytes) const;
  template <class T>
  T* allocate_array(int64_t count) {
    return static_cast<T*>(allocate_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  void* allocate_bytes(int64_t bytes);
  void reset() { release({0, 0}); }

  // A position to return to: what was allocated after mark() is free again after release().
  struct Mark {
    size_t block;
    int64_t used;
  };
  Mark mark() const { return {current_, used_}; }
  void release(const Mark& mark) {
    current_ = mark.block;
    used_ = mark.used;
  }

 private:
  struct Free {
    bool owned = true;
    void operator()(uint8_t* memory) const;
  };
  struct Block {
    std::unique_ptr<uint8_t[], Free> memory;
    int64_t bytes;
  };
  std::vector<Block> blocks_;
  size_t current_ = 0;
  int64_t used_ = 0;
  int64_t block_bytes_;  // 0: over a given block
  Device device_ = Device::kCpu;
};

}  // namespace cachalot
