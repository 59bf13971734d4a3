// The constants of the Engram hash: table sizes, column offsets and multipliers.
//
// They are not stored in a checkpoint: they follow from engram_vocab_size, the layer ids and the
// class count (official reference, engram.py), so they are recomputed at every load.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace cachalot::model {

// N = engram_max_ngram_size, columns = (N - 1) * engram_n_heads, order-major.
struct EngramConstants {
  std::vector<int64_t> multiplier;  // [N]: one per look-back distance, odd
  std::vector<int64_t> prime;       // [N - 1, heads]: rows of each column's table
  std::vector<int64_t> offset;      // [N - 1, heads]: first row of each column
  int64_t rows = 0;                 // sum of the primes = engram_num_embeddings
};

// One per Engram layer, in the order of engram_layer_ids. The engram fields must be within the
// bounds that validate() checks (engram_num_embeddings is not read).
std::vector<EngramConstants> engram_constants(const ModelConfig& config);

}  // namespace cachalot::model
