// How a step hands its ops what the host knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "ops/memory.h"
#include "tensor/arena.h"
#include "tensor/tensor.h"

namespace cachalot::model {

// The small arrays of a step in the backend's memory. On a device they are gathered on the host and
// copied at once by flush(); on the host they are written in place.
class StepArrays {
 public:
  StepArrays(Arena& arena, ops::Memory& memory, void* stream)
      : arena_(arena), memory_(memory), stream_(stream) {}

  // Copies of the values, valid for ops after flush(), with room for `capacity` of them.
  template <class T>
  T* add(const T* values, int64_t count, int64_t capacity = 0) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
    return static_cast<T*>(add_bytes(values, count * kBytes, std::max(count, capacity) * kBytes));
  }
  TensorView add(const std::vector<int32_t>& v);
  TensorView add(const std::vector<uint8_t>& v);
  TensorView add(const std::vector<float>& v, const Shape& shape);
  TensorView add(const std::vector<int64_t>& v, const Shape& shape);
  Status flush();

 private:
  void* add_bytes(const void* values, int64_t bytes, int64_t room);

  Arena& arena_;
  ops::Memory& memory_;
  void* stream_;
  uint8_t* base_ = nullptr;
  std::vector<uint8_t> mirror_;
};

}  // namespace cachalot::model
