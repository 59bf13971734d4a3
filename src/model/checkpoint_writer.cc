#include "model/checkpoint_writer.h"

#include <algorithm>
#include <vector>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/progress.h"
#include "io/safetensors.h"
#include "io/sharded.h"
#include "quant/weight_quant.h"

namespace cachalot::model {
namespace {

// Elements quantized at once: bounds the memory.
constexpr int64_t kChunkElements = 1 << 22;

// Bytes of one stored row, values and scales, of a tile row for kFp8Block.
struct RowBytes {
  int64_t values;
  int64_t scales;  // per row; for kFp8Block per 32 rows
};

RowBytes row_bytes(const WeightSpec& spec, int64_t columns) {
  const int64_t blocks = (columns + quant::kWeightBlock - 1) / quant::kWeightBlock;
  switch (spec.kind) {
    case WeightKind::kFp8Block:
    case WeightKind::kEngramTable:
      return {columns, blocks};
    case WeightKind::kFp4Row:
      return {columns / 2, blocks};
    case WeightKind::kPlain:
      break;
  }
  return {columns * dtype_bytes(spec.dtype), 0};
}

void encode(const WeightSpec& spec,
            const float* w,
            int64_t rows,
            int64_t columns,
            uint8_t* values,
            uint8_t* scales) {
  switch (spec.kind) {
    case WeightKind::kFp8Block:
      quant::fp8_tile_quantize(w, rows, columns, values, scales);
      return;
    case WeightKind::kEngramTable:
      quant::fp8_row_quantize(w, rows, columns, values, scales);
      return;
    case WeightKind::kFp4Row:
      quant::fp4_row_quantize(w, rows, columns, values, scales);
      return;
    case WeightKind::kPlain:
      break;
  }
  for (int64_t i = 0; i < rows * columns; ++i) {
    if (spec.dtype == DType::kF32) {
      reinterpret_cast<float*>(values)[i] = w[i];
    } else {
      reinterpret_cast<bf16*>(values)[i] = bf16(w[i]);
    }
  }
}

class Writer {
 public:
  Writer(const std::string& directory,
         const WeightSource& source,
         ThreadPool& pool,
         int64_t total_bytes)
      : directory_(directory),
        source_(source),
        pool_(pool),
        progress_("write (bytes)", total_bytes) {}

  Status write_shard(const std::string& file, const std::vector<const WeightSpec*>& specs) {
    std::vector<io::SafetensorsWriter::Declaration> declarations;
    for (const WeightSpec* spec : specs) {
      for (const StoredTensor& stored : stored_tensors(*spec)) {
        declarations.push_back({stored.name, stored.dtype, stored.shape});
      }
    }
    CACHALOT_TRY(io::SafetensorsWriter writer,
                 io::SafetensorsWriter::create(directory_ + "/" + file, declarations));
    for (const WeightSpec* spec : specs) {
      CACHALOT_RETURN_IF_ERROR(write_weight(*spec, writer));
    }
    return writer.finish();
  }

 private:
  Status write_weight(const WeightSpec& spec, io::SafetensorsWriter& writer) {
    constexpr int64_t kGroup = quant::kWeightBlock;  // rows that are quantized together
    const WeightValues values_of = source_(spec);
    const int64_t columns = spec.shape[spec.shape.rank - 1];
    const int64_t rows = spec.shape.elements() / columns;
    const RowBytes bytes = row_bytes(spec, columns);
    const int64_t scale_rows =
        spec.kind == WeightKind::kFp8Block ? (rows + kGroup - 1) / kGroup : rows;
    std::vector<uint8_t> scales(static_cast<size_t>(scale_rows * bytes.scales));
    const int64_t chunk = std::max(kGroup, kChunkElements / columns / kGroup * kGroup);
    values_.resize(static_cast<size_t>(std::min(rows, chunk) * bytes.values));
    for (int64_t first = 0; first < rows; first += chunk) {
      const int64_t count = std::min(rows - first, chunk);
      pool_.parallel_for_dynamic(
          (count + kGroup - 1) / kGroup, 1, [&](int64_t group_begin, int64_t group_end) {
            std::vector<float> real(static_cast<size_t>(kGroup * columns));
            for (int64_t group = group_begin; group < group_end; ++group) {
              const int64_t row = group * kGroup;
              const int64_t height = std::min(count - row, kGroup);
              values_of((first + row) * columns,
                        std::span(real).first(static_cast<size_t>(height * columns)));
              const int64_t scale_row =
                  spec.kind == WeightKind::kFp8Block ? (first + row) / kGroup : first + row;
              encode(spec,
                     real.data(),
                     height,
                     columns,
                     values_.data() + row * bytes.values,
                     scales.data() + scale_row * bytes.scales);
            }
          });
      const auto written = static_cast<size_t>(count * bytes.values);
      CACHALOT_RETURN_IF_ERROR(writer.append(std::span(values_).first(written)));
      progress_.advance(static_cast<int64_t>(written));
    }
    progress_.advance(static_cast<int64_t>(scales.size()));
    return writer.append(scales);
  }

  const std::string& directory_;
  const WeightSource& source_;
  ThreadPool& pool_;
  Progress progress_;
  std::vector<uint8_t> values_;
};

// Order inside a shard: first what fills whole cache lines, then by element size. As the data
// section starts at a multiple of 64, large tensors then start at one too, and all are naturally
// aligned.
int order_class(const WeightSpec& spec) {
  bool whole_lines = true;
  for (const StoredTensor& stored : stored_tensors(spec)) {
    whole_lines = whole_lines && stored.shape.elements() * dtype_bytes(stored.dtype) % 64 == 0;
  }
  if (whole_lines) {
    return 0;
  }
  return spec.kind != WeightKind::kPlain ? 3 : spec.dtype == DType::kF32 ? 1 : 2;
}

Status write_side_files(const ModelConfig& config,
                        const std::string& directory,
                        const std::string& tokenizer_json) {
  CACHALOT_RETURN_IF_ERROR(replace_file(directory + "/tokenizer.json", tokenizer_json));
  JsonWriter tokenizer;
  tokenizer.begin_object()
      .field("tokenizer_class", "PreTrainedTokenizerFast")
      .field("add_bos_token", false)
      .field("add_eos_token", false)
      .field("clean_up_tokenization_spaces", false)
      .field("model_max_length", config.max_position_embeddings)
      .end_object();
  CACHALOT_RETURN_IF_ERROR(
      replace_file(directory + "/tokenizer_config.json", tokenizer.text() + "\n"));
  JsonWriter generation;
  generation.begin_object()
      .field("bos_token_id", config.bos_token_id)
      .field("eos_token_id", config.eos_token_id)
      .field("pad_token_id", config.pad_token_id)
      .field("do_sample", true)
      .field("temperature", 1.0)
      .end_object();
  CACHALOT_RETURN_IF_ERROR(
      replace_file(directory + "/generation_config.json", generation.text() + "\n"));
  return replace_file(directory + "/config.json", config_to_json(config));
}

}  // namespace

Status write_checkpoint(const ModelConfig& config,
                        const std::string& directory,
                        const std::string& tokenizer_json,
                        const WeightSource& source,
                        ThreadPool& pool) {
  CACHALOT_RETURN_IF_ERROR(validate(config));
  CACHALOT_RETURN_IF_ERROR(make_directories(directory));
  const std::vector<WeightSpec> table = weight_table(config);
  const int64_t shards = table.back().shard + 1;
  std::vector<std::vector<const WeightSpec*>> specs(static_cast<size_t>(shards));
  std::vector<io::IndexEntry> index;
  int64_t total_bytes = 0;
  for (const WeightSpec& spec : table) {
    specs[static_cast<size_t>(spec.shard)].push_back(&spec);
    for (StoredTensor& stored : stored_tensors(spec)) {
      total_bytes += stored.shape.elements() * dtype_bytes(stored.dtype);
      index.push_back({std::move(stored.name), io::shard_file_name(spec.shard, shards)});
    }
  }
  CACHALOT_RETURN_IF_ERROR(remove_unfinished(directory));
  // Without these a directory does not open: a run that is stopped leaves no mixture with what was
  // there.
  for (const char* name : {io::kIndexName, "config.json"}) {
    CACHALOT_RETURN_IF_ERROR(remove_file(fmt::format("{}/{}", directory, name)));
  }
  Writer writer(directory, source, pool, total_bytes);
  for (int64_t shard = 0; shard < shards; ++shard) {
    std::vector<const WeightSpec*>& members = specs[static_cast<size_t>(shard)];
    std::stable_sort(members.begin(), members.end(), [](const WeightSpec* a, const WeightSpec* b) {
      return order_class(*a) < order_class(*b);
    });
    CACHALOT_RETURN_IF_ERROR(writer.write_shard(io::shard_file_name(shard, shards), members));
  }
  CACHALOT_RETURN_IF_ERROR(io::write_shard_index(directory, std::move(index), total_bytes));
  return write_side_files(config, directory, tokenizer_json);
}

}  // namespace cachalot::model
