#include "io/sharded.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/format.h"
#include "base/json.h"

namespace cachalot::io {
namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr size_t kIndexLimit = 200'000'000;

struct Index {
  std::vector<IndexEntry> entries;  // ascending by name
  std::optional<uint64_t> total_size;
};

// Collects weight_map and metadata.total_size; other members are skipped.
class IndexHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit IndexHandler(const std::string& source) : source_(source) {}

  Status status;
  Index index;
  bool has_map = false;

  bool start_object(std::size_t) override {
    if (depth_ == 1 && section_ == "weight_map") {
      if (has_map) {
        return damaged("weight_map appears twice");
      }
      has_map = true;
    }
    return open();
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override {
    if (depth_ == 0 || section_ == "weight_map") {
      return damaged("an array stands where an object belongs");
    }
    return open();
  }
  bool end_array() override { return close(); }
  bool key(std::string& text) override {
    if (depth_ == 1) {
      section_ = text;
    }
    key_ = text;
    return true;
  }
  bool string(std::string& text) override {
    if (in_map()) {
      index.entries.push_back({key_, text});
      return true;
    }
    return scalar();
  }
  bool number_unsigned(uint64_t value) override {
    if (depth_ == 2 && section_ == "metadata" && key_ == "total_size") {
      index.total_size = value;
    }
    return scalar();
  }
  bool number_integer(int64_t) override { return scalar(); }
  bool number_float(double, const std::string&) override { return scalar(); }
  bool null() override { return scalar(); }
  bool boolean(bool) override { return scalar(); }
  bool binary(nlohmann::json::binary_t&) override { return scalar(); }
  bool parse_error(std::size_t position,
                   const std::string&,
                   const nlohmann::detail::exception& cause) override {
    return damaged(fmt::format("not JSON (at byte {}): {}", position, cause.what()));
  }

 private:
  bool in_map() const { return depth_ == 2 && section_ == "weight_map"; }
  bool open() {
    if (in_map() || depth_ == 16) {
      return damaged(fmt::format("the value of {} is nested", json_quote(key_)));
    }
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }
  bool scalar() {
    if (depth_ == 0 || in_map() || (depth_ == 1 && section_ == "weight_map")) {
      return damaged(fmt::format("the value of {} has the wrong type", json_quote(key_)));
    }
    return true;
  }
  bool damaged(const std::string& what) {
    status = error(Code::kDataLoss, "{}: {}", source_, what);
    return false;
  }

  const std::string& source_;
  int depth_ = 0;
  std::string section_;
  std::string key_;
};

Result<Index> read_index(const std::string& path) {
  CACHALOT_TRY(const std::string text, read_file(path, kIndexLimit));
  IndexHandler handler(path);
  if (!nlohmann::json::sax_parse(text, &handler)) {
    return handler.status;
  }
  if (!handler.has_map) {
    return error(Code::kDataLoss, "{}: there is no weight_map", path);
  }
  Index index = std::move(handler.index);
  std::sort(index.entries.begin(),
            index.entries.end(),
            [](const IndexEntry& a, const IndexEntry& b) { return a.name < b.name; });
  for (size_t i = 0; i < index.entries.size(); ++i) {
    const IndexEntry& entry = index.entries[i];
    if (i > 0 && entry.name == index.entries[i - 1].name) {
      return error(Code::kDataLoss, "{}: tensor {} is listed twice", path, json_quote(entry.name));
    }
    // A path could reach files outside of the checkpoint.
    if (entry.file.empty() || entry.file == "." || entry.file == ".." ||
        entry.file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      return error(Code::kInvalidArgument,
                   "{}: tensor {}: {} is not a plain file name",
                   path,
                   json_quote(entry.name),
                   json_quote(entry.file));
    }
  }
  return index;
}

}  // namespace

Result<ShardedTensors> ShardedTensors::open(const std::string& directory, size_t shown) {
  ShardedTensors result;
  const std::string index_path = directory + "/" + kIndexName;
  if (!file_exists(index_path)) {
    const std::string single = directory + "/" + kSingleName;
    if (!file_exists(single)) {
      return error(
          Code::kNotFound, "'{}' holds neither {} nor {}", directory, kIndexName, kSingleName);
    }
    CACHALOT_TRY(SafetensorsFile file, SafetensorsFile::open(single));
    result.shards_.push_back(std::move(file));
    for (const SafetensorsFile::Tensor& tensor : result.shards_[0].tensors()) {
      result.tensors_.push_back({tensor.name, tensor.view, 0});
    }
    return result;
  }

  CACHALOT_TRY(const Index index, read_index(index_path));
  std::map<std::string, int32_t> shard_of_file;
  for (const IndexEntry& entry : index.entries) {
    shard_of_file.emplace(entry.file, 0);
  }
  result.shards_.reserve(shard_of_file.size());
  uint64_t total = 0;
  for (auto& [file, shard] : shard_of_file) {
    shard = static_cast<int32_t>(result.shards_.size());
    CACHALOT_TRY(SafetensorsFile opened, SafetensorsFile::open(directory + "/" + file));
    result.shards_.push_back(std::move(opened));
    for (const SafetensorsFile::Tensor& tensor : result.shards_.back().tensors()) {
      result.tensors_.push_back({tensor.name, tensor.view, shard});
      total += static_cast<uint64_t>(tensor.view.bytes());
    }
  }
  std::sort(result.tensors_.begin(), result.tensors_.end(), [](const Tensor& a, const Tensor& b) {
    return a.name != b.name ? a.name < b.name : a.shard < b.shard;
  });

  // Both lists ascend by name; walk them together.
  NameList missing(shown), extra(shown), moved(shown);
  auto tensor = result.tensors_.begin();
  const auto shard_path = [&](const Tensor& t) {
    return result.shards_[static_cast<size_t>(t.shard)].path();
  };
  for (const IndexEntry& entry : index.entries) {
    for (; tensor != result.tensors_.end() && tensor->name < entry.name; ++tensor) {
      extra.add(fmt::format("{} in '{}'", json_quote(tensor->name), shard_path(*tensor)));
    }
    if (tensor == result.tensors_.end() || tensor->name != entry.name) {
      missing.add(fmt::format("{} in '{}'", json_quote(entry.name), entry.file));
      continue;
    }
    if (tensor->shard != shard_of_file.at(entry.file)) {
      moved.add(fmt::format("{}: listed in '{}', found in '{}'",
                            json_quote(entry.name),
                            entry.file,
                            shard_path(*tensor)));
    }
    ++tensor;
  }
  for (; tensor != result.tensors_.end(); ++tensor) {
    extra.add(fmt::format("{} in '{}'", json_quote(tensor->name), shard_path(*tensor)));
  }
  std::string faults;
  if (!missing.empty()) {
    faults += "; missing: " + missing.text();
  }
  if (!extra.empty()) {
    faults += "; not in the index: " + extra.text();
  }
  if (!moved.empty()) {
    faults += "; in the wrong shard: " + moved.text();
  }
  if (!faults.empty()) {
    return error(Code::kDataLoss, "{}: the index does not fit the shards{}", index_path, faults);
  }
  if (index.total_size && *index.total_size != total) {
    return error(Code::kDataLoss,
                 "{}: metadata.total_size is {}, but the tensors have {} bytes",
                 index_path,
                 *index.total_size,
                 total);
  }
  return result;
}

const ShardedTensors::Tensor* ShardedTensors::find(std::string_view name) const {
  const auto it = std::lower_bound(
      tensors_.begin(), tensors_.end(), name, [](const Tensor& tensor, std::string_view key) {
        return tensor.name < key;
      });
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

std::string shard_file_name(int64_t shard, int64_t count) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, count);
}

Status write_shard_index(const std::string& directory,
                         std::vector<IndexEntry> entries,
                         int64_t total_size) {
  std::sort(entries.begin(), entries.end(), [](const IndexEntry& a, const IndexEntry& b) {
    return a.name < b.name;
  });
  std::string text =
      fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", total_size);
  for (size_t i = 0; i < entries.size(); ++i) {
    text += fmt::format("{}\n    {}: {}",
                        i == 0 ? "" : ",",
                        json_quote(entries[i].name),
                        json_quote(entries[i].file));
  }
  text += "\n  }\n}\n";
  return replace_file(directory + "/" + kIndexName, text);
}

}  // namespace cachalot::io
