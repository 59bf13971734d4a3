#include "text/detokenizer.h"

#include "tests/text/support.h"
#include "text/utf8_stream.h"

namespace cachalot::text {
namespace {

Ids bytes_as_ids(std::string_view bytes) {
  Ids ids;
  for (const char b : bytes) {
    ids.push_back(static_cast<uint8_t>(b) + 3);
  }
  return ids;
}

TEST(Detokenizer, ReturnsWholeCharactersOnly) {
  const std::string text = "a\u00E9\u4F60\U0001F600z";
  Detokenizer d(small_tokenizer());
  std::vector<std::string> pieces;
  for (const int32_t id : bytes_as_ids(text)) {
    const std::string piece = d.push(id);
    if (!piece.empty()) {
      pieces.push_back(piece);
    }
  }
  EXPECT_EQ(pieces, (std::vector<std::string>{"a", "\u00E9", "\u4F60", "\U0001F600", "z"}));
  EXPECT_EQ(d.finish(), "");
}

TEST(Detokenizer, FlushesAnIncompleteCharacterOnce) {
  Detokenizer d(small_tokenizer());
  std::string text;
  for (const int32_t id : bytes_as_ids("ok\xF0\x9F\x98")) {
    text += d.push(id);
  }
  EXPECT_EQ(text, "ok");
  EXPECT_EQ(d.finish(), "\uFFFD");
  EXPECT_EQ(d.finish(), "");
}

TEST(Detokenizer, ControlTokens) {
  const Tokenizer& t = small_tokenizer();
  const Ids ids = {
      *t.bos_id(), 'a' + 3, value_of(t.control_id(kThinkToken)), *t.eos_id(), 9999, -1};
  EXPECT_EQ(decode(t, ids), "a");
  EXPECT_EQ(decode(t, ids, {.skip_control = false}),
            std::string(kBosToken) + "a<think>" + std::string(kEosToken));
  // A skipped token does not break the character around it.
  const Ids split = {0xC3 + 3, *t.bos_id(), 0xA9 + 3};
  EXPECT_EQ(decode(t, split), "\u00E9");
}

// The replacement of malformed bytes follows Unicode's maximal subparts, as Python's decoder does.
TEST(Utf8Stream, ReplacesMalformedBytes) {
  const std::pair<std::string, std::string> cases[] = {
      {"\x80", "\uFFFD"},
      {"a\xFF", "a\uFFFD"},
      {"\xC0\xAF", "\uFFFD\uFFFD"},
      {"\xE0\x80\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"\xF0\x9F\x98z", "\uFFFDz"},
      {"\xF0\x9F\xC3\xA9", "\uFFFD\u00E9"},
      {"\xE4\xBD\xE4\xBD\xA0", "\uFFFD\u4F60"},
      {"\xF0\x9F\x98", "\uFFFD"},
      {"\xC3", "\uFFFD"},
      {"\xF5\x80", "\uFFFD\uFFFD"},
      {"\xEF\xBF\xBD", "\uFFFD"},
  };
  for (const auto& [bytes, expected] : cases) {
    for (size_t cut = 0; cut <= bytes.size(); ++cut) {
      internal::Utf8Stream stream;
      std::string out;
      stream.push(bytes.substr(0, cut), &out);
      stream.push(bytes.substr(cut), &out);
      stream.finish(&out);
      EXPECT_EQ(out, expected);
    }
    internal::Utf8Stream stream;
    std::string out;
    for (const char b : bytes) {
      stream.push({&b, 1}, &out);
    }
    stream.finish(&out);
    EXPECT_EQ(out, expected);
  }
}

}  // namespace
}  // namespace cachalot::text
