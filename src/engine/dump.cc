#include "engine/dump.h"

#include <algorithm>
#include <cstring>

#include "base/file.h"
#include "base/format.h"

namespace cachalot::engine {
namespace {

float element(const TensorView& view, int64_t i) {
  return view.dtype == DType::kBF16 ? static_cast<float>(view.as<bf16>()[i]) : view.as<float>()[i];
}

// Dumps hold F32, I32 and U8.
DType dump_dtype(DType dtype) {
  return dtype == DType::kBF16 ? DType::kF32 : dtype;
}

}  // namespace

DumpObserver::DumpObserver(std::string dump_dir, std::string prescribed_dir)
    : dump_dir_(std::move(dump_dir)), prescribed_dir_(std::move(prescribed_dir)) {}

DumpObserver::~DumpObserver() = default;

Status DumpObserver::begin(int64_t index) {
  index_ = index;
  collected_.clear();
  fault_ = {};
  file_.reset();
  if (!prescribed_dir_.empty()) {
    CACHALOT_TRY(
        io::SafetensorsFile file,
        io::SafetensorsFile::open(fmt::format("{}/{}.safetensors", prescribed_dir_, index)));
    file_ = std::make_unique<io::SafetensorsFile>(std::move(file));
  }
  return {};
}

Status DumpObserver::end() {
  CACHALOT_RETURN_IF_ERROR(fault_);
  if (dump_dir_.empty()) {
    return {};
  }
  CACHALOT_RETURN_IF_ERROR(make_directories(dump_dir_));
  std::vector<io::SafetensorsFile::Tensor> tensors;
  std::vector<std::vector<uint8_t>> memory;
  for (auto& [name, c] : collected_) {
    size_t widest = 0;
    for (const auto& row : c.rows) {
      widest = std::max(widest, row.size());
    }
    std::vector<uint8_t>& bytes = memory.emplace_back();
    for (auto& row : c.rows) {
      // Only I32 rows differ in width; 0xFF bytes are -1.
      row.resize(widest, 0xFF);
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
    Shape shape{static_cast<int64_t>(c.rows.size())};
    if (c.dtype == DType::kI32) {
      shape.extent[static_cast<size_t>(shape.rank++)] = static_cast<int64_t>(widest / 4);
    } else {
      for (int64_t extent : c.row_shape) {
        shape.extent[static_cast<size_t>(shape.rank++)] = extent;
      }
    }
    tensors.push_back({name, TensorView(nullptr, c.dtype, shape)});
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].view.data = memory[i].data();
  }
  return io::write_safetensors(fmt::format("{}/{}.safetensors", dump_dir_, index_), tensors);
}

void DumpObserver::collect(const std::string& name, const TensorView& rows) {
  if (dump_dir_.empty()) {
    return;
  }
  Collected& c = collected_[name];
  c.dtype = dump_dtype(rows.dtype);
  c.row_shape.clear();
  int64_t width = 1;
  for (int axis = 1; axis < rows.shape.rank; ++axis) {
    c.row_shape.push_back(rows.dim(axis));
    width *= rows.dim(axis);
  }
  for (int64_t row = 0; row < rows.dim(0); ++row) {
    std::vector<uint8_t>& bytes =
        c.rows.emplace_back(static_cast<size_t>(width * dtype_bytes(c.dtype)));
    if (rows.dtype == DType::kBF16) {
      for (int64_t i = 0; i < width; ++i) {
        const float value = element(rows, row * width + i);
        std::memcpy(bytes.data() + i * 4, &value, 4);
      }
    } else if (width > 0) {
      std::memcpy(bytes.data(),
                  static_cast<const uint8_t*>(rows.data) + row * width * dtype_bytes(rows.dtype),
                  bytes.size());
    }
  }
}

bool DumpObserver::prescribe(const std::string& name, const TensorView& ids, int64_t first) {
  const TensorView* source = file_ == nullptr ? nullptr : file_->find(name);
  const int64_t count = ids.dim(0), width = ids.dim(1);
  if (source == nullptr || count == 0 || width == 0) {
    return false;
  }
  if (source->dtype != DType::kI32 || source->shape.rank != 2 || source->dim(0) < first + count) {
    if (fault_.ok()) {
      fault_ = invalid("{}: tensor '{}' is {} {}, I32 with at least {} rows is needed",
                       file_->path(),
                       name,
                       dtype_name(source->dtype),
                       to_string(source->shape),
                       first + count);
    }
    return false;
  }
  const int64_t source_width = source->dim(1);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < width; ++i) {
      int32_t id = -1;
      if (i < source_width) {
        // A mapped tensor need not be aligned.
        std::memcpy(
            &id,
            static_cast<const uint8_t*>(source->data) + ((first + row) * source_width + i) * 4,
            4);
      }
      ids.as<int32_t>()[row * width + i] = id;
    }
  }
  return true;
}

void DumpObserver::visit(const std::string& name,
                         const TensorView& rows,
                         const model::ObservedRows& where) {
  CACHALOT_CHECK(where.start.size() == 1, where.start.size());
  collect(name, rows);
  if (name.ends_with(".selected")) {
    prescribe(name, rows, where.start[0]);
  }
}

bool DumpObserver::forced_experts(int64_t layer,
                                  const TensorView& experts,
                                  const model::ObservedRows& where) {
  return prescribe(fmt::format("layers.{}.experts", layer), experts, where.start[0]);
}

}  // namespace cachalot::engine
