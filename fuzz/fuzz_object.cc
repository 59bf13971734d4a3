// Any bytes as a cache object, and valid objects edited by the input under a checksum that holds:
// what is accepted must lie within the bytes and have the sizes that the layout asks for.
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "kvcache/object.h"

namespace {

using cachalot::kvcache::CacheLayout;
using cachalot::kvcache::Object;
using cachalot::kvcache::ObjectKind;
using cachalot::kvcache::PrefixKey;

CacheLayout layout() {
  CacheLayout l;
  l.layers = 1;
  l.window = 2;
  l.window_row_bytes = 33;
  l.main_row_bytes = 18;
  l.index_row_bytes = 17;
  l.ratios = {2, 1};
  l.compressed_dim = 4;
  l.page_tokens = 4;
  return l;
}

void parse(const PrefixKey& key, std::string_view bytes) {
  std::vector<int32_t> words;
  const auto object = cachalot::kvcache::parse_object(layout(), key, bytes, words);
  if (!object.ok()) {
    CACHALOT_CHECK(object.error().code() == cachalot::Code::kDataLoss);
    return;
  }
  const bool page = object->kind == ObjectKind::kPage;
  const auto wanted = static_cast<size_t>(page ? layout().page_bytes() : layout().state_bytes());
  CACHALOT_CHECK(object->first.size() == wanted, wanted);
  const auto* begin = reinterpret_cast<const uint8_t*>(bytes.data());
  CACHALOT_CHECK(object->first.data() >= begin);
  CACHALOT_CHECK(object->second.data() + object->second.size() <= begin + bytes.size());
  CACHALOT_CHECK(object->key() == key);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  parse({}, {reinterpret_cast<const char*>(data), size});
  if (size < 1) {
    return 0;
  }
  const bool page = data[0] % 2 == 0;
  const std::vector<int32_t> words(page ? 4 : data[0] % 4, 7);
  const std::vector<uint8_t> rows(static_cast<size_t>(layout().page_bytes()), 1);
  const std::vector<uint8_t> state(static_cast<size_t>(layout().state_bytes()), 2);
  const Object object{.kind = page ? ObjectKind::kPage : ObjectKind::kState,
                      .parent = {},
                      .words = words,
                      .first = page ? rows : state,
                      .second = page || words.empty() ? std::span<const uint8_t>() : rows};
  std::string bytes = encode_object(layout(), object);
  parse(object.key(), bytes);
  // Each three bytes of the input: where, and the byte to put there. The end is cut by the first.
  for (size_t i = 1; i + 3 <= size; i += 3) {
    bytes[(data[i] | data[i + 1] << 8) % bytes.size()] = static_cast<char>(data[i + 2]);
  }
  bytes.resize(bytes.size() - data[0] / 4 % 16);
  constexpr size_t kChecksum = 8, kFrom = 16;
  const uint64_t checksum = XXH3_64bits(bytes.data() + kFrom, bytes.size() - kFrom);
  std::memcpy(bytes.data() + kChecksum, &checksum, sizeof checksum);
  parse(object.key(), bytes);
  return 0;
}
