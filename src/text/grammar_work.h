// The work of the grammar core. An ambiguous grammar lets the states of its parser grow with the
// text, and the core itself knows no bound: cmake/grammar.cmake makes its parser count here. A step
// is a state that is looked at, some tens of nanoseconds.
//
// Included by sources of the core as well: C++17.
#pragma once

#include <cstdint>
#include <exception>

namespace cachalot::text {

// Steps that the parser may still take on this thread.
extern thread_local int64_t grammar_work_left;

// Leaves the parser in a state of no further use.
class GrammarWorkExceeded : public std::exception {
 public:
  const char* what() const noexcept override { return "too many steps of the parser"; }
};

inline void spend_grammar_work(int64_t steps) {
  grammar_work_left -= steps;
  if (grammar_work_left < 0) {
    throw GrammarWorkExceeded();
  }
}

}  // namespace cachalot::text
