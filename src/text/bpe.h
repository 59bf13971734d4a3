// Byte pair encoding of one piece of text.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot::text::internal {

// The token strings as bytes, by id, in one block of memory.
class TokenBytes {
 public:
  void append(std::string_view bytes) {
    bytes_ += bytes;
    offset_.push_back(bytes_.size());
  }
  int32_t size() const { return static_cast<int32_t>(offset_.size()) - 1; }
  std::string_view operator[](int32_t id) const {
    const auto i = static_cast<size_t>(id);
    return std::string_view(bytes_).substr(offset_[i], offset_[i + 1] - offset_[i]);
  }

 private:
  std::string bytes_;
  std::vector<size_t> offset_ = {0};
};

// The merge table. Encoding starts from single bytes and always joins the neighbouring pair of the
// lowest rank, the leftmost one among equals, until no pair is in the table.
class Bpe {
 public:
  // `byte_ids` are the 256 ids of single bytes.
  explicit Bpe(const int32_t* byte_ids, size_t expected_merges);

  // A pair added twice keeps its later rank.
  void add_merge(int32_t left, int32_t right, int32_t rank, int32_t merged);

  // Enables a short cut for pieces that are one token as a whole, and find_token. `ids` are the
  // tokens that text can become; no two may have the same bytes. `tokens` must outlive this object.
  void index_tokens(const TokenBytes* tokens, const std::vector<int32_t>& ids);

  // The indexed token with exactly these bytes, or -1.
  int32_t find_token(std::string_view bytes) const;

  // Appends the tokens of `piece`: O(n log n) in its length. Thread-safe.
  void encode(std::string_view piece, std::vector<int32_t>* ids) const;

 private:
  struct Merge {
    uint64_t pair = kNoPair;
    int32_t rank = 0;
    int32_t merged = 0;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};

  const Merge* find(int32_t left, int32_t right) const;
  void merge_short(std::string_view piece, std::vector<int32_t>* ids) const;
  void merge_long(std::string_view piece, std::vector<int32_t>* ids) const;

  int32_t byte_ids_[256];
  std::vector<Merge> table_;  // open addressing; the size is a power of two
  size_t mask_ = 0;

  const TokenBytes* tokens_ = nullptr;
  size_t longest_token_ = 0;
  std::vector<int32_t> whole_;  // open addressing over token bytes; -1 is free
  size_t whole_mask_ = 0;
  // Whether a token's own bytes encode to that token (most do): found out on first use.
  enum : uint8_t { kUnknown, kItself, kOther };
  std::unique_ptr<std::atomic<uint8_t>[]> encodes_to_itself_;
};

}  // namespace cachalot::text::internal
