#include "model/model.h"

#include "base/format.h"
#include "model/rope.h"

namespace cachalot::model {

int64_t Model::source_slot(int64_t layer) const {
  for (size_t i = 0; i < config.kv_source_layer_ids.size(); ++i) {
    if (config.kv_source_layer_ids[i] == layer) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

Result<Model> make_model(const ModelConfig& config,
                         ModelWeights weights,
                         std::vector<int32_t> token_class) {
  CACHALOT_RETURN_IF_ERROR(validate(config));
  Model model{
      .config = config,
      .layers = layer_schedule(config),
      .draft = weights.draft.stages.empty() ? std::vector<LayerSpec>() : draft_schedule(config),
      .weights = std::move(weights),
      .engram = engram_constants(config),
      .token_class = std::move(token_class),
      .window_frequency = window_frequencies(config),
      .compressed_frequency = compressed_frequencies(config)};
  if (model.engram.empty()) {
    model.token_class.clear();
    return model;
  }
  if (static_cast<int64_t>(model.token_class.size()) != config.vocab_size) {
    return invalid("the Engram token map has {} entries, vocab_size is {}",
                   model.token_class.size(),
                   config.vocab_size);
  }
  for (int32_t id : model.token_class) {
    if (id < 0 || id >= config.engram_compressed_vocab_size) {
      return invalid("the Engram token map has class {}, engram_compressed_vocab_size is {}",
                     id,
                     config.engram_compressed_vocab_size);
    }
  }
  for (size_t i = 0; i < model.engram.size(); ++i) {
    if (model.engram[i].rows != config.engram_num_embeddings[i]) {
      return invalid("engram_num_embeddings[{}] is {}, the primes of the config sum to {}",
                     i,
                     config.engram_num_embeddings[i],
                     model.engram[i].rows);
    }
  }
  return model;
}

}  // namespace cachalot::model
