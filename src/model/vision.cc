#include "model/vision.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/format.h"
#include "base/math.h"
#include "model/rope.h"
#include "ops/ops.h"
#include "quant/formats.h"
#include "tensor/arena.h"

namespace cachalot::model {
namespace {

// Of the tower's norms; the language model has its own.
constexpr float kNormEps = 1e-6f;

// Values of a BF16 or F32 tensor, rounded to `to`.
void convert(const TensorView& from, const TensorView& to) {
  for (int64_t i = 0; i < from.shape.elements(); ++i) {
    const float value =
        from.dtype == DType::kBF16 ? static_cast<float>(from.as<bf16>()[i]) : from.as<float>()[i];
    if (to.dtype == DType::kBF16) {
      to.as<bf16>()[i] = bf16(value);
    } else {
      to.as<float>()[i] = value;
    }
  }
}

// Of a device, beside q and k of dense_attend().
constexpr int64_t kDeviceScratchBytes = int64_t{80} << 20;

// One image on its way through the tower. The host makes the tables, gathers the cells and lays out
// the rows; the ops run in the memory of their backend.
class Encoder {
 public:
  Encoder(const Model& model,
          const ops::OpContext& context,
          ops::Memory& memory,
          DType act,
          ImageGrid grid)
      : config_(model.config.vision),
        w_(model.weights.vision),
        ctx_(context),
        backend_(memory),
        act_(act),
        grid_(grid),
        cell_rows_(ceil_div(grid.rows, config_.downsample_ratio)),
        cell_columns_(ceil_div(grid.columns, config_.downsample_ratio)) {}

  Result<ImageRows> run(const TensorView& patches, const std::function<bool()>& stop) {
    const int64_t n = grid_.rows * grid_.columns, h = config_.hidden_size;
    CACHALOT_RETURN_IF_ERROR(make_scratch(n * h));
    CACHALOT_TRY(const TensorView values, make(host_, act_, {n, patches.dim(1)}));
    convert(patches, values);
    CACHALOT_TRY(const TensorView pixels, on_backend(values));
    CACHALOT_TRY(const TensorView x, make(backend_, act_, {n, h}));
    CACHALOT_TRY(const TensorView u, make(backend_, act_, {n, h}));
    CACHALOT_TRY(const TensorView o, make(backend_, act_, {n, h}));
    CACHALOT_TRY(const TensorView qkv, make(backend_, act_, {n, 3 * h}));
    CACHALOT_TRY(const TensorView hidden, make(backend_, act_, {n, config_.intermediate_size}));
    CACHALOT_TRY(const TensorView rope, rope_table());
    CACHALOT_RETURN_IF_ERROR(dense(pixels, w_.patch_embed, x));
    for (const VisionBlockWeights& block : w_.blocks) {
      if (stop && stop()) {
        return error(Code::kCancelled, "the image was given up");
      }
      CACHALOT_RETURN_IF_ERROR(norm(x, block.norm1, u));
      CACHALOT_RETURN_IF_ERROR(dense(u, block.wqkv, qkv));
      CACHALOT_RETURN_IF_ERROR(ops::dense_attend(
          ctx_, {.qkv = qkv, .rope = rope, .heads = config_.num_attention_heads, .o = o}));
      CACHALOT_RETURN_IF_ERROR(ops::dense(
          ctx_, {.x = o, .weight = block.wo.weight, .bias = block.wo.bias, .residual = x, .y = x}));
      CACHALOT_RETURN_IF_ERROR(norm(x, block.norm2, u));
      CACHALOT_RETURN_IF_ERROR(ops::dense(ctx_,
                                          {.x = u,
                                           .weight = block.mlp_w1,
                                           .bias = {},
                                           .function = ops::DenseFunction::kSwiglu,
                                           .residual = {},
                                           .y = hidden}));
      CACHALOT_RETURN_IF_ERROR(ops::dense(
          ctx_, {.x = hidden, .weight = block.mlp_w2, .bias = {}, .residual = x, .y = x}));
    }
    CACHALOT_RETURN_IF_ERROR(norm(x, w_.norm, u));
    CACHALOT_TRY(const TensorView cells, make_cells(u));
    const int64_t d = w_.aligner_w2.weight.out;
    CACHALOT_TRY(const TensorView between, make(backend_, act_, {cells.dim(0), d}));
    CACHALOT_TRY(const TensorView rows, make(backend_, act_, {cells.dim(0), d}));
    CACHALOT_RETURN_IF_ERROR(dense(cells, w_.aligner_w1, between, ops::DenseFunction::kGelu));
    CACHALOT_RETURN_IF_ERROR(dense(between, w_.aligner_w2, rows));
    CACHALOT_TRY(const TensorView on_the_host, on_host(rows));
    return lay_out(on_the_host);
  }

 private:
  bool on_device() const { return backend_.device() != Device::kCpu; }

  // A tensor that lives as long as the encoder.
  Result<TensorView> make(ops::Memory& memory, DType dtype, const Shape& shape) {
    CACHALOT_TRY(ops::Buffer buffer,
                 ops::Buffer::allocate(memory, shape.elements() * dtype_bytes(dtype)));
    buffers_.push_back(std::move(buffer));
    return TensorView(buffers_.back().data(), dtype, shape, memory.device());
  }
  // The same values where the ops or where the host can reach them, once the ops before have run.
  Result<TensorView> on_backend(const TensorView& x) {
    if (!on_device()) {
      return x;
    }
    CACHALOT_TRY(const TensorView copy, make(backend_, x.dtype, x.shape));
    CACHALOT_RETURN_IF_ERROR(backend_.write(copy.data, x.data, x.bytes(), ctx_.stream));
    return copy;
  }
  Result<TensorView> on_host(const TensorView& x) {
    if (!on_device()) {
      return x;
    }
    CACHALOT_TRY(const TensorView copy, make(host_, x.dtype, x.shape));
    CACHALOT_RETURN_IF_ERROR(backend_.read(copy.data, x.data, x.bytes(), ctx_.stream));
    return copy;
  }

  Status make_scratch(int64_t values) {
    if (on_device()) {
      const int64_t bytes = kDeviceScratchBytes + 2 * values * dtype_bytes(act_);
      CACHALOT_TRY(const TensorView block, make(backend_, DType::kU8, {bytes}));
      scratch_ = Arena(block.data, bytes, backend_.device());
    }
    ctx_.scratch = &scratch_;
    return {};
  }

  Status norm(const TensorView& x, const TensorView& weight, const TensorView& y) {
    return ops::rms_norm(ctx_, {.x = x, .norm = weight, .rms_eps = kNormEps, .y = y});
  }

  Status dense(const TensorView& x,
               const BiasedWeight& w,
               const TensorView& y,
               ops::DenseFunction function = ops::DenseFunction::kIdentity) {
    return ops::dense(
        ctx_,
        {.x = x, .weight = w.weight, .bias = w.bias, .function = function, .residual = {}, .y = y});
  }

  // [N, K/2, 2]: the angles of the patch's row, then those of its column.
  Result<TensorView> rope_table() {
    std::vector<float> frequency = vision_frequencies(config_);
    const auto quarter = static_cast<int64_t>(frequency.size());
    const int64_t most = std::max(grid_.rows, grid_.columns);
    CACHALOT_TRY(const TensorView position, make(host_, DType::kI32, {most}));
    std::iota(position.as<int32_t>(), position.as<int32_t>() + most, 0);
    CACHALOT_TRY(const TensorView axis, make(host_, DType::kF32, {most, quarter, 2}));
    Arena scratch;
    ops::OpContext host{.backend = on_device() ? ops::Backend::kCpu : ctx_.backend,
                        .pool = ctx_.pool,
                        .scratch = &scratch};
    CACHALOT_RETURN_IF_ERROR(
        ops::rope_table(host,
                        {.position = position,
                         .frequency = {frequency.data(), DType::kF32, {quarter}},
                         .table = axis}));
    const Shape shape{grid_.rows * grid_.columns, 2 * quarter, 2};
    CACHALOT_TRY(const TensorView table, make(host_, DType::kF32, shape));
    float* to = table.as<float>();
    for (int64_t row = 0; row < grid_.rows; ++row) {
      for (int64_t column = 0; column < grid_.columns; ++column) {
        to = std::copy_n(axis.as<float>() + row * 2 * quarter, 2 * quarter, to);
        to = std::copy_n(axis.as<float>() + column * 2 * quarter, 2 * quarter, to);
      }
    }
    return on_backend(table);
  }

  // Squares of patches side by side, [cells, H * S * S] in (channel, row, column) order; zeros
  // where a square reaches over the right or the lower edge.
  Result<TensorView> make_cells(const TensorView& patch_rows) {
    const int64_t h = config_.hidden_size, s = config_.downsample_ratio;
    CACHALOT_TRY(const TensorView x, on_host(patch_rows));
    CACHALOT_TRY(const TensorView cells,
                 make(host_, act_, {cell_rows_ * cell_columns_, h * s * s}));
    const auto gather = [&]<class T>(const T* from, T* to) {
      std::vector<const T*> patches(static_cast<size_t>(s * s));
      for (int64_t cell = 0; cell < cells.dim(0); ++cell) {
        for (int64_t i = 0; i < s * s; ++i) {
          const int64_t row = cell / cell_columns_ * s + i / s;
          const int64_t column = cell % cell_columns_ * s + i % s;
          patches[static_cast<size_t>(i)] = row < grid_.rows && column < grid_.columns
                                                ? from + (row * grid_.columns + column) * h
                                                : nullptr;
        }
        for (int64_t channel = 0; channel < h; ++channel) {
          for (const T* patch : patches) {
            *to++ = patch == nullptr ? T{} : patch[channel];
          }
        }
      }
    };
    if (act_ == DType::kBF16) {
      gather(x.as<bf16>(), cells.as<bf16>());
    } else {
      gather(x.as<float>(), cells.as<float>());
    }
    return on_backend(cells);
  }

  // The cells' rows among the learned vectors of the other slots.
  ImageRows lay_out(const TensorView& cells) const {
    ImageRows image{
        .bytes = {}, .dtype = act_, .slots = image_slots(config_, grid_), .width = cells.dim(1)};
    image.bytes.resize(static_cast<size_t>(image.slots * image.width * dtype_bytes(act_)));
    const TensorView rows = image.view();
    int64_t slot = 0, cell = 0;
    const auto put = [&](const TensorView& source, int64_t count) {
      convert(source, rows.rows(slot, count));
      slot += count;
    };
    put(w_.image_start, 1);
    for (int64_t row = 0; row < cell_rows_; ++row, cell += cell_columns_) {
      put(cells.rows(cell, cell_columns_), cell_columns_);
      put(w_.image_newline, 1);
    }
    put(w_.image_end, 1);
    return image;
  }

  const VisionConfig& config_;
  const VisionWeights& w_;
  ops::OpContext ctx_;
  ops::Memory& backend_;
  ops::Memory& host_ = ops::host_memory();
  DType act_;
  ImageGrid grid_;
  int64_t cell_rows_, cell_columns_;
  std::vector<ops::Buffer> buffers_;
  Arena scratch_;
};

}  // namespace

int64_t image_slots(const VisionConfig& config, ImageGrid grid) {
  const int64_t rows = ceil_div(grid.rows, config.downsample_ratio);
  const int64_t columns = ceil_div(grid.columns, config.downsample_ratio);
  return rows * (columns + 1) + 2;
}

TensorView ImageRows::view() const {
  return {const_cast<uint8_t*>(bytes.data()), dtype, {slots, width}};
}

VisionTower::VisionTower(const Model& model,
                         const ops::OpContext& context,
                         ops::Memory& memory,
                         Precision precision)
    : model_(&model), context_(context), memory_(&memory), act_(activation_dtype(precision)) {}

Result<VisionTower> VisionTower::create(const Model& model,
                                        const ops::OpContext& context,
                                        Precision precision) {
  if (model.weights.vision.blocks.empty()) {
    return error(Code::kFailedPrecondition, "the model has no vision tower");
  }
  CACHALOT_TRY(ops::Memory* const memory, ops::backend_memory(context.backend));
  return VisionTower(model, context, *memory, precision);
}

Result<ImageRows> VisionTower::encode(const TensorView& patches,
                                      ImageGrid grid,
                                      const std::function<bool()>& stop) const {
  const VisionConfig& c = model_->config.vision;
  // Bounded extents first, so that no product overflows.
  const int64_t most = c.max_image_tokens * c.downsample_ratio;
  if (grid.rows < 1 || grid.columns < 1 || grid.rows > most || grid.columns > most ||
      image_slots(c, grid) > c.max_image_tokens) {
    return invalid("an image of {} x {} patches is empty or takes more than {} tokens",
                   grid.columns,
                   grid.rows,
                   c.max_image_tokens);
  }
  const Shape shape{grid.rows * grid.columns, 3 * c.patch_size * c.patch_size};
  if (patches.shape != shape || patches.empty() ||
      (patches.dtype != DType::kF32 && patches.dtype != DType::kBF16)) {
    return invalid("the patches of an image are {} {}, expected f32 or bf16 {}",
                   dtype_name(patches.dtype),
                   to_string(patches.shape),
                   to_string(shape));
  }
  return Encoder(*model_, context_, *memory_, act_, grid).run(patches, stop);
}

}  // namespace cachalot::model
