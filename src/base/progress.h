// A one-line progress display on stderr; silent when stderr is not a terminal.
#pragma once

#include <cstdint>
#include <string>

namespace cachalot {

class Progress {
 public:
  Progress(std::string what, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(int64_t amount = 1);

 private:
  std::string what_;
  int64_t total_;
  int64_t done_ = 0;
  double started_;
  double printed_ = 0;
  bool enabled_;
};

}  // namespace cachalot
