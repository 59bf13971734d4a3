// The fields that the chat and completions bodies share.
#pragma once

#include "server/generation.h"

namespace cachalot::server {

// model, sampling, limits, stop, streaming, structured output and our extensions. Errors start with
// the path of the field.
Status read_openai_fields(const text::Json& body, GenerationRequest* out);

// Strings that end the output: a string or an array of at most 16, none empty.
Result<std::vector<std::string>> read_stop(const text::Json& body, std::string_view key);

// Our extensions of every dialect: priority and timeout.
Status read_scheduling(const text::Json& body, GenerationRequest* out);

// An array of token ids; whether they exist is checked with the model.
Result<std::vector<int32_t>> read_ids(const text::Json& array, const std::string& path);

// {"prompt_tokens", "completion_tokens", "total_tokens", ...}
std::string openai_usage(const Usage& usage);

// An object of the OpenAI error envelope as the last event of a stream.
void append_openai_error(std::string& out, const ApiError& error);

// "stop", "length" or "tool_calls".
std::string_view openai_finish(const Finish& finish);

}  // namespace cachalot::server
