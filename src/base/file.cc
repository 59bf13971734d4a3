#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/format.h"

namespace cachalot {
namespace {

Status system_error(Code code, std::string_view what, const std::string& path) {
  return error(code, "{} '{}': {}", what, path, std::strerror(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

Code open_code() {
  return errno == ENOENT ? Code::kNotFound : Code::kUnavailable;
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) {
    return system_error(open_code(), "cannot open", path);
  }
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) {
    return system_error(Code::kUnavailable, "cannot stat", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return invalid("'{}' is not a regular file", path);
  }
  MappedFile file;
  file.path_ = path;
  file.size_ = static_cast<size_t>(info.st_size);
  if (file.size_ > 0) {
    void* data = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (data == MAP_FAILED) {
      file.size_ = 0;
      return system_error(Code::kResourceExhausted, "cannot map", path);
    }
    file.data_ = static_cast<const uint8_t*>(data);
  }
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) {
    ::munmap(const_cast<uint8_t*>(data_), size_);
  }
}

Result<std::string> read_file(const std::string& path, size_t limit) {
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) {
    return system_error(open_code(), "cannot open", path);
  }
  std::string bytes;
  char buffer[1 << 16];
  while (true) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      return system_error(Code::kUnavailable, "cannot read", path);
    }
    if (n == 0) {
      return bytes;
    }
    if (bytes.size() + static_cast<size_t>(n) > limit) {
      return error(Code::kOutOfRange, "'{}' is larger than {} bytes", path, limit);
    }
    bytes.append(buffer, static_cast<size_t>(n));
  }
}

Status write_file(const std::string& path, std::string_view bytes) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  Descriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (fd.get() < 0) {
    return system_error(Code::kUnavailable, "cannot create", temporary);
  }
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(fd.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      const Status status = system_error(Code::kUnavailable, "cannot write", temporary);
      ::unlink(temporary.c_str());
      return status;
    }
    done += static_cast<size_t>(n);
  }
  if (::fsync(fd.get()) != 0 || ::close(fd.release()) != 0 ||
      ::rename(temporary.c_str(), path.c_str()) != 0) {
    const Status status = system_error(Code::kUnavailable, "cannot write", path);
    ::unlink(temporary.c_str());
    return status;
  }
  return {};
}

Status make_directories(const std::string& path) {
  std::error_code code;
  std::filesystem::create_directories(path, code);
  if (code) {
    return error(Code::kUnavailable, "cannot create directory '{}': {}", path, code.message());
  }
  return {};
}

Status remove_file(const std::string& path) {
  std::error_code code;
  std::filesystem::remove(path, code);
  if (code) {
    return error(Code::kUnavailable, "cannot remove '{}': {}", path, code.message());
  }
  return {};
}

bool file_exists(const std::string& path) {
  std::error_code code;
  return std::filesystem::exists(path, code);
}

}  // namespace cachalot
