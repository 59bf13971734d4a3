// The weight table: the only place that spells tensor names.
//
// From a config it derives every tensor of a checkpoint with its name, shape, storage and role. The
// loader, the writer, `synth`, `inspect` and the optimizer grouping are all driven by it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/config.h"
#include "ops/ops.h"
#include "tensor/tensor.h"

namespace cachalot::model {

enum class WeightKind : uint8_t {
  kPlain,        // BF16 or F32 as named by dtype
  kFp8Block,     // E4M3 [out, in] with "<stem>.scale" E8M0 [ceil(out/32), ceil(in/32)]
  kFp4Row,       // I8 [out, in/2] with "<stem>.scale" E8M0 [out, in/32]
  kEngramTable,  // E4M3 [rows, width] with "<stem>.scale" E8M0 [rows, width/32]
};

// What a tensor does: chooses its synthetic statistics and, in training, its optimizer.
enum class WeightRole : uint8_t {
  kEmbedding,
  kHead,
  kNorm,
  kProjection,
  kRouter,
  kRouterBias,
  kSink,
  kHcFn,
  kHcBase,
  kHcScale,
  kEngramTable,
  kEngramGate,
  kMarkov,
  kConfidence,
  kVision,
  kVisionBias,
  kImageVector,
};

// Which parameters `inspect` counts where.
enum class WeightPart : uint8_t { kBackbone, kEngram, kDraft, kVision };

struct WeightSpec {
  std::string name;  // "layers.3.attn.wq_a.weight"
  Shape shape;       // logical [out, in], [rows, width], [n]; never packed
  WeightKind kind = WeightKind::kPlain;
  DType dtype = DType::kBF16;  // of plain weights
  WeightRole role = WeightRole::kProjection;
  WeightPart part = WeightPart::kBackbone;
  int64_t layer = -1;   // backbone layer, draft stage, vision block, or -1
  int64_t expert = -1;  // routed expert, or -1
  int64_t shard = 0;    // 0-based official shard
  // Independent maps stacked along the rows (heads of a query projection, groups of wo_a, keys and
  // value of Engram): an optimizer treats each as a matrix of its own.
  int64_t blocks = 1;
  bool to_stream = false;  // its output is added to the residual streams
  // Statistics of synthetic weights: about N(mean, deviation^2).
  double mean = 0;
  double deviation = 0;
};

// One tensor as it lies in a file.
struct StoredTensor {
  std::string name;
  DType dtype;
  Shape shape;
  int64_t shard;
};

// All weights of the config, in checkpoint order. Under WeightStorage::kF32 quantized kinds become
// plain F32.
std::vector<WeightSpec> weight_table(const ModelConfig& config);

// The one or two stored tensors of a weight (values, then scales).
std::vector<StoredTensor> stored_tensors(const WeightSpec& spec);

// Weights resolved to memory. ------------------------------------------------------------------

struct HcWeights {
  TensorView fn;     // [(2 + M) M, M D] f32: rows pre, post, comb (row-major)
  TensorView base;   // [(2 + M) M] f32
  TensorView scale;  // [3] f32: pre, post, comb
};

struct IndexerWeights {
  ops::Weight wq_b;          // [HI DI, q_lora]
  ops::Weight weights_proj;  // [HI, D]
  ops::Weight wk;            // [DI, C]; KV sources only
  TensorView k_norm;         // [DI] bf16; KV sources only
};

struct CompressorWeights {
  ops::Weight wkv;    // [C, D]
  ops::Weight wgate;  // [C, D]; ratio 2 only
  TensorView norm;    // [C] bf16
};

struct EngramWeights {
  ops::Weight table;    // [rows, width]
  ops::Weight wkv;      // [(M + 1) D, columns * width]
  TensorView q_weight;  // [M, D] bf16
  TensorView k_weight;  // [M, D] bf16
};

struct MoeWeights {
  ops::Weight gate;                      // [E, D]
  TensorView bias;                       // [E] f32: text tokens
  TensorView bias_vl;                    // [E] f32: image-span tokens
  std::vector<ops::ExpertView> experts;  // E routed experts
  std::vector<ops::ExpertView> shared;   // n_shared_experts of them (0 or 1)
};

struct AttentionWeights {
  ops::Weight wq_a;              // [q_lora, D]
  TensorView q_norm;             // [q_lora]
  ops::Weight wq_b;              // [H K, q_lora]
  ops::Weight wkv;               // [K, D]
  TensorView kv_norm;            // [K]
  TensorView sink;               // [H] f32
  ops::Weight wo_a;              // [groups * o_lora, H K / groups]
  ops::Weight wo_b;              // [D, groups * o_lora]
  CompressorWeights compressor;  // KV sources only
  IndexerWeights indexer;        // index sources only
};

struct LayerWeights {
  TensorView attn_norm;  // [D]
  TensorView ffn_norm;   // [D]
  HcWeights hc_attn;
  HcWeights hc_ffn;
  AttentionWeights attn;
  MoeWeights moe;
  EngramWeights engram;  // Engram layers only
};

// The matrices of a layer, those of experts apart; what the layer does not have is empty.
template <class Layer>  // LayerWeights or const LayerWeights
auto matrices(Layer& layer) {
  return std::array{&layer.attn.wq_a,
                    &layer.attn.wq_b,
                    &layer.attn.wkv,
                    &layer.attn.wo_a,
                    &layer.attn.wo_b,
                    &layer.attn.compressor.wkv,
                    &layer.attn.compressor.wgate,
                    &layer.attn.indexer.wq_b,
                    &layer.attn.indexer.weights_proj,
                    &layer.attn.indexer.wk,
                    &layer.moe.gate,
                    &layer.engram.wkv};
}

// The drafter; embedding and head are the model's.
struct DraftWeights {
  ops::Weight main_proj;             // [D, taps D]
  TensorView main_norm;              // [D]
  std::vector<LayerWeights> stages;  // empty: no drafter
  TensorView norm;                   // [D]
  ops::Weight markov_embed;          // [V, R]
  ops::Weight markov_head;           // [V, R]
  ops::Weight confidence;            // [1, D + R]
};

struct BiasedWeight {
  ops::Weight weight;  // [out, in]
  TensorView bias;     // [out]
};

struct VisionBlockWeights {
  TensorView norm1;    // [H]
  BiasedWeight wqkv;   // [3 H, H]
  BiasedWeight wo;     // [H, H]
  TensorView norm2;    // [H]
  ops::Weight mlp_w1;  // [2 F, H]: gates, ups
  ops::Weight mlp_w2;  // [H, F]
};

// The image encoder, of width H, and what turns its output into rows of the language model.
struct VisionWeights {
  BiasedWeight patch_embed;  // [H, 3 * patch * patch]
  std::vector<VisionBlockWeights> blocks;
  TensorView norm;                                   // [H]
  BiasedWeight aligner_w1;                           // [D, H * downsample * downsample]
  BiasedWeight aligner_w2;                           // [D, D]
  TensorView image_start, image_newline, image_end;  // [D], always in host memory
};

struct ModelWeights {
  ops::Weight embed;  // [V, D]
  ops::Weight head;   // [V, D]
  TensorView norm;    // [D]
  std::vector<LayerWeights> layers;
  DraftWeights draft;
  VisionWeights vision;  // empty: no vision tower
};

// The memory of a stored tensor by its name.
using TensorLookup = std::function<TensorView(const std::string& name)>;

// One matrix with its scales.
ops::Weight resolve_weight(const WeightSpec& spec, const TensorLookup& lookup);

// All weights. Fields that a layer's mode or the config does not have stay empty.
ModelWeights resolve_weights(const ModelConfig& config, const TensorLookup& lookup);

}  // namespace cachalot::model
