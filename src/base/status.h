// Errors of the outside world: Status and Result<T>.
//
// A Status carries a canonical code and a message for the user; the message names the file, key and
// value that are wrong. Our own broken invariants do not use Status: see base/check.h.
//
//   Result<Config> read(...);
//   CACHALOT_TRY(Config config, read(path).with("loading the checkpoint"));   // returns on error
//   CACHALOT_RETURN_IF_ERROR(check(config));
#pragma once

#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace cachalot {

// The canonical codes of gRPC and Abseil, as far as they occur here.
enum class Code {
  kOk,
  kInvalidArgument,     // the caller's input is wrong whatever the system's state
  kNotFound,            // a file, key or tensor does not exist
  kOutOfRange,          // an index or size lies outside of what exists
  kFailedPrecondition,  // the input is well-formed but does not fit the present state
  kResourceExhausted,   // memory, pages or another bounded resource ran out
  kUnimplemented,       // no kernel or feature covers this request
  kDataLoss,            // stored bytes are damaged
  kUnavailable,         // an outside service or file cannot be reached now
  kCancelled,           // the caller withdrew the request
  kDeadlineExceeded,    // the request's time ran out
  kInternal,
};

std::string_view code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  // The same error with `context` in front: "context: message".
  Status with(std::string_view context) const {
    if (ok()) {
      return *this;
    }
    return {code_, std::string(context) + ": " + message_};
  }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

template <class T>
class [[nodiscard]] Result : public tl::expected<T, Status> {
 public:
  using Base = tl::expected<T, Status>;
  Result(Status status) : Base(tl::unexpect, std::move(status)) {}
  template <class U>
    requires std::is_constructible_v<T, U&&>
  Result(U&& value) : Base(std::forward<U>(value)) {}

  bool ok() const { return this->has_value(); }
  Status status() const { return ok() ? Status() : this->error(); }
  Result with(std::string_view context) && {
    if (ok()) {
      return std::move(*this);
    }
    return this->error().with(context);
  }
};

namespace internal {
inline const Status& status_of(const Status& s) {
  return s;
}
template <class T>
Status status_of(const Result<T>& r) {
  return r.status();
}
}  // namespace internal

}  // namespace cachalot

#define CACHALOT_CONCAT_INNER(a, b) a##b
#define CACHALOT_CONCAT(a, b) CACHALOT_CONCAT_INNER(a, b)

// Returns the error of a Status or Result expression from the enclosing function.
#define CACHALOT_RETURN_IF_ERROR(expr)                                                \
  do {                                                                                \
    if (::cachalot::Status cachalot_status = ::cachalot::internal::status_of((expr)); \
        !cachalot_status.ok()) {                                                      \
      return cachalot_status;                                                         \
    }                                                                                 \
  } while (false)

// Declares `decl` from a Result expression, or returns its error.
#define CACHALOT_TRY(decl, expr) \
  CACHALOT_TRY_INNER(CACHALOT_CONCAT(cachalot_result_, __LINE__), decl, expr)
#define CACHALOT_TRY_INNER(tmp, decl, expr) \
  auto tmp = (expr);                        \
  if (!tmp.ok()) {                          \
    return tmp.error();                     \
  }                                         \
  decl = std::move(*tmp)
