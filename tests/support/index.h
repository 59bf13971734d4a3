// Queries, weights and keys of an index selection.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tests/support/step.h"

namespace cachalot::test {

struct IndexInput {
  // `entries` rows of index keys per sequence, `hi` heads of `di` values.
  IndexInput(Random& random,
             std::vector<SequenceSpec> specs,
             DType act,
             int64_t hi,
             int64_t di,
             int64_t entries,
             int64_t entry_ratio,
             int64_t page_rows = 5)
      : step(std::move(specs)),
        ratio(entry_ratio),
        dim(di),
        q(random.activations(act, {step.count(), hi * di})),
        w(random.normals(act, {step.count(), hi})),
        rope(rope_rows(step, di / 4)),
        pages(random,
              static_cast<int64_t>(step.specs().size()),
              entries,
              page_rows,
              quant::index_row_bytes(di)) {
    // Only the entries that the last row of a sequence sees exist.
    for (size_t s = 0; s < step.specs().size(); ++s) {
      const int64_t end = step.specs()[s].start + step.specs()[s].rows;
      for (int64_t e = 0; e < end / ratio; ++e) {
        write_key(random, s, e);
      }
    }
  }

  void write_key(Random& random, size_t s, int64_t e) {
    const Buffer key = random.normals(DType::kF32, {dim}, 0.5);
    quant::index_row_encode(key.floats().data(), dim, pages.views()[s].row(e));
  }

  TestStep step;
  int64_t ratio, dim;
  Buffer q, w, rope;
  Pages pages;
};

struct IndexOutput {
  Buffer selected, candidates;
};

struct IndexCase {
  std::vector<SequenceSpec> specs;
  int64_t hi, di, ratio, k;
};

inline std::vector<IndexCase> index_cases() {
  return {
      {{{.start = 0, .rows = 1}}, 2, 32, 2, 4},
      {{{.start = 0, .rows = 40}}, 2, 32, 1, 4},
      {{{.start = 90, .rows = 9}, {.start = 0, .rows = 3}, {.start = 200, .rows = 1}}, 4, 64, 2, 8},
      {{{.start = 300, .rows = 20}}, 32, 128, 1, 16},
      {{{.start = 500, .rows = 1}, {.start = 77, .rows = 1}}, 9, 32, 1, 5},
  };
}

}  // namespace cachalot::test
