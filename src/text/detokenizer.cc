#include "text/detokenizer.h"

#include "text/utf8_stream.h"

namespace cachalot::text {

Detokenizer::Detokenizer(const Tokenizer& tokenizer, DetokenizerOptions options)
    : tokenizer_(&tokenizer),
      options_(options),
      stream_(std::make_unique<internal::Utf8Stream>()) {}
Detokenizer::Detokenizer(Detokenizer&&) noexcept = default;
Detokenizer::~Detokenizer() = default;

std::string Detokenizer::push(int32_t id) {
  std::string text;
  if (!(options_.skip_control && tokenizer_->is_control(id))) {
    stream_->push(tokenizer_->token_bytes(id), &text);
  }
  return text;
}

std::string Detokenizer::finish() {
  std::string text;
  stream_->finish(&text);
  return text;
}

std::string decode(const Tokenizer& tokenizer,
                   std::span<const int32_t> ids,
                   DetokenizerOptions options) {
  Detokenizer detokenizer(tokenizer, options);
  std::string text;
  for (const int32_t id : ids) {
    text += detokenizer.push(id);
  }
  return text + detokenizer.finish();
}

}  // namespace cachalot::text
