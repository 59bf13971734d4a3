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
    int64_t descriptors = 0;  // sockets, pipes, files; without
    int64_t cache_files = 0;  // the cache folder of start() and files in it, opened
    int64_t threads = 0;
  };

  // Runs this binary as `serve ARGUMENTS --port 0`, its messages on our stderr, and waits until it
  // listens. It ends with us in any case. `cache_folder` (empty: none) is where it keeps prefixes:
  // files of a database come and go as it likes, which must not look like a leak of sockets, or
  // hide one.
  static Result<ServerProcess> start(std::vector<std::string> arguments, std::string cache_folder);
  // Kills it, if it was not stopped.
  ~ServerProcess();
  ServerProcess(ServerProcess&& other) noexcept;
  ServerProcess& operator=(ServerProcess&&) = delete;

  const std::string& url() const { return url_; }
  Result<Footprint> footprint() const;
  // SIGTERM, and the wait for the end. Errors: an exit status other than 0.
  Status stop();

 private:
  ServerProcess(pid_t pid, std::string url, std::string cache_folder)
      : pid_(pid), url_(std::move(url)), cache_folder_(std::move(cache_folder)) {}

  pid_t pid_;  // 0: stopped
  std::string url_;
  std::string cache_folder_;
};

}  // namespace cachalot::cli
