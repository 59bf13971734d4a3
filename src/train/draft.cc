#include "train/draft.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "train/gemm.h"
#include "train/norm.h"
#include "train/parallel.h"

namespace cachalot::train {
namespace {

constexpr int64_t kChunk = 128;
constexpr int64_t kGrain = 4;

// The anchors of one sample, ascending.
std::vector<int32_t> draw_anchors(const Batch& batch, int64_t sample, int64_t most, uint64_t seed) {
  std::vector<int32_t> rows;
  const auto s = static_cast<size_t>(sample);
  for (int32_t row = batch.sample_begin[s]; row < batch.sample_begin[s + 1]; ++row) {
    if (batch.target[static_cast<size_t>(row)] >= 0) {
      rows.push_back(row);
    }
  }
  const size_t count = std::min(rows.size(), static_cast<size_t>(most));
  const Philox random(seed, static_cast<uint64_t>(sample));
  for (size_t i = 0; i < count; ++i) {
    const auto j = static_cast<size_t>(random.uniform(i) * static_cast<double>(rows.size() - i));
    std::swap(rows[i], rows[i + j]);
  }
  rows.resize(count);
  std::sort(rows.begin(), rows.end());
  return rows;
}

// Probabilities of logits [n] in place; returns the log of their normalizer.
template <class Real>
Real softmax(Real* logits, int64_t n) {
  const Real best = *std::max_element(logits, logits + n);
  const Real sum = exp_sum(logits, n, best, logits);
  for (int64_t i = 0; i < n; ++i) {
    logits[i] /= sum;
  }
  return best + std::log(sum);
}

// -log of a sigmoid's agreement with the probability `wanted`.
double binary_cross_entropy(double logit, double wanted) {
  return std::max(logit, 0.0) - logit * wanted + std::log1p(std::exp(-std::fabs(logit)));
}

}  // namespace

DraftBlocks make_draft_blocks(const model::ModelConfig& config,
                              const DraftObjective& objective,
                              const Batch& batch,
                              uint64_t seed) {
  DraftBlocks result{.block = config.dspark_block_size};
  const auto noise = static_cast<int32_t>(config.dspark_noise_token_id);
  const double decay =
      objective.decay > 0 ? objective.decay : static_cast<double>(config.dspark_block_size);
  Batch& rows = result.rows;
  result.context.width = config.sliding_window;
  for (int64_t sample = 0; sample < batch.samples(); ++sample) {
    const int32_t begin = batch.sample_begin[static_cast<size_t>(sample)];
    const int32_t end = batch.sample_begin[static_cast<size_t>(sample) + 1];
    for (const int32_t anchor : draw_anchors(batch, sample, objective.anchors, seed)) {
      const auto first = static_cast<int32_t>(rows.rows()),
                 block = static_cast<int32_t>(rows.sample_begin.size());
      rows.sample_begin.push_back(first);
      bool counts = true;
      for (int32_t k = 0; k < result.block; ++k) {
        const int32_t source = std::min(anchor + k, end - 1);
        const auto at = static_cast<size_t>(source);
        counts = counts && anchor + k < end && batch.target[at] >= 0;
        const double weight = counts ? std::exp(-static_cast<double>(k) / decay) : 0.0;
        rows.token.push_back(k == 0 ? batch.token[at] : noise);
        rows.target.push_back(counts ? batch.target[at] : -1);
        rows.position.push_back(batch.position[static_cast<size_t>(anchor)] + k);
        rows.sample.push_back(block);
        rows.first_row.push_back(first);
        rows.is_image.push_back(0);
        rows.targets += counts ? 1 : 0;
        result.teacher.push_back(source);
        result.previous.push_back(batch.token[at]);
        result.weight.push_back(weight);
        result.weight_sum += weight;
        const auto oldest =
            std::max<int32_t>(begin, anchor - static_cast<int32_t>(result.context.width));
        for (int32_t j = oldest; j < oldest + result.context.width; ++j) {
          result.context.entry.push_back(j < anchor ? j : -1);
        }
      }
    }
  }
  rows.sample_begin.push_back(static_cast<int32_t>(rows.rows()));
  result.context.index(batch.rows());
  return result;
}

double row_loss(const DraftObjective& objective, const DraftRow& row) {
  return objective.cross_entropy * row.cross_entropy + objective.distance * row.distance +
         objective.confidence * row.confidence_loss;
}

template <class Real>
std::vector<DraftRow> draft_loss(ThreadPool* pool,
                                 const DraftObjective& objective,
                                 const DraftHeadRows<Real>& args,
                                 const DraftHeadGradients<Real>& gradients) {
  const DraftBlocks& blocks = *args.blocks;
  const int64_t v = args.vocab, d = args.width, r = args.rank;
  std::vector<int32_t> counted;
  for (size_t i = 0; i < blocks.weight.size(); ++i) {
    if (blocks.weight[i] > 0) {
      counted.push_back(static_cast<int32_t>(i));
    }
  }
  std::vector<DraftRow> results(counted.size());
  const auto most =
      static_cast<size_t>(std::min<int64_t>(kChunk, static_cast<int64_t>(counted.size())));
  const auto values = [&](int64_t width) {
    return std::vector<Real>(most * static_cast<size_t>(width));
  };
  std::vector<Real> draft = values(v), target = values(v), hidden = values(d);
  std::vector<Real> embed = values(r), dembed = values(r), dlogit = values(1);
  for (size_t first = 0; first < counted.size(); first += most) {
    const size_t n = std::min(most, counted.size() - first);
    const auto rows = static_cast<int64_t>(n);
    for (size_t i = 0; i < n; ++i) {
      const auto row = static_cast<size_t>(counted[first + i]);
      const auto at = static_cast<int64_t>(i);
      std::copy_n(args.base + static_cast<int64_t>(row) * v, v, draft.data() + at * v);
      std::copy_n(args.target + blocks.teacher[row] * d, d, hidden.data() + at * d);
      std::copy_n(args.markov_embed + blocks.previous[row] * r, r, embed.data() + at * r);
    }
    gemm(pool,
         Gemm<Real>{rows, v, r, embed.data(), r, 1, args.markov_head, 1, r, draft.data(), v, true});
    linear_forward(
        pool, LinearShape<Real>{rows, v, d, d, v}, hidden.data(), args.head, target.data());
    // Turns the drafter's logits into their gradient.
    parallel_for(pool, rows, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto row = static_cast<size_t>(counted[first + static_cast<size_t>(i)]);
        const int32_t label = blocks.rows.target[row];
        Real *p = draft.data() + i * v, *q = target.data() + i * v;
        DraftRow& result = results[first + static_cast<size_t>(i)];
        result.row = static_cast<int64_t>(row);
        const Real own = p[label];
        result.cross_entropy = static_cast<double>(softmax(p, v) - own);
        softmax(q, v);
        // `along`: the mean of the distance's slope under p.
        Real distance = 0, along = 0;
        for (int64_t j = 0; j < v; ++j) {
          distance += std::fabs(p[j] - q[j]);
          along += p[j] > q[j] ? p[j] : -p[j];
        }
        result.distance = static_cast<double>(distance);
        result.acceptance = std::clamp(1.0 - 0.5 * result.distance, 0.0, 1.0);
        const Real* x = args.x + static_cast<int64_t>(row) * d;
        const Real logit =
            dot(x, args.confidence, d) + dot(embed.data() + i * r, args.confidence + d, r);
        result.confidence = static_cast<double>(logit);
        result.confidence_loss = binary_cross_entropy(result.confidence, result.acceptance);
        const double scale = gradients.scale * blocks.weight[row];
        dlogit[static_cast<size_t>(i)] = static_cast<Real>(scale * objective.confidence) *
                                         (sigmoid(logit) - static_cast<Real>(result.acceptance));
        const auto ce = static_cast<Real>(scale * objective.cross_entropy);
        const auto l1 = static_cast<Real>(scale * objective.distance);
        for (int64_t j = 0; j < v; ++j) {
          const Real slope = p[j] > q[j] ? Real{1} : Real{-1};
          p[j] *= ce + l1 * (slope - along);
        }
        p[label] -= ce;
      }
    });
    if (gradients.dbase == nullptr) {
      continue;
    }
    std::fill(dembed.begin(), dembed.end(), Real{0});
    const LinearShape<Real> markov{rows, v, r, r, v};
    linear_input_gradient(pool, markov, draft.data(), args.markov_head, dembed.data());
    linear_weight_gradient(pool, markov, draft.data(), embed.data(), gradients.dmarkov_head);
    for (size_t i = 0; i < n; ++i) {
      const auto row = static_cast<int64_t>(counted[first + i]), at = static_cast<int64_t>(i);
      const Real g = dlogit[i];
      axpy(Real{1}, draft.data() + at * v, v, gradients.dbase + row * v);
      axpy(g, args.confidence, d, gradients.dx + row * d);
      axpy(g, args.x + row * d, d, gradients.dconfidence);
      axpy(g, embed.data() + at * r, r, gradients.dconfidence + d);
      axpy(g, args.confidence + d, r, dembed.data() + at * r);
      // One token may stand before several rows: they are added in order.
      const int32_t token = blocks.previous[static_cast<size_t>(row)];
      axpy(Real{1}, dembed.data() + at * r, r, gradients.dmarkov_embed + token * r);
    }
  }
  return results;
}

template std::vector<DraftRow> draft_loss(ThreadPool*,
                                          const DraftObjective&,
                                          const DraftHeadRows<float>&,
                                          const DraftHeadGradients<float>&);
template std::vector<DraftRow> draft_loss(ThreadPool*,
                                          const DraftObjective&,
                                          const DraftHeadRows<double>&,
                                          const DraftHeadGradients<double>&);

}  // namespace cachalot::train
