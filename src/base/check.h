// Broken invariants of our own code: always checked, abort with the condition and the values.
#pragma once

#include <string>

namespace cachalot::internal {
[[noreturn]] void check_failed(const char* file,
                               int line,
                               const char* condition,
                               const std::string& values);
inline std::string check_values() {
  return {};
}
template <class T, class... Rest>
std::string check_values(const T& first, const Rest&... rest) {
  std::string text = " " + std::to_string(first);
  return text + check_values(rest...);
}
}  // namespace cachalot::internal

// CACHALOT_CHECK(a == b, a, b): the numbers after the condition are printed on failure.
#define CACHALOT_CHECK(condition, ...)                                                      \
  do {                                                                                      \
    if (!(condition)) [[unlikely]] {                                                        \
      ::cachalot::internal::check_failed(                                                   \
          __FILE__, __LINE__, #condition, ::cachalot::internal::check_values(__VA_ARGS__)); \
    }                                                                                       \
  } while (false)

// For hot paths: compiled out of optimized builds.
#ifdef NDEBUG
#define CACHALOT_DCHECK(condition, ...) static_cast<void>(0)
#else
#define CACHALOT_DCHECK(condition, ...) CACHALOT_CHECK(condition, ##__VA_ARGS__)
#endif
