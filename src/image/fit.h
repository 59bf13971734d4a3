// How an image is fitted into whole cells of patches, and how many slots of a prompt that takes.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "image/pixels.h"

namespace cachalot::image {

// What a model's vision tower takes.
struct Geometry {
  int64_t patch = 0;       // side of a patch in pixels
  int64_t cell = 0;        // side of a cell in patches; one slot each
  int64_t min_pixels = 0;  // smaller images are enlarged
  int64_t max_slots = 0;   // at least 4: an image of one cell
};

struct Fit {
  Size box;      // what the tower sees: whole patches
  Size content;  // of the image in it; the rest is gray
  int64_t left = 0, top = 0;
  int64_t slots = 0;  // START, a row of cells and NEWLINE for each row of cells, END
};

// Errors: an image so long and narrow that nothing of it would be left.
Result<Fit> fit(const Geometry& geometry, Size image);

}  // namespace cachalot::image
