// Any text as a tokenizer.json: what is accepted must encode and give back the bytes it was fed.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = cachalot::text::Tokenizer::parse(json, "fuzz");
  if (!tokenizer.ok()) {
    CACHALOT_CHECK(!tokenizer.error().message().empty());
    return 0;
  }
  constexpr std::string_view kText = "Hello, w\xC3\xB6rld 123456 \xE4\xBD\xA0\n\n\xFF  end";
  const auto ids = tokenizer->encode(kText);
  if (ids.ok()) {
    std::string decoded;
    for (const int32_t id : *ids) {
      decoded += tokenizer->token_bytes(id);
    }
    CACHALOT_CHECK(decoded == kText, ids->size());
  }
  return 0;
}
