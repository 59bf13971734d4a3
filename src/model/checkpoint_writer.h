// Writes a checkpoint directory in the official layout.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/weights.h"

namespace cachalot::model {

// Fills elements [begin, begin + out.size()) of one weight. Called from several threads.
using WeightValues = std::function<void(int64_t begin, std::span<float> out)>;
// The values of a weight; asked for once per weight, before it is written.
using WeightSource = std::function<WeightValues(const WeightSpec& spec)>;

// Writes a complete checkpoint of `config` into `directory`, which is created: shards with their
// index, config.json, generation_config.json, tokenizer.json, tokenizer_config.json.
//
// Values are quantized to the storage of their weight; under WeightStorage::kF32 they are stored as
// they are. The bytes depend on the config and the values alone. Memory stays within a few tens of
// MB plus the scales of one weight. config.json is written last: a directory without it is
// incomplete.
Status write_checkpoint(const ModelConfig& config,
                        const std::string& directory,
                        const std::string& tokenizer_json,
                        const WeightSource& source,
                        ThreadPool& pool);

}  // namespace cachalot::model
