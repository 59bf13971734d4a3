#include "base/status.h"

namespace cachalot {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kNotFound:
      return "not found";
    case Code::kOutOfRange:
      return "out of range";
    case Code::kFailedPrecondition:
      return "failed precondition";
    case Code::kResourceExhausted:
      return "resource exhausted";
    case Code::kUnimplemented:
      return "unimplemented";
    case Code::kDataLoss:
      return "data loss";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kCancelled:
      return "cancelled";
    case Code::kDeadlineExceeded:
      return "deadline exceeded";
    case Code::kInternal:
      return "internal";
  }
  return "unknown";
}

}  // namespace cachalot
