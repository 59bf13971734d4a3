// Residual streams: embedding, hyper-connection sites, the head.
#include <array>
#include <cmath>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/product.h"

namespace cachalot::ops::cpu {
namespace {

// Rows of a hyper-connection site that a thread takes at a time: their FP32 copies should stay in
// its L2, but fn passes once per chunk.
constexpr int64_t kSiteRows = 16;

uint8_t* row_of(const TensorView& view, int64_t row) {
  return static_cast<uint8_t*>(view.data) + row * (view.bytes() / view.dim(0));
}

// Row t of the streams with the pending output applied, as a row of M * D floats.
void expanded_row(const TensorView& x, const Pending& pending, int64_t t, float* out) {
  const int64_t m = x.dim(1), d = x.dim(2);
  if (pending.empty()) {
    load_row(row_of(x, t), x.dtype, m * d, out);
    return;
  }
  expand_streams(row_of(x, t),
                 row_of(pending.y, t),
                 x.dtype,
                 pending.post.as<float>() + t * m,
                 pending.comb.as<float>() + t * m * m,
                 m,
                 d,
                 out);
}

}  // namespace

Status embed(OpContext& ctx, const EmbedArgs& args) {
  const int64_t m = args.x.dim(1), d = args.x.dim(2);
  Scratch scratch(ctx);
  parallel_rows(
      ctx, scratch, args.x.dim(0), padded(d), [&](int64_t begin, int64_t end, float* row) {
        for (int64_t t = begin; t < end; ++t) {
          const int32_t token = args.token.as<int32_t>()[t];
          const TensorView& source = token < 0 ? args.images : args.weight.values;
          load_row(row_of(source, token < 0 ? -1 - token : token), source.dtype, d, row);
          for (int64_t j = 0; j < m; ++j) {
            auto* target =
                static_cast<uint8_t*>(args.x.data) + (t * m + j) * d * dtype_bytes(args.x.dtype);
            store_row(row, d, target, args.x.dtype);
          }
        }
      });
  return {};
}

Status hc_expand(OpContext& ctx, const HcExpandArgs& args) {
  const int64_t width = args.x.dim(1) * args.x.dim(2);
  Scratch scratch(ctx);
  parallel_rows(
      ctx, scratch, args.x.dim(0), padded(width), [&](int64_t begin, int64_t end, float* row) {
        for (int64_t t = begin; t < end; ++t) {
          expanded_row(args.x, args.pending, t, row);
          store_row(row, width, row_of(args.out, t), args.out.dtype);
        }
      });
  return {};
}

namespace {

// The parts of a hyper-connection site; rows are those of args.x.
class Site {
 public:
  explicit Site(const HcSiteArgs& args)
      : args_(args), m_(args.x.dim(1)), d_(args.x.dim(2)), copy_(args.x_out.data != args.x.data) {
    fn_.values = args.fn;
    fn_.format = WeightFormat::kF32;
    fn_.out = (2 + m_) * m_;
    fn_.in = m_ * d_;
    site_.m = m_;
    site_.base = args.base.as<float>();
    site_.scale = args.scale.as<float>();
    site_.eps = args.hc_eps;
    site_.iters = args.sinkhorn_iters;
  }

  const Weight& fn() const { return fn_; }
  int64_t coefficients() const { return fn_.out; }
  int64_t stride() const { return row_stride(fn_.in); }

  // x: the expanded streams of a row; factor: its RMS factor. Writes x_out and u; collapsed is
  // padded(D) floats of scratch.
  void expand(int64_t row, float* x, float* factor, float* collapsed) const {
    expanded_row(args_.x, args_.pending, row, x);
    if (copy_) {
      store_row(x, fn_.in, row_of(args_.x_out, row), args_.x_out.dtype);
    }
    const float mean = sum_squares(x, fn_.in) / static_cast<float>(fn_.in);
    *factor = 1.0f / std::sqrt(mean + args_.rms_eps);
    collapse_streams(x, args_.pre.as<float>() + row * m_, m_, d_, args_.x.dtype, collapsed);
    norm_row(collapsed, args_.norm, d_, args_.rms_eps, collapsed);
    store_row(collapsed, d_, row_of(args_.u, row), args_.u.dtype);
  }

  // The coefficients of rows from `first` on; mix [count, (2 + M) M].
  void finish(int64_t first, int64_t count, const float* mix, const float* factor) const {
    site_coefficients(site_,
                      mix,
                      factor,
                      count,
                      args_.pre_out.as<float>() + first * m_,
                      args_.post_out.as<float>() + first * m_,
                      args_.comb_out.as<float>() + first * m_ * m_);
  }

 private:
  const HcSiteArgs& args_;
  int64_t m_;
  int64_t d_;
  bool copy_;
  Weight fn_;
  SiteCoefficients site_;
};

}  // namespace

Status hc_site(OpContext& ctx, const HcSiteArgs& args) {
  const Site site(args);
  const int64_t t = args.x.dim(0), row_scratch = padded(args.x.dim(2));
  const int64_t stride = site.stride(), coefficients = site.coefficients();
  Scratch scratch(ctx);
  if (t < kSiteRows * thread_count(ctx)) {
    // All threads share each part.
    float* streams = scratch.array<float>(t * stride);
    float* factor = scratch.array<float>(t);
    float* mix = scratch.array<float>(t * coefficients);
    parallel_rows(ctx, scratch, t, row_scratch, [&](int64_t begin, int64_t end, float* collapsed) {
      for (int64_t row = begin; row < end; ++row) {
        site.expand(row, streams + row * stride, factor + row, collapsed);
      }
    });
    const std::array<Product, 1> product = {
        Product{&site.fn(), {streams, stride}, {mix, DType::kF32, {t, coefficients}}}};
    run_products(ctx, product);
    parallel_for(ctx, t, 8, [&](int64_t begin, int64_t end) {
      site.finish(begin, end - begin, mix + begin * coefficients, factor + begin);
    });
    return {};
  }
  const int64_t floats = kSiteRows * (stride + coefficients + 1) + row_scratch;
  parallel_rows(
      ctx, scratch, ceil_div(t, kSiteRows), floats, [&](int64_t begin, int64_t end, float* memory) {
        float* streams = memory;
        float* collapsed = streams + kSiteRows * stride;
        float* mix = collapsed + row_scratch;
        float* factor = mix + kSiteRows * coefficients;
        for (int64_t chunk = begin; chunk < end; ++chunk) {
          const int64_t first = chunk * kSiteRows, count = std::min(kSiteRows, t - first);
          for (int64_t i = 0; i < count; ++i) {
            site.expand(first + i, streams + i * stride, factor + i, collapsed);
          }
          weight_dots(site.fn(), 0, coefficients, {streams, stride}, count, mix, coefficients);
          site.finish(first, count, mix, factor);
        }
      });
  return {};
}

Status hc_collapse(OpContext& ctx, const HcCollapseArgs& args) {
  const int64_t m = args.x.dim(1), d = args.x.dim(2), bytes = dtype_bytes(args.out.dtype);
  Scratch scratch(ctx);
  parallel_rows(ctx,
                scratch,
                args.x.dim(0),
                padded(m * d) + padded(d),
                [&](int64_t begin, int64_t end, float* streams) {
                  float* out = streams + padded(m * d);
                  for (int64_t t = begin; t < end; ++t) {
                    expanded_row(args.x, args.pending, t, streams);
                    collapse_streams(
                        streams, args.pre.as<float>() + t * m, m, d, args.x.dtype, out);
                    store_row(out, d, row_of(args.out, t) + args.column * bytes, args.out.dtype);
                  }
                });
  return {};
}

Status rms_norm(OpContext& ctx, const RmsNormArgs& args) {
  const int64_t d = args.x.dim(1);
  Scratch scratch(ctx);
  parallel_rows(
      ctx, scratch, args.x.dim(0), padded(d), [&](int64_t begin, int64_t end, float* row) {
        for (int64_t t = begin; t < end; ++t) {
          load_row(row_of(args.x, t), args.x.dtype, d, row);
          norm_row(row, args.norm, d, args.rms_eps, row);
          store_row(row, d, row_of(args.y, t), args.y.dtype);
        }
      });
  return {};
}

Status head(OpContext& ctx, const HeadArgs& args) {
  const int64_t n = args.select.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  Scratch scratch(ctx);
  float* rows = scratch.array<float>(n * padded(d));
  parallel_rows(ctx, scratch, n, padded(m * d), [&](int64_t begin, int64_t end, float* streams) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = args.select.as<int32_t>()[i];
      float* h = rows + i * padded(d);
      expanded_row(args.x, args.pending, row, streams);
      collapse_streams(streams, args.pre.as<float>() + row * m, m, d, args.x.dtype, h);
      norm_row(h, args.norm, d, args.rms_eps, h);
      round_row(h, d, args.x.dtype);
    }
  });
  const std::array<Product, 1> product = {Product{&args.weight, {rows, padded(d)}, args.logits}};
  run_products(ctx, product);
  return {};
}

Status draft_head(OpContext& ctx, const DraftHeadArgs& args) {
  const int64_t n = args.select.dim(0), d = args.x.dim(1), v = args.base.dim(1);
  const int64_t r = args.embed.in;
  const DType table = args.embed.values.dtype;
  Scratch scratch(ctx);
  float* embed = scratch.array<float>(n * padded(r));
  float* joined = scratch.array<float>(n * padded(d + r));
  parallel_for(ctx, n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* e = embed + i * padded(r);
      float* both = joined + i * padded(d + r);
      load_row(row_of(args.embed.values, args.previous.as<int32_t>()[i]), table, r, e);
      load_row(row_of(args.x, args.select.as<int32_t>()[i]), args.x.dtype, d, both);
      std::copy_n(e, r, both + d);
      std::fill(both + d + r, both + padded(d + r), 0.0f);
    }
  });
  const std::array<Product, 2> products = {
      Product{&args.head, {embed, padded(r)}, args.logits},
      Product{&args.proj, {joined, padded(d + r)}, args.confidence}};
  run_products(ctx, products);
  parallel_for(ctx, n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* base = args.base.as<float>() + args.select.as<int32_t>()[i] * v;
      float* logits = args.logits.as<float>() + i * v;
      for (int64_t token = 0; token < v; ++token) {
        logits[token] += base[token];
      }
    }
  });
  return {};
}

}  // namespace cachalot::ops::cpu
