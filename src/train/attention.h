// Attention over window rows and selected entries, and what the selection learns from it.
//
// Letters: T rows, H heads, K head dim, W window, k selected entries per row, G entries of all
// samples of a batch. Keys are the values, too. Backward functions add to the gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace cachalot::train {

// The selected entries of every row, and the rows that selected an entry.
struct Selection {
  int64_t width = 0;           // k
  std::vector<int32_t> entry;  // [T, k] rows of the entry tensor [G, K], ascending; -1 behind
  std::vector<int32_t> begin;  // [G + 1] into use
  struct Use {
    int32_t row;
    int32_t slot;  // in [0, k)
  };
  std::vector<Use> use;  // by entry, then by row

  // Fills begin and use from entry.
  void index(int64_t entries);
};

template <class Real>
struct AttentionRows {
  int64_t rows = 0, heads = 0, dim = 0, window = 0;
  bool mutual = false;                 // a row sees all `window` rows of its sample, later ones too
  const int32_t* first_row = nullptr;  // [T] first row of the row's sample
  const Real* q = nullptr;             // [T, H K], rotated
  const Real* keys = nullptr;          // [T, K] window rows
  const Real* entries = nullptr;       // [G, K]; null in window-only layers
  const Selection* selection = nullptr;  // of the entries
  const Real* sink = nullptr;            // [H]

  // Probabilities per row and head: the window's keys in order, then the selected entries.
  int64_t slots() const { return window + (selection == nullptr ? 0 : selection->width); }
};

// o [T, H K], not rotated back; probabilities [T, H, slots] and those of the sink [T, H] are kept
// for the backward.
template <class Real>
void attend(ThreadPool* pool,
            const AttentionRows<Real>& args,
            Real* o,
            Real* probability,
            Real* sink_probability);

// `g` [T, H K] is the gradient of o. `score` [T, H, slots] is scratch. dkeys and dentries may
// belong to tensors that other layers read as well.
template <class Real>
void attend_backward(ThreadPool* pool,
                     const AttentionRows<Real>& args,
                     const Real* g,
                     const Real* probability,
                     const Real* sink_probability,
                     Real* score,
                     Real* dq,
                     Real* dkeys,
                     Real* dentries,
                     Real* dsink);

// How the heads of one row share their attention among `count` entries if all of them compete with
// the window and the sink: the sum over heads of the joint softmax, restricted to the entries and
// normalized. Added to `teacher` [count].
template <class Real>
void attention_share(const AttentionRows<Real>& args,
                     int64_t row,
                     const int32_t* entry,
                     int64_t count,
                     Real* teacher);

// Scores of an indexer for one row: sum_h w_h relu(q_h . key_j) * scale for `count` keys.
template <class Real>
struct IndexRow {
  int64_t heads = 0, dim = 0;
  const Real* q = nullptr;  // [HI, DI], rotated
  const Real* w = nullptr;  // [HI]
  Real scale = 0;
};
template <class Real>
void index_scores(const IndexRow<Real>& row, const Real* const* keys, int64_t count, Real* scores);
// Adds the gradients for dscore [count]; dkeys are the gradients of the keys' rows.
template <class Real>
void index_scores_backward(const IndexRow<Real>& row,
                           const Real* const* keys,
                           int64_t count,
                           const Real* dscore,
                           Real* dq,
                           Real* dw,
                           Real* const* dkeys);

}  // namespace cachalot::train
