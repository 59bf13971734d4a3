#include "base/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/clock.h"
#include "base/format.h"

namespace cachalot {

Progress::Progress(std::string what, int64_t total)
    : what_(std::move(what)),
      total_(total),
      started_(now_seconds()),
      enabled_(::isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (enabled_ && printed_ > 0) {
    std::fputs("\r\x1b[K", stderr);
  }
}

void Progress::advance(int64_t amount) {
  done_ += amount;
  const double now = now_seconds();
  if (!enabled_ || (now - printed_ < 0.1 && done_ < total_)) {
    return;
  }
  printed_ = now;
  const double elapsed = now - started_;
  const double left =
      done_ > 0 ? elapsed * static_cast<double>(total_ - done_) / static_cast<double>(done_) : 0;
  std::fputs(
      fmt::format("\r\x1b[K{} {}/{} {:.1f} s, {:.0f} s left", what_, done_, total_, elapsed, left)
          .c_str(),
      stderr);
}

}  // namespace cachalot
