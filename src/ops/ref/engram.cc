// Engram: hashes, rows, gated injection.
// Source of the rules: official reference, engram.py.
#include "ops/ref/common.h"
#include "ops/ref/kernels.h"

namespace cachalot::ops::ref {

Status engram_hash(OpContext&, const EngramHashArgs& args) {
  const int64_t n = args.multiplier.dim(0), heads = args.prime.dim(1);
  const int64_t* multiplier = args.multiplier.as<int64_t>();
  for (int64_t row = 0; row < args.rows.rows; ++row) {
    const int64_t s = args.rows.sequence.as<int32_t>()[row];
    const int32_t* current = args.classes.as<int32_t>() + row + (s + 1) * (n - 1);
    bool blocked = false;
    int64_t hash = 0;
    for (int64_t back = 0; back < n; ++back) {
      const int32_t id = current[-back];
      blocked = blocked || id < 0;
      hash ^= (blocked ? args.blocked_class : id) * multiplier[back];
      if (back == 0) {
        continue;
      }
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t column = (back - 1) * heads + h;
        args.ids.as<int32_t>()[row * (n - 1) * heads + column] = static_cast<int32_t>(
            hash % args.prime.as<int64_t>()[column] + args.offset.as<int64_t>()[column]);
      }
    }
  }
  return {};
}

Status engram_gather(OpContext&, const EngramGatherArgs& args) {
  const int64_t width = args.table.in;
  for (int64_t i = 0; i < args.e.shape.elements() / width; ++i) {
    const std::vector<float> values =
        weight_row(args.table, args.ids.empty() ? i : args.ids.as<int32_t>()[i]);
    for (int64_t j = 0; j < width; ++j) {
      store(args.e, i * width + j, values[static_cast<size_t>(j)]);
    }
  }
  return {};
}

Status engram_inject(OpContext&, const EngramInjectArgs& args) {
  const int64_t t = args.x.dim(0), m = args.x.dim(1), d = args.x.dim(2);
  for (int64_t row = 0; row < t; ++row) {
    const bool image = args.rows.is_image.as<uint8_t>()[row] != 0;
    for (int64_t j = 0; j < m; ++j) {
      double xx = 0, kk = 0, dot = 0;
      for (int64_t i = 0; i < d; ++i) {
        const double x = load(args.x, (row * m + j) * d + i);
        const double key = load(args.kv, (row * (m + 1) + j) * d + i);
        // The two gains act only through their FP32 product.
        const float gain = load(args.q_weight, j * d + i) * load(args.k_weight, j * d + i);
        xx += x * x;
        kk += key * key;
        dot += x * gain * key;
      }
      const auto width = static_cast<double>(d);
      dot *= 1.0 / std::sqrt(xx / width + args.rms_eps) / std::sqrt(kk / width + args.rms_eps) /
             std::sqrt(width);
      const double z = std::copysign(std::sqrt(std::max(std::fabs(dot), 1e-6)), dot);
      const double gate = image ? 0.0 : sigmoid(z);
      for (int64_t i = 0; i < d; ++i) {
        const double x = load(args.x, (row * m + j) * d + i);
        const double value = load(args.kv, (row * (m + 1) + m) * d + i);
        store(args.out, (row * m + j) * d + i, x + gate * value);
      }
    }
  }
  return {};
}

}  // namespace cachalot::ops::ref
