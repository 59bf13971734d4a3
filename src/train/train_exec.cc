#include "train/train_exec.h"

#include <algorithm>

#include "train/gemm.h"
#include "train/head.h"
#include "train/norm.h"
#include "train/parallel.h"
#include "train/train_exec_parts.h"

namespace cachalot::train {

using model::LayerSpec;
using model::Published;

template <class Real>
TrainExec<Real>::TrainExec(ParameterSet<Real>& parameters,
                           const ForwardOptions& options,
                           const Batch& batch,
                           Tape<Real>& tape,
                           Arena& scratch,
                           ThreadPool* pool)
    : parameters_(parameters),
      model_(parameters.model()),
      options_(options),
      batch_(&batch),
      recording_(options.gradients && options.blocks == nullptr),
      tape_(tape),
      scratch_(scratch),
      pool_(pool),
      window_rope_(rope_rows<Real>(batch.position, model_.window_frequency)),
      compressed_rope_(rope_rows<Real>(batch.position, model_.compressed_frequency)) {}

template <class Real>
const Real* TrainExec<Real>::gradient(const Parameter<Real>& parameter) const {
  const auto found = gradients_.find(&parameter);
  return found == gradients_.end() ? nullptr : found->second;
}

template <class Real>
Real* TrainExec<Real>::gradient_of(const Parameter<Real>& parameter) {
  Real*& sum = gradients_[&parameter];
  if (sum == nullptr) {
    const auto n = static_cast<int64_t>(parameter.value.size());
    sum = tape_.keep_array(n);
    std::fill_n(sum, n, Real{0});
  }
  return sum;
}

template <class Real>
typename TrainExec<Real>::Kept TrainExec<Real>::keep(const LayerSpec& layer,
                                                     StreamVar& stream,
                                                     Published<Var>& published) {
  Kept kept;
  kept.stream = stream = {.x = tape_.keep(stream.x),
                          .pending = {tape_.keep(stream.pending.y),
                                      tape_.keep(stream.pending.post),
                                      tape_.keep(stream.pending.comb)},
                          .pre = tape_.keep(stream.pre)};
  if (layer.kv_source == layer.index) {
    Source& source = sources_.at(layer.index);
    kept.source = source = {tape_.keep(source.entries), tape_.keep(source.keys)};
  }
  if (layer.index_source == layer.index) {
    Index& index = indexes_.at(layer.index);
    kept.index_q = index.q = tape_.keep(index.q);
    kept.index_w = index.w = tape_.keep(index.w);
  }
  published.candidates = tape_.keep(published.candidates);
  return kept;
}

template <class Real>
void TrainExec<Real>::take_gradients(const LayerSpec& layer,
                                     const StreamVar& again,
                                     const Kept& kept) {
  tape_.take_gradient(again.x, kept.stream.x);
  tape_.take_gradient(again.pending.y, kept.stream.pending.y);
  tape_.take_gradient(again.pending.post, kept.stream.pending.post);
  tape_.take_gradient(again.pending.comb, kept.stream.pending.comb);
  tape_.take_gradient(again.pre, kept.stream.pre);
  if (layer.kv_source == layer.index) {
    const Source& source = sources_.at(layer.index);
    tape_.take_gradient(source.entries, kept.source.entries);
    tape_.take_gradient(source.keys, kept.source.keys);
  }
  if (layer.index_source == layer.index) {
    const Index& index = indexes_.at(layer.index);
    tape_.take_gradient(index.q, kept.index_q);
    tape_.take_gradient(index.w, kept.index_w);
  }
}

template <class Real>
StreamShape TrainExec<Real>::stream_shape() const {
  return {batch_->rows(), model_.config.hc_mult, model_.config.hidden_size};
}

template <class Real>
PendingRows<Real> TrainExec<Real>::pending_rows(const model::PendingVar<Var>& pending) const {
  return {pending.y.value(), pending.post.value(), pending.comb.value()};
}

template <class Real>
PendingRows<Real> TrainExec<Real>::pending_gradients(const model::PendingVar<Var>& pending) {
  return {tape_.grad(pending.y), tape_.grad(pending.post), tape_.grad(pending.comb)};
}

template <class Real>
std::vector<int32_t> TrainExec<Real>::selected(int64_t layer) const {
  const Index& index = indexes_.at(layer);
  const Groups& groups = groups_.at(index.layer->ratio);
  std::vector<int32_t> ids = index.selection.entry;
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t row = i / static_cast<size_t>(index.selection.width);
    ids[i] -= ids[i] < 0 ? 0 : groups.begin[static_cast<size_t>(batch_->sample[row])];
  }
  return ids;
}

template <class Real>
const typename TrainExec<Real>::Groups& TrainExec<Real>::groups(int64_t ratio) {
  Groups& groups = groups_[ratio];
  if (groups.begin.empty()) {
    for (int64_t s = 0; s < batch_->samples(); ++s) {
      groups.begin.push_back(static_cast<int32_t>(groups.count()));
      const int32_t end = batch_->sample_begin[static_cast<size_t>(s) + 1];
      for (int32_t row =
               batch_->sample_begin[static_cast<size_t>(s)] + static_cast<int32_t>(ratio) - 1;
           row < end;
           row += static_cast<int32_t>(ratio)) {
        groups.first_row.push_back(row - static_cast<int32_t>(ratio) + 1);
        groups.last_row.push_back(row);
      }
    }
  }
  return groups;
}

// Streams. ---------------------------------------------------------------------------------------

template <class Real>
Var<Real> TrainExec<Real>::embed(const ops::Weight& weight) {
  Parameter<Real>& table = parameters_.of(weight);
  const StreamShape s = stream_shape();
  const Var x = tape_.make(s.rows, s.row_size());
  parallel_for(pool_, s.rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Real* row = table.used() + batch_->token[static_cast<size_t>(t)] * s.width;
      for (int64_t j = 0; j < s.streams; ++j) {
        std::copy_n(row, s.width, x.value() + (t * s.streams + j) * s.width);
      }
    }
  });
  if (!trains(table)) {
    return x;
  }
  record([this, &table, s, x] {
    const Real* dx = tape_.grad(x);
    Real* into = gradient_of(table);
    // One token's row may occur often: rows are added in order.
    for (int64_t t = 0; t < s.rows; ++t) {
      Real* row = into + batch_->token[static_cast<size_t>(t)] * s.width;
      for (int64_t j = 0; j < s.streams; ++j) {
        axpy(Real{1}, dx + (t * s.streams + j) * s.width, s.width, row);
      }
    }
  });
  return x;
}

template <class Real>
Var<Real> TrainExec<Real>::first_pre() {
  const Var pre = tape_.make(batch_->rows(), model_.config.hc_mult);
  for (int64_t i = 0; i < pre.node->size(); ++i) {
    pre.value()[i] = i % pre.width() == 0 ? Real{1} : Real{0};
  }
  const StreamShape s = stream_shape();
  mixed_.assign(static_cast<size_t>(s.rows * s.streams * s.streams), Real{0});
  for (int64_t i = 0; i < s.rows * s.streams; ++i) {
    mixed_[static_cast<size_t>(i * s.streams + i % s.streams)] = Real{1};
  }
  return pre;
}

template <class Real>
void TrainExec<Real>::hc_expand(StreamVar& stream) {
  if (stream.pending.y.empty()) {
    return;
  }
  const StreamShape s = stream_shape();
  const Var x = stream.x, out = tape_.make(s.rows, s.row_size());
  const model::PendingVar<Var> pending = stream.pending;
  expand(pool_, s, x.value(), pending_rows(pending), out.value());
  record([this, s, x, pending, out] {
    expand_backward(pool_,
                    s,
                    x.value(),
                    pending_rows(pending),
                    tape_.grad(out),
                    tape_.grad(x),
                    pending_gradients(pending));
  });
  stream.x = out;
  stream.pending = {};
}

template <class Real>
model::Site<Var<Real>> TrainExec<Real>::hc_site(const StreamVar& stream,
                                                const model::HcWeights& w,
                                                const TensorView& norm) {
  const model::ModelConfig& c = model_.config;
  const StreamShape s = stream_shape();
  StreamVar expanded = stream;
  hc_expand(expanded);
  const Var x = expanded.x, before = stream.pre;
  const SiteVar site{.x = x,
                     .pre = tape_.make(s.rows, s.streams),
                     .post = tape_.make(s.rows, s.streams),
                     .comb = tape_.make(s.rows, s.streams * s.streams),
                     .u = tape_.make(s.rows, s.width)};
  Parameter<Real>&fn = parameters_.of(w.fn), &base = parameters_.of(w.base),
  &scale = parameters_.of(w.scale), &gain = parameters_.of(norm);
  // Weights are read only; the struct serves their gradients as well.
  const SiteWeights<Real> weights{const_cast<Real*>(fn.used()),
                                  const_cast<Real*>(base.used()),
                                  const_cast<Real*>(scale.used())};
  const SiteConstants constants{
      c.rms_norm_eps, c.hc_eps, static_cast<int>(c.hc_sinkhorn_iters), options_.mixing};
  const SiteRows<Real> rows{tape_.array(s.rows * s.coefficients()),
                            tape_.array(s.rows),
                            site.pre.value(),
                            site.post.value(),
                            site.comb.value()};
  const CollapseRows<Real> kept{tape_.array(s.rows * s.width), tape_.array(s.rows)};
  site_coefficients(pool_, s, constants, x.value(), weights, rows);
  if (!again_) {
    const MixingGain mixed = extend_mixing(pool_, s, rows.comb, mixed_.data());
    report_.gain.forward = std::max(report_.gain.forward, mixed.forward);
    report_.gain.backward = std::max(report_.gain.backward, mixed.backward);
  }
  collapse(pool_, s, x.value(), before.value(), gain.used(), c.rms_norm_eps, kept, site.u.value());
  record([=, this, &fn, &base, &scale, &gain] {
    Real* dx = tape_.grad(x);
    collapse_backward(pool_,
                      s,
                      x.value(),
                      before.value(),
                      gain.used(),
                      kept,
                      tape_.grad(site.u),
                      dx,
                      tape_.grad(before),
                      gradient_of(gain));
    const SiteRows<Real> d{
        .pre = site.pre.node->grad, .post = site.post.node->grad, .comb = site.comb.node->grad};
    site_coefficients_backward(pool_,
                               s,
                               constants,
                               x.value(),
                               weights,
                               rows,
                               d,
                               dx,
                               {gradient_of(fn), gradient_of(base), gradient_of(scale)});
  });
  return site;
}

template <class Real>
Var<Real> TrainExec<Real>::hc_collapse(const StreamVar& stream) {
  StreamVar last = stream;
  hc_expand(last);
  const StreamShape s = stream_shape();
  const Var x = last.x, pre = last.pre, out = tape_.make(s.rows, s.width);
  parallel_for(pool_, s.rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(out.value() + t * s.width, s.width, Real{0});
      for (int64_t j = t * s.streams; j < (t + 1) * s.streams; ++j) {
        axpy(pre.value()[j], x.value() + j * s.width, s.width, out.value() + t * s.width);
      }
    }
  });
  record([this, s, x, pre, out] {
    const Real* d = tape_.grad(out);
    Real *dx = tape_.grad(x), *dpre = tape_.grad(pre);
    parallel_for(pool_, s.rows, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t j = t * s.streams; j < (t + 1) * s.streams; ++j) {
          axpy(pre.value()[j], d + t * s.width, s.width, dx + j * s.width);
          dpre[j] += dot(x.value() + j * s.width, d + t * s.width, s.width);
        }
      }
    });
  });
  return out;
}

// Linears and rows. ------------------------------------------------------------------------------

template <class Real>
Var<Real> TrainExec<Real>::linear_groups(Var x, const ops::Weight& weight, int64_t n) {
  Parameter<Real>& w = parameters_.of(weight);
  const int64_t out = weight.out / n, in = weight.in;
  const Var y = tape_.make(x.rows(), weight.out);
  const LinearShape<Real> shape{x.rows(), out, in, x.width(), weight.out};
  for (int64_t g = 0; g < n; ++g) {
    linear_forward(pool_, shape, x.value() + g * in, w.used() + g * out * in, y.value() + g * out);
  }
  record([this, &w, x, y, shape, n, out, in] {
    const Real* dy = tape_.grad(y);
    Real *dx = tape_.grad(x), *dw = trains(w) ? gradient_of(w) : nullptr;
    for (int64_t g = 0; g < n; ++g) {
      linear_input_gradient(pool_, shape, dy + g * out, w.used() + g * out * in, dx + g * in);
      if (dw != nullptr) {
        linear_weight_gradient(pool_, shape, dy + g * out, x.value() + g * in, dw + g * out * in);
      }
    }
  });
  return y;
}

template <class Real>
Var<Real> TrainExec<Real>::linear_grouped(Var x, const ops::Weight& w) {
  return linear_groups(x, w, model_.config.o_groups);
}

template <class Real>
Var<Real> TrainExec<Real>::norm_rows(Var x, const TensorView& weight) {
  Parameter<Real>& w = parameters_.of(weight);
  const int64_t n = x.width();
  const Var y = tape_.make(x.rows(), n);
  Real* factor = tape_.array(x.rows());
  const double eps = model_.config.rms_norm_eps;
  parallel_for(pool_, x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      factor[t] = train::rms_norm(x.value() + t * n, w.used(), n, eps, y.value() + t * n);
    }
  });
  record([this, &w, x, y, n, factor] {
    const Real* dy = tape_.grad(y);
    Real* dx = tape_.grad(x);
    reduce_rows(pool_, x.rows(), n, gradient_of(w), [&](int64_t begin, int64_t end, Real* sum) {
      for (int64_t t = begin; t < end; ++t) {
        rms_norm_backward(x.value() + t * n, w.used(), factor[t], dy + t * n, n, dx + t * n, sum);
      }
    });
  });
  return y;
}

template <class Real>
Var<Real> TrainExec<Real>::rotate_rows(Var x, int64_t dim, const Rotation& rotation) {
  const int64_t half = model_.config.qk_rope_head_dim / 2, heads = x.width() / dim;
  const Var y = tape_.make(x.rows(), x.width());
  const auto turn = [=, this](const Real* from, Real* to, int sign, bool add, RoundRow round) {
    parallel_for(pool_, x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
      std::vector<Real> head(static_cast<size_t>(dim));
      for (int64_t t = begin; t < end; ++t) {
        const int64_t at = rotation.row == nullptr ? t : (*rotation.row)[static_cast<size_t>(t)];
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t offset = t * heads * dim + h * dim;
          std::copy_n(from + offset, dim, head.data());
          rotate(head.data(), dim, rotation.table + at * half * 2, half, sign);
          if (round != nullptr) {
            round(head.data(), dim);
          }
          if (add) {
            axpy(Real{1}, head.data(), dim, to + offset);
          } else {
            std::copy_n(head.data(), dim, to + offset);
          }
        }
      }
    });
  };
  turn(x.value(), y.value(), rotation.sign, false, rotation.round);
  record([this, turn, x, y, sign = rotation.sign] {
    turn(tape_.grad(y), tape_.grad(x), -sign, true, nullptr);
  });
  return y;
}

template <class Real>
std::pair<Var<Real>, Var<Real>> TrainExec<Real>::qkv_finish(
    const LayerSpec& layer, Var t, const TensorView& q_norm, Var kv, const TensorView& kv_norm) {
  const Var window = rotate_rows(
      norm_rows(kv, kv_norm),
      kv.width(),
      {.table = rope(layer), .round = options_.quant.window ? kRoundWindow<Real> : nullptr});
  return {norm_rows(t, q_norm), window};
}

// Head. ------------------------------------------------------------------------------------------

template <class Real>
Var<Real> TrainExec<Real>::head(const StreamVar& stream,
                                const TensorView& norm,
                                const ops::Weight& weight) {
  if (options_.blocks != nullptr) {
    return linear(norm_rows(hc_collapse(stream), norm), weight);
  }
  StreamVar last = stream;
  hc_expand(last);
  const StreamShape s = stream_shape();
  const Var x = last.x, pre = last.pre, h = tape_.make(s.rows, s.width);
  Parameter<Real>&gain = parameters_.of(norm), &w = parameters_.of(weight);
  const CollapseRows<Real> kept{tape_.array(s.rows * s.width), tape_.array(s.rows)};
  collapse(
      pool_, s, x.value(), pre.value(), gain.used(), model_.config.rms_norm_eps, kept, h.value());
  record([this, &gain, s, x, pre, h, kept] {
    collapse_backward(pool_,
                      s,
                      x.value(),
                      pre.value(),
                      gain.used(),
                      kept,
                      tape_.grad(h),
                      tape_.grad(x),
                      tape_.grad(pre),
                      gradient_of(gain));
  });
  losses_ = tape_.make(s.rows, 1);
  if (options_.keep_logits) {
    logits_ = tape_.make(s.rows, weight.out);
  }
  HeadGradients<Real> gradients{.scale = static_cast<Real>(options_.loss_scale)};
  if (options_.gradients) {
    // The head's gradient is computed beside its loss, as its logits are not kept.
    gradients.dh = tape_.grad(h);
    gradients.dweight = gradient_of(w);
  }
  cross_entropy(pool_,
                HeadRows<Real>{.rows = s.rows,
                               .width = s.width,
                               .vocab = weight.out,
                               .h = h.value(),
                               .weight = w.used(),
                               .target = batch_->target.data()},
                gradients,
                losses_.value(),
                logits_.empty() ? nullptr : logits_.value());
  for (int64_t t = 0; t < s.rows; ++t) {
    report_.loss_sum += static_cast<double>(losses_.value()[t]);
  }
  indexer_objective();
  return losses_;
}

// The members that are defined here; the other parts instantiate theirs.
template class TrainExec<float>;
template class TrainExec<double>;

}  // namespace cachalot::train
