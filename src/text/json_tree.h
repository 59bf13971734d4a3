// JSON of the outside world as a tree, and its spelling by Python's json.dumps.
//
// The chat protocol puts JSON into prompts exactly as Python writes it, so a tree keeps the order
// of keys and the spelling of numbers. Depth and size are bounded: a hostile document is an error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace cachalot::text {

constexpr int kMaxJsonDepth = 64;             // arrays and objects inside one another
constexpr int64_t kMaxJsonNodes = 4'000'000;  // values in one document; about 100 bytes each

struct Json {
  enum class Kind : uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool flag = false;              // kBool
  std::string text;               // kString: the value; kNumber: as Python spells it
  std::vector<Json> items;        // kArray: elements; kObject: values
  std::vector<std::string> keys;  // kObject: parallel to items, each key once

  bool is(Kind k) const { return kind == k; }
  bool is_null() const { return kind == Kind::kNull; }
  bool is_string() const { return kind == Kind::kString; }
  bool is_array() const { return kind == Kind::kArray; }
  bool is_object() const { return kind == Kind::kObject; }

  // The value of a key, or null if this is not an object or lacks the key. A JSON null is found.
  const Json* find(std::string_view key) const;
  Json* find(std::string_view key);
  // The number, if it is written as an integer that fits.
  std::optional<int64_t> integer() const;
  // The number, rounded to the nearest double.
  std::optional<double> number() const;
};

// Parses one document. A repeated key keeps its first position and takes its last value, as in
// Python. Errors: invalid syntax or UTF-8, more than kMaxJsonDepth levels, more than kMaxJsonNodes
// values; the message starts with `source`.
Result<Json> parse_json(std::string_view text, std::string_view source);

// json.dumps(value, ensure_ascii=False).
std::string python_json(const Json& value);

// Appends the inside of a Python JSON string literal: no quotes. `text` is UTF-8.
void append_python_escaped(std::string& out, std::string_view text);

// `text` as a Python JSON string literal with its quotes.
std::string python_string(std::string_view text);

// repr(float): the shortest digits that read back the same value.
std::string python_float(double value);

// The kind in words, for messages: "a string", "an object".
std::string_view kind_name(Json::Kind kind);

}  // namespace cachalot::text
