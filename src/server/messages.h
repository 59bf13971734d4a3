// The Anthropic dialect's prompt, for counting its tokens too.
#pragma once

#include "server/generation.h"

namespace cachalot::server {

// The prompt part of a Messages body: system, messages, tools, tool_choice, thinking.
Result<text::ChatRequest> read_messages(const text::Json& body);

}  // namespace cachalot::server
