#include "engine/loaded_model.h"

#include <algorithm>

#include "base/file.h"
#include "base/format.h"
#include "engine/draft_calibration.h"
#include "ops/registry.h"
#include "text/json_fields.h"
#include "text/token_classes.h"

namespace cachalot::engine {
namespace {

// Differs between checkpoints: config.json, the token map, and of every tensor 4 KiB of each MiB,
// at least four such pieces. Reading more would cost more than loading does.
Result<kvcache::PrefixKey> hash_weights(const model::Checkpoint& checkpoint,
                                        const std::vector<int32_t>& classes) {
  constexpr int64_t kSampleBytes = 4096, kSampledBytes = int64_t{1} << 20, kLeastSamples = 4;
  kvcache::PrefixKey key;
  CACHALOT_TRY(const std::string config, read_file(checkpoint.directory() + "/config.json"));
  key = key.then(config).then(classes);
  for (const model::WeightSpec& spec : checkpoint.table()) {
    const TensorView tensor = checkpoint.tensor(spec.name);
    const auto* data = static_cast<const char*>(tensor.data);
    const int64_t bytes = tensor.bytes(), n = std::min(bytes, kSampleBytes);
    const int64_t samples = std::max(kLeastSamples, bytes / kSampledBytes);
    key = key.then(spec.name);
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t offset = (bytes - n) * i / (samples - 1);
      key = key.then(std::string_view(data + offset, static_cast<size_t>(n)));
    }
  }
  return key;
}

// The path and the values of the first difference of two documents with the same keys in the same
// order.
std::string first_difference(const text::Json& got,
                             const text::Json& expected,
                             const std::string& path) {
  if (got.is_object() && expected.is_object() && got.keys == expected.keys) {
    for (size_t i = 0; i < got.keys.size(); ++i) {
      std::string found =
          first_difference(got.items[i], expected.items[i], text::child(path, got.keys[i]));
      if (!found.empty()) {
        return found;
      }
    }
    return {};
  }
  const std::string a = python_json(got), b = python_json(expected);
  return a == b ? std::string() : fmt::format("{} is {}, not {}", path, a, b);
}

}  // namespace

std::string config_difference(const model::ModelConfig& config,
                              const model::ModelConfig& expected) {
  const auto a = text::parse_json(model::config_to_json(config), "config");
  const auto b = text::parse_json(model::config_to_json(expected), "config");
  return first_difference(*a, *b, "");
}

Result<std::shared_ptr<const LoadedModel>> LoadedModel::make(model::Checkpoint checkpoint,
                                                             const text::Tokenizer& tokenizer,
                                                             const RuntimeOptions& options) {
  CACHALOT_TRY(ops::Memory* const memory, ops::backend_memory(options.backend));
  std::shared_ptr<LoadedModel> loaded(new LoadedModel(std::move(checkpoint)));
  const std::string& directory = loaded->directory();
  const model::ModelConfig& config = loaded->checkpoint_.config();
  if (tokenizer.vocab_size() > config.vocab_size) {
    return invalid("'{}/tokenizer.json' has {} tokens, vocab_size is {}",
                   directory,
                   tokenizer.vocab_size(),
                   config.vocab_size);
  }
  std::vector<int32_t> classes;
  if (!config.engram_layer_ids.empty()) {
    CACHALOT_TRY(
        classes,
        text::token_class_map(tokenizer, config.vocab_size, config.engram_compressed_vocab_size)
            .with(directory + "/tokenizer.json"));
  }
  CACHALOT_TRY(const kvcache::PrefixKey weights_key, hash_weights(loaded->checkpoint_, classes));
  loaded->fingerprint_ = fmt::format("{:016x}", weights_key.high);
  loaded->cache_key_ = weights_key.then(fmt::format("{} {} {} {}",
                                                    ops::backend_name(options.backend),
                                                    static_cast<int>(options.precision),
                                                    static_cast<int>(options.mode),
                                                    options.draft));
  model::ModelWeights weights = loaded->checkpoint_.weights();
  if (!options.draft) {
    weights.draft = {};
  } else if (weights.draft.stages.empty()) {
    return invalid("'{}/config.json': num_nextn_predict_layers is 0: there is no drafter",
                   directory);
  }
  if (options.draft) {
    CACHALOT_TRY(loaded->draft_temperatures_,
                 read_draft_calibration(directory, config.dspark_block_size));
  }
  if (memory->device() != Device::kCpu) {
    CACHALOT_TRY(loaded->device_weights_, model::copy_to_device(weights, *memory, options.tables));
    weights = loaded->device_weights_.weights;
  }
  CACHALOT_TRY(loaded->model_, model::make_model(config, std::move(weights), std::move(classes)));
  return std::shared_ptr<const LoadedModel>(std::move(loaded));
}

}  // namespace cachalot::engine
