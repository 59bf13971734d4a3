#include "server/api_error.h"

#include <algorithm>

#include "base/json.h"
#include "base/utf8.h"

namespace cachalot::server {
namespace {

constexpr size_t kMaxMessage = 1000;  // a message may quote what the client sent

std::string bounded(std::string_view text) {
  if (text.size() <= kMaxMessage) {
    return std::string(text);
  }
  size_t end = 0;
  while (end < kMaxMessage) {
    end += static_cast<size_t>(std::max(1, utf8_sequence_length(text.substr(end))));
  }
  return std::string(text.substr(0, std::min(end, text.size()))) + "...";
}

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
}

// The path at the start of a message: a field of the body, or one that must be there.
std::string field_of(std::string_view message, const text::Json* body) {
  size_t name = 0;
  while (name < message.size() && is_name(message[name])) {
    ++name;
  }
  size_t end = name;
  while (end < message.size() &&
         (is_name(message[end]) || message[end] == '.' || message[end] == '[' ||
          message[end] == ']' || (message[end] >= 'A' && message[end] <= 'Z'))) {
    ++end;
  }
  while (end > 0 && message[end - 1] == '.') {
    --end;
  }
  const bool known = body != nullptr && body->find(message.substr(0, name)) != nullptr;
  const bool required = message.substr(end).starts_with(" must be");
  return name > 0 && (known || required) ? std::string(message.substr(0, end)) : std::string();
}

const char* anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status < 500 ? "invalid_request_error" : "api_error";
  }
}

void text_or_null(JsonWriter& w, std::string_view key, std::string_view value) {
  w.key(key);
  if (value.empty()) {
    w.null();
  } else {
    w.value(value);
  }
}

}  // namespace

ApiError api_error(const Status& status, const text::Json* body) {
  ApiError out;
  out.message = bounded(status.message());
  out.type = "invalid_request_error";
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kOutOfRange:
    case Code::kFailedPrecondition:
    case Code::kUnimplemented:
      out.status = 400;
      out.param = field_of(status.message(), body);
      out.code = status.code() == Code::kOutOfRange      ? "context_length_exceeded"
                 : status.code() == Code::kUnimplemented ? "unsupported"
                                                         : "";
      return out;
    case Code::kNotFound:
      out.status = 404;
      out.param = field_of(status.message(), body);
      out.code = "not_found";
      return out;
    case Code::kResourceExhausted:
      out.status = 429;
      out.type = "rate_limit_error";
      out.code = "overloaded";
      out.retry_after = 1;
      return out;
    case Code::kUnavailable:
      out.status = 503;
      out.type = "service_unavailable_error";
      out.code = "unavailable";
      out.retry_after = 5;
      return out;
    case Code::kCancelled:
      out.status = 499;
      out.type = "request_cancelled";
      out.code = "cancelled";
      return out;
    case Code::kDeadlineExceeded:
      out.status = 504;
      out.type = "timeout_error";
      out.code = "deadline_exceeded";
      return out;
    case Code::kOk:
    case Code::kDataLoss:
    case Code::kInternal:
      break;
  }
  out.status = 500;
  out.type = "server_error";
  out.code = "internal";
  return out;
}

std::string openai_error_json(const ApiError& error) {
  JsonWriter w;
  w.begin_object().key("error").begin_object();
  w.field("message", error.message).field("type", error.type);
  text_or_null(w, "param", error.param);
  text_or_null(w, "code", error.code);
  w.end_object().end_object();
  return w.text();
}

std::string anthropic_error_json(const ApiError& error, std::string_view request_id) {
  JsonWriter w;
  w.begin_object().field("type", "error").key("error").begin_object();
  w.field("type", anthropic_type(error.status)).field("message", error.message);
  text_or_null(w, "param", error.param);
  text_or_null(w, "code", error.code);
  w.end_object();
  text_or_null(w, "request_id", request_id);
  w.end_object();
  return w.text();
}

}  // namespace cachalot::server
