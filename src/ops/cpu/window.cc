// Window rows, compressor, RoPE table.
#include <cmath>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"
#include "quant/block.h"

namespace cachalot::ops::cpu {
namespace {

uint8_t* row_of(const TensorView& view, int64_t row) {
  return static_cast<uint8_t*>(view.data) + row * (view.bytes() / view.dim(0));
}

// Norm, round, rotate, round: the value that a cache row quantizes.
void norm_rotate(float* row,
                 const TensorView& norm,
                 int64_t n,
                 float eps,
                 const float* cos_sin,
                 int64_t half,
                 DType act) {
  norm_row(row, norm, n, eps, row);
  round_row(row, n, act);
  rotate_row(row, n, cos_sin, half, 1.0f);
  round_row(row, n, act);
}

}  // namespace

Status rope_table(OpContext& ctx, const RopeTableArgs& args) {
  const int64_t n = args.position.dim(0), half = args.frequency.dim(0);
  const float* frequency = args.frequency.as<float>();
  parallel_for(ctx, n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto position = static_cast<float>(args.position.as<int32_t>()[row]);
      float* out = args.table.as<float>() + row * half * 2;
      for (int64_t i = 0; i < half; ++i) {
        // The FP32 product is part of the definition; cos and sin of it are not worth SIMD.
        const double angle = position * frequency[i];
        out[2 * i] = static_cast<float>(std::cos(angle));
        out[2 * i + 1] = static_cast<float>(std::sin(angle));
      }
    }
  });
  return {};
}

Status qkv_finish(OpContext& ctx, const QkvFinishArgs& args) {
  const int64_t q = args.t.empty() ? 0 : args.t.dim(1);
  const int64_t k = args.kv.dim(1), half = args.rope.dim(1);
  const DType act = args.kv.dtype;
  Scratch scratch(ctx);
  parallel_rows(ctx,
                scratch,
                args.kv.dim(0),
                padded(std::max(q, k)),
                [&](int64_t begin, int64_t end, float* row) {
                  for (int64_t t = begin; t < end; ++t) {
                    if (q > 0) {
                      load_row(row_of(args.t, t), act, q, row);
                      norm_row(row, args.q_norm, q, args.rms_eps, row);
                      store_row(row, q, row_of(args.r, t), act);
                    }
                    load_row(row_of(args.kv, t), act, k, row);
                    const float* cos_sin = args.rope.as<float>() + t * half * 2;
                    norm_rotate(row, args.kv_norm, k, args.rms_eps, cos_sin, half, act);
                    encode_window_row(row, k, row_of(args.fresh, t));
                  }
                });
  return {};
}

Status compress_pool(OpContext& ctx, const CompressPoolArgs& args) {
  const int64_t c = args.norm.dim(0);
  const DType act = args.latent.dtype;
  Scratch scratch(ctx);
  parallel_rows(
      ctx, scratch, args.groups.groups, padded(c), [&](int64_t begin, int64_t end, float* row) {
        for (int64_t g = begin; g < end; ++g) {
          const int64_t last = args.groups.row.as<int32_t>()[g];
          if (args.groups.ratio == 1) {
            load_row(row_of(args.kv, last), args.kv.dtype, c, row);
          } else {
            const int64_t s = args.groups.sequence.as<int32_t>()[g];
            // The group's first token came in an earlier step.
            const bool carried = last == args.rows.row_begin.as<int32_t>()[s];
            const float* kv = args.kv.as<float>() + last * c;
            const float* gate = args.gate.as<float>() + last * c;
            const float* kv0 = carried ? args.open[s] : kv - c;
            const float* gate0 = carried ? args.open[s] + c : gate - c;
            pool_pair(kv0, gate0, kv, gate, c, row);
            round_row(row, c, act);
          }
          norm_row(row, args.norm, c, args.rms_eps, row);
          store_row(row, c, row_of(args.latent, g), act);
        }
      });
  return {};
}

Status compress_store(OpContext& ctx, const CompressStoreArgs& args) {
  const int64_t c = args.latent.dim(1), di = args.key.dim(1), half = args.rope.dim(1);
  const DType act = args.latent.dtype;
  Scratch scratch(ctx);
  parallel_rows(ctx,
                scratch,
                args.groups.groups,
                padded(std::max(c, di)),
                [&](int64_t begin, int64_t end, float* row) {
                  for (int64_t g = begin; g < end; ++g) {
                    const int64_t s = args.groups.sequence.as<int32_t>()[g];
                    const int64_t entry = args.groups.entry.as<int32_t>()[g];
                    if (entry < 0) {
                      continue;
                    }
                    const float* cos_sin = args.rope.as<float>() + g * half * 2;
                    load_row(row_of(args.latent, g), act, c, row);
                    rotate_row(row, c, cos_sin, half, 1.0f);
                    round_row(row, c, act);
                    encode_main_row(row, c, args.main[s].row(entry));
                    load_row(row_of(args.key, g), act, di, row);
                    norm_rotate(row, args.k_norm, di, args.rms_eps, cos_sin, half, act);
                    encode_index_row(row, di, args.index[s].row(entry));
                  }
                });
  return {};
}

Status commit(OpContext&, const CommitArgs& args) {
  for (int64_t s = 0; s < args.rows.sequences; ++s) {
    const int64_t first = args.rows.row_begin.as<int32_t>()[s];
    const int64_t start = args.rows.start.as<int32_t>()[s];
    const int64_t accepted = args.accepted.as<int32_t>()[s];
    for (const WindowView& window : args.windows) {
      const int64_t row_bytes = window.fresh.dim(1), slots = window.window;
      // Of more rows than slots, only the last ones survive.
      for (int64_t i = std::max<int64_t>(0, accepted - slots); i < accepted; ++i) {
        std::memcpy(window.rings[s] + (start + i) % slots * row_bytes,
                    window.fresh.as<uint8_t>() + (first + i) * row_bytes,
                    static_cast<size_t>(row_bytes));
      }
    }
    if (accepted > 0 && (start + accepted) % 2 == 1) {
      for (const OpenGroupView& group : args.groups) {
        const int64_t c = group.kv.dim(1), row = first + accepted - 1;
        std::copy_n(group.kv.as<float>() + row * c, c, group.open[s]);
        std::copy_n(group.gate.as<float>() + row * c, c, group.open[s] + c);
      }
    }
  }
  return {};
}

}  // namespace cachalot::ops::cpu
