// Reproducible random inputs for tests, and outputs that show what was not written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "ops/weight.h"
#include "quant/block.h"
#include "quant/formats.h"
#include "tensor/tensor.h"

namespace cachalot::test {

// A tensor that owns its memory.
struct Buffer {
  std::vector<uint8_t> bytes;
  DType dtype = DType::kF32;
  Shape shape;

  Buffer() = default;
  // Every byte 0xFF: NaN as BF16 and F32, -1 as an integer.
  Buffer(DType type, const Shape& dims)
      : bytes(static_cast<size_t>(dims.elements() * dtype_bytes(type)), 0xFF),
        dtype(type),
        shape(dims) {}

  TensorView view() const { return {const_cast<uint8_t*>(bytes.data()), dtype, shape}; }
  float at(int64_t i) const {
    return dtype == DType::kBF16 ? static_cast<float>(view().as<bf16>()[i]) : view().as<float>()[i];
  }
  void set(int64_t i, float value) {
    if (dtype == DType::kBF16) {
      view().as<bf16>()[i] = bf16(value);
    } else {
      view().as<float>()[i] = value;
    }
  }
  std::vector<float> floats() const {
    std::vector<float> values(static_cast<size_t>(shape.elements()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = at(static_cast<int64_t>(i));
    }
    return values;
  }
};

inline int32_t* ints(const Buffer& buffer) {
  return buffer.view().as<int32_t>();
}

// The bytes of some rows of a buffer.
inline Buffer part(const Buffer& all, int64_t begin, int64_t count) {
  Shape shape = all.shape;
  shape.extent[0] = count;
  Buffer result(all.dtype, shape);
  std::memcpy(result.bytes.data(), all.view().rows(begin, count).data, result.bytes.size());
  return result;
}

// Draws in call order from one Philox stream.
class Random {
 public:
  explicit Random(uint64_t seed) : philox_(seed) {}

  double uniform(double low = 0, double high = 1) {
    return low + (high - low) * philox_.uniform(next_++);
  }
  double normal(double scale = 1) { return scale * philox_.normal(next_++); }
  int64_t integer(int64_t low, int64_t high) {
    return low +
           static_cast<int64_t>(philox_.words(next_++)[0] % static_cast<uint64_t>(high - low));
  }

  // Normal values; one channel in 64 is an outlier, as in the activations of trained models.
  Buffer activations(DType dtype, const Shape& shape, double scale = 1) {
    Buffer buffer(dtype, shape);
    const int64_t width = shape[shape.rank - 1];
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const double outlier = i % width % 64 == 17 ? 8.0 : 1.0;
      buffer.set(i, static_cast<float>(normal(scale) * outlier));
    }
    return buffer;
  }
  Buffer normals(DType dtype, const Shape& shape, double scale = 1, double mean = 0) {
    Buffer buffer(dtype, shape);
    for (int64_t i = 0; i < shape.elements(); ++i) {
      buffer.set(i, static_cast<float>(mean + normal(scale)));
    }
    return buffer;
  }

 private:
  Philox philox_;
  uint64_t next_ = 0;
};

// A weight that owns its memory.
struct WeightBuffer {
  Buffer values;
  Buffer scales;
  ops::WeightFormat format = ops::WeightFormat::kF32;
  int64_t out = 0;
  int64_t in = 0;

  ops::Weight view() const {
    ops::Weight weight;
    weight.values = values.view();
    weight.scales = scales.bytes.empty() ? TensorView() : scales.view();
    weight.format = format;
    weight.out = out;
    weight.in = in;
    return weight;
  }
};

// Normal weights of standard deviation about `scale` in any format; codes cover their range, scales
// vary from block to block.
inline WeightBuffer random_weight(
    Random& random, ops::WeightFormat format, int64_t out, int64_t in, double scale) {
  using ops::WeightFormat;
  WeightBuffer w;
  w.format = format;
  w.out = out;
  w.in = in;
  const auto random_scales = [&](const Shape& shape, double unit) {
    w.scales = Buffer(DType::kF8E8M0, shape);
    const int exponent = static_cast<int>(std::floor(std::log2(scale / unit)));
    for (uint8_t& byte : w.scales.bytes) {
      byte = static_cast<uint8_t>(127 + exponent + random.integer(-1, 3));
    }
  };
  const int64_t blocks = quant::blocks(in, 32);
  switch (format) {
    case WeightFormat::kF32:
    case WeightFormat::kBF16:
      w.values = random.normals(
          format == WeightFormat::kF32 ? DType::kF32 : DType::kBF16, {out, in}, scale);
      break;
    case WeightFormat::kFp8Block:
    case WeightFormat::kFp8Row:
      random_scales({format == WeightFormat::kFp8Row ? out : quant::blocks(out, 32), blocks}, 64.0);
      w.values = Buffer(DType::kF8E4M3, {out, in});
      for (uint8_t& code : w.values.bytes) {
        const auto value = static_cast<float>(random.normal(64.0));
        // One in 16 is subnormal.
        code = quant::e4m3_encode(random.integer(0, 16) == 0 ? value * 0x1.0p-13f : value);
      }
      break;
    case WeightFormat::kFp4Row:
      random_scales({out, blocks}, 2.0);
      w.values = Buffer(DType::kI8, {out, in / 2});
      for (uint8_t& pair : w.values.bytes) {
        const auto nibble = [&] {
          return quant::e2m1_encode(static_cast<float>(std::clamp(random.normal(2.0), -6.0, 6.0)));
        };
        const uint8_t low = nibble();
        pair = static_cast<uint8_t>(low | nibble() << 4);
      }
      break;
  }
  return w;
}

}  // namespace cachalot::test
