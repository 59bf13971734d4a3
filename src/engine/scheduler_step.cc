// The scheduler's steps: which rows run, and what becomes of their logits.
#include <algorithm>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "engine/scheduler.h"

namespace cachalot::engine {
namespace {

// Gathers what the next rows of a sequence have of images into its `image_mask` and `image_rows`;
// the view is of the latter.
TensorView gather_images(Sequence& sequence) {
  const int64_t begin = sequence.length(), end = begin + sequence.rows;
  sequence.image_mask.clear();
  sequence.image_rows.clear();
  if (sequence.encoded.empty()) {
    return {};
  }
  TensorView rows;
  int64_t count = 0;
  for (size_t i = 0; i < sequence.images.size(); ++i) {
    const int64_t first = std::max(begin, sequence.images[i].begin);
    const int64_t last = std::min(end, sequence.images[i].end);
    if (first < last) {
      rows =
          sequence.encoded[i]->rows()->view().rows(first - sequence.images[i].begin, last - first);
      const auto* bytes = static_cast<const uint8_t*>(rows.data);
      sequence.image_rows.insert(sequence.image_rows.end(), bytes, bytes + rows.bytes());
      count += last - first;
    }
  }
  if (count == 0) {
    return {};
  }
  sequence.image_mask = sequence.image_positions(begin, end);
  return {sequence.image_rows.data(), rows.dtype, {count, rows.dim(1)}};
}

// Fills the masks of the tokens that the next step decides, while it runs.
std::jthread fill_masks(std::span<Sequence* const> members) {
  std::vector<Output*> outputs;
  for (Sequence* sequence : members) {
    if (sequence->request.constraint != nullptr && sequence->rows >= sequence->left()) {
      outputs.push_back(&sequence->output);
    }
  }
  return outputs.empty() ? std::jthread() : std::jthread([outputs = std::move(outputs)] {
    for (Output* output : outputs) {
      output->fill_mask();
    }
  });
}

// Shows a draft block behind `anchor` and the best tokens of its positions.
Status visit_drafts(model::StepRunner& runner,
                    const model::StepSequence& anchor,
                    int64_t block,
                    model::Observer& observer) {
  CACHALOT_RETURN_IF_ERROR(runner.draft({&anchor, 1}, &observer));
  const auto first = static_cast<int32_t>(anchor.view->length);
  const model::ObservedRows where{.row_begin = {}, .start = {&first, 1}};
  int32_t previous = anchor.tokens[0];
  std::vector<int32_t> best;
  std::vector<float> confidence;
  for (int64_t k = 0; k < block; ++k) {
    CACHALOT_TRY(const model::DraftLogits next, runner.next_draft({&previous, 1}));
    const float temperature = 1.0f;
    CACHALOT_TRY(const model::TopLogits top, runner.top_logits(next.logits, 1, {&temperature, 1}));
    CACHALOT_TRY(const TensorView logits, runner.on_host(next.logits));
    observer.visit("mtp.logits", logits, where);
    confidence.push_back(next.confidence.as<float>()[0]);
    previous = top.id.as<int32_t>()[0];
    best.push_back(previous);
  }
  observer.visit("mtp.confidence", {confidence.data(), DType::kF32, {1, block}}, where);
  observer.visit("mtp.tokens", {best.data(), DType::kI32, {1, block}}, where);
  return {};
}

}  // namespace

void Scheduler::share_chunk() {
  std::vector<Sequence*> prompts;  // in the order of rank
  for (const auto& [rank, sequence] : running_) {
    sequence->rows = sequence->decodes() ? 1 : 0;
    if (!sequence->decodes()) {
      sequence->stop = sequence->instance->prefixes.next_stop(*sequence);
      prompts.push_back(sequence.get());
    }
  }
  int64_t left = options_.chunk;
  const auto give = [&](const std::vector<Sequence*>& order, int64_t rows) {
    for (Sequence* sequence : order) {
      const int64_t wanted = sequence->stop - sequence->length() - sequence->rows;
      const int64_t n = std::min(rows, wanted);
      sequence->rows += n;
      rows -= n;
      left -= n;
    }
  };
  std::vector<Sequence*> shortest = prompts;
  std::stable_sort(shortest.begin(), shortest.end(), [](const Sequence* a, const Sequence* b) {
    return std::pair(a->rank.first, a->left()) < std::pair(b->rank.first, b->left());
  });
  give(prompts, (left + 1) / 2);
  give(shortest, left);
}

Status Scheduler::reserve(Sequence& sequence, int64_t positions) {
  current_->prefixes.make_room(pages_for(positions) - sequence.cache->page_count());
  for (;;) {
    Status status = sequence.cache->reserve(positions);
    // A pool without bound ends where memory does.
    if (status.code() != Code::kResourceExhausted || !current_->prefixes.evict()) {
      return status;
    }
  }
}

Status Scheduler::propose(ModelInstance& instance) {
  std::vector<Speculator::Member> members;
  std::vector<Sequence*> decoding;
  for (const auto& [rank, sequence] : running_) {
    if (sequence->instance.get() == &instance && sequence->decodes()) {
      members.push_back({.view = &sequence->cache->view(),
                         .anchor = sequence->tokens.back(),
                         .sampler = &sequence->output.sampler(),
                         // Admission has promised room for no more.
                         .most = sequence->most_positions() - sequence->length() - 1,
                         .replay = sequence->replay,
                         .draft_from = sequence->draft_from});
      decoding.push_back(sequence.get());
    }
  }
  if (members.empty()) {
    return {};
  }
  CACHALOT_TRY(std::vector<Proposal> proposals,
               instance.speculator->propose(*instance.runner, members));
  for (size_t i = 0; i < decoding.size(); ++i) {
    Sequence& sequence = *decoding[i];
    sequence.drafts = std::move(proposals[i]);
    sequence.draft_row.assign(1, sequence.tokens.back());
    for (const Draft& draft : sequence.drafts) {
      sequence.draft_row.push_back(draft.token);
    }
    sequence.rows = static_cast<int64_t>(sequence.draft_row.size());
  }
  return {};
}

void Scheduler::run(model::Observer* observer) {
  if (running_.empty()) {
    return;
  }
  share_chunk();
  stats_.last_batch_rows = 0;
  // Usually one. Requests of replaced weights have steps of their own until they end.
  std::vector<std::shared_ptr<ModelInstance>> instances;
  for (const auto& [rank, sequence] : running_) {
    if (std::find(instances.begin(), instances.end(), sequence->instance) == instances.end()) {
      instances.push_back(sequence->instance);
    }
  }
  for (const std::shared_ptr<ModelInstance>& instance : instances) {
    run(*instance, observer);
  }
  std::erase_if(running_, [](const auto& entry) { return entry.second->ended; });
}

void Scheduler::run(ModelInstance& instance, model::Observer* observer) {
  // Rejected rows have no place in what an observer sees: nothing is drafted for one.
  Status outcome =
      instance.speculator == nullptr || observer != nullptr ? Status() : propose(instance);
  std::vector<Sequence*> members;
  std::vector<model::StepSequence> batch;
  for (const auto& [rank, sequence] : running_) {
    if (sequence->rows == 0 || sequence->instance.get() != &instance) {
      continue;
    }
    const int64_t end = sequence->length() + sequence->rows;
    if (Status status = reserve(*sequence, end); !status.ok()) {
      finish(*sequence, {.status = std::move(status)});
      continue;
    }
    const std::span<const int32_t> tokens(sequence->tokens);
    const bool drafted = !sequence->drafts.empty();
    const TensorView image_rows = gather_images(*sequence);
    const bool scored = observer != nullptr || (sequence->request.prompt_logprobs &&
                                                sequence->length() < sequence->prompt);
    batch.push_back({.view = &sequence->cache->view(),
                     .tokens = drafted ? std::span<const int32_t>(sequence->draft_row)
                                       : tokens.subspan(static_cast<size_t>(sequence->length()),
                                                        static_cast<size_t>(sequence->rows)),
                     .image = sequence->image_mask,
                     .image_rows = image_rows,
                     .all_logits = scored || drafted,
                     .no_logits = !scored && end < static_cast<int64_t>(tokens.size()),
                     .replay = sequence->replay});
    members.push_back(sequence.get());
  }
  if (outcome.ok() && !members.empty()) {
    outcome = run_batch(instance, members, batch, observer);
  }
  if (!outcome.ok()) {
    for (Sequence* sequence : members) {
      if (!sequence->ended) {
        finish(*sequence, {.status = outcome});
      }
    }
  }
}

Status Scheduler::run_batch(ModelInstance& instance,
                            std::span<Sequence* const> members,
                            std::span<const model::StepSequence> batch,
                            model::Observer* observer) {
  std::vector<int64_t> first_row, logit_rows;  // of each member's logits
  std::vector<float> temperature;              // of each of these rows
  int64_t wanted = 1;
  for (size_t i = 0; i < members.size(); ++i) {
    const Sequence& sequence = *members[i];
    const int64_t decoder_rows = std::clamp<int64_t>(
        sequence.length() + sequence.rows - sequence.replay.decoder_from, 0, sequence.rows);
    first_row.push_back(static_cast<int64_t>(temperature.size()));
    logit_rows.push_back(batch[i].no_logits ? 0 : batch[i].all_logits ? decoder_rows : 1);
    temperature.insert(temperature.end(),
                       static_cast<size_t>(logit_rows.back()),
                       sequence.output.sampler().temperature());
    wanted = std::max(wanted, sequence.output.wanted());
  }
  model::StepRunner& runner = *instance.runner;
  Speculator* const speculator = instance.speculator.get();
  const bool draft_context =
      observer != nullptr || (speculator != nullptr && speculator->keeps_context());
  const double begin = now_seconds();
  std::jthread masks = fill_masks(members);
  CACHALOT_TRY(const TensorView rows, runner.run(batch, observer, draft_context));
  CACHALOT_TRY(const StepLogits logits, StepLogits::read(runner, rows, wanted, temperature));
  const double seconds = now_seconds() - begin;
  if (masks.joinable()) {
    masks.join();
  }
  if (observer != nullptr) {
    CACHALOT_CHECK(members.size() == 1, members.size());
    const auto start =
        static_cast<int32_t>(std::max(members[0]->length(), members[0]->replay.decoder_from));
    CACHALOT_TRY(const TensorView seen, runner.on_host(rows));
    observer->visit("logits", seen, {.row_begin = {}, .start = {&start, 1}});
  }
  std::vector<int32_t> accepted;
  int64_t batch_rows = 0, decoding = 0, decode_rows = 0, decoded = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    Sequence& sequence = *members[i];
    batch_rows += sequence.rows;
    const bool decodes = sequence.decodes();
    accepted.push_back(sequence.drafts.empty() ? static_cast<int32_t>(sequence.rows)
                                               : judge_drafts(sequence, logits, first_row[i]));
    if (decodes) {
      ++decoding;
      decode_rows += sequence.rows;
      decoded += accepted.back();
    }
  }
  stats_.last_batch_rows += batch_rows;
  if (speculator != nullptr && observer == nullptr && decoding > 0) {
    if (decode_rows == batch_rows) {
      speculator->policy().record_step(decode_rows, seconds);
    }
    if (speculator->drafted()) {
      speculator->policy().record_outcome(decoding, decode_rows, decoded);
    }
  }
  CACHALOT_RETURN_IF_ERROR(runner.commit(accepted));
  for (size_t i = 0; i < members.size(); ++i) {
    members[i]->draft_from = draft_context ? members[i]->draft_from : members[i]->length();
    instance.prefixes.keep(*members[i]);
    deliver(*members[i], logits, first_row[i], logit_rows[i]);
  }
  if (observer != nullptr && speculator != nullptr && members[0]->left() > 0) {
    const Sequence& sequence = *members[0];
    const int32_t& next = sequence.tokens[static_cast<size_t>(sequence.length())];
    return visit_drafts(runner,
                        {.view = &sequence.cache->view(),
                         .tokens = {&next, 1},
                         .replay = sequence.replay,
                         .draft_from = sequence.draft_from},
                        runtime_.config().dspark_block_size,
                        *observer);
  }
  return {};
}

int32_t Scheduler::judge_drafts(Sequence& sequence, const StepLogits& logits, int64_t first_row) {
  const Proposal drafts = std::exchange(sequence.drafts, {});
  Event& event = sequence.drafted;
  event = {.draft_tokens = static_cast<int64_t>(drafts.size())};
  size_t kept = 0;
  for (;;) {
    const bool held = sequence.output.next(logits,
                                           first_row + static_cast<int64_t>(kept),
                                           event,
                                           kept < drafts.size() ? &drafts[kept] : nullptr);
    event.accepted_tokens += held ? 1 : 0;
    if (kept < drafts.size() && event.status.ok()) {
      sequence.instance->speculator->policy().record_draft_outcome(
          static_cast<int64_t>(kept), drafts[kept].confidence, held);
    }
    if (!held || event.done || !event.status.ok()) {
      break;
    }
    ++kept;
  }
  stats_.draft_tokens += static_cast<uint64_t>(event.draft_tokens);
  stats_.accepted_tokens += static_cast<uint64_t>(event.accepted_tokens);
  for (const TokenOutput& token : event.tokens) {
    sequence.tokens.push_back(token.id);
  }
  return static_cast<int32_t>(1 + kept);
}

void Scheduler::deliver(Sequence& sequence,
                        const StepLogits& logits,
                        int64_t first_row,
                        int64_t rows) {
  if (sequence.request.prompt_logprobs && sequence.output.count() == 0) {
    sequence.score.resize(static_cast<size_t>(sequence.prompt));
    // The row of position p predicts the token of p + 1.
    const int64_t from = sequence.length() - sequence.rows + 1;
    for (int64_t i = 0; i < rows && from + i < sequence.prompt; ++i) {
      const auto predicted = static_cast<size_t>(from + i);
      const auto score = logits.decide(first_row + i, [&](const LogitsRow& row) {
        return token_output(row, sequence.tokens[predicted], sequence.request.top_logprobs);
      });
      if (!score.ok()) {
        finish(sequence, {.status = score.status()});
        return;
      }
      sequence.score[predicted] = score->value();
    }
  }
  const bool drafted = sequence.drafted.draft_tokens > 0;
  if (!drafted && sequence.left() > 0) {
    return;
  }
  const double now = now_seconds();
  if (sequence.output.count() == 0) {
    stats_.prompt_tokens += static_cast<uint64_t>(sequence.prompt);
    stats_.cached_tokens += static_cast<uint64_t>(sequence.cached_tokens);
    stats_.first_token_seconds.record(now - sequence.submitted);
    sequence.release_images();
  } else {
    stats_.inter_token_seconds.record(now - sequence.last_token);
  }
  sequence.last_token = now;
  Event event = std::exchange(sequence.drafted, {});
  if (!drafted) {
    if (sequence.max_tokens == 0) {
      event.done = true;
    } else {
      sequence.output.next(logits, first_row + rows - 1, event);
    }
    for (const TokenOutput& token : event.tokens) {
      sequence.tokens.push_back(token.id);
    }
  }
  stats_.generated_tokens += event.tokens.size();
  if (event.done || !event.status.ok()) {
    if (event.done && sequence.output.count() > 0) {
      sequence.instance->prefixes.keep_state(sequence);
    }
    finish(sequence, std::move(event));
  } else {
    send(sequence, std::move(event));
  }
}

}  // namespace cachalot::engine
