// TrainExec: the execution policy that runs model/forward.h over whole samples and records on a
// tape how to go back.
//
//   Tape<float> tape;
//   TrainExec<float> exec(parameters, options, batch, tape, scratch, pool);
//   model::forward(exec, parameters.model());
//   tape.backward();
//   exec.report().loss_sum, exec.gradient(parameter);
//
// Real is float in training and double in gradient checks. Precision is that of InferExec's `f32`:
// activations are not rounded; cache formats apply where a switch asks for them.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/forward.h"
#include "ops/context.h"
#include "train/attention.h"
#include "train/batch.h"
#include "train/draft.h"
#include "train/mixture.h"
#include "train/parameters.h"
#include "train/streams.h"
#include "train/tape.h"

namespace cachalot::train {

// How the indexer learns: KL of the attention that its entries get from the layers that use them.
struct IndexerObjective {
  double coefficient = 1e-2;
  int64_t queries = 128;       // rows per batch that are compared, spread evenly
  bool selected_only = false;  // over the selected entries instead of all visible ones
  bool own_layer = false;      // teacher: the source layer alone instead of all layers it serves
};

struct ForwardOptions {
  QuantSwitches quant;
  Mixing mixing = Mixing::kManifold;
  bool candidates = false;  // restrict Reindex layers to candidate blocks, as inference does
  double balance_coefficient = 1e-4;
  IndexerObjective indexer;
  // Factor of the summed cross-entropy in what backward() differentiates, and of the batch's means
  // of the auxiliary losses: 1 / targets of the step, and this batch's share of the step.
  double loss_scale = 1;
  double auxiliary_scale = 1;
  uint64_t seed = 0;  // of the rows that the indexer objective compares
  bool gradients = true;
  // Forgets what happens inside of a block of attention and experts and makes it again in the
  // backward: the same gradients for less memory.
  bool recompute = false;
  bool keep_logits = false;
  // Of the drafter's stage (train_drafter()): its blocks and their loss.
  const DraftBlocks* blocks = nullptr;
  DraftObjective draft;
};

struct ForwardReport {
  double loss_sum = 0;  // cross-entropy in nats over all targets; of a drafter: weighted losses
  double balance = 0;   // mean balance loss of the layers, before its coefficient
  double indexer = 0;   // mean KL per compared row over the index sources
  // Attention of the compared rows that see more entries than are selected, summed: all of it, what
  // the selected entries get, and what as many best ones get. 0 if only selected ones are compared.
  double all_mass = 0, selected_mass = 0, best_mass = 0;
  double max_latent = 0;  // largest |value| of a compressed row
  MixingGain gain;        // largest of any product of combs from the first site on
  // Rows per expert and layer, text and image rows apart.
  std::vector<std::vector<int64_t>> load, load_image;
  std::vector<DraftRow> draft;  // counted rows of the drafter's stage
};

template <class Real>
class TrainExec {
 public:
  using Var = train::Var<Real>;
  using StreamVar = model::Stream<Var>;
  using SiteVar = model::Site<Var>;

  // All arguments must outlive the tape's backward(). Temporaries come from `scratch`.
  TrainExec(ParameterSet<Real>& parameters,
            const ForwardOptions& options,
            const Batch& batch,
            Tape<Real>& tape,
            Arena& scratch,
            ThreadPool* pool);

  const ForwardReport& report() const { return report_; }
  // After the tape's backward(): as long as the parameter; null: zero. Lives as long as the nodes.
  const Real* gradient(const Parameter<Real>& parameter) const;
  // Loss per row, and logits [T, V] if they were asked for.
  Var losses() const { return losses_; }
  Var logits() const { return logits_; }
  // The entries that an index source selected, by entry id within the row's sample; -1 behind.
  std::vector<int32_t> selected(int64_t layer) const;

  // Calls of forward(). -------------------------------------------------------------------------
  Var embed(const ops::Weight& weight);
  Var first_pre();
  Var detach(Var x) { return tape_.detached(x); }
  Var linear(Var x, const ops::Weight& w) { return linear_groups(x, w, 1); }
  Var linear_f32(Var x, const ops::Weight& w) { return linear_groups(x, w, 1); }
  Var linear_grouped(Var x, const ops::Weight& w);
  std::pair<Var, Var> linear_pair(Var x, const ops::Weight& a, const ops::Weight& b) {
    return {linear(x, a), linear(x, b)};
  }
  void hc_expand(StreamVar& stream);
  SiteVar hc_site(const StreamVar& stream, const model::HcWeights& w, const TensorView& norm);
  std::pair<Var, Var> qkv_finish(const model::LayerSpec& layer,
                                 Var t,
                                 const TensorView& q_norm,
                                 Var kv,
                                 const TensorView& kv_norm);
  Var compress_pool(const model::LayerSpec& layer, Var kv, Var gate, const TensorView& norm);
  void compress_store(const model::LayerSpec& layer, Var latent, Var key, const TensorView& k_norm);
  void index_select(const model::LayerSpec& layer, Var q, Var w, model::Published<Var>& published);
  Var attend(
      const model::LayerSpec& layer, Var q, Var window, const TensorView& sink, Var selected);
  std::pair<Var, Var> gate(const model::LayerSpec& layer, Var u, const model::MoeWeights& w);
  Var experts(Var u, Var ids, Var weights, const model::MoeWeights& w);
  Var engram_gather(const model::LayerSpec& layer, const ops::Weight& table);
  Var engram_inject(Var x, Var kv, const model::EngramWeights& w);
  Var head(const StreamVar& stream, const TensorView& norm, const ops::Weight& weight);

  template <class Body>
  void run_block(const model::LayerSpec& layer,
                 StreamVar& stream,
                 model::Published<Var>& published,
                 const Body& body) {
    if (!options_.recompute || !recording_) {
      body(stream, published);
      return;
    }
    const StreamVar before = stream;
    const model::Published<Var> seen = published;
    recording_ = false;
    tape_.begin_segment();
    body(stream, published);
    const Kept kept = keep(layer, stream, published);
    tape_.end_segment();
    recording_ = true;
    tape_.record([this, &layer, before, seen, kept, body] {
      tape_.begin_segment();
      again_ = true;
      StreamVar again = before;
      model::Published<Var> ignored = seen;
      body(again, ignored);
      again_ = false;
      take_gradients(layer, again, kept);
      tape_.backward();
      tape_.end_segment();
    });
  }

  // Calls of the drafter's parts.
  Var tap(Var taps, const model::LayerSpec& layer, const StreamVar& stream);
  Var rms_norm(Var x, const TensorView& norm) { return norm_rows(x, norm); }
  void context_finish(const model::LayerSpec& stage, Var kv, const TensorView& kv_norm);
  Var hc_collapse(const StreamVar& stream);

  void enter_decoder(SiteVar&) {}  // training skips nothing
  void observe_engram(const model::LayerSpec&, Var&) {}
  void observe_attention_input(const model::LayerSpec&, const Var&) {}
  void observe_attention(const model::LayerSpec&, StreamVar&) {}
  void observe_ffn_input(const model::LayerSpec&, const Var&) {}
  void observe_ffn(const model::LayerSpec&, StreamVar&) {}
  void observe_draft_context(const Var&, const Var&) {}
  void observe_draft(const Var&, const Var&) {}

  // The drafter's stage, in this order: the frozen backbone; finish_target(), behind which ops are
  // recorded; the context; enter_blocks(), behind which rows are those of the blocks; the draft.
  void finish_target(const StreamVar& stream);
  void enter_blocks();
  void finish_draft(const model::Draft<Var>& draft);

 private:
  // The groups of one compression ratio over all samples.
  struct Groups {
    std::vector<int32_t> first_row;  // [G] row of the group's first token
    std::vector<int32_t> last_row;   // [G]
    std::vector<int32_t> begin;      // [S]: first group of a sample
    int64_t count() const { return static_cast<int64_t>(last_row.size()); }
  };
  struct Source {
    Var entries;  // [G, C]
    Var keys;     // [G, DI]
  };
  // An index source: its scores' inputs, its selection, and what its objective compares.
  struct Index {
    const model::LayerSpec* layer = nullptr;
    Var q;  // [T, HI DI], rotated
    Var w;  // [T, HI]
    Selection selection;
    std::vector<int32_t> compared;            // rows
    std::vector<std::vector<int32_t>> entry;  // per compared row: the entries in question
    std::vector<std::vector<Real>> teacher;   // per compared row and entry, summed over layers
    int64_t served = 0;                       // layers in the sum
  };

  // The gradient to add to, zeroed when it is first asked for.
  Real* gradient_of(const Parameter<Real>& parameter);
  // What a block that is made again leaves for the rest of the forward.
  struct Kept {
    StreamVar stream;
    Source source;         // of a KV source
    Var index_q, index_w;  // of an index source
  };
  Kept keep(const model::LayerSpec& layer, StreamVar& stream, model::Published<Var>& published);
  void take_gradients(const model::LayerSpec& layer, const StreamVar& again, const Kept& kept);
  Var linear_groups(Var x, const ops::Weight& w, int64_t groups);
  // Rotation table of a layer, [T, R/2, 2].
  const Real* rope(const model::LayerSpec& layer) const {
    if (layer.stage >= 0) {
      return block_rope_.data();
    }
    return (layer.ratio == 0 ? window_rope_ : compressed_rope_).data();
  }
  // Whether a weight has a gradient: in the drafter's stage the others are frozen.
  bool trains(const Parameter<Real>& parameter) const {
    return options_.blocks == nullptr || parameter.spec.part == model::WeightPart::kDraft;
  }
  const Groups& groups(int64_t ratio);
  int64_t visible(int64_t row, int64_t ratio) const {
    return (batch_->position[static_cast<size_t>(row)] + int64_t{1}) / ratio;
  }
  Var norm_rows(Var x, const TensorView& weight);
  // Rounds one row in place to a cache format; the gradient passes unchanged.
  using RoundRow = void (*)(Real* row, int64_t n);
  struct Rotation {
    const Real* table = nullptr;                // [T, R/2, 2]
    const std::vector<int32_t>* row = nullptr;  // table row of each row; null: the same
    int sign = 1;
    RoundRow round = nullptr;
  };
  // Rotates each head of `dim` values of x's rows, then rounds it.
  Var rotate_rows(Var x, int64_t dim, const Rotation& rotation);
  IndexRow<Real> index_row(const Index& index, int64_t row) const;
  void choose(Index& index, model::Published<Var>& published);
  void compare_rows(Index& index);
  void measure_selection(const Index& index, size_t compared);
  void indexer_objective();
  void report_routing(const model::LayerSpec& layer,
                      const RouterRows<Real>& args,
                      const int32_t* ids);
  PendingRows<Real> pending_rows(const model::PendingVar<Var>& pending) const;
  PendingRows<Real> pending_gradients(const model::PendingVar<Var>& pending);
  StreamShape stream_shape() const;
  template <class Rule>
  void record(Rule rule) {
    if (recording_) {
      tape_.record(std::move(rule));
    }
  }

  ParameterSet<Real>& parameters_;
  const model::Model& model_;
  ForwardOptions options_;
  const Batch* batch_;  // the rows that ops run over
  bool recording_;
  bool again_ = false;  // a block is being made again: choices and reports stand
  Tape<Real>& tape_;
  Arena& scratch_;
  ThreadPool* pool_;
  std::vector<Real> window_rope_, compressed_rope_;  // [T, R/2, 2]
  std::vector<Real> block_rope_;                     // [N, R/2, 2]
  std::vector<Real> mixed_;                          // [T, M, M] product of the combs so far
  std::map<int64_t, Groups> groups_;                 // by ratio
  std::map<int64_t, Source> sources_;                // by KV source layer
  std::map<int64_t, Index> indexes_;                 // by index source layer
  std::unordered_map<const Parameter<Real>*, Real*> gradients_;
  std::map<int64_t, Var> contexts_;  // by draft stage: its window rows [T, K]
  Var hidden_;                       // [T, D] normalized, of the drafter's target
  Var losses_, logits_;
  ForwardReport report_;
};

// The drafter's loss of options.blocks behind the frozen backbone.
template <class Real>
void train_drafter(TrainExec<Real>& exec, const model::Model& model) {
  const auto target = model::backbone_with_taps(exec, model);
  exec.finish_target(target.stream);
  model::draft_context(exec, model, target.taps);
  exec.enter_blocks();
  exec.finish_draft(model::draft(exec, model));
}

}  // namespace cachalot::train
