#include "model/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_set>

#include "base/check.h"
#include "base/file.h"
#include "base/format.h"
#include "base/progress.h"

namespace cachalot::model {
namespace {

constexpr size_t kConfigLimit = 16'000'000;

// "; 3 tensors missing: a, b, c"
std::string listed(const NameList& names, std::string_view what) {
  return names.empty() ? ""
                       : fmt::format("; {} tensor{} {}: {}",
                                     names.count(),
                                     names.count() == 1 ? "" : "s",
                                     what,
                                     names.text());
}

// A run of one tensor's elements.
struct Piece {
  size_t tensor;
  int64_t begin;
  int64_t end;
};

struct Invalid {
  int64_t first = -1;
  int64_t count = 0;
};

// Invalid values have all bits of `mask` set: in each format these are the bits of the exponent, or
// of the whole code. First a run at once, which vectorizes; then, rarely, element by element.
template <class T>
Invalid scan(const TensorView& view, int64_t begin, int64_t end, T mask) {
  const T* data = view.as<T>();
  Invalid found;
  constexpr int64_t kRun = 4096;
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t run_end = std::min(end, run + kRun);
    T any = 0;
    for (int64_t i = run; i < run_end; ++i) {
      any |= static_cast<T>((data[i] & mask) == mask);
    }
    for (int64_t i = run; any != 0 && i < run_end; ++i) {
      if ((data[i] & mask) == mask) {
        found.first = found.count == 0 ? i : found.first;
        ++found.count;
      }
    }
  }
  return found;
}

// What the invalid values of a dtype are called; empty if there are none.
std::string_view invalid_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kBF16:
      return "NaN or infinite";
    case DType::kF8E4M3:
      return "NaN";
    case DType::kF8E8M0:
      return "the NaN scale 255";
    default:
      return {};
  }
}

Invalid scan(const TensorView& view, int64_t begin, int64_t end) {
  switch (view.dtype) {
    case DType::kF32:
      return scan<uint32_t>(view, begin, end, 0x7F800000);
    case DType::kBF16:
      return scan<uint16_t>(view, begin, end, 0x7F80);
    case DType::kF8E4M3:
      return scan<uint8_t>(view, begin, end, 0x7F);
    case DType::kF8E8M0:
      return scan<uint8_t>(view, begin, end, 0xFF);
    default:
      return {};
  }
}

}  // namespace

std::string to_string(const ValueFault& fault) {
  return fmt::format("{}: element {} is {} ({} such element{})",
                     fault.tensor,
                     fault.element,
                     fault.what,
                     fault.count,
                     fault.count == 1 ? "" : "s");
}

Result<Checkpoint> Checkpoint::open(const std::string& directory, Values values) {
  Checkpoint checkpoint;
  checkpoint.directory_ = directory;
  const size_t shown = values == Values::kChecked ? NameList::kFew : NameList::kAll;
  const std::string config_path = directory + "/config.json";
  CACHALOT_TRY(const std::string text, read_file(config_path, kConfigLimit));
  CACHALOT_TRY(checkpoint.config_, parse_config(text, config_path));
  CACHALOT_TRY(checkpoint.tensors_, io::ShardedTensors::open(directory, shown));
  checkpoint.table_ = weight_table(checkpoint.config_);
  CACHALOT_RETURN_IF_ERROR(checkpoint.check_tensors(shown));
  checkpoint.align_tensors();
  if (values == Values::kChecked) {
    for (const WeightSpec& spec : checkpoint.table_) {
      if (spec.part == WeightPart::kEngram) {
        continue;
      }
      for (const StoredTensor& stored : stored_tensors(spec)) {
        const TensorView view = checkpoint.tensor(stored.name);
        const Invalid found = scan(view, 0, view.shape.elements());
        if (found.count > 0) {
          return error(
              Code::kDataLoss,
              "{}: {}",
              directory,
              to_string(
                  {stored.name, found.first, found.count, std::string(invalid_name(view.dtype))}));
        }
      }
    }
  }
  checkpoint.weights_ = resolve_weights(
      checkpoint.config_, [&](const std::string& name) { return checkpoint.tensor(name); });
  return checkpoint;
}

Status Checkpoint::check_tensors(size_t shown) const {
  NameList missing(shown), unexpected(shown), wrong(shown);
  std::unordered_set<std::string_view> expected;
  for (const WeightSpec& spec : table_) {
    for (const StoredTensor& stored : stored_tensors(spec)) {
      const io::ShardedTensors::Tensor* tensor = tensors_.find(stored.name);
      if (tensor == nullptr) {
        missing.add(stored.name);
        continue;
      }
      expected.insert(tensor->name);
      const TensorView& view = tensor->view;
      if (view.dtype != stored.dtype || view.shape != stored.shape) {
        wrong.add(fmt::format("{} is {} {} instead of {} {}",
                              stored.name,
                              dtype_name(view.dtype),
                              to_string(view.shape),
                              dtype_name(stored.dtype),
                              to_string(stored.shape)));
      }
    }
  }
  if (expected.size() < tensors_.tensors().size()) {
    for (const io::ShardedTensors::Tensor& tensor : tensors_.tensors()) {
      if (!expected.contains(tensor.name)) {
        unexpected.add(tensor.name);
      }
    }
  }
  const std::string faults = listed(missing, "missing") + listed(unexpected, "unexpected") +
                             listed(wrong, "with the wrong dtype or shape");
  return faults.empty()
             ? Status()
             : error(
                   Code::kDataLoss, "{}: the tensors do not fit config.json{}", directory_, faults);
}

void Checkpoint::align_tensors() {
  for (const io::ShardedTensors::Tensor& tensor : tensors_.tensors()) {
    const TensorView& view = tensor.view;
    const auto address = reinterpret_cast<uintptr_t>(view.data);
    if (address % static_cast<uintptr_t>(dtype_bytes(view.dtype)) != 0) {
      auto copy = std::make_unique<uint8_t[]>(static_cast<size_t>(view.bytes()));
      std::memcpy(copy.get(), view.data, static_cast<size_t>(view.bytes()));
      copies_.emplace(tensor.name, std::move(copy));
    }
  }
}

TensorView Checkpoint::tensor(const std::string& name) const {
  const io::ShardedTensors::Tensor* tensor = tensors_.find(name);
  CACHALOT_CHECK(tensor != nullptr);
  TensorView view = tensor->view;
  if (const auto copy = copies_.find(name); copy != copies_.end()) {
    view.data = copy->second.get();
  }
  return view;
}

ops::Weight Checkpoint::weight(const WeightSpec& spec) const {
  return resolve_weight(spec, [this](const std::string& name) { return tensor(name); });
}

std::vector<ValueFault> Checkpoint::verify(ThreadPool& pool) const {
  constexpr int64_t kPieceElements = 1 << 22;
  std::vector<TensorView> views;
  std::vector<Piece> pieces;
  int64_t bytes = 0;
  for (const io::ShardedTensors::Tensor& stored : tensors_.tensors()) {
    const TensorView view = tensor(std::string(stored.name));
    views.push_back(view);
    if (invalid_name(view.dtype).empty()) {
      continue;
    }
    bytes += view.bytes();
    for (int64_t begin = 0; begin < view.shape.elements(); begin += kPieceElements) {
      pieces.push_back(
          {views.size() - 1, begin, std::min(view.shape.elements(), begin + kPieceElements)});
    }
  }
  std::vector<Invalid> found(pieces.size());
  std::mutex mutex;
  Progress progress("verify (bytes)", bytes);
  pool.parallel_for_dynamic(
      static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
          const Piece& piece = pieces[i];
          const TensorView& view = views[piece.tensor];
          found[i] = scan(view, piece.begin, piece.end);
          const std::lock_guard lock(mutex);
          progress.advance((piece.end - piece.begin) * dtype_bytes(view.dtype));
        }
      });
  std::vector<ValueFault> faults;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (found[i].count == 0) {
      continue;
    }
    const size_t t = pieces[i].tensor;
    if (!faults.empty() && faults.back().tensor == tensors_.tensors()[t].name) {
      faults.back().count += found[i].count;
    } else {
      faults.push_back({std::string(tensors_.tensors()[t].name),
                        found[i].first,
                        found[i].count,
                        std::string(invalid_name(views[t].dtype))});
    }
  }
  return faults;
}

}  // namespace cachalot::model
