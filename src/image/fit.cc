#include "image/fit.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/format.h"
#include "base/math.h"

namespace cachalot::image {
namespace {

int64_t slots_of(const Geometry& geometry, Size box) {
  const int64_t columns = ceil_div(box.width / geometry.patch, geometry.cell);
  const int64_t rows = ceil_div(box.height / geometry.patch, geometry.cell);
  return rows * (columns + 1) + 2;
}

// The largest box of about the image's shape whose slots do not exceed the limit. For a box of mw
// by mh cells these are mh (mw + 1) + 2; at the image's own ratio that is a quadratic equation.
Size largest_box(const Geometry& geometry, Size image) {
  const int64_t side = geometry.patch * geometry.cell;
  const auto cell = static_cast<double>(side);
  const auto width = static_cast<double>(image.width), height = static_cast<double>(image.height);
  const double ratio = height / width;
  const auto most = static_cast<double>(geometry.max_slots - 2);
  const double columns = std::sqrt(most / ratio + 0.25) - 0.5;
  const double rows = columns * ratio;
  if (columns < 1) {
    return {side, (geometry.max_slots - 2) / 2 * side};
  }
  if (rows < 1) {
    return {(geometry.max_slots - 3) * side, side};
  }
  const double scale =
      std::min(std::floor(columns) * cell / width, std::floor(rows) * cell / height);
  const auto patch = static_cast<double>(geometry.patch);
  const auto whole = [&](double length) {
    return static_cast<int64_t>(std::floor(length * scale / patch)) * geometry.patch;
  };
  return {whole(width), whole(height)};
}

// Halves go to the even neighbour.
int64_t round_even(double value) {
  return static_cast<int64_t>(std::nearbyint(value));
}

}  // namespace

Result<Fit> fit(const Geometry& geometry, Size image) {
  CACHALOT_CHECK(geometry.max_slots >= 4, geometry.max_slots);
  Size size = image;
  if (size.width * size.height < geometry.min_pixels) {
    const double scale = std::sqrt(static_cast<double>(geometry.min_pixels) /
                                   static_cast<double>(size.width * size.height));
    size.width = static_cast<int64_t>(static_cast<double>(size.width) * scale);
    size.height = static_cast<int64_t>(static_cast<double>(size.height) * scale);
  }
  Fit out;
  out.box = {ceil_div(size.width, geometry.patch) * geometry.patch,
             ceil_div(size.height, geometry.patch) * geometry.patch};
  out.slots = slots_of(geometry, out.box);
  if (out.slots > geometry.max_slots && size.width > 0 && size.height > 0) {
    out.box = largest_box(geometry, size);
    out.slots = slots_of(geometry, out.box);
  }
  const auto width = static_cast<double>(image.width), height = static_cast<double>(image.height);
  const auto box_width = static_cast<double>(out.box.width);
  const auto box_height = static_cast<double>(out.box.height);
  out.content = out.box;
  if (width / height > box_width / box_height) {
    out.content.height = round_even(height / width * box_width);
  } else if (width / height < box_width / box_height) {
    out.content.width = round_even(width / height * box_height);
  }
  if (out.slots > geometry.max_slots || out.content.width < 1 || out.content.height < 1) {
    return invalid("an image of {} x {} pixels is too long and narrow for this model",
                   image.width,
                   image.height);
  }
  out.left = round_even(static_cast<double>(out.box.width - out.content.width) / 2);
  out.top = round_even(static_cast<double>(out.box.height - out.content.height) / 2);
  return out;
}

}  // namespace cachalot::image
