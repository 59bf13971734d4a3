// Dumps of intermediate values, and their router choices and selections as prescribed ones.
//
// A dump is a directory with one file r.safetensors per request r; docs/numerics.md lists the
// tensors. Prescribing (`--force`) reads `layers.L.experts` and `layers.L.selected` of the same
// files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/observer.h"

namespace cachalot::engine {

// Observes the steps of one request at a time.
class DumpObserver : public model::Observer {
 public:
  // Either directory may be empty.
  DumpObserver(std::string dump_dir, std::string prescribed_dir);
  ~DumpObserver() override;

  // Starts request `index`; opens its prescribed file.
  Status begin(int64_t index);
  // Writes its dump. Returns the first fault of a prescribed tensor, too.
  Status end();

  void visit(const std::string& name,
             const TensorView& rows,
             const model::ObservedRows& where) override;
  bool forced_experts(int64_t layer,
                      const TensorView& experts,
                      const model::ObservedRows& where) override;

 private:
  // Rows gathered over the steps of a request; I32 rows may differ in width and are padded with -1.
  struct Collected {
    DType dtype = DType::kF32;
    std::vector<int64_t> row_shape;
    std::vector<std::vector<uint8_t>> rows;
  };

  void collect(const std::string& name, const TensorView& rows);
  // Replaces the rows of `ids` [n, k] i32 by those of the prescribed tensor from row `first` on;
  // false if the file has no such tensor or it does not fit.
  bool prescribe(const std::string& name, const TensorView& ids, int64_t first);

  std::string dump_dir_;
  std::string prescribed_dir_;
  int64_t index_ = 0;
  std::map<std::string, Collected> collected_;
  std::unique_ptr<io::SafetensorsFile> file_;
  Status fault_;
};

}  // namespace cachalot::engine
