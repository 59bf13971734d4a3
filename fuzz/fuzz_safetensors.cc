// Any bytes as a safetensors file: the header parser must refuse or return entries inside the file.
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/check.h"
#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto header = cachalot::io::parse_safetensors_header({data, size}, "fuzz");
  if (!header.ok()) {
    CACHALOT_CHECK(!header.error().message().empty());
    return 0;
  }
  uint64_t expected = 0;
  for (const cachalot::io::SafetensorsEntry& entry : header->entries) {
    CACHALOT_CHECK(entry.begin == expected, entry.begin, expected);
    CACHALOT_CHECK(
        entry.end - entry.begin ==
            static_cast<uint64_t>(entry.shape.elements() * cachalot::dtype_bytes(entry.dtype)),
        entry.end);
    expected = entry.end;
  }
  CACHALOT_CHECK(header->data_begin + expected == size, expected, size);
  return 0;
}
