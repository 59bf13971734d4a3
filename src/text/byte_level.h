// The alphabet of byte-level BPE: every byte is one printable character, so that token strings are
// readable text. Bytes 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF stand for themselves; the other 68 bytes,
// in increasing order, are U+0100 and up (the space is U+0120).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cachalot::text::internal {

// `bytes` in the alphabet, as UTF-8.
std::string to_byte_level(std::string_view bytes);

// The bytes that `text` stands for, or nothing if a character is outside the alphabet.
std::optional<std::string> from_byte_level(std::string_view text);

}  // namespace cachalot::text::internal
