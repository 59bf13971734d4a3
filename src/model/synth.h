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

// Writes a complete checkpoint of `config` in the official layout into `directory`, which is
// created: shards with their index, config.json, generation_config.json, tokenizer.json,
// tokenizer_config.json.
//
// Weights are drawn as real numbers and then quantized; under WeightStorage::kF32 they are stored
// as drawn. The bytes depend on the config and the seed alone. Memory stays within a few tens of MB
// plus the scales of one weight. config.json is written last: a directory without it is incomplete.
Status synthesize(const ModelConfig& config,
                  const std::string& directory,
                  const SynthOptions& options,
                  ThreadPool& pool);

}  // namespace cachalot::model
