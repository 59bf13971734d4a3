// The architecture, written once.
//
// A forward pass is a template over an execution policy E. InferExec (infer_exec.h) runs each op
// over the caches of a step; TrainExec (train/train_exec.h) records the same calls on a tape.
// Nothing here knows which. detach() ends a gradient: the indexer learns from its own objective and
// must not move what it reads. The members that E must have are exactly the calls below; their
// tensors are E::Var, and the letters in comments are those of ops/ops.h.
//
// run_block() is given a layer's call of block() and makes it; a policy may make it again later, so
// the call refers to nothing but the policy and the model.
//
// Hyper-connections delay the application of a sublayer's output: hc_site() of the next site
// expands it into the streams while it reads them anyway. `Stream` is what flows from site to site.
#pragma once

#include <cstdint>

#include "model/model.h"

namespace cachalot::model {

template <class Var>
struct PendingVar {
  Var y;     // [T, D]
  Var post;  // [T, M]
  Var comb;  // [T, M, M]
};

template <class Var>
struct Stream {
  Var x;                    // [T, M, D]
  PendingVar<Var> pending;  // the last sublayer's output, not yet in x; empty at the start
  Var pre;                  // [T, M] collapse weights that the last site predicted for the next one
};

// A site's results: the expanded streams, this site's coefficients, and the sublayer's input.
template <class Var>
struct Site {
  Var x, pre, post, comb;
  Var u;  // [T, D]
};

// What layers publish for the layers behind them.
template <class Var>
struct Published {
  Var candidates;  // [T, B] blocks of the candidate source
  Var selected;    // [T, k] entries of the last index source
};

// Engram: [T, M, D] -> [T, M, D].
template <class E>
typename E::Var engram(E& e, const LayerSpec& layer, const EngramWeights& w, typename E::Var x) {
  const auto rows = e.engram_gather(layer, w.table);  // [T, columns * width]
  const auto kv = e.linear(rows, w.wkv);              // [T, (M + 1) D]
  return e.engram_inject(x, kv, w);
}

// The source layer's compressed rows and index keys for the groups that close in this step.
template <class E>
void compress(E& e, const LayerSpec& layer, const AttentionWeights& w, typename E::Var u) {
  typename E::Var kv, gate;  // [T, C]
  if (layer.ratio == 1) {
    kv = e.linear(u, w.compressor.wkv);
  } else {
    kv = e.linear_f32(u, w.compressor.wkv);
    gate = e.linear_f32(u, w.compressor.wgate);
  }
  const auto latent = e.compress_pool(layer, kv, gate, w.compressor.norm);  // [G, C]
  const auto key = e.linear(e.detach(latent), w.indexer.wk);                // [G, DI]
  e.compress_store(layer, latent, key, w.indexer.k_norm);
}

// [T, D] -> [T, D].
template <class E>
typename E::Var attention(E& e,
                          const LayerSpec& layer,
                          const AttentionWeights& w,
                          typename E::Var u,
                          Published<typename E::Var>& published) {
  const auto [t, kv] = e.linear_pair(u, w.wq_a, w.wkv);  // [T, q_lora], [T, K]
  const auto [r, window] = e.qkv_finish(layer, t, w.q_norm, kv, w.kv_norm);
  const auto q = e.linear(r, w.wq_b);  // [T, H K]
  if (layer.index_source == layer.index) {
    const auto index_q = e.linear(e.detach(r), w.indexer.wq_b);          // [T, HI DI]
    const auto index_w = e.linear(e.detach(u), w.indexer.weights_proj);  // [T, HI]
    e.index_select(layer, index_q, index_w, published);
  }
  const auto o = e.attend(layer, q, window, w.sink, published.selected);  // [T, H K]
  const auto z = e.linear_grouped(o, w.wo_a);                             // [T, groups o_lora]
  return e.linear(z, w.wo_b);
}

// [T, D] -> [T, D].
template <class E>
typename E::Var moe(E& e, const LayerSpec& layer, const MoeWeights& w, typename E::Var u) {
  const auto [experts, weights] = e.gate(layer, u, w);  // [T, k] ids, [T, k]
  return e.experts(u, experts, weights, w);
}

// Attention and experts of one layer, of the backbone or of the drafter.
template <class E>
void block(E& e,
           const LayerSpec& layer,
           const LayerWeights& w,
           Stream<typename E::Var>& stream,
           Published<typename E::Var>& published) {
  using Var = typename E::Var;
  Site<Var> a = e.hc_site(stream, w.hc_attn, w.attn_norm);
  e.observe_attention_input(layer, a.u);
  if (layer.mode == LayerMode::kFull) {
    compress(e, layer, w.attn, a.u);
    if (layer.decoder) {
      e.enter_decoder(a);  // a replay goes on with fewer rows
    }
  }
  const Var y = attention(e, layer, w.attn, a.u, published);
  stream = {a.x, {y, a.post, a.comb}, a.pre};
  e.observe_attention(layer, stream);

  const Site<Var> f = e.hc_site(stream, w.hc_ffn, w.ffn_norm);
  e.observe_ffn_input(layer, f.u);
  const Var z = moe(e, layer, w.moe, f.u);
  stream = {f.x, {z, f.post, f.comb}, f.pre};
  e.observe_ffn(layer, stream);
}

// Tokens through all layers. `before` is called with each layer and the streams that its attention
// is about to read.
template <class E, class Before>
Stream<typename E::Var> backbone(E& e, const Model& model, const Before& before) {
  Published<typename E::Var> published;
  Stream<typename E::Var> stream{
      .x = e.embed(model.weights.embed), .pending = {}, .pre = e.first_pre()};
  for (const LayerSpec& layer : model.layers) {
    const LayerWeights& w = model.weights.layers[static_cast<size_t>(layer.index)];
    if (layer.engram >= 0) {
      e.hc_expand(stream);
      stream.x = engram(e, layer, w.engram, stream.x);
      e.observe_engram(layer, stream.x);
    }
    before(layer, stream);
    e.run_block(layer,
                stream,
                published,
                [&e, &layer, &w](Stream<typename E::Var>& s, Published<typename E::Var>& p) {
                  block(e, layer, w, s, p);
                });
  }
  return stream;
}

// Token ids -> logits of the rows that the step asks for, [N, V].
template <class E>
typename E::Var forward(E& e, const Model& model) {
  const auto stream = backbone(e, model, [](const LayerSpec&, const auto&) {});
  return e.head(stream, model.weights.norm, model.weights.head);
}

// What the drafter reads of the target, from the taps [T, taps D]: a window row per stage.
template <class E>
void draft_context(E& e, const Model& model, typename E::Var taps) {
  const DraftWeights& w = model.weights.draft;
  const auto features = e.rms_norm(e.linear(taps, w.main_proj), w.main_norm);  // [T, D]
  e.observe_draft_context(taps, features);
  for (const LayerSpec& stage : model.draft) {
    const AttentionWeights& attn = w.stages[static_cast<size_t>(stage.stage)].attn;
    e.context_finish(stage, e.linear(features, attn.wkv), attn.kv_norm);
  }
}

// The backbone's streams and what the drafter reads of them: a tap is the mean of the streams.
template <class Var>
struct Tapped {
  Stream<Var> stream;
  Var taps;  // [T, taps D]
};

template <class E>
Tapped<typename E::Var> backbone_with_taps(E& e, const Model& model) {
  typename E::Var taps;
  const auto stream = backbone(e, model, [&](const LayerSpec& layer, const auto& before) {
    if (layer.tap >= 0) {
      taps = e.tap(taps, layer, before);
    }
  });
  return {stream, taps};
}

// forward() that also extends the drafter's context.
template <class E>
typename E::Var forward_with_context(E& e, const Model& model) {
  const auto target = backbone_with_taps(e, model);
  draft_context(e, model, target.taps);
  return e.head(target.stream, model.weights.norm, model.weights.head);
}

// A draft block's rows before its sequential part (ops::draft_head).
template <class Var>
struct Draft {
  Var hidden;  // [T, D] collapsed, not normalized
  Var base;    // [T, V] logits
};

// Anchors and noise tokens through the draft stages.
template <class E>
Draft<typename E::Var> draft(E& e, const Model& model) {
  const DraftWeights& w = model.weights.draft;
  Published<typename E::Var> published;
  Stream<typename E::Var> stream{
      .x = e.embed(model.weights.embed), .pending = {}, .pre = e.first_pre()};
  for (const LayerSpec& stage : model.draft) {
    block(e, stage, w.stages[static_cast<size_t>(stage.stage)], stream, published);
  }
  const Draft<typename E::Var> result{.hidden = e.hc_collapse(stream),
                                      .base = e.head(stream, w.norm, model.weights.head)};
  e.observe_draft(result.hidden, result.base);
  return result;
}

}  // namespace cachalot::model
