// Any output of a model: the result must not depend on how its bytes were cut into tokens.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "text/byte_tokenizer.h"
#include "text/chat_parser.h"
#include "text/control_tokens.h"

namespace {

using namespace cachalot;

const text::Tokenizer& tokenizer() {
  static const text::Tokenizer tokenizer =
      std::move(*text::Tokenizer::parse(text::byte_level_tokenizer_json(512), "fuzz"));
  return tokenizer;
}

text::ChatOutput run(const std::string& output,
                     const text::ChatParserOptions& options,
                     bool whole) {
  // A byte above 0xF0 stands for a control token: the fuzzer finds them quickly.
  text::ChatParser parser(tokenizer(), options);
  text::ChatOutput result;
  const auto apply = [&](const std::vector<text::ChatEvent>& events) {
    for (const text::ChatEvent& event : events) {
      result.apply(event);
    }
  };
  std::string plain;
  const auto flush = [&] {
    for (size_t i = 0; !whole && i < plain.size(); ++i) {
      apply(parser.push_text(plain.substr(i, 1)));
    }
    apply(whole ? parser.push_text(plain) : std::vector<text::ChatEvent>());
    plain.clear();
  };
  for (const char c : output) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte > 0xF0) {
      flush();
      const size_t token = (byte - 0xF1u) % text::kControlTokens.size();
      apply(parser.push(*tokenizer().id_of(text::kControlTokens[token])));
    } else {
      plain.push_back(c);
    }
  }
  flush();
  apply(parser.finish());
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) {
    return 0;
  }
  text::ChatParserOptions options;
  options.start = static_cast<text::OutputStart>(data[0] % 4);
  options.parse_tools = (data[0] & 4) == 0;
  options.json_output = (data[0] & 8) != 0;
  options.show_control = (data[0] & 16) != 0;
  if ((data[0] & 32) != 0) {
    options.stop = {"stop", "ab"};
  }
  const std::string output(reinterpret_cast<const char*>(data) + 1, size - 1);
  const text::ChatOutput a = run(output, options, true);
  const text::ChatOutput b = run(output, options, false);
  CACHALOT_CHECK(a.reasoning == b.reasoning && a.content == b.content);
  CACHALOT_CHECK(a.tool_calls.size() == b.tool_calls.size());
  for (size_t i = 0; i < a.tool_calls.size(); ++i) {
    CACHALOT_CHECK(a.tool_calls[i].name == b.tool_calls[i].name);
    CACHALOT_CHECK(a.tool_calls[i].arguments == b.tool_calls[i].arguments);
  }
  return 0;
}
