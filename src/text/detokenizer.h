// Token ids to text, one token at a time.
//
//   Detokenizer detokenizer(tokenizer, {.skip_control = true});
//   for (int32_t id : ids) { show(detokenizer.push(id)); }
//   show(detokenizer.finish());
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "text/tokenizer.h"

namespace cachalot::text {

namespace internal {
class Utf8Stream;
}

struct DetokenizerOptions {
  bool skip_control = true;  // control tokens have no text; else they appear in their spelling
};

// One stream of text; not thread-safe. The tokenizer must outlive it. The concatenated output is
// the same as decoding all bytes at once.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer, DetokenizerOptions options = {});
  Detokenizer(Detokenizer&&) noexcept;
  ~Detokenizer();

  // The text completed by this token: whole characters only, well-formed UTF-8. Bytes that may
  // become a character with the next token are held back; bytes that cannot are U+FFFD. An id
  // outside of the vocabulary has no text.
  std::string push(int32_t id);

  // Ends the text: an incomplete character at its end is flushed as one U+FFFD.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  DetokenizerOptions options_;
  std::unique_ptr<internal::Utf8Stream> stream_;
};

// The text of a whole sequence, as a Detokenizer gives it.
std::string decode(const Tokenizer& tokenizer,
                   std::span<const int32_t> ids,
                   DetokenizerOptions options = {});

}  // namespace cachalot::text
