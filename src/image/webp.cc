// WebP by libwebp.
#include <webp/decode.h>
#include <webp/demux.h>

#include <memory>

#include "base/format.h"
#include "image/decoders.h"

namespace cachalot::image {
namespace {

Result<WebPBitstreamFeatures> read_features(std::span<const uint8_t> file) {
  WebPBitstreamFeatures features;
  const VP8StatusCode status = WebPGetFeatures(file.data(), file.size(), &features);
  if (status != VP8_STATUS_OK) {
    return invalid("the header is damaged (libwebp status {})", static_cast<int>(status));
  }
  return features;
}

Result<Size> read_size(std::span<const uint8_t> file) {
  CACHALOT_TRY(const WebPBitstreamFeatures features, read_features(file));
  return Size{features.width, features.height};
}

// On the canvas of the animation, which may be larger than the frame.
Result<Pixels> read_first_frame(std::span<const uint8_t> file, Size size) {
  WebPAnimDecoderOptions options;
  if (WebPAnimDecoderOptionsInit(&options) == 0) {
    return error(Code::kInternal, "libwebp is of another version");
  }
  options.color_mode = MODE_RGBA;
  const WebPData data{file.data(), file.size()};
  const std::unique_ptr<WebPAnimDecoder,
                        decltype([](WebPAnimDecoder* d) { WebPAnimDecoderDelete(d); })>
      decoder(WebPAnimDecoderNew(&data, &options));
  WebPAnimInfo info;
  uint8_t* rgba = nullptr;
  int end_ms = 0;
  if (decoder == nullptr || WebPAnimDecoderGetInfo(decoder.get(), &info) == 0 ||
      info.canvas_width != static_cast<uint32_t>(size.width) ||
      info.canvas_height != static_cast<uint32_t>(size.height) ||
      WebPAnimDecoderGetNext(decoder.get(), &rgba, &end_ms) == 0) {
    return invalid("the first frame is damaged");
  }
  const auto pixels = static_cast<size_t>(size.width * size.height);
  Pixels out{size, std::vector<uint8_t>(pixels * 3)};
  for (size_t i = 0; i < pixels * 3; ++i) {
    out.rgb[i] = rgba[i / 3 * 4 + i % 3];
  }
  return out;
}

Result<Pixels> read_pixels(std::span<const uint8_t> file, Size size) {
  CACHALOT_TRY(const WebPBitstreamFeatures features, read_features(file));
  if (features.has_animation != 0) {
    return read_first_frame(file, size);
  }
  Pixels out{size, std::vector<uint8_t>(static_cast<size_t>(size.width * size.height * 3))};
  if (WebPDecodeRGBInto(file.data(),
                        file.size(),
                        out.rgb.data(),
                        out.rgb.size(),
                        static_cast<int>(size.width * 3)) == nullptr) {
    return invalid("the data is damaged or cut off");
  }
  return out;
}

}  // namespace

const Decoder kWebp = {read_size, read_pixels};

}  // namespace cachalot::image
