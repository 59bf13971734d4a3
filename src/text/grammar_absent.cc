// A build without the grammar core.
#include "base/check.h"
#include "base/format.h"
#include "text/grammar.h"

namespace cachalot::text {

class CompiledGrammar {};

Result<std::shared_ptr<GrammarCompiler>> GrammarCompiler::create(const Tokenizer& /*tokenizer*/,
                                                                 int64_t /*vocab_size*/) {
  return error(Code::kUnimplemented, "this build has no grammar core (CACHALOT_WITH_GRAMMAR)");
}

struct GrammarMatcher::State {};

// Unreachable: without a compiler there is no grammar to match.
GrammarMatcher::GrammarMatcher(std::shared_ptr<const CompiledGrammar> /*grammar*/) {
  CACHALOT_CHECK(false);
}
GrammarMatcher::~GrammarMatcher() = default;
GrammarMatcher::GrammarMatcher(GrammarMatcher&&) noexcept = default;
Status GrammarMatcher::fill(std::vector<uint32_t>& /*bits*/) {
  return {};
}
Result<bool> GrammarMatcher::accept(int32_t /*token*/) {
  return false;
}
Result<bool> GrammarMatcher::finished() {
  return true;
}

}  // namespace cachalot::text
