#include "model/engram_constants.h"

#include <array>
#include <bit>

#include "base/check.h"

namespace cachalot::model {
namespace {

using uint128 = unsigned __int128;

bool is_prime(int64_t n) {
  if (n < 4) {
    return n > 1;
  }
  if (n % 2 == 0) {
    return false;
  }
  for (int64_t d = 3; d * d <= n; d += 2) {
    if (n % d == 0) {
      return false;
    }
  }
  return true;
}

// numpy.random.SeedSequence(entropy).generate_state(4, uint64) for entropy below 2^32.
std::array<uint64_t, 4> seed_sequence(uint32_t entropy) {
  uint32_t hash = 0x43b0d7e5;
  const auto hash_mix = [&hash](uint32_t value) {
    value ^= hash;
    hash *= 0x931e8875;
    value *= hash;
    return value ^ (value >> 16);
  };
  std::array<uint32_t, 4> pool = {};
  for (size_t i = 0; i < pool.size(); ++i) {
    pool[i] = hash_mix(i == 0 ? entropy : 0);
  }
  for (size_t source = 0; source < pool.size(); ++source) {
    for (size_t target = 0; target < pool.size(); ++target) {
      if (source != target) {
        const uint32_t mixed = 0xca01f9dd * pool[target] - 0x4973f715 * hash_mix(pool[source]);
        pool[target] = mixed ^ (mixed >> 16);
      }
    }
  }
  std::array<uint64_t, 4> state = {};
  hash = 0x8b51f9dd;
  for (size_t i = 0; i < 2 * state.size(); ++i) {
    uint32_t value = pool[i % pool.size()] ^ hash;
    hash *= 0x58f38ded;
    value *= hash;
    value ^= value >> 16;
    state[i / 2] |= uint64_t{value} << (i % 2 * 32);
  }
  return state;
}

// PCG64 (XSL-RR 128/64) as numpy.random.default_rng seeds and steps it.
class Pcg64 {
 public:
  explicit Pcg64(uint32_t seed) {
    const std::array<uint64_t, 4> s = seed_sequence(seed);
    increment_ = (((uint128{s[2]} << 64) | s[3]) << 1) | 1;
    step();
    state_ += (uint128{s[0]} << 64) | s[1];
    step();
  }

  uint64_t next() {
    step();
    const auto folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    return std::rotr(folded, static_cast<int>(state_ >> 122));
  }

  // Uniform in [0, bound): Lemire's multiplication with rejection, as Generator.integers().
  uint64_t below(uint64_t bound) {
    uint128 product = uint128{next()} * bound;
    const uint64_t threshold = (0 - bound) % bound;
    while (static_cast<uint64_t>(product) < threshold) {
      product = uint128{next()} * bound;
    }
    return static_cast<uint64_t>(product >> 64);
  }

 private:
  void step() {
    constexpr uint128 kMultiplier = (uint128{0x2360ED051FC65DA4} << 64) | 0x4385DF649FCCF645;
    state_ = state_ * kMultiplier + increment_;
  }

  uint128 state_ = 0;
  uint128 increment_ = 0;
};

}  // namespace

std::vector<EngramConstants> engram_constants(const ModelConfig& config) {
  std::vector<EngramConstants> all;
  // The reference restarts each order at engram_vocab_size and skips primes in use; as no prime is
  // left out, that is one ascending run over all layers and orders.
  int64_t prime = config.engram_vocab_size - 1;
  for (const int64_t layer : config.engram_layer_ids) {
    EngramConstants constants;
    for (int64_t order = 2; order <= config.engram_max_ngram_size; ++order) {
      for (int64_t head = 0; head < config.engram_n_heads; ++head) {
        do {
          ++prime;
        } while (!is_prime(prime));
        constants.prime.push_back(prime);
        constants.offset.push_back(constants.rows);
        constants.rows += prime;
      }
    }
    CACHALOT_CHECK(config.engram_compressed_vocab_size > 0, config.engram_compressed_vocab_size);
    // A class id times a multiplier stays below 2^63.
    const int64_t bound = INT64_MAX / config.engram_compressed_vocab_size / 2;
    Pcg64 random(static_cast<uint32_t>(10007 * layer));
    for (int64_t i = 0; i < config.engram_max_ngram_size; ++i) {
      constants.multiplier.push_back(
          static_cast<int64_t>(2 * random.below(static_cast<uint64_t>(bound)) + 1));
    }
    all.push_back(std::move(constants));
  }
  return all;
}

}  // namespace cachalot::model
