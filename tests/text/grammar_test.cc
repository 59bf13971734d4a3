#include "text/grammar.h"

#include "tests/text/support.h"

namespace cachalot::text {
namespace {

class GrammarTest : public testing::Test {
 protected:
  void SetUp() override {
    static const auto compiler =
        GrammarCompiler::create(small_tokenizer(), small_tokenizer().vocab_size());
    if (!compiler.ok()) {
      GTEST_SKIP() << compiler.error().message();
    }
    compiler_ = *compiler;
  }

  static bool allowed(GrammarMatcher& matcher, int32_t id) {
    std::vector<uint32_t> bits;
    EXPECT_TRUE(matcher.fill(bits).ok());
    return (bits[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
  }

  // Whether the grammar takes `text` (with the spellings of control tokens), token by token, and
  // then the end. Every token must be allowed by the mask exactly when it is accepted.
  bool takes(GrammarMatcher& matcher, const std::string& text) {
    for (const int32_t id : value_of(small_tokenizer().encode_with_specials(text))) {
      const bool in_mask = allowed(matcher, id);
      if (in_mask) {
        EXPECT_TRUE(value_of(matcher.accept(id))) << text;
      }
      if (!in_mask) {
        return false;
      }
    }
    return allowed(matcher, *small_tokenizer().eos_id());
  }
  bool takes(const GrammarSpec& spec, const std::string& text) {
    GrammarMatcher matcher(value_of(compiler_->compile(spec)));
    return takes(matcher, text);
  }
  static GrammarSpec spec(GrammarSpec::Kind kind, std::string text) {
    GrammarSpec out;
    out.kind = kind;
    out.text = std::move(text);
    return out;
  }

  std::shared_ptr<GrammarCompiler> compiler_;
};

TEST_F(GrammarTest, JsonAndSchemas) {
  const GrammarSpec any = spec(GrammarSpec::Kind::kJson, "");
  EXPECT_TRUE(takes(any, R"({"a": [1, null, "x"]})"));
  EXPECT_FALSE(takes(any, "[1]"));
  EXPECT_FALSE(takes(any, R"({"a": )"));
  const GrammarSpec schema =
      spec(GrammarSpec::Kind::kSchema,
           R"({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
          "additionalProperties": false})");
  EXPECT_TRUE(takes(schema, R"({"n": 12})"));
  EXPECT_TRUE(takes(schema, "{\n  \"n\": 12\n}"));
  EXPECT_FALSE(takes(schema, R"({"n": "x"})"));
  EXPECT_FALSE(takes(schema, R"({"m": 1})"));
}

TEST_F(GrammarTest, RegexChoiceAndEbnf) {
  EXPECT_TRUE(takes(spec(GrammarSpec::Kind::kRegex, "[0-9]+ whales?"), "12 whales"));
  EXPECT_FALSE(takes(spec(GrammarSpec::Kind::kRegex, "[0-9]+ whales?"), "many whales"));
  GrammarSpec choice;
  choice.kind = GrammarSpec::Kind::kChoice;
  choice.choices = {"krill", "kraken", "\U0001F40B"};
  EXPECT_TRUE(takes(choice, "kraken"));
  EXPECT_TRUE(takes(choice, "\U0001F40B"));
  EXPECT_FALSE(takes(choice, "krakens"));
  EXPECT_TRUE(takes(spec(GrammarSpec::Kind::kEbnf, "root ::= \"a\" b*\nb ::= [bc]"), "abcb"));
}

TEST_F(GrammarTest, FinishesOnlyWhereNothingCanFollow) {
  GrammarMatcher open(value_of(compiler_->compile(spec(GrammarSpec::Kind::kRegex, "a+"))));
  EXPECT_TRUE(takes(open, "aa"));
  EXPECT_FALSE(open.finished().value());
  GrammarMatcher closed(value_of(compiler_->compile(spec(GrammarSpec::Kind::kRegex, "ab"))));
  EXPECT_FALSE(closed.finished().value());
  EXPECT_TRUE(takes(closed, "ab"));
  EXPECT_TRUE(closed.finished().value());
}

// Every way to split the text is a reading of it, and there is no bound to how many there are.
TEST_F(GrammarTest, WorkIsBounded) {
  const std::pair<GrammarSpec::Kind, std::string> cases[] = {
      {GrammarSpec::Kind::kEbnf, "root ::= \"a\" | root root | root root root"},
      {GrammarSpec::Kind::kRegex, "((a*)*b*)*((a|aa|aaa)*)*c"},
  };
  for (const auto& [kind, text] : cases) {
    GrammarMatcher matcher(value_of(compiler_->compile(spec(kind, text))));
    const int32_t a = value_of(small_tokenizer().encode("a"))[0];
    std::vector<uint32_t> bits;
    Status status;
    int64_t tokens = 0;
    for (; status.ok() && tokens < 3000; ++tokens) {
      status = matcher.fill(bits);
      const Result<bool> accepted = status.ok() ? matcher.accept(a) : Result<bool>(status);
      const Result<bool> finished = accepted.ok() ? matcher.finished() : accepted;
      status = finished.status();
    }
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("too ambiguous"), std::string::npos) << status.message();
  }
}

TEST_F(GrammarTest, ControlTokensAreNeverText) {
  GrammarMatcher matcher(value_of(compiler_->compile(spec(GrammarSpec::Kind::kRegex, ".*"))));
  for (const std::string_view token : kControlTokens) {
    if (token != kDsmlToken) {
      EXPECT_FALSE(allowed(matcher, value_of(small_tokenizer().control_id(token)))) << token;
    }
  }
}

TEST_F(GrammarTest, Calls) {
  const std::string d(kDsmlToken);
  GrammarSpec calls;
  calls.kind = GrammarSpec::Kind::kCalls;
  calls.tools = {{"f", R"({"type": "object", "properties": {"s": {"type": "string"},
                           "n": {"type": "integer"}}, "required": ["s"]})"},
                 {"g", ""}};
  const auto parameter =
      [&](const std::string& key, const std::string& kind, const std::string& value) {
        return "<" + d + " parameter name=\"" + key + "\" string=\"" + kind + "\">" + value + "</" +
               d + " parameter>\n";
      };
  const auto invoke = [&](const std::string& name, const std::string& parameters) {
    return "<" + d + " invoke name=\"" + name + "\">\n" + parameters + "</" + d + " invoke>\n";
  };
  const std::string open = "\n\n<" + d + " calls>\n", close = "</" + d + " calls>";
  const std::string f =
      invoke("f", parameter("s", "true", "a </b> \n\U0001F40B") + parameter("n", "false", "3"));
  EXPECT_TRUE(takes(calls, open + f + close));
  EXPECT_TRUE(takes(calls, open + f + invoke("g", "") + close));
  EXPECT_FALSE(takes(calls, f + close));
  EXPECT_FALSE(takes(calls, open + close));
  EXPECT_FALSE(takes(calls, open + invoke("h", "") + close));
  EXPECT_FALSE(takes(calls, open + invoke("f", "") + close));
  EXPECT_FALSE(takes(calls, open + invoke("f", parameter("s", "false", "3")) + close));
  calls.open = true;
  EXPECT_TRUE(takes(calls, f + close));
  calls.parallel = false;
  EXPECT_FALSE(takes(calls, f + f + close));

  // The marker counts as its token alone: its spelling by ordinary tokens is barred.
  GrammarMatcher matcher(value_of(compiler_->compile(calls)));
  EXPECT_FALSE(takes(matcher, "<"));  // takes it, but is not complete
  const Ids spelled = value_of(small_tokenizer().encode(d));
  EXPECT_TRUE(allowed(matcher, value_of(small_tokenizer().control_id(kDsmlToken))));
  EXPECT_FALSE(allowed(matcher, spelled[0]));
}

TEST_F(GrammarTest, TextOrCalls) {
  const std::string d(kDsmlToken);
  GrammarSpec either = spec(GrammarSpec::Kind::kSchema, R"({"const": 5})");
  either.tools = {{"g", ""}};
  EXPECT_TRUE(takes(either, "5"));
  EXPECT_TRUE(takes(either,
                    "\n\n<" + d + " calls>\n<" + d + " invoke name=\"g\">\n</" + d +
                        " invoke>\n</" + d + " calls>"));
  EXPECT_FALSE(takes(either, "6"));
}

TEST_F(GrammarTest, WrongGrammarsAreErrors) {
  const std::pair<GrammarSpec::Kind, std::string> cases[] = {
      {GrammarSpec::Kind::kRegex, "("},
      {GrammarSpec::Kind::kRegex, std::string(100000, '(')},
      {GrammarSpec::Kind::kRegex, std::string(size_t{300} << 10, 'x')},
      {GrammarSpec::Kind::kEbnf, "leaf ::= \"a\""},
      {GrammarSpec::Kind::kEbnf, "root ::= missing"},
      {GrammarSpec::Kind::kEbnf, "root ::= \"a"},
      {GrammarSpec::Kind::kSchema, "{"},
      {GrammarSpec::Kind::kSchema, "3"},
      {GrammarSpec::Kind::kSchema, R"({"type": "whale"})"},
      {GrammarSpec::Kind::kSchema, R"({"$ref": "#/nowhere"})"},
      {GrammarSpec::Kind::kSchema, std::string(1000, '[') + std::string(1000, ']')},
  };
  for (const auto& [kind, text] : cases) {
    const auto compiled = compiler_->compile(spec(kind, text));
    ASSERT_FALSE(compiled.ok()) << text.substr(0, 60);
    // Without the place in the core's source.
    const std::string& message = compiled.error().message();
    EXPECT_EQ(message.find(".cc:"), std::string::npos) << message;
    EXPECT_FALSE(message.empty() || message.ends_with('\n')) << message;
  }
}

}  // namespace
}  // namespace cachalot::text
