// The chat protocol: the model's output to reasoning, answer and tool calls.
//
//   ChatParser parser(tokenizer, {.start = prompt.start});
//   for each sampled id: for (ChatEvent& event : parser.push(id)) { ... }
//   for (ChatEvent& event : parser.finish()) { ... }
//
// Control tokens are recognized by id: their spelling inside a value cannot end a block. The result
// does not depend on how the output was cut into tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/chat.h"
#include "text/tokenizer.h"
#include "text/utf8_stream.h"

namespace cachalot::text {

struct ChatEvent {
  enum class Type : uint8_t {
    kReasoning,      // text: more reasoning
    kContent,        // text: more of the answer
    kToolCallBegin,  // call, id, name: a call starts; its arguments are still empty
    kToolArguments,  // call, text: more of the arguments' JSON
    kToolCallEnd,    // call: the arguments are complete
  };

  Type type = Type::kContent;
  int32_t call = 0;  // 0, 1, ... in the order of the calls
  std::string id;
  std::string name;
  std::string text;  // whole characters, well-formed UTF-8
};

struct ChatParserOptions {
  OutputStart start = OutputStart::kContent;
  bool parse_tools = true;
  // Keep only JSON in the answer: a ```json fence is removed, prose around it is dropped, bare JSON
  // starts at the first { or [. The JSON itself is not checked.
  bool json_output = false;
  // Show control tokens that have no meaning where they stand, in their spelling; else they are
  // dropped. Inside arguments and names they are always shown. EOS never is.
  bool show_control = false;
  // The answer ends before the first of these; they do not apply to reasoning and arguments. Empty
  // ones are ignored.
  std::vector<std::string> stop;
  // Calls get the ids "<prefix>_0", "<prefix>_1", ...; give a prefix that is unique to the request.
  std::string call_id_prefix = "call";
};

// The streaming state machine. Rules beyond the strict parser's:
// - newlines at the start of reasoning and answer, before </think> and before a block of calls are
//   dropped; a second </think> is dropped;
// - a block of calls may follow reasoning that was not closed; what follows the block is dropped;
// - without </think> everything before EOS is reasoning and the answer is empty;
// - a call without a surrounding block, the V4 spelling of the tags, and a body that is a JSON
// object
//   instead of parameters are accepted; a parameter without its string attribute is dropped;
// - values with string="true" are JSON strings, others are passed on as they are, unchecked;
// - output that ends inside a call leaves its JSON open;
// - an incomplete character where a text ends is one U+FFFD.
class ChatParser {
 public:
  // The tokenizer must outlive the parser.
  ChatParser(const Tokenizer& tokenizer, ChatParserOptions options);

  // One sampled token. EOS ends the output; what comes after the end is ignored.
  std::vector<ChatEvent> push(int32_t id);
  // Bytes of ordinary text, cut anywhere.
  std::vector<ChatEvent> push_text(std::string_view bytes);
  // Ends the output: held-back text is delivered. Later calls return nothing.
  std::vector<ChatEvent> finish();

  bool finished() const { return state_ == State::kFinished; }
  bool in_reasoning() const { return state_ == State::kReasoning; }
  // Calls begun so far.
  int32_t call_count() const { return calls_; }
  // The index in options.stop of the sequence that ended the answer, or -1.
  int32_t matched_stop() const { return matched_stop_; }

 private:
  enum class State : uint8_t {
    kReasoning,
    kContent,
    kJson,
    kAfterJson,
    kCalls,  // between the tags of a block
    kName,
    kArguments,  // between the tags of a call
    kKey,
    kStringValue,
    kJsonValue,
    kBody,  // a JSON object in place of parameters
    kFinished,
  };

  // What a state looks for. Units are bytes, or control tokens as kControlUnit + id.
  struct Marker {
    enum class Kind : uint8_t {
      kThinkEnd,
      kExtraThinkEnd,
      kCallsOpen,
      kStop,
      kFence,
      kBareJson,
      kFenceEnd,
      kInvoke,
      kCallsClose,
      kNameEnd,
      kParameter,
      kTagClose,
      kKeyEndString,
      kKeyEndJson,
    };
    Kind kind;
    bool newlines;  // newlines before the marker belong to it
    std::vector<int32_t> units;
    std::vector<size_t> fallback;  // Knuth-Morris-Pratt failure table
    int32_t index = 0;             // of a stop sequence
    size_t matched = 0;
    size_t newline_run = 0;

    bool advance(int32_t unit);
    size_t held() const { return matched + newline_run; }
  };

  void enter(State state);
  void add_marker(Marker::Kind kind, std::vector<int32_t> units, bool newlines = false);
  std::vector<int32_t> units_of(std::string_view text, int32_t control = -1) const;
  void feed(int32_t unit);
  void on_marker(const Marker& marker);
  void release(size_t count);
  void unmatched(int32_t unit);
  void text_unit(int32_t unit);
  void text(std::string_view bytes);
  void end_text();
  void deliver(const std::string& whole);
  void emit(ChatEvent::Type type, std::string_view more);
  void emit_arguments(std::string_view json) { emit(ChatEvent::Type::kToolArguments, json); }
  std::vector<ChatEvent> take_events();

  const Tokenizer* tokenizer_;
  ChatParserOptions options_;
  int32_t think_end_ = -1;
  int32_t dsml_ = -1;
  int32_t eos_ = -1;

  State state_ = State::kContent;
  bool strip_newlines_ = false;  // the state's text has not begun
  bool first_parameter_ = true;
  std::vector<Marker> markers_;
  std::vector<int32_t> pending_;  // units that may belong to a marker
  internal::Utf8Stream utf8_;     // of the text that is being delivered
  std::string word_;              // the name or key being read
  int32_t calls_ = 0;
  int32_t matched_stop_ = -1;
  std::vector<ChatEvent> events_;
};

// An assistant message as parsed.
struct ChatOutput {
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> tool_calls;

  void apply(const ChatEvent& event);
};

// A whole output through a ChatParser.
ChatOutput parse_output(const Tokenizer& tokenizer,
                        std::span<const int32_t> ids,
                        ChatParserOptions options);

// The official parser of a whole output, given as text with the spellings of control tokens. It
// accepts exactly what the official one accepts.
// Errors: kInvalidArgument for missing </think> or EOS, text between or after calls, wrong tags,
// repeated parameters, control spellings in reasoning or answer.
Result<ChatOutput> parse_strict(std::string_view output, bool thinking);

}  // namespace cachalot::text
