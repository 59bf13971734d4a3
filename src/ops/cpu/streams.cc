// Residual streams: embedding, hyper-connection sites, the head.
#include <array>
#include <cmath>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/product.h"

namespace cachalot::ops::cpu {
namespace {

// Rows of hyper-connection sites are handled in chunks: their FP32 copies stay in the last-level
// cache.
constexpr int64_t kSiteRows = 128;

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
  const bool bf16_table = args.weight.format == WeightFormat::kBF16;
  const int64_t bytes = bf16_table ? 2 : 4;
  const auto* table = static_cast<const uint8_t*>(args.weight.values.data);
  Scratch scratch(ctx);
  parallel_rows(
      ctx, scratch, args.x.dim(0), padded(d), [&](int64_t begin, int64_t end, float* row) {
        for (int64_t t = begin; t < end; ++t) {
          const void* source = table + args.token.as<int32_t>()[t] * d * bytes;
          load_row(source, bf16_table ? DType::kBF16 : DType::kF32, d, row);
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

Status hc_site(OpContext& ctx, const HcSiteArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  const int64_t width = m * d, coefficients = (2 + m) * m, stride = row_stride(width);
  const bool copy = args.x_out.data != args.x.data;
  Weight fn;
  fn.values = args.fn;
  fn.format = WeightFormat::kF32;
  fn.out = coefficients;
  fn.in = width;
  SiteCoefficients site;
  site.m = m;
  site.base = args.base.as<float>();
  site.scale = args.scale.as<float>();
  site.eps = args.hc_eps;
  site.iters = args.sinkhorn_iters;

  Scratch scratch(ctx);
  const int64_t chunk = std::min(kSiteRows, t);
  float* streams = scratch.array<float>(chunk * stride);
  float* factor = scratch.array<float>(chunk);
  float* mix = scratch.array<float>(chunk * coefficients);
  for (int64_t first = 0; first < t; first += chunk) {
    const int64_t count = std::min(chunk, t - first);
    {
      Scratch inner(ctx);
      parallel_rows(
          ctx, inner, count, padded(d), [&](int64_t begin, int64_t end, float* collapsed) {
            for (int64_t i = begin; i < end; ++i) {
              const int64_t row = first + i;
              float* x = streams + i * stride;
              expanded_row(args.x, args.pending, row, x);
              if (copy) {
                store_row(x, width, row_of(args.x_out, row), args.x_out.dtype);
              }
              const float mean = sum_squares(x, width) / static_cast<float>(width);
              factor[i] = 1.0f / std::sqrt(mean + args.rms_eps);
              collapse_streams(x, args.pre.as<float>() + row * m, m, d, args.x.dtype, collapsed);
              norm_row(collapsed, args.norm, d, args.rms_eps, collapsed);
              store_row(collapsed, d, row_of(args.u, row), args.u.dtype);
            }
          });
    }
    const std::array<Product, 1> product = {
        Product{&fn, {streams, stride}, {mix, DType::kF32, {count, coefficients}}}};
    run_products(ctx, product, count);
    parallel_for(ctx, count, 8, [&](int64_t begin, int64_t end) {
      site_coefficients(site,
                        mix + begin * coefficients,
                        factor + begin,
                        end - begin,
                        args.pre_out.as<float>() + (first + begin) * m,
                        args.post_out.as<float>() + (first + begin) * m,
                        args.comb_out.as<float>() + (first + begin) * m * m);
    });
  }
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
  run_products(ctx, product, n);
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
  run_products(ctx, products, n);
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
