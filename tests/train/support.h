// A tiny model of odd extents that contains every rule of the architecture, and one call of its
// training forward.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "model/forward.h"
#include "train/train_exec.h"
#include "train/vector.h"

namespace cachalot::train {

// Not valid for a checkpoint: no extent is a multiple of 32. Window, Full ratio 2 with Engram,
// Reuse | Full ratio 1, Reuse with Engram, Reindex, Reuse.
inline model::ModelConfig odd_config() {
  model::ModelConfig c;
  c.vocab_size = 19;
  c.hidden_size = 13;
  c.moe_intermediate_size = 6;
  c.num_hidden_layers = 7;
  c.num_attention_heads = 4;
  c.head_dim = 10;
  c.qk_rope_head_dim = 4;
  c.q_lora_rank = 7;
  c.o_lora_rank = 5;
  c.o_groups = 2;
  c.swiglu_limit = 1.5;
  c.rms_norm_eps = 1e-20;
  c.max_position_embeddings = 64;
  c.rope_theta = 100;
  c.compress_rope_theta = 1000;
  c.n_routed_experts = 5;
  c.n_shared_experts = 1;
  c.num_experts_per_tok = 2;
  c.routed_scaling_factor = 1.5;
  c.sliding_window = 3;
  c.compress_ratios = {0, 2, 2, 1, 1, 1, 1};
  c.kv_source_layer_ids = {1, 3};
  c.index_source_layer_ids = {1, 3, 5};
  c.index_n_heads = 3;
  c.index_head_dim = 6;
  c.index_topk = 3;
  c.candidate_source_layer_id = 3;
  c.candidate_topk_blocks = 2;
  c.candidate_block_size = 3;
  c.hc_mult = 3;
  c.hc_sinkhorn_iters = 20;
  c.hc_eps = 1e-6;
  c.engram_layer_ids = {1, 4};
  c.engram_max_ngram_size = 3;
  c.engram_vocab_size = 11;
  c.engram_n_heads = 2;
  c.engram_head_dim = 5;
  c.engram_pad_token_id = 2;
  c.engram_compressed_vocab_size = c.vocab_size;
  c.engram_num_embeddings.clear();
  for (const model::EngramConstants& constants : model::engram_constants(c)) {
    c.engram_num_embeddings.push_back(constants.rows);
  }
  return c;
}

// With a drafter of two stages, whose rows use one expert.
inline model::ModelConfig drafted_config() {
  model::ModelConfig c = odd_config();
  c.num_nextn_predict_layers = 2;
  c.dspark_block_size = 3;
  c.dspark_noise_token_id = c.vocab_size - 1;
  c.dspark_target_layer_ids = {4, 6};
  c.dspark_markov_rank = 5;
  c.dspark_n_routed_experts = 3;
  c.dspark_num_experts_per_tok = 1;
  return c;
}

// Values at which every term has an effect.
template <class Real>
void randomize(ParameterSet<Real>& parameters, uint64_t seed) {
  using model::WeightRole;
  uint64_t stream = 0;
  for (Parameter<Real>& parameter : parameters.all()) {
    const Philox random(seed, stream++);
    double mean = 0, deviation = 1.2 / std::sqrt(static_cast<double>(parameter.columns()));
    switch (parameter.spec.role) {
      case WeightRole::kNorm:
      case WeightRole::kEngramGate:
        mean = 1;
        deviation = 0.3;
        break;
      case WeightRole::kHcScale:
        mean = 0.7;
        deviation = 0.2;
        break;
      case WeightRole::kHcBase:
      case WeightRole::kSink:
      case WeightRole::kEmbedding:
      case WeightRole::kEngramTable:
        deviation = 1;
        break;
      case WeightRole::kRouterBias:
        deviation = 0.3;
        break;
      default:
        break;
    }
    for (size_t i = 0; i < parameter.value.size(); ++i) {
      parameter.value[i] = static_cast<Real>(mean + deviation * random.normal(i));
    }
  }
}

inline std::vector<int32_t> random_tokens(int64_t n, int64_t vocab, uint64_t seed) {
  std::vector<int32_t> tokens;
  const Philox random(seed, 77);
  for (int64_t i = 0; i < n; ++i) {
    tokens.push_back(static_cast<int32_t>(random.uniform(static_cast<uint64_t>(i)) *
                                          static_cast<double>(vocab)));
  }
  return tokens;
}

// One forward, and with options.gradients its backward, added to the parameters' gradients. Values
// stay valid with the object.
template <class Real>
class ForwardPass {
 public:
  ForwardPass(ParameterSet<Real>& parameters,
              const ForwardOptions& options,
              const Batch& batch,
              ThreadPool* pool = nullptr)
      : exec_(parameters, options, batch, tape_, scratch_, pool) {
    if (options.blocks != nullptr) {
      train_drafter(exec_, parameters.model());
    } else {
      model::forward(exec_, parameters.model());
    }
    if (options.gradients) {
      tape_.backward();
      for (Parameter<Real>& parameter : parameters.all()) {
        if (const Real* gradient = exec_.gradient(parameter)) {
          axpy(Real{1},
               gradient,
               static_cast<int64_t>(parameter.grad.size()),
               parameter.grad.data());
        }
      }
    }
  }
  const TrainExec<Real>& exec() const { return exec_; }
  const ForwardReport& report() const { return exec_.report(); }

 private:
  Tape<Real> tape_;
  Arena scratch_;
  TrainExec<Real> exec_;
};

}  // namespace cachalot::train
