#include "image/picture.h"

#include <openssl/evp.h>

#include <algorithm>

#include "base/check.h"
#include "image/decode.h"
#include "image/resize.h"

namespace cachalot::image {
namespace {

constexpr uint8_t kGray = 127;

Digest digest_of(const Picture& picture) {
  const int64_t shape[] = {picture.patch, picture.rows, picture.columns, picture.slots};
  Digest digest{};
  EVP_MD_CTX* const context = EVP_MD_CTX_new();
  const bool ok = context != nullptr && EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1 &&
                  EVP_DigestUpdate(context, shape, sizeof shape) == 1 &&
                  EVP_DigestUpdate(context, picture.rgb.data(), picture.rgb.size()) == 1 &&
                  EVP_DigestFinal_ex(context, digest.data(), nullptr) == 1;
  EVP_MD_CTX_free(context);
  CACHALOT_CHECK(ok);  // the library's own hash fails for want of memory alone
  return digest;
}

}  // namespace

std::vector<float> Picture::patches() const {
  std::vector<float> out;
  out.reserve(rgb.size());
  const int64_t width = columns * patch;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t c = 0; c < 3; ++c) {
        for (int64_t y = row * patch; y < (row + 1) * patch; ++y) {
          for (int64_t x = column * patch; x < (column + 1) * patch; ++x) {
            const float sample =
                static_cast<float>(rgb[static_cast<size_t>((y * width + x) * 3 + c)]);
            out.push_back((sample / 255.0f - 0.5f) / 0.5f);
          }
        }
      }
    }
  }
  return out;
}

Result<Picture> make_picture(std::span<const uint8_t> file, const Geometry& geometry) {
  CACHALOT_TRY(Pixels pixels, decode(file));
  CACHALOT_TRY(const Fit place, fit(geometry, pixels.size));
  pixels = resize(pixels, place.content);
  Picture picture{.patch = geometry.patch,
                  .rows = place.box.height / geometry.patch,
                  .columns = place.box.width / geometry.patch,
                  .slots = place.slots};
  const int64_t stride = place.box.width * 3;
  picture.rgb.assign(static_cast<size_t>(place.box.height * stride), kGray);
  for (int64_t y = 0; y < place.content.height; ++y) {
    std::copy_n(pixels.rgb.data() + y * place.content.width * 3,
                place.content.width * 3,
                picture.rgb.data() + (place.top + y) * stride + place.left * 3);
  }
  picture.digest = digest_of(picture);
  return picture;
}

}  // namespace cachalot::image
