// Identifiers that the server gives out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cachalot::server {

// `given` if it is 1 to 128 printable ASCII characters, else a fresh id: it goes into a header and
// into the log.
std::string request_id(std::string_view given);

// 32 random hexadecimal digits.
std::string random_hex();

// 64 random bits.
uint64_t random_bits();

}  // namespace cachalot::server
