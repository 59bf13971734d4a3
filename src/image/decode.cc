#include "image/decode.h"

#include <algorithm>
#include <string_view>

#include "base/format.h"
#include "image/decoders.h"

namespace cachalot::image {
namespace {

struct Format {
  std::string_view name;
  const Decoder& decoder;
};

Result<Format> recognize(std::span<const uint8_t> file) {
  const std::string_view start(reinterpret_cast<const char*>(file.data()),
                               std::min<size_t>(file.size(), 12));
  if (start.starts_with("\xff\xd8\xff")) {
    return Format{"JPEG", kJpeg};
  }
  if (start.starts_with("\x89PNG\r\n\x1a\n")) {
    return Format{"PNG", kPng};
  }
  if (start.starts_with("RIFF") && start.ends_with("WEBP")) {
    return Format{"WebP", kWebp};
  }
  if (start.starts_with("GIF87a") || start.starts_with("GIF89a")) {
    return Format{"GIF", kGif};
  }
  return invalid("not a JPEG, PNG, WebP or GIF image");
}

Result<Size> checked_size(const Format& format, std::span<const uint8_t> file) {
  CACHALOT_TRY(const Size size, format.decoder.size(file).with(format.name));
  if (size.width < 1 || size.height < 1) {
    return invalid("{}: the image is {} x {} pixels", format.name, size.width, size.height);
  }
  if (size.width > kMaxPixels / size.height) {
    return invalid("{}: the image has {} x {} pixels, at most {} million are taken",
                   format.name,
                   size.width,
                   size.height,
                   kMaxPixels / 1'000'000);
  }
  return size;
}

Result<Format> checked_format(std::span<const uint8_t> file) {
  if (static_cast<int64_t>(file.size()) > kMaxFileBytes) {
    return invalid("the image file has {} bytes, at most {} are taken", file.size(), kMaxFileBytes);
  }
  return recognize(file);
}

}  // namespace

Result<Size> read_size(std::span<const uint8_t> file) {
  CACHALOT_TRY(const Format format, checked_format(file));
  return checked_size(format, file);
}

Result<Pixels> decode(std::span<const uint8_t> file) {
  CACHALOT_TRY(const Format format, checked_format(file));
  CACHALOT_TRY(const Size size, checked_size(format, file));
  return format.decoder.pixels(file, size).with(format.name);
}

}  // namespace cachalot::image
