// Log lines on stderr, through spdlog in log.cc alone.
#pragma once

#include <fmt/format.h>

#include <string_view>

namespace cachalot {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void log_write(LogLevel level, std::string_view text);

template <class... Args>
void log_info(fmt::format_string<Args...> text, Args&&... args) {
  log_write(LogLevel::kInfo, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> text, Args&&... args) {
  log_write(LogLevel::kWarning, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace cachalot
