// An image as a model's vision tower sees it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "image/fit.h"

namespace cachalot::image {

// SHA-256.
using Digest = std::array<uint8_t, 32>;

// Immutable once made.
struct Picture {
  int64_t patch = 0;         // side of a patch in pixels
  int64_t rows = 0;          // of patches
  int64_t columns = 0;       // of patches
  int64_t slots = 0;         // of a prompt
  std::vector<uint8_t> rgb;  // [rows patch, columns patch, 3]
  Digest digest{};           // of all of the above: two images with one digest are one input

  // [rows columns, 3 patch patch]: a row holds the samples of one patch in the order (channel, row,
  // column) as (x / 255 - 0.5) / 0.5.
  std::vector<float> patches() const;
};

// Decodes a file, fits it and pads it with gray. Errors: those of decode() and fit().
Result<Picture> make_picture(std::span<const uint8_t> file, const Geometry& geometry);

}  // namespace cachalot::image
