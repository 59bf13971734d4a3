#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <queue>

#include "base/check.h"

namespace cachalot::text::internal {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

// Up to this length a scan for the lowest rank is faster than a heap.
constexpr size_t kShortPiece = 32;

uint64_t mix(uint64_t x) {
  x *= 0x9E3779B97F4A7C15;
  return x ^ (x >> 32);
}

uint64_t hash_bytes(std::string_view bytes) {
  uint64_t h = bytes.size();
  while (bytes.size() >= 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), 8);
    h = mix(h ^ word);
    bytes.remove_prefix(8);
  }
  uint64_t word = 0;
  std::memcpy(&word, bytes.data(), bytes.size());
  return mix(mix(h ^ word));
}

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

Bpe::Bpe(const int32_t* byte_ids, size_t expected_merges) {
  std::copy(byte_ids, byte_ids + 256, byte_ids_);
  table_.resize(std::bit_ceil(2 * expected_merges + 1));
  mask_ = table_.size() - 1;
}

void Bpe::add_merge(int32_t left, int32_t right, int32_t rank, int32_t merged) {
  const uint64_t pair = pair_of(left, right);
  size_t slot = mix(pair) & mask_;
  while (table_[slot].pair != kNoPair && table_[slot].pair != pair) {
    slot = (slot + 1) & mask_;
  }
  table_[slot] = {pair, rank, merged};
}

const Bpe::Merge* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (size_t slot = mix(pair) & mask_;; slot = (slot + 1) & mask_) {
    if (table_[slot].pair == pair) {
      return &table_[slot];
    }
    if (table_[slot].pair == kNoPair) {
      return nullptr;
    }
  }
}

void Bpe::index_tokens(const TokenBytes* tokens, const std::vector<int32_t>& ids) {
  tokens_ = tokens;
  whole_.assign(std::bit_ceil(2 * ids.size() + 1), -1);
  whole_mask_ = whole_.size() - 1;
  longest_token_ = 0;
  for (const int32_t id : ids) {
    longest_token_ = std::max(longest_token_, (*tokens)[id].size());
    size_t slot = hash_bytes((*tokens)[id]) & whole_mask_;
    while (whole_[slot] >= 0) {
      slot = (slot + 1) & whole_mask_;
    }
    whole_[slot] = id;
  }
  encodes_to_itself_ =
      std::make_unique<std::atomic<uint8_t>[]>(static_cast<size_t>(tokens->size()));
}

int32_t Bpe::find_token(std::string_view bytes) const {
  if (bytes.size() > longest_token_) {
    return -1;
  }
  for (size_t slot = hash_bytes(bytes) & whole_mask_; whole_[slot] >= 0;
       slot = (slot + 1) & whole_mask_) {
    if ((*tokens_)[whole_[slot]] == bytes) {
      return whole_[slot];
    }
  }
  return -1;
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>* ids) const {
  if (piece.empty()) {
    return;
  }
  if (piece.size() == 1) {
    ids->push_back(byte_ids_[static_cast<uint8_t>(piece[0])]);
    return;
  }
  const int32_t whole = find_token(piece);
  if (whole >= 0 && encodes_to_itself_[static_cast<size_t>(whole)] == kItself) {
    ids->push_back(whole);
    return;
  }
  const size_t start = ids->size();
  if (piece.size() <= kShortPiece) {
    merge_short(piece, ids);
  } else {
    merge_long(piece, ids);
  }
  if (whole >= 0) {
    const bool itself = ids->size() == start + 1 && ids->back() == whole;
    encodes_to_itself_[static_cast<size_t>(whole)] = itself ? kItself : kOther;
  }
}

void Bpe::merge_short(std::string_view piece, std::vector<int32_t>* ids) const {
  int32_t symbol[kShortPiece];
  int32_t rank[kShortPiece];  // of the pair that starts at this symbol
  int32_t merged[kShortPiece];
  size_t count = piece.size();
  const auto update = [&](size_t i) {
    const Merge* merge = i + 1 < count ? find(symbol[i], symbol[i + 1]) : nullptr;
    rank[i] = merge != nullptr ? merge->rank : kNoRank;
    merged[i] = merge != nullptr ? merge->merged : -1;
  };
  for (size_t i = 0; i < count; ++i) {
    symbol[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
  }
  for (size_t i = 0; i < count; ++i) {
    update(i);
  }
  while (count > 1) {
    const size_t best = static_cast<size_t>(std::min_element(rank, rank + count) - rank);
    if (rank[best] == kNoRank) {
      break;
    }
    symbol[best] = merged[best];
    for (size_t i = best + 1; i + 1 < count; ++i) {
      symbol[i] = symbol[i + 1];
      rank[i] = rank[i + 1];
      merged[i] = merged[i + 1];
    }
    --count;
    update(best);
    if (best > 0) {
      update(best - 1);
    }
  }
  ids->insert(ids->end(), symbol, symbol + count);
}

void Bpe::merge_long(std::string_view piece, std::vector<int32_t>* ids) const {
  struct Symbol {
    int32_t id;
    int32_t rank;  // of the pair with the next symbol, or kNoRank
    int32_t merged;
    uint32_t previous;
    uint32_t next;
  };
  constexpr uint32_t kEnd = std::numeric_limits<uint32_t>::max();
  CACHALOT_CHECK(piece.size() < kEnd, piece.size());
  const auto count = static_cast<uint32_t>(piece.size());
  std::vector<Symbol> symbols(count);
  // Rank in the upper half, position in the lower: the smallest is the leftmost of the lowest rank.
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue;

  const auto update = [&](uint32_t i) {
    Symbol& s = symbols[i];
    const Merge* merge = s.next != kEnd ? find(s.id, symbols[s.next].id) : nullptr;
    s.rank = merge != nullptr ? merge->rank : kNoRank;
    if (merge != nullptr) {
      s.merged = merge->merged;
      queue.push(pair_of(merge->rank, static_cast<int32_t>(i)));
    }
  };
  for (uint32_t i = 0; i < count; ++i) {
    symbols[i] = {byte_ids_[static_cast<uint8_t>(piece[i])],
                  kNoRank,
                  -1,
                  i == 0 ? kEnd : i - 1,
                  i + 1 == count ? kEnd : i + 1};
  }
  for (uint32_t i = 0; i < count; ++i) {
    update(i);
  }
  while (!queue.empty()) {
    const uint64_t top = queue.top();
    queue.pop();
    const auto i = static_cast<uint32_t>(top);
    Symbol& s = symbols[i];
    // An entry is stale when its pair has changed since: ranks are unique to pairs.
    if (s.rank == kNoRank || static_cast<uint32_t>(s.rank) != top >> 32) {
      continue;
    }
    Symbol& absorbed = symbols[s.next];
    s.id = s.merged;
    s.next = absorbed.next;
    absorbed.rank = kNoRank;
    if (s.next != kEnd) {
      symbols[s.next].previous = i;
    }
    update(i);
    if (s.previous != kEnd) {
      update(s.previous);
    }
  }
  for (uint32_t i = 0; i != kEnd; i = symbols[i].next) {
    ids->push_back(symbols[i].id);
  }
}

}  // namespace cachalot::text::internal
