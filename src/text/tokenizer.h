// Byte-level BPE from a Hugging Face tokenizer.json.
//
//   CACHALOT_TRY(const Tokenizer tokenizer, Tokenizer::load(dir + "/tokenizer.json"));
//   CACHALOT_TRY(const std::vector<int32_t> ids, tokenizer.encode(user_text));
//
// Supported is what the DeepSeek V3 to V4.1 files use: model BPE without dropout, unk token,
// affixes or byte fallback; a pre-tokenizer that is ByteLevel, or a Sequence of isolating regex
// Splits and a final ByteLevel; no normalizer; decoder ByteLevel. Anything else is an error that
// names it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace cachalot::text {

// Immutable after loading; all functions are thread-safe.
class Tokenizer {
 public:
  // Errors: an unreadable file, or as parse().
  static Result<Tokenizer> load(const std::string& path);

  // Parses the text of a tokenizer.json; `source` names it in messages. Time and memory are bounded
  // by the text's length. Errors: kInvalidArgument naming the field for malformed JSON, unsupported
  // components, ids that are not exactly 0..n-1, merges of tokens that do not exist, missing bytes.
  static Result<Tokenizer> parse(std::string_view json, std::string_view source);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Token ids of untrusted text: the spelling of a control token in it is ordinary text. No BOS is
  // added. Bytes that are not UTF-8 become the tokens of these bytes: decoding restores them.
  // Errors: kResourceExhausted when a regex of the file backtracks without bound; the expressions
  // of the DeepSeek files never do.
  Result<std::vector<int32_t>> encode(std::string_view text) const;

  // As encode(), but the spellings of added tokens become these tokens; the longest one wins. Only
  // for text that is our own.
  Result<std::vector<int32_t>> encode_with_specials(std::string_view text) const;

  // Ids are 0..vocab_size()-1.
  int32_t vocab_size() const;

  // The bytes a token stands for; empty for an id outside of the vocabulary. A control token has
  // the bytes of its spelling. Lives as long as the tokenizer.
  std::string_view token_bytes(int32_t id) const;

  // Bytes of the longest token: a text of n bytes has at least n / longest_token() of them.
  int64_t longest_token() const;

  // The token as tokenizer.json spells it: in the byte-level alphabet for base tokens, as plain
  // text for control tokens.
  std::string token_string(int32_t id) const;

  // The id of a token as tokenizer.json spells it.
  std::optional<int32_t> id_of(std::string_view token) const;

  // True for the added tokens: in the real vocabulary ids 0..2 and from 128000 on. The file's
  // "special" flag is not used, since it is false for the role tokens.
  bool is_control(int32_t id) const;

  // The id of a control token. Errors: kNotFound naming the token.
  Result<int32_t> control_id(std::string_view token) const;

  // The ids of the DeepSeek spellings of BOS, EOS and pad, if the vocabulary has them.
  std::optional<int32_t> bos_id() const;
  std::optional<int32_t> eos_id() const;
  std::optional<int32_t> pad_id() const;

 private:
  struct Data;
  explicit Tokenizer(std::unique_ptr<Data> data);
  Status append_encoded(std::string_view text, std::vector<int32_t>* ids) const;

  std::unique_ptr<const Data> data_;
};

}  // namespace cachalot::text
