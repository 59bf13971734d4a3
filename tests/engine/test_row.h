// Rows of logits for samplers, as a step gives them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine/sampler.h"
#include "ops/ops.h"

namespace cachalot::engine {

class TestRow {
 public:
  explicit TestRow(std::vector<float> logits, float temperature = 1, int64_t best = kRankedTokens)
      : logits_(std::move(logits)) {
    const auto v = static_cast<int64_t>(logits_.size()), k = std::min(best, v);
    value_.resize(static_cast<size_t>(k));
    id_.resize(static_cast<size_t>(k));
    Arena scratch;
    ops::OpContext context{.backend = ops::Backend::kCpu, .scratch = &scratch};
    const Status status = ops::top_logits(context,
                                          {.logits = {logits_.data(), DType::kF32, {1, v}},
                                           .temperature = {&temperature, DType::kF32, {1}},
                                           .value = {value_.data(), DType::kF32, {1, k}},
                                           .id = {id_.data(), DType::kI32, {1, k}},
                                           .mass = {mass_, DType::kF32, {1, 2}}});
    EXPECT_TRUE(status.ok()) << status.message();
  }

  // The best tokens alone.
  LogitsRow best() const {
    return {.value = value_,
            .id = id_,
            .mass = mass_[0],
            .tempered_mass = mass_[1],
            .vocab = static_cast<int64_t>(logits_.size()),
            .all = {}};
  }
  LogitsRow whole() const {
    LogitsRow row = best();
    row.all = logits_;
    return row;
  }

 private:
  std::vector<float> logits_, value_;
  std::vector<int32_t> id_;
  float mass_[2] = {};
};

// What a step samples: from the best tokens if they decide, and then the whole row must say the
// same.
inline Decided<int32_t> sample(const Sampler& sampler,
                               const TestRow& row,
                               std::span<const uint32_t> allowed = {}) {
  const Decided<int32_t> whole = sampler.sample(row.whole(), allowed);
  const Decided<int32_t> best = sampler.sample(row.best(), allowed);
  if (best.has_value() || best.error() != Missing::kLogits) {
    EXPECT_EQ(best, whole);
  }
  return whole;
}
inline Decided<int32_t> sample(const Sampler& sampler,
                               const std::vector<float>& logits,
                               std::span<const uint32_t> allowed = {}) {
  return sample(sampler, TestRow(logits, sampler.temperature()), allowed);
}

}  // namespace cachalot::engine
