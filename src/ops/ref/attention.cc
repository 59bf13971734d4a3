// Window rows, compressor, indexer, attention.
// Source of the rules: official reference, model.py (Attention, Compressor, Indexer) and kernel.py.
#include <algorithm>
#include <cstring>
#include <limits>

#include "base/math.h"
#include "ops/ref/common.h"
#include "ops/ref/kernels.h"

namespace cachalot::ops::ref {
namespace {

std::vector<double> load_row(const TensorView& view, int64_t row, int64_t n) {
  std::vector<double> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    values[static_cast<size_t>(i)] = load(view, row * n + i);
  }
  return values;
}

void round_all(std::vector<double>& values, DType dtype) {
  for (double& value : values) {
    value = rounded(value, dtype);
  }
}

std::vector<float> to_float(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// Norm, round, rotate, round: the value that a cache row quantizes.
std::vector<float> normed_rotated(const std::vector<double>& x,
                                  const TensorView& norm,
                                  double eps,
                                  const float* cos_sin,
                                  int64_t half,
                                  DType dtype) {
  std::vector<double> y = rms_norm(x, norm, eps);
  round_all(y, dtype);
  rotate(y.data(), static_cast<int64_t>(y.size()), cos_sin, half, 1);
  round_all(y, dtype);
  return to_float(y);
}

// Number of entries of `ratio` that position p sees.
int64_t visible_entries(int64_t p, int64_t ratio) {
  return (p + 1) / ratio;
}

// The best `count` of `scores` (ties: the lower index; -inf never), ascending.
std::vector<int32_t> best(const std::vector<float>& scores, int64_t count) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] != -std::numeric_limits<float>::infinity()) {
      order.push_back(static_cast<int32_t>(i));
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(std::min<size_t>(order.size(), static_cast<size_t>(count)));
  std::sort(order.begin(), order.end());
  return order;
}

void write_ids(const TensorView& out, int64_t row, const std::vector<int32_t>& ids) {
  const int64_t width = out.dim(1);
  int32_t* target = out.as<int32_t>() + row * width;
  std::fill_n(target, width, -1);
  std::copy(ids.begin(), ids.end(), target);
}

}  // namespace

Status rope_table(OpContext&, const RopeTableArgs& args) {
  const int64_t n = args.position.dim(0), half = args.frequency.dim(0);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < half; ++i) {
      // The FP32 product is part of the definition: near position 2^20 it is off by up to 0.03 rad.
      const float angle =
          static_cast<float>(args.position.as<int32_t>()[row]) * args.frequency.as<float>()[i];
      float* out = args.table.as<float>() + (row * half + i) * 2;
      out[0] = static_cast<float>(std::cos(static_cast<double>(angle)));
      out[1] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
  return {};
}

Status qkv_finish(OpContext&, const QkvFinishArgs& args) {
  const int64_t t = args.kv.dim(0), k = args.kv.dim(1), half = args.rope.dim(1);
  const int64_t q = args.t.empty() ? 0 : args.t.dim(1);
  for (int64_t row = 0; row < t; ++row) {
    if (q > 0) {
      const std::vector<double> r = rms_norm(load_row(args.t, row, q), args.q_norm, args.rms_eps);
      for (int64_t i = 0; i < q; ++i) {
        store(args.r, row * q + i, r[static_cast<size_t>(i)]);
      }
    }
    const std::vector<float> kv = normed_rotated(load_row(args.kv, row, k),
                                                 args.kv_norm,
                                                 args.rms_eps,
                                                 args.rope.as<float>() + row * half * 2,
                                                 half,
                                                 args.kv.dtype);
    quant::window_row_encode(
        kv.data(), k, args.fresh.as<uint8_t>() + row * quant::window_row_bytes(k));
  }
  return {};
}

Status compress_pool(OpContext&, const CompressPoolArgs& args) {
  const int64_t c = args.norm.dim(0);
  for (int64_t g = 0; g < args.groups.groups; ++g) {
    const int64_t last = args.groups.row.as<int32_t>()[g];
    std::vector<double> pooled(static_cast<size_t>(c));
    if (args.groups.ratio == 1) {
      pooled = load_row(args.kv, last, c);
    } else {
      const int64_t s = args.groups.sequence.as<int32_t>()[g];
      const bool carried = last == args.rows.row_begin.as<int32_t>()[s];
      const float* kv0 = carried ? args.open[s] : args.kv.as<float>() + (last - 1) * c;
      const float* gate0 = carried ? args.open[s] + c : args.gate.as<float>() + (last - 1) * c;
      const float* kv1 = args.kv.as<float>() + last * c;
      const float* gate1 = args.gate.as<float>() + last * c;
      for (int64_t i = 0; i < c; ++i) {
        const double w1 = sigmoid(static_cast<double>(gate1[i]) - gate0[i]);
        pooled[static_cast<size_t>(i)] = kv0[i] * (1.0 - w1) + kv1[i] * w1;
      }
      round_all(pooled, args.latent.dtype);
    }
    const std::vector<double> latent = rms_norm(pooled, args.norm, args.rms_eps);
    for (int64_t i = 0; i < c; ++i) {
      store(args.latent, g * c + i, latent[static_cast<size_t>(i)]);
    }
  }
  return {};
}

Status compress_store(OpContext&, const CompressStoreArgs& args) {
  const int64_t c = args.latent.dim(1), di = args.key.dim(1), half = args.rope.dim(1);
  for (int64_t g = 0; g < args.groups.groups; ++g) {
    const int64_t s = args.groups.sequence.as<int32_t>()[g];
    const int64_t entry = args.groups.entry.as<int32_t>()[g];
    if (entry < 0) {
      continue;
    }
    const float* cos_sin = args.rope.as<float>() + g * half * 2;
    std::vector<double> latent = load_row(args.latent, g, c);
    rotate(latent.data(), c, cos_sin, half, 1);
    round_all(latent, args.latent.dtype);
    quant::main_row_encode(to_float(latent).data(), c, args.main[s].row(entry));
    const std::vector<float> key = normed_rotated(
        load_row(args.key, g, di), args.k_norm, args.rms_eps, cos_sin, half, args.key.dtype);
    quant::index_row_encode(key.data(), di, args.index[s].row(entry));
  }
  return {};
}

Status index_select(OpContext&, const IndexSelectArgs& args) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t t = args.rows.rows, hi = args.w.dim(1), di = args.q.dim(1) / hi;
  const int64_t half = args.rope.dim(1), k = args.selected.dim(1);
  const double scale =
      1.0 / std::sqrt(static_cast<double>(di)) / std::sqrt(static_cast<double>(hi));
  for (int64_t row = 0; row < t; ++row) {
    const int64_t s = args.rows.sequence.as<int32_t>()[row];
    const int64_t visible = visible_entries(args.rows.position.as<int32_t>()[row], args.ratio);
    std::vector<float> q(static_cast<size_t>(hi * di));
    std::vector<uint8_t> bytes(static_cast<size_t>(quant::index_row_bytes(di)));
    for (int64_t h = 0; h < hi; ++h) {
      std::vector<double> head(static_cast<size_t>(di));
      for (int64_t i = 0; i < di; ++i) {
        head[static_cast<size_t>(i)] = load(args.q, (row * hi + h) * di + i);
      }
      rotate(head.data(), di, args.rope.as<float>() + row * half * 2, half, 1);
      round_all(head, args.q.dtype);
      quant::index_row_encode(to_float(head).data(), di, bytes.data());
      quant::index_row_decode(bytes.data(), di, q.data() + h * di);
    }
    std::vector<float> scores(static_cast<size_t>(visible));
    std::vector<float> key(static_cast<size_t>(di));
    for (int64_t j = 0; j < visible; ++j) {
      quant::index_row_decode(args.index[s].row(j), di, key.data());
      double sum = 0;
      for (int64_t h = 0; h < hi; ++h) {
        double dot = 0;
        for (int64_t i = 0; i < di; ++i) {
          dot +=
              static_cast<double>(q[static_cast<size_t>(h * di + i)]) * key[static_cast<size_t>(i)];
        }
        sum += std::max(dot, 0.0) * load(args.w, row * hi + h);
      }
      scores[static_cast<size_t>(j)] = static_cast<float>(sum * scale);
    }
    if (!args.candidates_out.empty()) {
      const int64_t block = args.candidate_block, n_blocks = ceil_div(visible, block);
      std::vector<float> block_scores(static_cast<size_t>(n_blocks), kNone);
      for (int64_t j = 0; j < visible; ++j) {
        float& top = block_scores[static_cast<size_t>(j / block)];
        top = std::max(top, scores[static_cast<size_t>(j)]);
      }
      if (n_blocks > 0) {
        block_scores.back() = std::numeric_limits<float>::infinity();
      }
      write_ids(args.candidates_out, row, best(block_scores, args.candidates_out.dim(1)));
    }
    if (!args.candidates.empty()) {
      const int64_t width = args.candidates.dim(1);
      const int32_t* ids = args.candidates.as<int32_t>() + row * width;
      for (int64_t j = 0; j < visible; ++j) {
        const auto id = static_cast<int32_t>(j / args.candidate_block);
        if (std::find(ids, ids + width, id) == ids + width) {
          scores[static_cast<size_t>(j)] = kNone;
        }
      }
    }
    write_ids(args.selected, row, best(scores, k));
  }
  return {};
}

Status attend(OpContext&, const AttendArgs& args) {
  const int64_t t = args.rows.rows, h = args.sink.dim(0), k = args.q.dim(1) / h;
  const int64_t half = args.rope.dim(1), row_bytes = quant::window_row_bytes(k);
  const double scale = 1.0 / std::sqrt(static_cast<double>(k));
  const DType dtype = args.q.dtype;
  for (int64_t row = 0; row < t; ++row) {
    const int64_t s = args.rows.sequence.as<int32_t>()[row];
    const int64_t p = args.rows.position.as<int32_t>()[row];
    const int64_t start = args.rows.start.as<int32_t>()[s];
    const int64_t first_row = args.rows.row_begin.as<int32_t>()[s];
    const int64_t window = args.window.window;
    const WindowRange seen =
        window_range(window, args.window.block, args.window.floor.as<int32_t>()[s], start, p);
    std::vector<std::vector<float>> keys;
    const auto push = [&](const auto& decode) {
      keys.emplace_back(static_cast<size_t>(k));
      decode(keys.back().data());
    };
    for (int64_t position = seen.first; position <= seen.last; ++position) {
      const uint8_t* bytes =
          position >= start
              ? args.window.fresh.as<uint8_t>() + (first_row + position - start) * row_bytes
              : args.window.rings[s] + position % window * row_bytes;
      push([&](float* out) { quant::window_row_decode(bytes, k, out); });
    }
    if (args.main != nullptr) {
      const int64_t width = args.selected.dim(1);
      for (int64_t i = 0; i < width; ++i) {
        const int32_t entry = args.selected.as<int32_t>()[row * width + i];
        if (entry >= 0) {
          push([&](float* out) { quant::main_row_decode(args.main[s].row(entry), k, out); });
        }
      }
    }
    const auto n_keys = static_cast<int64_t>(keys.size());
    for (int64_t head = 0; head < h; ++head) {
      std::vector<double> q(static_cast<size_t>(k));
      for (int64_t i = 0; i < k; ++i) {
        q[static_cast<size_t>(i)] = load(args.q, (row * h + head) * k + i);
      }
      rotate(q.data(), k, args.rope.as<float>() + row * half * 2, half, 1);
      round_all(q, dtype);
      BlockSoftmax softmax(k);
      const auto score = [&](int64_t j) {
        double dot = 0;
        for (int64_t i = 0; i < k; ++i) {
          dot += q[static_cast<size_t>(i)] * keys[static_cast<size_t>(j)][static_cast<size_t>(i)];
        }
        return dot * scale;
      };
      softmax.add(
          n_keys, dtype, score, [&](int64_t j) { return keys[static_cast<size_t>(j)].data(); });
      std::vector<double>& o = softmax.o;
      if (n_keys > 0) {
        const double sink = args.sink.as<float>()[head];
        for (double& value : o) {
          value /= softmax.sum + std::exp(sink - softmax.best);
        }
      }
      round_all(o, dtype);
      rotate(o.data(), k, args.rope.as<float>() + row * half * 2, half, -1);
      for (int64_t i = 0; i < k; ++i) {
        store(args.o, (row * h + head) * k + i, o[static_cast<size_t>(i)]);
      }
    }
  }
  return {};
}

Status commit(OpContext&, const CommitArgs& args) {
  for (int64_t s = 0; s < args.rows.sequences; ++s) {
    const int64_t first = args.rows.row_begin.as<int32_t>()[s];
    const int64_t start = args.rows.start.as<int32_t>()[s];
    const int64_t accepted = args.accepted.as<int32_t>()[s];
    for (int64_t i = 0; i < accepted; ++i) {
      for (const WindowView& window : args.windows) {
        const int64_t row_bytes = window.fresh.dim(1);
        std::memcpy(window.rings[s] + (start + i) % window.window * row_bytes,
                    window.fresh.as<uint8_t>() + (first + i) * row_bytes,
                    static_cast<size_t>(row_bytes));
      }
    }
    if (accepted > 0 && (start + accepted) % 2 == 1) {
      for (const OpenGroupView& group : args.groups) {
        const int64_t c = group.kv.dim(1), row = first + accepted - 1;
        for (int64_t i = 0; i < c; ++i) {
          group.open[s][i] = group.kv.as<float>()[row * c + i];
          group.open[s][c + i] = group.gate.as<float>()[row * c + i];
        }
      }
    }
  }
  return {};
}

}  // namespace cachalot::ops::ref
