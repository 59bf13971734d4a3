// One decoder per format, behind decode.h. `size` reads the header alone; `pixels` decodes a file
// whose size was found to be within the limits. Messages say what the library found.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "image/pixels.h"

namespace cachalot::image {

struct Decoder {
  Result<Size> (*size)(std::span<const uint8_t> file);
  Result<Pixels> (*pixels)(std::span<const uint8_t> file, Size size);
};

extern const Decoder kJpeg;
extern const Decoder kPng;
extern const Decoder kWebp;
extern const Decoder kGif;

}  // namespace cachalot::image
