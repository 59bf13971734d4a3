// A small tokenizer for synthetic models.
#pragma once

#include <cstdint>
#include <string>

namespace cachalot::text {

// The smallest vocabulary: BOS, EOS, pad and the 256 bytes.
inline constexpr int32_t kMinByteVocab = 259;

// The text of a tokenizer.json with exactly `vocab_size` tokens (at least kMinByteVocab). It cuts
// text as the released tokenizer does and is valid for the Python tokenizers library too. Layout:
//   0, 1, 2        BOS, EOS, pad
//   3 .. 258       the bytes in increasing order
//   259 ..         merges of common English byte pairs, as many as fit beside the control tokens
//   then           control tokens in the order of kControlTokens, as many as fit
//   the rest       placeholder control tokens
// Same size, same text.
std::string byte_level_tokenizer_json(int32_t vocab_size);

}  // namespace cachalot::text
