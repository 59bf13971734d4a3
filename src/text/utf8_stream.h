// Turns a stream of bytes into whole characters.
#pragma once

#include <string>
#include <string_view>

namespace cachalot::text::internal {

// Bytes that cannot become a character are replaced by U+FFFD, one for each maximal part that a
// decoder would reject at once (the practice of Unicode and of Python's errors="replace"). The
// output does not depend on how the bytes were split.
class Utf8Stream {
 public:
  // Appends the characters completed by `bytes` to `out`; holds back at most 3 bytes.
  void push(std::string_view bytes, std::string* out);
  // Appends U+FFFD if an incomplete character is held back, and forgets it.
  void finish(std::string* out);

 private:
  std::string tail_;
};

}  // namespace cachalot::text::internal
