// Antialiased bicubic resizing, bit by bit as Image.resize(size, BICUBIC) of Pillow 11 does it
// to 8-bit images: the width first, then the height.
#pragma once

#include "image/pixels.h"

namespace cachalot::image {

// `size` has at least one pixel.
Pixels resize(const Pixels& source, Size size);

}  // namespace cachalot::image
