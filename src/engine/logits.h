// The logits of a step, on a device or not, as samplers read them.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "engine/sampler.h"
#include "model/step.h"

namespace cachalot::engine {

// Valid as long as the runner's results are, see StepRunner::top_logits().
class StepLogits {
 public:
  // Of rows that the runner gave. `wanted`: the most that any of the samplers wants, `temperature`
  // [N]: theirs.
  static Result<StepLogits> read(model::StepRunner& runner,
                                 const TensorView& logits,
                                 int64_t wanted,
                                 std::span<const float> temperature);

  // What `ask`, a function of a LogitsRow, decides on row i. Where the best tokens do not, it is
  // asked again with every logit of the row, which a device must send first.
  template <class Ask>
  auto decide(int64_t i, const Ask& ask) const -> Result<decltype(ask(LogitsRow()))> {
    auto answer = ask(row(i));
    if (answer.has_value() || answer.error() != Missing::kLogits) {
      return answer;
    }
    CACHALOT_TRY(const LogitsRow whole, whole_row(i));
    return ask(whole);
  }

 private:
  StepLogits(model::StepRunner& runner, const TensorView& logits)
      : runner_(&runner), logits_(logits) {}

  LogitsRow row(int64_t i) const;
  Result<LogitsRow> whole_row(int64_t i) const;

  model::StepRunner* runner_;
  TensorView logits_;  // [N, V], in the backend's memory
  model::TopLogits top_;
};

}  // namespace cachalot::engine
