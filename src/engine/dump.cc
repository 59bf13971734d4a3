#include "engine/dump.h"

#include <algorithm>
#include <cstring>

#include "base/file.h"
#include "base/format.h"

namespace cachalot::engine {
namespace {

float element(const TensorView& view, int64_t i) {
  return view.dtype == DType::kBF16 ? static_cast<float>(view.as<bf16>()[i])
                                    : view.as<float>()[i];
}

bool is_choice(const std::string& name) {
  return name.ends_with(".selected") || name.ends_with(".experts");
}

// Dumps hold F32, I32 and U8.
DType dump_dtype(DType dtype) { return dtype == DType::kBF16 ? DType::kF32 : dtype; }

}  // namespace

DumpObserver::DumpObserver(std::string dump_dir, std::string prescribed_dir, Prescribe prescribe)
    : dump_dir_(std::move(dump_dir)),
      prescribed_dir_(std::move(prescribed_dir)),
      prescribe_(prescribe) {}

DumpObserver::~DumpObserver() = default;

Status DumpObserver::begin(int64_t index) {
  index_ = index;
  collected_.clear();
  fault_ = {};
  file_.reset();
  if (!prescribed_dir_.empty()) {
    CACHALOT_TRY(io::SafetensorsFile file,
                 io::SafetensorsFile::open(format("{}/{}.safetensors", prescribed_dir_, index)));
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
  return io::write_safetensors(format("{}/{}.safetensors", dump_dir_, index_), tensors);
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
    std::vector<uint8_t>& bytes = c.rows.emplace_back(
        static_cast<size_t>(width * dtype_bytes(c.dtype)));
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

const TensorView* DumpObserver::prescribed(const std::string& name, int64_t first, int64_t count) {
  if (file_ == nullptr || (prescribe_ == Prescribe::kChoices && !is_choice(name))) {
    return nullptr;
  }
  const TensorView* view = file_->find(name);
  if (view == nullptr) {
    return nullptr;
  }
  if (view->shape.rank < 1 || view->dim(0) < first + count) {
    if (fault_.ok()) {
      fault_ = invalid("{}: tensor '{}' has {} rows, row {} is needed",
                       file_->path(),
                       name,
                       view->shape.rank < 1 ? 0 : view->dim(0),
                       first + count - 1);
    }
    return nullptr;
  }
  return view;
}

void DumpObserver::overwrite(const std::string& name, const TensorView& rows, int64_t first) {
  const int64_t count = rows.dim(0);
  const TensorView* source = prescribed(name, first, count);
  if (source == nullptr || count == 0) {
    return;
  }
  const int64_t width = rows.shape.elements() / count;
  const int64_t source_width = source->shape.elements() / source->dim(0);
  const bool ids = rows.dtype == DType::kI32;
  if (source->dtype != dump_dtype(rows.dtype) || (!ids && source_width != width)) {
    if (fault_.ok()) {
      fault_ = invalid("{}: tensor '{}' is {} {}, expected rows of {} {}",
                       file_->path(),
                       name,
                       dtype_name(source->dtype),
                       to_string(source->shape),
                       width,
                       dtype_name(dump_dtype(rows.dtype)));
    }
    return;
  }
  for (int64_t row = 0; row < count; ++row) {
    const int64_t from = (first + row) * source_width, to = row * width;
    if (ids) {
      for (int64_t i = 0; i < width; ++i) {
        rows.as<int32_t>()[to + i] = i < source_width ? source->as<int32_t>()[from + i] : -1;
      }
    } else if (rows.dtype == DType::kBF16) {
      for (int64_t i = 0; i < width; ++i) {
        rows.as<bf16>()[to + i] = bf16(source->as<float>()[from + i]);
      }
    } else {
      const int64_t size = dtype_bytes(rows.dtype);
      std::memcpy(static_cast<uint8_t*>(rows.data) + to * size,
                  static_cast<const uint8_t*>(source->data) + from * size,
                  static_cast<size_t>(width * size));
    }
  }
}

void DumpObserver::visit(const std::string& name,
                         const TensorView& rows,
                         const model::ObservedRows& where) {
  CACHALOT_CHECK(where.start.size() == 1, where.start.size());
  collect(name, rows);
  // The router's own choice is replaced through forced_experts(): its weights follow from it.
  if (!name.ends_with(".experts")) {
    overwrite(name, rows, where.start[0]);
  }
}

void DumpObserver::visit_entry(const std::string& name,
                               int64_t,
                               int64_t entry,
                               std::span<uint8_t> row) {
  const TensorView view(row.data(), DType::kU8, {1, static_cast<int64_t>(row.size())});
  collect(name, view);
  overwrite(name, view, entry);
}

bool DumpObserver::forced_experts(int64_t layer,
                                  const TensorView& experts,
                                  const model::ObservedRows& where) {
  const std::string name = format("layers.{}.experts", layer);
  if (prescribed(name, where.start[0], experts.dim(0)) == nullptr) {
    return false;
  }
  overwrite(name, experts, where.start[0]);
  return fault_.ok();
}

}  // namespace cachalot::engine
