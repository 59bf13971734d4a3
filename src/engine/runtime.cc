#include "engine/runtime.h"

#include <filesystem>
#include <limits>

#include "base/clock.h"
#include "base/file.h"
#include "base/format.h"
#include "ops/registry.h"
#include "quant/block.h"

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

std::string tokenizer_file(const std::string& directory) {
  return directory + "/tokenizer.json";
}

Result<kvcache::PrefixKey> hash_tokenizer(const std::string& directory) {
  CACHALOT_TRY(const std::string bytes, read_file(tokenizer_file(directory)));
  return kvcache::PrefixKey().then(bytes);
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
  CACHALOT_TRY(text::Tokenizer tokenizer, text::Tokenizer::load(tokenizer_file(directory)));
  std::unique_ptr<Runtime> runtime(new Runtime(options, std::move(tokenizer)));
  CACHALOT_TRY(runtime->tokenizer_key_, hash_tokenizer(directory));
  CACHALOT_TRY(runtime->loaded_,
               LoadedModel::make(std::move(checkpoint), runtime->tokenizer_, options));
  runtime->config_ = runtime->model().config;
  for (const model::LayerSpec& layer : runtime->model().layers) {
    // A replay leaves out decoder rows: the taps of other layers would have more of them.
    const bool apart = !layer.decoder || layer.kv_source == layer.index;
    if (!runtime->model().draft.empty() && options.mode != Mode::kExact && layer.tap >= 0 &&
        apart) {
      return error(Code::kUnimplemented,
                   "dspark_target_layer_ids has layer {}, which a replay does not reach with the "
                   "rows of the last layers; use --mode exact",
                   layer.index);
    }
  }
  runtime->layout_ = cache_layout(runtime->config_, options.page_tokens);
  runtime->layout_.draft_stages = static_cast<int64_t>(runtime->model().draft.size());
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

Result<std::shared_ptr<const LoadedModel>> Runtime::load(const std::string& directory) const {
  // A link that is set to another checkpoint meanwhile must not mix the two.
  std::error_code code;
  const std::string target = std::filesystem::canonical(directory, code).string();
  if (code) {
    return error(Code::kNotFound, "'{}': {}", directory, code.message());
  }
  CACHALOT_TRY(const std::string json, read_file(target + "/config.json"));
  CACHALOT_TRY(const model::ModelConfig config, model::parse_config(json, target + "/config.json"));
  if (config != config_) {
    return invalid("'{}/config.json' is not of the model that is served: {}",
                   target,
                   config_difference(config, config_));
  }
  CACHALOT_TRY(const kvcache::PrefixKey tokenizer_key, hash_tokenizer(target));
  if (tokenizer_key != tokenizer_key_) {
    return invalid("'{}/tokenizer.json' differs from that of the model that is served", target);
  }
  CACHALOT_TRY(model::Checkpoint checkpoint, model::Checkpoint::open(target));
  return LoadedModel::make(std::move(checkpoint), tokenizer_, options_);
}

Result<std::unique_ptr<model::StepRunner>> Runtime::make_runner(const LoadedModel& loaded) {
  ops::OpContext context;
  context.backend = options_.backend;
  context.pool = threads_.get();
  return model::StepRunner::create(loaded.model(), context, options_.precision);
}

}  // namespace cachalot::engine
