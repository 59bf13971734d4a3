#include "text/token_classes.h"

#include <utf8proc.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "base/format.h"
#include "base/utf8.h"

namespace cachalot::text {
namespace {

bool well_formed(std::string_view text) {
  while (!text.empty()) {
    const int length = utf8_sequence_length(text);
    if (length == 0) {
      return false;
    }
    text.remove_prefix(static_cast<size_t>(length));
  }
  return true;
}

bool is_mark(int32_t c) {
  const utf8proc_category_t category = utf8proc_category(c);
  return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
         category == UTF8PROC_CATEGORY_ME;
}

// The property White_Space.
bool is_white_space(int32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// NFKC followed by NFD is the compatibility decomposition.
Result<std::vector<int32_t>> decompose(std::string_view text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  const auto size = static_cast<utf8proc_ssize_t>(text.size());
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  std::vector<int32_t> out(text.size() * 4 + 16);
  for (;;) {
    const utf8proc_ssize_t length = utf8proc_decompose(
        bytes, size, out.data(), static_cast<utf8proc_ssize_t>(out.size()), options);
    if (length < 0) {
      return error(Code::kInternal, "decomposing a token: {}", utf8proc_errmsg(length));
    }
    const bool fits = static_cast<size_t>(length) <= out.size();
    out.resize(static_cast<size_t>(length));
    if (fits) {
      return out;
    }
  }
}

Result<std::string> normalized(std::string_view text) {
  CACHALOT_TRY(const std::vector<int32_t> decomposed, decompose(text));
  std::vector<int32_t> characters;
  for (const int32_t c : decomposed) {
    if (is_mark(c)) {
      continue;
    }
    const int32_t lower = utf8proc_tolower(c);
    const bool space = lower == ' ' || lower == '\t' || lower == '\r' || lower == '\n';
    if (space && !characters.empty() && characters.back() == ' ') {
      continue;
    }
    characters.push_back(space ? ' ' : lower);
  }
  // A lone space survives the stripping of both ends.
  size_t begin = 0;
  size_t end = characters.size();
  if (!(end == 1 && characters[0] == ' ')) {
    while (begin < end && is_white_space(characters[begin])) {
      ++begin;
    }
    while (end > begin && is_white_space(characters[end - 1])) {
      --end;
    }
  }
  std::string out;
  for (size_t i = begin; i < end; ++i) {
    utf8proc_uint8_t buffer[4];
    const utf8proc_ssize_t length = utf8proc_encode_char(characters[i], buffer);
    out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(length));
  }
  return out;
}

}  // namespace

Result<std::vector<int32_t>> token_classes(const Tokenizer& tokenizer) {
  std::unordered_map<std::string, int32_t> class_of;
  std::vector<int32_t> classes;
  classes.reserve(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view text = tokenizer.token_bytes(id);
    std::string key;
    if (!well_formed(text) || text.find("\uFFFD") != std::string_view::npos) {
      key = tokenizer.token_string(id);
    } else {
      CACHALOT_TRY(key, normalized(text));
      if (key.empty()) {
        key = text;
      }
    }
    const auto next = static_cast<int32_t>(class_of.size());
    classes.push_back(class_of.try_emplace(std::move(key), next).first->second);
  }
  return classes;
}

Result<std::vector<int32_t>> token_class_map(const Tokenizer& tokenizer,
                                             int64_t vocab_size,
                                             int64_t classes) {
  std::vector<int32_t> map;
  if (classes == vocab_size) {
    for (int64_t id = 0; id < vocab_size; ++id) {
      map.push_back(static_cast<int32_t>(id));
    }
    return map;
  }
  CACHALOT_TRY(map, token_classes(tokenizer));
  int64_t found = 0;
  for (int32_t id : map) {
    found = std::max<int64_t>(found, id + 1);
  }
  if (found != classes) {
    return invalid(
        "the tokenizer has {} Engram classes, engram_compressed_vocab_size is {}", found, classes);
  }
  return map;
}

}  // namespace cachalot::text
