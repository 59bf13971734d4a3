#include "text/byte_tokenizer.h"

#include "tests/text/support.h"
#include "text/byte_level.h"

namespace cachalot::text {
namespace {

TEST(ByteTokenizer, HasExactlyTheSizeAskedFor) {
  for (const int32_t size : {259, 260, 276, 277, 278, 300, 322, 323, 512, 4096}) {
    const Tokenizer t = value_of(Tokenizer::parse(byte_level_tokenizer_json(size), "t"));
    EXPECT_EQ(t.vocab_size(), size);
    EXPECT_EQ(t.bos_id(), 0);
    EXPECT_EQ(t.eos_id(), 1);
    EXPECT_EQ(t.pad_id(), 2);
    for (int b = 0; b < 256; ++b) {
      const char byte = static_cast<char>(b);
      EXPECT_EQ(t.token_bytes(b + 3), std::string_view(&byte, 1));
    }
  }
  EXPECT_EQ(byte_level_tokenizer_json(512), byte_level_tokenizer_json(512));
}

TEST(ByteTokenizer, ControlTokensComeBeforeMergesWhenRoomIsShort) {
  const auto count = static_cast<int32_t>(kControlTokens.size());
  const Tokenizer some = value_of(Tokenizer::parse(byte_level_tokenizer_json(261), "t"));
  EXPECT_TRUE(some.control_id(kControlTokens[1]).ok());
  EXPECT_FALSE(some.control_id(kControlTokens[2]).ok());
  const Tokenizer all =
      value_of(Tokenizer::parse(byte_level_tokenizer_json(kMinByteVocab + count), "t"));
  for (const std::string_view token : kControlTokens) {
    EXPECT_TRUE(all.control_id(token).ok()) << token;
    EXPECT_TRUE(small_tokenizer().control_id(token).ok()) << token;
  }
  EXPECT_EQ(value_of(all.encode("he")).size(), 2U);
  EXPECT_EQ(value_of(small_tokenizer().encode("he")).size(), 1U);
}

TEST(ByteLevel, IsABijectionOfBytes) {
  std::string all;
  for (int b = 0; b < 256; ++b) {
    all.push_back(static_cast<char>(b));
  }
  EXPECT_EQ(internal::from_byte_level(internal::to_byte_level(all)), all);
  EXPECT_EQ(internal::to_byte_level(" \n\t\x7f\xad"), "\u0120\u010A\u0109\u0121\u0143");
  EXPECT_EQ(internal::to_byte_level("a~\xa1\xff"), "a~\u00A1\u00FF");
  EXPECT_FALSE(internal::from_byte_level(" "));
  EXPECT_FALSE(internal::from_byte_level("\u4F60"));
  EXPECT_FALSE(internal::from_byte_level("\u0144"));
  EXPECT_FALSE(internal::from_byte_level("\xff"));
}

}  // namespace
}  // namespace cachalot::text
