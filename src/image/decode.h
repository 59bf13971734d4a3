// Image files from outside: JPEG, PNG, WebP and GIF, told apart by their first bytes.
//
// Colors are as Pillow 11's convert("RGB") gives them: alpha is dropped, a palette looked up,
// 16-bit samples cut to their upper half; only of gray images Pillow takes the lower values and
// clips them to 255, which makes nearly all of them white. Color profiles, gamma and the
// orientation tag are ignored. Of an animation the first frame counts.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "image/pixels.h"

namespace cachalot::image {

// These bound the memory and the time that a file takes: no format goes over an image more than a
// fixed number of times (jpeg.cc has the one for scans).
inline constexpr int64_t kMaxFileBytes = 20'000'000;
inline constexpr int64_t kMaxPixels = 50'000'000;

// The size that the header of a file states. Errors: an unknown format, a damaged header, a file or
// an image beyond the limits.
Result<Size> read_size(std::span<const uint8_t> file);

// The pixels. Errors: those of read_size(), damaged or missing data.
Result<Pixels> decode(std::span<const uint8_t> file);

}  // namespace cachalot::image
