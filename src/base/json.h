// Append-only JSON writing: for results and for server events on the hot path.
//
//   JsonWriter w;
//   w.begin_object().key("ids").begin_array().value(3).value(4).end_array().end_object();
//   w.text();   // {"ids": [3, 4]}
//
// Numbers are written with enough digits to read back the same value. NaN and infinities, which
// JSON does not know, are written as null.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace cachalot {

class JsonWriter {
 public:
  JsonWriter& begin_object();
  JsonWriter& end_object();
  JsonWriter& begin_array();
  JsonWriter& end_array();
  JsonWriter& key(std::string_view name);
  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag);
  JsonWriter& value(double number);
  JsonWriter& value(float number);
  template <class T>
    requires(std::is_integral_v<T> && !std::is_same_v<T, bool>)
  JsonWriter& value(T number) {
    if constexpr (std::is_signed_v<T>) {
      return integer(static_cast<int64_t>(number));
    } else {
      return unsigned_integer(static_cast<uint64_t>(number));
    }
  }
  JsonWriter& null();
  // Inserts a value that is JSON already.
  JsonWriter& raw(std::string_view json);

  template <class T>
  JsonWriter& field(std::string_view name, const T& v) {
    key(name);
    return value(v);
  }

  const std::string& text() const { return out_; }

 private:
  void separate();
  JsonWriter& integer(int64_t number);
  JsonWriter& unsigned_integer(uint64_t number);

  std::string out_;
  bool need_comma_ = false;
};

// `text` as a JSON string with its quotes. Invalid UTF-8 is replaced by U+FFFD.
std::string json_quote(std::string_view text);

}  // namespace cachalot
