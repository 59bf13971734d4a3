// The safetensors format: 8 bytes little-endian header length, a JSON header, raw tensor bytes.
//
// Reading maps the file and copies nothing. The header is checked before any tensor byte is
// touched: after open() every view lies inside the file and agrees with its dtype and shape. Rank
// is at most 4. Views may be misaligned for their element type (the format does not forbid it); a
// reader that needs alignment must copy such a tensor. Files written here are always naturally
// aligned if the caller orders the tensors so.
//
//   CACHALOT_TRY(const io::SafetensorsFile file, io::SafetensorsFile::open("model.safetensors"));
//   if (const TensorView* view = file.find("norm.weight")) { ... }
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "tensor/tensor.h"

namespace cachalot::io {

// One header entry. The bytes are [begin, end) of the data section.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // ascending by begin
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // file offset of the data section
};

// Longest header that is read, in bytes; the same limit as the reference implementation.
constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;

// Parses and checks the header of a whole file's `bytes`. `source` names the file in errors, which
// also name the tensor and the offending value. Refused: a header longer than the file or the
// limit, duplicate tensor names or keys, unknown dtypes, rank above 4, extents whose product
// overflows, ranges that disagree with dtype and shape, and ranges that do not tile the data
// section exactly (overlap, gap, reversal, end of file).
Result<SafetensorsHeader> parse_safetensors_header(std::span<const uint8_t> bytes,
                                                   const std::string& source);

// A mapped file with its tensors. Movable; views stay valid while the object (or what it was moved
// to) lives, and must not be written through.
class SafetensorsFile {
 public:
  struct Tensor {
    std::string name;
    TensorView view;
  };

  static Result<SafetensorsFile> open(const std::string& path);

  // The tensor called `name`, or null.
  const TensorView* find(std::string_view name) const;
  // Ascending by name.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return file_.path(); }

 private:
  MappedFile file_;
  std::vector<Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Streams tensors into a file in the order of the declared list. The data section starts at a
// multiple of 64 bytes, tensors follow each other without gaps, and the bytes depend on the
// arguments alone. The file appears under its name only when finish() succeeds.
class SafetensorsWriter {
 public:
  struct Declaration {
    std::string name;
    DType dtype = DType::kF32;
    Shape shape;
  };

  // Names must be unique and not "__metadata__".
  static Result<SafetensorsWriter> create(const std::string& path,
                                          const std::vector<Declaration>& tensors,
                                          const std::map<std::string, std::string>& metadata = {});

  // The next bytes of the data section; tensors may be written in parts.
  Status append(std::span<const uint8_t> bytes);
  // Syncs and renames the file. All declared bytes must have been appended.
  Status finish();

 private:
  SafetensorsWriter(NewFile file, uint64_t remaining);

  NewFile file_;
  uint64_t remaining_;  // bytes
};

// Writes host tensors, in the order given, as one file.
Status write_safetensors(const std::string& path,
                         std::span<const SafetensorsFile::Tensor> tensors,
                         const std::map<std::string, std::string>& metadata = {});

}  // namespace cachalot::io
