#include "io/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/format.h"
#include "base/json.h"

namespace cachalot::io {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kDataAlignment = 64;

// Names come from the file: shown as JSON strings, cut to a readable length.
std::string shown(std::string_view name) {
  constexpr size_t kLongest = 120;
  return name.size() <= kLongest ? json_quote(name) : json_quote(name.substr(0, kLongest)) + "...";
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DType dtype : {DType::kF32,
                            DType::kBF16,
                            DType::kF8E4M3,
                            DType::kF8E8M0,
                            DType::kI8,
                            DType::kU8,
                            DType::kI32,
                            DType::kI64}) {
    if (dtype_name(dtype) == name) {
      return dtype;
    }
  }
  return std::nullopt;
}

// Builds the entries while the parser runs. A handler that returns false stops the parser; the
// error is then in `status`.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderHandler(const std::string& source) : source_(source) {}

  Status status;
  SafetensorsHeader header;

  bool start_object(std::size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kRoot;
      return true;
    }
    if (place_ == Place::kRoot) {
      if (name_ == "__metadata__") {
        place_ = Place::kMetadata;
      } else {
        place_ = Place::kTensor;
        header.entries.emplace_back().name = name_;
        seen_.clear();
      }
      return true;
    }
    return unexpected("an object");
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      for (const char* key : {"dtype", "shape", "data_offsets"}) {
        if (!seen_.contains(key)) {
          return damaged("has no {}", key);
        }
      }
    }
    place_ = place_ == Place::kRoot ? Place::kOutside : Place::kRoot;
    return true;
  }

  bool key(std::string& text) override {
    if (place_ == Place::kRoot) {
      name_ = text;
      return names_.insert(text).second || damaged("is named twice");
    }
    if (place_ == Place::kMetadata) {
      key_ = text;
      return !header.metadata.contains(text) || damaged("has the key {} twice", shown(text));
    }
    if (text != "dtype" && text != "shape" && text != "data_offsets") {
      return damaged("has the unknown key {}", shown(text));
    }
    key_ = text;
    return seen_.insert(text).second || damaged("has the key {} twice", text);
  }

  bool string(std::string& text) override {
    if (place_ == Place::kMetadata) {
      header.metadata.emplace(key_, text);
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype" || list_open_) {
      return unexpected("a string");
    }
    const std::optional<DType> dtype = dtype_from_name(text);
    if (!dtype) {
      status = error(Code::kUnimplemented,
                     "{}: tensor {} has the unsupported dtype {}",
                     source_,
                     shown(name_),
                     shown(text));
      return false;
    }
    header.entries.back().dtype = *dtype;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype" || list_open_) {
      return unexpected("an array");
    }
    list_open_ = true;
    list_.clear();
    return true;
  }

  bool end_array() override {
    list_open_ = false;
    SafetensorsEntry& entry = header.entries.back();
    if (key_ == "shape") {
      for (const uint64_t extent : list_) {
        if (extent > static_cast<uint64_t>(INT64_MAX)) {
          return damaged("has the extent {}", extent);
        }
        entry.shape.extent[static_cast<size_t>(entry.shape.rank++)] = static_cast<int64_t>(extent);
      }
      return true;
    }
    if (list_.size() != 2) {
      return damaged("has {} data_offsets instead of 2", list_.size());
    }
    entry.begin = list_[0];
    entry.end = list_[1];
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (!list_open_) {
      return unexpected("a number");
    }
    if (list_.size() == kMaxRank) {
      status = error(Code::kUnimplemented,
                     "{}: tensor {} has more than {} entries in {}",
                     source_,
                     shown(name_),
                     kMaxRank,
                     key_);
      return false;
    }
    list_.push_back(value);
    return true;
  }

  bool number_integer(int64_t value) override { return bad_number(fmt::format("{}", value)); }
  bool number_float(double, const std::string& text) override { return bad_number(text); }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary data"); }
  bool parse_error(std::size_t position,
                   const std::string&,
                   const nlohmann::detail::exception& cause) override {
    status = error(Code::kDataLoss,
                   "{}: the header is not JSON (at byte {}): {}",
                   source_,
                   position + kLengthBytes,
                   cause.what());
    return false;
  }

 private:
  enum class Place { kOutside, kRoot, kMetadata, kTensor };

  template <class... Args>
  bool damaged(fmt::format_string<Args...> text, Args&&... args) {
    status = error(Code::kDataLoss,
                   "{}: tensor {} {}",
                   source_,
                   shown(name_),
                   fmt::format(text, std::forward<Args>(args)...));
    return false;
  }

  bool unexpected(std::string_view what) {
    if (place_ == Place::kOutside) {
      status = error(Code::kDataLoss, "{}: the header is {} instead of an object", source_, what);
      return false;
    }
    return place_ == Place::kRoot ? damaged("is {} instead of an object", what)
                                  : damaged("has {} at the key {}", what, shown(key_));
  }

  bool bad_number(const std::string& text) {
    return list_open_ ? damaged("has the number {} in {}", text, key_) : unexpected("a number");
  }

  const std::string& source_;
  Place place_ = Place::kOutside;
  std::string name_;
  std::string key_;
  std::set<std::string> names_;
  std::set<std::string> seen_;
  std::vector<uint64_t> list_;
  bool list_open_ = false;
};

// Each range must fit its dtype and shape, and together they must cover `data_bytes` exactly.
Status check_ranges(std::vector<SafetensorsEntry>& entries,
                    uint64_t data_bytes,
                    const std::string& source) {
  for (const SafetensorsEntry& entry : entries) {
    uint64_t bytes = static_cast<uint64_t>(dtype_bytes(entry.dtype));
    for (int axis = 0; axis < entry.shape.rank; ++axis) {
      if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(entry.shape[axis]), &bytes)) {
        return error(Code::kDataLoss,
                     "{}: tensor {}: the shape {} overflows",
                     source,
                     shown(entry.name),
                     to_string(entry.shape));
      }
    }
    if (entry.begin > entry.end) {
      return error(Code::kDataLoss,
                   "{}: tensor {}: data_offsets [{}, {}] are reversed",
                   source,
                   shown(entry.name),
                   entry.begin,
                   entry.end);
    }
    if (entry.end > data_bytes) {
      return error(Code::kDataLoss,
                   "{}: tensor {}: data_offsets [{}, {}] end behind the {} data bytes of the file",
                   source,
                   shown(entry.name),
                   entry.begin,
                   entry.end,
                   data_bytes);
    }
    if (entry.end - entry.begin != bytes) {
      return error(Code::kDataLoss,
                   "{}: tensor {}: data_offsets [{}, {}] hold {} bytes, but {} {} needs {}",
                   source,
                   shown(entry.name),
                   entry.begin,
                   entry.end,
                   entry.end - entry.begin,
                   dtype_name(entry.dtype),
                   to_string(entry.shape),
                   bytes);
    }
  }
  std::sort(
      entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
        return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
      });
  uint64_t expected = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != expected) {
      return error(Code::kDataLoss,
                   "{}: tensor {}: data_offsets [{}, {}] {}",
                   source,
                   shown(entry.name),
                   entry.begin,
                   entry.end,
                   entry.begin < expected
                       ? fmt::format("overlap the tensor that ends at {}", expected)
                       : fmt::format("leave a gap behind byte {}", expected));
    }
    expected = entry.end;
  }
  if (expected != data_bytes) {
    return error(Code::kDataLoss,
                 "{}: {} bytes behind the last tensor belong to none",
                 source,
                 data_bytes - expected);
  }
  return {};
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::span<const uint8_t> bytes,
                                                   const std::string& source) {
  if (bytes.size() < kLengthBytes) {
    return error(
        Code::kDataLoss, "{}: {} bytes are too short for a safetensors file", source, bytes.size());
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= uint64_t{bytes[i]} << (8 * i);
  }
  if (length > bytes.size() - kLengthBytes) {
    return error(Code::kDataLoss,
                 "{}: the header of {} bytes does not fit the file of {} bytes",
                 source,
                 length,
                 bytes.size());
  }
  if (length > kMaxSafetensorsHeader) {
    return error(Code::kDataLoss,
                 "{}: the header of {} bytes is longer than {}",
                 source,
                 length,
                 kMaxSafetensorsHeader);
  }
  HeaderHandler handler(source);
  const auto* text = reinterpret_cast<const char*>(bytes.data() + kLengthBytes);
  if (!nlohmann::json::sax_parse(text, text + length, &handler)) {
    return handler.status;
  }
  handler.header.data_begin = kLengthBytes + length;
  CACHALOT_RETURN_IF_ERROR(
      check_ranges(handler.header.entries, bytes.size() - handler.header.data_begin, source));
  return std::move(handler.header);
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  CACHALOT_TRY(file.file_, MappedFile::open(path));
  const std::span<const uint8_t> bytes = file.file_.bytes();
  CACHALOT_TRY(SafetensorsHeader header, parse_safetensors_header(bytes, path));
  file.metadata_ = std::move(header.metadata);
  file.tensors_.reserve(header.entries.size());
  for (SafetensorsEntry& entry : header.entries) {
    // TensorView has no read-only form; the mapping itself is not writable.
    auto* data = const_cast<uint8_t*>(bytes.data()) + header.data_begin + entry.begin;
    file.tensors_.push_back({std::move(entry.name), TensorView(data, entry.dtype, entry.shape)});
  }
  std::sort(file.tensors_.begin(), file.tensors_.end(), [](const Tensor& a, const Tensor& b) {
    return a.name < b.name;
  });
  return file;
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto it = std::lower_bound(
      tensors_.begin(), tensors_.end(), name, [](const Tensor& tensor, std::string_view key) {
        return tensor.name < key;
      });
  return it != tensors_.end() && it->name == name ? &it->view : nullptr;
}

// ---- Writing
// -------------------------------------------------------------------------------------

SafetensorsWriter::SafetensorsWriter(NewFile file, uint64_t remaining)
    : file_(std::move(file)), remaining_(remaining) {}

Result<SafetensorsWriter> SafetensorsWriter::create(
    const std::string& path,
    const std::vector<Declaration>& tensors,
    const std::map<std::string, std::string>& metadata) {
  std::set<std::string_view> names = {"__metadata__"};
  uint64_t offset = 0;
  JsonWriter json;
  json.begin_object();
  if (!metadata.empty()) {
    json.key("__metadata__").begin_object();
    for (const auto& [key, value] : metadata) {
      json.field(key, value);
    }
    json.end_object();
  }
  for (const Declaration& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return invalid("{}: tensor {} is declared twice", path, shown(tensor.name));
    }
    const auto bytes = static_cast<uint64_t>(tensor.shape.elements() * dtype_bytes(tensor.dtype));
    json.key(tensor.name).begin_object().field("dtype", dtype_name(tensor.dtype));
    json.key("shape").begin_array();
    for (int axis = 0; axis < tensor.shape.rank; ++axis) {
      json.value(tensor.shape[axis]);
    }
    json.end_array().key("data_offsets").begin_array();
    json.value(offset).value(offset + bytes).end_array().end_object();
    offset += bytes;
  }
  json.end_object();
  std::string header = json.text();
  const uint64_t unpadded = kLengthBytes + header.size();
  header.append((kDataAlignment - unpadded % kDataAlignment) % kDataAlignment, ' ');
  if (header.size() > kMaxSafetensorsHeader) {
    return invalid(
        "{}: the header of {} bytes is longer than {}", path, header.size(), kMaxSafetensorsHeader);
  }

  std::string length(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<char>(header.size() >> (8 * i));
  }
  CACHALOT_TRY(NewFile file, NewFile::create(path));
  CACHALOT_RETURN_IF_ERROR(file.write(length + header));
  return SafetensorsWriter(std::move(file), offset);
}

Status SafetensorsWriter::append(std::span<const uint8_t> bytes) {
  CACHALOT_CHECK(bytes.size() <= remaining_, bytes.size(), remaining_);
  remaining_ -= bytes.size();
  return file_.write({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

Status SafetensorsWriter::finish() {
  CACHALOT_CHECK(remaining_ == 0, remaining_);
  return file_.commit();
}

Status write_safetensors(const std::string& path,
                         std::span<const SafetensorsFile::Tensor> tensors,
                         const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsWriter::Declaration> declarations;
  for (const SafetensorsFile::Tensor& tensor : tensors) {
    declarations.push_back({tensor.name, tensor.view.dtype, tensor.view.shape});
  }
  CACHALOT_TRY(SafetensorsWriter writer, SafetensorsWriter::create(path, declarations, metadata));
  for (const SafetensorsFile::Tensor& tensor : tensors) {
    CACHALOT_RETURN_IF_ERROR(writer.append(
        {static_cast<const uint8_t*>(tensor.view.data), static_cast<size_t>(tensor.view.bytes())}));
  }
  return writer.finish();
}

}  // namespace cachalot::io
