// Training text as tokens, and the order in which a run sees it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "text/tokenizer.h"
#include "train/batch.h"

namespace cachalot::train {

// The control tokens around a document.
struct DocumentTokens {
  int32_t bos = 0;
  int32_t eos = 1;
  int64_t vocab_size = 0;
};

class Corpus {
 public:
  // Adds the documents of files or folders (all their files, by name). By its name a file is
  //   *.jsonl        one document per line: {"text": ...}, {"tokens": [...]} with an optional
  //                  "learn" (1 or 0 per token: does its prediction count?), or a chat request with
  //                  "messages", whose last message, the assistant's, is what is learned;
  //   *.safetensors  pre-tokenized: "tokens" I32 [N] and "begin" I64 [documents + 1], which
  //                  ascends from 0 to N: every token belongs to a document;
  //   anything else  one document of plain text.
  // Text becomes BOS, its tokens, EOS; a chat is rendered as the server would. Errors name the file
  // and the line or document.
  Status add(const std::string& path,
             const text::Tokenizer& tokenizer,
             const DocumentTokens& tokens,
             ThreadPool& pool);

  int64_t documents() const { return static_cast<int64_t>(begin_.size()) - 1; }
  int64_t tokens() const { return begin_.back(); }
  // How much of what it holds, with a digest that tells texts apart by accident, not by intent.
  std::string summary() const;
  std::span<const int32_t> document(int64_t index) const {
    return std::span(tokens_).subspan(static_cast<size_t>(begin_[static_cast<size_t>(index)]),
                                      static_cast<size_t>(length(index)));
  }
  int64_t length(int64_t index) const {
    return begin_[static_cast<size_t>(index) + 1] - begin_[static_cast<size_t>(index)];
  }
  // Tokens [begin, begin + length) of a document.
  Sample sample(int64_t document, int64_t begin, int64_t length) const;

 private:
  struct Document {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> learn;
  };
  Status add_lines(const std::string& path,
                   const text::Tokenizer& tokenizer,
                   const DocumentTokens& control,
                   ThreadPool& pool);
  Status add_shard(const std::string& path, const DocumentTokens& control);
  Status append(Document document, const DocumentTokens& control, const std::string& source);

  std::vector<int32_t> tokens_;
  std::vector<uint8_t> learn_;
  std::vector<int64_t> begin_ = {0};
};

// A part of a document in a batch.
struct Piece {
  int64_t document = 0;
  int64_t begin = 0;
  int64_t length = 0;
};

// One pass over the corpus as batches of at most `rows` tokens, in an order that depends on the
// arguments alone. Documents are cut at multiples of `sequence` tokens (at most `rows`), pieces are
// shuffled and packed best-fit. A piece of one token predicts nothing and is left out.
std::vector<std::vector<Piece>> plan_epoch(
    const Corpus& corpus, uint64_t seed, int64_t epoch, int64_t sequence, int64_t rows);

Batch make_batch(const Corpus& corpus, std::span<const Piece> pieces);

}  // namespace cachalot::train
