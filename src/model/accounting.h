// Parameters, bytes and cache sizes of a config.
#pragma once

#include <cstdint>

#include "model/config.h"

namespace cachalot::model {

// Parameters are counted before packing: an FP4 byte holds two, scales are none.
struct ParameterCounts {
  int64_t backbone = 0;  // layers, embedding, head and the dense part of Engram
  int64_t engram = 0;    // Engram tables
  int64_t draft = 0;     // draft stages
  int64_t vision = 0;    // vision tower, aligner and image vectors
  int64_t total = 0;
  // Touched by one text token, without Engram rows and embedding rows. Prefill runs the encoder:
  // the layers before the last KV source (all layers if there is none). Decode runs every layer and
  // the head.
  int64_t active_prefill = 0;
  int64_t active_decode = 0;
};

struct Accounting {
  int64_t tensors = 0;      // as stored: a quantized weight counts twice
  int64_t total_bytes = 0;  // of tensor data
  ParameterCounts parameters;
  // Compressed KV and index keys of all KV sources. Fractional if a ratio-2 entry has odd bytes.
  double cache_bytes_per_token = 0;
  int64_t window_bytes_per_request = 0;  // sliding-window rows of all backbone layers
};

// `config` must be valid.
Accounting account(const ModelConfig& config);

}  // namespace cachalot::model
