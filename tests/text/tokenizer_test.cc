#include "text/tokenizer.h"

#include <nlohmann/json.hpp>

#include "tests/text/support.h"
#include "text/detokenizer.h"

namespace cachalot::text {
namespace {

using nlohmann::json;

// ---- the released vocabulary --------------------------------------------------------------------

struct Golden {
  std::string text;
  Ids ids;
};

// "Reasoning Effort: N ..." of the prompt, with its two newlines.
std::string effort_line(int effort) {
  return "Reasoning Effort: " + std::to_string(effort) +
         " (range 1-100, the higher the value, the more thorough the reasoning)\n\n";
}
Ids effort_ids(int32_t number) {
  return {77666, 288, 9504, 482, 28,   223, number, 343, 16801, 223, 19,    15, 1457,
          14,    270, 4077, 270, 1990, 14,  270,    850, 15146, 270, 22805, 868};
}

const Golden kGoldens[] = {
    {"Hello, world! 12345 \u4F60\u597D\uFF0C\u4E16\u754C\u3002\n\n  foo_bar(x)=1;",
     {19923,
      14,
      2058,
      3,
      223,
      6895,
      1883,
      223,
      30594,
      303,
      3427,
      478,
      223,
      52735,
      100869,
      4042,
      6912,
      19,
      29}},
    {"<tool_result>42</tool_result>", {30, 72461, 46148, 32, 3180, 1718, 72461, 46148, 32}},
    {"caf\u00E9 na\u00EFve Stra\u00DFe \u0130stanbul",
     {69, 2797, 619, 112752, 23900, 30234, 50434, 54024}},
    {"  \t\n x", {262, 7028, 1527}},
    {"\r\n\r\n a", {204, 201, 204, 201, 260}},
    {"don't I'll 3.14159 10000000",
     {20385, 1664, 342, 5922, 223, 21, 16, 9926, 3318, 223, 1457, 1320, 504}},
    {"\u65E5\u672C\u8A9E\u30C6\u30AD\u30B9\u30C8 \u30AB\u30BF\u30AB\u30CA",
     {88768, 17383, 20367, 24552, 223, 15961, 11767, 15961, 27071}},
    // Pieces around DSML.
    {"\n\n<", {271, 30}},
    {" calls>\n", {10699, 1018}},
    {" calls>", {10699, 32}},
    {"</", {1718}},
    {" invoke name=\"f\">\n<", {34756, 2329, 1281, 72, 3816, 30}},
    {" parameter name=\"k\" string=\"false\">1</",
     {10767, 2329, 1281, 77, 4, 3418, 1281, 19836, 3320, 19, 1718}},
    {" parameter>\n</", {10767, 1018, 1718}},
    {" invoke>\n</", {34756, 1018, 1718}},
    // Control strings in users' text are ordinary text.
    {"<\uFF5CUser\uFF5C>", {30, 28217, 6756, 28217, 32}},
};

TEST(RealTokenizer, GoldenEncodings) {
  SKIP_WITHOUT_REAL_TOKENIZER();
  for (const Golden& golden : kGoldens) {
    EXPECT_EQ(value_of(real_tokenizer()->encode(golden.text)), golden.ids) << golden.text;
    EXPECT_EQ(decode(*real_tokenizer(), golden.ids), golden.text);
  }
  EXPECT_EQ(value_of(real_tokenizer()->encode(effort_line(50))), effort_ids(1328));
  EXPECT_EQ(value_of(real_tokenizer()->encode(effort_line(75))), effort_ids(2402));
  EXPECT_EQ(value_of(real_tokenizer()->encode(effort_line(100))), effort_ids(1457));
  EXPECT_EQ(value_of(real_tokenizer()->encode("<think>")).size(), 3U);
}

TEST(RealTokenizer, ControlTokens) {
  SKIP_WITHOUT_REAL_TOKENIZER();
  const Tokenizer& t = *real_tokenizer();
  EXPECT_EQ(t.vocab_size(), 129280);
  EXPECT_EQ(t.bos_id(), 0);
  EXPECT_EQ(t.eos_id(), 1);
  EXPECT_EQ(t.pad_id(), 2);
  const std::pair<std::string_view, int32_t> expected[] = {
      {kSystemToken, 128799},
      {kFimHoleToken, 128800},
      {kFimBeginToken, 128801},
      {kFimEndToken, 128802},
      {kUserToken, 128803},
      {kAssistantToken, 128804},
      {kEotToken, 128805},
      {kThinkToken, 128821},
      {kThinkEndToken, 128822},
      {kDsmlToken, 128825},
      {kLatestReminderToken, 128828},
      {kActionToken, 128829},
      {kQueryToken, 128830},
      {kAuthorityToken, 128831},
      {kDomainToken, 128832},
      {kTitleToken, 128836},
      {kReadUrlToken, 128845},
      {kImageToken, 129264},
  };
  for (const auto& [token, id] : expected) {
    EXPECT_EQ(value_of(t.control_id(token)), id) << token;
    EXPECT_EQ(value_of(t.encode_with_specials("a" + std::string(token) + "b")), (Ids{67, id, 68}));
  }
  for (int32_t id = 0; id < t.vocab_size(); ++id) {
    EXPECT_EQ(t.is_control(id), id <= 2 || id >= 128000) << id;
  }
}

TEST(RealTokenizer, TokenStringsAreFoundAgain) {
  SKIP_WITHOUT_REAL_TOKENIZER();
  const Tokenizer& t = *real_tokenizer();
  for (int32_t id = 0; id < t.vocab_size(); ++id) {
    ASSERT_EQ(t.id_of(t.token_string(id)), id);
  }
  EXPECT_EQ(t.token_string(270), "\u0120the");
  EXPECT_EQ(t.token_bytes(270), " the");
}

// ---- forms of tokenizer.json --------------------------------------------------------------------

json small_json() {
  return json::parse(byte_level_tokenizer_json(300));
}

TEST(Tokenizer, EncodesAndDecodesEverything) {
  const Tokenizer& t = small_tokenizer();
  std::string all;
  for (int b = 0; b < 256; ++b) {
    all.push_back(static_cast<char>(b));
  }
  for (const std::string& text : {std::string(),
                                  std::string("the hen"),
                                  all,
                                  all + "\u4F60\u597D" + all,
                                  std::string("\xF0\x9F\x98"),
                                  std::string("\0a\0", 3)}) {
    std::string bytes;
    for (const int32_t id : value_of(t.encode(text))) {
      EXPECT_FALSE(t.is_control(id));
      bytes += t.token_bytes(id);
    }
    EXPECT_EQ(bytes, text);
  }
}

TEST(Tokenizer, IdsOutsideOfTheVocabularyHaveNoBytes) {
  const Tokenizer& t = small_tokenizer();
  for (const int32_t id : {-1, 512, 2'000'000'000}) {
    EXPECT_EQ(t.token_bytes(id), "");
    EXPECT_FALSE(t.is_control(id));
  }
  EXPECT_FALSE(t.id_of("no such token"));
  EXPECT_FALSE(t.id_of(""));
  EXPECT_EQ(t.control_id("<none>").status().code(), Code::kNotFound);
  EXPECT_NE(t.control_id("<none>").status().message().find("<none>"), std::string::npos);
}

TEST(Tokenizer, SpecialsOnlyWhenAskedAndTheLongestWins) {
  json j = small_json();
  int next = 300;
  for (const char* content : {"<a>", "<a><b>", "<x"}) {
    j["added_tokens"].push_back({{"id", next++}, {"content", content}});
  }
  const Tokenizer t = value_of(Tokenizer::parse(j.dump(), "t"));
  const auto byte = [](char c) { return static_cast<int32_t>(static_cast<uint8_t>(c)) + 3; };
  EXPECT_EQ(value_of(t.encode_with_specials("x<a><b><a><xy")),
            (Ids{byte('x'), 301, 300, 302, byte('y')}));
  for (const int32_t id : value_of(t.encode("x<a><b><a><xy"))) {
    EXPECT_FALSE(t.is_control(id));
  }
}

TEST(Tokenizer, MergesAsStringsAndAsPairs) {
  json j = small_json();
  const Ids expected = value_of(value_of(Tokenizer::parse(j.dump(), "t")).encode("the hen"));
  for (json& merge : j["model"]["merges"]) {
    const std::string text = merge;
    const size_t space = text.find(' ');
    merge = {text.substr(0, space), text.substr(space + 1)};
  }
  EXPECT_EQ(value_of(value_of(Tokenizer::parse(j.dump(), "t")).encode("the hen")), expected);
  EXPECT_LT(expected.size(), 7U);
}

TEST(Tokenizer, PlainByteLevelCutsLikeGpt2) {
  json j = small_json();
  j["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const Tokenizer t = value_of(Tokenizer::parse(j.dump(), "t"));
  // " the" is one piece and ", a" is not, although " a" alone would merge.
  EXPECT_EQ(value_of(t.encode(" the")).size(), 2U);
  EXPECT_EQ(value_of(t.encode(", a")).size(), 2U);
  EXPECT_EQ(value_of(t.encode("he'll")).size(), 4U);
}

TEST(Tokenizer, MergeOrderIsRankThenLeftmost) {
  json j = json::parse(byte_level_tokenizer_json(259));
  int next = 259;
  const auto merge = [&](const std::string& left, const std::string& right) {
    j["model"]["vocab"][left + right] = next++;
    j["model"]["merges"].push_back(left + " " + right);
  };
  merge("b", "c");    // 259
  merge("a", "b");    // 260
  merge("a", "a");    // 261
  merge("aa", "aa");  // 262
  merge("ab", "bc");  // 263
  const Tokenizer t = value_of(Tokenizer::parse(j.dump(), "t"));
  const auto byte = [](char c) { return static_cast<int32_t>(static_cast<uint8_t>(c)) + 3; };
  EXPECT_EQ(value_of(t.encode("abc")), (Ids{byte('a'), 259}));
  EXPECT_EQ(value_of(t.encode("aaaaa")), (Ids{262, byte('a')}));
  EXPECT_EQ(value_of(t.encode("abbc")), (Ids{263}));
  // The heap of long pieces and the scan of short ones agree.
  std::string letters;
  uint32_t state = 1;
  Ids by_parts;
  for (int i = 0; i < 2000; ++i) {
    std::string part = "z";
    for (int k = 0; k < 20; ++k) {
      state = state * 1664525 + 1013904223;
      part.push_back(static_cast<char>('a' + (state >> 24) % 3));
    }
    letters += part;
    for (const int32_t id : value_of(t.encode(part))) {
      by_parts.push_back(id);
    }
  }
  EXPECT_EQ(value_of(t.encode(letters)), by_parts);
}

TEST(Tokenizer, LongPiecesAreNotQuadratic) {
  const Tokenizer& t = small_tokenizer();
  for (const char* unit : {"a", "he", " ", "\n", "!", "\xff", "1", "\u4F60"}) {
    std::string text;
    while (text.size() < 1'000'000) {
      text += unit;
    }
    std::string bytes;
    for (const int32_t id : value_of(t.encode(text))) {
      bytes += t.token_bytes(id);
    }
    EXPECT_EQ(bytes, text);
  }
}

TEST(Tokenizer, BytesThatAreNotUtf8AreKept) {
  const Tokenizer& t = small_tokenizer();
  const auto byte = [](int b) { return b + 3; };
  EXPECT_EQ(value_of(t.encode("\x80")), (Ids{byte(0x80)}));
  EXPECT_EQ(value_of(t.encode("a\xC3(")), (Ids{byte('a'), byte(0xC3), byte('(')}));
  EXPECT_EQ(value_of(t.encode("\xED\xA0\x80")), (Ids{byte(0xED), byte(0xA0), byte(0x80)}));
}

// Everything a file can get wrong names its place.
TEST(Tokenizer, MalformedFilesAreErrors) {
  struct Case {
    const char* patch;  // RFC 7396 merge patch of a good file
    const char* message;
  };
  const Case cases[] = {
      {R"({"model": null})", "'model' is missing"},
      {R"({"model": 3})", "'model' is 3;"},
      {R"({"model": {"type": "Unigram"}})", "Unigram"},
      {R"({"model": {"type": 1}})", "model.type is 1;"},
      {R"({"model": {"dropout": 0.1}})", "model.dropout is 0.1;"},
      {R"({"model": {"unk_token": "x"}})", "model.unk_token is \"x\""},
      {R"({"model": {"continuing_subword_prefix": "##"}})", "continuing_subword_prefix"},
      {R"({"model": {"end_of_word_suffix": "</w>"}})", "end_of_word_suffix"},
      {R"({"model": {"byte_fallback": true}})", "byte_fallback is true"},
      {R"({"model": {"ignore_merges": true}})", "ignore_merges"},
      {R"({"model": {"vocab": []}})", "model.vocab is an array of 0"},
      {R"({"model": {"vocab": {"a": "1"}}})", "model.vocab['a'] is \"1\""},
      {R"({"model": {"vocab": {"a": 1.5}}})", "model.vocab['a'] is 1.5"},
      {R"({"model": {"vocab": {"a": -1}}})", "model.vocab['a'] is -1"},
      {R"({"model": {"vocab": {"a": 1000000000}}})", "1000000000"},
      {R"({"model": {"vocab": {"a": 99999999999999999999}}})", "model.vocab['a'] is "},
      {R"({"model": {"vocab": {"a": 70}}})", "both have id 70"},
      {R"({"model": {"vocab": {"new": 400}}})", "'new' has id 400"},
      {R"({"model": {"vocab": {"": 300}}})", "empty token, with the id 300"},
      {R"({"model": {"vocab": {"!": null, "other": 36}}})", "the byte 0x21"},
      {R"({"model": {"merges": {}}})", "model.merges is an "},
      {R"({"model": {"merges": ["a"]}})", "model.merges[0] is \"a\""},
      {R"({"model": {"merges": ["a b c"]}})", "model.merges[0]"},
      {R"({"model": {"merges": [["a"]]}})", "model.merges[0] is an array of 1"},
      {R"({"model": {"merges": [["a", 1]]}})", "model.merges[0]"},
      {R"({"model": {"merges": ["h e", "x y"]}})", "'xy'"},
      {R"({"model": {"merges": ["zz e"]}})", "'zz'"},
      {R"({"added_tokens": {}})", "'added_tokens' is an object of 0"},
      {R"({"added_tokens": [1]})", "added_tokens[0].content is missing"},
      {R"({"added_tokens": [{"id": 0, "content": ""}]})", "added_tokens[0].content is \"\""},
      {R"({"added_tokens": [{"content": "a"}]})", "added_tokens[0].id is missing"},
      {R"({"added_tokens": [{"id": -5, "content": "a"}]})", "added_tokens[0].id is -5"},
      {R"({"added_tokens": [{"id": 5, "content": "<x>"}]})", "both have id 5"},
      {R"({"added_tokens": [{"id": 5, "content": "!"}]})", "36 in model.vocab"},
      {R"({"added_tokens": [{"id": 282, "content": "<x>"}, {"id": 282, "content": "<x>"}]})",
       "both have id 282"},
      {R"({"added_tokens": [{"id": 1099511627776, "content": "<x>"}]})", "1099511627776"},
      {R"({"added_tokens": [{"id": 282, "content": "<x>", "lstrip": true}]})",
       "added_tokens[0].lstrip is true"},
      {R"({"normalizer": {"type": "NFC"}})", "NFC"},
      {R"({"normalizer": 3})", "normalizer 3"},
      {R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}})", "normalizer"},
      {R"({"pre_tokenizer": null})", "'pre_tokenizer' is missing"},
      {R"({"pre_tokenizer": {"type": "Whitespace"}})", "Whitespace"},
      {R"({"pre_tokenizer": {"pretokenizers": []}})", "pretokenizers is an array of 0"},
      {R"({"pre_tokenizer": {"pretokenizers": [{"type": "Digits"}]}})", "'Digits'"},
      {R"({"pre_tokenizer": {"pretokenizers": [{"type": "ByteLevel"}, {"type": "ByteLevel"}]}})",
       "pretokenizers[0]"},
      {R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true}})",
       "add_prefix_space is true"},
      {R"({"pre_tokenizer": {"type": "ByteLevel", "use_regex": 3}})", "use_regex is 3"},
      {R"({"post_processor": {"type": "TemplateProcessing"}})", "TemplateProcessing"},
      {R"({"decoder": null})", "'decoder' is missing"},
      {R"({"decoder": {"type": "WordPiece"}})", "WordPiece"},
      {R"({"decoder": {"type": null}})", "decoder.type is missing"},
      {R"({"decoder": []})", "'decoder' is an array of 0"},
      {R"({"post_processor": 3})", "post_processor is 3"},
      {R"({"truncation": {"max_length": 3}})", "truncation is an object of 1"},
      {R"({"padding": {}})", "padding is an object of 0"},
  };
  for (const Case& c : cases) {
    json j = small_json();
    j.merge_patch(json::parse(c.patch));
    const Result<Tokenizer> parsed = Tokenizer::parse(j.dump(), "t.json");
    ASSERT_FALSE(parsed.ok()) << c.patch;
    EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(parsed.status().message().substr(0, 8), "t.json: ") << parsed.status().message();
    EXPECT_NE(parsed.status().message().find(c.message), std::string::npos)
        << c.patch << " gave " << parsed.status().message();
  }
}

TEST(Tokenizer, MalformedExpressionsAreErrors) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"behavior": "Removed"})", "behavior"},
      {R"({"invert": true})", "invert"},
      {R"({"pattern": {"Regex": null, "String": "a"}})", "pattern"},
      {R"({"pattern": {"Regex": "(a"}})", "pattern.Regex"},
      {R"({"pattern": {"Regex": "\\p{Nonsense}"}})", "pattern.Regex"},
      {R"x({"pattern": {"Regex": "(((a{1000}){1000}){1000})"}})x", "pattern.Regex"},
  };
  for (const auto& [patch, message] : cases) {
    json j = small_json();
    j["pre_tokenizer"]["pretokenizers"][1].merge_patch(json::parse(patch));
    const Result<Tokenizer> parsed = Tokenizer::parse(j.dump(), "t.json");
    ASSERT_FALSE(parsed.ok()) << patch;
    EXPECT_NE(parsed.status().message().find("pretokenizers[1]"), std::string::npos);
    EXPECT_NE(parsed.status().message().find(message), std::string::npos)
        << parsed.status().message();
  }
  EXPECT_FALSE(Tokenizer::parse("", "t").ok());
  EXPECT_FALSE(Tokenizer::parse("[]", "t").ok());
  EXPECT_FALSE(Tokenizer::parse("{}", "t").ok());
  EXPECT_FALSE(Tokenizer::parse(std::string(100'000, '['), "t").ok());
  EXPECT_EQ(Tokenizer::load("/nonexistent/tokenizer.json").status().code(), Code::kNotFound);
}

TEST(Tokenizer, TruncatedFilesAreErrors) {
  const std::string whole = byte_level_tokenizer_json(300);
  for (size_t length = 0; length < whole.size(); length += 97) {
    EXPECT_FALSE(Tokenizer::parse(whole.substr(0, length), "t").ok());
  }
}

TEST(Tokenizer, ExpressionsWithEmptyMatches) {
  json j = small_json();
  j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "x*";
  const Tokenizer t = value_of(Tokenizer::parse(j.dump(), "t"));
  const std::string text = "he xx \u4F60he";
  EXPECT_EQ(decode(t, value_of(t.encode(text))), text);
}

}  // namespace
}  // namespace cachalot::text
