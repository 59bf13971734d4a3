#include "train/train_exec.h"

#include <algorithm>
#include <memory>

#include "ops/ops.h"
#include "train/engram.h"
#include "train/mixture.h"
#include "train/parallel.h"
#include "train/train_exec_parts.h"

namespace cachalot::train {
namespace {

TensorView view(const std::vector<int32_t>& v) {
  return {const_cast<int32_t*>(v.data()), DType::kI32, {static_cast<int64_t>(v.size())}};
}
TensorView view(const std::vector<uint8_t>& v) {
  return {const_cast<uint8_t*>(v.data()), DType::kU8, {static_cast<int64_t>(v.size())}};
}
TensorView view(const std::vector<int64_t>& v, const Shape& shape) {
  return {const_cast<int64_t*>(v.data()), DType::kI64, shape};
}

// Rows of a table lie far apart, so they are fetched this many ahead of their use: with 300,000
// rows of 32 floats adding to them takes 0.65 of the time, copying them 0.9.
constexpr int64_t kTableRowsAhead = 16;

template <class Real>
void prefetch(const Real* row, int64_t width) {
  constexpr auto kLine = static_cast<int64_t>(64 / sizeof(Real));
  for (int64_t i = 0; i < width; i += kLine) {
    __builtin_prefetch(row + i);
  }
}

}  // namespace

using model::LayerSpec;
using model::Published;

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
  parallel_for(pool_, t * columns, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kTableRowsAhead < t * columns) {
        prefetch(w.used() + ids.node->ids[i + kTableRowsAhead] * width, width);
      }
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
        if (row + kTableRowsAhead < t) {
          prefetch(into + ids.node->ids[i + kTableRowsAhead * columns] * width, width);
        }
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

#define CACHALOT_INSTANTIATE(Real)                                               \
  template void TrainExec<Real>::report_routing(                                 \
      const LayerSpec& layer, const RouterRows<Real>& args, const int32_t* ids); \
  template std::pair<Var<Real>, Var<Real>> TrainExec<Real>::gate(                \
      const LayerSpec& layer, Var u, const model::MoeWeights& w);                \
  template Var<Real> TrainExec<Real>::experts(                                   \
      Var u, Var ids, Var weights, const model::MoeWeights& w);                  \
  template Var<Real> TrainExec<Real>::engram_gather(const LayerSpec& layer,      \
                                                    const ops::Weight& table);   \
  template Var<Real> TrainExec<Real>::engram_inject(Var x, Var kv, const model::EngramWeights& w);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
