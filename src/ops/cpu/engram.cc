// Engram: hashes, rows, gated injection.
#include <cmath>

#include "ops/cpu/kernels.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"

namespace cachalot::ops::cpu {

Status engram_hash(OpContext& ctx, const EngramHashArgs& args) {
  const int64_t n = args.multiplier.dim(0), heads = args.prime.dim(1), columns = (n - 1) * heads;
  const int64_t* multiplier = args.multiplier.as<int64_t>();
  const int64_t* prime = args.prime.as<int64_t>();
  const int64_t* offset = args.offset.as<int64_t>();
  parallel_for(ctx, args.rows.rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t s = args.rows.sequence.as<int32_t>()[row];
      const int32_t* current = args.classes.as<int32_t>() + row + (s + 1) * (n - 1);
      int32_t* ids = args.ids.as<int32_t>() + row * columns;
      bool blocked = false;
      int64_t hash = 0;
      for (int64_t back = 0; back < n; ++back) {
        const int32_t id = current[-back];
        blocked = blocked || id < 0;
        hash ^= (blocked ? args.blocked_class : id) * multiplier[back];
        if (back == 0) {
          continue;
        }
        for (int64_t column = (back - 1) * heads; column < back * heads; ++column) {
          ids[column] = static_cast<int32_t>(hash % prime[column] + offset[column]);
        }
      }
    }
  });
  return {};
}

Status engram_gather(OpContext& ctx, const EngramGatherArgs& args) {
  const int64_t width = args.table.in, count = args.e.shape.elements() / width;
  const int64_t bytes = width * dtype_bytes(args.e.dtype);
  Scratch scratch(ctx);
  parallel_rows(ctx, scratch, count, padded(width), [&](int64_t begin, int64_t end, float* row) {
    for (int64_t i = begin; i < end; ++i) {
      decode_weight_row(args.table, args.ids.empty() ? i : args.ids.as<int32_t>()[i], row);
      store_row(row, width, static_cast<uint8_t*>(args.e.data) + i * bytes, args.e.dtype);
    }
  });
  return {};
}

Status engram_inject(OpContext& ctx, const EngramInjectArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  const int64_t bytes = d * dtype_bytes(args.x.dtype);
  const auto* x = static_cast<const uint8_t*>(args.x.data);
  const auto* kv = static_cast<const uint8_t*>(args.kv.data);
  auto* out = static_cast<uint8_t*>(args.out.data);
  const auto width = static_cast<float>(d);
  parallel_for(ctx, t * m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / m, j = i % m;
      const uint8_t* stream = x + i * bytes;
      const uint8_t* key = kv + (row * (m + 1) + j) * bytes;
      const uint8_t* value = kv + (row * (m + 1) + m) * bytes;
      float gate = 0;
      if (args.rows.is_image.as<uint8_t>()[row] == 0) {
        const EngramSums sums =
            engram_sums(stream, key, args.x.dtype, args.q_weight, args.k_weight, j * d, d);
        const float a = 1.0f / std::sqrt(sums.xx / width + args.rms_eps);
        const float b = 1.0f / std::sqrt(sums.kk / width + args.rms_eps);
        const float dot = sums.xk * a * b / std::sqrt(width);
        const float z = std::copysign(std::sqrt(std::max(std::fabs(dot), 1e-6f)), dot);
        gate = 1.0f / (1.0f + std::exp(-z));
      }
      engram_add(stream, value, args.x.dtype, gate, d, out + i * bytes);
    }
  });
  return {};
}

}  // namespace cachalot::ops::cpu
