// Residual streams: embedding, hyper-connection sites, the head.
// Source of the rules: official reference, model.py (Block.hc_pre, hc_post, ParallelHead,
// DSparkMarkovHead, DSparkConfidenceHead).
#include <algorithm>

#include "ops/ref/common.h"
#include "ops/ref/kernels.h"

namespace cachalot::ops::ref {
namespace {

// Row t of the streams with the pending output applied, rounded to the streams' dtype. [M * D]
std::vector<double> expanded_row(const TensorView& x, const Pending& pending, int64_t t) {
  const int64_t m = x.dim(1), d = x.dim(2);
  std::vector<double> row(static_cast<size_t>(m * d));
  for (int64_t k = 0; k < m; ++k) {
    for (int64_t i = 0; i < d; ++i) {
      double value = load(x, (t * m + k) * d + i);
      if (!pending.empty()) {
        const float* comb = pending.comb.as<float>() + t * m * m;
        value =
            static_cast<double>(pending.post.as<float>()[t * m + k]) * load(pending.y, t * d + i);
        for (int64_t j = 0; j < m; ++j) {
          value += static_cast<double>(comb[j * m + k]) * load(x, (t * m + j) * d + i);
        }
        value = rounded(value, x.dtype);
      }
      row[static_cast<size_t>(k * d + i)] = value;
    }
  }
  return row;
}

// sum_j pre_j X_j, rounded to the streams' dtype. [D]
std::vector<double> collapse(
    const std::vector<double>& x, const float* pre, int64_t m, int64_t d, DType dtype) {
  std::vector<double> u(static_cast<size_t>(d));
  for (int64_t i = 0; i < d; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < m; ++j) {
      sum += static_cast<double>(pre[j]) * x[static_cast<size_t>(j * d + i)];
    }
    u[static_cast<size_t>(i)] = rounded(sum, dtype);
  }
  return u;
}

// Softmax over columns plus eps, then alternating normalizations that end on the columns.
void sinkhorn(std::vector<double>& c, int64_t m, double eps, int iters) {
  const auto at = [&](int64_t j, int64_t k) -> double& {
    return c[static_cast<size_t>(j * m + k)];
  };
  for (int64_t j = 0; j < m; ++j) {
    double best = at(j, 0), sum = 0;
    for (int64_t k = 1; k < m; ++k) {
      best = std::max(best, at(j, k));
    }
    for (int64_t k = 0; k < m; ++k) {
      at(j, k) = std::exp(at(j, k) - best);
      sum += at(j, k);
    }
    for (int64_t k = 0; k < m; ++k) {
      at(j, k) = at(j, k) / sum + eps;
    }
  }
  for (int iter = 0; iter < iters; ++iter) {
    if (iter > 0) {
      for (int64_t j = 0; j < m; ++j) {
        double sum = eps;
        for (int64_t k = 0; k < m; ++k) {
          sum += at(j, k);
        }
        for (int64_t k = 0; k < m; ++k) {
          at(j, k) /= sum;
        }
      }
    }
    for (int64_t k = 0; k < m; ++k) {
      double sum = eps;
      for (int64_t j = 0; j < m; ++j) {
        sum += at(j, k);
      }
      for (int64_t j = 0; j < m; ++j) {
        at(j, k) /= sum;
      }
    }
  }
}

}  // namespace

Status embed(OpContext&, const EmbedArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  for (int64_t row = 0; row < t; ++row) {
    const int32_t token = args.token.as<int32_t>()[row];
    const std::vector<float> values =
        token < 0 ? input_row(args.images, -1 - token, false) : weight_row(args.weight, token);
    for (int64_t j = 0; j < m; ++j) {
      for (int64_t i = 0; i < d; ++i) {
        store(args.x, (row * m + j) * d + i, values[static_cast<size_t>(i)]);
      }
    }
  }
  return {};
}

Status hc_expand(OpContext&, const HcExpandArgs& args) {
  const int64_t t = args.x.dim(0), width = args.x.dim(1) * args.x.dim(2);
  for (int64_t row = 0; row < t; ++row) {
    const std::vector<double> x = expanded_row(args.x, args.pending, row);
    for (int64_t i = 0; i < width; ++i) {
      store(args.out, row * width + i, x[static_cast<size_t>(i)]);
    }
  }
  return {};
}

Status hc_site(OpContext&, const HcSiteArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2), width = m * d;
  const float* fn = args.fn.as<float>();
  const float* base = args.base.as<float>();
  const float* scale = args.scale.as<float>();
  for (int64_t row = 0; row < t; ++row) {
    const std::vector<double> x = expanded_row(args.x, args.pending, row);
    double square = 0;
    for (double v : x) {
      square += v * v;
    }
    const double factor = 1.0 / std::sqrt(square / static_cast<double>(width) + args.rms_eps);
    const auto predict = [&](int64_t r) {
      double sum = 0;
      for (int64_t i = 0; i < width; ++i) {
        sum += static_cast<double>(fn[r * width + i]) * x[static_cast<size_t>(i)];
      }
      return sum * factor;
    };
    for (int64_t j = 0; j < m; ++j) {
      args.pre_out.as<float>()[row * m + j] =
          static_cast<float>(sigmoid(predict(j) * scale[0] + base[j]) + args.hc_eps);
      args.post_out.as<float>()[row * m + j] =
          static_cast<float>(2.0 * sigmoid(predict(m + j) * scale[1] + base[m + j]));
    }
    std::vector<double> comb(static_cast<size_t>(m * m));
    for (int64_t i = 0; i < m * m; ++i) {
      comb[static_cast<size_t>(i)] = predict(2 * m + i) * scale[2] + base[2 * m + i];
    }
    sinkhorn(comb, m, args.hc_eps, args.sinkhorn_iters);
    for (int64_t i = 0; i < m * m; ++i) {
      args.comb_out.as<float>()[row * m * m + i] = static_cast<float>(comb[static_cast<size_t>(i)]);
    }
    const std::vector<double> u = rms_norm(
        collapse(x, args.pre.as<float>() + row * m, m, d, args.x.dtype), args.norm, args.rms_eps);
    for (int64_t i = 0; i < d; ++i) {
      store(args.u, row * d + i, u[static_cast<size_t>(i)]);
    }
    for (int64_t i = 0; i < width; ++i) {
      store(args.x_out, row * width + i, x[static_cast<size_t>(i)]);
    }
  }
  return {};
}

Status hc_collapse(OpContext&, const HcCollapseArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2), width = args.out.dim(1);
  for (int64_t row = 0; row < t; ++row) {
    const std::vector<double> x = collapse(expanded_row(args.x, args.pending, row),
                                           args.pre.as<float>() + row * m,
                                           m,
                                           d,
                                           args.x.dtype);
    for (int64_t i = 0; i < d; ++i) {
      store(args.out, row * width + args.column + i, x[static_cast<size_t>(i)]);
    }
  }
  return {};
}

Status rms_norm(OpContext&, const RmsNormArgs& args) {
  const int64_t t = args.x.dim(0), d = args.x.dim(1);
  for (int64_t row = 0; row < t; ++row) {
    std::vector<double> x(static_cast<size_t>(d));
    for (int64_t i = 0; i < d; ++i) {
      x[static_cast<size_t>(i)] = load(args.x, row * d + i);
    }
    const std::vector<double> y = rms_norm(x, args.norm, args.rms_eps);
    for (int64_t i = 0; i < d; ++i) {
      store(args.y, row * d + i, y[static_cast<size_t>(i)]);
    }
  }
  return {};
}

Status head(OpContext&, const HeadArgs& args) {
  const int64_t m = args.x.dim(1), d = args.x.dim(2), v = args.weight.out;
  for (int64_t n = 0; n < args.select.dim(0); ++n) {
    const int64_t row = args.select.as<int32_t>()[n];
    const std::vector<double> x = expanded_row(args.x, args.pending, row);
    std::vector<double> h = rms_norm(
        collapse(x, args.pre.as<float>() + row * m, m, d, args.x.dtype), args.norm, args.rms_eps);
    for (double& value : h) {
      value = rounded(value, args.x.dtype);
    }
    for (int64_t token = 0; token < v; ++token) {
      const std::vector<float> w = weight_row(args.weight, token);
      double sum = 0;
      for (int64_t i = 0; i < d; ++i) {
        sum += h[static_cast<size_t>(i)] * w[static_cast<size_t>(i)];
      }
      args.logits.as<float>()[n * v + token] = static_cast<float>(sum);
    }
  }
  return {};
}

Status draft_head(OpContext&, const DraftHeadArgs& args) {
  const int64_t d = args.x.dim(1), v = args.base.dim(1), r = args.embed.in;
  for (int64_t n = 0; n < args.select.dim(0); ++n) {
    const int64_t row = args.select.as<int32_t>()[n];
    const std::vector<float> embed = weight_row(args.embed, args.previous.as<int32_t>()[n]);
    for (int64_t token = 0; token < v; ++token) {
      const std::vector<float> w = weight_row(args.head, token);
      double sum = args.base.as<float>()[row * v + token];
      for (int64_t i = 0; i < r; ++i) {
        sum += static_cast<double>(w[static_cast<size_t>(i)]) * embed[static_cast<size_t>(i)];
      }
      args.logits.as<float>()[n * v + token] = static_cast<float>(sum);
    }
    const std::vector<float> proj = weight_row(args.proj, 0);
    double sum = 0;
    for (int64_t i = 0; i < d + r; ++i) {
      const double value = i < d ? load(args.x, row * d + i) : embed[static_cast<size_t>(i - d)];
      sum += proj[static_cast<size_t>(i)] * value;
    }
    args.confidence.as<float>()[n] = static_cast<float>(sum);
  }
  return {};
}

}  // namespace cachalot::ops::ref
