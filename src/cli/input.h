// JSON lines in, JSON lines out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/prompt_images.h"
#include "model/config.h"
#include "text/tokenizer.h"

namespace cachalot::cli {

// Lines {"tokens": [...]} or {"text": "..."}; text is tokenized as untrusted text. The error names
// the file, the line and the field.
Result<std::vector<std::vector<int32_t>>> read_token_lines(const std::string& path,
                                                           const text::Tokenizer& tokenizer);

// The prompt of a chat-completions request body in a file, rendered as the server would.
Result<engine::ImagePrompt> read_chat(const std::string& path,
                                      const text::Tokenizer& tokenizer,
                                      const model::ModelConfig& config);

Result<std::vector<engine::ImageFile>> read_image_files(const std::vector<std::string>& paths);

}  // namespace cachalot::cli
