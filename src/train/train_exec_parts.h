// What the parts of TrainExec have in common: train_exec.cc streams, rows and head,
// train_exec_attention.cc compressor, indexer and attention, train_exec_experts.cc experts and
// Engram, train_exec_draft.cc the drafter's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "quant/block.h"
#include "tensor/arena.h"

namespace cachalot::train {

// Rows that a thread takes at a time.
constexpr int64_t kRowGrain = 16;

// What an op takes from the scratch arena, given back at the end of its scope.
class Scratch {
 public:
  explicit Scratch(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~Scratch() { arena_.release(mark_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class Real>
  Real* array(int64_t count) {
    return arena_.allocate_array<Real>(std::max<int64_t>(1, count));
  }

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

// cos and sin of FP32(position * frequency), as ops::rope_table defines them, in Real.
template <class Real>
std::vector<Real> rope_rows(const std::vector<int32_t>& position,
                            const std::vector<float>& frequency) {
  std::vector<Real> table;
  table.reserve(position.size() * frequency.size() * 2);
  for (int32_t p : position) {
    for (float f : frequency) {
      const auto angle = static_cast<double>(static_cast<float>(p) * f);
      table.push_back(static_cast<Real>(static_cast<float>(std::cos(angle))));
      table.push_back(static_cast<Real>(static_cast<float>(std::sin(angle))));
    }
  }
  return table;
}

// A row as the cache stores it: encoded and decoded again.
template <class Real,
          int64_t (*Bytes)(int64_t),
          void (*Encode)(const float*, int64_t, uint8_t*),
          void (*Decode)(const uint8_t*, int64_t, float*)>
void round_row(Real* row, int64_t n) {
  std::vector<float> values(row, row + n);
  std::vector<uint8_t> bytes(static_cast<size_t>(Bytes(n)));
  Encode(values.data(), n, bytes.data());
  Decode(bytes.data(), n, values.data());
  std::copy(values.begin(), values.end(), row);
}
template <class Real>
inline constexpr auto* kRoundWindow =
    round_row<Real, quant::window_row_bytes, quant::window_row_encode, quant::window_row_decode>;
template <class Real>
inline constexpr auto* kRoundMain =
    round_row<Real, quant::main_row_bytes, quant::main_row_encode, quant::main_row_decode>;
template <class Real>
inline constexpr auto* kRoundIndex =
    round_row<Real, quant::index_row_bytes, quant::index_row_encode, quant::index_row_decode>;

}  // namespace cachalot::train
