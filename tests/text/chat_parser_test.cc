#include "text/chat_parser.h"

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/text/support.h"
#include "text/detokenizer.h"

namespace cachalot::text {
namespace {

using nlohmann::json;
using Type = ChatEvent::Type;

// ---- outputs as tests write them ----------------------------------------------------------------

// Test outputs are text in which {D} is the DSML token, {T} and {/T} are the tokens around
// reasoning, {E} is EOS and {U} is the user token.
const std::map<std::string, std::string_view> kMarks = {{"{D}", kDsmlToken},
                                                        {"{T}", kThinkToken},
                                                        {"{/T}", kThinkEndToken},
                                                        {"{E}", kEosToken},
                                                        {"{U}", kUserToken}};

// The smallest parts: bytes 0..255, or control tokens as 256 + id.
Ids atoms_of(const std::string& script) {
  Ids atoms;
  for (size_t i = 0; i < script.size();) {
    bool control = false;
    for (const auto& [mark, token] : kMarks) {
      if (script.compare(i, mark.size(), mark) == 0) {
        atoms.push_back(256 + value_of(small_tokenizer().control_id(token)));
        i += mark.size();
        control = true;
        break;
      }
    }
    if (!control) {
      atoms.push_back(static_cast<uint8_t>(script[i++]));
    }
  }
  return atoms;
}

std::string text_of(const std::string& script) {
  std::string text = script;
  for (const auto& [mark, token] : kMarks) {
    text = replace_all(text, mark, token);
  }
  return text;
}

struct Parsed {
  ChatOutput output;
  std::vector<ChatEvent> events;
  bool operator==(const Parsed& o) const {
    bool same = output.reasoning == o.output.reasoning && output.content == o.output.content &&
                output.tool_calls.size() == o.output.tool_calls.size();
    for (size_t i = 0; same && i < output.tool_calls.size(); ++i) {
      const ToolCall& a = output.tool_calls[i];
      const ToolCall& b = o.output.tool_calls[i];
      same = a.id == b.id && a.name == b.name && a.arguments == b.arguments;
    }
    return same;
  }
};

class Feeder {
 public:
  explicit Feeder(const ChatParserOptions& options) : parser_(small_tokenizer(), options) {}
  void text(std::string_view bytes) { take(parser_.push_text(bytes)); }
  void id(int32_t id) { take(parser_.push(id)); }
  Parsed finish() {
    take(parser_.finish());
    EXPECT_TRUE(parser_.finished());
    EXPECT_TRUE(parser_.push(3 + 'x').empty());
    EXPECT_TRUE(parser_.finish().empty());
    return std::move(parsed_);
  }
  ChatParser& parser() { return parser_; }

 private:
  void take(std::vector<ChatEvent> events) {
    for (ChatEvent& event : events) {
      parsed_.output.apply(event);
      parsed_.events.push_back(std::move(event));
    }
  }
  ChatParser parser_;
  Parsed parsed_;
};

// Text between control tokens in runs whose ends are the positions where `cut` is true.
Parsed run(const Ids& atoms,
           const ChatParserOptions& options,
           const std::function<bool(size_t)>& cut) {
  Feeder feeder(options);
  std::string text;
  for (size_t i = 0; i < atoms.size(); ++i) {
    if (atoms[i] < 256) {
      text.push_back(static_cast<char>(atoms[i]));
      if (cut(i)) {
        feeder.text(text);
        text.clear();
      }
    } else {
      feeder.text(text);
      text.clear();
      feeder.id(atoms[i] - 256);
    }
  }
  feeder.text(text);
  return feeder.finish();
}

// Parses a script in one go and checks that every cut into two, every cut into single bytes, random
// cuts and the tokenizer's own tokens give the same result.
ChatOutput parse(const std::string& script, const ChatParserOptions& options = {}) {
  const Ids atoms = atoms_of(script);
  const Parsed whole = run(atoms, options, [](size_t) { return false; });
  EXPECT_EQ(run(atoms, options, [](size_t) { return true; }), whole) << script;
  for (size_t split = 0; split < atoms.size(); ++split) {
    EXPECT_EQ(run(atoms, options, [&](size_t i) { return i == split; }), whole) << script;
  }
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(run(atoms, options, [&](size_t) { return random() % 4 == 0; }), whole) << script;
  }
  Feeder by_token(options);
  std::string text;
  const auto flush = [&] {
    for (const int32_t id : value_of(small_tokenizer().encode(text))) {
      by_token.id(id);
    }
    text.clear();
  };
  for (const int32_t atom : atoms) {
    if (atom < 256) {
      text.push_back(static_cast<char>(atom));
    } else {
      flush();
      by_token.id(atom - 256);
    }
  }
  flush();
  EXPECT_EQ(by_token.finish(), whole) << script;
  return whole.output;
}

std::string parameter(const std::string& key, const char* is_string, const std::string& value) {
  return "<{D} parameter name=\"" + key + "\" string=\"" + is_string + "\">" + value +
         "</{D} parameter>\n";
}
std::string invoke(const std::string& name, const std::string& parameters) {
  return "<{D} invoke name=\"" + name + "\">\n" + (parameters.empty() ? "\n" : parameters) +
         "</{D} invoke>\n";
}
std::string block(const std::string& invokes) {
  return "\n\n<{D} calls>\n" + invokes + "</{D} calls>{E}";
}

ChatParserOptions thinking() {
  return {.start = OutputStart::kReasoning};
}

// The streaming parser and the official one agree on well-formed output.
void expect_strict_agrees(const std::string& script, bool with_reasoning) {
  const ChatOutput strict = value_of(parse_strict(text_of(script), with_reasoning));
  const ChatOutput streamed = parse(script, with_reasoning ? thinking() : ChatParserOptions());
  EXPECT_EQ(streamed.reasoning, strict.reasoning);
  EXPECT_EQ(streamed.content, strict.content);
  ASSERT_EQ(streamed.tool_calls.size(), strict.tool_calls.size());
  for (size_t i = 0; i < strict.tool_calls.size(); ++i) {
    EXPECT_EQ(streamed.tool_calls[i].name, strict.tool_calls[i].name);
    EXPECT_EQ(streamed.tool_calls[i].arguments, strict.tool_calls[i].arguments);
  }
}

// ---- reasoning and answer -----------------------------------------------------------------------

TEST(ChatParser, ReasoningAndAnswer) {
  const ChatOutput out = parse("because\n of this{/T}The answer.{E}", thinking());
  EXPECT_EQ(out.reasoning, "because\n of this");
  EXPECT_EQ(out.content, "The answer.");
  EXPECT_EQ(parse("just text{E}").content, "just text");
}

TEST(ChatParser, NewlinesAroundTheParts) {
  const ChatOutput out = parse("\n\nr\n\nr\n\n\n{/T}\n\nc\n\n\nc\n{E}", thinking());
  EXPECT_EQ(out.reasoning, "r\n\nr");
  EXPECT_EQ(out.content, "c\n\n\nc\n");
  EXPECT_EQ(parse("\n\n{/T}\n\n{E}", thinking()).reasoning, "");
  EXPECT_EQ(parse("\nmore{E}", {.start = OutputStart::kContinuation}).content, "\nmore");
}

TEST(ChatParser, AnUnclosedReasoningStaysReasoning) {
  const ChatOutput out = parse("only thoughts\n{E}", thinking());
  EXPECT_EQ(out.reasoning, "only thoughts\n");
  EXPECT_EQ(out.content, "");
  EXPECT_TRUE(out.tool_calls.empty());
}

TEST(ChatParser, NothingFollowsEos) {
  EXPECT_EQ(parse("a{E}b{/T}c").content, "a");
  EXPECT_EQ(parse("{E}").content, "");
}

TEST(ChatParser, ASecondThinkEndIsDropped) {
  EXPECT_EQ(parse("r{/T}a{/T}\nb{E}", thinking()).content, "a\nb");
}

TEST(ChatParser, SpellingsAreNotTokens) {
  const std::string spelled = "</think>\n\n<\uFF5CDSML\uFF5C calls>\n" + std::string(kEosToken);
  const ChatOutput out = parse("r" + spelled + "{/T}c" + spelled + "{E}", thinking());
  EXPECT_EQ(out.reasoning, "r" + spelled);
  EXPECT_EQ(out.content, "c" + spelled);
}

TEST(ChatParser, OtherControlTokensAreDroppedOrShown) {
  EXPECT_EQ(parse("a{U}b{T}{E}").content, "ab");
  EXPECT_EQ(parse("a{U}b{E}", {.show_control = true}).content, "a" + std::string(kUserToken) + "b");
  // They do not break what stands around them.
  EXPECT_EQ(parse("r\n{U}\n{/T}c{E}", thinking()).reasoning, "r");
  EXPECT_EQ(parse("\xC3{U}\xA9{E}").content, "\u00E9");
}

TEST(ChatParser, WholeCharactersOnly) {
  const std::string text = "x\U0001F600\u4F60\u00E9";
  Feeder feeder({});
  for (const char b : text) {
    feeder.text({&b, 1});
  }
  const Parsed parsed = feeder.finish();
  EXPECT_EQ(parsed.output.content, text);
  std::vector<std::string> pieces;
  for (const ChatEvent& event : parsed.events) {
    pieces.push_back(event.text);
  }
  EXPECT_EQ(pieces, (std::vector<std::string>{"x", "\U0001F600", "\u4F60", "\u00E9"}));
  // Cut as 2+2, 1+3 and 1+1+1+1 bytes, and an incomplete character at each kind of end.
  parse("r\U0001F600{/T}c\U0001F600{E}", thinking());
  EXPECT_EQ(parse("a\xF0\x9F\x98{E}").content, "a\uFFFD");
  const ChatOutput out = parse(
      "r\xF0\x9F{/T}c\xE4\xBD" + block(invoke("f", parameter("k", "true", "v\xC3"))), thinking());
  EXPECT_EQ(out.reasoning, "r\uFFFD");
  EXPECT_EQ(out.content, "c\uFFFD");
  EXPECT_EQ(out.tool_calls[0].arguments, "{\"k\": \"v\uFFFD\"}");
}

// ---- tool calls ---------------------------------------------------------------------------------

TEST(ChatParser, ACall) {
  const std::string script =
      "r{/T}Looking." +
      block(
          invoke("get", parameter("city", "true", "K\u00F6ln") + parameter("days", "false", "3")));
  const ChatOutput out = parse(script, thinking());
  EXPECT_EQ(out.content, "Looking.");
  ASSERT_EQ(out.tool_calls.size(), 1U);
  EXPECT_EQ(out.tool_calls[0].id, "call_0");
  EXPECT_EQ(out.tool_calls[0].name, "get");
  EXPECT_EQ(out.tool_calls[0].arguments, "{\"city\": \"K\u00F6ln\", \"days\": 3}");
  expect_strict_agrees(script, true);
}

TEST(ChatParser, EventsOfACall) {
  Feeder feeder({.call_id_prefix = "call_7f"});
  for (const int32_t atom : atoms_of(block(invoke("f", parameter("k", "true", "vv"))))) {
    if (atom < 256) {
      const char byte = static_cast<char>(atom);
      feeder.text({&byte, 1});
    } else {
      feeder.id(atom - 256);
    }
  }
  const Parsed parsed = feeder.finish();
  ASSERT_EQ(parsed.events.front().type, Type::kToolCallBegin);
  EXPECT_EQ(parsed.events.front().id, "call_7f_0");
  EXPECT_EQ(parsed.events.front().name, "f");
  EXPECT_EQ(parsed.events.front().text, "");
  EXPECT_EQ(parsed.events.back().type, Type::kToolCallEnd);
  for (size_t i = 1; i + 1 < parsed.events.size(); ++i) {
    EXPECT_EQ(parsed.events[i].type, Type::kToolArguments);
    EXPECT_EQ(parsed.events[i].call, 0);
  }
}

// The closing tag cut anywhere, behind a value that looks like part of one.
TEST(ChatParser, ValuesThatResembleTags) {
  for (const std::string value : {"ls 2>&1",
                                  "a <",
                                  "a </",
                                  "a < / b",
                                  "<<</<",
                                  "\n",
                                  "\n\n<",
                                  "{}",
                                  "parameter name=\"x\"",
                                  "\" string=\"true\">",
                                  ">"}) {
    const std::string script = block(invoke("sh", parameter("cmd", "true", value)));
    const ChatOutput out = parse(script);
    ASSERT_EQ(out.tool_calls.size(), 1U);
    EXPECT_EQ(json::parse(out.tool_calls[0].arguments)["cmd"], value);
    expect_strict_agrees(script, false);
  }
}

TEST(ChatParser, ASpelledTagInAValueDoesNotCloseIt) {
  const std::string value = "</\uFF5CDSML\uFF5C parameter>\n</\uFF5CDSML\uFF5C calls>";
  const ChatOutput out = parse(block(invoke("write", parameter("text", "true", value))));
  ASSERT_EQ(out.tool_calls.size(), 1U);
  EXPECT_EQ(json::parse(out.tool_calls[0].arguments)["text"], value);
  // Control tokens inside a value are kept in their spelling.
  const ChatOutput other =
      parse(block(invoke("write", parameter("text", "true", "a{/T}b<{D}c{U}{T}"))));
  EXPECT_EQ(json::parse(other.tool_calls[0].arguments)["text"], text_of("a{/T}b<{D}c{U}{T}"));
}

TEST(ChatParser, A41_NewlinesBeforeABlockBelongToIt) {
  for (const char* before : {"", "\n", "\n\n", "\n\n\n\n"}) {
    const ChatOutput out =
        parse(std::string("text") + before + "<{D} calls>\n" + invoke("f", "") + "</{D} calls>{E}");
    EXPECT_EQ(out.content, "text");
    EXPECT_EQ(out.tool_calls.size(), 1U);
  }
  EXPECT_EQ(parse("a\n\n<b\n<\n\n<{D} calls>\n{E}").content, "a\n\n<b\n<");
  EXPECT_EQ(parse("a\n\n<").content, "a\n\n<");
}

TEST(ChatParser, A41_ABlockEndsReasoning) {
  const ChatOutput out =
      parse("thinking\n\n<{D} calls>\n" + invoke("f", "") + "</{D} calls>{E}", thinking());
  EXPECT_EQ(out.reasoning, "thinking");
  EXPECT_EQ(out.content, "");
  EXPECT_EQ(out.tool_calls.size(), 1U);
}

TEST(ChatParser, A41_ParallelCalls) {
  for (int count = 1; count <= 3; ++count) {
    std::string invokes;
    for (int i = 0; i < count; ++i) {
      invokes +=
          invoke("f" + std::to_string(i), i == 1 ? "" : parameter("i", "false", std::to_string(i)));
    }
    const ChatOutput out = parse("c" + block(invokes));
    ASSERT_EQ(out.tool_calls.size(), static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      const ToolCall& call = out.tool_calls[static_cast<size_t>(i)];
      EXPECT_EQ(call.id, "call_" + std::to_string(i));
      EXPECT_EQ(call.name, "f" + std::to_string(i));
      EXPECT_EQ(call.arguments, i == 1 ? "{}" : "{\"i\": " + std::to_string(i) + "}");
    }
    expect_strict_agrees("c" + block(invokes), false);
  }
}

TEST(ChatParser, A41_CallsWithoutABlock) {
  const ChatOutput out =
      parse("c\n\n" + invoke("f", parameter("a", "false", "1")) + invoke("g", "") + "{E}");
  EXPECT_EQ(out.content, "c");
  ASSERT_EQ(out.tool_calls.size(), 2U);
  EXPECT_EQ(out.tool_calls[0].arguments, "{\"a\": 1}");
  EXPECT_EQ(out.tool_calls[1].arguments, "{}");
}

TEST(ChatParser, A41_AJsonObjectInPlaceOfParameters) {
  const ChatOutput out =
      parse(block(invoke("f", "{\"a\": {\"b\": \"</\"}}\n") + invoke("g", "  {}\n\n")));
  ASSERT_EQ(out.tool_calls.size(), 2U);
  EXPECT_EQ(out.tool_calls[0].arguments, "{\"a\": {\"b\": \"</\"}}");
  EXPECT_EQ(out.tool_calls[1].arguments, "{}");
}

TEST(ChatParser, A41_TextBehindTheBlockIsDropped) {
  const ChatOutput out =
      parse("c\n\n<{D} calls>\n" + invoke("f", "") + "</{D} calls>\nmore {/T} <{D} calls>{E}");
  EXPECT_EQ(out.content, "c");
  EXPECT_EQ(out.tool_calls.size(), 1U);
}

TEST(ChatParser, OlderTags) {
  const ChatOutput out = parse(
      "\n\n<{D}tool_calls>\n<{D}invoke name=\"f\">\n"
      "<{D}parameter name=\"a\" string=\"true\">x</{D}parameter>\n</{D}invoke>\n"
      "</{D}tool_calls>{E}");
  ASSERT_EQ(out.tool_calls.size(), 1U);
  EXPECT_EQ(out.tool_calls[0].arguments, "{\"a\": \"x\"}");
}

// Only the string attribute decides about types.
TEST(ChatParser, A41_NoTypeCoercion) {
  for (const char* value : {"true", "3", "3.0", "null", "[1]", "{\"a\":1}"}) {
    const std::string raw = block(invoke("f", parameter("v", "false", value)));
    EXPECT_EQ(parse(raw).tool_calls[0].arguments, std::string("{\"v\": ") + value + "}");
    expect_strict_agrees(raw, false);
    const std::string quoted = block(invoke("f", parameter("v", "true", value)));
    EXPECT_EQ(json::parse(parse(quoted).tool_calls[0].arguments)["v"], value);
    expect_strict_agrees(quoted, false);
  }
}

TEST(ChatParser, KeysAndValuesOfEveryKind) {
  const std::string script = block(invoke(
      "submit",
      parameter("shipping address", "true", "Paris\n\u65E5\u672C \"q\" \\ \t\x01 \U0001F600") +
          parameter(" string= mode ", "false", "{\"enabled\":true}") +
          parameter("count", "false", "2") + parameter("", "true", "empty key") +
          parameter("quo\"te\n", "true", "")));
  const ChatOutput out = parse(script);
  ASSERT_EQ(out.tool_calls.size(), 1U);
  const json arguments = json::parse(out.tool_calls[0].arguments);
  EXPECT_EQ(arguments,
            json({{"shipping address", "Paris\n\u65E5\u672C \"q\" \\ \t\x01 \U0001F600"},
                  {" string= mode ", {{"enabled", true}}},
                  {"count", 2},
                  {"", "empty key"},
                  {"quo\"te\n", ""}}));
  expect_strict_agrees(script, false);
}

TEST(ChatParser, ArgumentsArriveAsTheyAreWritten) {
  std::string value;
  for (int i = 0; i < 400; ++i) {
    value += "word" + std::to_string(i) + " ";
  }
  Feeder feeder({});
  int32_t tokens = 0;
  for (const int32_t atom : atoms_of(block(invoke("f", parameter("k", "true", value))))) {
    if (atom >= 256) {
      feeder.id(atom - 256);
      continue;
    }
    ++tokens;
    feeder.id(atom + 3);
  }
  const Parsed parsed = feeder.finish();
  int32_t begins = 0;
  int32_t deltas = 0;
  for (const ChatEvent& event : parsed.events) {
    begins += event.type == Type::kToolCallBegin ? 1 : 0;
    deltas += event.type == Type::kToolArguments ? 1 : 0;
  }
  EXPECT_EQ(begins, 1);
  EXPECT_GT(deltas, static_cast<int32_t>(value.size()) / 2);
  EXPECT_EQ(json::parse(parsed.output.tool_calls[0].arguments)["k"], value);
}

TEST(ChatParser, AParameterWithoutItsAttributeIsDropped) {
  const ChatOutput out = parse(block(invoke(
      "f", "<{D} parameter name=\"bad\">x</{D} parameter>\n" + parameter("k", "false", "1"))));
  ASSERT_EQ(out.tool_calls.size(), 1U);
  EXPECT_EQ(out.tool_calls[0].arguments, "{\"k\": 1}");
}

TEST(ChatParser, OutputThatEndsInsideACall) {
  const std::string whole = block(invoke("f", parameter("k", "true", "some value")));
  const std::string arguments = "{\"k\": \"some value\"}";
  for (size_t length = 0; length < whole.size(); ++length) {
    if (whole[length == 0 ? 0 : length - 1] == '{' || whole.substr(0, length).ends_with("{D") ||
        whole.substr(0, length).ends_with("{E")) {
      continue;  // inside of a mark
    }
    const ChatOutput out = parse(whole.substr(0, length));
    ASSERT_LE(out.tool_calls.size(), 1U);
    if (!out.tool_calls.empty()) {
      // A held-back start of a tag is delivered as part of the value.
      const std::string got = replace_all(out.tool_calls[0].arguments, "</", "");
      const std::string clean = replace_all(got, "<", "");
      EXPECT_EQ(clean, arguments.substr(0, clean.size()));
    }
  }
}

TEST(ChatParser, AForcedCall) {
  const ChatOutput out = parse(
      "<{D} invoke name=\"f\">\n" + parameter("a", "false", "1") + "</{D} invoke>\n</{D} calls>{E}",
      {.start = OutputStart::kToolCalls});
  EXPECT_EQ(out.content, "");
  ASSERT_EQ(out.tool_calls.size(), 1U);
  EXPECT_EQ(out.tool_calls[0].arguments, "{\"a\": 1}");
}

TEST(ChatParser, WithoutToolsTheMarkupIsText) {
  const ChatOutput out =
      parse("c" + block(invoke("f", "")), {.parse_tools = false, .show_control = true});
  EXPECT_TRUE(out.tool_calls.empty());
  EXPECT_EQ(out.content, replace_all(text_of("c" + block(invoke("f", ""))), kEosToken, ""));
}

// ---- stop sequences and JSON --------------------------------------------------------------------

TEST(ChatParser, StopSequencesEndTheAnswer) {
  const ChatParserOptions options = {.start = OutputStart::kReasoning,
                                     .stop = {"END", "", "\n\n#"}};
  EXPECT_EQ(parse("END {/T}ab ENEND cd{E}", options).reasoning, "END ");
  EXPECT_EQ(parse("END {/T}ab ENEND cd{E}", options).content, "ab EN");
  EXPECT_EQ(parse("{/T}a\n\n\n#b{E}", options).content, "a\n");
  EXPECT_EQ(parse("{/T}a EN{E}", options).content, "a EN");
  const ChatOutput call =
      parse("{/T}x" + block(invoke("END", parameter("END", "true", "END"))), options);
  EXPECT_EQ(call.tool_calls[0].arguments, "{\"END\": \"END\"}");

  ChatParser parser(small_tokenizer(), {.stop = {"x", "yz"}});
  EXPECT_EQ(parser.matched_stop(), -1);
  EXPECT_EQ(parser.push_text("ay").size(), 1U);
  parser.push_text("zb");
  EXPECT_EQ(parser.matched_stop(), 1);
  EXPECT_TRUE(parser.finished());
}

TEST(ChatParser, JsonOutput) {
  const ChatParserOptions options = {.json_output = true};
  EXPECT_EQ(parse("{\"a\": 1}{E}", options).content, "{\"a\": 1}");
  EXPECT_EQ(parse("Here you are:\n```json\n{\"a\": [1]}\n```\nBye{E}", options).content,
            "{\"a\": [1]}");
  EXPECT_EQ(parse("```\n[1]\n```{E}", options).content, "[1]");
  EXPECT_EQ(parse("Sure: [1, {}]{E}", options).content, "[1, {}]");
  EXPECT_EQ(parse("no json here{E}", options).content, "");
  EXPECT_EQ(parse("```json\n{}\n```" + block(invoke("f", "")), options).tool_calls.size(), 1U);
  EXPECT_EQ(parse("{}" + block(invoke("f", "")), options).tool_calls.size(), 1U);
}

// ---- round trips --------------------------------------------------------------------------------

TEST(ChatParser, RenderedCallsParseBack) {
  const json arguments = {{"path", "a\n\"b\" \\ <x> </y>"},
                          {"n", 3},
                          {"list", {1, nullptr, "\u00E9"}},
                          {"empty", ""},
                          {"o", json::object()}};
  ChatRequest request;
  request.messages.resize(2);
  request.messages[1].role = Role::kAssistant;
  request.messages[1].reasoning = "why";
  request.messages[1].content = {ContentBlock::of_text("Calling.")};
  request.messages[1].tool_calls = {{"a", "f", arguments.dump()}, {"b", "g", "{}"}};
  const RenderedChat prompt = value_of(render_chat(request));
  std::vector<const Tokenizer*> tokenizers = {&small_tokenizer()};
  if (real_tokenizer() != nullptr) {
    tokenizers.push_back(real_tokenizer());
  }
  for (const Tokenizer* t : tokenizers) {
    const Ids ids = value_of(encode_prompt(*t, prompt));
    const int32_t think = value_of(t->control_id(kThinkToken));
    const auto begin = std::find(ids.begin(), ids.end(), think) + 1;
    const Ids turn(begin, ids.end());
    const ChatOutput out = parse_output(*t, turn, {.start = OutputStart::kReasoning});
    EXPECT_EQ(out.reasoning, "why");
    EXPECT_EQ(out.content, "Calling.");
    ASSERT_EQ(out.tool_calls.size(), 2U);
    EXPECT_EQ(json::parse(out.tool_calls[0].arguments), arguments);
    EXPECT_EQ(out.tool_calls[1].arguments, "{}");
    const ChatOutput strict =
        value_of(parse_strict(decode(*t, turn, {.skip_control = false}), true));
    EXPECT_EQ(strict.tool_calls[0].arguments, out.tool_calls[0].arguments);
    EXPECT_EQ(strict.reasoning, "why");
  }
}

// Any sequence of markup pieces is parsed without harm, and cutting does not matter.
TEST(ChatParser, RandomOutputs) {
  const std::vector<std::string> pieces = {"text",
                                           "\n",
                                           "\n\n",
                                           "<",
                                           "</",
                                           "{D}",
                                           " calls>\n",
                                           " calls>",
                                           "tool_calls>",
                                           " invoke name=\"f\">\n",
                                           " invoke>\n",
                                           " parameter name=\"k\" string=\"true\">",
                                           " parameter name=\"k\" string=\"false\">",
                                           " parameter>\n",
                                           "{/T}",
                                           "{T}",
                                           "{U}",
                                           "\"",
                                           "{\"a\"}",
                                           "```json\n",
                                           "\n```",
                                           "\xE4\xBD",
                                           "\xA0",
                                           "STOP",
                                           "ST",
                                           " string=\"true\">",
                                           "1"};
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::string script;
    const size_t count = random() % 16;
    for (size_t i = 0; i < count; ++i) {
      script += pieces[random() % pieces.size()];
    }
    ChatParserOptions options;
    options.start = static_cast<OutputStart>(random() % 4);
    options.json_output = random() % 4 == 0;
    options.show_control = random() % 2 == 0;
    if (random() % 2 == 0) {
      options.stop = {"STOP"};
    }
    parse(script, options);
  }
}

// ---- the official parser ------------------------------------------------------------------------

TEST(ParseStrict, Accepts) {
  const ChatOutput out = value_of(parse_strict(text_of("r{/T}c{E}"), true));
  EXPECT_EQ(out.reasoning, "r");
  EXPECT_EQ(out.content, "c");
  EXPECT_EQ(value_of(parse_strict(text_of("c{E}"), false)).content, "c");
  const std::string call = block(invoke("f", ""));
  EXPECT_EQ(value_of(parse_strict(text_of(call), false)).tool_calls[0].arguments, "{}");
  // EOS may be missing behind a complete block only.
  const std::string without_eos = call.substr(0, call.size() - 3);
  EXPECT_EQ(value_of(parse_strict(text_of(without_eos), false)).tool_calls.size(), 1U);
}

TEST(ParseStrict, Rejects) {
  const std::string f = invoke("f", parameter("k", "true", "v"));
  const std::pair<std::string, bool> cases[] = {
      {"r{E}", true},          // no end of the reasoning
      {"r" + block(f), true},  // a block inside the reasoning
      {"c", false},            // no EOS
      {"c{E}c", false},        // text behind EOS
      {"a{/T}b{E}", false},    // leftover control strings
      {"a{D}b{E}", false},
      {"r{T}{/T}c{E}", true},
      {"\n\n<{D} calls>\n" + f + "</{D} calls>x{E}", false},  // text behind the block
      {"\n\n<{D} calls>" + f + "</{D} calls>{E}", false},     // no newline behind a tag
      {"\n\n<{D} calls>\nx" + f + "</{D} calls>{E}", false},  // text between tags
      {block(invoke("f", parameter("k", "maybe", "v"))), false},
      {block(invoke("f", parameter("k", "true", "v") + parameter("k", "true", "w"))), false},
      {block("<{D} invoke name=f>\n\n</{D} invoke>\n"), false},
      {block(invoke("f", "{\"a\": 1}\n")), false},  // a JSON body
      {block(f).substr(0, block(f).find("</{D} parameter")), false},
  };
  for (const auto& [script, with_reasoning] : cases) {
    const Result<ChatOutput> parsed = parse_strict(text_of(script), with_reasoning);
    ASSERT_FALSE(parsed.ok()) << script;
    EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace cachalot::text
