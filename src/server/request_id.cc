#include "server/request_id.h"

#include <sys/random.h>

#include <algorithm>

#include "base/check.h"
#include "base/format.h"

namespace cachalot::server {

uint64_t random_bits() {
  uint64_t bits = 0;
  // Requests up to 256 bytes are never cut short.
  CACHALOT_CHECK(::getrandom(&bits, sizeof(bits), 0) == sizeof(bits));
  return bits;
}

std::string random_hex() {
  return fmt::format("{:016x}{:016x}", random_bits(), random_bits());
}

std::string request_id(std::string_view given) {
  const bool good =
      !given.empty() && given.size() <= 128 &&
      std::all_of(given.begin(), given.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  return good ? std::string(given) : "req-" + random_hex();
}

}  // namespace cachalot::server
