// data: URLs, the form in which clients send files.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace cachalot::image {

// The bytes of "data:TYPE;base64,DATA". TYPE is not looked at: the bytes say what they are. Errors:
// another URL (those of the network say why they are not fetched), damaged base64, a file over the
// limit of decode.h.
Result<std::vector<uint8_t>> read_data_url(std::string_view url);

// The URL of an image file.
std::string make_data_url(std::span<const uint8_t> file);

}  // namespace cachalot::image
