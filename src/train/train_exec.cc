#include "train/train_exec.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>

#include "base/rng.h"
#include "ops/ops.h"
#include "quant/block.h"
#include "train/engram.h"
#include "train/gemm.h"
#include "train/head.h"
#include "train/mixture.h"
#include "train/norm.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

using model::LayerSpec;
using model::Published;

constexpr int64_t kGrain = 16;

// What an op takes from the scratch arena, given back at the end of its scope.
class Scratch {
 public:
  explicit Scratch(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~Scratch() { arena_.release(mark_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class Real>
  Real* array(int64_t count) {
    return arena_.allocate_array<Real>(std::max<int64_t>(1, count));
  }

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

// cos and sin of FP32(position * frequency), as ops::rope_table defines them, in Real.
template <class Real>
std::vector<Real> rope_rows(const std::vector<int32_t>& position,
                            const std::vector<float>& frequency) {
  std::vector<Real> table;
  table.reserve(position.size() * frequency.size() * 2);
  for (int32_t p : position) {
    for (float f : frequency) {
      const auto angle = static_cast<double>(static_cast<float>(p) * f);
      table.push_back(static_cast<Real>(static_cast<float>(std::cos(angle))));
      table.push_back(static_cast<Real>(static_cast<float>(std::sin(angle))));
    }
  }
  return table;
}

// A row as the cache stores it: encoded and decoded again.
template <class Real,
          int64_t (*Bytes)(int64_t),
          void (*Encode)(const float*, int64_t, uint8_t*),
          void (*Decode)(const uint8_t*, int64_t, float*)>
void round_row(Real* row, int64_t n) {
  std::vector<float> values(row, row + n);
  std::vector<uint8_t> bytes(static_cast<size_t>(Bytes(n)));
  Encode(values.data(), n, bytes.data());
  Decode(bytes.data(), n, values.data());
  std::copy(values.begin(), values.end(), row);
}
template <class Real>
constexpr auto* kRoundWindow =
    round_row<Real, quant::window_row_bytes, quant::window_row_encode, quant::window_row_decode>;
template <class Real>
constexpr auto* kRoundMain =
    round_row<Real, quant::main_row_bytes, quant::main_row_encode, quant::main_row_decode>;
template <class Real>
constexpr auto* kRoundIndex =
    round_row<Real, quant::index_row_bytes, quant::index_row_encode, quant::index_row_decode>;

TensorView view(const std::vector<int32_t>& v) {
  return {const_cast<int32_t*>(v.data()), DType::kI32, {static_cast<int64_t>(v.size())}};
}
TensorView view(const std::vector<uint8_t>& v) {
  return {const_cast<uint8_t*>(v.data()), DType::kU8, {static_cast<int64_t>(v.size())}};
}
TensorView view(const std::vector<int64_t>& v, const Shape& shape) {
  return {const_cast<int64_t*>(v.data()), DType::kI64, shape};
}

// The best `count` of scores (ties: the lower index; -inf never), ascending, written to `out` and
// filled up with -1 to `width`. `base` is added to the indices.
void write_best(
    const std::vector<float>& scores, int64_t count, int32_t base, int32_t* out, int64_t width) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] != -std::numeric_limits<float>::infinity()) {
      order.push_back(static_cast<int32_t>(i));
    }
  }
  const auto n = std::min<size_t>(order.size(), static_cast<size_t>(count));
  const auto before = [&](int32_t a, int32_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  if (n < order.size()) {
    std::nth_element(
        order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n), order.end(), before);
    order.resize(n);
    std::sort(order.begin(), order.end());
  }
  std::fill_n(out, width, -1);
  for (size_t i = 0; i < n; ++i) {
    out[i] = order[i] + base;
  }
}

}  // namespace

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
  parallel_for(pool_, s.rows, kGrain, [&](int64_t begin, int64_t end) {
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
  parallel_for(pool_, x.rows(), kGrain, [&](int64_t begin, int64_t end) {
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
    parallel_for(pool_, x.rows(), kGrain, [&](int64_t begin, int64_t end) {
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

// Compressor and indexer. ------------------------------------------------------------------------

template <class Real>
Var<Real> TrainExec<Real>::compress_pool(const LayerSpec& layer,
                                         Var kv,
                                         Var gate,
                                         const TensorView& norm) {
  const Groups& g = groups(layer.ratio);
  const int64_t n = kv.width();
  const Var pooled = tape_.make(g.count(), n);
  if (layer.ratio == 1) {
    // Every row is a group, in the same order.
    std::copy_n(kv.value(), g.count() * n, pooled.value());
    record([this, kv, pooled] {
      axpy(Real{1}, tape_.grad(pooled), pooled.node->size(), tape_.grad(kv));
    });
    return norm_rows(pooled, norm);
  }
  const auto share = [kv, gate, n](int64_t last, int64_t i) {
    return sigmoid(gate.value()[last * n + i] - gate.value()[(last - 1) * n + i]);
  };
  parallel_for(pool_, g.count(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t last = g.last_row[static_cast<size_t>(j)];
      for (int64_t i = 0; i < n; ++i) {
        const Real a = share(last, i);
        pooled.value()[j * n + i] =
            kv.value()[(last - 1) * n + i] * (Real{1} - a) + kv.value()[last * n + i] * a;
      }
    }
  });
  record([this, &g, kv, gate, pooled, share, n] {
    const Real* d = tape_.grad(pooled);
    Real *dkv = tape_.grad(kv), *dgate = tape_.grad(gate);
    parallel_for(pool_, g.count(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const int64_t last = g.last_row[static_cast<size_t>(j)];
        for (int64_t i = 0; i < n; ++i) {
          const int64_t at0 = (last - 1) * n + i, at1 = last * n + i;
          const Real a = share(last, i), g0 = d[j * n + i];
          dkv[at0] += (Real{1} - a) * g0;
          dkv[at1] += a * g0;
          const Real slope = a * (Real{1} - a) * (kv.value()[at1] - kv.value()[at0]) * g0;
          dgate[at0] -= slope;
          dgate[at1] += slope;
        }
      }
    });
  });
  return norm_rows(pooled, norm);
}

template <class Real>
void TrainExec<Real>::compress_store(const LayerSpec& layer,
                                     Var latent,
                                     Var key,
                                     const TensorView& k_norm) {
  const Groups& g = groups(layer.ratio);
  for (int64_t i = 0; i < latent.node->size(); ++i) {
    report_.max_latent =
        std::max(report_.max_latent, std::fabs(static_cast<double>(latent.value()[i])));
  }
  sources_[layer.index] = {
      .entries = rotate_rows(latent,
                             latent.width(),
                             {.table = rope(layer),
                              .row = &g.first_row,
                              .round = options_.quant.main ? kRoundMain<Real> : nullptr}),
      .keys = rotate_rows(norm_rows(key, k_norm),
                          key.width(),
                          {.table = rope(layer),
                           .row = &g.first_row,
                           .round = options_.quant.index ? kRoundIndex<Real> : nullptr})};
}

template <class Real>
IndexRow<Real> TrainExec<Real>::index_row(const Index& index, int64_t row) const {
  const int64_t heads = index.w.width(), dim = index.q.width() / heads;
  return {
      .heads = heads,
      .dim = dim,
      .q = index.q.value() + row * heads * dim,
      .w = index.w.value() + row * heads,
      .scale = Real{1} / std::sqrt(static_cast<Real>(dim)) / std::sqrt(static_cast<Real>(heads))};
}

template <class Real>
void TrainExec<Real>::index_select(const LayerSpec& layer,
                                   Var q,
                                   Var w,
                                   Published<Var>& published) {
  Index& index = indexes_[layer.index];
  index.layer = &layer;
  index.q = rotate_rows(
      q,
      q.width() / w.width(),
      {.table = rope(layer), .round = options_.quant.index ? kRoundIndex<Real> : nullptr});
  index.w = w;
  if (again_) {
    return;
  }
  choose(index, published);
  const Source& source = sources_.at(layer.kv_source);
  index.selection.index(source.entries.rows());
  if (options_.indexer.coefficient != 0) {
    compare_rows(index);
  }
}

// The best k visible entries of every row, and the candidate blocks if the layer publishes them.
template <class Real>
void TrainExec<Real>::choose(Index& index, Published<Var>& published) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const model::ModelConfig& c = model_.config;
  const LayerSpec& layer = *index.layer;
  const Groups& g = groups(layer.ratio);
  const Var keys = sources_.at(layer.kv_source).keys;
  int64_t most = 0;
  for (int64_t row = 0; row < batch_->rows(); ++row) {
    most = std::max(most, visible(row, layer.ratio));
  }
  const int64_t k = std::min(c.index_topk, most), block = c.candidate_block_size;
  index.selection.width = k;
  index.selection.entry.resize(static_cast<size_t>(batch_->rows() * k));
  const bool publishes = options_.candidates && layer.publishes_candidates;
  const bool restricted = options_.candidates && layer.candidate_source >= 0;
  if (publishes) {
    published.candidates = tape_.make_ids(
        batch_->rows(), std::min(c.candidate_topk_blocks, (most + block - 1) / block));
  }
  parallel_for(pool_, batch_->rows(), kGrain, [&](int64_t begin, int64_t end) {
    std::vector<const Real*> rows;
    std::vector<Real> exact;
    std::vector<float> scores;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t n = visible(row, layer.ratio);
      const int32_t first = g.begin[static_cast<size_t>(batch_->sample[static_cast<size_t>(row)])];
      int32_t* chosen = index.selection.entry.data() + row * k;
      if (n <= k && !publishes && !restricted) {
        std::fill_n(chosen, k, -1);
        for (int64_t j = 0; j < n; ++j) {
          chosen[j] = first + static_cast<int32_t>(j);
        }
        continue;
      }
      rows.clear();
      for (int64_t j = 0; j < n; ++j) {
        rows.push_back(keys.value() + (first + j) * keys.width());
      }
      exact.resize(static_cast<size_t>(n));
      index_scores(index_row(index, row), rows.data(), n, exact.data());
      scores.assign(exact.begin(), exact.end());
      if (publishes) {
        std::vector<float> blocks(static_cast<size_t>((n + block - 1) / block), kNone);
        for (int64_t j = 0; j < n; ++j) {
          float& best = blocks[static_cast<size_t>(j / block)];
          best = std::max(best, scores[static_cast<size_t>(j)]);
        }
        if (n > 0) {
          blocks.back() = std::numeric_limits<float>::infinity();
        }
        const int64_t width = published.candidates.width();
        write_best(blocks, width, 0, published.candidates.node->ids + row * width, width);
      }
      if (restricted) {
        const int64_t width = published.candidates.width();
        const int32_t* ids = published.candidates.node->ids + row * width;
        for (int64_t j = 0; j < n; ++j) {
          if (std::find(ids, ids + width, static_cast<int32_t>(j / block)) == ids + width) {
            scores[static_cast<size_t>(j)] = kNone;
          }
        }
      }
      write_best(scores, k, first, chosen, k);
    }
  });
}

// Chooses the rows whose selection is compared with the attention: evenly spread over those that
// see at least two entries.
template <class Real>
void TrainExec<Real>::compare_rows(Index& index) {
  const LayerSpec& layer = *index.layer;
  const Groups& g = groups(layer.ratio);
  std::vector<int32_t> eligible;
  for (int64_t row = 0; row < batch_->rows(); ++row) {
    if (visible(row, layer.ratio) >= 2) {
      eligible.push_back(static_cast<int32_t>(row));
    }
  }
  const int64_t n =
      std::min<int64_t>(options_.indexer.queries, static_cast<int64_t>(eligible.size()));
  const double shift = Philox(options_.seed, 1).uniform(static_cast<uint64_t>(layer.index));
  for (int64_t i = 0; i < n; ++i) {
    const auto at =
        static_cast<size_t>((static_cast<double>(i) + shift) *
                            static_cast<double>(eligible.size()) / static_cast<double>(n));
    const int32_t row = eligible[std::min(at, eligible.size() - 1)];
    const int64_t k = index.selection.width;
    std::vector<int32_t> entries;
    if (options_.indexer.selected_only) {
      const int32_t* chosen = index.selection.entry.data() + row * k;
      entries.assign(chosen, std::find(chosen, chosen + k, -1));
    } else {
      const int32_t first = g.begin[static_cast<size_t>(batch_->sample[static_cast<size_t>(row)])];
      for (int64_t j = 0; j < visible(row, layer.ratio); ++j) {
        entries.push_back(first + static_cast<int32_t>(j));
      }
    }
    index.compared.push_back(row);
    index.teacher.emplace_back(entries.size(), Real{0});
    index.entry.push_back(std::move(entries));
  }
}

template <class Real>
void TrainExec<Real>::measure_selection(const Index& index, size_t compared) {
  const std::vector<int32_t>& entry = index.entry[compared];
  const int64_t k = index.selection.width;
  if (static_cast<int64_t>(entry.size()) <= k) {
    return;
  }
  const int32_t* chosen = index.selection.entry.data() + index.compared[compared] * k;
  std::vector<Real> mass = index.teacher[compared];
  report_.all_mass += static_cast<double>(std::accumulate(mass.begin(), mass.end(), Real{0}));
  for (int64_t j = 0; j < k && chosen[j] >= 0; ++j) {
    report_.selected_mass += static_cast<double>(mass[static_cast<size_t>(chosen[j] - entry[0])]);
  }
  std::partial_sort(mass.begin(), mass.begin() + k, mass.end(), std::greater<>());
  report_.best_mass +=
      static_cast<double>(std::accumulate(mass.begin(), mass.begin() + k, Real{0}));
}

// KL(teacher || softmax(scores)) per compared row, once all layers have added to the teachers.
template <class Real>
void TrainExec<Real>::indexer_objective() {
  for (auto& [id, item] : indexes_) {
    Index& index = item;
    if (index.compared.empty() || index.served == 0) {
      continue;
    }
    const Var keys = sources_.at(index.layer->kv_source).keys;
    const auto rows = static_cast<Real>(index.compared.size());
    // Per compared row: softmax(scores) - teacher.
    std::vector<std::vector<Real>> difference;
    double kl = 0;
    for (size_t i = 0; i < index.compared.size(); ++i) {
      std::vector<const Real*> key_rows;
      for (int32_t e : index.entry[i]) {
        key_rows.push_back(keys.value() + e * keys.width());
      }
      const auto n = static_cast<int64_t>(key_rows.size());
      std::vector<Real> scores(static_cast<size_t>(n)), p(scores);
      index_scores(index_row(index, index.compared[i]), key_rows.data(), n, scores.data());
      if (!options_.indexer.selected_only) {
        measure_selection(index, i);
      }
      const Real best = *std::max_element(scores.begin(), scores.end());
      const Real sum = exp_sum(scores.data(), n, best, p.data());
      for (size_t j = 0; j < p.size(); ++j) {
        const Real teacher = index.teacher[i][j] / static_cast<Real>(index.served);
        if (teacher > Real{0}) {
          kl += static_cast<double>(teacher *
                                    (std::log(teacher) - (scores[j] - best - std::log(sum))));
        }
        p[j] = p[j] / sum - teacher;
      }
      difference.push_back(std::move(p));
    }
    report_.indexer += kl / static_cast<double>(rows) / static_cast<double>(indexes_.size());
    const Real factor =
        static_cast<Real>(options_.indexer.coefficient * options_.auxiliary_scale) / rows;
    record([this, &index, keys, factor, difference = std::move(difference)] {
      const int64_t dim = keys.width();
      Real *dq = tape_.grad(index.q), *dw = tape_.grad(index.w), *dkeys = tape_.grad(keys);
      for (size_t i = 0; i < index.compared.size(); ++i) {
        const int64_t row = index.compared[i];
        std::vector<const Real*> key_rows;
        std::vector<Real*> key_gradients;
        for (int32_t e : index.entry[i]) {
          key_rows.push_back(keys.value() + e * dim);
          key_gradients.push_back(dkeys + e * dim);
        }
        std::vector<Real> dscore = difference[i];
        for (Real& d : dscore) {
          d *= factor;
        }
        index_scores_backward(index_row(index, row),
                              key_rows.data(),
                              static_cast<int64_t>(key_rows.size()),
                              dscore.data(),
                              dq + row * index.q.width(),
                              dw + row * index.w.width(),
                              key_gradients.data());
      }
    });
  }
}

// Attention. -------------------------------------------------------------------------------------

template <class Real>
Var<Real> TrainExec<Real>::attend(
    const LayerSpec& layer, Var q, Var window, const TensorView& sink_view, Var) {
  const model::ModelConfig& c = model_.config;
  Parameter<Real>& sink = parameters_.of(sink_view);
  const Var turned = rotate_rows(q, c.head_dim, {.table = rope(layer)});
  AttentionRows<Real> args{.rows = batch_->rows(),
                           .heads = c.num_attention_heads,
                           .dim = c.head_dim,
                           .window = c.sliding_window,
                           .first_row = batch_->first_row.data(),
                           .q = turned.value(),
                           .keys = window.value(),
                           .sink = sink.used()};
  Var entries;
  if (layer.stage >= 0) {
    // The block is the window; the context is what a row selects.
    entries = contexts_.at(layer.stage);
    args.window = options_.blocks->block;
    args.mutual = true;
    args.entries = entries.value();
    args.selection = &options_.blocks->context;
  } else if (layer.ratio > 0) {
    entries = sources_.at(layer.kv_source).entries;
    args.entries = entries.value();
    args.selection = &indexes_.at(layer.index_source).selection;
  }
  const Var o = tape_.make(args.rows, q.width());
  Real* probability = tape_.array(args.rows * args.heads * args.slots());
  Real* sink_probability = tape_.array(args.rows * args.heads);
  train::attend(pool_, args, o.value(), probability, sink_probability);
  if (layer.ratio > 0 && !again_) {
    Index& index = indexes_.at(layer.index_source);
    if (!options_.indexer.own_layer || layer.index == layer.index_source) {
      parallel_for(
          pool_, static_cast<int64_t>(index.compared.size()), 1, [&](int64_t begin, int64_t end) {
            for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
              attention_share(args,
                              index.compared[i],
                              index.entry[i].data(),
                              static_cast<int64_t>(index.entry[i].size()),
                              index.teacher[i].data());
            }
          });
      ++index.served;
    }
  }
  record([this, &sink, args, turned, window, entries, o, probability, sink_probability] {
    Scratch scratch(scratch_);
    attend_backward(pool_,
                    args,
                    tape_.grad(o),
                    probability,
                    sink_probability,
                    scratch.array<Real>(args.rows * args.heads * args.slots()),
                    tape_.grad(turned),
                    tape_.grad(window),
                    entries.empty() ? nullptr : tape_.grad(entries),
                    gradient_of(sink));
  });
  return rotate_rows(o, c.head_dim, {.table = rope(layer), .sign = -1});
}

// Experts. ---------------------------------------------------------------------------------------

template <class Real>
void TrainExec<Real>::report_routing(const LayerSpec& layer,
                                     const RouterRows<Real>& args,
                                     const int32_t* ids) {
  std::vector<int64_t> load(static_cast<size_t>(args.experts), 0), load_image(load);
  for (int64_t i = 0; i < args.rows * args.chosen; ++i) {
    const bool image = batch_->is_image[static_cast<size_t>(i / args.chosen)] != 0;
    ++(image ? load_image : load)[static_cast<size_t>(ids[i])];
  }
  report_.load.push_back(std::move(load));
  report_.load_image.push_back(std::move(load_image));
  report_.balance += static_cast<double>(balance_loss(args, ids, batch_->sample_begin)) /
                     static_cast<double>((layer.stage >= 0 ? model_.draft : model_.layers).size());
}

template <class Real>
std::pair<Var<Real>, Var<Real>> TrainExec<Real>::gate(const LayerSpec& layer,
                                                      Var u,
                                                      const model::MoeWeights& w) {
  const model::ModelConfig& c = model_.config;
  const Var logits = linear(u, w.gate);
  const RouterRows<Real> args{.rows = batch_->rows(),
                              .experts = w.gate.out,
                              .chosen = layer.experts_per_token,
                              .temperature = static_cast<Real>(c.gate_temp),
                              .scale = static_cast<Real>(c.routed_scaling_factor),
                              .logits = logits.value(),
                              .bias = parameters_.of(w.bias).used(),
                              .bias_image = parameters_.of(w.bias_vl).used(),
                              .is_image = batch_->is_image.data()};
  const Var ids = tape_.make_ids(args.rows, args.chosen);
  const Var weights = tape_.make(args.rows, args.chosen);
  route(pool_, args, ids.node->ids, weights.value());
  if (!again_) {
    report_routing(layer, args, ids.node->ids);
  }
  // A draft block is too short a sequence to be balanced in itself.
  const auto coefficient =
      layer.stage >= 0 ? Real{0}
                       : static_cast<Real>(options_.balance_coefficient * options_.auxiliary_scale);
  record([this, args, logits, ids, weights, coefficient] {
    route_backward(pool_,
                   args,
                   ids.node->ids,
                   weights.node->grad,
                   coefficient,
                   batch_->sample_begin,
                   tape_.grad(logits));
  });
  return {ids, weights};
}

template <class Real>
Var<Real> TrainExec<Real>::experts(Var u, Var ids, Var weights, const model::MoeWeights& w) {
  const model::ModelConfig& c = model_.config;
  const int64_t t = u.rows(), d = u.width(), f = c.moe_intermediate_size, k = ids.width();
  const int64_t n = t * k;
  const auto limit = static_cast<Real>(c.swiglu_limit);
  const auto sorted = std::make_shared<ExpertRows>(
      sort_by_expert(ids.node->ids, t, k, static_cast<int64_t>(w.experts.size())));
  struct Expert {
    Parameter<Real>*w1, *w3, *w2;
    ExpertWeights<Real> weights() const {
      return {const_cast<Real*>(w1->used()),
              const_cast<Real*>(w3->used()),
              const_cast<Real*>(w2->used())};
    }
  };
  const auto resolve = [&](const std::vector<ops::ExpertView>& views) {
    std::vector<Expert> list;
    for (const ops::ExpertView& v : views) {
      list.push_back({&parameters_.of(v.w1), &parameters_.of(v.w3), &parameters_.of(v.w2)});
    }
    return list;
  };
  const std::vector<Expert> routed = resolve(w.experts), shared = resolve(w.shared);
  Real *x = tape_.array(n * d), *factor = tape_.array(n), *hidden = tape_.array(3 * n * f);
  Real* shared_hidden = tape_.array(3 * t * f);
  // Rows [begin, end) of the sorted ones.
  const auto part = [=](int64_t begin, int64_t end) {
    return SwigluRows<Real>{.rows = end - begin,
                            .width = d,
                            .hidden = f,
                            .limit = limit,
                            .x = x + begin * d,
                            .weights = factor + begin,
                            .gate = hidden + begin * f,
                            .up = hidden + (n + begin) * f,
                            .product = hidden + (2 * n + begin) * f};
  };
  const SwigluRows<Real> whole{.rows = t,
                               .width = d,
                               .hidden = f,
                               .limit = limit,
                               .x = u.value(),
                               .gate = shared_hidden,
                               .up = shared_hidden + t * f,
                               .product = shared_hidden + 2 * t * f};
  const Var y = tape_.make(t, d);
  {
    Scratch scratch(scratch_);
    Real* sorted_y = scratch.array<Real>(n * d);
    Real* shared_y = scratch.array<Real>(t * d);
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      std::copy_n(u.value() + sorted->row[i] * d, d, x + static_cast<int64_t>(i) * d);
      factor[i] = weights.value()[sorted->slot[i]];
    }
    parallel_tasks(pool_, static_cast<int64_t>(routed.size()), [&](int64_t e) {
      const auto i = static_cast<size_t>(e);
      const int64_t begin = sorted->begin[i], end = sorted->begin[i + 1];
      swiglu<Real>(nullptr, part(begin, end), routed[i].weights(), sorted_y + begin * d);
    });
    std::fill_n(y.value(), t * d, Real{0});
    for (int64_t i = 0; i < n; ++i) {
      axpy(Real{1}, sorted_y + sorted->place[static_cast<size_t>(i)] * d, d, y.value() + i / k * d);
    }
    for (const Expert& expert : shared) {
      swiglu(pool_, whole, expert.weights(), shared_y);
      axpy(Real{1}, shared_y, t * d, y.value());
    }
  }
  record([=, this] {
    Scratch scratch(scratch_);
    const Real* dy = tape_.grad(y);
    Real *du = tape_.grad(u), *dweights = tape_.grad(weights);
    Real *sorted_dy = scratch.array<Real>(n * d), *sorted_dx = scratch.array<Real>(n * d);
    Real *dfactor = scratch.array<Real>(n), *work = scratch.array<Real>(3 * std::max(n, t) * f);
    const auto gradients_of = [this](const Expert& expert) {
      return ExpertWeights<Real>{
          gradient_of(*expert.w1), gradient_of(*expert.w3), gradient_of(*expert.w2)};
    };
    std::vector<ExpertWeights<Real>> gradients;
    for (const Expert& expert : routed) {
      gradients.push_back(gradients_of(expert));
    }
    std::fill_n(sorted_dx, n * d, Real{0});
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      std::copy_n(dy + sorted->row[i] * d, d, sorted_dy + static_cast<int64_t>(i) * d);
    }
    parallel_tasks(pool_, static_cast<int64_t>(routed.size()), [&](int64_t e) {
      const auto i = static_cast<size_t>(e);
      const int64_t begin = sorted->begin[i], end = sorted->begin[i + 1];
      swiglu_backward<Real>(nullptr,
                            part(begin, end),
                            routed[i].weights(),
                            sorted_dy + begin * d,
                            work + 3 * begin * f,
                            sorted_dx + begin * d,
                            dfactor + begin,
                            gradients[i]);
    });
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place = sorted->place[static_cast<size_t>(i)];
      axpy(Real{1}, sorted_dx + place * d, d, du + i / k * d);
      dweights[i] += dfactor[place];
    }
    for (const Expert& expert : shared) {
      swiglu_backward<Real>(
          pool_, whole, expert.weights(), dy, work, du, nullptr, gradients_of(expert));
    }
  });
  return y;
}

// Engram. ----------------------------------------------------------------------------------------

template <class Real>
Var<Real> TrainExec<Real>::engram_gather(const LayerSpec& layer, const ops::Weight& table) {
  const model::ModelConfig& c = model_.config;
  const int64_t n = c.engram_max_ngram_size, heads = c.engram_n_heads, columns = (n - 1) * heads;
  const int64_t t = batch_->rows(), width = table.in;
  const model::EngramConstants& constants = model_.engram[static_cast<size_t>(layer.engram)];
  std::vector<int32_t> classes;
  for (int64_t s = 0; s < batch_->samples(); ++s) {
    classes.insert(classes.end(), static_cast<size_t>(n - 1), -1);
    for (auto row = static_cast<size_t>(batch_->sample_begin[static_cast<size_t>(s)]);
         row < static_cast<size_t>(batch_->sample_begin[static_cast<size_t>(s) + 1]);
         ++row) {
      classes.push_back(batch_->is_image[row] != 0
                            ? -1
                            : model_.token_class[static_cast<size_t>(batch_->token[row])]);
    }
  }
  const std::vector<int32_t> start(static_cast<size_t>(batch_->samples()), 0);
  const Var ids = tape_.make_ids(t, columns);
  ops::OpContext context{.backend = ops::Backend::kCpu, .pool = pool_, .scratch = &scratch_};
  const Status hashed = ops::engram_hash(
      context,
      {.rows = {.rows = t,
                .sequences = batch_->samples(),
                .position = view(batch_->position),
                .sequence = view(batch_->sample),
                .row_begin = view(batch_->sample_begin),
                .start = view(start),
                .is_image = view(batch_->is_image)},
       .classes = view(classes),
       .multiplier = view(constants.multiplier, {n}),
       .prime = view(constants.prime, {n - 1, heads}),
       .offset = view(constants.offset, {n - 1, heads}),
       .blocked_class = model_.token_class[static_cast<size_t>(c.engram_pad_token_id)],
       .ids = TensorView(ids.node->ids, DType::kI32, {t, columns})});
  CACHALOT_CHECK(hashed.ok());
  Parameter<Real>& w = parameters_.of(table);
  const Var rows = tape_.make(t, columns * width);
  parallel_for(pool_, t * columns, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::copy_n(w.used() + ids.node->ids[i] * width, width, rows.value() + i * width);
    }
  });
  record([this, &w, ids, rows, t, columns, width] {
    const Real* d = tape_.grad(rows);
    Real* into = gradient_of(w);
    // Columns have rows of their own, so they can be added side by side, each in row order.
    parallel_tasks(pool_, columns, [&](int64_t column) {
      for (int64_t row = 0; row < t; ++row) {
        const int64_t i = row * columns + column;
        axpy(Real{1}, d + i * width, width, into + ids.node->ids[i] * width);
      }
    });
  });
  return rows;
}

template <class Real>
Var<Real> TrainExec<Real>::engram_inject(Var x, Var kv, const model::EngramWeights& w) {
  const StreamShape s = stream_shape();
  Parameter<Real>&q = parameters_.of(w.q_weight), &k = parameters_.of(w.k_weight);
  const InjectRows<Real> args{.shape = s,
                              .eps = model_.config.rms_norm_eps,
                              .is_image = batch_->is_image.data(),
                              .x = x.value(),
                              .kv = kv.value(),
                              .q_weight = q.used(),
                              .k_weight = k.used()};
  const int64_t gates = s.rows * s.streams;
  const GateRows<Real> kept{
      tape_.array(gates), tape_.array(gates), tape_.array(gates), tape_.array(gates)};
  const Var out = tape_.make(s.rows, s.row_size());
  inject(pool_, args, kept, out.value());
  record([this, &q, &k, args, kept, x, kv, out] {
    inject_backward(pool_,
                    args,
                    kept,
                    tape_.grad(out),
                    tape_.grad(x),
                    tape_.grad(kv),
                    gradient_of(q),
                    gradient_of(k));
  });
  return out;
}

// The drafter. -----------------------------------------------------------------------------------

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
  parallel_for(pool_, s.rows, kGrain, [&](int64_t begin, int64_t end) {
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
Var<Real> TrainExec<Real>::hc_collapse(const StreamVar& stream) {
  StreamVar last = stream;
  hc_expand(last);
  const StreamShape s = stream_shape();
  const Var x = last.x, pre = last.pre, out = tape_.make(s.rows, s.width);
  parallel_for(pool_, s.rows, kGrain, [&](int64_t begin, int64_t end) {
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
    parallel_for(pool_, s.rows, kGrain, [&](int64_t begin, int64_t end) {
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

template class TrainExec<float>;
template class TrainExec<double>;

}  // namespace cachalot::train
