// A redis-server of a test, on a free port of this machine.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "tests/support/temp_directory.h"

namespace cachalot::test {

class RedisServer {
 public:
  RedisServer() {
    port_ = free_port();
    const std::string port = std::to_string(port_);
    child_ = ::fork();
    if (child_ == 0) {
      const int null = ::open("/dev/null", O_WRONLY);
      ::dup2(null, STDOUT_FILENO);
      ::dup2(null, STDERR_FILENO);
      ::execlp("redis-server",
               "redis-server",
               "--port",
               port.c_str(),
               "--bind",
               "127.0.0.1",
               "--save",
               "",
               "--appendonly",
               "no",
               "--dir",
               directory_.path().c_str(),
               static_cast<char*>(nullptr));
      ::_exit(127);
    }
    // It answers within seconds, or it is not there.
    for (int i = 0; i < 400 && !running_ && child_ > 0; ++i) {
      if (::waitpid(child_, nullptr, WNOHANG) == child_) {
        child_ = -1;
        return;
      }
      running_ = connects();
      std::this_thread::sleep_for(std::chrono::milliseconds(running_ ? 0 : 25));
    }
  }
  ~RedisServer() { kill(); }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  bool running() const { return running_; }
  std::string url() const { return "redis://127.0.0.1:" + std::to_string(port_); }
  // It goes on to take connections, and answers nothing.
  void freeze() { ::kill(child_, SIGSTOP); }
  void kill() {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
      child_ = -1;
    }
    running_ = false;
  }

 private:
  static sockaddr_in address(int port) {
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons(static_cast<uint16_t>(port));
    return a;
  }
  static int free_port() {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in a = address(0);
    socklen_t size = sizeof a;
    ::bind(fd, reinterpret_cast<sockaddr*>(&a), size);
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&a), &size);
    ::close(fd);
    return ntohs(a.sin_port);
  }
  bool connects() const {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    const sockaddr_in a = address(port_);
    const bool good = ::connect(fd, reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0;
    ::close(fd);
    return good;
  }

  TempDirectory directory_;
  int port_ = 0;
  pid_t child_ = -1;
  bool running_ = false;
};

}  // namespace cachalot::test
