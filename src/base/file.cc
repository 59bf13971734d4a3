#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
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

// A temporary file is called "NAME.PID-N.tmp".
constexpr std::string_view kUnfinished = ".tmp";

bool is_unfinished(std::string_view name) {
  if (!name.ends_with(kUnfinished)) {
    return false;
  }
  name.remove_suffix(kUnfinished.size());
  const auto take_number = [&] {
    const size_t digits = name.size() - (name.find_last_not_of("0123456789") + 1);
    name.remove_suffix(digits);
    return digits > 0;
  };
  const auto take = [&](char c) {
    const bool there = name.ends_with(c);
    name.remove_suffix(there ? 1 : 0);
    return there;
  };
  return take_number() && take('-') && take_number() && take('.') && !name.empty();
}

Status write_all(int fd, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno != EINTR) {
      return system_error(Code::kUnavailable, "cannot write", path);
    }
    bytes.remove_prefix(n < 0 ? 0 : static_cast<size_t>(n));
  }
  return {};
}

// Puts the names of a directory on the disk.
Status sync_directory(const std::filesystem::path& directory) {
  const std::string path = directory.empty() ? "." : directory.string();
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: a file system whose directories cannot be synced.
  if (fd.get() < 0 || (::fsync(fd.get()) != 0 && errno != EINVAL)) {
    return system_error(Code::kUnavailable, "cannot sync", path);
  }
  return {};
}

// Where a path leads through its symbolic links, to a file that need not be there yet.
struct Target {
  std::string path;
  int fd = -1;  // a file that this process has open: what /dev/stdout and /dev/fd lead to
};

Result<Target> follow_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the kernel's
  std::filesystem::path target = path;
  std::error_code failure;
  const std::filesystem::path open_files = std::filesystem::canonical("/proc/self/fd", failure);
  for (int links = 0; links < kMostLinks; ++links) {
    const std::filesystem::path link = std::filesystem::read_symlink(target, failure);
    if (failure) {
      return Target{target.string()};
    }
    const std::filesystem::path parent = target.parent_path();
    const std::filesystem::path folder =
        std::filesystem::canonical(parent.empty() ? "." : parent, failure);
    if (folder == open_files) {
      const std::string number = target.filename().string();
      int fd = -1;
      std::from_chars(number.data(), number.data() + number.size(), fd);
      return Target{target.string(), fd};
    }
    target = folder / link;
  }
  errno = ELOOP;
  return system_error(Code::kUnavailable, "cannot open", path);
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

NewFile::NewFile(int fd, std::string path, std::string temporary)
    : fd_(fd), path_(std::move(path)), temporary_(std::move(temporary)) {}

NewFile::NewFile(NewFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)) {}

NewFile& NewFile::operator=(NewFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(temporary_, other.temporary_);
  return *this;
}

NewFile::~NewFile() {
  if (fd_ >= 0) {
    ::unlink(temporary_.c_str());
    ::close(fd_);
  }
}

Result<NewFile> NewFile::create(const std::string& path) {
  for (int64_t attempt = 0;; ++attempt) {
    std::string temporary = fmt::format("{}.{}-{}{}", path, ::getpid(), attempt, kUnfinished);
    const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd >= 0) {
      NewFile file(fd, path, std::move(temporary));
      // The lock tells remove_unfinished() that the writer lives. Where that came first, or had the
      // file already, the next name is tried; a file system without locks does without.
      struct stat info{};
      const bool lost = ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
      if (!lost && ::fstat(fd, &info) == 0 && info.st_nlink > 0) {
        return file;
      }
    } else if (errno != EEXIST) {
      return system_error(Code::kUnavailable, "cannot create", temporary);
    }
  }
}

Status NewFile::keep_permissions() {
  struct stat info{};
  if (::stat(path_.c_str(), &info) == 0 && ::fchmod(fd_, info.st_mode & 07777) != 0) {
    return system_error(Code::kUnavailable, "cannot set the permissions of", temporary_);
  }
  return {};
}

Status NewFile::write(std::string_view bytes) {
  return write_all(fd_, bytes, temporary_);
}

Status NewFile::commit() {
  if (::fsync(fd_) != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return system_error(Code::kUnavailable, "cannot write", path_);
  }
  if (::close(std::exchange(fd_, -1)) != 0) {
    return system_error(Code::kUnavailable, "cannot write", path_);
  }
  return sync_directory(std::filesystem::path(path_).parent_path());
}

Status replace_file(const std::string& path, std::string_view bytes) {
  CACHALOT_TRY(NewFile file, NewFile::create(path));
  CACHALOT_RETURN_IF_ERROR(file.write(bytes));
  return file.commit();
}

Status write_file(const std::string& path, std::string_view bytes) {
  CACHALOT_TRY(const Target target, follow_links(path));
  if (target.fd >= 0) {
    return write_all(target.fd, bytes, path);
  }
  struct stat info{};
  if (::stat(target.path.c_str(), &info) != 0 || S_ISREG(info.st_mode)) {
    CACHALOT_TRY(NewFile file, NewFile::create(target.path));
    CACHALOT_RETURN_IF_ERROR(file.keep_permissions());
    CACHALOT_RETURN_IF_ERROR(file.write(bytes));
    return file.commit();
  }
  Descriptor fd(::open(target.path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
  if (fd.get() < 0) {
    return system_error(Code::kUnavailable, "cannot open", path);
  }
  CACHALOT_RETURN_IF_ERROR(write_all(fd.get(), bytes, path));
  if (::close(fd.release()) != 0) {
    return system_error(Code::kUnavailable, "cannot write", path);
  }
  return {};
}

Status remove_unfinished(const std::string& directory) {
  std::error_code failure;
  if (!std::filesystem::exists(directory, failure) && !failure) {
    return {};
  }
  for (auto entry = std::filesystem::directory_iterator(directory, failure);
       !failure && entry != std::filesystem::directory_iterator();
       entry.increment(failure)) {
    const std::string path = entry->path().string();
    if (!is_unfinished(entry->path().filename().string())) {
      continue;
    }
    const Descriptor fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    // Whoever still writes it holds the lock.
    if (fd.get() >= 0 && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) {
      CACHALOT_RETURN_IF_ERROR(remove_file(path));
    }
  }
  if (failure) {
    return error(Code::kUnavailable, "cannot list '{}': {}", directory, failure.message());
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
