// A checkpoint directory: config.json and safetensors shards, used as they lie on disk.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "io/sharded.h"
#include "model/config.h"
#include "model/weights.h"

namespace cachalot::model {

// Beside config.json, if the drafter's confidences were calibrated: written by train, read by
// engine.
constexpr const char* kDraftCalibrationFile = "draft_calibration.json";

// Stored values that no correct checkpoint contains, per tensor.
struct ValueFault {
  std::string tensor;
  int64_t element = 0;  // flat index of the first
  int64_t count = 0;
  std::string what;  // "NaN", "NaN or infinite", "the NaN scale 255"
};

// "layers.3.attn_norm.weight: element 17 is NaN (2 such elements)"
std::string to_string(const ValueFault& fault);

// An opened checkpoint. Views stay valid while the object, or what it was moved to, lives.
class Checkpoint {
 public:
  enum class Values {
    // NaN and infinite values are refused. Engram tables are left out: they are far larger than the
    // rest, and only few of their rows are ever read.
    kChecked,
    // Names, shapes and dtypes only, and an error names every one that is wrong: for tools that do
    // not compute.
    kUnchecked,
  };

  // Reads config.json and maps the shards. Every tensor of the weight table must be present with
  // its dtype and shape, and no other may be; the error names them, of many the
  // first few and how many more.
  static Result<Checkpoint> open(const std::string& directory, Values values = Values::kChecked);

  const std::string& directory() const { return directory_; }
  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  // All weights in checkpoint order.
  const std::vector<WeightSpec>& table() const { return table_; }
  // A stored tensor by its name, which must exist. Aligned to its element size: a tensor that lies
  // misaligned in its file was copied when the checkpoint was opened.
  TensorView tensor(const std::string& name) const;
  // A matrix of the table with its scales.
  ops::Weight weight(const WeightSpec& spec) const;

  // Reads every value of every tensor whose format has invalid values (FP4 codes do not). Empty if
  // all is well. Shows progress on a terminal.
  std::vector<ValueFault> verify(ThreadPool& pool) const;

 private:
  Checkpoint() = default;
  Status check_tensors(size_t shown) const;
  void align_tensors();

  std::string directory_;
  ModelConfig config_;
  io::ShardedTensors tensors_;
  std::vector<WeightSpec> table_;
  std::map<std::string, std::unique_ptr<uint8_t[]>, std::less<>> copies_;
  ModelWeights weights_;
};

}  // namespace cachalot::model
