// UTF-8 validation of single sequences.
#pragma once

#include <cstdint>
#include <string_view>

namespace cachalot {

// Bytes of the well-formed UTF-8 sequence at the start of `text` (1 to 4; no surrogates, no
// overlong forms, at most U+10FFFF), or 0 if it is malformed or cut off.
inline int utf8_sequence_length(std::string_view text) {
  if (text.empty()) {
    return 0;
  }
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t b0 = byte(0);
  if (b0 < 0x80) {
    return 1;
  }
  const int length = b0 >= 0xC2 && b0 <= 0xDF   ? 2
                     : (b0 & 0xF0) == 0xE0      ? 3
                     : b0 >= 0xF0 && b0 <= 0xF4 ? 4
                                                : 0;
  if (length == 0 || text.size() < static_cast<size_t>(length)) {
    return 0;
  }
  for (int i = 1; i < length; ++i) {
    if ((byte(static_cast<size_t>(i)) & 0xC0) != 0x80) {
      return 0;
    }
  }
  const uint8_t b1 = byte(1);
  const bool overlong = (b0 == 0xE0 && b1 < 0xA0) || (b0 == 0xF0 && b1 < 0x90);
  const bool surrogate = b0 == 0xED && b1 >= 0xA0;
  const bool beyond = b0 == 0xF4 && b1 >= 0x90;
  return overlong || surrogate || beyond ? 0 : length;
}

}  // namespace cachalot
