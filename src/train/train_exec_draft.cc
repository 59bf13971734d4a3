#include "train/train_exec.h"

#include "train/draft.h"
#include "train/norm.h"
#include "train/parallel.h"
#include "train/train_exec_parts.h"

namespace cachalot::train {

using model::LayerSpec;
using model::Published;

template <class Real>
Var<Real> TrainExec<Real>::tap(Var taps, const LayerSpec& layer, const StreamVar& stream) {
  const StreamShape s = stream_shape();
  if (taps.empty()) {
    taps = tape_.make(s.rows,
                      static_cast<int64_t>(model_.config.dspark_target_layer_ids.size()) * s.width);
  }
  StreamVar expanded = stream;
  hc_expand(expanded);
  const Real* x = expanded.x.value();
  const Real share = Real{1} / static_cast<Real>(s.streams);
  parallel_for(pool_, s.rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      Real* out = taps.value() + t * taps.width() + layer.tap * s.width;
      std::fill_n(out, s.width, Real{0});
      for (int64_t j = 0; j < s.streams; ++j) {
        axpy(share, x + (t * s.streams + j) * s.width, s.width, out);
      }
    }
  });
  return taps;
}

template <class Real>
void TrainExec<Real>::context_finish(const LayerSpec& stage, Var kv, const TensorView& kv_norm) {
  contexts_[stage.stage] =
      rotate_rows(norm_rows(kv, kv_norm),
                  kv.width(),
                  {.table = window_rope_.data(),
                   .round = options_.quant.window ? kRoundWindow<Real> : nullptr});
}

template <class Real>
void TrainExec<Real>::finish_target(const StreamVar& stream) {
  hidden_ = norm_rows(hc_collapse(stream), model_.weights.norm);
  // Loads and losses are those of the drafter.
  report_ = {};
  recording_ = options_.gradients;
}

template <class Real>
void TrainExec<Real>::enter_blocks() {
  batch_ = &options_.blocks->rows;
  block_rope_ = rope_rows<Real>(batch_->position, model_.window_frequency);
}

template <class Real>
void TrainExec<Real>::finish_draft(const model::Draft<Var>& draft) {
  const model::DraftWeights& w = model_.weights.draft;
  Parameter<Real>&embed = parameters_.of(w.markov_embed), &head = parameters_.of(w.markov_head),
  &confidence = parameters_.of(w.confidence);
  DraftHeadGradients<Real> gradients{.scale = options_.loss_scale};
  if (recording_) {
    // Computed beside the loss, as for the head of the backbone.
    gradients.dbase = tape_.grad(draft.base);
    gradients.dx = tape_.grad(draft.hidden);
    gradients.dmarkov_embed = gradient_of(embed);
    gradients.dmarkov_head = gradient_of(head);
    gradients.dconfidence = gradient_of(confidence);
  }
  report_.draft = draft_loss(pool_,
                             options_.draft,
                             DraftHeadRows<Real>{.width = draft.hidden.width(),
                                                 .vocab = draft.base.width(),
                                                 .rank = w.markov_embed.in,
                                                 .blocks = options_.blocks,
                                                 .base = draft.base.value(),
                                                 .x = draft.hidden.value(),
                                                 .target = hidden_.value(),
                                                 .head = parameters_.of(model_.weights.head).used(),
                                                 .markov_embed = embed.used(),
                                                 .markov_head = head.used(),
                                                 .confidence = confidence.used()},
                             gradients);
  for (const DraftRow& row : report_.draft) {
    report_.loss_sum +=
        options_.blocks->weight[static_cast<size_t>(row.row)] * row_loss(options_.draft, row);
  }
}

#define CACHALOT_INSTANTIATE(Real)                                       \
  template Var<Real> TrainExec<Real>::tap(                               \
      Var taps, const LayerSpec& layer, const StreamVar& stream);        \
  template void TrainExec<Real>::context_finish(                         \
      const LayerSpec& stage, Var kv, const TensorView& kv_norm);        \
  template void TrainExec<Real>::finish_target(const StreamVar& stream); \
  template void TrainExec<Real>::enter_blocks();                         \
  template void TrainExec<Real>::finish_draft(const model::Draft<Var>& draft);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
