#include "text/json_fields.h"

#include <utility>

#include "base/format.h"

namespace cachalot::text {

using Kind = Json::Kind;

Status must_be(std::string_view path, std::string_view expected, const Json& got) {
  return invalid("{} must be {}, not {}", path, expected, kind_name(got.kind));
}

std::string child(std::string_view path, std::string_view key) {
  return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
}

const Json* present(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

Result<std::vector<int32_t>> token_ids(const Json& array, std::string_view path) {
  std::vector<int32_t> ids;
  ids.reserve(array.items.size());
  for (size_t i = 0; i < array.items.size(); ++i) {
    const std::optional<int64_t> id = array.items[i].integer();
    if (!id || *id < 0 || *id > INT32_MAX) {
      const bool number = array.items[i].is(Json::Kind::kNumber);
      return invalid("{}[{}] is {}, not a token id",
                     path,
                     i,
                     number ? array.items[i].text : kind_name(array.items[i].kind));
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

Result<std::string> string_field(const Json& object, std::string_view path, std::string_view key) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return std::string();
  }
  if (!value->is_string()) {
    return must_be(child(path, key), "a string", *value);
  }
  return value->text;
}

Result<std::string> required_string(const Json& object,
                                    std::string_view path,
                                    std::string_view key) {
  CACHALOT_TRY(std::string text, string_field(object, path, key));
  if (text.empty()) {
    return invalid("{} must be a string that is not empty", child(path, key));
  }
  return text;
}

Result<std::optional<bool>> bool_field(const Json& object,
                                       std::string_view path,
                                       std::string_view key) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return std::optional<bool>();
  }
  if (!value->is(Kind::kBool)) {
    return must_be(child(path, key), "a boolean", *value);
  }
  return std::optional<bool>(value->flag);
}

Result<std::optional<int64_t>> integer_field(
    const Json& object, std::string_view path, std::string_view key, int64_t low, int64_t high) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return std::optional<int64_t>();
  }
  if (!value->is(Kind::kNumber)) {
    return must_be(child(path, key), "an integer", *value);
  }
  const std::optional<int64_t> number = value->integer();
  if (!number || *number < low || *number > high) {
    return invalid(
        "{} is {}, must be an integer in [{}, {}]", child(path, key), value->text, low, high);
  }
  return number;
}

Result<std::optional<double>> number_field(
    const Json& object, std::string_view path, std::string_view key, double low, double high) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return std::optional<double>();
  }
  if (!value->is(Kind::kNumber)) {
    return must_be(child(path, key), "a number", *value);
  }
  const std::optional<double> number = value->number();
  if (!number || !(*number >= low && *number <= high)) {
    return invalid("{} is {}, must be in [{}, {}]", child(path, key), value->text, low, high);
  }
  return number;
}

Result<const Json*> object_field(const Json& object, std::string_view path, std::string_view key) {
  const Json* value = present(object, key);
  if (value != nullptr && !value->is_object()) {
    return must_be(child(path, key), "an object", *value);
  }
  return value;
}

Result<const Json*> array_field(const Json& object, std::string_view path, std::string_view key) {
  const Json* value = present(object, key);
  if (value != nullptr && !value->is_array()) {
    return must_be(child(path, key), "an array", *value);
  }
  return value;
}

Json string_value(std::string text) {
  Json value;
  value.kind = Kind::kString;
  value.text = std::move(text);
  return value;
}

void set(Json& object, std::string_view key, Json value) {
  if (Json* old = object.find(key)) {
    *old = std::move(value);
    return;
  }
  object.keys.emplace_back(key);
  object.items.push_back(std::move(value));
}

}  // namespace cachalot::text
