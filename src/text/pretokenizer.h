// Cuts text into the pieces inside which byte pairs may merge.
//
// A chain of regular expressions: each cuts the pieces of the one before it at its matches, and the
// text between two matches is a piece too ("isolated"). An expression sees nothing but its piece,
// so a look-ahead at the end of a piece sees the end of text.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace cachalot::text::internal {

class PreTokenizer {
 public:
  using PieceSink = std::function<void(std::string_view)>;

  PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;
  ~PreTokenizer();

  // Appends an expression in PCRE2 syntax with Unicode classes; \s is Unicode White_Space.
  // Errors: an expression that does not compile; the message names `field`.
  Status add(std::string_view expression, std::string_view field);

  // Calls `sink` with each piece of `text`, in order; the pieces are views into `text` and together
  // are all of it. `text` must be well-formed UTF-8. Thread-safe.
  // Errors: kResourceExhausted when an expression backtracks beyond the match limit.
  Status split(std::string_view text, const PieceSink& sink) const;

 private:
  class Expression;
  std::vector<Expression> chain_;
};

}  // namespace cachalot::text::internal
