// How ops see the rows of a step and the caches of its requests.
//
// A step is T packed rows of S sequences: the rows of sequence s are row_begin[s] ..
// row_begin[s + 1] - 1, with consecutive positions from start[s]. There is no padding.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

#ifdef __CUDACC__
#define CACHALOT_HOST_DEVICE __host__ __device__
#else
#define CACHALOT_HOST_DEVICE
#endif

namespace cachalot::ops {

// Fixed-size rows in pages: row i lies at pages[i / page_rows] + (i % page_rows) * row_bytes. The
// struct and the page table lie in the memory of the op's device. 64-bit offsets throughout.
struct PagedRows {
  uint8_t* const* pages = nullptr;
  int64_t page_rows = 1;
  int64_t row_bytes = 0;

  CACHALOT_HOST_DEVICE uint8_t* row(int64_t i) const {
    return pages[i / page_rows] + (i % page_rows) * row_bytes;
  }
};

// Row bookkeeping, in the memory of the op's device.
struct StepRows {
  int64_t rows = 0;       // T
  int64_t sequences = 0;  // S
  TensorView position;    // [T] i32: absolute position
  TensorView sequence;    // [T] i32: index of the row's sequence
  TensorView row_begin;   // [S + 1] i32
  TensorView start;       // [S] i32: position of the sequence's first row
  TensorView is_image;    // [T] u8: 1 for the rows of an image span
};

// The window rows that a layer's queries see. Positions >= start[s] are rows of this step
// (`fresh`); older ones lie in the sequence's ring at slot position % window. A step leaves the
// ring unchanged: commit() moves accepted rows into it, so a rejected draft needs no
// rollback.
struct WindowView {
  int64_t window = 0;  // W: a query at p sees positions max(floor, p - W + 1) .. p
  // A draft block, if not 0: every sequence has this many rows, and each of them sees the W
  // positions before the block and all rows of it.
  int64_t block = 0;
  uint8_t* const* rings = nullptr;  // [S] -> [W, row_bytes]
  TensorView fresh;                 // [T, row_bytes] u8
  TensorView floor;                 // [S] i32: first visible position (0 unless a replay clamps it)
};

// The window positions first .. last that a query sees.
struct WindowRange {
  int64_t first = 0;
  int64_t last = 0;
};

// For a query at position p of a sequence whose rows of this step begin at position `start`.
CACHALOT_HOST_DEVICE inline WindowRange window_range(
    int64_t window, int64_t block, int64_t floor, int64_t start, int64_t p) {
  const int64_t reach = block > 0 ? start - window : p - window + 1;
  const int64_t least = floor > 0 ? floor : 0;
  return {reach > least ? reach : least, block > 0 ? start + block - 1 : p};
}

// The groups that close in this step at one compression ratio, in row order. Group g of ratio r
// consists of the positions r e .. r e + r - 1, where e is its entry.
struct GroupRows {
  int64_t ratio = 0;
  int64_t groups = 0;   // G
  TensorView row;       // [G] i32: row of the group's last token
  TensorView sequence;  // [G] i32
  TensorView entry;     // [G] i32; -1: padding, stored nowhere
};

// One request's caches as the forward pass sees them. Pages, rings and open groups lie in the
// backend's memory, the page tables of `main` and `index` on the host. All of it belongs to whoever
// runs the model.
struct SourceView {
  PagedRows main;               // compressed rows, one per entry
  PagedRows index;              // index keys, one per entry
  int64_t page_count = 0;       // pages of each
  float* open_group = nullptr;  // ratio 2: [2, C] kv and gate of the unpaired token
};
struct SequenceView {
  int64_t length = 0;  // positions whose effects are in the caches
  // Per backbone layer, then per draft stage if there is a drafter: [W, window row bytes].
  std::vector<uint8_t*> rings;
  std::vector<SourceView> sources;  // per KV source layer
  // Engram classes of the last N - 1 positions, oldest first; -1: before the start, or an image.
  std::vector<int32_t> lookback;
};

}  // namespace cachalot::ops
