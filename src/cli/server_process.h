// A `cachalot serve` of our own, in a process of its own.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/status.h"

namespace cachalot::cli {

// Every stream is a socket, and the limit that a shell sets is often too low for thousands.
void raise_file_limit();

class ServerProcess {
 public:
  // What the operating system says of the process.
  struct Footprint {
    int64_t resident_bytes = 0;
    int64_t descriptors = 0;
    int64_t threads = 0;
  };

  // Runs this binary as `serve ARGUMENTS --port 0`, its messages on our stderr, and waits until it
  // listens. It ends with us in any case.
  static Result<ServerProcess> start(std::vector<std::string> arguments);
  // Kills it, if it was not stopped.
  ~ServerProcess();
  ServerProcess(ServerProcess&& other) noexcept;
  ServerProcess& operator=(ServerProcess&&) = delete;

  const std::string& url() const { return url_; }
  Result<Footprint> footprint() const;
  // SIGTERM, and the wait for the end. Errors: an exit status other than 0.
  Status stop();

 private:
  ServerProcess(pid_t pid, std::string url) : pid_(pid), url_(std::move(url)) {}

  pid_t pid_;  // 0: stopped
  std::string url_;
};

}  // namespace cachalot::cli
