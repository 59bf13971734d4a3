// An RGB image in memory.
#pragma once

#include <cstdint>
#include <vector>

namespace cachalot::image {

struct Size {
  int64_t width = 0;
  int64_t height = 0;
  bool operator==(const Size&) const = default;
};

struct Pixels {
  Size size;
  std::vector<uint8_t> rgb;  // [height, width, 3]
};

}  // namespace cachalot::image
