// JSON lines in, JSON lines out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"

namespace cachalot::cli {

// Lines {"tokens": [...]} or {"text": "..."}; text is tokenized as untrusted text. The error names
// the file, the line and the field.
Result<std::vector<std::vector<int32_t>>> read_token_lines(const std::string& path,
                                                           const text::Tokenizer& tokenizer);

// The ids of a chat-completions request body in a file, rendered as the server would.
Result<std::vector<int32_t>> read_chat(const std::string& path, const text::Tokenizer& tokenizer);

}  // namespace cachalot::cli
