// InferExec: the execution policy that runs each op of forward() at once, over the caches of a
// step.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "model/forward.h"
#include "model/step.h"
#include "model/step_arrays.h"
#include "ops/host_rows.h"
#include "ops/memory.h"
#include "ops/ops.h"

namespace cachalot::model {

// What a step computes.
enum class StepKind : uint8_t {
  kTarget,             // logits
  kTargetWithContext,  // logits, and the rows that extend the drafter's context
  kDraft,              // draft blocks behind the context
};

// The packed rows of a step that run through some of its layers. Sequences without such a row are
// left out: `member` has the others' indices in the step, `first` the index of their first row here
// among their rows of the step.
struct StepPlan {
  StepKind kind = StepKind::kTarget;
  int64_t rows = 0;
  std::vector<int32_t> member, first;
  std::vector<int32_t> token, position, sequence, row_begin, start, floor;  // token: see EmbedArgs
  std::vector<uint8_t> is_image;
  std::vector<uint8_t> image_rows;  // [I, D] act, of the plan that is embedded
  std::vector<int32_t> logit_rows;
  std::vector<int32_t> classes;  // look-back and rows, see EngramHashArgs
  struct Groups {
    std::vector<int32_t> row, sequence, entry, position;
  };
  std::map<int64_t, Groups> groups;  // by compression ratio
};

class InferExec {
 public:
  using Var = TensorView;
  using StreamVar = Stream<Var>;
  using SiteVar = Site<Var>;

  InferExec(const Model& model,
            ops::OpContext& context,
            Precision precision,
            ops::Memory& device,
            ops::HostRows& host_rows,
            Arena& memory,
            const StepPlan& encoder,
            const StepPlan& decoder,
            std::span<const StepSequence> sequences,
            Observer* observer,
            bool steady);

  // What the layers share; before the calls of forward().
  void begin();
  // From here on ops are recorded: what the host does for them waits for send_rows().
  void record() { sends_later_ = true; }
  // From here on ops are not run either: the calls of forward() give the tensors that a recorded
  // step of this shape fills.
  void replay() { replays_ = sends_later_ = true; }
  // Sends the rows of host tables that the recorded ops read; before they are launched.
  Status send_rows();
  // All that the launches of a steady step depend on, besides what its arrays hold.
  std::vector<int64_t> shape() const;

  // The first error of any op; ops after it do nothing.
  const Status& status() const { return status_; }

  // Calls of forward(). -------------------------------------------------------------------------
  Var embed(const ops::Weight& weight);
  Var first_pre();
  Var detach(Var x) { return x; }
  Var linear(Var x, const ops::Weight& w);
  Var linear_f32(Var x, const ops::Weight& w);
  Var linear_grouped(Var x, const ops::Weight& w);
  std::pair<Var, Var> linear_pair(Var x, const ops::Weight& a, const ops::Weight& b);
  void hc_expand(StreamVar& stream);
  SiteVar hc_site(const StreamVar& stream, const HcWeights& w, const TensorView& norm);
  void enter_decoder(SiteVar& site);
  std::pair<Var, Var> qkv_finish(
      const LayerSpec& layer, Var t, const TensorView& q_norm, Var kv, const TensorView& kv_norm);
  Var compress_pool(const LayerSpec& layer, Var kv, Var gate, const TensorView& norm);
  void compress_store(const LayerSpec& layer, Var latent, Var key, const TensorView& k_norm);
  void index_select(const LayerSpec& layer, Var q, Var w, Published<Var>& published);
  Var attend(const LayerSpec& layer, Var q, Var window, const TensorView& sink, Var selected);
  std::pair<Var, Var> gate(const LayerSpec& layer, Var u, const MoeWeights& w);
  Var experts(Var u, Var ids, Var weights, const MoeWeights& w);
  Var engram_gather(const LayerSpec& layer, const ops::Weight& table);
  Var engram_inject(Var x, Var kv, const EngramWeights& w);
  Var head(const StreamVar& stream, const TensorView& norm, const ops::Weight& weight);

  template <class Body>
  void run_block(const LayerSpec&, StreamVar& stream, Published<Var>& published, const Body& body) {
    body(stream, published);
  }
  Var tap(Var taps, const LayerSpec& layer, const StreamVar& stream);
  Var rms_norm(Var x, const TensorView& norm);
  void context_finish(const LayerSpec& stage, Var kv, const TensorView& kv_norm);
  Var hc_collapse(const StreamVar& stream);

  void observe_draft_context(const Var& taps, const Var& features);
  void observe_draft(const Var& hidden, const Var& base);
  void observe_engram(const LayerSpec& layer, Var& x);
  void observe_attention_input(const LayerSpec& layer, const Var& u);
  void observe_attention(const LayerSpec& layer, StreamVar& stream);
  void observe_ffn_input(const LayerSpec& layer, const Var& u);
  void observe_ffn(const LayerSpec& layer, StreamVar& stream);

  // What commit() needs. ------------------------------------------------------------------------
  const ops::StepRows& step_rows(bool decoder) const {
    return (decoder ? decoder_ : encoder_)->rows;
  }
  const ops::WindowView& window(int64_t layer) const {
    return windows_[static_cast<size_t>(layer)];
  }
  // Of the ratio-2 sources; their rows are the encoder's.
  std::span<const ops::OpenGroupView> open_groups() const { return open_groups_; }

 private:
  struct RatioPlan {
    ops::GroupRows groups;
    Var position;  // [G] of each group's first token
    Var rope;      // [G, R/2, 2]
  };
  struct HashTables {
    Var multiplier, prime, offset;
  };

  // The arrays of a plan as the ops see them, and the caches of its sequences.
  struct SourceTables {
    const ops::PagedRows* main;
    const ops::PagedRows* index;
    float* const* open;
  };
  // Rows of a table in host memory, for ops that are launched later.
  struct RowsToSend {
    int64_t engram;
    const StepPlan* plan;
    const ops::Weight* table;
    ops::Weight rows;
  };
  struct Bound {
    const StepPlan* plan;
    ops::StepRows rows;
    Var token;
    Var images;  // [I, D]
    Var window_rope, compressed_rope;
    Var logit_rows;
    Var classes;
    Var mean_pre;                          // [T, M] 1 / M; steps with context only
    std::vector<ops::WindowView> windows;  // per ring, without fresh rows
    std::vector<SourceTables> sources;     // per KV source
  };
  Bound bind(const StepPlan& plan, StepArrays& arrays);
  Status send(const RowsToSend& rows);

  void run(const Status& status) {
    if (status_.ok() && !status.ok()) {
      status_ = status;
    }
  }
  // Nothing is left to compute.
  bool skips() const { return replays_ || !status_.ok() || now_->rows.rows == 0; }
  // A tensor of the step. Out of memory is an error of the step, after which ops do nothing.
  Var make(DType dtype, const Shape& shape);
  Var rope_table(const Var& positions, const Var& frequency);
  const Var& rope(const LayerSpec& layer) const;
  // Longest visible entry list of any row at a ratio; more in a steady step.
  int64_t most_entries(int64_t ratio) const;
  void observe(const LayerSpec& layer, const char* what, const Var& rows);
  void observe(const std::string& full_name, const Var& rows);
  void observe_entries(const LayerSpec& layer,
                       const char* what,
                       ops::PagedRows ops::SourceView::* rows);
  void observe_stream(const LayerSpec& layer, const char* what, StreamVar& stream);
  void check_ids(const LayerSpec& layer,
                 const char* what,
                 const Var& ids,
                 const std::function<int64_t(int64_t)>& limit);
  std::string name(const LayerSpec& layer, const char* what) const;
  ObservedRows observed_rows() const { return {now_->plan->row_begin, now_->plan->start}; }
  const StepSequence& member(int32_t s) const {
    return sequences_[static_cast<size_t>(now_->plan->member[static_cast<size_t>(s)])];
  }

  const Model& model_;
  ops::OpContext& ctx_;
  DType act_;
  ops::Memory& device_;
  ops::HostRows& host_rows_;
  Arena& memory_;
  std::span<const StepSequence> sequences_;
  Observer* observer_;
  // Sizes of launches are rounded up, so that step after step has the same.
  bool steady_;
  bool replays_ = false;
  bool sends_later_ = false;
  std::vector<RowsToSend> to_send_;
  int64_t pages_ = 0;  // room of every page table
  Var window_frequency_, compressed_frequency_;
  Status status_;

  std::vector<Bound> bound_;
  const Bound* encoder_ = nullptr;
  const Bound* decoder_ = nullptr;  // the same unless a replay leaves rows out
  const Bound* now_ = nullptr;      // of the layer that runs
  Var first_pre_;
  std::vector<HashTables> hashes_;        // per Engram layer
  std::map<int64_t, RatioPlan> ratios_;   // of the encoder's plan
  std::vector<ops::WindowView> windows_;  // per layer, then per draft stage
  std::vector<ops::OpenGroupView> open_groups_;
};

}  // namespace cachalot::model
