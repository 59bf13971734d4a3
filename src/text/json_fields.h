// Reading the fields of JSON that is not ours.
//
// null counts as absent. Errors are kInvalidArgument and start with the path of the field:
// "messages[2].role must be a string, not a number".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/json_tree.h"

namespace cachalot::text {

Status must_be(std::string_view path, std::string_view expected, const Json& got);

// "path.key", or "key" in the root object, whose path is empty.
std::string child(std::string_view path, std::string_view key);

// The value of a key, or null if it is absent.
const Json* present(const Json& object, std::string_view key);

// The elements of an array of token ids; whether the vocabulary has them is not asked.
Result<std::vector<int32_t>> token_ids(const Json& array, std::string_view path);

// An absent string is empty.
Result<std::string> string_field(const Json& object, std::string_view path, std::string_view key);
// Errors: also an absent or empty string.
Result<std::string> required_string(const Json& object,
                                    std::string_view path,
                                    std::string_view key);
Result<std::optional<bool>> bool_field(const Json& object,
                                       std::string_view path,
                                       std::string_view key);
// Errors: also a number that is not an integer of low..high.
Result<std::optional<int64_t>> integer_field(
    const Json& object, std::string_view path, std::string_view key, int64_t low, int64_t high);
// Errors: also a number outside of low..high.
Result<std::optional<double>> number_field(
    const Json& object, std::string_view path, std::string_view key, double low, double high);
// null if absent.
Result<const Json*> object_field(const Json& object, std::string_view path, std::string_view key);
Result<const Json*> array_field(const Json& object, std::string_view path, std::string_view key);

Json string_value(std::string text);

// Sets a key of an object.
void set(Json& object, std::string_view key, Json value);

}  // namespace cachalot::text
