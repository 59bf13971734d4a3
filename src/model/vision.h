// The image encoder: pixels to rows of the language model.
//
// It encodes an image alone: its rows depend on its pixels, the weights, the precision and the
// backend, on nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "model/model.h"
#include "model/step.h"
#include "ops/context.h"
#include "ops/memory.h"

namespace cachalot::model {

// The patches of an image.
struct ImageGrid {
  int64_t rows = 0;
  int64_t columns = 0;
};

// Positions that an image takes in a prompt: START, then for each of its rows of cells an IMAGE per
// cell and a NEWLINE, then END. All of them carry image_token_id.
int64_t image_slots(const VisionConfig& config, ImageGrid grid);

// What the slots of one image are embedded as, in their order.
struct ImageRows {
  std::vector<uint8_t> bytes;
  DType dtype = DType::kF32;
  int64_t slots = 0;
  int64_t width = 0;

  // [slots, width], valid while the rows are; `bytes` is only read.
  TensorView view() const;
};

class VisionTower {
 public:
  // `context` names the backend, in whose memory the model's weights lie, its threads and stream.
  // The model must outlive the tower. Errors: the model has no vision tower; the backend's device
  // is not there.
  static Result<VisionTower> create(const Model& model,
                                    const ops::OpContext& context,
                                    Precision precision);

  // patches [rows * columns, 3 * patch * patch] f32 or bf16, row by row of the grid, each in
  // (channel, row, column) order with values (x / 255 - 0.5) / 0.5. The result has the activation
  // dtype and lies in host memory, as the patches do. `stop` is asked before each block. Calls may
  // run at the same time if they have no thread pool in common. Errors: an empty grid or one of
  // more than max_image_tokens slots, other shapes or dtypes; kCancelled: `stop` returned true;
  // kResourceExhausted: no memory for the image.
  Result<ImageRows> encode(const TensorView& patches,
                           ImageGrid grid,
                           const std::function<bool()>& stop = {}) const;

 private:
  VisionTower(const Model& model,
              const ops::OpContext& context,
              ops::Memory& memory,
              Precision precision);

  const Model* model_;
  ops::OpContext context_;
  ops::Memory* memory_;
  DType act_;
};

}  // namespace cachalot::model
