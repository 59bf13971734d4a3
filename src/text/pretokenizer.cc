#include "text/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "base/format.h"
#include "base/utf8.h"

namespace cachalot::text::internal {
namespace {

constexpr size_t kMaxExpressionBytes = 16384;

struct FreeCode {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeMatch {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

using MatchData = std::unique_ptr<pcre2_match_data, FreeMatch>;

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

// The expressions were written for Oniguruma, whose \s is the property White_Space. PCRE2's \s
// includes U+180E as well.
std::string with_unicode_spaces(std::string_view expression) {
  std::string out;
  for (size_t i = 0; i < expression.size(); ++i) {
    if (expression[i] != '\\' || i + 1 == expression.size()) {
      out.push_back(expression[i]);
      continue;
    }
    const char escaped = expression[++i];
    if (escaped == 's' || escaped == 'S') {
      out += escaped == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
    } else {
      out.push_back('\\');
      out.push_back(escaped);
    }
  }
  return out;
}

}  // namespace

class PreTokenizer::Expression {
 public:
  static Result<Expression> compile(std::string_view expression, std::string_view field) {
    if (expression.size() > kMaxExpressionBytes) {
      return invalid("{}: the expression has {} bytes; at most {} are allowed",
                     field,
                     expression.size(),
                     kMaxExpressionBytes);
    }
    const std::string pattern = with_unicode_spaces(expression);
    int code = 0;
    PCRE2_SIZE offset = 0;
    Expression out;
    out.code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                  pattern.size(),
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                                  &code,
                                  &offset,
                                  nullptr));
    if (out.code_ == nullptr) {
      return invalid("{}: {} at byte {} of '{}'", field, pcre2_message(code), offset, pattern);
    }
    // Without JIT support the interpreter gives the same matches.
    out.jit_ = pcre2_jit_compile(out.code_.get(), PCRE2_JIT_COMPLETE) == 0;
    out.context_.reset(pcre2_match_context_create(nullptr));
    // Backtracking out of a run of N spaces takes N steps, so the limit has to exceed any text's
    // length; it still bounds an expression with nested repetition.
    pcre2_set_match_limit(out.context_.get(), 1U << 31);
    return out;
  }

  MatchData new_match() const {
    return MatchData(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
  }

  // Finds the next match from `start`; false if there is none.
  Result<bool> next(std::string_view text, size_t start, pcre2_match_data* match) const {
    const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    int found = PCRE2_ERROR_JIT_STACKLIMIT;
    if (jit_) {
      found = pcre2_jit_match(code_.get(), subject, text.size(), start, 0, match, context_.get());
    }
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      found = pcre2_match(code_.get(),
                          subject,
                          text.size(),
                          start,
                          PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                          match,
                          context_.get());
    }
    if (found == PCRE2_ERROR_NOMATCH) {
      return false;
    }
    if (found < 0) {
      return error(Code::kResourceExhausted, "cutting text into pieces: {}", pcre2_message(found));
    }
    return true;
  }

 private:
  std::unique_ptr<pcre2_code, FreeCode> code_;
  std::unique_ptr<pcre2_match_context, FreeContext> context_;
  bool jit_ = false;
};

namespace {

// One walk over a text; holds the match memory of each expression of the chain.
template <class Expression>
class Walk {
 public:
  Walk(const std::vector<Expression>& chain, const PreTokenizer::PieceSink& sink)
      : chain_(chain), sink_(sink) {
    for (const Expression& expression : chain) {
      matches_.push_back(expression.new_match());
    }
  }

  Status run(std::string_view text, size_t stage) {
    if (text.empty()) {
      return {};
    }
    if (stage == chain_.size()) {
      sink_(text);
      return {};
    }
    pcre2_match_data* match = matches_[stage].get();
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(match);
    size_t done = 0;
    for (size_t start = 0; start < text.size();) {
      CACHALOT_TRY(const bool found, chain_[stage].next(text, start, match));
      if (!found) {
        break;
      }
      // \K in a look-around can put the start of a match behind its end or before `done`.
      const size_t begin = std::max<size_t>(bounds[0], done);
      const size_t end = std::max<size_t>(bounds[1], begin);
      CACHALOT_RETURN_IF_ERROR(run(text.substr(done, begin - done), stage + 1));
      CACHALOT_RETURN_IF_ERROR(run(text.substr(begin, end - begin), stage + 1));
      done = end;
      start = end;
      if (begin == end && start < text.size()) {
        start += static_cast<size_t>(utf8_sequence_length(text.substr(start)));
      }
    }
    return run(text.substr(done), stage + 1);
  }

 private:
  const std::vector<Expression>& chain_;
  const PreTokenizer::PieceSink& sink_;
  std::vector<MatchData> matches_;
};

}  // namespace

PreTokenizer::PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;
PreTokenizer::~PreTokenizer() = default;

Status PreTokenizer::add(std::string_view expression, std::string_view field) {
  CACHALOT_TRY(Expression compiled, Expression::compile(expression, field));
  chain_.push_back(std::move(compiled));
  return {};
}

Status PreTokenizer::split(std::string_view text, const PieceSink& sink) const {
  return Walk<Expression>(chain_, sink).run(text, 0);
}

}  // namespace cachalot::text::internal
