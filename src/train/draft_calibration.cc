#include "train/draft_calibration.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/json.h"
#include "train/norm.h"

namespace cachalot::train {
namespace {

constexpr size_t kGroups = 10;  // of predictions, equally wide
// Temperatures 2^(i / kPerOctave) for |i| <= kSteps.
constexpr int kPerOctave = 16, kSteps = 48;

// `before` and `expected` per sample: the calibrated survival of the positions before k, and what
// is expected of k.
double error_of(const std::vector<DraftSample>& samples,
                const std::vector<double>& before,
                const std::vector<double>& expected,
                size_t k,
                double temperature) {
  std::array<double, kGroups> difference = {};
  for (size_t i = 0; i < samples.size(); ++i) {
    const double survival = before[i] * sigmoid(samples[i].confidence[k] / temperature);
    const auto group = std::min(kGroups - 1, static_cast<size_t>(survival * kGroups));
    difference[group] += survival - expected[i];
  }
  double sum = 0;
  for (double d : difference) {
    sum += std::fabs(d);
  }
  return sum / static_cast<double>(samples.size());
}

// Multiplies position k into the survivals.
void advance(const std::vector<DraftSample>& samples,
             size_t k,
             double temperature,
             std::vector<double>& survival,
             std::vector<double>& expected) {
  for (size_t i = 0; i < samples.size(); ++i) {
    survival[i] *= sigmoid(samples[i].confidence[k] / temperature);
    if (k + 1 < samples[i].acceptance.size()) {
      expected[i] *= samples[i].acceptance[k + 1];
    }
  }
}

std::vector<double> first_expected(const std::vector<DraftSample>& samples) {
  std::vector<double> expected;
  for (const DraftSample& sample : samples) {
    expected.push_back(sample.acceptance[0]);
  }
  return expected;
}

}  // namespace

double calibration_error(const std::vector<DraftSample>& samples,
                         const std::vector<double>& temperatures,
                         size_t k) {
  std::vector<double> survival(samples.size(), 1.0), expected = first_expected(samples);
  for (size_t j = 0; j < k; ++j) {
    advance(samples, j, temperatures[j], survival, expected);
  }
  return error_of(samples, survival, expected, k, temperatures[k]);
}

DraftCalibration fit_draft_calibration(const std::vector<DraftSample>& samples) {
  const size_t positions = samples.front().acceptance.size();
  DraftCalibration result{.temperatures = std::vector<double>(positions, 1.0),
                          .samples = static_cast<int64_t>(samples.size())};
  const auto mean_error = [&] {
    double sum = 0;
    for (size_t k = 0; k < positions; ++k) {
      sum += calibration_error(samples, result.temperatures, k);
    }
    return sum / static_cast<double>(positions);
  };
  result.error_before = mean_error();
  std::vector<double> survival(samples.size(), 1.0), expected = first_expected(samples);
  for (size_t k = 0; k < positions; ++k) {
    double best = error_of(samples, survival, expected, k, 1.0);
    for (int step = -kSteps; step <= kSteps; ++step) {
      const double temperature = std::exp2(static_cast<double>(step) / kPerOctave);
      const double error = error_of(samples, survival, expected, k, temperature);
      if (error < best) {
        best = error;
        result.temperatures[k] = temperature;
      }
    }
    advance(samples, k, result.temperatures[k], survival, expected);
  }
  result.error_after = mean_error();
  return result;
}

std::string draft_calibration_json(const DraftCalibration& calibration, int64_t step) {
  JsonWriter w;
  w.begin_object().field("step", step).key("temperatures").begin_array();
  for (double temperature : calibration.temperatures) {
    w.value(temperature);
  }
  w.end_array()
      .field("num_samples", calibration.samples)
      .field("ece_before", calibration.error_before)
      .field("ece_after", calibration.error_after)
      .end_object();
  return w.text() + "\n";
}

}  // namespace cachalot::train
