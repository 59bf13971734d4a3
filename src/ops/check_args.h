// Validation of op args: small predicates that produce the error text once.
#pragma once

#include <initializer_list>
#include <string_view>

#include "base/format.h"
#include "ops/weight.h"
#include "tensor/tensor.h"

namespace cachalot::ops::internal {

inline bool is_act(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF32;
}

// Collects the first fault of an op's args.
class ArgCheck {
 public:
  explicit ArgCheck(std::string_view op) : op_(op) {}

  ArgCheck& tensor(std::string_view name,
                   const TensorView& view,
                   std::initializer_list<DType> dtypes,
                   const Shape& shape) {
    if (!status_.ok()) {
      return *this;
    }
    if (view.shape != shape) {
      return fail("{} has shape {}, expected {}", name, to_string(view.shape), to_string(shape));
    }
    if (view.data == nullptr && shape.elements() > 0) {
      return fail("{} is missing", name);
    }
    for (DType dtype : dtypes) {
      if (view.dtype == dtype) {
        return *this;
      }
    }
    return fail("{} has dtype {}", name, dtype_name(view.dtype));
  }
  ArgCheck& act(std::string_view name, const TensorView& view, DType dtype, const Shape& shape) {
    return tensor(name, view, {dtype}, shape);
  }
  ArgCheck& weight(std::string_view name, const Weight& w, int64_t out, int64_t in) {
    if (status_.ok() && (w.empty() || w.out != out || w.in != in)) {
      return fail("{} is [{}, {}], expected [{}, {}]", name, w.out, w.in, out, in);
    }
    return *this;
  }
  ArgCheck& that(bool condition, std::string_view rule) {
    if (status_.ok() && !condition) {
      return fail("requires {}", rule);
    }
    return *this;
  }
  const Status& status() const { return status_; }

 private:
  template <class... Args>
  ArgCheck& fail(fmt::format_string<Args...> text, Args&&... args) {
    status_ = invalid("op {}: {}", op_, fmt::format(text, std::forward<Args>(args)...));
    return *this;
  }
  std::string_view op_;
  Status status_;
};

}  // namespace cachalot::ops::internal
