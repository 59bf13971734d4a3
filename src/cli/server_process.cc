#include "cli/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/format.h"

namespace cachalot::cli {
namespace {

int wait_for(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

int64_t status_line(std::string_view text, std::string_view name) {
  const size_t at = text.find(name);
  return at == std::string_view::npos ? 0 : std::atoll(text.data() + at + name.size());
}

}  // namespace

void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

Result<ServerProcess> ServerProcess::start(std::vector<std::string> arguments,
                                           std::string cache_folder) {
  arguments.insert(arguments.begin(), {"cachalot", "serve"});
  arguments.insert(arguments.end(), {"--port", "0"});
  std::vector<char*> argv;
  for (std::string& argument : arguments) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  int out[2];
  if (::pipe2(out, O_CLOEXEC) != 0) {
    return error(Code::kResourceExhausted, "a pipe to the server: {}", std::strerror(errno));
  }
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    // Between fork and exec: calls that are safe after one in a process with threads.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() == parent && ::dup2(out[1], STDOUT_FILENO) >= 0) {
      ::execv("/proc/self/exe", argv.data());
    }
    ::_exit(127);
  }
  ::close(out[1]);
  if (pid < 0) {
    ::close(out[0]);
    return error(Code::kResourceExhausted, "a process for the server: {}", std::strerror(errno));
  }
  std::string url;
  for (char c = 0; ::read(out[0], &c, 1) == 1 && c != '\n';) {
    url += c;
  }
  ::close(out[0]);
  ServerProcess process(pid, std::move(url), std::move(cache_folder));
  if (!process.url_.starts_with("http://")) {
    return error(Code::kFailedPrecondition, "cachalot serve did not start");
  }
  return process;
}

ServerProcess::~ServerProcess() {
  if (pid_ != 0) {
    ::kill(pid_, SIGKILL);
    wait_for(pid_);
  }
}

ServerProcess::ServerProcess(ServerProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)),
      url_(std::move(other.url_)),
      cache_folder_(std::move(other.cache_folder_)) {}

Result<ServerProcess::Footprint> ServerProcess::footprint() const {
  const std::string folder = fmt::format("/proc/{}", pid_);
  std::ifstream file(folder + "/status");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.empty()) {
    return error(Code::kUnavailable, "cachalot serve is gone");
  }
  Footprint out;
  out.resident_bytes = status_line(text, "VmRSS:") * 1024;
  out.threads = status_line(text, "Threads:");
  std::error_code failed;
  const std::filesystem::path cache = std::filesystem::weakly_canonical(cache_folder_, failed);
  for (std::filesystem::directory_iterator it(folder + "/fd", failed), end; !failed && it != end;
       it.increment(failed)) {
    std::error_code closed;  // meanwhile
    const std::filesystem::path target = std::filesystem::read_symlink(it->path(), closed);
    const bool in_cache =
        !cache_folder_.empty() && (target == cache || target.parent_path() == cache);
    ++(in_cache ? out.cache_files : out.descriptors);
  }
  return out;
}

Status ServerProcess::stop() {
  ::kill(pid_, SIGTERM);
  const int status = wait_for(std::exchange(pid_, 0));
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return error(Code::kInternal, "cachalot serve ended with wait status {}", status);
  }
  return {};
}

}  // namespace cachalot::cli
