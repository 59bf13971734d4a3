// Views of dense row-major memory.
//
// A view does not own its memory and is copied by value. All views here are contiguous; the only
// strided object of the system, the paged cache, has its own view (ops/kv.h).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/check.h"
#include "tensor/dtype.h"

namespace cachalot {

enum class Device : uint8_t { kCpu, kCuda };

constexpr int kMaxRank = 4;

struct Shape {
  std::array<int64_t, kMaxRank> extent{};
  int rank = 0;

  Shape() = default;
  Shape(std::initializer_list<int64_t> extents) {
    CACHALOT_CHECK(extents.size() <= kMaxRank, extents.size());
    for (int64_t e : extents) {
      extent[static_cast<size_t>(rank++)] = e;
    }
  }
  int64_t operator[](int axis) const { return extent[static_cast<size_t>(axis)]; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) {
      n *= extent[static_cast<size_t>(i)];
    }
    return n;
  }
  bool operator==(const Shape&) const = default;
};

// "[2, 3]"
std::string to_string(const Shape& shape);

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device = Device::kCpu;
  Shape shape;

  TensorView() = default;
  TensorView(void* memory, DType type, const Shape& dims, Device where = Device::kCpu)
      : data(memory), dtype(type), device(where), shape(dims) {}

  bool empty() const { return data == nullptr; }
  int64_t bytes() const { return shape.elements() * dtype_bytes(dtype); }
  int64_t dim(int axis) const { return shape[axis]; }

  // The elements as T; T must have the dtype's size.
  template <class T>
  T* as() const {
    CACHALOT_DCHECK(static_cast<int64_t>(sizeof(T)) == dtype_bytes(dtype), sizeof(T));
    return static_cast<T*>(data);
  }

  // Rows [begin, begin + count) of the first axis.
  TensorView rows(int64_t begin, int64_t count) const {
    CACHALOT_DCHECK(begin >= 0 && begin + count <= shape[0], begin, count, shape[0]);
    TensorView view = *this;
    const int64_t row_bytes = shape[0] == 0 ? 0 : bytes() / shape[0];
    view.data = static_cast<uint8_t*>(data) + begin * row_bytes;
    view.shape.extent[0] = count;
    return view;
  }

  // The same elements under another shape.
  TensorView reshaped(const Shape& dims) const {
    CACHALOT_DCHECK(dims.elements() == shape.elements(), dims.elements(), shape.elements());
    TensorView view = *this;
    view.shape = dims;
    return view;
  }
};

}  // namespace cachalot
