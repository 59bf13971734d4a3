#include "train/attention.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

constexpr int64_t kGrain = 8;

// The window of a row is [window_begin, window_end).
template <class Real>
int64_t window_begin(const AttentionRows<Real>& args, int64_t row) {
  return args.mutual ? args.first_row[row]
                     : std::max<int64_t>(args.first_row[row], row - args.window + 1);
}
template <class Real>
int64_t window_end(const AttentionRows<Real>& args, int64_t row) {
  return args.mutual ? args.first_row[row] + args.window : row + 1;
}

// Keys of a row: its window, then its selected entries. Returns their number.
template <class Real>
int64_t gather_keys(const AttentionRows<Real>& args, int64_t row, const Real** keys) {
  int64_t count = 0;
  for (int64_t j = window_begin(args, row), end = window_end(args, row); j < end; ++j) {
    keys[count++] = args.keys + j * args.dim;
  }
  if (args.selection != nullptr) {
    const int64_t width = args.selection->width;
    const int32_t* entry = args.selection->entry.data() + row * width;
    for (int64_t i = 0; i < width && entry[i] >= 0; ++i) {
      keys[count++] = args.entries + entry[i] * args.dim;
    }
  }
  return count;
}

// Turns scores into probabilities beside a sink; returns the sink's.
template <class Real>
Real softmax_with_sink(Real* scores, int64_t count, Real sink) {
  const Real best = std::max(*std::max_element(scores, scores + count), sink);
  const Real sink_weight = std::exp(sink - best);
  const Real inverse = Real{1} / (exp_sum(scores, count, best, scores) + sink_weight);
  for (int64_t j = 0; j < count; ++j) {
    scores[j] *= inverse;
  }
  return sink_weight * inverse;
}

template <class Real>
Real score_scale(const AttentionRows<Real>& args) {
  return Real{1} / std::sqrt(static_cast<Real>(args.dim));
}

}  // namespace

void Selection::index(int64_t entries) {
  begin.assign(static_cast<size_t>(entries + 1), 0);
  for (int32_t e : entry) {
    if (e >= 0) {
      ++begin[static_cast<size_t>(e) + 1];
    }
  }
  for (size_t e = 0; e < static_cast<size_t>(entries); ++e) {
    begin[e + 1] += begin[e];
  }
  use.resize(static_cast<size_t>(begin.back()));
  std::vector<int32_t> next(begin.begin(), begin.end() - 1);
  for (size_t i = 0; i < entry.size(); ++i) {
    if (entry[i] >= 0) {
      use[static_cast<size_t>(next[static_cast<size_t>(entry[i])]++)] = {
          static_cast<int32_t>(i / static_cast<size_t>(width)),
          static_cast<int32_t>(i % static_cast<size_t>(width))};
    }
  }
}

template <class Real>
void attend(ThreadPool* pool,
            const AttentionRows<Real>& args,
            Real* o,
            Real* probability,
            Real* sink_probability) {
  const int64_t slots = args.slots();
  const Real scale = score_scale(args);
  parallel_for(pool, args.rows, kGrain, [&](int64_t first, int64_t last) {
    std::vector<const Real*> keys(static_cast<size_t>(slots));
    for (int64_t row = first; row < last; ++row) {
      const int64_t count = gather_keys(args, row, keys.data());
      for (int64_t h = 0; h < args.heads; ++h) {
        const int64_t at = row * args.heads + h;
        Real* p = probability + at * slots;
        dots(args.q + at * args.dim, keys.data(), count, args.dim, p);
        for (int64_t j = 0; j < count; ++j) {
          p[j] *= scale;
        }
        sink_probability[at] = softmax_with_sink(p, count, args.sink[h]);
        combine(p, keys.data(), count, args.dim, false, o + at * args.dim);
      }
    }
  });
}

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
                     Real* dsink) {
  const int64_t slots = args.slots(), heads = args.heads, dim = args.dim;
  const Real scale = score_scale(args);
  // Gradients of the scaled scores, the queries and the sink, row by row.
  reduce_rows(pool, args.rows, heads, dsink, [&](int64_t first, int64_t last, Real* partial) {
    std::vector<const Real*> keys(static_cast<size_t>(slots));
    for (int64_t row = first; row < last; ++row) {
      const int64_t count = gather_keys(args, row, keys.data());
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = row * heads + h;
        const Real* p = probability + at * slots;
        Real* ds = score + at * slots;
        dots(g + at * dim, keys.data(), count, dim, ds);
        const Real mean = dot(p, ds, count);
        for (int64_t j = 0; j < count; ++j) {
          ds[j] = p[j] * (ds[j] - mean) * scale;
        }
        combine(ds, keys.data(), count, dim, true, dq + at * dim);
        partial[h] -= sink_probability[at] * mean;
      }
    }
  });
  // Gradients of the keys, each summed over the rows that saw it in ascending order.
  const auto add = [&](const std::vector<Selection::Use>& uses,
                       std::vector<Real>& weights,
                       std::vector<const Real*>& vectors,
                       Real* target) {
    weights.clear();
    vectors.clear();
    for (const Selection::Use& use : uses) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = use.row * heads + h;
        weights.push_back(probability[at * slots + use.slot]);
        vectors.push_back(g + at * dim);
        weights.push_back(score[at * slots + use.slot]);
        vectors.push_back(args.q + at * dim);
      }
    }
    combine(
        weights.data(), vectors.data(), static_cast<int64_t>(weights.size()), dim, true, target);
  };
  parallel_for(pool, args.rows, kGrain, [&](int64_t first, int64_t last) {
    std::vector<Selection::Use> uses;
    std::vector<Real> weights;
    std::vector<const Real*> vectors;
    for (int64_t key = first; key < last; ++key) {
      uses.clear();
      const int64_t begin = args.mutual ? args.first_row[key] : key;
      for (int64_t row = begin; row < args.rows && row < begin + args.window; ++row) {
        if (args.first_row[row] > key) {
          break;
        }
        uses.push_back(
            {static_cast<int32_t>(row), static_cast<int32_t>(key - window_begin(args, row))});
      }
      add(uses, weights, vectors, dkeys + key * dim);
    }
  });
  if (args.selection == nullptr) {
    return;
  }
  const Selection& selection = *args.selection;
  const auto entries = static_cast<int64_t>(selection.begin.size()) - 1;
  parallel_for(pool, entries, kGrain, [&](int64_t first, int64_t last) {
    std::vector<Selection::Use> uses;
    std::vector<Real> weights;
    std::vector<const Real*> vectors;
    for (int64_t entry = first; entry < last; ++entry) {
      uses.clear();
      for (int32_t i = selection.begin[static_cast<size_t>(entry)];
           i < selection.begin[static_cast<size_t>(entry) + 1];
           ++i) {
        const Selection::Use& use = selection.use[static_cast<size_t>(i)];
        // Entries lie behind the row's window keys.
        const int64_t keys = window_end(args, use.row) - window_begin(args, use.row);
        uses.push_back({use.row, static_cast<int32_t>(keys + use.slot)});
      }
      add(uses, weights, vectors, dentries + entry * dim);
    }
  });
}

template <class Real>
void attention_share(const AttentionRows<Real>& args,
                     int64_t row,
                     const int32_t* entry,
                     int64_t count,
                     Real* teacher) {
  const int64_t begin = window_begin(args, row), window = row - begin + 1, total = window + count;
  std::vector<const Real*> keys;
  for (int64_t j = begin; j <= row; ++j) {
    keys.push_back(args.keys + j * args.dim);
  }
  for (int64_t i = 0; i < count; ++i) {
    keys.push_back(args.entries + entry[i] * args.dim);
  }
  std::vector<Real> p(static_cast<size_t>(total)), share(static_cast<size_t>(count), Real{0});
  const Real scale = score_scale(args);
  for (int64_t h = 0; h < args.heads; ++h) {
    dots(args.q + (row * args.heads + h) * args.dim, keys.data(), total, args.dim, p.data());
    for (Real& s : p) {
      s *= scale;
    }
    softmax_with_sink(p.data(), total, args.sink[h]);
    axpy(Real{1}, p.data() + window, count, share.data());
  }
  Real sum = 0;
  for (Real s : share) {
    sum += s;
  }
  if (sum > Real{0}) {
    axpy(Real{1} / sum, share.data(), count, teacher);
  }
}

template <class Real>
void index_scores(const IndexRow<Real>& row, const Real* const* keys, int64_t count, Real* scores) {
  std::vector<Real> head(static_cast<size_t>(count));
  std::fill_n(scores, count, Real{0});
  for (int64_t h = 0; h < row.heads; ++h) {
    dots(row.q + h * row.dim, keys, count, row.dim, head.data());
    for (int64_t j = 0; j < count; ++j) {
      scores[j] += std::max(head[static_cast<size_t>(j)], Real{0}) * row.w[h];
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    scores[j] *= row.scale;
  }
}

template <class Real>
void index_scores_backward(const IndexRow<Real>& row,
                           const Real* const* keys,
                           int64_t count,
                           const Real* dscore,
                           Real* dq,
                           Real* dw,
                           Real* const* dkeys) {
  std::vector<Real> head(static_cast<size_t>(count));
  for (int64_t h = 0; h < row.heads; ++h) {
    const Real* q = row.q + h * row.dim;
    dots(q, keys, count, row.dim, head.data());
    for (int64_t j = 0; j < count; ++j) {
      const Real g = dscore[j] * row.scale;
      if (head[static_cast<size_t>(j)] > Real{0}) {
        dw[h] += g * head[static_cast<size_t>(j)];
        axpy(g * row.w[h], keys[j], row.dim, dq + h * row.dim);
        axpy(g * row.w[h], q, row.dim, dkeys[j]);
      }
    }
  }
}

#define CACHALOT_INSTANTIATE(Real)                                                       \
  template void attend(ThreadPool*, const AttentionRows<Real>&, Real*, Real*, Real*);    \
  template void attend_backward(ThreadPool*,                                             \
                                const AttentionRows<Real>&,                              \
                                const Real*,                                             \
                                const Real*,                                             \
                                const Real*,                                             \
                                Real*,                                                   \
                                Real*,                                                   \
                                Real*,                                                   \
                                Real*,                                                   \
                                Real*);                                                  \
  template void attention_share(                                                         \
      const AttentionRows<Real>&, int64_t, const int32_t*, int64_t, Real*);              \
  template void index_scores(const IndexRow<Real>&, const Real* const*, int64_t, Real*); \
  template void index_scores_backward(const IndexRow<Real>&,                             \
                                      const Real* const*,                                \
                                      int64_t,                                           \
                                      const Real*,                                       \
                                      Real*,                                             \
                                      Real*,                                             \
                                      Real* const*);
CACHALOT_INSTANTIATE(float)
CACHALOT_INSTANTIATE(double)
#undef CACHALOT_INSTANTIATE

}  // namespace cachalot::train
