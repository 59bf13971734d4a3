#include "text/byte_level.h"

#include <array>
#include <cstdint>

#include "base/utf8.h"

namespace cachalot::text::internal {
namespace {

constexpr int kAlphabetEnd = 0x144;  // one past the highest character of the alphabet

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Alphabet {
  std::array<uint16_t, 256> character{};
  std::array<int16_t, kAlphabetEnd> byte{};

  constexpr Alphabet() {
    for (int16_t& b : byte) {
      b = -1;
    }
    int next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const int c = stands_for_itself(b) ? b : next++;
      character[static_cast<size_t>(b)] = static_cast<uint16_t>(c);
      byte[static_cast<size_t>(c)] = static_cast<int16_t>(b);
    }
  }
};

constexpr Alphabet kAlphabet;

}  // namespace

std::string to_byte_level(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const char raw : bytes) {
    const int c = kAlphabet.character[static_cast<uint8_t>(raw)];
    if (c < 0x80) {
      text.push_back(static_cast<char>(c));
    } else {
      text.push_back(static_cast<char>(0xC0 | (c >> 6)));
      text.push_back(static_cast<char>(0x80 | (c & 0x3F)));
    }
  }
  return text;
}

std::optional<std::string> from_byte_level(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const int length = utf8_sequence_length(text.substr(i));
    int c = -1;
    if (length == 1) {
      c = static_cast<uint8_t>(text[i]);
    } else if (length == 2) {
      c = (static_cast<uint8_t>(text[i]) & 0x1F) << 6 | (static_cast<uint8_t>(text[i + 1]) & 0x3F);
    }
    if (c < 0 || c >= kAlphabetEnd || kAlphabet.byte[static_cast<size_t>(c)] < 0) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kAlphabet.byte[static_cast<size_t>(c)]));
    i += static_cast<size_t>(length);
  }
  return bytes;
}

}  // namespace cachalot::text::internal
