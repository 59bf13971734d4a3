// The token map of Engram: which tokens count as the same word.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"

namespace cachalot::text {

// The class of each token id, numbered by first appearance. Two tokens share a class if their texts
// agree after NFKC, NFD, removal of the marks (Mn, Mc, Me), lower-casing character by character and
// collapsing of white space; a token that is not UTF-8 by itself is compared by its spelling. The
// rule is the official reference's (inference/engram.py). The real vocabulary has 99092 classes in
// 129280 ids. A configuration with as many classes as ids means the identity map instead.
// Errors: kInternal when the Unicode library fails.
Result<std::vector<int32_t>> token_classes(const Tokenizer& tokenizer);

// The map of a model with `vocab_size` ids and `classes` classes: the identity if every token is
// its own class, else token_classes() of the tokenizer, which must then have exactly `classes`.
Result<std::vector<int32_t>> token_class_map(const Tokenizer& tokenizer,
                                             int64_t vocab_size,
                                             int64_t classes);

}  // namespace cachalot::text
