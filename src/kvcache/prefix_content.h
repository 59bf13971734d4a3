// What stands in a prefix: token ids, and the images among them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace cachalot::kvcache {

struct ImageSpan {
  int64_t begin = 0, end = 0;        // positions of its slots
  std::array<uint8_t, 32> digest{};  // of all that its rows depend on besides the weights
};

struct PrefixContent {
  std::span<const int32_t> tokens;
  std::span<const ImageSpan> images;  // in their order, apart

  // What the positions [begin, end) hold, in words to hash and to compare: their token ids, then
  // the place and the digest of every image that reaches into them. The slots of all images have
  // the same id, so ids alone would take one image for another.
  std::vector<int32_t> words(int64_t begin, int64_t end) const;
};

// Words of one image.
inline constexpr int64_t kImageWords = 1 + 32 / 4;

}  // namespace cachalot::kvcache
