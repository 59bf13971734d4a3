// The rows and the loss of the drafter's stage (DSpark).
//
// A block stands behind each of some anchors of a batch: the anchor's token, then noise. Row k of a
// block predicts the token k + 1 places behind the anchor; its teacher is the target's distribution
// k places behind the anchor. All rows of a block see the window of context before the anchor and
// each other, nothing else.
//
// Letters: N rows of all blocks, T rows of the batch, V vocabulary, D hidden, R Markov rank.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "model/config.h"
#include "train/attention.h"
#include "train/batch.h"

namespace cachalot::train {

struct DraftObjective {
  int64_t anchors = 64;  // most per sample
  // Row k weighs exp(-k / decay); 0: the block size.
  double decay = 0;
  // Weights of the cross-entropy of the text, of |p_draft - p_target|, of the confidence.
  double cross_entropy = 0.1;
  double distance = 0.9;
  double confidence = 1.0;
};

struct DraftBlocks {
  int64_t block = 0;              // rows per block
  Batch rows;                     // a block is a sample; positions are those in the text
  std::vector<int32_t> teacher;   // [N] rows of the batch
  std::vector<int32_t> previous;  // [N] the token before the one that the row predicts
  std::vector<double> weight;     // [N]; 0: not counted
  double weight_sum = 0;
  Selection context;  // of the batch's rows; entries ascend
};

// Anchors are drawn without replacement among the rows whose next token counts; a row of a block
// counts while it and all before it have a target in the sample.
DraftBlocks make_draft_blocks(const model::ModelConfig& config,
                              const DraftObjective& objective,
                              const Batch& batch,
                              uint64_t seed);

// What one counted row of a block gave.
struct DraftRow {
  int64_t row = -1;
  double cross_entropy = 0;  // of the text, in nats
  double distance = 0;       // |p_draft - p_target|, in [0, 2]
  double acceptance = 0;     // sum of min(p_draft, p_target)
  double confidence = 0;     // logit of the predicted acceptance
  double confidence_loss = 0;
};

template <class Real>
struct DraftHeadRows {
  int64_t width = 0, vocab = 0, rank = 0;
  const DraftBlocks* blocks = nullptr;
  const Real* base = nullptr;          // [N, V] logits before the Markov correction
  const Real* x = nullptr;             // [N, D] collapsed streams, not normalized
  const Real* target = nullptr;        // [T, D] the target's last hidden state, normalized
  const Real* head = nullptr;          // [V, D], the target's
  const Real* markov_embed = nullptr;  // [V, R]
  const Real* markov_head = nullptr;   // [V, R]
  const Real* confidence = nullptr;    // [D + R]
};

// Gradients of scale * sum of weight * loss, added. dbase null: none is wanted.
template <class Real>
struct DraftHeadGradients {
  double scale = 1;
  Real* dbase = nullptr;
  Real* dx = nullptr;
  Real* dmarkov_embed = nullptr;
  Real* dmarkov_head = nullptr;
  Real* dconfidence = nullptr;
};

// Per counted row, in order. The acceptance that the confidence learns is detached.
template <class Real>
std::vector<DraftRow> draft_loss(ThreadPool* pool,
                                 const DraftObjective& objective,
                                 const DraftHeadRows<Real>& args,
                                 const DraftHeadGradients<Real>& gradients);

// The loss of a row before its weight.
double row_loss(const DraftObjective& objective, const DraftRow& row);

}  // namespace cachalot::train
