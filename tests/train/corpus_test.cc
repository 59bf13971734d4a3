#include "train/corpus.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/file.h"
#include "base/format.h"
#include "io/safetensors.h"
#include "tests/support/temp_directory.h"
#include "text/byte_tokenizer.h"
#include "text/control_tokens.h"

namespace cachalot::train {
namespace {

class CorpusTest : public testing::Test {
 protected:
  CorpusTest()
      : tokenizer_(*text::Tokenizer::parse(text::byte_level_tokenizer_json(512), "test")),
        pool_(2) {}

  std::string write(const std::string& name, const std::string& content) {
    const std::string path = directory_.file(name);
    EXPECT_TRUE(write_file(path, content).ok());
    return path;
  }
  Status add(const std::string& path) {
    return corpus_.add(path, tokenizer_, {.bos = 0, .eos = 1, .vocab_size = 512}, pool_);
  }
  std::vector<int32_t> document(int64_t index) const {
    const auto tokens = corpus_.document(index);
    return {tokens.begin(), tokens.end()};
  }

  test::TempDirectory directory_;
  text::Tokenizer tokenizer_;
  ThreadPool pool_;
  Corpus corpus_;
};

TEST_F(CorpusTest, ReadsTextLinesAndShards) {
  ASSERT_TRUE(add(write("a.txt", "hi")).ok());
  ASSERT_TRUE(add(write("b.jsonl", "{\"text\": \"yo\"}\n{\"tokens\": [7, 8, 9]}\n\n")).ok());
  std::vector<int32_t> tokens = {5, 6, 4, 3};
  std::vector<int64_t> begin = {0, 2, 4};
  const std::vector<io::SafetensorsFile::Tensor> shard = {
      {"begin", TensorView(begin.data(), DType::kI64, {3})},
      {"tokens", TensorView(tokens.data(), DType::kI32, {4})}};
  ASSERT_TRUE(io::write_safetensors(directory_.file("c.safetensors"), shard).ok());
  ASSERT_TRUE(add(directory_.file("c.safetensors")).ok());
  ASSERT_EQ(corpus_.documents(), 5);
  std::vector<int32_t> hi = *tokenizer_.encode("hi");
  hi.insert(hi.begin(), 0);
  hi.push_back(1);
  EXPECT_EQ(document(0), hi);
  EXPECT_EQ(document(2), (std::vector<int32_t>{7, 8, 9}));
  EXPECT_EQ(document(4), (std::vector<int32_t>{4, 3}));
}

// The format does not align what it stores: here an odd header and an odd tensor come first.
TEST_F(CorpusTest, ReadsShardsAtEveryOffset) {
  const std::vector<int32_t> tokens = {5, 6, 4, 3, 11};
  const std::vector<int64_t> begin = {0, 2, 2, 5};
  for (size_t odd = 0; odd < 9; ++odd) {
    std::string header =
        fmt::format(R"({{"odd": {{"dtype": "U8", "shape": [{0}], "data_offsets": [0, {0}]}},)"
                    R"("tokens": {{"dtype": "I32", "shape": [5], "data_offsets": [{0}, {1}]}},)"
                    R"("begin": {{"dtype": "I64", "shape": [4], "data_offsets": [{1}, {2}]}}}})",
                    odd,
                    odd + 20,
                    odd + 52);
    header.append(8 - header.size() % 8, ' ');
    std::string file(8, '\0');
    file[0] = static_cast<char>(header.size() % 256);
    file[1] = static_cast<char>(header.size() / 256);
    file += header + std::string(odd, 'x');
    file.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof tokens[0]);
    file.append(reinterpret_cast<const char*>(begin.data()), begin.size() * sizeof begin[0]);
    Corpus corpus;
    const Status status = corpus.add(
        write("odd.safetensors", file), tokenizer_, {.eos = 1, .vocab_size = 512}, pool_);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(corpus.documents(), 3);
    EXPECT_EQ(corpus.length(1), 0);
    EXPECT_TRUE(std::ranges::equal(corpus.document(0), std::span(tokens).first(2)));
    EXPECT_TRUE(std::ranges::equal(corpus.document(2), std::span(tokens).subspan(2)));
  }
}

TEST_F(CorpusTest, RefusesShardsWhoseDocumentsAreNotAllOfTheirTokens) {
  std::vector<int32_t> tokens = {5, 6, 4, 512};
  const auto shard = [&](std::vector<int64_t> begin, int64_t count, DType dtype = DType::kI32) {
    const std::vector<io::SafetensorsFile::Tensor> tensors = {
        {"begin", TensorView(begin.data(), DType::kI64, {static_cast<int64_t>(begin.size())})},
        {"tokens", TensorView(tokens.data(), dtype, {count})}};
    EXPECT_TRUE(io::write_safetensors(directory_.file("s.safetensors"), tensors).ok());
    return add(directory_.file("s.safetensors"));
  };
  EXPECT_TRUE(shard({0}, 0).ok());  // an empty shard
  EXPECT_TRUE(shard({0, 0}, 0).ok());
  EXPECT_EQ(corpus_.documents(), 1);
  const std::vector<std::pair<Status, std::string>> faults = {
      {shard({}, 0), "they are I32 [0] and I64 [0]"},
      {shard({0, 3}, 3, DType::kU8), "they are U8 [3] and I64 [2]"},
      {shard({1, 3}, 3), "'begin' goes from 1 to 3; it must cover the 3 tokens"},
      {shard({0, 2}, 3), "'begin' goes from 0 to 2"},
      {shard({0}, 3), "'begin' goes from 0 to 0"},
      {shard({0, 2, 1, 3}, 3), "document 1 is [2, 1)"},
      {shard({0, 4, 3}, 3), "document 0 is [0, 4)"},
      {shard({0, -1, 3}, 3), "document 0 is [0, -1)"},
      {shard({0, 2, 4}, 4), "document 1: token 512"},
  };
  for (const auto& [status, text] : faults) {
    EXPECT_NE(status.message().find(text), std::string::npos) << text << ": " << status.message();
  }
}

TEST_F(CorpusTest, LearnsOnlyTheAnswerOfAChat) {
  ASSERT_TRUE(add(write("chat.jsonl",
                        "{\"messages\": [{\"role\": \"user\", \"content\": \"2+2\"}, "
                        "{\"role\": \"assistant\", \"content\": \"4\"}], "
                        "\"thinking\": {\"type\": \"disabled\"}}"))
                  .ok());
  const Sample sample = corpus_.sample(0, 0, corpus_.length(0));
  std::string learned;
  for (size_t i = 0; i < sample.tokens.size(); ++i) {
    if (sample.learn[i] != 0) {
      learned += std::string(tokenizer_.token_bytes(sample.tokens[i]));
    }
  }
  EXPECT_EQ(learned, "4" + std::string(text::kEosToken));
}

TEST_F(CorpusTest, TokensSayWhatIsLearned) {
  ASSERT_TRUE(add(write("marks.jsonl", "{\"tokens\": [7, 8, 9], \"learn\": [0, 0, 1]}\n")).ok());
  const Sample sample = corpus_.sample(0, 0, 3);
  EXPECT_EQ(std::vector<uint8_t>(sample.learn.begin(), sample.learn.end()),
            (std::vector<uint8_t>{0, 0, 1}));
  for (const char* marks : {"[0, 1]", "[0, 1, 2]", "1"}) {
    const Status status =
        add(write("bad.jsonl", fmt::format("{{\"tokens\": [7, 8, 9], \"learn\": {}}}\n", marks)));
    EXPECT_NE(status.message().find("'learn' must hold 3"), std::string::npos) << marks;
  }
}

TEST_F(CorpusTest, ErrorsNameTheLine) {
  const Status broken = add(write("bad.jsonl", "{\"text\": \"a\"}\n{\"txt\": 1}\n"));
  EXPECT_NE(broken.message().find("bad.jsonl:2"), std::string::npos) << broken.message();
  const Status outside = add(write("big.jsonl", "{\"tokens\": [512]}\n"));
  EXPECT_NE(outside.message().find("512"), std::string::npos) << outside.message();
  for (const char* id : {"4294967301", "18446744073709551615", "-1", "1.5", "\"7\""}) {
    const Status wide = add(write("wide.jsonl", fmt::format("{{\"tokens\": [1, {}]}}\n", id)));
    EXPECT_NE(wide.message().find("wide.jsonl:1: tokens[1]"), std::string::npos) << wide.message();
  }
  const Status deep =
      add(write("deep.jsonl", "{\"messages\": " + std::string(2'000'000, '[') + "\n"));
  EXPECT_NE(deep.message().find("deep.jsonl:1"), std::string::npos) << deep.message();
  EXPECT_TRUE(add(write("blank.jsonl", "{\"text\": \"a\"}\n \t\n")).ok());
  EXPECT_FALSE(add(directory_.file("absent.txt")).ok());
  const Status image =
      add(write("image.jsonl",
                R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": )"
                R"({"url": "data:image/png;base64,AA"}}]}, )"
                R"({"role": "assistant", "content": "4"}]})"));
  EXPECT_NE(image.message().find("image.jsonl:1: messages[0].content[0]"), std::string::npos)
      << image.message();
}

TEST_F(CorpusTest, EpochsCoverEveryTokenOnceInAnOrderOfTheirOwn) {
  std::string lines;
  for (int i = 0; i < 60; ++i) {
    lines += "{\"text\": \"" + std::string(static_cast<size_t>(i * 3 % 97), 'q') + "\"}\n";
  }
  ASSERT_TRUE(add(write("d.jsonl", lines)).ok());
  const auto plan = plan_epoch(corpus_, 1, 0, 32, 64);
  std::set<std::pair<int64_t, int64_t>> seen;
  int64_t rows = 0, full = 0;
  for (const auto& batch : plan) {
    int64_t size = 0;
    for (const Piece& piece : batch) {
      EXPECT_LE(piece.length, 32);
      EXPECT_TRUE(seen.emplace(piece.document, piece.begin).second);
      size += piece.length;
    }
    EXPECT_LE(size, 64);
    rows += size;
    full += size > 60;
  }
  int64_t want = 0;
  for (int64_t d = 0; d < corpus_.documents(); ++d) {
    // A last piece of one token predicts nothing.
    want += corpus_.length(d) - (corpus_.length(d) % 32 == 1 ? 1 : 0);
  }
  EXPECT_EQ(rows, want);
  EXPECT_GE(full * 10, static_cast<int64_t>(plan.size()) * 9);
  const auto same = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
      return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](const Piece& p, const Piece& q) {
        return p.document == q.document && p.begin == q.begin && p.length == q.length;
      });
    });
  };
  EXPECT_TRUE(same(plan, plan_epoch(corpus_, 1, 0, 32, 64)));
  EXPECT_FALSE(same(plan, plan_epoch(corpus_, 1, 1, 32, 64)));
  EXPECT_FALSE(same(plan, plan_epoch(corpus_, 2, 0, 32, 64)));
}

TEST(Batch, TargetsStayInsideTheirSample) {
  const std::vector<int32_t> a = {3, 4, 5}, b = {6, 7};
  const std::vector<uint8_t> learn = {1, 0, 1};
  const std::vector<Sample> samples = {{a, learn}, {b, {}}};
  const Batch batch = make_batch(samples);
  EXPECT_EQ(batch.token, (std::vector<int32_t>{3, 4, 5, 6, 7}));
  EXPECT_EQ(batch.target, (std::vector<int32_t>{-1, 5, -1, 7, -1}));
  EXPECT_EQ(batch.position, (std::vector<int32_t>{0, 1, 2, 0, 1}));
  EXPECT_EQ(batch.first_row, (std::vector<int32_t>{0, 0, 0, 3, 3}));
  EXPECT_EQ(batch.sample_begin, (std::vector<int32_t>{0, 3, 5}));
  EXPECT_EQ(batch.targets, 2);
}

}  // namespace
}  // namespace cachalot::train
