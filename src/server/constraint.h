// A grammar as the engine's constraint on the next token.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "text/grammar.h"

namespace cachalot::server {

// If `after` is a token, everything is free up to and including it: reasoning is not structured.
// `field` of the request is what errors name.
std::unique_ptr<engine::TokenConstraint> make_constraint(
    std::shared_ptr<const text::CompiledGrammar> grammar,
    std::optional<int32_t> after,
    std::string field);

}  // namespace cachalot::server
