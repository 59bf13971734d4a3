#include "kvcache/prefix_key.h"

#include <xxhash.h>

#include <string>

namespace cachalot::kvcache {

PrefixKey PrefixKey::then(std::string_view bytes) const {
  // One half of the parent is the seed, the other stands in front.
  std::string chained(reinterpret_cast<const char*>(&high), sizeof high);
  chained += bytes;
  const XXH128_hash_t hash = XXH3_128bits_withSeed(chained.data(), chained.size(), low);
  return {hash.low64, hash.high64};
}

PrefixKey PrefixKey::then(std::span<const int32_t> words) const {
  return then({reinterpret_cast<const char*>(words.data()), words.size_bytes()});
}

}  // namespace cachalot::kvcache
