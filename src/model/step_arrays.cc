#include "model/step_arrays.h"

#include <algorithm>

namespace cachalot::model {

void* StepArrays::add_bytes(const void* values, int64_t bytes, int64_t room) {
  auto* target = static_cast<uint8_t*>(arena_.allocate_bytes(room));
  if (memory_.device() == Device::kCpu) {
    std::copy_n(static_cast<const uint8_t*>(values), bytes, target);
    return target;
  }
  // The arena of a device is one block, so what is added here lies in ascending order.
  base_ = base_ == nullptr ? target : base_;
  const auto offset = static_cast<size_t>(target - base_);
  mirror_.resize(offset + static_cast<size_t>(bytes));
  std::copy_n(static_cast<const uint8_t*>(values), bytes, mirror_.data() + offset);
  return target;
}

TensorView StepArrays::add(const std::vector<int32_t>& v) {
  const auto n = static_cast<int64_t>(v.size());
  return {add(v.data(), n), DType::kI32, {n}, memory_.device()};
}

TensorView StepArrays::add(const std::vector<uint8_t>& v) {
  const auto n = static_cast<int64_t>(v.size());
  return {add(v.data(), n), DType::kU8, {n}, memory_.device()};
}

TensorView StepArrays::add(const std::vector<float>& v, const Shape& shape) {
  return {add(v.data(), shape.elements()), DType::kF32, shape, memory_.device()};
}

TensorView StepArrays::add(const std::vector<int64_t>& v, const Shape& shape) {
  return {add(v.data(), shape.elements()), DType::kI64, shape, memory_.device()};
}

Status StepArrays::flush() {
  return mirror_.empty()
             ? Status()
             : memory_.write(base_, mirror_.data(), static_cast<int64_t>(mirror_.size()), stream_);
}

}  // namespace cachalot::model
