#include "text/token_classes.h"

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>

#include "tests/text/support.h"
#include "text/byte_level.h"

namespace cachalot::text {
namespace {

std::string little_endian(const Ids& values, size_t count) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) {
    for (int shift = 0; shift < 32; shift += 8) {
      bytes.push_back(static_cast<char>(static_cast<uint32_t>(values[i]) >> shift));
    }
  }
  return bytes;
}

TEST(TokenClasses, RealVocabulary) {
  SKIP_WITHOUT_REAL_TOKENIZER();
  const Ids map = value_of(token_classes(*real_tokenizer()));
  ASSERT_EQ(map.size(), 129280U);
  EXPECT_EQ(*std::max_element(map.begin(), map.end()), 99091);
  EXPECT_EQ(*std::max_element(map.begin(), map.begin() + 128000), 97811);
  EXPECT_EQ(std::count(map.begin(), map.end(), 174), 163);
  const std::pair<int, int> spots[] = {
      {0, 0},          {1, 1},          {2, 2},          {3, 3},          {7, 7},
      {53, 53},        {55, 55},        {201, 174},      {223, 174},      {262, 174},
      {200, 174},      {271, 174},      {33310, 15844},  {19923, 15844},  {44388, 15844},
      {45948, 15844},  {1805, 237},     {671, 237},      {270, 237},      {455, 237},
      {20852, 237},    {168, 142},      {619, 39},       {71, 39},        {1000, 604},
      {50000, 10486},  {100000, 76407}, {127999, 97811}, {128799, 98611}, {128803, 98615},
      {128804, 98616}, {128821, 98633}, {128822, 98634}, {129264, 99076},
  };
  for (const auto& [id, expected] : spots) {
    EXPECT_EQ(map[static_cast<size_t>(id)], expected) << id;
  }
  for (int32_t id = 128000; id < 129280; ++id) {
    EXPECT_EQ(map[static_cast<size_t>(id)], 97812 + id - 128000);
  }
  EXPECT_EQ(sha256(little_endian(map, 128000)),
            "a44a9e7328b760556106bce7c1002c9fa632bc2f5c8e054ad9ce3ff8f8bfa8db");
  EXPECT_EQ(sha256(little_endian(map, 129280)),
            "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481");
}

// A byte-level vocabulary with the given extra tokens behind the 259 base tokens.
Ids classes_with(const std::vector<std::string>& tokens) {
  nlohmann::json j = nlohmann::json::parse(byte_level_tokenizer_json(259));
  int id = 259;
  for (const std::string& token : tokens) {
    j["model"]["vocab"][internal::to_byte_level(token)] = id++;
  }
  const Ids all = value_of(token_classes(value_of(Tokenizer::parse(j.dump(), "t"))));
  return {all.begin() + 259, all.end()};
}

TEST(TokenClasses, Rules) {
  const Ids space = classes_with({"  ", "\n\n", "\t \r\n"});
  EXPECT_EQ(space[0], space[1]);
  EXPECT_EQ(space[0], space[2]);

  const Ids word = classes_with(
      {"Cafe", " caf\u00E9", "CAFE\u0301", "\uFF23\uFF21\uFF26\uFF25", "cafe\n", "caff\u00E9"});
  for (size_t i = 1; i < 5; ++i) {
    EXPECT_EQ(word[i], word[0]) << i;
  }
  EXPECT_NE(word[5], word[0]);

  // All marks go (Mc too), ligatures open, a capital sigma never becomes the final one.
  const Ids other = classes_with({"\u0915\u093F",
                                  "\u0915",
                                  "\uFB01",
                                  "FI",
                                  "\u03A3\u03A3",
                                  "\u03C3\u03C3",
                                  "a  b",
                                  "A\nB",
                                  "\u0301",
                                  "\u0300"});
  EXPECT_EQ(other[0], other[1]);
  EXPECT_EQ(other[2], other[3]);
  EXPECT_EQ(other[4], other[5]);
  EXPECT_EQ(other[6], other[7]);
  EXPECT_NE(other[8], other[9]);  // nothing is left of either: the texts themselves are compared
}

TEST(TokenClasses, SmallVocabulary) {
  const Ids map = value_of(token_classes(small_tokenizer()));
  ASSERT_EQ(map.size(), 512U);
  EXPECT_EQ(map['a' + 3], map['A' + 3]);
  EXPECT_EQ(map[' ' + 3], map['\n' + 3]);
  EXPECT_NE(map[0xC3 + 3], map[0xE3 + 3]);  // bytes that are not UTF-8 are compared as they are
}

}  // namespace
}  // namespace cachalot::text
