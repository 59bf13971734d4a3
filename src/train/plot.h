// The log of a run as curves.
#pragma once

#include <string>

#include "base/status.h"

namespace cachalot::train {

// Reads a log.jsonl and writes an SVG with the loss (and held-out loss), the balance of the experts
// and the gradient norm over steps. Lines that are not records are skipped.
Status plot_log(const std::string& log_path, const std::string& svg_path);

}  // namespace cachalot::train
