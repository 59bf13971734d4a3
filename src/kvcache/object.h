// Pages and window states as self-contained objects, for stores outside of the page pools.
//
// An object names what it is: magic and version, the key it was stored under, the words that the
// key stands for, the cache layout, a checksum over all of it. Whoever reads one back need not
// trust where it comes from.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kvcache/layout.h"
#include "kvcache/prefix_key.h"

namespace cachalot::kvcache {

enum class ObjectKind : uint8_t {
  kPage = 1,   // the rows of one whole page
  kState = 2,  // a window state, then the page of the positions behind the last whole page, if any
};

// What an object holds. The views of a parsed one point into its bytes.
struct Object {
  ObjectKind kind = ObjectKind::kPage;
  PrefixKey parent;  // prefix before the words
  // PrefixContent::words of a page; of a state those behind the last whole page.
  std::span<const int32_t> words;
  int64_t decoder_from = 0;         // of a state: PrefixIndex::NewState
  int64_t draft_from = 0;           // likewise
  std::span<const uint8_t> first;   // the page, or the state
  std::span<const uint8_t> second;  // a state's last page

  // What it is stored under. Pages and states of one prefix differ.
  PrefixKey key() const;
};

std::string encode_object(const CacheLayout& layout, const Object& object);

// kDataLoss, naming the fault, unless `bytes` is an undamaged object of this layout that belongs
// under `key`. The words are copied to `words`, which the object refers to, for they need not lie
// aligned.
Result<Object> parse_object(const CacheLayout& layout,
                            const PrefixKey& key,
                            std::string_view bytes,
                            std::vector<int32_t>& words);

}  // namespace cachalot::kvcache
