// A loaded model with everything it needs to run: checkpoint, tokenizer, threads, caches.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kvcache/page_pool.h"
#include "kvcache/prefix_key.h"
#include "kvcache/sequence_cache.h"
#include "model/checkpoint.h"
#include "model/device_weights.h"
#include "model/model.h"
#include "model/step.h"
#include "text/tokenizer.h"

namespace cachalot::engine {

// What of a prompt runs through which layers; see replay.h.
enum class Mode : uint8_t {
  kExact,   // every row through every layer
  kReplay,  // bounded replays, as the model is trained for
  kHalo,    // bounded replays wide enough to give the bits of kExact
};

struct RuntimeOptions {
  ops::Backend backend = ops::Backend::kCpu;
  int threads = 0;  // 0: one per processor
  Mode mode = Mode::kExact;
  model::Precision precision = model::Precision::kOfficial;
  bool draft = false;             // load the drafter and keep its context in every cache
  int64_t page_tokens = 0;        // 0: 128, or 16 for models with a window below 64
  int64_t max_cached_tokens = 0;  // 0: bounded by memory alone
};

// The caches that a model's requests need; without a drafter's.
kvcache::CacheLayout cache_layout(const model::ModelConfig& config, int64_t page_tokens);

class Runtime {
 public:
  // Opens a checkpoint directory. Errors name the file; unsupported options are kUnimplemented.
  static Result<std::unique_ptr<Runtime>> open(const std::string& directory,
                                               const RuntimeOptions& options);

  const model::Model& model() const { return model_; }
  const text::Tokenizer& tokenizer() const { return tokenizer_; }
  const RuntimeOptions& options() const { return options_; }
  const std::string& directory() const { return directory_; }
  const kvcache::CacheLayout& layout() const { return layout_; }
  // Pages of the global cache, and window states.
  kvcache::PagePool& pages() { return *pages_; }
  kvcache::PagePool& states() { return *states_; }
  const kvcache::PagePool& pages() const { return *pages_; }
  const kvcache::PagePool& states() const { return *states_; }
  // What the content of a cached row depends on besides its tokens: the weights, and how the model
  // is run.
  const kvcache::PrefixKey& cache_key() const { return cache_key_; }
  ThreadPool& threads() { return *threads_; }
  double load_seconds() const { return load_seconds_; }

  Result<std::unique_ptr<kvcache::SequenceCache>> make_cache() {
    return kvcache::SequenceCache::create(layout_, *pages_, *states_);
  }
  // An executor of this model; several may exist, one runs at a time.
  Result<std::unique_ptr<model::StepRunner>> make_runner();

 private:
  Runtime(model::Checkpoint checkpoint, text::Tokenizer tokenizer)
      : checkpoint_(std::move(checkpoint)), tokenizer_(std::move(tokenizer)) {}

  std::string directory_;
  RuntimeOptions options_;
  model::Checkpoint checkpoint_;
  text::Tokenizer tokenizer_;
  model::DeviceWeights device_weights_;  // of a backend with its own memory
  model::Model model_;
  kvcache::CacheLayout layout_;
  std::unique_ptr<kvcache::PagePool> pages_;
  std::unique_ptr<kvcache::PagePool> states_;
  kvcache::PrefixKey cache_key_;
  std::unique_ptr<ThreadPool> threads_;
  double load_seconds_ = 0;
};

}  // namespace cachalot::engine
