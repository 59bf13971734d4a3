// How far a drafter's confidence can be trusted.
//
// A checkpoint directory may hold draft_calibration.json: {"temperatures": [t1, ..., tB]}, one per
// draft position; position k survives with probability sigmoid(logit / tk), given that all before
// it did. They are fitted on held-out text, left to right, so that the product over the positions
// is as often right as it says. Other fields say where they come from and are not read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace cachalot::engine {

// The temperatures of `block` positions; 1 for all without the file. Errors name file and field.
Result<std::vector<double>> read_draft_calibration(const std::string& directory, int64_t block);

}  // namespace cachalot::engine
