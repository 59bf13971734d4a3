#include "text/utf8_stream.h"

#include <cstdint>

#include "base/utf8.h"

namespace cachalot::text::internal {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

// The most bytes at the start of `text` that are a prefix of some well-formed sequence (at least
// one byte: a byte that starts nothing is a part of its own).
size_t longest_valid_prefix(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t b0 = byte(0);
  const size_t length = b0 >= 0xC2 && b0 <= 0xDF   ? 2
                        : (b0 & 0xF0) == 0xE0      ? 3
                        : b0 >= 0xF0 && b0 <= 0xF4 ? 4
                                                   : 1;
  if (length == 1 || text.size() < 2) {
    return 1;
  }
  // Overlong forms, surrogates and values beyond U+10FFFF show in the second byte.
  const uint8_t low = b0 == 0xE0 ? 0xA0 : b0 == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = b0 == 0xED ? 0x9F : b0 == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < low || byte(1) > high) {
    return 1;
  }
  size_t n = 2;
  while (n < length && n < text.size() && (byte(n) & 0xC0) == 0x80) {
    ++n;
  }
  return n;
}

bool starts_sequence(std::string_view text) {
  const auto b0 = static_cast<uint8_t>(text[0]);
  return b0 >= 0xC2 && b0 <= 0xF4;
}

}  // namespace

void Utf8Stream::push(std::string_view bytes, std::string* out) {
  std::string joined;
  std::string_view text = bytes;
  if (!tail_.empty()) {
    joined = tail_ + std::string(bytes);
    tail_.clear();
    text = joined;
  }
  while (!text.empty()) {
    const auto length = static_cast<size_t>(utf8_sequence_length(text));
    if (length > 0) {
      out->append(text.substr(0, length));
      text.remove_prefix(length);
      continue;
    }
    const size_t part = longest_valid_prefix(text);
    if (part == text.size() && starts_sequence(text)) {
      tail_ = text;  // the rest of the character may still come
      return;
    }
    out->append(kReplacement);
    text.remove_prefix(part);
  }
}

void Utf8Stream::finish(std::string* out) {
  if (!tail_.empty()) {
    out->append(kReplacement);
    tail_.clear();
  }
}

}  // namespace cachalot::text::internal
