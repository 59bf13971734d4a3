#include "train/train_exec.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "base/math.h"
#include "base/rng.h"
#include "train/norm.h"
#include "train/parallel.h"
#include "train/train_exec_parts.h"

namespace cachalot::train {
namespace {

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

using model::LayerSpec;
using model::Published;

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
  const auto share = [gate, n](int64_t last, int64_t i) {
    return sigmoid(gate.value()[last * n + i] - gate.value()[(last - 1) * n + i]);
  };
  parallel_for(pool_, g.count(), kRowGrain, [&](int64_t begin, int64_t end) {
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
    parallel_for(pool_, g.count(), kRowGrain, [&](int64_t begin, int64_t end) {
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
    published.candidates =
        tape_.make_ids(batch_->rows(), std::min(c.candidate_topk_blocks, ceil_div(most, block)));
  }
  parallel_for(pool_, batch_->rows(), kRowGrain, [&](int64_t begin, int64_t end) {
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
        std::vector<float> blocks(static_cast<size_t>(ceil_div(n, block)), kNone);
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

#define CACHALOT_INSTANTIATE(Real)                                                           \
  template Var<Real> TrainExec<Real>::compress_pool(                                         \
      const LayerSpec& layer, Var kv, Var gate, const TensorView& norm);                     \
  template void TrainExec<Real>::compress_store(                                             \
      const LayerSpec& layer, Var latent, Var key, const TensorView& k_norm);                \
  template IndexRow<Real> TrainExec<Real>::index_row(const Index& index, int64_t row) const; \
  template void TrainExec<Real>::index_select(                                               \
      const LayerSpec& layer, Var q, Var w, Published<Var>& published);                      \
  template void TrainExec<Real>::choose(Index& index, Published<Var>& published);            \
  template void TrainExec<Real>::compare_rows(Index& index);                                 \
  template void TrainExec<Real>::measure_selection(const Index& index, size_t compared);     \
  template void TrainExec<Real>::indexer_objective();                                        \
  template Var<Real> TrainExec<Real>::attend(                                                \
      const LayerSpec& layer, Var q, Var window, const TensorView& sink_view, Var);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
