#include "server/constraint.h"

#include <algorithm>
#include <utility>

namespace cachalot::server {
namespace {

class GrammarConstraint final : public engine::TokenConstraint {
 public:
  GrammarConstraint(std::shared_ptr<const text::CompiledGrammar> grammar,
                    std::optional<int32_t> after)
      : matcher_(std::move(grammar)), after_(after), free_(after.has_value()) {}

  bool fill(std::vector<uint32_t>& bits) override {
    if (free_) {
      return false;
    }
    matcher_.fill(bits);
    return true;
  }

  bool accept(int32_t token) override {
    if (free_) {
      free_ = token != *after_;
      return true;
    }
    if (!matcher_.accept(token)) {
      return false;
    }
    return true;
  }

  bool finished() const override { return !free_ && matcher_.finished(); }

 private:
  // Asking whether a text is complete uses its scratch memory.
  mutable text::GrammarMatcher matcher_;
  std::optional<int32_t> after_;
  bool free_;
};

}  // namespace

std::unique_ptr<engine::TokenConstraint> make_constraint(
    std::shared_ptr<const text::CompiledGrammar> grammar, std::optional<int32_t> after) {
  return std::make_unique<GrammarConstraint>(std::move(grammar), after);
}

}  // namespace cachalot::server
