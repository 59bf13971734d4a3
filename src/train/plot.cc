#include "train/plot.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/format.h"

namespace cachalot::train {
namespace {

constexpr double kWidth = 760, kHeight = 220, kLeft = 60, kRight = 20, kTop = 30, kBottom = 30;
// A curve is drawn through at most this many means of neighbouring points.
constexpr size_t kPoints = 600;

using Points = std::vector<std::pair<double, double>>;

struct Curve {
  std::string_view key, name, color;
};
struct Panel {
  std::string_view title;
  bool logarithmic;
  std::vector<Curve> curves;
};

Points thinned(const Points& points) {
  const size_t group = (points.size() + kPoints - 1) / kPoints;
  Points means;
  for (size_t i = 0; i < points.size(); i += group) {
    const size_t n = std::min(group, points.size() - i);
    double x = 0, y = 0;
    for (size_t j = i; j < i + n; ++j) {
      x += points[j].first / static_cast<double>(n);
      y += points[j].second / static_cast<double>(n);
    }
    means.emplace_back(x, y);
  }
  return means;
}

std::string draw(const Panel& panel,
                 const std::vector<Points>& curves,
                 double offset,
                 double last) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  std::vector<Points> scaled;
  for (const Points& curve : curves) {
    Points& points = scaled.emplace_back(thinned(curve));
    for (auto& [x, y] : points) {
      y = panel.logarithmic ? std::log10(std::max(y, 1e-12)) : y;
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  if (!(low <= high)) {
    return {};
  }
  if (high - low < 1e-9) {
    high = low + 1e-9;
  }
  const double right = kWidth - kRight, top = offset + kTop, bottom = offset + kHeight - kBottom;
  const auto x_of = [&](double x) { return kLeft + x / last * (right - kLeft); };
  const auto y_of = [&](double y) { return bottom - (y - low) / (high - low) * (bottom - top); };
  std::string svg = fmt::format(
      "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#888\"/>\n"
      "<text x=\"{}\" y=\"{}\">{}</text>\n",
      kLeft,
      top,
      right - kLeft,
      bottom - top,
      kLeft,
      top - 8,
      panel.title);
  for (double share : {0.0, 0.5, 1.0}) {
    const double y = low + share * (high - low);
    svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.3g}</text>\n",
                       kLeft - 6,
                       y_of(y) + 4,
                       panel.logarithmic ? std::pow(10.0, y) : y);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n",
                       x_of(share * last),
                       bottom + 16,
                       share * last);
  }
  for (size_t c = 0; c < scaled.size(); ++c) {
    std::string path;
    for (const auto& [x, y] : scaled[c]) {
      path += fmt::format("{:.1f},{:.1f} ", x_of(x), y_of(y));
    }
    svg += fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\"/>\n", path, panel.curves[c].color);
    svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\" text-anchor=\"end\">{}</text>\n",
                       right - 8.0,
                       top + 16 + 16 * static_cast<double>(c),
                       panel.curves[c].color,
                       panel.curves[c].name);
  }
  return svg;
}

}  // namespace

Status plot_log(const std::string& log_path, const std::string& svg_path) {
  const std::vector<Panel> panels = {
      {"loss (nats per token)",
       false,
       {{"loss", "training", "#1f77b4"}, {"heldout_loss", "held out", "#d62728"}}},
      {"drafter: acceptance",
       false,
       {{"acceptance", "training, per position", "#1f77b4"},
        {"acceptance_length", "held out, tokens per verification", "#d62728"}}},
      {"expert load: max / mean - 1", false, {{"violation", "mean over layers", "#2ca02c"}}},
      {"gradient norm", true, {{"gradient_norm", "before clipping", "#9467bd"}}},
  };
  CACHALOT_TRY(const std::string text, read_file(log_path));
  std::vector<std::vector<Points>> points;
  for (const Panel& panel : panels) {
    points.emplace_back(panel.curves.size());
  }
  double last = 1;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const nlohmann::json record =
        nlohmann::json::parse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                              text.begin() + static_cast<std::ptrdiff_t>(end),
                              nullptr,
                              false);
    begin = end + 1;
    if (!record.is_object() || !record.contains("step") || !record["step"].is_number()) {
      continue;
    }
    const auto step = record["step"].get<double>();
    last = std::max(last, step);
    for (size_t p = 0; p < panels.size(); ++p) {
      for (size_t c = 0; c < panels[p].curves.size(); ++c) {
        const auto value = record.find(std::string(panels[p].curves[c].key));
        if (value != record.end() && value->is_number()) {
          points[p][c].emplace_back(step, value->get<double>());
        }
      }
    }
  }
  // Panels without a curve are left out.
  std::string drawn;
  double height = 0;
  for (size_t p = 0; p < panels.size(); ++p) {
    const std::string panel = draw(panels[p], points[p], height, last);
    height += panel.empty() ? 0 : kHeight;
    drawn += panel;
  }
  return replace_file(
      svg_path,
      fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" "
                  "height=\"{}\" font-family=\"sans-serif\" font-size=\"12\">\n"
                  "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
                  kWidth,
                  height,
                  drawn));
}

}  // namespace cachalot::train
