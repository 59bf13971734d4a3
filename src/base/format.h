// Text formatting and error construction. Not included by .cu files: fmt 9 does not compile there.
#pragma once

#include <fmt/format.h>

#include "base/status.h"

namespace cachalot {

template <class... Args>
Status error(Code code, fmt::format_string<Args...> text, Args&&... args) {
  return {code, fmt::format(text, std::forward<Args>(args)...)};
}
template <class... Args>
Status invalid(fmt::format_string<Args...> text, Args&&... args) {
  return {Code::kInvalidArgument, fmt::format(text, std::forward<Args>(args)...)};
}

}  // namespace cachalot
