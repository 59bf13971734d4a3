// JPEG by libjpeg-turbo: the accurate transform and smooth upsampling, as Pillow has them.
#include <turbojpeg.h>

#include <memory>
#include <string_view>

#include "base/format.h"
#include "image/decoders.h"

namespace cachalot::image {
namespace {

using Handle = std::unique_ptr<void, decltype([](tjhandle handle) { tjDestroy(handle); })>;

struct Header {
  Size size;
  int color_space = 0;
};

Result<Header> read_header(tjhandle handle, std::span<const uint8_t> file) {
  int width = 0, height = 0, subsampling = 0, color_space = 0;
  if (tjDecompressHeader3(
          handle, file.data(), file.size(), &width, &height, &subsampling, &color_space) != 0) {
    return invalid("{}", tjGetErrorStr2(handle));
  }
  return Header{{width, height}, color_space};
}

Result<Size> read_size(std::span<const uint8_t> file) {
  const Handle handle(tjInitDecompress());
  CACHALOT_TRY(const Header header, read_header(handle.get(), file));
  return header.size;
}

// Ink to light. Files with four inks hold them inverted, as Adobe began it.
void cmyk_to_rgb(std::span<const uint8_t> cmyk, std::span<uint8_t> rgb) {
  const auto product = [](int a, int b) {  // a b / 255, rounded
    const int t = a * b + 128;
    return ((t >> 8) + t) >> 8;
  };
  for (size_t i = 0; i * 4 < cmyk.size(); ++i) {
    const int light = cmyk[4 * i + 3];
    for (size_t c = 0; c < 3; ++c) {
      rgb[3 * i + c] = static_cast<uint8_t>(light - product(255 - cmyk[4 * i + c], light));
    }
  }
}

Result<Pixels> read_pixels(std::span<const uint8_t> file, Size size) {
  const Handle handle(tjInitDecompress());
  CACHALOT_TRY(const Header header, read_header(handle.get(), file));
  const bool inks = header.color_space == TJCS_CMYK || header.color_space == TJCS_YCCK;
  const auto pixels = static_cast<size_t>(size.width * size.height);
  std::vector<uint8_t> bytes(pixels * (inks ? 4 : 3));
  const int status = tjDecompress2(handle.get(),
                                   file.data(),
                                   file.size(),
                                   bytes.data(),
                                   static_cast<int>(size.width),
                                   0,
                                   static_cast<int>(size.height),
                                   inks ? TJPF_CMYK : TJPF_RGB,
                                   TJFLAG_ACCURATEDCT | TJFLAG_LIMITSCANS);
  // Of the warnings (cameras write stray bytes between markers) only the end that is missing means
  // that a part of the picture is.
  const std::string_view message(status == 0 ? "" : tjGetErrorStr2(handle.get()));
  const bool warning = status != 0 && tjGetErrorCode(handle.get()) == TJERR_WARNING;
  if (status != 0 && (!warning || message.find("Premature end") != std::string_view::npos)) {
    return invalid("{}", message);
  }
  if (!inks) {
    return Pixels{size, std::move(bytes)};
  }
  Pixels out{size, std::vector<uint8_t>(pixels * 3)};
  cmyk_to_rgb(bytes, out.rgb);
  return out;
}

}  // namespace

const Decoder kJpeg = {read_size, read_pixels};

}  // namespace cachalot::image
