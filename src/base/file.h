// Files: read-only mappings, whole reads, atomic writes.
//
// Every atomic write goes through NewFile, so that what an interrupted one leaves behind is known
// by its name and removed by remove_unfinished().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace cachalot {

// A read-only private mapping of a whole file; unmapped on destruction. Movable.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

// The whole file as bytes; refuses files larger than `limit`.
Result<std::string> read_file(const std::string& path, size_t limit = size_t{1} << 30);

// A file that appears under its name whole or not at all: what is written goes to a temporary file
// beside it until commit(). Movable; without a commit the destructor removes the temporary file.
class NewFile {
 public:
  static Result<NewFile> create(const std::string& path);
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&& other) noexcept;
  ~NewFile();

  // Those of the file that will be replaced, if there is one.
  Status keep_permissions();
  Status write(std::string_view bytes);
  // Replaces whatever has the name, a symbolic link too. File and name are on the disk on success.
  Status commit();

 private:
  NewFile(int fd, std::string path, std::string temporary);

  int fd_ = -1;
  std::string path_, temporary_;
};

// Replaces the file at `path` at once: for files that the program owns.
Status replace_file(const std::string& path, std::string_view bytes);

// Writes where a user's `path` leads: through symbolic links, and into pipes and devices as they
// are. A regular file is replaced at once and keeps its permissions.
Status write_file(const std::string& path, std::string_view bytes);

// Removes the temporary files in `directory` whose writers ended without a commit. A directory that
// is not there is no error.
Status remove_unfinished(const std::string& directory);

// Creates a directory and its parents.
Status make_directories(const std::string& path);

// Removes a file or an empty directory; one that is not there is no error.
Status remove_file(const std::string& path);

bool file_exists(const std::string& path);

}  // namespace cachalot
