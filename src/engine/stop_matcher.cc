#include "engine/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace cachalot::engine {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase(stops_, std::string());
}

std::string StopMatcher::push(std::string_view text) {
  if (stopped_) {
    return {};
  }
  held_ += text;
  size_t first = std::string::npos;
  for (const std::string& stop : stops_) {
    if (const size_t at = held_.find(stop); at < first) {
      first = at;
      match_ = stop;
    }
  }
  if (first != std::string::npos) {
    stopped_ = true;
    return std::exchange(held_, {}).substr(0, first);
  }
  // The longest tail that a stop string starts with.
  size_t keep = 0;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (held_.ends_with(std::string_view(stop).substr(0, n))) {
        keep = n;
        break;
      }
    }
  }
  std::string certain = held_.substr(0, held_.size() - keep);
  held_.erase(0, certain.size());
  return certain;
}

std::string StopMatcher::finish() {
  return stopped_ ? std::string() : std::exchange(held_, {});
}

}  // namespace cachalot::engine
