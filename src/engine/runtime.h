// A model with everything it needs to run: weights, tokenizer, threads, caches.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/thread_pool.h"
#include "engine/loaded_model.h"
#include "engine/runtime_options.h"
#include "kvcache/page_pool.h"
#include "kvcache/sequence_cache.h"
#include "model/step.h"
#include "text/tokenizer.h"

namespace cachalot::engine {

// The caches that a model's requests need; without a drafter's.
kvcache::CacheLayout cache_layout(const model::ModelConfig& config, int64_t page_tokens);

class Runtime {
 public:
  // Opens a checkpoint directory. Errors name the file; unsupported options are kUnimplemented.
  static Result<std::unique_ptr<Runtime>> open(const std::string& directory,
                                               const RuntimeOptions& options);

  // The weights in use; use() changes them.
  const std::shared_ptr<const LoadedModel>& loaded() const { return loaded_; }
  const model::Model& model() const { return loaded_->model(); }
  // What all weights of this runtime share.
  const model::ModelConfig& config() const { return config_; }
  const text::Tokenizer& tokenizer() const { return tokenizer_; }
  const RuntimeOptions& options() const { return options_; }
  const kvcache::CacheLayout& layout() const { return layout_; }
  // Pages of the global cache, and window states.
  kvcache::PagePool& pages() { return *pages_; }
  kvcache::PagePool& states() { return *states_; }
  const kvcache::PagePool& pages() const { return *pages_; }
  const kvcache::PagePool& states() const { return *states_; }
  ThreadPool& threads() { return *threads_; }
  double load_seconds() const { return load_seconds_; }

  Result<std::unique_ptr<kvcache::SequenceCache>> make_cache() {
    return kvcache::SequenceCache::create(layout_, *pages_, *states_);
  }
  // An executor of the weights in use, or of others; several may exist, one runs at a time.
  Result<std::unique_ptr<model::StepRunner>> make_runner() { return make_runner(*loaded_); }
  Result<std::unique_ptr<model::StepRunner>> make_runner(const LoadedModel& loaded);

  // Opens another checkpoint beside the one in use. Any thread may call it while another runs
  // steps. Errors: those of open(); kInvalidArgument: its config or its tokenizer differs.
  Result<std::shared_ptr<const LoadedModel>> load(const std::string& directory) const;
  // Goes on with these weights, which load() gave. Not while another thread asks for those in use.
  void use(std::shared_ptr<const LoadedModel> loaded) { loaded_ = std::move(loaded); }

 private:
  Runtime(const RuntimeOptions& options, text::Tokenizer tokenizer)
      : options_(options), tokenizer_(std::move(tokenizer)) {}

  RuntimeOptions options_;
  text::Tokenizer tokenizer_;
  kvcache::PrefixKey tokenizer_key_;  // of its file
  std::shared_ptr<const LoadedModel> loaded_;
  model::ModelConfig config_;
  kvcache::CacheLayout layout_;
  std::unique_ptr<kvcache::PagePool> pages_;
  std::unique_ptr<kvcache::PagePool> states_;
  std::unique_ptr<ThreadPool> threads_;
  double load_seconds_ = 0;
};

}  // namespace cachalot::engine
