// The official parser of a whole output.
#include <initializer_list>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/format.h"
#include "text/chat_parser.h"
#include "text/control_tokens.h"
#include "text/json_tree.h"

namespace cachalot::text {
namespace {

std::string tag(std::string_view before, std::string_view after) {
  return std::string(before) + std::string(kDsmlToken) + std::string(after);
}

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// Walks over the output. The official parser reads up to the next of several strings and then asks
// which one it was; so does this one, because that defines what malformed output it tolerates.
class StrictParser {
 public:
  explicit StrictParser(std::string_view output) : text_(output) {}

  Result<ChatOutput> run(bool thinking) {
    ChatOutput out;
    const std::string calls_open = tag("\n\n<", " calls");
    if (thinking) {
      out.reasoning = read_until({kThinkEndToken, calls_open});
      if (stop_ != kThinkEndToken) {
        return invalid("the reasoning has no closing {}", kThinkEndToken);
      }
    }
    out.content = read_until({kEosToken, calls_open});
    if (stop_ == calls_open) {
      CACHALOT_RETURN_IF_ERROR(calls(&out));
      if (!read_until({kEosToken}).empty()) {
        return invalid("text after the tool calls");
      }
    } else if (stop_ != kEosToken) {
      return invalid("the output does not end with {}", kEosToken);
    }
    if (at_ != text_.size()) {
      return invalid("text after the end of the output");
    }
    for (const std::string_view token :
         {kBosToken, kEosToken, kThinkToken, kThinkEndToken, kDsmlToken}) {
      if (out.content.find(token) != std::string::npos ||
          out.reasoning.find(token) != std::string::npos) {
        return invalid("unexpected {} in the text", token);
      }
    }
    return out;
  }

 private:
  // The text up to the first of `stops`, which is consumed and remembered; all the rest if there is
  // none. The earlier one in the list wins at equal places.
  std::string_view read_until(std::initializer_list<std::string_view> stops) {
    size_t end = text_.size();
    stop_ = {};
    for (const std::string_view stop : stops) {
      const size_t found = text_.find(stop, at_);
      if (found != std::string_view::npos && found < end) {
        end = found;
        stop_ = stop;
      }
    }
    const std::string_view read = text_.substr(at_, end - at_);
    at_ = end + stop_.size();
    return read;
  }

  Status calls(ChatOutput* out) {
    const std::string calls_close = tag("</", " calls>");
    const std::string call_open = tag("<", " invoke");
    const std::string call_close = tag("</", " invoke");
    const std::string parameter_open = tag("<", " parameter");
    while (at_ < text_.size()) {
      const std::string_view between = read_until({call_open, calls_close});
      if (between != ">\n") {
        return invalid("expected '>' and a newline around calls, not '{}'", between);
      }
      if (stop_ == calls_close) {
        return {};
      }
      ToolCall call;
      CACHALOT_TRY(call.name, call_name(read_until({parameter_open, call_close})));
      std::unordered_set<std::string> seen;
      call.arguments = "{";
      while (stop_ == parameter_open) {
        CACHALOT_RETURN_IF_ERROR(parameter(&call.arguments, &seen));
        const std::string_view after = read_until({parameter_open, call_close});
        if (after != ">\n") {
          return invalid("expected '>' and a newline after a parameter, not '{}'", after);
        }
      }
      call.arguments += "}";
      out->tool_calls.push_back(std::move(call));
    }
    return {};
  }

  // `header` is ` name="NAME">` and a newline; without parameters an empty line follows.
  static Result<std::string> call_name(std::string_view header) {
    constexpr std::string_view kBefore = "name=\"";
    std::string_view rest = header;
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t\n\v\f\r"), rest.size()));
    if (starts_with(rest, kBefore)) {
      rest.remove_prefix(kBefore.size());
      for (const std::string_view after : {"\">\n\n", "\">\n"}) {
        if (rest.size() >= after.size() && rest.substr(rest.size() - after.size()) == after) {
          rest.remove_suffix(after.size());
          return std::string(rest);
        }
      }
    }
    return invalid("malformed tool name '{}'", header);
  }

  // Appends `"key": value` of a parameter whose opening tag was just consumed.
  Status parameter(std::string* arguments, std::unordered_set<std::string>* seen) {
    constexpr std::string_view kBefore = " name=\"";
    const std::string parameter_close = tag("/", " parameter");
    const std::string_view whole = read_until({parameter_close});
    const Status malformed = invalid("malformed parameter '{}'", whole);
    if (!starts_with(whole, kBefore)) {
      return malformed;
    }
    std::string_view rest = whole.substr(kBefore.size());
    constexpr std::string_view kTrue = "\" string=\"true\">";
    constexpr std::string_view kFalse = "\" string=\"false\">";
    const size_t true_at = rest.find(kTrue);
    const size_t false_at = rest.find(kFalse);
    const size_t key_end = std::min(true_at, false_at);
    if (key_end == std::string_view::npos) {
      return malformed;
    }
    const bool is_string = true_at < false_at;
    const std::string key(rest.substr(0, key_end));
    rest.remove_prefix(key_end + (is_string ? kTrue : kFalse).size());
    // The official expression ends in `<$`, which also matches before a final newline.
    if (!rest.empty() && rest.back() == '\n') {
      rest.remove_suffix(1);
    }
    if (rest.empty() || rest.back() != '<') {
      return malformed;
    }
    rest.remove_suffix(1);
    if (!seen->insert(key).second) {
      return invalid("the parameter '{}' is given twice", key);
    }
    if (seen->size() > 1) {
      *arguments += ", ";
    }
    *arguments += python_string(key) + ": ";
    *arguments += is_string ? python_string(rest) : std::string(rest);
    return {};
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string_view stop_;  // what ended the last read; empty if nothing did
};

}  // namespace

Result<ChatOutput> parse_strict(std::string_view output, bool thinking) {
  return StrictParser(output).run(thinking);
}

}  // namespace cachalot::text
