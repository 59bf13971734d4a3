#include "model/step.h"

#include <algorithm>
#include <limits>
#include <map>

#include "base/format.h"
#include "model/infer_exec.h"
#include "model/step_arrays.h"
#include "ops/op_graph.h"

namespace cachalot::model {
namespace {

bool is_image(std::span<const uint8_t> image, size_t i) {
  return !image.empty() && image[i] != 0;
}

// Refuses what an op could not: ids outside of the vocabulary, positions beyond the context.
Status check_sequence(const ModelConfig& config,
                      Precision precision,
                      const StepSequence& sequence) {
  const auto n = static_cast<int64_t>(sequence.tokens.size());
  if (n == 0) {
    return invalid("a step sequence has no tokens");
  }
  CACHALOT_CHECK(sequence.view->length >= sequence.replay.encoder_from &&
                     sequence.replay.decoder_from >= sequence.replay.encoder_from,
                 sequence.view->length,
                 sequence.replay.encoder_from,
                 sequence.replay.decoder_from);
  if (!sequence.image.empty() && sequence.image.size() != sequence.tokens.size()) {
    return invalid("the image mask has {} entries for {} tokens", sequence.image.size(), n);
  }
  const int64_t images = std::ranges::count_if(sequence.image, [](uint8_t i) { return i != 0; });
  const TensorView& rows = sequence.image_rows;
  if (images != (rows.empty() ? 0 : rows.dim(0)) ||
      (images > 0 && (rows.shape != Shape{images, config.hidden_size} ||
                      rows.dtype != activation_dtype(precision) || rows.device != Device::kCpu))) {
    return invalid("the image rows are {} {} for {} image positions of width {}",
                   dtype_name(rows.dtype),
                   to_string(rows.shape),
                   images,
                   config.hidden_size);
  }
  if (sequence.view->length + n > config.max_position_embeddings) {
    return error(Code::kOutOfRange,
                 "{} tokens exceed max_position_embeddings {}",
                 sequence.view->length + n,
                 config.max_position_embeddings);
  }
  for (int32_t token : sequence.tokens) {
    if (token < 0 || token >= config.vocab_size) {
      return invalid("token id {} is outside of the vocabulary of {}", token, config.vocab_size);
    }
  }
  return {};
}

// Whether the caches of a step hold the drafter's rings; all or none must.
bool have_draft_rings(const Model& model, std::span<const StepSequence> sequences) {
  const size_t layers = model.layers.size(), stages = model.draft.size();
  const bool context = stages > 0 && sequences[0].view->rings.size() > layers;
  for (const StepSequence& sequence : sequences) {
    const size_t rings = sequence.view->rings.size();
    CACHALOT_CHECK(rings == (context ? layers + stages : layers), rings, layers, stages);
  }
  return context;
}

// The block of every sequence: its anchor, then noise.
StepPlan make_draft_plan(const ModelConfig& c, std::span<const StepSequence> sequences) {
  StepPlan plan{.kind = StepKind::kDraft};
  for (size_t s = 0; s < sequences.size(); ++s) {
    const auto start = static_cast<int32_t>(sequences[s].view->length);
    const auto member = static_cast<int32_t>(s);
    plan.member.push_back(member);
    plan.first.push_back(0);
    plan.row_begin.push_back(static_cast<int32_t>(plan.rows));
    plan.start.push_back(start);
    // The context has the rows of the decoder layers.
    plan.floor.push_back(
        static_cast<int32_t>(std::max(sequences[s].replay.decoder_from, sequences[s].draft_from)));
    for (int32_t i = 0; i < c.dspark_block_size; ++i) {
      plan.token.push_back(i == 0 ? sequences[s].tokens[0]
                                  : static_cast<int32_t>(c.dspark_noise_token_id));
      plan.position.push_back(start + i);
      plan.sequence.push_back(member);
      plan.is_image.push_back(0);
      plan.logit_rows.push_back(static_cast<int32_t>(plan.rows++));
    }
  }
  plan.row_begin.push_back(static_cast<int32_t>(plan.rows));
  return plan;
}

// The rows that run through the encoder layers, or those that also run through the decoder layers.
StepPlan make_plan(const Model& model,
                   StepKind kind,
                   std::span<const StepSequence> sequences,
                   bool decoder) {
  const ModelConfig& c = model.config;
  StepPlan plan{.kind = kind};
  for (const LayerSpec& layer : model.layers) {
    if (layer.ratio > 0) {
      plan.groups[layer.ratio];
    }
  }
  int32_t image_row = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const StepSequence& sequence = sequences[s];
    const auto n = static_cast<int64_t>(sequence.tokens.size());
    const int64_t start = sequence.view->length;
    const int64_t first =
        decoder ? std::clamp<int64_t>(sequence.replay.decoder_from - start, 0, n) : 0;
    if (first == n) {
      continue;
    }
    const auto member = static_cast<int32_t>(plan.member.size());
    plan.member.push_back(static_cast<int32_t>(s));
    plan.first.push_back(static_cast<int32_t>(first));
    plan.row_begin.push_back(static_cast<int32_t>(plan.rows));
    plan.start.push_back(static_cast<int32_t>(start + first));
    plan.floor.push_back(static_cast<int32_t>(decoder ? sequence.replay.decoder_from
                                                      : sequence.replay.encoder_from));
    std::vector<int32_t> classes;  // look-back and all rows of the step
    if (!model.engram.empty()) {
      classes = sequence.view->lookback;
    }
    for (int64_t i = 0; i < n; ++i) {
      const int32_t token = sequence.tokens[static_cast<size_t>(i)];
      const bool image = is_image(sequence.image, static_cast<size_t>(i));
      if (!model.engram.empty()) {
        classes.push_back(image ? -1 : model.token_class[static_cast<size_t>(token)]);
      }
      if (i < first) {
        continue;
      }
      const int64_t p = start + i;
      const auto row = static_cast<int32_t>(plan.rows);
      plan.token.push_back(image ? -1 - image_row++ : token);
      plan.position.push_back(static_cast<int32_t>(p));
      plan.sequence.push_back(member);
      plan.is_image.push_back(image ? 1 : 0);
      for (auto& [ratio, groups] : plan.groups) {
        if ((p + 1) % ratio == 0 && p >= sequence.replay.stored) {
          const int64_t entry = (p + 1) / ratio - 1;
          groups.row.push_back(row);
          groups.sequence.push_back(member);
          groups.entry.push_back(static_cast<int32_t>(entry));
          groups.position.push_back(static_cast<int32_t>(entry * ratio));
        }
      }
      if (!sequence.no_logits && (sequence.all_logits || i + 1 == n)) {
        plan.logit_rows.push_back(row);
      }
      ++plan.rows;
    }
    plan.classes.insert(
        plan.classes.end(), classes.begin() + (classes.empty() ? 0 : first), classes.end());
    if (!decoder && !sequence.image_rows.empty()) {
      const auto* rows = static_cast<const uint8_t*>(sequence.image_rows.data);
      plan.image_rows.insert(plan.image_rows.end(), rows, rows + sequence.image_rows.bytes());
    }
  }
  plan.row_begin.push_back(static_cast<int32_t>(plan.rows));
  CACHALOT_CHECK(plan.rows <= std::numeric_limits<int32_t>::max(), plan.rows, c.vocab_size);
  return plan;
}

// A step of few rows per sequence, all of which run through all layers: its launches can be those
// of a step before.
bool is_steady(const StepPlan& encoder, const StepPlan& decoder) {
  constexpr int64_t kMostRows = 1024, kMostRowsEach = 16;
  return encoder.rows <= kMostRows &&
         encoder.rows <= kMostRowsEach * static_cast<int64_t>(encoder.member.size()) &&
         encoder.rows == decoder.rows && encoder.floor == decoder.floor;
}

// As many groups in every step of as many rows.
void pad_groups(StepPlan& plan) {
  for (auto& [ratio, groups] : plan.groups) {
    while (static_cast<int64_t>(groups.row.size()) < plan.rows) {
      groups.row.push_back(0);
      groups.sequence.push_back(0);
      groups.entry.push_back(-1);
      groups.position.push_back(0);
    }
  }
}

// Tensors of one step on a device, and the temporaries of its ops.
constexpr int64_t kDeviceStepBytes = int64_t{6} << 30;
constexpr int64_t kDeviceScratchBytes = int64_t{2} << 30;
// Shapes of steps whose graphs are kept.
constexpr size_t kMostGraphs = 64;

}  // namespace

std::vector<int32_t> engram_lookback(const Model& model,
                                     std::span<const int32_t> tokens,
                                     std::span<const uint8_t> image) {
  CACHALOT_CHECK(image.empty() || image.size() == tokens.size(), image.size(), tokens.size());
  if (model.engram.empty()) {
    return {};
  }
  const auto back = static_cast<size_t>(model.config.engram_max_ngram_size - 1);
  std::vector<int32_t> classes(back, -1);
  for (size_t i = 0; i < std::min(back, tokens.size()); ++i) {
    const size_t last = tokens.size() - 1 - i;
    classes[back - 1 - i] =
        is_image(image, last) ? -1 : model.token_class[static_cast<size_t>(tokens[last])];
  }
  return classes;
}

struct StepRunner::State {
  State(const Model& m, const ops::OpContext& c, Precision p, ops::Memory& d)
      : model(m), context(c), precision(p), device(d), host_rows(d, c.pool) {}

  const Model& model;
  ops::OpContext context;
  Precision precision;
  ops::Memory& device;
  ops::HostRows host_rows;
  ops::Buffer memory_block, scratch_block;  // of a device
  Arena memory;                             // the step's tensors
  Arena scratch;                            // the ops' temporaries
  StepPlan plan, decoder_plan;
  std::vector<StepSequence> sequences;
  std::vector<float> logits;        // of a device
  std::vector<float> confidence;    // of a device
  std::vector<uint8_t> top;         // of a device: what top_logits() found
  std::unique_ptr<InferExec> exec;  // of the last step; null: nothing to commit
  Draft<TensorView> block;          // of the last draft; empty: none
  int64_t drawn = 0;                // positions of it that next_draft() gave
  int64_t launches = 0;             // of the last step's graph
  // By InferExec::shape(); null: such a step has run once, op by op.
  std::map<std::vector<int64_t>, std::unique_ptr<ops::OpGraph>> graphs;

  // Whether the launches of a step with these plans are worth recording.
  bool records(const StepPlan& encoder, const StepPlan& decoder, const Observer* observer) const {
    return context.backend == ops::Backend::kCuda && observer == nullptr &&
           context.timer == nullptr && is_steady(encoder, decoder) && encoder.image_rows.empty();
  }

  // Calls `body`, which runs a step of `of`: op by op when its shape is new. The second time the
  // ops are recorded, and launched as a graph from then on.
  template <class Body>
  Status run_body(InferExec& of, bool recorded, const Body& body) {
    const auto all = [&] {
      of.begin();
      body();
      return of.status();
    };
    launches = 0;
    if (!recorded) {
      return all();
    }
    const auto [entry, is_new] = graphs.try_emplace(of.shape());
    if (is_new) {
      if (graphs.size() > kMostGraphs) {
        graphs.clear();
      }
      return all();
    }
    std::unique_ptr<ops::OpGraph>& graph = entry->second;
    if (graph == nullptr) {
      of.record();
      CACHALOT_TRY(graph, ops::record_ops(context, all));
    } else {
      of.replay();
      CACHALOT_RETURN_IF_ERROR(all());
    }
    CACHALOT_RETURN_IF_ERROR(of.send_rows());
    launches = graph->kernels();
    return graph->launch(context.stream);
  }

  // Drops what the last step or draft left and takes over its memory.
  void restart(std::span<const StepSequence> next) {
    exec.reset();
    block = {};
    memory.reset();
    scratch.reset();
    sequences.assign(next.begin(), next.end());
  }

  // `view` in host memory; `copy` holds the values of a device.
  Result<TensorView> on_host(const TensorView& view, std::vector<float>& copy) const {
    if (device.device() == Device::kCpu) {
      return view;
    }
    copy.resize(static_cast<size_t>(view.shape.elements()));
    CACHALOT_RETURN_IF_ERROR(device.read(copy.data(), view.data, view.bytes(), context.stream));
    return TensorView(copy.data(), DType::kF32, view.shape);
  }
};

Result<std::unique_ptr<StepRunner>> StepRunner::create(const Model& model,
                                                       ops::OpContext context,
                                                       Precision precision) {
  CACHALOT_TRY(ops::Memory* const device, ops::backend_memory(context.backend));
  auto state = std::make_unique<State>(model, context, precision, *device);
  if (device->device() != Device::kCpu) {
    CACHALOT_TRY(state->memory_block, ops::Buffer::allocate(*device, kDeviceStepBytes));
    CACHALOT_TRY(state->scratch_block, ops::Buffer::allocate(*device, kDeviceScratchBytes));
    state->memory = Arena(state->memory_block.data(), kDeviceStepBytes, device->device());
    state->scratch = Arena(state->scratch_block.data(), kDeviceScratchBytes, device->device());
  }
  state->context.scratch = &state->scratch;
  return std::unique_ptr<StepRunner>(new StepRunner(std::move(state)));
}

StepRunner::StepRunner(std::unique_ptr<State> state) : state_(std::move(state)) {}

StepRunner::~StepRunner() = default;

int64_t StepRunner::launches() const {
  return state_->launches;
}

void StepRunner::set_timer(ops::OpTimer* timer) {
  state_->context.timer = timer;
}

Result<TensorView> StepRunner::run(std::span<const StepSequence> sequences,
                                   Observer* observer,
                                   bool draft_context) {
  State& s = *state_;
  s.exec.reset();
  for (const StepSequence& sequence : sequences) {
    CACHALOT_RETURN_IF_ERROR(check_sequence(s.model.config, s.precision, sequence));
  }
  s.restart(sequences);
  const bool extends = have_draft_rings(s.model, s.sequences) && draft_context;
  const StepKind kind = extends ? StepKind::kTargetWithContext : StepKind::kTarget;
  s.plan = make_plan(s.model, kind, s.sequences, false);
  s.decoder_plan = make_plan(s.model, kind, s.sequences, true);
  const bool recorded = s.records(s.plan, s.decoder_plan, observer);
  if (recorded) {
    pad_groups(s.plan);
  }
  s.exec = std::make_unique<InferExec>(s.model,
                                       s.context,
                                       s.precision,
                                       s.device,
                                       s.host_rows,
                                       s.memory,
                                       s.plan,
                                       s.decoder_plan,
                                       s.sequences,
                                       observer,
                                       recorded);
  TensorView logits;
  const Status status = s.run_body(*s.exec, recorded, [&] {
    logits = extends ? forward_with_context(*s.exec, s.model) : forward(*s.exec, s.model);
  });
  if (!status.ok()) {
    s.exec.reset();
    return status;
  }
  return logits;
}

Result<TopLogits> StepRunner::top_logits(const TensorView& logits,
                                         int64_t k,
                                         std::span<const float> temperature) {
  State& s = *state_;
  const int64_t n = logits.dim(0), bytes = n * 8 * (k + 1);
  CACHALOT_CHECK(n == static_cast<int64_t>(temperature.size()), n, temperature.size());
  StepArrays arrays(s.memory, s.device, s.context.stream);
  const TensorView temperatures =
      arrays.add(std::vector<float>(temperature.begin(), temperature.end()), {n});
  CACHALOT_RETURN_IF_ERROR(arrays.flush());
  if (!s.memory.fits(bytes)) {
    return error(Code::kResourceExhausted, "the step's memory has no room for {} best logits", k);
  }
  // One block, so that one copy brings it all.
  auto* const block = static_cast<uint8_t*>(s.memory.allocate_bytes(bytes));
  const auto views = [&](uint8_t* at, Device where) {
    return TopLogits{.value = {at, DType::kF32, {n, k}, where},
                     .id = {at + 4 * n * k, DType::kI32, {n, k}, where},
                     .mass = {at + 8 * n * k, DType::kF32, {n, 2}, where}};
  };
  const TopLogits top = views(block, s.device.device());
  CACHALOT_RETURN_IF_ERROR(ops::top_logits(s.context,
                                           {.logits = logits,
                                            .temperature = temperatures,
                                            .value = top.value,
                                            .id = top.id,
                                            .mass = top.mass}));
  if (s.device.device() == Device::kCpu) {
    return top;
  }
  s.top.resize(static_cast<size_t>(bytes));
  CACHALOT_RETURN_IF_ERROR(s.device.read(s.top.data(), block, bytes, s.context.stream));
  return views(s.top.data(), Device::kCpu);
}

Result<TensorView> StepRunner::on_host(const TensorView& logits) {
  return state_->on_host(logits, state_->logits);
}

Status StepRunner::draft(std::span<const StepSequence> sequences, Observer* observer) {
  State& s = *state_;
  s.restart(sequences);
  for (const StepSequence& sequence : sequences) {
    CACHALOT_RETURN_IF_ERROR(check_sequence(s.model.config, s.precision, sequence));
    CACHALOT_CHECK(sequence.tokens.size() == 1, sequence.tokens.size());
    CACHALOT_CHECK(
        sequence.draft_from <= sequence.view->length, sequence.draft_from, sequence.view->length);
  }
  CACHALOT_CHECK(have_draft_rings(s.model, s.sequences), s.model.draft.size());
  s.plan = make_draft_plan(s.model.config, s.sequences);
  const bool recorded = s.records(s.plan, s.plan, observer);
  InferExec exec(s.model,
                 s.context,
                 s.precision,
                 s.device,
                 s.host_rows,
                 s.memory,
                 s.plan,
                 s.plan,
                 s.sequences,
                 observer,
                 recorded);
  Draft<TensorView> block;
  CACHALOT_RETURN_IF_ERROR(
      s.run_body(exec, recorded, [&] { block = model::draft(exec, s.model); }));
  s.block = block;
  s.drawn = 0;
  return {};
}

Result<DraftLogits> StepRunner::next_draft(std::span<const int32_t> previous) {
  State& s = *state_;
  const ModelConfig& c = s.model.config;
  const DraftWeights& w = s.model.weights.draft;
  const auto n = static_cast<int64_t>(s.sequences.size());
  CACHALOT_CHECK(!s.block.hidden.empty() && s.drawn < c.dspark_block_size, s.drawn);
  CACHALOT_CHECK(previous.size() == s.sequences.size(), previous.size(), n);
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < n; ++i) {
    rows.push_back(static_cast<int32_t>(i * c.dspark_block_size + s.drawn));
  }
  ++s.drawn;
  StepArrays arrays(s.memory, s.device, s.context.stream);
  ops::DraftHeadArgs args{
      .select = arrays.add(rows),
      .previous = arrays.add(std::vector<int32_t>(previous.begin(), previous.end())),
      .x = s.block.hidden,
      .base = s.block.base,
      .embed = w.markov_embed,
      .head = w.markov_head,
      .proj = w.confidence};
  CACHALOT_RETURN_IF_ERROR(arrays.flush());
  if (!s.memory.fits(n * (c.vocab_size + 1) * 4)) {
    return error(Code::kResourceExhausted, "the step's memory has no room for {} draft rows", n);
  }
  args.logits = s.memory.allocate(DType::kF32, {n, c.vocab_size});
  args.confidence = s.memory.allocate(DType::kF32, {n});
  CACHALOT_RETURN_IF_ERROR(ops::draft_head(s.context, args));
  DraftLogits result;
  result.logits = args.logits;
  CACHALOT_TRY(result.confidence, s.on_host(args.confidence, s.confidence));
  return result;
}

Status StepRunner::commit(std::span<const int32_t> accepted) {
  State& s = *state_;
  if (s.exec == nullptr) {
    return error(Code::kFailedPrecondition, "commit without a step");
  }
  CACHALOT_CHECK(accepted.size() == s.sequences.size(), accepted.size(), s.sequences.size());
  StepArrays arrays(s.memory, s.device, s.context.stream);
  const auto counts = [&](const StepPlan& plan) {
    std::vector<int32_t> rows;
    for (size_t i = 0; i < plan.member.size(); ++i) {
      rows.push_back(std::max(0, accepted[static_cast<size_t>(plan.member[i])] - plan.first[i]));
    }
    return arrays.add(rows);
  };
  const TensorView encoder_counts = counts(s.plan), decoder_counts = counts(s.decoder_plan);
  CACHALOT_RETURN_IF_ERROR(arrays.flush());
  const auto commit_layers =
      [&](bool decoder, const TensorView& rows, std::span<const ops::OpenGroupView> groups) {
        std::vector<ops::WindowView> windows;
        const auto add = [&](std::span<const LayerSpec> layers) {
          for (const LayerSpec& layer : layers) {
            if (layer.decoder == decoder) {
              windows.push_back(s.exec->window(layer.index));
            }
          }
        };
        add(s.model.layers);
        if (s.plan.kind == StepKind::kTargetWithContext) {
          add(s.model.draft);
        }
        return ops::commit(s.context,
                           {.rows = s.exec->step_rows(decoder),
                            .windows = windows,
                            .groups = groups,
                            .accepted = rows});
      };
  CACHALOT_RETURN_IF_ERROR(commit_layers(false, encoder_counts, s.exec->open_groups()));
  CACHALOT_RETURN_IF_ERROR(commit_layers(true, decoder_counts, {}));
  for (size_t i = 0; i < s.sequences.size(); ++i) {
    ops::SequenceView& view = *s.sequences[i].view;
    const int64_t n = accepted[i];
    CACHALOT_CHECK(n >= 0 && n <= static_cast<int64_t>(s.sequences[i].tokens.size()), n);
    if (n == 0) {
      continue;
    }
    if (!s.model.engram.empty()) {
      const auto back = static_cast<int64_t>(view.lookback.size());
      const int32_t* classes =
          s.plan.classes.data() + s.plan.row_begin[i] + static_cast<int64_t>(i) * back;
      std::vector<int32_t> next(classes + n, classes + n + back);
      view.lookback = std::move(next);
    }
    view.length += n;
  }
  s.exec.reset();
  return {};
}

}  // namespace cachalot::model
