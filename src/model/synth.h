// Writes checkpoints with random weights of realistic statistics.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/config.h"

namespace cachalot::model {

struct SynthOptions {
  uint64_t seed = 0;
  std::string tokenizer_json;  // content of tokenizer.json; must fit config.vocab_size
};

// Writes a complete checkpoint of `config` as write_checkpoint() does. Weights are drawn as real
// numbers and then quantized. The bytes depend on the config and the seed alone.
Status synthesize(const ModelConfig& config,
                  const std::string& directory,
                  const SynthOptions& options,
                  ThreadPool& pool);

}  // namespace cachalot::model
