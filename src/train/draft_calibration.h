// Temperatures of a drafter's confidences: position k's survival is sigmoid(logit / t_k).
//
// They are fitted from left to right, each so that the product of the confidences up to its
// position is off by as little as possible from the share of drafts that survive to there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cachalot::train {

// One block: per position the confidence's logit and the expected acceptance.
struct DraftSample {
  std::vector<double> confidence;
  std::vector<double> acceptance;
};

struct DraftCalibration {
  std::vector<double> temperatures;  // per position
  double error_before = 0;  // mean over the positions of calibration_error(), at temperature 1
  double error_after = 0;
  int64_t samples = 0;
};

// Mean distance between the predicted and the expected survival of position k, over samples grouped
// by their prediction.
double calibration_error(const std::vector<DraftSample>& samples,
                         const std::vector<double>& temperatures,
                         size_t k);

// `samples` is not empty; all have as many positions.
DraftCalibration fit_draft_calibration(const std::vector<DraftSample>& samples);

// The content of model::kDraftCalibrationFile, beside a run's states and a checkpoint's
// config.json: "step", "temperatures", "num_samples", "ece_before", "ece_after".
std::string draft_calibration_json(const DraftCalibration& calibration, int64_t step);

}  // namespace cachalot::train
