#include "server/constraint.h"

#include <utility>

namespace cachalot::server {
namespace {

class GrammarConstraint final : public engine::TokenConstraint {
 public:
  GrammarConstraint(std::shared_ptr<const text::CompiledGrammar> grammar,
                    std::optional<int32_t> after,
                    std::string field)
      : matcher_(std::move(grammar)),
        after_(after),
        free_(after.has_value()),
        field_(std::move(field)) {}

  Result<bool> fill(std::vector<uint32_t>& bits) override {
    if (free_) {
      return false;
    }
    CACHALOT_RETURN_IF_ERROR(matcher_.fill(bits).with(field_));
    return true;
  }

  Result<bool> accept(int32_t token) override {
    if (free_) {
      free_ = token != *after_;
      return true;
    }
    return matcher_.accept(token).with(field_);
  }

  Result<bool> finished() override {
    return free_ ? Result<bool>(false) : matcher_.finished().with(field_);
  }

 private:
  text::GrammarMatcher matcher_;
  std::optional<int32_t> after_;
  bool free_;
  std::string field_;
};

}  // namespace

std::unique_ptr<engine::TokenConstraint> make_constraint(
    std::shared_ptr<const text::CompiledGrammar> grammar,
    std::optional<int32_t> after,
    std::string field) {
  return std::make_unique<GrammarConstraint>(std::move(grammar), after, std::move(field));
}

}  // namespace cachalot::server
