#include "text/json_tree.h"

#include "tests/text/support.h"

namespace cachalot::text {
namespace {

std::string respell(std::string_view json) {
  return python_json(value_of(parse_json(json, "t")));
}

TEST(JsonTree, SpellsLikePython) {
  EXPECT_EQ(respell(R"({"b":1,"a":[true,false,null],"c":{}})"),
            R"({"b": 1, "a": [true, false, null], "c": {}})");
  EXPECT_EQ(respell("[]"), "[]");
  EXPECT_EQ(respell(R"("\u00e9\ud83d\ude00\/")"), "\"\u00e9\U0001F600/\"");
  EXPECT_EQ(respell(R"("\" \\ \b \f \n \r \t \u0001 \u007f")"),
            "\"\\\" \\\\ \\b \\f \\n \\r \\t \\u0001 \x7f\"");
}

TEST(JsonTree, SpellsNumbersLikePython) {
  const std::pair<const char*, const char*> cases[] = {
      {"1", "1"},
      {"-0", "0"},
      {"1.0", "1.0"},
      {"1.50", "1.5"},
      {"-0.0", "-0.0"},
      {"1e5", "100000.0"},
      {"1E15", "1000000000000000.0"},
      {"1e16", "1e+16"},
      {"123456789012345680.0", "1.2345678901234568e+17"},
      {"0.0001", "0.0001"},
      {"0.00001", "1e-05"},
      {"-2.5e-7", "-2.5e-07"},
      {"5e-324", "5e-324"},
      {"1.7976931348623157e308", "1.7976931348623157e+308"},
      {"0.1", "0.1"},
      {"12345678901234567890123", "12345678901234567890123"},
      {"-12345678901234567890123", "-12345678901234567890123"},
      {"18446744073709551615", "18446744073709551615"},
  };
  for (const auto& [source, expected] : cases) {
    EXPECT_EQ(respell(source), expected) << source;
  }
}

TEST(JsonTree, ReadsIntegers) {
  EXPECT_EQ(value_of(parse_json("12", "t")).integer(), 12);
  EXPECT_EQ(value_of(parse_json("-7", "t")).integer(), -7);
  EXPECT_FALSE(value_of(parse_json("1.0", "t")).integer());
  EXPECT_FALSE(value_of(parse_json("99999999999999999999", "t")).integer());
  EXPECT_FALSE(value_of(parse_json("\"1\"", "t")).integer());
}

TEST(JsonTree, RepeatedKeysKeepTheFirstPlaceAndTheLastValue) {
  EXPECT_EQ(respell(R"({"a": 1, "b": 2, "a": 3, "c": 4, "b": 5})"), R"({"a": 3, "b": 5, "c": 4})");
}

TEST(JsonTree, RefusesWhatIsNotJson) {
  for (const char* text : {"",
                           "{",
                           "[1,]",
                           "nul",
                           "01",
                           "'a'",
                           "{\"a\" 1}",
                           "[1] 2",
                           "\"\\ud800\"",
                           "\"\xff\"",
                           "1e999",
                           "NaN"}) {
    const Result<Json> parsed = parse_json(text, "body");
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(parsed.status().message().substr(0, 6), "body: ");
  }
}

TEST(JsonTree, BoundsTheDepth) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(parse_json(nested(kMaxJsonDepth), "t").ok());
  for (const size_t depth : {65, 1000, 10'000, 1'000'000}) {
    const Result<Json> parsed = parse_json(nested(depth), "t");
    ASSERT_FALSE(parsed.ok());
    EXPECT_NE(parsed.status().message().find("nested"), std::string::npos);
  }
}

TEST(JsonTree, BoundsTheNumberOfValues) {
  std::string many = "[0";
  for (int64_t i = 0; i < kMaxJsonNodes; ++i) {
    many += ",0";
  }
  const Result<Json> parsed = parse_json(many + "]", "t");
  ASSERT_FALSE(parsed.ok());
  EXPECT_NE(parsed.status().message().find("4000000 values"), std::string::npos);
}

TEST(JsonTree, ManyKeysAreNotQuadratic) {
  std::string object = "{\"k\": 0";
  for (int i = 0; i < 200'000; ++i) {
    object += ", \"k" + std::to_string(i) + "\": " + std::to_string(i);
  }
  const Json parsed = value_of(parse_json(object + "}", "t"));
  EXPECT_EQ(parsed.keys.size(), 200'001U);
  EXPECT_EQ(parsed.find("k199999")->integer(), 199'999);
}

}  // namespace
}  // namespace cachalot::text
