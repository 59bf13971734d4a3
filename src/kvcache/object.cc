#include "kvcache/object.h"

#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/format.h"
#include "kvcache/prefix_content.h"

namespace cachalot::kvcache {
namespace {

constexpr char kMagic[8] = {'C', 'A', 'C', 'H', 'O', 'B', 'J', '2'};

// All integers little-endian. Behind it: the words, then the two parts.
struct Header {
  char magic[8];
  uint64_t checksum;  // XXH3-64 of everything behind this field
  uint64_t bytes;     // of the whole object
  uint64_t layout;
  PrefixKey parent;
  int64_t decoder_from;
  int64_t draft_from;
  uint64_t kind;
  uint64_t words;
  uint64_t first_bytes;
  uint64_t second_bytes;
};

// What gives the bytes of a page their meaning.
uint64_t page_hash(const CacheLayout& layout) {
  return XXH3_64bits_withSeed(&layout.page_tokens, sizeof layout.page_tokens, layout.hash());
}

uint64_t checksum(std::string_view object) {
  constexpr size_t kFrom = offsetof(Header, bytes);
  return XXH3_64bits(object.data() + kFrom, object.size() - kFrom);
}

}  // namespace

PrefixKey Object::key() const {
  const PrefixKey prefix = parent.then(words);
  return kind == ObjectKind::kPage ? prefix : prefix.then(std::string_view("state"));
}

std::string encode_object(const CacheLayout& layout, const Object& object) {
  Header header{.magic = {},
                .checksum = 0,
                .bytes = sizeof header + object.words.size_bytes() + object.first.size() +
                         object.second.size(),
                .layout = page_hash(layout),
                .parent = object.parent,
                .decoder_from = object.decoder_from,
                .draft_from = object.draft_from,
                .kind = static_cast<uint64_t>(object.kind),
                .words = object.words.size(),
                .first_bytes = object.first.size(),
                .second_bytes = object.second.size()};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  std::string bytes;
  bytes.reserve(header.bytes);
  const auto append = [&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
  };
  append(&header, sizeof header);
  append(object.words.data(), object.words.size_bytes());
  append(object.first.data(), object.first.size());
  append(object.second.data(), object.second.size());
  header.checksum = checksum(bytes);
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

Result<Object> parse_object(const CacheLayout& layout,
                            const PrefixKey& key,
                            std::string_view bytes,
                            std::vector<int32_t>& words) {
  Header header;
  if (bytes.size() < sizeof header) {
    return error(Code::kDataLoss, "cache object of {} bytes is cut off", bytes.size());
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) {
    return error(Code::kDataLoss, "not a cache object: wrong magic");
  }
  if (header.bytes != bytes.size() || header.checksum != checksum(bytes)) {
    return error(Code::kDataLoss, "cache object of {} bytes is damaged", bytes.size());
  }
  if (header.layout != page_hash(layout)) {
    return error(Code::kDataLoss, "cache object of another layout");
  }
  const auto page = static_cast<uint64_t>(layout.page_bytes());
  const auto page_tokens = static_cast<uint64_t>(layout.page_tokens);
  // At most one image for each token; the key says the rest.
  const uint64_t most = page_tokens * (1 + kImageWords);
  const bool whole = header.kind == static_cast<uint64_t>(ObjectKind::kPage) &&
                     header.words >= page_tokens && header.words <= most &&
                     header.first_bytes == page && header.second_bytes == 0;
  const bool state = header.kind == static_cast<uint64_t>(ObjectKind::kState) &&
                     header.words <= most &&
                     header.first_bytes == static_cast<uint64_t>(layout.state_bytes()) &&
                     header.second_bytes == (header.words > 0 ? page : 0) &&
                     header.decoder_from >= 0 && header.draft_from >= 0;
  if ((!whole && !state) ||
      header.bytes != sizeof header + header.words * 4 + header.first_bytes + header.second_bytes) {
    return error(Code::kDataLoss,
                 "cache object with {} words has parts of {} and {} bytes",
                 header.words,
                 header.first_bytes,
                 header.second_bytes);
  }
  const char* from = bytes.data() + sizeof header;
  words.resize(header.words);
  std::copy_n(from, header.words * 4, reinterpret_cast<char*>(words.data()));
  const auto* parts = reinterpret_cast<const uint8_t*>(from + header.words * 4);
  Object object{.kind = static_cast<ObjectKind>(header.kind),
                .parent = header.parent,
                .words = words,
                .decoder_from = header.decoder_from,
                .draft_from = header.draft_from,
                .first = {parts, header.first_bytes},
                .second = {parts + header.first_bytes, header.second_bytes}};
  if (object.key() != key) {
    return error(Code::kDataLoss, "cache object belongs under another key");
  }
  return object;
}

}  // namespace cachalot::kvcache
