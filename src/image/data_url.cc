#include "image/data_url.h"

#include <algorithm>

#include "base/format.h"
#include "image/decode.h"

namespace cachalot::image {
namespace {

int digit_of(char c) {
  if (c >= 'A' && c <= 'Z') {
    return c - 'A';
  }
  if (c >= 'a' && c <= 'z') {
    return c - 'a' + 26;
  }
  if (c >= '0' && c <= '9') {
    return c - '0' + 52;
  }
  return c == '+' || c == '-' ? 62 : c == '/' || c == '_' ? 63 : -1;
}

// Both alphabets, with or without padding; line ends are skipped. Ends at the limit of a file.
Result<std::vector<uint8_t>> decode_base64(std::string_view text) {
  while (!text.empty() && (text.back() == '=' || text.back() == '\n' || text.back() == '\r')) {
    text.remove_suffix(1);
  }
  constexpr auto kMost = static_cast<size_t>(kMaxFileBytes);
  std::vector<uint8_t> out;
  out.reserve(std::min(text.size() / 4 * 3 + 3, kMost));
  uint32_t bits = 0;
  int held = 0;  // bits of `bits` that are not written yet
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n' || text[i] == '\r') {
      continue;
    }
    const int digit = digit_of(text[i]);
    if (digit < 0) {
      return invalid("byte {} of the base64 data is none of its digits", i);
    }
    bits = bits << 6 | static_cast<uint32_t>(digit);
    held += 6;
    if (held >= 8) {
      if (out.size() == kMost) {
        return invalid("the image file has more than {} bytes", kMaxFileBytes);
      }
      held -= 8;
      out.push_back(static_cast<uint8_t>(bits >> held));
    }
  }
  if (held == 6) {
    return invalid("the base64 data is cut off");
  }
  return out;
}

}  // namespace

Result<std::vector<uint8_t>> read_data_url(std::string_view url) {
  if (url.starts_with("http://") || url.starts_with("https://")) {
    return invalid(
        "cachalot fetches nothing from the network; send the image as a data: URL in base64");
  }
  const size_t comma = url.find(',');
  if (!url.starts_with("data:") || comma == std::string_view::npos ||
      !url.substr(0, comma).ends_with(";base64")) {
    return invalid("the image must be a URL of the form data:image/png;base64,DATA");
  }
  return decode_base64(url.substr(comma + 1));
}

std::string make_data_url(std::span<const uint8_t> file) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string url = "data:;base64,";
  for (size_t i = 0; i < file.size(); i += 3) {
    const size_t n = std::min<size_t>(3, file.size() - i);
    uint32_t bits = 0;
    for (size_t k = 0; k < n; ++k) {
      bits |= uint32_t{file[i + k]} << (16 - 8 * k);
    }
    for (size_t k = 0; k < 4; ++k) {
      url += k <= n ? kDigits[bits >> (18 - 6 * k) & 63] : '=';
    }
  }
  return url;
}

}  // namespace cachalot::image
