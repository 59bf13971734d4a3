#include "model/device_weights.h"

#include <vector>

#include "base/progress.h"

namespace cachalot::model {
namespace {

constexpr int64_t kAlign = 256;

// Every tensor view of the weights but those of the Engram tables and of the vectors that lie
// around an image, which the host lays out.
std::vector<TensorView*> all_views(ModelWeights& weights) {
  std::vector<TensorView*> views;
  const auto plain = [&](TensorView& view) {
    if (!view.empty()) {
      views.push_back(&view);
    }
  };
  const auto matrix = [&](ops::Weight& w) {
    plain(w.values);
    plain(w.scales);
  };
  const auto hc = [&](HcWeights& w) {
    plain(w.fn);
    plain(w.base);
    plain(w.scale);
  };
  const auto experts = [&](std::vector<ops::ExpertView>& list) {
    for (ops::ExpertView& e : list) {
      matrix(e.w1);
      matrix(e.w3);
      matrix(e.w2);
    }
  };
  const auto layer = [&](LayerWeights& l) {
    plain(l.attn_norm);
    plain(l.ffn_norm);
    hc(l.hc_attn);
    hc(l.hc_ffn);
    for (ops::Weight* w : matrices(l)) {
      matrix(*w);
    }
    for (TensorView* view : {&l.attn.q_norm,
                             &l.attn.kv_norm,
                             &l.attn.sink,
                             &l.attn.compressor.norm,
                             &l.attn.indexer.k_norm,
                             &l.moe.bias,
                             &l.moe.bias_vl,
                             &l.engram.q_weight,
                             &l.engram.k_weight}) {
      plain(*view);
    }
    experts(l.moe.experts);
    experts(l.moe.shared);
  };
  DraftWeights& draft = weights.draft;
  for (ops::Weight* w : {&weights.embed,
                         &weights.head,
                         &draft.main_proj,
                         &draft.markov_embed,
                         &draft.markov_head,
                         &draft.confidence}) {
    matrix(*w);
  }
  for (TensorView* view : {&weights.norm, &draft.main_norm, &draft.norm}) {
    plain(*view);
  }
  for (std::vector<LayerWeights>* list : {&weights.layers, &draft.stages}) {
    for (LayerWeights& l : *list) {
      layer(l);
    }
  }
  VisionWeights& vision = weights.vision;
  const auto biased = [&](BiasedWeight& w) {
    matrix(w.weight);
    plain(w.bias);
  };
  for (BiasedWeight* w : {&vision.patch_embed, &vision.aligner_w1, &vision.aligner_w2}) {
    biased(*w);
  }
  plain(vision.norm);
  for (VisionBlockWeights& block : vision.blocks) {
    plain(block.norm1);
    plain(block.norm2);
    biased(block.wqkv);
    biased(block.wo);
    matrix(block.mlp_w1);
    matrix(block.mlp_w2);
  }
  return views;
}

std::vector<TensorView*> table_views(ModelWeights& weights) {
  std::vector<TensorView*> views;
  for (LayerWeights& l : weights.layers) {
    for (TensorView* view : {&l.engram.table.values, &l.engram.table.scales}) {
      if (!view->empty()) {
        views.push_back(view);
      }
    }
  }
  return views;
}

int64_t aligned(int64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

Result<DeviceWeights> copy_to_device(const ModelWeights& weights,
                                     ops::Memory& memory,
                                     TablePlace tables) {
  DeviceWeights result{.memory = {}, .weights = weights};
  std::vector<TensorView*> views = all_views(result.weights);
  const std::vector<TensorView*> rows = table_views(result.weights);
  if (tables == TablePlace::kAuto) {
    CACHALOT_TRY(const int64_t free, memory.available());
    int64_t bytes = 0;
    for (const TensorView* view : rows) {
      bytes += view->bytes();
    }
    tables = bytes > free / 4 ? TablePlace::kHost : TablePlace::kDevice;
  }
  if (tables == TablePlace::kDevice) {
    views.insert(views.end(), rows.begin(), rows.end());
  }
  int64_t total = 0;
  for (const TensorView* view : views) {
    total += aligned(view->bytes());
  }
  CACHALOT_TRY(result.memory, ops::Buffer::allocate(memory, total));
  Progress progress("copy weights", static_cast<int64_t>(views.size()));
  int64_t offset = 0;
  for (TensorView* view : views) {
    uint8_t* target = result.memory.data() + offset;
    CACHALOT_RETURN_IF_ERROR(memory.write(target, view->data, view->bytes(), nullptr));
    view->data = target;
    view->device = memory.device();
    offset += aligned(view->bytes());
    progress.advance();
  }
  if (total > 0) {
    // Waits for the copies: ops of other streams read the weights, too.
    uint8_t first = 0;
    CACHALOT_RETURN_IF_ERROR(memory.read(&first, result.memory.data(), 1, nullptr));
  }
  return result;
}

}  // namespace cachalot::model
