#include "text/json_tree.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/format.h"

namespace cachalot::text {
namespace {

using Kind = Json::Kind;

// Receives the events of nlohmann's parser, which does not recurse, and builds the tree.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return add({}); }
  bool boolean(bool value) override {
    Json node;
    node.kind = Kind::kBool;
    node.flag = value;
    return add(std::move(node));
  }
  bool number_integer(number_integer_t value) override { return number(fmt::format("{}", value)); }
  bool number_unsigned(number_unsigned_t value) override {
    return number(fmt::format("{}", value));
  }
  bool number_float(number_float_t value, const string_t& source) override {
    // Integers beyond 64 bits arrive here too; Python keeps all of their digits.
    const bool integral = source.find_first_not_of("-0123456789") == std::string::npos;
    return number(integral ? source : python_float(value));
  }
  bool string(string_t& value) override {
    Json node;
    node.kind = Kind::kString;
    node.text = std::move(value);
    return add(std::move(node));
  }
  bool binary(binary_t& /*value*/) override { return fail("binary values are not JSON"); }
  bool start_object(size_t /*elements*/) override { return open(Kind::kObject); }
  bool start_array(size_t /*elements*/) override { return open(Kind::kArray); }
  bool key(string_t& value) override {
    open_.back().keys.push_back(std::move(value));
    return true;
  }
  bool end_object() override {
    merge_repeated_keys(open_.back());
    return close();
  }
  bool end_array() override { return close(); }
  bool parse_error(size_t /*position*/,
                   const std::string& /*last_token*/,
                   const nlohmann::json::exception& ex) override {
    const std::string_view what = ex.what();
    const size_t prefix = what.find("] ");
    return fail(prefix == std::string_view::npos ? what : what.substr(prefix + 2));
  }

  const std::string& error() const { return error_; }
  Json take() { return std::move(root_); }

 private:
  bool fail(std::string_view why) {
    error_ = why;
    return false;
  }
  bool number(std::string text) {
    Json node;
    node.kind = Kind::kNumber;
    node.text = std::move(text);
    return add(std::move(node));
  }
  bool open(Kind kind) {
    if (open_.size() >= static_cast<size_t>(kMaxJsonDepth)) {
      return fail(fmt::format("arrays and objects are nested more than {} deep", kMaxJsonDepth));
    }
    Json node;
    node.kind = kind;
    open_.push_back(std::move(node));
    return true;
  }
  bool close() {
    Json node = std::move(open_.back());
    open_.pop_back();
    return add(std::move(node));
  }
  bool add(Json node) {
    if (++nodes_ > kMaxJsonNodes) {
      return fail(fmt::format("more than {} values", kMaxJsonNodes));
    }
    if (open_.empty()) {
      root_ = std::move(node);
    } else {
      open_.back().items.push_back(std::move(node));
    }
    return true;
  }

  static void merge_repeated_keys(Json& object) {
    std::unordered_map<std::string_view, size_t> position;
    position.reserve(object.keys.size());
    size_t kept = 0;
    for (size_t i = 0; i < object.keys.size(); ++i) {
      const auto found = position.find(object.keys[i]);
      if (found != position.end()) {
        object.items[found->second] = std::move(object.items[i]);
        continue;
      }
      if (kept != i) {
        object.keys[kept] = std::move(object.keys[i]);
        object.items[kept] = std::move(object.items[i]);
      }
      position.emplace(object.keys[kept], kept);
      ++kept;
    }
    object.keys.resize(kept);
    object.items.resize(kept);
  }

  std::vector<Json> open_;
  Json root_;
  int64_t nodes_ = 0;
  std::string error_;
};

void append_python(std::string& out, const Json& value) {
  switch (value.kind) {
    case Kind::kNull:
      out += "null";
      return;
    case Kind::kBool:
      out += value.flag ? "true" : "false";
      return;
    case Kind::kNumber:
      out += value.text;
      return;
    case Kind::kString:
      out += python_string(value.text);
      return;
    case Kind::kArray:
    case Kind::kObject:
      break;
  }
  out.push_back(value.is_array() ? '[' : '{');
  for (size_t i = 0; i < value.items.size(); ++i) {
    if (i > 0) {
      out += ", ";
    }
    if (value.is_object()) {
      out += python_string(value.keys[i]);
      out += ": ";
    }
    append_python(out, value.items[i]);
  }
  out.push_back(value.is_array() ? ']' : '}');
}

}  // namespace

const Json* Json::find(std::string_view key) const {
  const auto found = std::find(keys.begin(), keys.end(), key);
  return found == keys.end() ? nullptr : &items[static_cast<size_t>(found - keys.begin())];
}

Json* Json::find(std::string_view key) {
  return const_cast<Json*>(static_cast<const Json*>(this)->find(key));
}

std::optional<int64_t> Json::integer() const {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  if (kind != Kind::kNumber) {
    return std::nullopt;
  }
  const auto [last, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || last != end) {
    return std::nullopt;
  }
  return value;
}

std::optional<double> Json::number() const {
  double value = 0;
  const char* end = text.data() + text.size();
  if (kind != Kind::kNumber || std::from_chars(text.data(), end, value).ec != std::errc()) {
    return std::nullopt;
  }
  return value;
}

Result<Json> parse_json(std::string_view text, std::string_view source) {
  TreeBuilder builder;
  if (!nlohmann::json::sax_parse(text, &builder)) {
    return invalid("{}: {}", source, builder.error());
  }
  return builder.take();
}

std::string python_json(const Json& value) {
  std::string out;
  append_python(out, value);
  return out;
}

void append_python_escaped(std::string& out, std::string_view text) {
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<uint8_t>(c));
        } else {
          out.push_back(c);
        }
    }
  }
}

std::string python_string(std::string_view text) {
  std::string out = "\"";
  append_python_escaped(out, text);
  out.push_back('"');
  return out;
}

std::string python_float(double value) {
  // [-]d[.ddd]e[+-]xx with the shortest digits.
  char buffer[64];
  const auto end =
      std::to_chars(
          buffer, buffer + sizeof(buffer), std::fabs(value), std::chars_format::scientific)
          .ptr;
  const std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t mark = text.find('e');
  std::string digits(1, text[0]);
  if (mark > 2) {
    digits += text.substr(2, mark - 2);
  }
  int exponent = 0;
  const size_t exponent_digits = mark + 2;  // after the mandatory sign
  std::from_chars(buffer + exponent_digits, end, exponent);
  if (text[mark + 1] == '-') {
    exponent = -exponent;
  }
  std::string out = std::signbit(value) ? "-" : "";
  const int count = static_cast<int>(digits.size());
  // Python writes an exponent below 1e-4 and from 1e16 on.
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (count > 1) {
      out += "." + digits.substr(1);
    }
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) {
    return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  }
  if (count <= exponent + 1) {
    return out + digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  }
  const auto whole = static_cast<size_t>(exponent + 1);
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

std::string_view kind_name(Json::Kind kind) {
  switch (kind) {
    case Kind::kNull:
      return "null";
    case Kind::kBool:
      return "a boolean";
    case Kind::kNumber:
      return "a number";
    case Kind::kString:
      return "a string";
    case Kind::kArray:
      return "an array";
    case Kind::kObject:
      return "an object";
  }
  return "unknown";
}

}  // namespace cachalot::text
