// The quality of a model, and of its drafter, on text.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "text/tokenizer.h"
#include "train/corpus.h"
#include "train/draft_calibration.h"
#include "train/parameters.h"
#include "train/train_exec.h"

namespace cachalot::train {

// Which part of a corpus is read, and how.
struct EvaluationText {
  int64_t sequence = 512;       // longest sample
  int64_t micro_tokens = 1024;  // tokens per forward
  int64_t most = 0;             // about as many tokens: a fixed random part
};

struct Evaluation {
  double nats = 0;  // over all targets
  int64_t targets = 0;
  int64_t bytes = 0;  // that the targets stand for
  int64_t right = 0;  // targets that were the most likely token
  double loss() const { return nats / static_cast<double>(targets); }
  double bits_per_byte() const;
};

// Cross-entropy. `options` gives the numerics; gradients are not computed.
Evaluation evaluate(ParameterSet<float>& parameters,
                    ForwardOptions options,
                    const Corpus& corpus,
                    const text::Tokenizer& tokenizer,
                    const EvaluationText& text,
                    ThreadPool& pool);

struct DraftEvaluation {
  double loss = 0;                   // weighted, per weight
  std::vector<double> acceptance;    // per position, given that all before it were accepted
  double length = 0;                 // tokens per verification, the target's own included
  std::vector<DraftSample> samples;  // blocks of which every row counts
};

// The drafter along the text: acceptance is the expected one, sum of min(p_draft, p_target).
DraftEvaluation evaluate_drafter(ParameterSet<float>& parameters,
                                 ForwardOptions options,
                                 const Corpus& corpus,
                                 const EvaluationText& text,
                                 ThreadPool& pool);

}  // namespace cachalot::train
