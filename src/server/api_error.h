// Errors as clients see them.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "text/json_tree.h"

namespace cachalot::server {

struct ApiError {
  int status = 500;     // HTTP
  std::string message;  // bounded, UTF-8
  std::string type;     // "invalid_request_error", ...
  std::string param;    // path of the field, or empty
  std::string code;     // "context_length_exceeded", ..., or empty
  int retry_after = 0;  // seconds; 0: no such header
  std::string allow;    // methods, with 405 alone
};

// What the failure of a request means over HTTP. `body` is the parsed request or null: a message
// that starts with the path of one of its fields names that field in `param`.
ApiError api_error(const Status& status, const text::Json* body = nullptr);

// {"error": {"message", "type", "param", "code"}}, with null for what is empty.
std::string openai_error_json(const ApiError& error);

// {"type": "error", "error": {"type", "message"}, "request_id"}: the Anthropic dialect. `param` and
// `code` are there too.
std::string anthropic_error_json(const ApiError& error, std::string_view request_id);

}  // namespace cachalot::server
