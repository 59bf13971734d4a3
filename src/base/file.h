// Files: read-only mappings, whole reads, atomic writes.
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

// Writes `bytes` to a temporary file beside `path` and renames it: readers see the old or the new
// content, never a part.
Status write_file(const std::string& path, std::string_view bytes);

// Creates a directory and its parents.
Status make_directories(const std::string& path);

// Removes a file or an empty directory; one that is not there is no error.
Status remove_file(const std::string& path);

bool file_exists(const std::string& path);

}  // namespace cachalot
