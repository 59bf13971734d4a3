#include "engine/runtime.h"

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "base/file.h"
#include "base/format.h"
#include "ops/registry.h"
#include "quant/block.h"
#include "text/token_classes.h"

namespace cachalot::engine {

kvcache::CacheLayout cache_layout(const model::ModelConfig& config, int64_t page_tokens) {
  kvcache::CacheLayout layout;
  layout.layers = config.num_hidden_layers;
  layout.window = config.sliding_window;
  layout.window_row_bytes = quant::window_row_bytes(config.head_dim);
  layout.main_row_bytes = quant::main_row_bytes(config.head_dim);
  layout.index_row_bytes = quant::index_row_bytes(config.index_head_dim);
  for (int64_t source : config.kv_source_layer_ids) {
    layout.ratios.push_back(config.compress_ratios[static_cast<size_t>(source)]);
  }
  layout.compressed_dim = config.head_dim;
  layout.lookback = config.engram_layer_ids.empty() ? 0 : config.engram_max_ngram_size - 1;
  layout.page_tokens = page_tokens > 0 ? page_tokens : config.sliding_window < 64 ? 16 : 128;
  return layout;
}

namespace {

// Differs between checkpoints, as far as a sample of every tensor tells, and between ways to run
// one: rows of one must not be found by another.
Result<kvcache::PrefixKey> make_cache_key(const model::Checkpoint& checkpoint,
                                          const std::vector<int32_t>& classes,
                                          const RuntimeOptions& options) {
  constexpr int64_t kSamples = 4, kSampleBytes = 64;
  kvcache::PrefixKey key;
  CACHALOT_TRY(const std::string config, read_file(checkpoint.directory() + "/config.json"));
  key = key.then(config).then(classes);
  for (const model::WeightSpec& spec : checkpoint.table()) {
    const TensorView tensor = checkpoint.tensor(spec.name);
    std::string sample = spec.name;
    const int64_t bytes = tensor.bytes(), n = std::min(bytes, kSampleBytes);
    for (int64_t i = 0; i < kSamples; ++i) {
      const int64_t offset = (bytes - n) * i / (kSamples - 1);
      sample.append(static_cast<const char*>(tensor.data) + offset, static_cast<size_t>(n));
    }
    key = key.then(sample);
  }
  return key.then(fmt::format("{} {} {} {}",
                              ops::backend_name(options.backend),
                              static_cast<int>(options.precision),
                              static_cast<int>(options.mode),
                              options.draft));
}

}  // namespace

Result<std::unique_ptr<Runtime>> Runtime::open(const std::string& directory,
                                               const RuntimeOptions& options) {
  const double started = now_seconds();
  if (ops::kernels(options.backend).linear.empty()) {
    return error(Code::kUnimplemented,
                 "backend {} is not part of this build",
                 ops::backend_name(options.backend));
  }
  CACHALOT_TRY(ops::Memory* const memory, ops::backend_memory(options.backend));
  CACHALOT_TRY(model::Checkpoint checkpoint, model::Checkpoint::open(directory));
  CACHALOT_TRY(text::Tokenizer tokenizer, text::Tokenizer::load(directory + "/tokenizer.json"));
  std::unique_ptr<Runtime> runtime(new Runtime(std::move(checkpoint), std::move(tokenizer)));
  const model::ModelConfig& config = runtime->checkpoint_.config();
  if (runtime->tokenizer_.vocab_size() > config.vocab_size) {
    return invalid("'{}/tokenizer.json' has {} tokens, vocab_size is {}",
                   directory,
                   runtime->tokenizer_.vocab_size(),
                   config.vocab_size);
  }
  runtime->directory_ = directory;
  runtime->options_ = options;
  std::vector<int32_t> classes;
  if (!config.engram_layer_ids.empty()) {
    CACHALOT_TRY(classes,
                 text::token_class_map(
                     runtime->tokenizer_, config.vocab_size, config.engram_compressed_vocab_size)
                     .with(directory + "/tokenizer.json"));
  }
  CACHALOT_TRY(runtime->cache_key_, make_cache_key(runtime->checkpoint_, classes, options));
  model::ModelWeights weights = runtime->checkpoint_.weights();
  if (!options.draft) {
    weights.draft = {};
  } else if (weights.draft.stages.empty()) {
    return invalid("'{}/config.json': num_nextn_predict_layers is 0: there is no drafter",
                   directory);
  }
  if (memory->device() != Device::kCpu) {
    CACHALOT_TRY(runtime->device_weights_, model::copy_to_device(weights, *memory));
    weights = runtime->device_weights_.weights;
  }
  CACHALOT_TRY(runtime->model_, model::make_model(config, std::move(weights), std::move(classes)));
  for (const model::LayerSpec& layer : runtime->model_.layers) {
    // A replay leaves out decoder rows: the taps of other layers would have more of them.
    const bool apart = !layer.decoder || layer.kv_source == layer.index;
    if (!runtime->model_.draft.empty() && options.mode != Mode::kExact && layer.tap >= 0 && apart) {
      return error(Code::kUnimplemented,
                   "dspark_target_layer_ids has layer {}, which a replay does not reach with the "
                   "rows of the last layers; use --mode exact",
                   layer.index);
    }
  }
  runtime->layout_ = cache_layout(runtime->model_.config, options.page_tokens);
  runtime->layout_.draft_stages = static_cast<int64_t>(runtime->model_.draft.size());
  const int64_t max_pages = options.max_cached_tokens > 0
                                ? (options.max_cached_tokens + runtime->layout_.page_tokens - 1) /
                                      runtime->layout_.page_tokens
                                : std::numeric_limits<int64_t>::max();
  runtime->pages_ = std::make_unique<kvcache::PagePool>(
      *memory, std::max<int64_t>(runtime->layout_.page_bytes(), 1), max_pages);
  runtime->states_ = std::make_unique<kvcache::PagePool>(
      *memory, runtime->layout_.state_bytes(), std::numeric_limits<int64_t>::max());
  runtime->threads_ = std::make_unique<ThreadPool>(options.threads);
  runtime->load_seconds_ = now_seconds() - started;
  return runtime;
}

Result<std::unique_ptr<model::StepRunner>> Runtime::make_runner() {
  ops::OpContext context;
  context.backend = options_.backend;
  context.pool = options_.backend == ops::Backend::kCpu ? threads_.get() : nullptr;
  return model::StepRunner::create(model_, context, options_.precision);
}

}  // namespace cachalot::engine
