#include "image/resize.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace cachalot::image {
namespace {

// Weights are integers of this many bits behind the point: 8 bits of a sample and two for the
// overshoot of the filter remain.
constexpr int kWeightBits = 32 - 8 - 2;

double cubic(double x) {
  constexpr double kA = -0.5;
  x = std::abs(x);
  if (x < 1.0) {
    return ((kA + 2.0) * x - (kA + 3.0)) * x * x + 1;
  }
  if (x < 2.0) {
    return (((x - 5) * x + 8) * x - 4) * kA;
  }
  return 0.0;
}

// The samples of one axis that make up each sample of the result.
struct Taps {
  int64_t most = 0;  // of one result
  struct Range {
    int64_t begin = 0;
    int64_t count = 0;
  };
  std::vector<Range> ranges;     // [out]
  std::vector<int32_t> weights;  // [out, most]
};

Taps make_taps(int64_t in, int64_t out) {
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  const double stretch = std::max(scale, 1.0);  // of the filter, when the image shrinks
  const double support = 2.0 * stretch;
  Taps taps;
  taps.most = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  taps.ranges.resize(static_cast<size_t>(out));
  taps.weights.resize(static_cast<size_t>(out * taps.most));
  std::vector<double> exact(static_cast<size_t>(taps.most));
  for (int64_t i = 0; i < out; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const double inverse = 1.0 / stretch;
    const int64_t begin = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const int64_t end = std::min(in, static_cast<int64_t>(center + support + 0.5));
    double sum = 0;
    for (int64_t x = begin; x < end; ++x) {
      const double weight = cubic((static_cast<double>(x) - center + 0.5) * inverse);
      exact[static_cast<size_t>(x - begin)] = weight;
      sum += weight;
    }
    taps.ranges[static_cast<size_t>(i)] = {begin, end - begin};
    for (int64_t x = 0; x < end - begin; ++x) {
      double weight = exact[static_cast<size_t>(x)];
      weight = sum != 0.0 ? weight / sum : weight;
      taps.weights[static_cast<size_t>(i * taps.most + x)] =
          static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kWeightBits));
    }
  }
  return taps;
}

uint8_t to_sample(int32_t sum) {
  return static_cast<uint8_t>(std::clamp(sum >> kWeightBits, 0, 255));
}

// One axis: result sample i of a line is the weighted sum of source samples `stride` bytes apart.
void weigh(const uint8_t* source, int64_t stride, const int32_t* weights, int64_t n, uint8_t* out) {
  int32_t sum[3] = {1 << (kWeightBits - 1), 1 << (kWeightBits - 1), 1 << (kWeightBits - 1)};
  for (int64_t k = 0; k < n; ++k) {
    for (int c = 0; c < 3; ++c) {
      sum[c] += source[k * stride + c] * weights[k];
    }
  }
  for (int c = 0; c < 3; ++c) {
    out[c] = to_sample(sum[c]);
  }
}

Pixels resize_width(const Pixels& source, int64_t width) {
  const Taps taps = make_taps(source.size.width, width);
  const int64_t height = source.size.height;
  Pixels out{{width, height}, std::vector<uint8_t>(static_cast<size_t>(width * height * 3))};
  for (int64_t y = 0; y < height; ++y) {
    const uint8_t* row = source.rgb.data() + y * source.size.width * 3;
    for (int64_t x = 0; x < width; ++x) {
      const Taps::Range range = taps.ranges[static_cast<size_t>(x)];
      weigh(row + range.begin * 3,
            3,
            taps.weights.data() + x * taps.most,
            range.count,
            out.rgb.data() + (y * width + x) * 3);
    }
  }
  return out;
}

Pixels resize_height(const Pixels& source, int64_t height) {
  const Taps taps = make_taps(source.size.height, height);
  const int64_t width = source.size.width;
  Pixels out{{width, height}, std::vector<uint8_t>(static_cast<size_t>(width * height * 3))};
  for (int64_t y = 0; y < height; ++y) {
    const Taps::Range range = taps.ranges[static_cast<size_t>(y)];
    for (int64_t x = 0; x < width; ++x) {
      weigh(source.rgb.data() + (range.begin * width + x) * 3,
            width * 3,
            taps.weights.data() + y * taps.most,
            range.count,
            out.rgb.data() + (y * width + x) * 3);
    }
  }
  return out;
}

}  // namespace

Pixels resize(const Pixels& source, Size size) {
  CACHALOT_CHECK(size.width > 0 && size.height > 0, size.width, size.height);
  // The order matters: what the first pass gives is rounded to whole samples.
  if (size.width == source.size.width) {
    return size.height == source.size.height ? source : resize_height(source, size.height);
  }
  Pixels wide = resize_width(source, size.width);
  return size.height == source.size.height ? wide : resize_height(wide, size.height);
}

}  // namespace cachalot::image
