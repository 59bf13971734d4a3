#include "model/infer_exec.h"

#include <algorithm>
#include <cstring>

#include "base/format.h"
#include "base/math.h"
#include "quant/block.h"

namespace cachalot::model {
namespace {

// Units of a steady step's page tables and entry lists.
constexpr int64_t kSteadyPages = 32, kSteadyEntries = 4096;

}  // namespace

InferExec::InferExec(const Model& model,
                     ops::OpContext& context,
                     Precision precision,
                     ops::Memory& device,
                     ops::HostRows& host_rows,
                     Arena& memory,
                     const StepPlan& encoder,
                     const StepPlan& decoder,
                     std::span<const StepSequence> sequences,
                     Observer* observer,
                     bool steady)
    : model_(model),
      ctx_(context),
      act_(activation_dtype(precision)),
      device_(device),
      host_rows_(host_rows),
      memory_(memory),
      sequences_(sequences),
      observer_(observer),
      steady_(steady) {
  const ModelConfig& c = model.config;
  StepArrays arrays(memory, device, context.stream);
  // The plans also differ if a replay's floors do.
  const bool replays = decoder.rows != encoder.rows || decoder.floor != encoder.floor;
  bound_.push_back(bind(encoder, arrays));
  if (replays) {
    bound_.push_back(bind(decoder, arrays));
  }
  encoder_ = now_ = &bound_.front();
  decoder_ = &bound_.back();
  // The first site collapses onto stream 0.
  std::vector<float> pre(static_cast<size_t>(encoder.rows * c.hc_mult), 0.0f);
  for (size_t i = 0; i < pre.size(); i += static_cast<size_t>(c.hc_mult)) {
    pre[i] = 1.0f;
  }
  first_pre_ = arrays.add(pre, {encoder.rows, c.hc_mult});
  const int64_t half = c.qk_rope_head_dim / 2;
  window_frequency_ = arrays.add(model.window_frequency, {half});
  compressed_frequency_ = arrays.add(model.compressed_frequency, {half});
  for (const auto& [ratio, groups] : encoder.groups) {
    ratios_[ratio] = {.groups = {.ratio = ratio,
                                 .groups = static_cast<int64_t>(groups.row.size()),
                                 .row = arrays.add(groups.row),
                                 .sequence = arrays.add(groups.sequence),
                                 .entry = arrays.add(groups.entry)},
                      .position = arrays.add(groups.position)};
  }
  if (!model.engram.empty()) {
    const int64_t n = c.engram_max_ngram_size, heads = c.engram_n_heads;
    for (const EngramConstants& constants : model.engram) {
      hashes_.push_back({.multiplier = arrays.add(constants.multiplier, {n}),
                         .prime = arrays.add(constants.prime, {n - 1, heads}),
                         .offset = arrays.add(constants.offset, {n - 1, heads})});
    }
  }
  for (size_t ring = 0; ring < encoder_->windows.size(); ++ring) {
    const bool last = ring >= model.layers.size() || model.layers[ring].decoder;
    windows_.push_back((last ? *decoder_ : *encoder_).windows[ring]);
  }
  run(arrays.flush());
}

void InferExec::begin() {
  for (Bound& bound : bound_) {
    bound.window_rope = rope_table(bound.rows.position, window_frequency_);
    bound.compressed_rope = rope_table(bound.rows.position, compressed_frequency_);
  }
  for (auto& [ratio, group] : ratios_) {
    group.rope = rope_table(group.position, compressed_frequency_);
  }
}

std::vector<int64_t> InferExec::shape() const {
  const StepPlan& plan = *encoder_->plan;
  std::vector<int64_t> shape{static_cast<int64_t>(plan.kind),
                             plan.rows,
                             encoder_->rows.sequences,
                             static_cast<int64_t>(plan.logit_rows.size()),
                             pages_};
  for (const auto& [ratio, groups] : ratios_) {
    shape.push_back(groups.groups.groups);
    shape.push_back(most_entries(ratio));
  }
  return shape;
}

InferExec::Bound InferExec::bind(const StepPlan& plan, StepArrays& arrays) {
  const ModelConfig& c = model_.config;
  const auto s = static_cast<int64_t>(plan.member.size());
  Bound bound{.plan = &plan,
              .rows = {.rows = plan.rows,
                       .sequences = s,
                       .position = arrays.add(plan.position),
                       .sequence = arrays.add(plan.sequence),
                       .row_begin = arrays.add(plan.row_begin),
                       .start = arrays.add(plan.start),
                       .is_image = arrays.add(plan.is_image)},
              .token = arrays.add(plan.token),
              .images = {},
              .window_rope = {},
              .compressed_rope = {},
              .logit_rows = arrays.add(plan.logit_rows),
              .classes = arrays.add(plan.classes),
              .mean_pre = {},
              .windows = {},
              .sources = {}};
  if (!plan.image_rows.empty()) {
    bound.images = arrays.add(plan.image_rows);
    const int64_t row_bytes = c.hidden_size * dtype_bytes(act_);
    bound.images.dtype = act_;
    bound.images.shape = {bound.images.dim(0) / row_bytes, c.hidden_size};
  }
  const auto view = [&](int32_t member) -> const ops::SequenceView& {
    return *sequences_[static_cast<size_t>(member)].view;
  };
  const bool drafts = plan.kind == StepKind::kDraft;
  if (plan.kind == StepKind::kTargetWithContext) {
    const std::vector<float> mean(static_cast<size_t>(plan.rows * c.hc_mult),
                                  1.0f / static_cast<float>(c.hc_mult));
    bound.mean_pre = arrays.add(mean, {plan.rows, c.hc_mult});
  }
  const Var floor = arrays.add(plan.floor);
  const size_t stages = plan.kind == StepKind::kTarget ? 0 : model_.draft.size();
  for (size_t ring = 0; ring < model_.layers.size() + stages; ++ring) {
    std::vector<uint8_t*> rings;
    for (int32_t member : plan.member) {
      rings.push_back(view(member).rings[ring]);
    }
    bound.windows.push_back({.window = c.sliding_window,
                             .block = drafts ? c.dspark_block_size : 0,
                             .rings = arrays.add(rings.data(), s),
                             .fresh = {},
                             .floor = floor});
  }
  if (steady_) {
    for (int32_t member : plan.member) {
      for (const ops::SourceView& source : view(member).sources) {
        pages_ = std::max(pages_, round_up(source.page_count, kSteadyPages));
      }
    }
  }
  // Draft stages read no compressed rows.
  for (size_t source = 0; !drafts && source < c.kv_source_layer_ids.size(); ++source) {
    std::vector<ops::PagedRows> main, index;
    std::vector<float*> open;
    for (int32_t member : plan.member) {
      const ops::SourceView& from = view(member).sources[source];
      for (auto [paged, to] : {std::pair(&from.main, &main), std::pair(&from.index, &index)}) {
        ops::PagedRows rows = *paged;
        rows.pages = arrays.add(rows.pages, from.page_count, pages_);
        to->push_back(rows);
      }
      open.push_back(from.open_group);
    }
    bound.sources.push_back(
        {arrays.add(main.data(), s), arrays.add(index.data(), s), arrays.add(open.data(), s)});
  }
  return bound;
}

// The decoder's rows of a sequence are the last ones of its rows in the step.
void InferExec::enter_decoder(SiteVar& site) {
  now_ = decoder_;
  if (decoder_ == encoder_ || !status_.ok()) {
    return;
  }
  const StepPlan& from = *encoder_->plan;
  const StepPlan& to = *decoder_->plan;
  for (Var* var : {&site.x, &site.pre, &site.post, &site.comb, &site.u}) {
    Shape shape = var->shape;
    shape.extent[0] = to.rows;
    const Var kept = make(var->dtype, shape);
    const int64_t row_bytes = var->bytes() / from.rows;
    for (size_t s = 0; s < to.member.size() && kept.data != nullptr && status_.ok(); ++s) {
      const int64_t source = from.row_begin[static_cast<size_t>(to.member[s])] + to.first[s];
      run(device_.copy(static_cast<uint8_t*>(kept.data) + to.row_begin[s] * row_bytes,
                       static_cast<const uint8_t*>(var->data) + source * row_bytes,
                       (to.row_begin[s + 1] - to.row_begin[s]) * row_bytes,
                       ctx_.stream));
    }
    *var = kept;
  }
}

TensorView InferExec::make(DType dtype, const Shape& shape) {
  const int64_t bytes = shape.elements() * dtype_bytes(dtype);
  if (!memory_.fits(bytes)) {
    run(error(Code::kResourceExhausted,
              "the step's memory has no room for {} more bytes; use a smaller --chunk",
              bytes));
    return {nullptr, dtype, shape, device_.device()};
  }
  return memory_.allocate(dtype, shape);
}

TensorView InferExec::rope_table(const Var& positions, const Var& frequency) {
  const Var table = make(DType::kF32, {positions.dim(0), frequency.dim(0), 2});
  if (status_.ok() && !replays_) {
    run(ops::rope_table(ctx_, {.position = positions, .frequency = frequency, .table = table}));
  }
  return table;
}

const TensorView& InferExec::rope(const LayerSpec& layer) const {
  return layer.ratio == 0 ? now_->window_rope : now_->compressed_rope;
}

int64_t InferExec::most_entries(int64_t ratio) const {
  int64_t most = 0;
  for (int32_t p : now_->plan->position) {
    most = std::max(most, (p + int64_t{1}) / ratio);
  }
  return steady_ ? round_up(most, kSteadyEntries) : most;
}

// Observation. -----------------------------------------------------------------------------------

std::string InferExec::name(const LayerSpec& layer, const char* what) const {
  return layer.stage < 0 ? fmt::format("layers.{}.{}", layer.index, what)
                         : fmt::format("mtp.{}.{}", layer.stage, what);
}

void InferExec::observe(const LayerSpec& layer, const char* what, const Var& rows) {
  if (observer_ != nullptr) {
    observe(name(layer, what), rows);
  }
}

void InferExec::observe(const std::string& full_name, const Var& rows) {
  if (observer_ == nullptr || skips()) {
    return;
  }
  if (device_.device() == Device::kCpu) {
    observer_->visit(full_name, rows, observed_rows());
    return;
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(rows.bytes()));
  run(device_.read(bytes.data(), rows.data, rows.bytes(), ctx_.stream));
  const Var copy(bytes.data(), rows.dtype, rows.shape);
  observer_->visit(full_name, copy, observed_rows());
  run(device_.write(rows.data, bytes.data(), rows.bytes(), ctx_.stream));
}

// Ids that an observer left behind must be -1 (where that is allowed) or below the row's limit.
void InferExec::check_ids(const LayerSpec& layer,
                          const char* what,
                          const Var& ids,
                          const std::function<int64_t(int64_t)>& limit) {
  const int64_t width = ids.dim(1), lowest = std::strcmp(what, "selected") == 0 ? -1 : 0;
  std::vector<int32_t> values(static_cast<size_t>(ids.shape.elements()));
  run(device_.read(values.data(), ids.data, ids.bytes(), ctx_.stream));
  for (int64_t i = 0; i < ids.shape.elements(); ++i) {
    const int32_t id = values[static_cast<size_t>(i)];
    if (id < lowest || id >= limit(i / width)) {
      run(invalid("prescribed '{}': row {} has id {}, the limit is {}",
                  name(layer, what),
                  i / width,
                  id,
                  limit(i / width)));
      return;
    }
  }
}

// Streams are shown expanded; what the observer leaves there is what the next site reads.
void InferExec::observe_stream(const LayerSpec& layer, const char* what, StreamVar& stream) {
  if (observer_ != nullptr && !skips()) {
    hc_expand(stream);
    observe(layer, what, stream.x);
  }
}

void InferExec::observe_engram(const LayerSpec& layer, Var& x) {
  observe(layer, "engram", x);
}
void InferExec::observe_attention_input(const LayerSpec& layer, const Var& u) {
  observe(layer, "attn_in", u);
}
void InferExec::observe_attention(const LayerSpec& layer, StreamVar& stream) {
  observe(layer, "attn_out", stream.pending.y);
  observe_stream(layer, "attn", stream);
}
void InferExec::observe_ffn_input(const LayerSpec& layer, const Var& u) {
  observe(layer, "ffn_in", u);
}
void InferExec::observe_ffn(const LayerSpec& layer, StreamVar& stream) {
  observe(layer, "ffn_out", stream.pending.y);
  observe_stream(layer, "ffn", stream);
}

// Ops. -------------------------------------------------------------------------------------------

TensorView InferExec::embed(const ops::Weight& weight) {
  const Var x = make(act_, {now_->rows.rows, model_.config.hc_mult, model_.config.hidden_size});
  if (!skips()) {
    run(ops::embed(ctx_, {.token = now_->token, .weight = weight, .images = now_->images, .x = x}));
  }
  observe(now_->plan->kind == StepKind::kDraft ? "mtp.embed" : "embed", x);
  return x;
}

TensorView InferExec::first_pre() {
  return first_pre_;
}

TensorView InferExec::linear(Var x, const ops::Weight& w) {
  const Var y = make(act_, {x.dim(0), w.out});
  const ops::LinearTarget target{&w, y};
  if (!skips()) {
    run(ops::linear(ctx_, {.x = x, .targets = {&target, 1}}));
  }
  return y;
}

TensorView InferExec::linear_f32(Var x, const ops::Weight& w) {
  const Var y = make(DType::kF32, {x.dim(0), w.out});
  const ops::LinearTarget target{&w, y};
  if (!skips()) {
    run(ops::linear(ctx_, {.x = x, .targets = {&target, 1}}));
  }
  return y;
}

TensorView InferExec::linear_grouped(Var x, const ops::Weight& w) {
  const Var y = make(act_, {x.dim(0), w.out});
  const ops::LinearTarget target{&w, y};
  if (!skips()) {
    run(ops::linear(ctx_,
                    {.x = x,
                     .targets = {&target, 1},
                     .groups = model_.config.o_groups,
                     .quantize_input = false}));
  }
  return y;
}

std::pair<TensorView, TensorView> InferExec::linear_pair(Var x,
                                                         const ops::Weight& a,
                                                         const ops::Weight& b) {
  const std::array<ops::LinearTarget, 2> targets{
      ops::LinearTarget{&a, make(act_, {x.dim(0), a.out})},
      ops::LinearTarget{&b, make(act_, {x.dim(0), b.out})}};
  if (!skips()) {
    run(ops::linear(ctx_, {.x = x, .targets = targets}));
  }
  return {targets[0].y, targets[1].y};
}

void InferExec::hc_expand(StreamVar& stream) {
  if (stream.pending.y.empty()) {
    return;
  }
  const Var out = make(act_, stream.x.shape);
  if (!skips()) {
    run(ops::hc_expand(ctx_,
                       {.x = stream.x,
                        .pending = {stream.pending.y, stream.pending.post, stream.pending.comb},
                        .out = out}));
  }
  stream.x = out;
  stream.pending = {};
}

Site<TensorView> InferExec::hc_site(const StreamVar& stream,
                                    const HcWeights& w,
                                    const TensorView& norm) {
  const ModelConfig& c = model_.config;
  const int64_t t = now_->rows.rows, m = c.hc_mult;
  const SiteVar site{.x = stream.pending.y.empty() ? stream.x : make(act_, stream.x.shape),
                     .pre = make(DType::kF32, {t, m}),
                     .post = make(DType::kF32, {t, m}),
                     .comb = make(DType::kF32, {t, m, m}),
                     .u = make(act_, {t, c.hidden_size})};
  if (!skips()) {
    run(ops::hc_site(ctx_,
                     {.x = stream.x,
                      .pending = {stream.pending.y, stream.pending.post, stream.pending.comb},
                      .pre = stream.pre,
                      .fn = w.fn,
                      .base = w.base,
                      .scale = w.scale,
                      .norm = norm,
                      .rms_eps = static_cast<float>(c.rms_norm_eps),
                      .hc_eps = static_cast<float>(c.hc_eps),
                      .sinkhorn_iters = static_cast<int>(c.hc_sinkhorn_iters),
                      .x_out = site.x,
                      .pre_out = site.pre,
                      .post_out = site.post,
                      .comb_out = site.comb,
                      .u = site.u}));
  }
  return site;
}

std::pair<TensorView, TensorView> InferExec::qkv_finish(
    const LayerSpec& layer, Var t, const TensorView& q_norm, Var kv, const TensorView& kv_norm) {
  const Var r = make(act_, t.shape);
  const Var fresh = make(DType::kU8, {t.dim(0), quant::window_row_bytes(kv.dim(1))});
  if (!skips()) {
    run(ops::qkv_finish(ctx_,
                        {.t = t,
                         .q_norm = q_norm,
                         .kv = kv,
                         .kv_norm = kv_norm,
                         .rope = rope(layer),
                         .rms_eps = static_cast<float>(model_.config.rms_norm_eps),
                         .r = r,
                         .fresh = fresh}));
  }
  observe(layer, "window_codes", fresh);
  windows_[static_cast<size_t>(layer.index)].fresh = fresh;
  return {r, fresh};
}

TensorView InferExec::compress_pool(const LayerSpec& layer,
                                    Var kv,
                                    Var gate,
                                    const TensorView& norm) {
  const RatioPlan& ratio = ratios_.at(layer.ratio);
  const int64_t source = model_.source_slot(layer.index);
  if (layer.ratio == 2) {
    open_groups_.push_back({kv, gate, now_->sources[static_cast<size_t>(source)].open});
  }
  const Var latent = make(act_, {ratio.groups.groups, norm.dim(0)});
  if (!skips()) {
    run(ops::compress_pool(ctx_,
                           {.groups = ratio.groups,
                            .rows = now_->rows,
                            .kv = kv,
                            .gate = gate,
                            .open = now_->sources[static_cast<size_t>(source)].open,
                            .norm = norm,
                            .rms_eps = static_cast<float>(model_.config.rms_norm_eps),
                            .latent = latent}));
  }
  return latent;
}

void InferExec::compress_store(const LayerSpec& layer,
                               Var latent,
                               Var key,
                               const TensorView& k_norm) {
  const RatioPlan& ratio = ratios_.at(layer.ratio);
  const SourceTables& source = now_->sources[static_cast<size_t>(model_.source_slot(layer.index))];
  if (!skips()) {
    run(ops::compress_store(ctx_,
                            {.groups = ratio.groups,
                             .latent = latent,
                             .key = key,
                             .k_norm = k_norm,
                             .rope = ratio.rope,
                             .rms_eps = static_cast<float>(model_.config.rms_norm_eps),
                             .main = source.main,
                             .index = source.index}));
  }
  if (observer_ == nullptr || skips()) {
    return;
  }
  observe_entries(layer, "main_codes", &ops::SourceView::main);
  observe_entries(layer, "index_codes", &ops::SourceView::index);
}

// The rows that the closing groups appended, gathered from the pages.
void InferExec::observe_entries(const LayerSpec& layer,
                                const char* what,
                                ops::PagedRows ops::SourceView::* rows) {
  const auto source = static_cast<size_t>(model_.source_slot(layer.index));
  const auto rows_of = [&](int32_t s) -> const ops::PagedRows& {
    return member(s).view->sources[source].*rows;
  };
  const StepPlan::Groups& groups = now_->plan->groups.at(layer.ratio);
  const auto count = static_cast<int64_t>(groups.row.size());
  const int64_t bytes = rows_of(0).row_bytes;
  std::vector<uint8_t> memory(static_cast<size_t>(count * bytes));
  for (int64_t g = 0; g < count; ++g) {
    const auto index = static_cast<size_t>(g);
    run(device_.read(memory.data() + g * bytes,
                     rows_of(groups.sequence[index]).row(groups.entry[index]),
                     bytes,
                     ctx_.stream));
  }
  observer_->visit(
      name(layer, what), TensorView(memory.data(), DType::kU8, {count, bytes}), observed_rows());
}

void InferExec::index_select(const LayerSpec& layer, Var q, Var w, Published<Var>& published) {
  const ModelConfig& c = model_.config;
  const int64_t entries = most_entries(layer.ratio);
  const SourceTables& source =
      now_->sources[static_cast<size_t>(model_.source_slot(layer.kv_source))];
  ops::IndexSelectArgs args{
      .rows = now_->rows,
      .ratio = layer.ratio,
      .q = q,
      .w = w,
      .rope = rope(layer),
      .index = source.index,
      .candidate_block = c.candidate_block_size,
      .selected = make(DType::kI32, {now_->rows.rows, std::min(c.index_topk, entries)}),
      .entries_bound = entries};
  if (layer.publishes_candidates) {
    const int64_t blocks = ceil_div(entries, c.candidate_block_size);
    args.candidates_out =
        make(DType::kI32, {now_->rows.rows, std::min(c.candidate_topk_blocks, blocks)});
  } else if (layer.candidate_source >= 0) {
    args.candidates = published.candidates;
  }
  if (!skips()) {
    run(ops::index_select(ctx_, args));
  }
  if (layer.publishes_candidates) {
    published.candidates = args.candidates_out;
    observe(layer, "candidates", published.candidates);
  }
  published.selected = args.selected;
}

TensorView InferExec::attend(
    const LayerSpec& layer, Var q, Var window, const TensorView& sink, Var selected) {
  if (layer.ratio > 0 && observer_ != nullptr) {
    observe(layer, "selected", selected);
    check_ids(layer, "selected", selected, [&](int64_t row) {
      return (now_->plan->position[static_cast<size_t>(row)] + int64_t{1}) / layer.ratio;
    });
  }
  ops::AttendArgs args{.rows = now_->rows,
                       .q = q,
                       .rope = rope(layer),
                       .window = windows_[static_cast<size_t>(layer.index)],
                       .sink = sink,
                       .o = make(act_, q.shape)};
  args.window.fresh = window;
  if (layer.ratio > 0) {
    args.main = now_->sources[static_cast<size_t>(model_.source_slot(layer.kv_source))].main;
    args.selected = selected;
  }
  if (!skips()) {
    run(ops::attend(ctx_, args));
  }
  return args.o;
}

std::pair<TensorView, TensorView> InferExec::gate(const LayerSpec& layer,
                                                  Var u,
                                                  const MoeWeights& w) {
  const ModelConfig& c = model_.config;
  const Shape shape{now_->rows.rows, layer.experts_per_token};
  ops::GateArgs args{.rows = now_->rows,
                     .x = u,
                     .weight = w.gate,
                     .bias = w.bias,
                     .bias_vl = w.bias_vl,
                     .temperature = static_cast<float>(c.gate_temp),
                     .scale = static_cast<float>(c.routed_scaling_factor),
                     .experts = make(DType::kI32, shape),
                     .weights = make(DType::kF32, shape)};
  const Var forced = make(DType::kI32, shape);
  if (observer_ != nullptr && !skips()) {
    // The own choice is shown before a prescribed one replaces it.
    run(ops::gate(ctx_, args));
    observe(layer, "experts", args.experts);
    std::vector<int32_t> ids(static_cast<size_t>(shape.elements()));
    if (observer_->forced_experts(
            layer.index, TensorView(ids.data(), DType::kI32, shape), observed_rows())) {
      run(device_.write(forced.data, ids.data(), forced.bytes(), ctx_.stream));
      check_ids(layer, "experts", forced, [&](int64_t) { return w.gate.out; });
      args.forced = forced;
    }
  }
  if (!skips()) {
    run(ops::gate(ctx_, args));
  }
  return {args.experts, args.weights};
}

TensorView InferExec::experts(Var u, Var ids, Var weights, const MoeWeights& w) {
  const Var y = make(act_, u.shape);
  if (!skips()) {
    run(ops::experts(ctx_,
                     {.x = u,
                      .experts = ids,
                      .weights = weights,
                      .routed = w.experts,
                      .shared = w.shared,
                      .limit = static_cast<float>(model_.config.swiglu_limit),
                      .y = y}));
  }
  return y;
}

TensorView InferExec::engram_gather(const LayerSpec& layer, const ops::Weight& table) {
  const HashTables& hash = hashes_[static_cast<size_t>(layer.engram)];
  const int64_t columns = hash.prime.shape.elements();
  const Var rows = make(act_, {now_->rows.rows, columns * table.in});
  if (table.values.device != device_.device()) {
    ops::Weight sent = table;
    sent.out = now_->rows.rows * columns;
    sent.values = make(table.values.dtype, {sent.out, table.in});
    if (!table.scales.empty()) {
      sent.scales = make(table.scales.dtype, {sent.out, table.scales.dim(1)});
    }
    if (status_.ok() && sent.out > 0) {
      to_send_.push_back({layer.engram, now_->plan, &table, sent});
      run(sends_later_ ? Status() : send_rows());
    }
    if (!skips()) {
      run(ops::engram_gather(ctx_, {.ids = {}, .table = sent, .e = rows}));
    }
    return rows;
  }
  const Var ids = make(DType::kI32, {now_->rows.rows, columns});
  if (!skips()) {
    run(ops::engram_hash(
        ctx_,
        {.rows = now_->rows,
         .classes = now_->classes,
         .multiplier = hash.multiplier,
         .prime = hash.prime,
         .offset = hash.offset,
         .blocked_class =
             model_.token_class[static_cast<size_t>(model_.config.engram_pad_token_id)],
         .ids = ids}));
  }
  if (!skips()) {
    run(ops::engram_gather(ctx_, {.ids = ids, .table = table, .e = rows}));
  }
  return rows;
}

Status InferExec::send_rows() {
  for (const RowsToSend& rows : to_send_) {
    CACHALOT_RETURN_IF_ERROR(send(rows));
  }
  to_send_.clear();
  return {};
}

Status InferExec::send(const RowsToSend& to_send) {
  const StepPlan& plan = *to_send.plan;
  const EngramConstants& constants = model_.engram[static_cast<size_t>(to_send.engram)];
  const int64_t n = model_.config.engram_max_ngram_size, heads = model_.config.engram_n_heads;
  std::vector<int32_t> ids(static_cast<size_t>(to_send.rows.out));
  const auto view = [](const auto& values, DType dtype, const Shape& shape) {
    return TensorView(const_cast<void*>(static_cast<const void*>(values.data())), dtype, shape);
  };
  const auto line = [&](const std::vector<int32_t>& values) {
    return view(values, DType::kI32, {static_cast<int64_t>(values.size())});
  };
  ops::OpContext host{.backend = ops::Backend::kCpu, .pool = ctx_.pool};
  CACHALOT_RETURN_IF_ERROR(ops::engram_hash(
      host,
      {.rows = {.rows = plan.rows,
                .sequences = static_cast<int64_t>(plan.member.size()),
                .position = line(plan.position),
                .sequence = line(plan.sequence),
                .row_begin = line(plan.row_begin),
                .start = line(plan.start),
                .is_image = view(plan.is_image, DType::kU8, {plan.rows})},
       .classes = line(plan.classes),
       .multiplier = view(constants.multiplier, DType::kI64, {n}),
       .prime = view(constants.prime, DType::kI64, {n - 1, heads}),
       .offset = view(constants.offset, DType::kI64, {n - 1, heads}),
       .blocked_class = model_.token_class[static_cast<size_t>(model_.config.engram_pad_token_id)],
       .ids = view(ids, DType::kI32, {plan.rows, (n - 1) * heads})}));
  return host_rows_.send(*to_send.table, ids, to_send.rows, ctx_.stream);
}

TensorView InferExec::engram_inject(Var x, Var kv, const EngramWeights& w) {
  const Var out = make(act_, x.shape);
  if (!skips()) {
    run(ops::engram_inject(ctx_,
                           {.rows = now_->rows,
                            .x = x,
                            .kv = kv,
                            .q_weight = w.q_weight,
                            .k_weight = w.k_weight,
                            .rms_eps = static_cast<float>(model_.config.rms_norm_eps),
                            .out = out}));
  }
  return out;
}

TensorView InferExec::tap(Var taps, const LayerSpec& layer, const StreamVar& stream) {
  const ModelConfig& c = model_.config;
  if (taps.empty()) {
    const auto count = static_cast<int64_t>(c.dspark_target_layer_ids.size());
    taps = make(act_, {now_->rows.rows, count * c.hidden_size});
  }
  if (!skips()) {
    run(ops::hc_collapse(ctx_,
                         {.x = stream.x,
                          .pending = {stream.pending.y, stream.pending.post, stream.pending.comb},
                          .pre = now_->mean_pre,
                          .column = layer.tap * c.hidden_size,
                          .out = taps}));
  }
  return taps;
}

TensorView InferExec::rms_norm(Var x, const TensorView& norm) {
  const Var y = make(act_, x.shape);
  if (!skips()) {
    run(ops::rms_norm(
        ctx_,
        {.x = x, .norm = norm, .rms_eps = static_cast<float>(model_.config.rms_norm_eps), .y = y}));
  }
  return y;
}

void InferExec::context_finish(const LayerSpec& stage, Var kv, const TensorView& kv_norm) {
  const Var fresh = make(DType::kU8, {kv.dim(0), quant::window_row_bytes(kv.dim(1))});
  if (!skips()) {
    run(ops::qkv_finish(ctx_,
                        {.kv = kv,
                         .kv_norm = kv_norm,
                         .rope = rope(stage),
                         .rms_eps = static_cast<float>(model_.config.rms_norm_eps),
                         .fresh = fresh}));
  }
  observe(stage, "context_codes", fresh);
  windows_[static_cast<size_t>(stage.index)].fresh = fresh;
}

TensorView InferExec::hc_collapse(const StreamVar& stream) {
  const Var out = make(act_, {now_->rows.rows, model_.config.hidden_size});
  if (!skips()) {
    run(ops::hc_collapse(ctx_,
                         {.x = stream.x,
                          .pending = {stream.pending.y, stream.pending.post, stream.pending.comb},
                          .pre = stream.pre,
                          .out = out}));
  }
  return out;
}

void InferExec::observe_draft_context(const Var& taps, const Var& features) {
  observe("mtp.taps", taps);
  observe("mtp.features", features);
}

void InferExec::observe_draft(const Var& hidden, const Var& base) {
  observe("mtp.hidden", hidden);
  observe("mtp.base_logits", base);
}

TensorView InferExec::head(const StreamVar& stream,
                           const TensorView& norm,
                           const ops::Weight& weight) {
  const Var logits =
      make(DType::kF32, {static_cast<int64_t>(now_->plan->logit_rows.size()), weight.out});
  if (!skips()) {
    run(ops::head(ctx_,
                  {.select = now_->logit_rows,
                   .x = stream.x,
                   .pending = {stream.pending.y, stream.pending.post, stream.pending.comb},
                   .pre = stream.pre,
                   .norm = norm,
                   .rms_eps = static_cast<float>(model_.config.rms_norm_eps),
                   .weight = weight,
                   .logits = logits}));
  }
  return logits;
}

}  // namespace cachalot::model
