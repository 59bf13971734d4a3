// The packed rows of one training forward: samples one after the other, without padding. Each
// sample starts at position 0 and sees nothing of the others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cachalot::train {

// A piece of a document. `learn` marks the tokens whose prediction counts; empty: all do.
struct Sample {
  std::span<const int32_t> tokens;  // at least one
  std::span<const uint8_t> learn;
};

struct Batch {
  std::vector<int32_t> token;         // [T]
  std::vector<int32_t> target;        // [T] the next token of the sample; -1: no loss
  std::vector<int32_t> position;      // [T]
  std::vector<int32_t> sample;        // [T]
  std::vector<int32_t> first_row;     // [T] of the row's sample
  std::vector<int32_t> sample_begin;  // [S + 1]
  std::vector<uint8_t> is_image;      // [T]
  int64_t targets = 0;                // rows with a target

  int64_t rows() const { return static_cast<int64_t>(token.size()); }
  int64_t samples() const { return static_cast<int64_t>(sample_begin.size()) - 1; }
};

Batch make_batch(std::span<const Sample> samples);

}  // namespace cachalot::train
