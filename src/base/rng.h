// Philox4x32-10 (Salmon et al., 2011): a counter-based generator. The value at (key, stream, index)
// does not depend on who asks or in which order, so results are reproducible across threads.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace cachalot {

class Philox {
 public:
  explicit Philox(uint64_t key, uint64_t stream = 0) : key_(key), stream_(stream) {}

  // Four independent 32-bit words for `index`.
  std::array<uint32_t, 4> words(uint64_t index) const {
    uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
    uint32_t c2 = static_cast<uint32_t>(stream_), c3 = static_cast<uint32_t>(stream_ >> 32);
    uint32_t k0 = static_cast<uint32_t>(key_), k1 = static_cast<uint32_t>(key_ >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53} * c0;
      const uint64_t p1 = uint64_t{0xCD9E8D57} * c2;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<uint32_t>(p1);
      c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return {c0, c1, c2, c3};
  }

  // Uniform in [0, 1) with 53 bits.
  double uniform(uint64_t index) const {
    const auto w = words(index);
    return static_cast<double>((uint64_t{w[0]} << 21) ^ (w[1] >> 11)) * 0x1.0p-53;
  }

  // Standard normal (Box-Muller).
  double normal(uint64_t index) const {
    const auto w = words(index);
    const double u = (static_cast<double>(w[0]) + 1.0) * 0x1.0p-32;
    const double v = static_cast<double>(w[1]) * 0x1.0p-32;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

 private:
  uint64_t key_;
  uint64_t stream_;
};

}  // namespace cachalot
