// Any bytes as an image file, and as the URL of one. What is taken has the size that its header
// states and fits into the slots of a prompt; nothing decodes beyond the limits. The URL of a file
// is read back.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "image/data_url.h"
#include "image/decode.h"
#include "image/picture.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot;
  const std::span<const uint8_t> file(data, size);
  const Result<std::vector<uint8_t>> bytes =
      image::read_data_url(std::string_view(reinterpret_cast<const char*>(data), size));
  CACHALOT_CHECK(!bytes.ok() || bytes->size() < size);
  const Result<std::vector<uint8_t>> again = image::read_data_url(image::make_data_url(file));
  CACHALOT_CHECK(again.ok() && std::ranges::equal(*again, file));
  const Result<image::Size> stated = image::read_size(file);
  // Large images only cost time here.
  if (!stated.ok() || stated->width * stated->height > 1 << 20) {
    return 0;
  }
  const Result<image::Pixels> pixels = image::decode(file);
  if (!pixels.ok()) {
    return 0;
  }
  CACHALOT_CHECK(pixels->size == *stated);
  CACHALOT_CHECK(static_cast<int64_t>(pixels->rgb.size()) == stated->width * stated->height * 3);
  constexpr image::Geometry kSmall = {.patch = 4, .cell = 2, .min_pixels = 300, .max_slots = 40};
  const Result<image::Picture> picture = image::make_picture(file, kSmall);
  if (picture.ok()) {
    CACHALOT_CHECK(picture->slots <= kSmall.max_slots && picture->slots > 3);
    CACHALOT_CHECK(picture->slots == image::fit(kSmall, *stated)->slots);
    CACHALOT_CHECK(picture->patches().size() == picture->rgb.size());
  }
  return 0;
}
