#include "model/weights.h"

#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/format.h"
#include "model/schedule.h"
#include "quant/block.h"

namespace cachalot::model {
namespace {

// Statistics of synthetic weights: RMS values that the released model shows (norm weights,
// embedding) or that keep a random model calm. Norms set the scale of every sublayer input, so a
// projection's deviation follows from the RMS of its input and the wanted RMS of its output.
struct Spread {
  double mean;
  double deviation;
};
constexpr Spread kAttnNorm = {0.025, 0.015};  // some weights are negative
constexpr Spread kFfnNorm = {0.2, 0.04};
constexpr Spread kQueryNorm = {0.97, 0.15};
constexpr Spread kKvNorm = {0.4, 0.08};
constexpr Spread kCompressorNorm = {0.6, 0.1};
constexpr Spread kIndexNorm = {0.5, 0.1};
constexpr Spread kPlainNorm = {1.0, 0.15};
constexpr Spread kSink = {1.0, 0.7};
constexpr Spread kEngramGate = {1.0, 0.3};
constexpr Spread kHcBase = {0, 1.2};  // uneven streams and an asymmetric comb
constexpr double kStream = 0.12;      // embedding, hence the first residual stream
constexpr double kSublayer = 0.036;   // what attention or the experts add: a third of it
constexpr double kInjection = 0.06;   // Engram value, before its gate of about a half
constexpr double kHidden = 0.05;      // where a norm follows, so that the scale does not matter
constexpr double kQuery = 2.5;        // attention logits spread by 1 to 1.5
constexpr double kMixedValue = 0.16;  // attention output: values averaged over some keys
constexpr double kGroupOut = 0.1;     // between wo_a and wo_b
constexpr double kRouter = 2.0;
// Times 1/sqrt(experts): changes about a third of the selections.
constexpr double kRouterBias = 0.4;
constexpr double kGate = 1.0;    // w1 x and w3 x
constexpr double kSwiglu = 0.6;  // RMS of silu(a) b for normal a and b
constexpr double kLogit = 2.0;
constexpr double kTable = 0.05;
constexpr double kMarkov = 0.5;
constexpr double kBias = 0.02;

double rms(const Spread& s) {
  return std::sqrt(s.mean * s.mean + s.deviation * s.deviation);
}

// Zero mean; maps `in` values of RMS `input` to outputs of RMS `output`.
Spread gain(double input, double output, int64_t in) {
  return {0, output / (input * std::sqrt(static_cast<double>(in)))};
}

int64_t blocks(int64_t n) {
  return quant::blocks(n, quant::kFp8Block);
}

// Receives every weight in checkpoint order. `matrix` or `view` points to the field that the weight
// belongs to; the other is null.
using Visit = std::function<void(WeightSpec spec, ops::Weight* matrix, TensorView* view)>;

// How a matrix is used, see WeightSpec.
struct Use {
  int64_t blocks = 1;
  bool to_stream = false;
};

// Walks the weights of a config and the fields of `weights` in parallel, so that names, shapes and
// fields stand side by side, once.
class Walk {
 public:
  Walk(const ModelConfig& config, ModelWeights& weights, const Visit& visit)
      : c_(config), weights_(weights), visit_(visit) {}

  void run() {
    const bool has_vision = c_.vision.num_hidden_layers > 0;
    if (has_vision) {
      vision();
      ++shard_;
    }
    global();
    weights_.layers.resize(static_cast<size_t>(c_.num_hidden_layers));
    const std::vector<LayerSpec> schedule = layer_schedule(c_);
    for (const LayerSpec& layer : schedule) {
      at(++shard_, WeightPart::kBackbone, layer.index, fmt::format("layers.{}.", layer.index));
      block(weights_.layers[static_cast<size_t>(layer.index)],
            c_.n_routed_experts,
            c_.num_experts_per_tok);
      sources(weights_.layers[static_cast<size_t>(layer.index)].attn, layer);
    }
    at(++shard_, WeightPart::kBackbone, -1, "");
    plain("head.weight",
          {c_.vocab_size, c_.hidden_size},
          WeightRole::kHead,
          gain(rms(kPlainNorm), kLogit, c_.hidden_size),
          &weights_.head);
    norm("norm.weight", c_.hidden_size, kPlainNorm, &weights_.norm);
    weights_.draft.stages.resize(static_cast<size_t>(c_.num_nextn_predict_layers));
    for (int64_t stage = 0; stage < c_.num_nextn_predict_layers; ++stage) {
      at(++shard_, WeightPart::kDraft, stage, fmt::format("mtp.{}.", stage));
      draft(stage);
    }
    for (const LayerSpec& layer : schedule) {
      if (layer.engram >= 0) {
        at(++shard_,
           WeightPart::kBackbone,
           layer.index,
           fmt::format("layers.{}.engram.", layer.index));
        engram(weights_.layers[static_cast<size_t>(layer.index)].engram,
               c_.engram_num_embeddings[static_cast<size_t>(layer.engram)]);
      }
    }
  }

 private:
  void at(int64_t shard, WeightPart part, int64_t layer, std::string prefix) {
    shard_ = shard;
    part_ = part;
    layer_ = layer;
    expert_ = -1;
    prefix_ = std::move(prefix);
  }

  void emit(std::string_view name,
            const Shape& shape,
            WeightKind kind,
            DType dtype,
            WeightRole role,
            WeightPart part,
            const Spread& spread,
            ops::Weight* matrix,
            TensorView* view,
            const Use& use = {}) {
    WeightSpec spec;
    spec.name = prefix_ + std::string(name);
    spec.shape = shape;
    spec.kind = kind;
    spec.dtype = dtype;
    if (c_.storage == WeightStorage::kF32) {
      spec.kind = WeightKind::kPlain;
      spec.dtype = DType::kF32;
    }
    spec.role = role;
    spec.part = part;
    spec.layer = layer_;
    spec.expert = expert_;
    spec.shard = shard_;
    spec.mean = spread.mean;
    spec.deviation = spread.deviation;
    spec.blocks = use.blocks;
    spec.to_stream = use.to_stream;
    visit_(std::move(spec), matrix, view);
  }

  void plain(std::string_view name,
             const Shape& shape,
             WeightRole role,
             const Spread& spread,
             ops::Weight* matrix) {
    emit(name, shape, WeightKind::kPlain, DType::kBF16, role, part_, spread, matrix, nullptr);
  }
  void vector(std::string_view name,
              const Shape& shape,
              DType dtype,
              WeightRole role,
              const Spread& spread,
              TensorView* view) {
    emit(name, shape, WeightKind::kPlain, dtype, role, part_, spread, nullptr, view);
  }
  void norm(std::string_view name, int64_t n, const Spread& spread, TensorView* view) {
    vector(name, {n}, DType::kBF16, WeightRole::kNorm, spread, view);
  }
  // `input` and `output`: RMS per element, see gain().
  void fp8(std::string_view name,
           int64_t out,
           int64_t in,
           double input,
           double output,
           ops::Weight* matrix,
           const Use& use = {}) {
    emit(name,
         {out, in},
         WeightKind::kFp8Block,
         DType::kF8E4M3,
         WeightRole::kProjection,
         part_,
         gain(input, output, in),
         matrix,
         nullptr,
         use);
  }

  void global() {
    at(shard_, WeightPart::kBackbone, -1, "");
    plain("embed.weight",
          {c_.vocab_size, c_.hidden_size},
          WeightRole::kEmbedding,
          {0, kStream},
          &weights_.embed);
    if (c_.vision.num_hidden_layers > 0) {
      part_ = WeightPart::kVision;
      VisionWeights& w = weights_.vision;
      for (const auto& [name, view] : {std::pair("image_start", &w.image_start),
                                       std::pair("image_newline", &w.image_newline),
                                       std::pair("image_end", &w.image_end)}) {
        vector(name, {c_.hidden_size}, DType::kBF16, WeightRole::kImageVector, {0, kStream}, view);
      }
    }
  }

  void hyper_connection(std::string_view site, HcWeights& hc) {
    const int64_t m = c_.hc_mult, rows = (2 + m) * m;
    vector(fmt::format("hc_{}_fn", site),
           {rows, m * c_.hidden_size},
           DType::kF32,
           WeightRole::kHcFn,
           gain(1, 1, m * c_.hidden_size),
           &hc.fn);
    vector(fmt::format("hc_{}_base", site),
           {rows},
           DType::kF32,
           WeightRole::kHcBase,
           kHcBase,
           &hc.base);
    vector(fmt::format("hc_{}_scale", site),
           {3},
           DType::kF32,
           WeightRole::kHcScale,
           {0.5, 0.1},
           &hc.scale);
  }

  void attention(AttentionWeights& attn) {
    const int64_t d = c_.hidden_size, k = c_.head_dim, width = c_.num_attention_heads * k;
    fp8("attn.wq_a.weight", c_.q_lora_rank, d, rms(kAttnNorm), kHidden, &attn.wq_a);
    norm("attn.q_norm.weight", c_.q_lora_rank, kQueryNorm, &attn.q_norm);
    fp8("attn.wq_b.weight",
        width,
        c_.q_lora_rank,
        rms(kQueryNorm),
        kQuery,
        &attn.wq_b,
        {.blocks = c_.num_attention_heads});
    fp8("attn.wkv.weight", k, d, rms(kAttnNorm), kHidden, &attn.wkv);
    norm("attn.kv_norm.weight", k, kKvNorm, &attn.kv_norm);
    vector("attn.attn_sink",
           {c_.num_attention_heads},
           DType::kF32,
           WeightRole::kSink,
           kSink,
           &attn.sink);
    fp8("attn.wo_a.weight",
        c_.o_groups * c_.o_lora_rank,
        width / c_.o_groups,
        kMixedValue,
        kGroupOut,
        &attn.wo_a,
        {.blocks = c_.o_groups});
    fp8("attn.wo_b.weight",
        d,
        c_.o_groups * c_.o_lora_rank,
        kGroupOut,
        kSublayer,
        &attn.wo_b,
        {.to_stream = true});
  }

  void expert(
      std::string_view name, WeightKind kind, DType dtype, double output, ops::ExpertView& expert) {
    const int64_t d = c_.hidden_size, f = c_.moe_intermediate_size;
    const auto matrix = [&](const char* which,
                            int64_t out,
                            int64_t in,
                            const Spread& spread,
                            ops::Weight* weight,
                            const Use& use = {}) {
      emit(fmt::format("{}.{}.weight", name, which),
           {out, in},
           kind,
           dtype,
           WeightRole::kProjection,
           part_,
           spread,
           weight,
           nullptr,
           use);
    };
    matrix("w1", f, d, gain(rms(kFfnNorm), kGate, d), &expert.w1);
    matrix("w3", f, d, gain(rms(kFfnNorm), kGate, d), &expert.w3);
    matrix("w2", d, f, gain(kSwiglu, output, f), &expert.w2, {.to_stream = true});
  }

  void mixture(MoeWeights& moe, int64_t experts, int64_t chosen) {
    // The shared expert, and `chosen` routed ones whose weights sum to routed_scaling_factor (a
    // single one keeps its score, which is near 1).
    const double routed = c_.routed_scaling_factor;
    const double output = kSublayer / std::sqrt(static_cast<double>(c_.n_shared_experts) +
                                                routed * routed / static_cast<double>(chosen));
    const double bias = kRouterBias / std::sqrt(static_cast<double>(experts));
    plain("ffn.gate.weight",
          {experts, c_.hidden_size},
          WeightRole::kRouter,
          gain(rms(kFfnNorm), kRouter, c_.hidden_size),
          &moe.gate);
    vector("ffn.gate.bias", {experts}, DType::kF32, WeightRole::kRouterBias, {0, bias}, &moe.bias);
    vector("ffn.gate.bias_vl",
           {experts},
           DType::kF32,
           WeightRole::kRouterBias,
           {0, bias},
           &moe.bias_vl);
    moe.experts.resize(static_cast<size_t>(experts));
    for (int64_t e = 0; e < experts; ++e) {
      expert_ = e;
      expert(fmt::format("ffn.experts.{}", e),
             WeightKind::kFp4Row,
             DType::kI8,
             output,
             moe.experts[static_cast<size_t>(e)]);
    }
    expert_ = -1;
    moe.shared.resize(static_cast<size_t>(c_.n_shared_experts));
    for (ops::ExpertView& shared : moe.shared) {
      expert("ffn.shared_experts", WeightKind::kFp8Block, DType::kF8E4M3, output, shared);
    }
  }

  // What a backbone layer and a draft stage have in common.
  void block(LayerWeights& layer, int64_t experts, int64_t chosen) {
    attention(layer.attn);
    norm("attn_norm.weight", c_.hidden_size, kAttnNorm, &layer.attn_norm);
    norm("ffn_norm.weight", c_.hidden_size, kFfnNorm, &layer.ffn_norm);
    hyper_connection("attn", layer.hc_attn);
    hyper_connection("ffn", layer.hc_ffn);
    mixture(layer.moe, experts, chosen);
  }

  void sources(AttentionWeights& attn, const LayerSpec& layer) {
    const int64_t d = c_.hidden_size, k = c_.head_dim;
    const bool is_kv = layer.mode == LayerMode::kFull;
    if (is_kv) {
      plain("attn.compressor.wkv.weight",
            {k, d},
            WeightRole::kProjection,
            gain(rms(kAttnNorm), kHidden, d),
            &attn.compressor.wkv);
      if (layer.ratio > 1) {
        plain("attn.compressor.wgate.weight",
              {k, d},
              WeightRole::kProjection,
              gain(rms(kAttnNorm), 1, d),
              &attn.compressor.wgate);
      }
      norm("attn.compressor.norm.weight", k, kCompressorNorm, &attn.compressor.norm);
    }
    if (is_kv || layer.mode == LayerMode::kReindex) {
      fp8("attn.indexer.wq_b.weight",
          c_.index_n_heads * c_.index_head_dim,
          c_.q_lora_rank,
          rms(kQueryNorm),
          1,
          &attn.indexer.wq_b,
          {.blocks = c_.index_n_heads});
      plain("attn.indexer.weights_proj.weight",
            {c_.index_n_heads, d},
            WeightRole::kProjection,
            gain(rms(kAttnNorm), 1, d),
            &attn.indexer.weights_proj);
    }
    if (is_kv) {
      plain("attn.indexer.wk.weight",
            {c_.index_head_dim, k},
            WeightRole::kProjection,
            gain(rms(kCompressorNorm), kHidden, k),
            &attn.indexer.wk);
      norm("attn.indexer.k_norm.weight", c_.index_head_dim, kIndexNorm, &attn.indexer.k_norm);
    }
  }

  void draft(int64_t stage) {
    const int64_t d = c_.hidden_size, v = c_.vocab_size, rank = c_.dspark_markov_rank;
    DraftWeights& draft = weights_.draft;
    block(draft.stages[static_cast<size_t>(stage)],
          c_.dspark_n_routed_experts,
          c_.dspark_num_experts_per_tok);
    if (stage == 0) {
      fp8("main_proj.weight",
          d,
          d * static_cast<int64_t>(c_.dspark_target_layer_ids.size()),
          kStream,
          kHidden,
          &draft.main_proj);
      norm("main_norm.weight", d, kPlainNorm, &draft.main_norm);
    }
    if (stage == c_.num_nextn_predict_layers - 1) {
      norm("norm.weight", d, kPlainNorm, &draft.norm);
      plain("markov_head.embed.weight",
            {v, rank},
            WeightRole::kMarkov,
            {0, kMarkov},
            &draft.markov_embed);
      plain("markov_head.head.weight",
            {v, rank},
            WeightRole::kMarkov,
            gain(kMarkov, 1, rank),
            &draft.markov_head);
      plain("confidence_head.proj.weight",
            {1, d + rank},
            WeightRole::kConfidence,
            gain(kMarkov, 1, d + rank),
            &draft.confidence);
    }
  }

  void engram(EngramWeights& engram, int64_t rows) {
    const int64_t d = c_.hidden_size, width = c_.engram_head_dim;
    const int64_t columns = (c_.engram_max_ngram_size - 1) * c_.engram_n_heads;
    emit("embed.weight",
         {rows, width},
         WeightKind::kEngramTable,
         DType::kF8E4M3,
         WeightRole::kEngramTable,
         WeightPart::kEngram,
         {0, kTable},
         &engram.table,
         nullptr);
    fp8("wkv.weight",
        (c_.hc_mult + 1) * d,
        columns * width,
        kTable,
        kInjection,
        &engram.wkv,
        {.blocks = c_.hc_mult + 1, .to_stream = true});
    vector("q_weight",
           {c_.hc_mult, d},
           DType::kBF16,
           WeightRole::kEngramGate,
           kEngramGate,
           &engram.q_weight);
    vector("k_weight",
           {c_.hc_mult, d},
           DType::kBF16,
           WeightRole::kEngramGate,
           kEngramGate,
           &engram.k_weight);
  }

  void vision() {
    const VisionConfig& v = c_.vision;
    const int64_t h = v.hidden_size, d = c_.hidden_size;
    const int64_t merged = h * v.downsample_ratio * v.downsample_ratio;
    at(shard_, WeightPart::kVision, -1, "vision.");
    VisionWeights& w = weights_.vision;
    with_bias("patch_embed.proj", h, 3 * v.patch_size * v.patch_size, 1, 1, w.patch_embed);
    norm("norm.weight", h, kPlainNorm, &w.norm);
    w.blocks.resize(static_cast<size_t>(v.num_hidden_layers));
    for (int64_t b = 0; b < v.num_hidden_layers; ++b) {
      at(shard_, WeightPart::kVision, b, fmt::format("vision.blocks.{}.", b));
      VisionBlockWeights& block = w.blocks[static_cast<size_t>(b)];
      norm("norm1.weight", h, kPlainNorm, &block.norm1);
      with_bias("attn.wqkv", 3 * h, h, 1, 1, block.wqkv);
      with_bias("attn.wo", h, h, 0.3, 0.3, block.wo);
      norm("norm2.weight", h, kPlainNorm, &block.norm2);
      plain("mlp.w1.weight",
            {2 * v.intermediate_size, h},
            WeightRole::kVision,
            gain(1, 1, h),
            &block.mlp_w1);
      plain("mlp.w2.weight",
            {h, v.intermediate_size},
            WeightRole::kVision,
            gain(kSwiglu, 0.3, v.intermediate_size),
            &block.mlp_w2);
    }
    at(shard_, WeightPart::kVision, -1, "aligner.");
    with_bias("w1", d, merged, 1, 1, w.aligner_w1);
    with_bias("w2", d, d, kSwiglu, kStream, w.aligner_w2);
  }
  void with_bias(std::string_view stem,
                 int64_t out,
                 int64_t in,
                 double input,
                 double output,
                 BiasedWeight& weight) {
    plain(fmt::format("{}.weight", stem),
          {out, in},
          WeightRole::kVision,
          gain(input, output, in),
          &weight.weight);
    vector(fmt::format("{}.bias", stem),
           {out},
           DType::kBF16,
           WeightRole::kVisionBias,
           {0, kBias},
           &weight.bias);
  }

  const ModelConfig& c_;
  ModelWeights& weights_;
  const Visit& visit_;
  int64_t shard_ = 0;
  WeightPart part_ = WeightPart::kBackbone;
  int64_t layer_ = -1;
  int64_t expert_ = -1;
  std::string prefix_;
};

ops::WeightFormat format_of(const WeightSpec& spec) {
  switch (spec.kind) {
    case WeightKind::kFp8Block:
      return ops::WeightFormat::kFp8Block;
    case WeightKind::kFp4Row:
      return ops::WeightFormat::kFp4Row;
    case WeightKind::kEngramTable:
      return ops::WeightFormat::kFp8Row;
    case WeightKind::kPlain:
      break;
  }
  return spec.dtype == DType::kF32 ? ops::WeightFormat::kF32 : ops::WeightFormat::kBF16;
}

}  // namespace

std::vector<WeightSpec> weight_table(const ModelConfig& config) {
  std::vector<WeightSpec> table;
  ModelWeights unused;
  const Visit visit = [&](WeightSpec spec, ops::Weight*, TensorView*) {
    table.push_back(std::move(spec));
  };
  Walk(config, unused, visit).run();
  return table;
}

std::vector<StoredTensor> stored_tensors(const WeightSpec& spec) {
  if (spec.kind == WeightKind::kPlain) {
    return {{spec.name, spec.dtype, spec.shape, spec.shard}};
  }
  constexpr std::string_view kSuffix = "weight";
  CACHALOT_CHECK(spec.name.ends_with(kSuffix) && spec.shape.rank == 2, spec.shape.rank);
  const std::string scale = spec.name.substr(0, spec.name.size() - kSuffix.size()) + "scale";
  const int64_t out = spec.shape[0], in = spec.shape[1];
  const Shape scales =
      spec.kind == WeightKind::kFp8Block ? Shape{blocks(out), blocks(in)} : Shape{out, blocks(in)};
  const Shape values = spec.kind == WeightKind::kFp4Row ? Shape{out, in / 2} : spec.shape;
  const DType dtype = spec.kind == WeightKind::kFp4Row ? DType::kI8 : DType::kF8E4M3;
  return {{spec.name, dtype, values, spec.shard}, {scale, DType::kF8E8M0, scales, spec.shard}};
}

ops::Weight resolve_weight(const WeightSpec& spec, const TensorLookup& lookup) {
  const std::vector<StoredTensor> stored = stored_tensors(spec);
  ops::Weight weight;
  weight.format = format_of(spec);
  weight.values = lookup(stored[0].name);
  if (stored.size() == 2) {
    weight.scales = lookup(stored[1].name);
  }
  weight.out = spec.shape[0];
  weight.in = spec.shape[1];
  return weight;
}

ModelWeights resolve_weights(const ModelConfig& config, const TensorLookup& lookup) {
  ModelWeights weights;
  const Visit visit = [&](const WeightSpec& spec, ops::Weight* matrix, TensorView* view) {
    if (matrix != nullptr) {
      *matrix = resolve_weight(spec, lookup);
    } else if (view != nullptr) {
      *view = lookup(spec.name);
    }
  };
  Walk(config, weights, visit).run();
  return weights;
}

}  // namespace cachalot::model
