#include "engine/logits.h"

#include <algorithm>

#include "ops/ops.h"

namespace cachalot::engine {

Result<StepLogits> StepLogits::read(model::StepRunner& runner,
                                    const TensorView& logits,
                                    int64_t wanted,
                                    std::span<const float> temperature) {
  StepLogits result(runner, logits);
  if (logits.dim(0) > 0) {
    const int64_t k = std::min({wanted, logits.dim(1), ops::kMostTopLogits});
    CACHALOT_TRY(result.top_, runner.top_logits(logits, k, temperature));
  }
  return result;
}

LogitsRow StepLogits::row(int64_t i) const {
  const int64_t k = top_.value.dim(1);
  const auto size = static_cast<size_t>(k);
  const float* mass = top_.mass.as<float>() + 2 * i;
  return {.value = {top_.value.as<float>() + i * k, size},
          .id = {top_.id.as<int32_t>() + i * k, size},
          .mass = mass[0],
          .tempered_mass = mass[1],
          .vocab = logits_.dim(1),
          .all = {}};
}

Result<LogitsRow> StepLogits::whole_row(int64_t i) const {
  CACHALOT_TRY(const TensorView all, runner_->on_host(logits_.rows(i, 1)));
  LogitsRow whole = row(i);
  whole.all = {all.as<float>(), static_cast<size_t>(all.dim(1))};
  return whole;
}

}  // namespace cachalot::engine
