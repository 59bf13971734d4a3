#include "text/byte_tokenizer.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/format.h"
#include "base/json.h"
#include "text/byte_level.h"
#include "text/control_tokens.h"

namespace cachalot::text {
namespace {

// The expressions of the released tokenizer: digits in threes; Chinese and Japanese; everything
// else.
constexpr std::array kExpressions = {
    std::string_view("\\p{N}{1,3}"),
    std::string_view("[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"),
    std::string_view("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
                     "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                     "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"),
};

// Pairs of bytes that are frequent in English, most frequent first.
constexpr std::string_view kPairs[] = {
    "he", " t", "in", " a", "er", "on", "re", "at", "en", "nd", " s", "or", "es", " w", "is",
    "it", " o", "ar", " i", "al", "ou", " c", "st", "an", "te", " b", "le", " h", "ed", "ng",
    " f", " p", "ic", " m", "ro", "ti", " d", "ve", "om", "as", " l", "ll", "ch", "ra", "us",
};

void write_split(JsonWriter& w, std::string_view expression) {
  w.begin_object().field("type", "Split").key("pattern").begin_object();
  w.field("Regex", expression).end_object();
  w.field("behavior", "Isolated").field("invert", false).end_object();
}

void write_byte_level(JsonWriter& w, bool use_regex) {
  w.begin_object().field("type", "ByteLevel").field("add_prefix_space", false);
  w.field("trim_offsets", true).field("use_regex", use_regex).end_object();
}

void write_added(JsonWriter& w, int32_t id, std::string_view content) {
  w.begin_object().field("id", id).field("content", content);
  for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"}) {
    w.field(flag, false);
  }
  w.field("special", true).end_object();
}

}  // namespace

std::string byte_level_tokenizer_json(int32_t vocab_size) {
  CACHALOT_CHECK(vocab_size >= kMinByteVocab, vocab_size);
  constexpr std::string_view kFirst[] = {kBosToken, kEosToken, kPadToken};
  const auto controls = std::min<int32_t>(vocab_size - kMinByteVocab, kControlTokens.size());
  const auto merges = std::min<int32_t>(vocab_size - kMinByteVocab - controls, std::size(kPairs));
  const int32_t placeholders = vocab_size - kMinByteVocab - controls - merges;

  JsonWriter w;
  w.begin_object().field("version", "1.0").key("truncation").null().key("padding").null();
  w.key("added_tokens").begin_array();
  int32_t id = 0;
  for (const std::string_view token : kFirst) {
    write_added(w, id++, token);
  }
  id = kMinByteVocab + merges;
  for (int32_t i = 0; i < controls; ++i) {
    write_added(w, id++, kControlTokens[static_cast<size_t>(i)]);
  }
  for (int32_t i = 0; i < placeholders; ++i) {
    write_added(w, id++, fmt::format("<\uFF5Cplace\u2581holder\u2581no\u2581{}\uFF5C>", i));
  }
  w.end_array().key("normalizer").null();

  w.key("pre_tokenizer").begin_object().field("type", "Sequence").key("pretokenizers");
  w.begin_array();
  for (const std::string_view expression : kExpressions) {
    write_split(w, expression);
  }
  write_byte_level(w, false);
  w.end_array().end_object();
  w.key("post_processor").null().key("decoder");
  write_byte_level(w, true);

  w.key("model").begin_object().field("type", "BPE").key("dropout").null();
  w.key("unk_token").null().key("continuing_subword_prefix").null();
  w.key("end_of_word_suffix").null().field("fuse_unk", false).field("byte_fallback", false);
  w.key("vocab").begin_object();
  id = 0;
  for (const std::string_view token : kFirst) {
    w.field(token, id++);
  }
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    w.field(internal::to_byte_level({&byte, 1}), id++);
  }
  for (int32_t i = 0; i < merges; ++i) {
    w.field(internal::to_byte_level(kPairs[i]), id++);
  }
  w.end_object().key("merges").begin_array();
  for (int32_t i = 0; i < merges; ++i) {
    w.value(internal::to_byte_level(kPairs[i].substr(0, 1)) + " " +
            internal::to_byte_level(kPairs[i].substr(1)));
  }
  w.end_array().end_object().end_object();
  return w.text();
}

}  // namespace cachalot::text
