// The name of a prefix by its content.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace cachalot::kvcache {

// Hash of a model fingerprint and all that stands in a prefix: a chain of XXH3-128, so that it
// outlives the process.
struct PrefixKey {
  uint64_t low = 0;
  uint64_t high = 0;
  auto operator<=>(const PrefixKey&) const = default;

  // The key of this prefix with `words` (PrefixContent::words), or whatever the bytes mean, behind
  // it.
  PrefixKey then(std::span<const int32_t> words) const;
  PrefixKey then(std::string_view bytes) const;
};

struct PrefixKeyHash {
  size_t operator()(const PrefixKey& key) const { return static_cast<size_t>(key.low); }
};

}  // namespace cachalot::kvcache
