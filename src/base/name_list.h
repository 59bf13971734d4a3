// Names in a message: of many the first few, and how many more there are.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>

#include "base/format.h"

namespace cachalot {

class NameList {
 public:
  static constexpr size_t kFew = 10, kAll = std::numeric_limits<size_t>::max();

  explicit NameList(size_t shown = kFew) : shown_(shown) {}

  void add(std::string_view name) {
    if (++count_ <= shown_) {
      text_ += count_ == 1 ? "" : ", ";
      text_ += name;
    }
  }
  size_t count() const { return count_; }
  bool empty() const { return count_ == 0; }
  // "a, b, and 3 more"
  std::string text() const {
    return count_ <= shown_ ? text_ : fmt::format("{}, and {} more", text_, count_ - shown_);
  }

 private:
  size_t shown_, count_ = 0;
  std::string text_;
};

}  // namespace cachalot
