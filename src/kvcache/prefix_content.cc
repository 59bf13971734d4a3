#include "kvcache/prefix_content.h"

#include <algorithm>
#include <cstring>

namespace cachalot::kvcache {

std::vector<int32_t> PrefixContent::words(int64_t begin, int64_t end) const {
  std::vector<int32_t> out(tokens.begin() + begin, tokens.begin() + end);
  for (const ImageSpan& image : images) {
    if (std::max(image.begin, begin) < std::min(image.end, end)) {
      out.push_back(static_cast<int32_t>(image.begin - begin));
      out.resize(out.size() + image.digest.size() / 4);
      std::memcpy(&*(out.end() - static_cast<int64_t>(image.digest.size() / 4)),
                  image.digest.data(),
                  image.digest.size());
    }
  }
  return out;
}

}  // namespace cachalot::kvcache
