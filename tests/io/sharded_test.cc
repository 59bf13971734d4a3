#include "io/sharded.h"

#include <gtest/gtest.h>

#include "base/file.h"
#include "base/format.h"
#include "tests/support/temp_directory.h"

namespace cachalot::io {
namespace {

class ShardedTest : public testing::Test {
 protected:
  // A shard with one byte per tensor.
  void shard(const std::string& file, const std::vector<std::string>& names) {
    std::vector<uint8_t> bytes(names.size(), 7);
    std::vector<SafetensorsFile::Tensor> tensors;
    for (size_t i = 0; i < names.size(); ++i) {
      tensors.push_back({names[i], TensorView(&bytes[i], DType::kU8, {1})});
    }
    ASSERT_TRUE(write_safetensors(directory_.file(file), tensors).ok());
  }
  void index(const std::string& text) {
    ASSERT_TRUE(write_file(directory_.file("model.safetensors.index.json"), text).ok());
  }
  void expect_refused(const std::vector<std::string>& parts) {
    const auto result = ShardedTensors::open(directory_.path());
    ASSERT_FALSE(result.ok());
    for (const std::string& part : parts) {
      EXPECT_NE(result.error().message().find(part), std::string::npos)
          << result.error().message() << "\nlacks " << part;
    }
  }

  test::TempDirectory directory_;
};

TEST_F(ShardedTest, ReadsAnyFileNames) {
  shard("x.safetensors", {"a", "b"});
  shard("y", {"c"});
  index(R"({"metadata":{"total_size":3,"other":[{}]},"extra":{"k":[1]},
            "weight_map":{"c":"y","a":"x.safetensors","b":"x.safetensors"}})");
  const auto result = ShardedTensors::open(directory_.path());
  ASSERT_TRUE(result.ok()) << result.error().message();
  EXPECT_EQ(result->tensors().size(), 3u);
  ASSERT_NE(result->find("c"), nullptr);
  EXPECT_EQ(result->shards()[static_cast<size_t>(result->find("c")->shard)].path(),
            directory_.file("y"));
  EXPECT_EQ(*result->find("b")->view.as<uint8_t>(), 7);
  EXPECT_EQ(result->find("d"), nullptr);
}

TEST_F(ShardedTest, ViewsSurviveAMove) {
  shard("x", {"a"});
  index(R"({"weight_map":{"a":"x"}})");
  auto opened = ShardedTensors::open(directory_.path());
  ASSERT_TRUE(opened.ok());
  const TensorView before = opened->find("a")->view;
  const ShardedTensors moved = std::move(*opened);
  EXPECT_EQ(moved.find("a")->view.data, before.data);
  EXPECT_EQ(moved.find("a")->name, "a");
}

TEST_F(ShardedTest, FallsBackToASingleFile) {
  shard("model.safetensors", {"a", "b"});
  const auto result = ShardedTensors::open(directory_.path());
  ASSERT_TRUE(result.ok()) << result.error().message();
  EXPECT_EQ(result->tensors().size(), 2u);
}

TEST_F(ShardedTest, NothingToOpen) {
  expect_refused({directory_.path(), "model.safetensors.index.json"});
}

TEST_F(ShardedTest, MissingShard) {
  shard("x", {"a"});
  index(R"({"weight_map":{"a":"x","b":"gone"}})");
  expect_refused({"gone"});
}

TEST_F(ShardedTest, A56_MissingTensor) {
  shard("x", {"a"});
  index(R"({"weight_map":{"a":"x","b":"x"}})");
  expect_refused({"missing: \"b\" in 'x'"});
}

TEST_F(ShardedTest, A56_ExtraTensor) {
  shard("x", {"a", "b"});
  index(R"({"weight_map":{"a":"x"}})");
  expect_refused({"not in the index: \"b\"", "/x"});
}

TEST_F(ShardedTest, TensorInTwoShards) {
  shard("x", {"a"});
  shard("y", {"a", "b"});
  index(R"({"weight_map":{"a":"x","b":"y"}})");
  expect_refused({"not in the index: \"a\"", "/y"});
}

TEST_F(ShardedTest, TensorInTheWrongShard) {
  shard("x", {"a"});
  shard("y", {"b"});
  index(R"({"weight_map":{"a":"y","b":"y"}})");
  // Only shards that the index names are opened.
  expect_refused({"missing: \"a\" in 'y'"});
  index(R"({"weight_map":{"a":"y","b":"x"}})");
  expect_refused({"\"a\": listed in 'y', found in", "\"b\": listed in 'x', found in"});
}

TEST_F(ShardedTest, ErrorsNameTheFirstTensorsOrAll) {
  std::vector<std::string> names;
  std::string map;
  for (int i = 10; i < 22; ++i) {
    names.push_back("t" + std::to_string(i));
    map += (map.empty() ? "" : ",") + ("\"u" + std::to_string(i) + "\":\"x\"");
  }
  shard("x", names);
  index("{\"weight_map\":{" + map + "}}");
  expect_refused({"\"t19\" in", "\"u19\" in 'x', and 2 more"});
  const auto all = ShardedTensors::open(directory_.path(), NameList::kAll);
  for (const std::string part : {"\"t21\"", "\"u21\" in 'x'"}) {
    EXPECT_NE(all.error().message().find(part), std::string::npos) << all.error().message();
  }
}

TEST_F(ShardedTest, WrongTotalSize) {
  shard("x", {"a"});
  index(R"({"metadata":{"total_size":2},"weight_map":{"a":"x"}})");
  expect_refused({"total_size is 2", "1 bytes"});
}

TEST_F(ShardedTest, ShardNamesThatLeaveTheDirectory) {
  shard("x", {"a"});
  for (const char* name : {"../x", "/etc/passwd", "d/x", "..", ".", "", "a\\\\b", "x\\u0000"}) {
    index(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name));
    expect_refused({"\"a\"", "not a plain file name"});
  }
}

TEST_F(ShardedTest, MalformedIndex) {
  shard("x", {"a"});
  const std::pair<const char*, const char*> cases[] = {
      {"", "not JSON"},
      {"{", "not JSON"},
      {"[]", "array"},
      {"3", "wrong type"},
      {"{}", "no weight_map"},
      {R"({"weight_map":[]})", "array"},
      {R"({"weight_map":3})", "wrong type"},
      {R"({"weight_map":{"a":3}})", "\"a\""},
      {R"({"weight_map":{"a":{"b":"x"}}})", "nested"},
      {R"({"weight_map":{"a":"x","a":"x"}})", "twice"},
      {R"({"weight_map":{"a":"x"},"weight_map":{"a":"x"}})", "twice"},
      {R"({"m":[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]],"weight_map":{"a":"x"}})", "nested"},
  };
  for (const auto& [text, message] : cases) {
    SCOPED_TRACE(text);
    index(text);
    expect_refused({"model.safetensors.index.json", message});
  }
}

TEST_F(ShardedTest, WrittenIndexReadsBack) {
  EXPECT_EQ(shard_file_name(2, 48), "model-00003-of-00048.safetensors");
  shard(shard_file_name(0, 2), {"b"});
  shard(shard_file_name(1, 2), {"a"});
  ASSERT_TRUE(write_shard_index(directory_.path(),
                                {{"b", shard_file_name(0, 2)}, {"a", shard_file_name(1, 2)}},
                                2)
                  .ok());
  const auto result = ShardedTensors::open(directory_.path());
  ASSERT_TRUE(result.ok()) << result.error().message();
  EXPECT_EQ(result->shards().size(), 2u);
}

}  // namespace
}  // namespace cachalot::io
