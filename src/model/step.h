// One step: new tokens of several requests through the whole model.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "model/model.h"
#include "model/observer.h"
#include "ops/context.h"
#include "ops/kv.h"

namespace cachalot::model {

enum class Precision : uint8_t {
  kOfficial,  // BF16 activations, FP8 linear inputs
  kF32,       // neither; the cache formats stay
};

inline DType activation_dtype(Precision precision) {
  return precision == Precision::kOfficial ? DType::kBF16 : DType::kF32;
}

// What a bounded replay leaves out of a request's past (docs/caching.md). It is part of the
// request: the same in every step.
struct Replay {
  // The encoder's windows see nothing below; positions below were not run.
  int64_t encoder_from = 0;
  // The decoder layers run from here on, and their windows see nothing below. Rows below have no
  // logits.
  int64_t decoder_from = 0;
  // Compressed rows whose group ends before this position are in the caches and stay as they are.
  int64_t stored = 0;
};

// One request's share of a step.
struct StepSequence {
  ops::SequenceView* view = nullptr;  // rows from view->length on are new
  std::span<const int32_t> tokens;    // ids in [0, V), at least one
  std::span<const uint8_t> image;     // 1: row of an image span; empty: none are
  // What the rows of image spans are embedded as instead of their tokens: the same part of what
  // VisionTower::encode() gave, [count of image rows, D] in the activation dtype, host memory. A
  // span may be cut across steps anywhere.
  TensorView image_rows;
  bool all_logits = false;  // logits of every row, else of the last one only
  bool no_logits = false;   // none (a prefill chunk before the last)
  Replay replay;
  // Of a draft: the steps that ran the positions below left the draft context alone.
  int64_t draft_from = 0;
};

// Engram classes of the last N - 1 of `tokens`, as SequenceView::lookback has them; empty without
// Engram. `image` is as in StepSequence.
std::vector<int32_t> engram_lookback(const Model& model,
                                     std::span<const int32_t> tokens,
                                     std::span<const uint8_t> image = {});

// The next token of every sequence of a draft, as the drafter sees it.
struct DraftLogits {
  TensorView logits;      // [S, V] f32, in the backend's memory
  TensorView confidence;  // [S] f32, in host memory: sigmoid of it is how likely the target keeps
                          // the token drawn
};

// What ops::top_logits finds, in host memory.
struct TopLogits {
  TensorView value;  // [N, k] f32
  TensorView id;     // [N, k] i32
  TensorView mass;   // [N, 2] f32
};

// Runs steps over one execution context. Not thread-safe; one step at a time.
//
// Where the model has a drafter and the caches hold its rings, a step also extends the draft
// context, unless it is told to leave it alone. A round of speculation is then
//
//   draft(anchors), next_draft(anchors), next_draft(first drafts), ...   up to dspark_block_size
//   run(anchor and drafts of each sequence, all_logits), commit(anchor and the accepted drafts)
class StepRunner {
 public:
  // `context` names the backend; scratch is made here. On a device the memory of a step is bounded
  // by kDeviceStepBytes. Errors: no device, no memory.
  static Result<std::unique_ptr<StepRunner>> create(const Model& model,
                                                    ops::OpContext context,
                                                    Precision precision);
  ~StepRunner();

  // Runs the step and leaves every sequence's view as it was, except for compressed rows behind
  // `length`, which the next step may overwrite. Returns the logits [N, V] f32, in sequence and row
  // order, in the backend's memory; they stay valid until the next run() or draft(), and a device
  // may still be at work on them. Tokens outside of the vocabulary are an error. Without
  // `draft_context` commit() leaves the drafter's rings as they are.
  Result<TensorView> run(std::span<const StepSequence> sequences,
                         Observer* observer = nullptr,
                         bool draft_context = true);

  // Makes the first accepted[s] rows of the last step part of sequence s: window rings, open
  // groups, look-back and length. Fewer than were run: the rest never happened.
  Status commit(std::span<const int32_t> accepted);

  // Runs a draft block behind every sequence: `tokens` is its anchor alone, the newest token, which
  // the target has not run yet. Changes no cache; ends the last step (commit first). The observer
  // sees the tensors of the block.
  Status draft(std::span<const StepSequence> sequences, Observer* observer = nullptr);

  // The next position's logits of the last draft(), given the token before it of every sequence:
  // the anchors first, then what was drawn. At most dspark_block_size times; valid until the next
  // call of this member, run() or draft().
  Result<DraftLogits> next_draft(std::span<const int32_t> previous);

  // The k best of rows of logits that run() or next_draft() gave, and their masses at temperature 1
  // and at `temperature` [N]. Waits for the device; valid until the next call of this member, run()
  // or draft().
  Result<TopLogits> top_logits(const TensorView& logits,
                               int64_t k,
                               std::span<const float> temperature);
  // Such rows in host memory, valid until the next call of this member, run() or draft().
  Result<TensorView> on_host(const TensorView& logits);

  // Kernels that the last step or draft launched as a graph; 0 if it was run op by op.
  int64_t launches() const;

  // Times the ops of the steps to come; null ends that.
  void set_timer(ops::OpTimer* timer);

 private:
  struct State;
  explicit StepRunner(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace cachalot::model
