// Structured output: which tokens may come next. The automata are those of the xgrammar core; a
// build without it (CACHALOT_WITH_GRAMMAR=OFF) has no compiler to give.
//
//   CACHALOT_TRY(auto compiler, GrammarCompiler::create(tokenizer, vocab_size));
//   CACHALOT_TRY(auto grammar, compiler->compile(spec));
//   GrammarMatcher matcher(grammar);
//   CACHALOT_RETURN_IF_ERROR(matcher.fill(bits)); ... matcher.accept(id); ... matcher.finished();
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"

namespace cachalot::text {

// A tool whose calls a grammar describes.
struct GrammarTool {
  std::string name;
  std::string schema;  // JSON text of the parameters' schema, or empty: any
};

struct GrammarSpec {
  enum class Kind : uint8_t {
    kJson,    // any JSON object
    kSchema,  // text: a JSON schema
    kRegex,   // text: a regular expression
    kEbnf,    // text: a grammar in the GBNF dialect, its start is `root`
    kChoice,  // choices: one of these strings
    kCalls,   // a block of calls of `tools`
  };
  Kind kind = Kind::kJson;
  std::string text;
  std::vector<std::string> choices;
  // The tools of kCalls; with another kind, tools that may be called instead of answering. The
  // block is opened by the prompt already if `open`; `parallel` allows several calls.
  std::vector<GrammarTool> tools;
  bool open = false;
  bool parallel = true;
};

// Immutable, shared by any number of matchers.
class CompiledGrammar;

class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;

  // `vocab_size` is the model's: ids beyond the tokenizer's are never allowed. The tokenizer must
  // outlive the compiler. Errors: kUnimplemented without the grammar core.
  static Result<std::shared_ptr<GrammarCompiler>> create(const Tokenizer& tokenizer,
                                                         int64_t vocab_size);

  // Compiles, or takes the result from a bounded cache. Thread-safe. Errors: kInvalidArgument with
  // the compiler's words for a text that is malformed, unsupported or larger than 256 KiB, and for
  // one that takes too much work or allows no first token.
  virtual Result<std::shared_ptr<const CompiledGrammar>> compile(const GrammarSpec& spec) = 0;
};

// The state of one output. Not thread-safe.
//
// Its work is bounded: every token pays for kWorkPerToken steps of the parser (grammar_work.h), and
// what tokens do not use is kept for later ones, kMostWork at most. An error is kInvalidArgument,
// that this is used up, and ends the matcher's use. With 129280 tokens JSON, schemas and
// unambiguous grammars of languages take at most 70000 steps for a token, 1 to 20 ms; grammars with
// many readings of one text, hundreds of millions.
class GrammarMatcher {
 public:
  static constexpr int64_t kMostWork = 4'000'000;
  static constexpr int64_t kWorkPerToken = 200'000;

  explicit GrammarMatcher(std::shared_ptr<const CompiledGrammar> grammar);
  ~GrammarMatcher();
  GrammarMatcher(GrammarMatcher&&) noexcept;

  // One bit per id, little-endian 32-bit words, set: allowed. EOS is allowed where the text is
  // complete.
  Status fill(std::vector<uint32_t>& bits);
  // False: the token is not allowed, and nothing changed.
  Result<bool> accept(int32_t token);
  // The text is complete and nothing but EOS may follow.
  Result<bool> finished();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cachalot::text
