#include "text/chat_parser.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "text/control_tokens.h"
#include "text/json_tree.h"

namespace cachalot::text {
namespace {

constexpr int32_t kControlUnit = 256;

}  // namespace

// Feeds one unit; true when the marker is complete.
bool ChatParser::Marker::advance(int32_t unit) {
  const size_t before = matched;
  while (matched > 0 && units[matched] != unit) {
    matched = fallback[matched - 1];
  }
  if (units[matched] == unit) {
    ++matched;
  }
  // The newlines belong to the marker only while it grows without a break behind them.
  if (matched <= before) {
    const bool extends_run = newlines && unit == '\n' && matched == 0;
    newline_run = extends_run ? (before == 0 ? newline_run : 0) + 1 : 0;
  }
  return matched == units.size();
}

ChatParser::ChatParser(const Tokenizer& tokenizer, ChatParserOptions options)
    : tokenizer_(&tokenizer), options_(std::move(options)) {
  think_end_ = tokenizer.id_of(kThinkEndToken).value_or(-1);
  dsml_ = tokenizer.id_of(kDsmlToken).value_or(-1);
  eos_ = tokenizer.eos_id().value_or(-1);
  switch (options_.start) {
    case OutputStart::kReasoning:
      strip_newlines_ = true;
      enter(State::kReasoning);
      break;
    case OutputStart::kContent:
      strip_newlines_ = true;
      enter(State::kContent);
      break;
    case OutputStart::kContinuation:
      enter(State::kContent);
      break;
    case OutputStart::kToolCalls:
      enter(State::kCalls);
      break;
  }
}

// `text`, in which each '@' stands for the control token if one is given.
std::vector<int32_t> ChatParser::units_of(std::string_view text, int32_t control) const {
  std::vector<int32_t> units;
  for (const char c : text) {
    units.push_back(c == '@' && control >= 0 ? kControlUnit + control : static_cast<uint8_t>(c));
  }
  return units;
}

void ChatParser::add_marker(Marker::Kind kind, std::vector<int32_t> units, bool newlines) {
  Marker marker;
  marker.kind = kind;
  marker.newlines = newlines;
  marker.units = std::move(units);
  marker.fallback.assign(marker.units.size(), 0);
  size_t border = 0;
  for (size_t i = 1; i < marker.units.size(); ++i) {
    while (border > 0 && marker.units[i] != marker.units[border]) {
      border = marker.fallback[border - 1];
    }
    border += marker.units[i] == marker.units[border] ? 1 : 0;
    marker.fallback[i] = border;
  }
  markers_.push_back(std::move(marker));
}

// Earlier markers win when two are complete at the same unit.
void ChatParser::enter(State state) {
  using Kind = Marker::Kind;
  state_ = state;
  markers_.clear();
  const auto add_stops = [&] {
    for (size_t i = 0; i < options_.stop.size(); ++i) {
      if (!options_.stop[i].empty()) {
        add_marker(Kind::kStop, units_of(options_.stop[i]));
        markers_.back().index = static_cast<int32_t>(i);
      }
    }
  };
  const auto add_calls_open = [&] {
    if (options_.parse_tools && dsml_ >= 0) {
      add_marker(Kind::kCallsOpen, units_of("<@", dsml_), /*newlines=*/true);
    }
  };
  const auto add_tag_close = [&](bool newlines) {
    if (dsml_ >= 0) {
      add_marker(Kind::kTagClose, units_of("</@", dsml_), newlines);
    }
  };
  switch (state) {
    case State::kReasoning:
      add_calls_open();
      if (think_end_ >= 0) {
        add_marker(Kind::kThinkEnd, units_of("@", think_end_), /*newlines=*/true);
      }
      break;
    case State::kContent:
      if (options_.json_output) {
        add_marker(Kind::kFence, units_of("```json\n"));
        add_marker(Kind::kFence, units_of("```\n"));
        add_marker(Kind::kBareJson, units_of("{"));
        add_marker(Kind::kBareJson, units_of("["));
      } else {
        add_stops();
      }
      add_calls_open();
      if (think_end_ >= 0) {
        add_marker(Kind::kExtraThinkEnd, units_of("@", think_end_));
      }
      break;
    case State::kJson:
      add_stops();
      add_calls_open();
      add_marker(Kind::kFenceEnd, units_of("\n```"));
      break;
    case State::kAfterJson:
      add_calls_open();
      break;
    case State::kCalls:
      add_marker(Kind::kInvoke, units_of("invoke name=\""));
      if (dsml_ >= 0) {
        add_marker(Kind::kCallsClose, units_of("</@ calls>", dsml_));
        add_marker(Kind::kCallsClose, units_of("</@tool_calls>", dsml_));
      }
      break;
    case State::kName:
      word_.clear();
      add_marker(Kind::kNameEnd, units_of("\""));
      break;
    case State::kArguments:
      add_marker(Kind::kParameter, units_of("parameter name=\""));
      add_tag_close(false);
      break;
    case State::kKey:
      word_.clear();
      add_marker(Kind::kKeyEndString, units_of("\" string=\"true\">"));
      add_marker(Kind::kKeyEndJson, units_of("\" string=\"false\">"));
      add_tag_close(false);
      break;
    case State::kStringValue:
    case State::kJsonValue:
      add_tag_close(false);
      break;
    case State::kBody:
      add_tag_close(true);
      break;
    case State::kFinished:
      break;
  }
}

void ChatParser::feed(int32_t unit) {
  if (finished()) {
    return;
  }
  if (strip_newlines_) {
    if (unit == '\n') {
      return;
    }
    strip_newlines_ = false;
  }
  pending_.push_back(unit);
  for (Marker& marker : markers_) {
    if (marker.advance(unit)) {
      const Marker complete = std::move(marker);
      release(pending_.size() - complete.held());
      // Releasing can itself end the state: a `{` between tags starts a JSON body.
      end_text();
      pending_.clear();
      on_marker(complete);
      return;
    }
  }
  size_t held = 0;
  for (const Marker& marker : markers_) {
    held = std::max(held, marker.held());
  }
  release(pending_.size() - held);
}

// The first `count` pending units belong to no marker.
void ChatParser::release(size_t count) {
  for (size_t i = 0; i < count; ++i) {
    unmatched(pending_[i]);
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(count));
}

void ChatParser::on_marker(const Marker& marker) {
  using Kind = Marker::Kind;
  switch (marker.kind) {
    case Kind::kThinkEnd:
      strip_newlines_ = true;
      enter(State::kContent);
      return;
    case Kind::kExtraThinkEnd:
      enter(State::kContent);
      return;
    case Kind::kCallsOpen:
      enter(State::kCalls);
      return;
    case Kind::kStop:
      matched_stop_ = marker.index;
      enter(State::kFinished);
      return;
    case Kind::kFence:
      enter(State::kJson);
      return;
    case Kind::kBareJson:
      enter(State::kJson);
      text_unit(marker.units[0]);
      return;
    case Kind::kFenceEnd:
      enter(State::kAfterJson);
      return;
    case Kind::kInvoke:
      enter(State::kName);
      return;
    case Kind::kCallsClose:
      enter(State::kFinished);
      return;
    case Kind::kNameEnd: {
      ChatEvent begin;
      begin.type = ChatEvent::Type::kToolCallBegin;
      begin.call = calls_++;
      begin.id = fmt::format("{}_{}", options_.call_id_prefix, begin.call);
      begin.name = std::exchange(word_, {});
      events_.push_back(std::move(begin));
      first_parameter_ = true;
      enter(State::kArguments);
      return;
    }
    case Kind::kParameter:
      enter(State::kKey);
      return;
    case Kind::kKeyEndString:
    case Kind::kKeyEndJson: {
      const bool is_string = marker.kind == Kind::kKeyEndString;
      emit_arguments(first_parameter_ ? "{" : ", ");
      emit_arguments(python_string(word_) + (is_string ? ": \"" : ": "));
      first_parameter_ = false;
      enter(is_string ? State::kStringValue : State::kJsonValue);
      return;
    }
    case Kind::kTagClose:
      break;
  }
  // A closing tag ends the value, the parameter that never got a value, or the call.
  if (state_ == State::kKey) {
    enter(State::kArguments);
    return;
  }
  if (state_ == State::kStringValue || state_ == State::kJsonValue) {
    emit_arguments(state_ == State::kStringValue ? "\"" : "");
    enter(State::kArguments);
    return;
  }
  if (state_ == State::kArguments) {
    emit_arguments(first_parameter_ ? "{}" : "}");
  }
  ChatEvent end;
  end.type = ChatEvent::Type::kToolCallEnd;
  end.call = calls_ - 1;
  events_.push_back(std::move(end));
  enter(State::kCalls);
}

void ChatParser::unmatched(int32_t unit) {
  switch (state_) {
    case State::kContent:
      if (!options_.json_output) {
        text_unit(unit);
      }
      return;
    case State::kReasoning:
    case State::kJson:
    case State::kName:
    case State::kKey:
    case State::kStringValue:
    case State::kJsonValue:
    case State::kBody:
      text_unit(unit);
      return;
    case State::kArguments:
      // Nothing between the tags has a brace but a body of JSON.
      if (unit == '{' && first_parameter_) {
        enter(State::kBody);
        text_unit(unit);
      }
      return;
    case State::kAfterJson:
    case State::kCalls:
    case State::kFinished:
      return;
  }
}

void ChatParser::text_unit(int32_t unit) {
  if (unit < kControlUnit) {
    const char byte = static_cast<char>(unit);
    text({&byte, 1});
    return;
  }
  const bool prose =
      state_ == State::kReasoning || state_ == State::kContent || state_ == State::kJson;
  if (!prose || options_.show_control) {
    text(tokenizer_->token_bytes(unit - kControlUnit));
  }
}

void ChatParser::text(std::string_view bytes) {
  std::string whole;
  utf8_.push(bytes, &whole);
  deliver(whole);
}

void ChatParser::end_text() {
  std::string whole;
  utf8_.finish(&whole);
  deliver(whole);
}

void ChatParser::deliver(const std::string& whole) {
  if (whole.empty()) {
    return;
  }
  switch (state_) {
    case State::kReasoning:
      emit(ChatEvent::Type::kReasoning, whole);
      return;
    case State::kContent:
    case State::kJson:
      emit(ChatEvent::Type::kContent, whole);
      return;
    case State::kName:
    case State::kKey:
      word_ += whole;
      return;
    case State::kStringValue: {
      std::string escaped;
      append_python_escaped(escaped, whole);
      emit_arguments(escaped);
      return;
    }
    case State::kJsonValue:
    case State::kBody:
      emit_arguments(whole);
      return;
    case State::kAfterJson:
    case State::kCalls:
    case State::kArguments:
    case State::kFinished:
      return;
  }
}

void ChatParser::emit(ChatEvent::Type type, std::string_view more) {
  if (more.empty()) {
    return;
  }
  if (events_.empty() || events_.back().type != type) {
    ChatEvent event;
    event.type = type;
    event.call = type == ChatEvent::Type::kToolArguments ? calls_ - 1 : 0;
    events_.push_back(std::move(event));
  }
  events_.back().text += more;
}

std::vector<ChatEvent> ChatParser::take_events() {
  return std::exchange(events_, {});
}

std::vector<ChatEvent> ChatParser::push(int32_t id) {
  if (finished()) {
    return {};
  }
  if (id == eos_) {
    return finish();
  }
  if (!tokenizer_->is_control(id)) {
    return push_text(tokenizer_->token_bytes(id));
  }
  // A control token that will not be shown must not break a marker or a character around it.
  const bool prose = state_ == State::kReasoning || state_ == State::kContent ||
                     state_ == State::kJson || state_ == State::kAfterJson;
  const bool meaningful = id == think_end_ || (id == dsml_ && options_.parse_tools);
  if (!prose || meaningful || options_.show_control) {
    feed(kControlUnit + id);
  }
  return take_events();
}

std::vector<ChatEvent> ChatParser::push_text(std::string_view bytes) {
  for (const char byte : bytes) {
    feed(static_cast<uint8_t>(byte));
  }
  return take_events();
}

std::vector<ChatEvent> ChatParser::finish() {
  if (!finished()) {
    release(pending_.size());
    end_text();
    enter(State::kFinished);
  }
  return take_events();
}

void ChatOutput::apply(const ChatEvent& event) {
  switch (event.type) {
    case ChatEvent::Type::kReasoning:
      reasoning += event.text;
      return;
    case ChatEvent::Type::kContent:
      content += event.text;
      return;
    case ChatEvent::Type::kToolCallBegin:
      tool_calls.push_back({event.id, event.name, ""});
      return;
    case ChatEvent::Type::kToolArguments:
      tool_calls.back().arguments += event.text;
      return;
    case ChatEvent::Type::kToolCallEnd:
      return;
  }
}

ChatOutput parse_output(const Tokenizer& tokenizer,
                        std::span<const int32_t> ids,
                        ChatParserOptions options) {
  ChatParser parser(tokenizer, std::move(options));
  ChatOutput output;
  for (const int32_t id : ids) {
    for (const ChatEvent& event : parser.push(id)) {
      output.apply(event);
    }
  }
  for (const ChatEvent& event : parser.finish()) {
    output.apply(event);
  }
  return output;
}

}  // namespace cachalot::text
