// Schemas, expressions, grammars, choices and tools of clients. What compiles must lead through
// tokens that it allows itself.
//
// The first byte chooses the kind; the text ends at the first NUL byte, and what follows draws
// tokens.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "text/byte_tokenizer.h"
#include "text/grammar.h"

namespace {

using namespace cachalot;
using text::GrammarSpec;

constexpr int64_t kVocab = 512;

text::GrammarCompiler& compiler() {
  static const text::Tokenizer tokenizer =
      std::move(*text::Tokenizer::parse(text::byte_level_tokenizer_json(kVocab), "fuzz"));
  static const std::shared_ptr<text::GrammarCompiler> compiler =
      std::move(*text::GrammarCompiler::create(tokenizer, kVocab));
  return *compiler;
}

std::vector<std::string> lines(std::string_view text) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    out.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

GrammarSpec read_spec(uint8_t choice, std::string_view text) {
  GrammarSpec spec;
  spec.kind = static_cast<GrammarSpec::Kind>(choice % 6);
  spec.open = (choice & 0x40) != 0;
  spec.parallel = (choice & 0x80) != 0;
  if (spec.kind == GrammarSpec::Kind::kChoice) {
    spec.choices = lines(text);
  } else if (spec.kind == GrammarSpec::Kind::kCalls) {
    // A name and a schema in turn, as JSON of a request has them.
    const std::vector<std::string> all = lines(text);
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
      spec.tools.push_back({all[i], all[i + 1]});
    }
  } else {
    spec.text = text;
  }
  return spec;
}

std::vector<int32_t> allowed(const std::vector<uint32_t>& bits) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < kVocab; ++id) {
    if ((bits[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) {
      ids.push_back(id);
    }
  }
  return ids;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) {
    return 0;
  }
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t end = input.find('\0');
  const std::string_view text = input.substr(0, end);
  const std::string_view draws =
      end == std::string_view::npos ? std::string_view() : input.substr(end + 1);
  const auto grammar = compiler().compile(read_spec(data[0], text));
  if (!grammar.ok()) {
    CACHALOT_CHECK(grammar.error().code() == Code::kInvalidArgument);
    CACHALOT_CHECK(!grammar.error().message().empty());
    return 0;
  }
  text::GrammarMatcher matcher(*grammar);
  std::vector<uint32_t> bits;
  // An error is that the grammar took too much work.
  for (const char draw : draws) {
    const Result<bool> finished = matcher.finished();
    if (!finished.ok() || *finished || !matcher.fill(bits).ok()) {
      break;
    }
    const std::vector<int32_t> ids = allowed(bits);
    if (ids.empty()) {
      break;
    }
    const int32_t id = ids[static_cast<uint8_t>(draw) % ids.size()];
    const Result<bool> accepted = matcher.accept(id);
    CACHALOT_CHECK(!accepted.ok() || *accepted, id);
    if (!accepted.ok()) {
      break;
    }
  }
  return 0;
}
