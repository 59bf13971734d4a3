#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/file.h"
#include "base/format.h"
#include "tests/support/temp_directory.h"

namespace cachalot::io {
namespace {

std::string file_bytes(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(header.size() >> (8 * i));
  }
  return bytes + header + std::string(data_bytes, '\1');
}

Result<SafetensorsHeader> parse(const std::string& bytes) {
  // A copy of the exact size, so that a sanitizer sees any read behind the end.
  const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
  return parse_safetensors_header(exact, "x.safetensors");
}

struct Malformed {
  const char* name;
  std::string bytes;
  // All of these must occur in the message.
  std::vector<std::string> message;
};

std::string tensor(const std::string& name,
                   const std::string& dtype,
                   const std::string& shape,
                   const std::string& offsets) {
  return fmt::format(
      R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

std::string header(const std::string& members) {
  return "{" + members + "}";
}

std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

std::vector<Malformed> malformed() {
  const std::string a = tensor("a", "F32", "[2]", "[0,8]");
  std::string deep = R"({"a":)";
  for (int i = 0; i < 100000; ++i) {
    deep += "[";
  }
  return {
      {"Empty", "", {"0 bytes", "too short"}},
      {"SevenBytes", "1234567", {"7 bytes", "too short"}},
      {"A57_HeaderBeyondFile", with_length(100, "{}"), {"100 bytes", "10 bytes"}},
      {"A57_HeaderLengthHuge", with_length(UINT64_MAX, "{}"), {"18446744073709551615"}},
      {"EmptyHeader", file_bytes("", 0), {"not JSON"}},
      {"NotJson", file_bytes("{\"a\":", 0), {"not JSON"}},
      {"NotUtf8", file_bytes("{\"\xFF\":1}", 0), {"not JSON"}},
      {"TrailingText", file_bytes(header(a) + "x", 8), {"not JSON"}},
      {"Array", file_bytes("[]", 0), {"instead of an object"}},
      {"Scalar", file_bytes("3", 0), {"instead of an object"}},
      {"DeepNesting", file_bytes(deep, 0), {"\"a\"", "an array"}},
      {"DeepObjects", file_bytes(R"({"a":{"dtype":{"x":{}}}})", 0), {"\"a\"", "an object"}},
      {"DuplicateName", file_bytes(header(a + "," + a), 8), {"\"a\"", "twice"}},
      {"DuplicateKey",
       file_bytes(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
       {"\"a\"", "dtype", "twice"}},
      {"DuplicateMetadata",
       file_bytes(R"({"__metadata__":{"k":"1","k":"2"}})", 0),
       {"__metadata__", "\"k\"", "twice"}},
      {"TwoMetadata", file_bytes(R"({"__metadata__":{},"__metadata__":{}})", 0), {"twice"}},
      {"MetadataNumber", file_bytes(R"({"__metadata__":{"k":1}})", 0), {"__metadata__", "number"}},
      {"UnknownKey",
       file_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":[1]}})", 1),
       {"\"a\"", "stride"}},
      {"NoDtype",
       file_bytes(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1),
       {"\"a\"", "no dtype"}},
      {"NoShape",
       file_bytes(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1),
       {"\"a\"", "no shape"}},
      {"NoOffsets",
       file_bytes(R"({"a":{"dtype":"U8","shape":[1]}})", 1),
       {"\"a\"", "no data_offsets"}},
      {"UnknownDtype",
       file_bytes(header(tensor("a", "F64", "[1]", "[0,8]")), 8),
       {"\"a\"", "unsupported dtype", "F64"}},
      {"DtypeNumber", file_bytes(R"({"a":{"dtype":1}})", 0), {"\"a\"", "number"}},
      {"DtypeNull", file_bytes(R"({"a":{"dtype":null}})", 0), {"\"a\"", "null"}},
      {"TensorIsNumber", file_bytes(R"({"a":1})", 0), {"\"a\"", "number"}},
      {"TensorIsString", file_bytes(R"({"a":"b"})", 0), {"\"a\"", "string"}},
      {"NegativeExtent",
       file_bytes(header(tensor("a", "U8", "[-1]", "[0,1]")), 1),
       {"\"a\"", "-1", "shape"}},
      {"FractionalExtent",
       file_bytes(header(tensor("a", "U8", "[1.0]", "[0,1]")), 1),
       {"\"a\"", "1.0", "shape"}},
      {"HugeExtent",
       file_bytes(header(tensor("a", "U8", "[18446744073709551615]", "[0,1]")), 1),
       {"\"a\"", "18446744073709551615"}},
      {"BeyondInteger",
       file_bytes(header(tensor("a", "U8", "[99999999999999999999]", "[0,1]")), 1),
       {"\"a\"", "99999999999999999999"}},
      {"ShapeString",
       file_bytes(header(tensor("a", "U8", "[\"1\"]", "[0,1]")), 1),
       {"\"a\"", "string"}},
      {"NestedShape",
       file_bytes(header(tensor("a", "U8", "[[1]]", "[0,1]")), 1),
       {"\"a\"", "array"}},
      {"RankFive",
       file_bytes(header(tensor("a", "U8", "[1,1,1,1,1]", "[0,1]")), 1),
       {"\"a\"", "more than 4"}},
      {"OneOffset",
       file_bytes(header(tensor("a", "U8", "[1]", "[0]")), 1),
       {"\"a\"", "1 data_offsets"}},
      {"ThreeOffsets",
       file_bytes(header(tensor("a", "U8", "[1]", "[0,1,2]")), 1),
       {"\"a\"", "3 data_offsets"}},
      {"A57_ShapeBeyondData",
       file_bytes(header(tensor("a", "F32", "[1000,1000]", "[0,4]")), 4),
       {"\"a\"", "[1000, 1000]", "4000000", "4 bytes"}},
      {"A57_ShapeOverflow",
       file_bytes(header(tensor("a", "F32", "[4294967296,4294967296]", "[0,0]")), 0),
       {"\"a\"", "overflow", "[4294967296, 4294967296]"}},
      {"A57_ShapeOverflowByDtype",
       file_bytes(header(tensor("a", "F32", "[4611686018427387904]", "[0,0]")), 0),
       {"\"a\"", "overflow"}},
      {"A57_OffsetsReversed",
       file_bytes(header(tensor("a", "F32", "[2]", "[8,0]")), 8),
       {"\"a\"", "[8, 0]", "reversed"}},
      {"A57_OffsetsBeyondFile",
       file_bytes(header(tensor("a", "F32", "[2]", "[0,8]")), 4),
       {"\"a\"", "[0, 8]", "4 data bytes"}},
      {"A57_Overlap",
       file_bytes(header(a + "," + tensor("b", "F32", "[2]", "[4,12]")), 12),
       {"\"b\"", "[4, 12]", "overlap"}},
      {"A57_SameRangeTwice",
       file_bytes(header(a + "," + tensor("b", "F32", "[2]", "[0,8]")), 8),
       {"overlap"}},
      {"A57_Gap",
       file_bytes(header(a + "," + tensor("b", "F32", "[2]", "[12,20]")), 20),
       {"\"b\"", "[12, 20]", "gap"}},
      {"A57_GapAtStart",
       file_bytes(header(tensor("a", "F32", "[2]", "[4,12]")), 12),
       {"\"a\"", "gap"}},
      {"BytesBehindLastTensor", file_bytes(header(a), 9), {"1 bytes", "none"}},
      {"SizeMismatch",
       file_bytes(header(tensor("a", "BF16", "[2]", "[0,8]")), 8),
       {"\"a\"", "8 bytes", "BF16", "4"}},
  };
}

class MalformedTest : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedTest, IsRefusedByName) {
  const Result<SafetensorsHeader> result = parse(GetParam().bytes);
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.error().message().find("x.safetensors"), std::string::npos);
  for (const std::string& part : GetParam().message) {
    EXPECT_NE(result.error().message().find(part), std::string::npos)
        << result.error().message() << "\nlacks " << part;
  }
}

INSTANTIATE_TEST_SUITE_P(Safetensors,
                         MalformedTest,
                         testing::ValuesIn(malformed()),
                         [](const auto& test) { return test.param.name; });

TEST(Safetensors, AcceptsEmptyFileZeroSizesAndAnyOrder) {
  EXPECT_TRUE(parse(file_bytes("{}", 0)).ok());
  EXPECT_TRUE(parse(file_bytes("{}    ", 0)).ok());
  const auto result = parse(file_bytes(
      header(tensor("late", "U8", "[3]", "[4,7]") + "," + tensor("none", "F32", "[0,5]", "[4,4]") +
             "," + tensor("scalar", "F32", "[]", "[0,4]")),
      7));
  ASSERT_TRUE(result.ok()) << result.error().message();
  ASSERT_EQ(result->entries.size(), 3u);
  EXPECT_EQ(result->entries[0].name, "scalar");
  EXPECT_EQ(result->entries[0].shape.rank, 0);
  EXPECT_EQ(result->entries[1].name, "none");
  EXPECT_EQ(result->entries[1].shape, (Shape{0, 5}));
  EXPECT_EQ(result->entries[2].name, "late");
}

TEST(Safetensors, HeaderAboveTheLimitIsRefused) {
  const auto result =
      parse(with_length(kMaxSafetensorsHeader + 1, std::string(kMaxSafetensorsHeader + 1, ' ')));
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.error().message().find("100000001 bytes is longer than 100000000"),
            std::string::npos);
}

TEST(Safetensors, EveryPrefixOfAFileIsRefused) {
  const std::string bytes = file_bytes(
      header(tensor("a", "F32", "[2]", "[0,8]") + "," + tensor("b", "U8", "[3]", "[8,11]")), 11);
  ASSERT_TRUE(parse(bytes).ok());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(parse(bytes.substr(0, length)).ok()) << length;
  }
}

TEST(Safetensors, WrittenFileReadsBack) {
  const test::TempDirectory directory;
  const std::string path = directory.file("a.safetensors");
  std::vector<float> floats = {1, -2, 3.5f, 0, 7, 8};
  std::vector<uint8_t> bytes = {1, 2, 3, 4, 255};
  std::vector<SafetensorsFile::Tensor> tensors = {
      {"a float", TensorView(floats.data(), DType::kF32, {2, 3})},
      {"nothing", TensorView(floats.data(), DType::kF32, {0, 3})},
      {"codes \"quoted\" \xC3\xA9", TensorView(bytes.data(), DType::kF8E4M3, {5})},
  };
  ASSERT_TRUE(write_safetensors(path, tensors, {{"format", "pt"}}).ok());
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.ok()) << file.error().message();
  EXPECT_EQ(file->metadata().at("format"), "pt");
  ASSERT_EQ(file->tensors().size(), 3u);
  for (const SafetensorsFile::Tensor& written : tensors) {
    const TensorView* read = file->find(written.name);
    ASSERT_NE(read, nullptr) << written.name;
    EXPECT_EQ(read->dtype, written.view.dtype);
    EXPECT_EQ(read->shape, written.view.shape);
    EXPECT_EQ(std::memcmp(read->data, written.view.data, static_cast<size_t>(read->bytes())), 0);
  }
  EXPECT_EQ(file->find("absent"), nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file->find("a float")->data) % 64, 0u);
}

TEST(Safetensors, WriterIsDeterministicAndAtomic) {
  const test::TempDirectory directory;
  const std::string path = directory.file("a.safetensors");
  const std::vector<uint8_t> data = {1, 2, 3, 4};
  std::string first;
  for (int run = 0; run < 2; ++run) {
    auto writer = SafetensorsWriter::create(path, {{"t", DType::kU8, {4}}});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->append(std::span(data).first(1)).ok());
    ASSERT_TRUE(writer->append(std::span(data).subspan(1)).ok());
    EXPECT_EQ(file_exists(path), run == 1);
    ASSERT_TRUE(writer->finish().ok());
    const auto bytes = read_file(path);
    ASSERT_TRUE(bytes.ok());
    EXPECT_TRUE(run == 0 || *bytes == first);
    first = *bytes;
  }
  {
    auto abandoned = SafetensorsWriter::create(path, {{"other", DType::kU8, {4}}});
  }
  EXPECT_EQ(*read_file(path), first);
  const std::filesystem::directory_iterator files(directory.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1) << "a temporary file was left behind";
}

TEST(Safetensors, WriterRefusesBadDeclarations) {
  const test::TempDirectory directory;
  const std::string path = directory.file("a.safetensors");
  EXPECT_FALSE(
      SafetensorsWriter::create(path, {{"t", DType::kU8, {4}}, {"t", DType::kU8, {4}}}).ok());
  EXPECT_FALSE(SafetensorsWriter::create(path, {{"__metadata__", DType::kU8, {4}}}).ok());
  EXPECT_FALSE(SafetensorsWriter::create(directory.file("no/such/a"), {}).ok());
}

TEST(SafetensorsDeathTest, WriterChecksTheByteCount) {
  const test::TempDirectory directory;
  const std::vector<uint8_t> data(5);
  auto writer =
      SafetensorsWriter::create(directory.file("a.safetensors"), {{"t", DType::kU8, {4}}});
  ASSERT_TRUE(writer.ok());
  EXPECT_DEATH(static_cast<void>(writer->append(data)), "remaining");
  EXPECT_DEATH(static_cast<void>(writer->finish()), "remaining");
}

TEST(Safetensors, OpenNamesTheFile) {
  const auto missing = SafetensorsFile::open("/no/such.safetensors");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), Code::kNotFound);
  EXPECT_NE(missing.error().message().find("/no/such.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace cachalot::io
