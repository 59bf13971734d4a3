// What Prometheus and the web page see.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "engine/engine.h"

namespace cachalot::server {

// Counts finished requests; thread-safe.
class RequestCounts {
 public:
  void add(const std::string& endpoint, int status);
  std::map<std::pair<std::string, int>, uint64_t> snapshot() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, uint64_t> counts_;
};

// The Prometheus text format. `stats` is null while no engine is ready. docs/serving.md lists the
// names.
std::string prometheus_text(const engine::EngineStats* stats, const RequestCounts& requests);

// The same numbers for the web page, as one JSON object.
std::string stats_json(const engine::EngineStats* stats, const std::string& state);

}  // namespace cachalot::server
