// A directory of safetensors shards, described by model.safetensors.index.json, or a single
// model.safetensors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/name_list.h"
#include "base/status.h"
#include "io/safetensors.h"

namespace cachalot::io {

// Opens every shard and checks the index against them: each tensor lies in exactly the shard that
// the index names, and no shard holds another. Shard names must be plain file names.
class ShardedTensors {
 public:
  struct Tensor {
    std::string_view name;
    TensorView view;
    int32_t shard = 0;
  };

  // `shown` is how many tensors of each kind an error names.
  static Result<ShardedTensors> open(const std::string& directory, size_t shown = NameList::kFew);

  // The tensor called `name`, or null.
  const Tensor* find(std::string_view name) const;
  // Ascending by name.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::vector<SafetensorsFile>& shards() const { return shards_; }

 private:
  std::vector<SafetensorsFile> shards_;
  std::vector<Tensor> tensors_;
};

struct IndexEntry {
  std::string name;
  std::string file;
};

// "model-00003-of-00048.safetensors" for the 0-based `shard`.
std::string shard_file_name(int64_t shard, int64_t count);

inline constexpr const char* kIndexName = "model.safetensors.index.json";

// Writes model.safetensors.index.json into `directory`. `total_size` is in bytes.
Status write_shard_index(const std::string& directory,
                         std::vector<IndexEntry> entries,
                         int64_t total_size);

}  // namespace cachalot::io
