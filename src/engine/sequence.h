// A request inside the scheduler, from the queue to its last event.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/image_encoder.h"
#include "engine/output.h"
#include "engine/speculation.h"
#include "kvcache/prefix_content.h"
#include "kvcache/prefix_key.h"
#include "kvcache/sequence_cache.h"
#include "kvcache/tiers.h"
#include "model/step.h"

namespace cachalot::engine {

struct ModelInstance;

struct Sequence {
  // Higher priorities first, then in the order of arrival.
  using Rank = std::pair<int64_t, uint64_t>;

  Sequence(RequestId id_,
           EngineRequest request_,
           EventSink sink_,
           Rank rank_,
           int64_t max_tokens_,
           const text::Tokenizer& tokenizer,
           int64_t eos)
      : id(id_),
        request(std::move(request_)),
        sink(std::move(sink_)),
        rank(rank_),
        prompt(static_cast<int64_t>(request.prompt.size())),
        max_tokens(max_tokens_),
        output(request, tokenizer, max_tokens, static_cast<int32_t>(eos)),
        submitted(now_seconds()),
        tokens(std::move(request.prompt)) {
    for (const PromptImage& image : request.images) {
      images.push_back({.begin = image.position,
                        .end = image.position + image.picture->slots,
                        .digest = image.picture->digest});
    }
    encoded.resize(images.size());
  }

  RequestId id;
  EngineRequest request;
  EventSink sink;
  Rank rank;
  int64_t prompt;      // tokens of the prompt
  int64_t max_tokens;  // of output, as far as the context allows
  Output output;
  double submitted;

  std::shared_ptr<ModelInstance> instance;        // the weights that all of it runs on
  std::vector<int32_t> tokens;                    // the prompt and the output so far
  std::vector<std::optional<TokenOutput>> score;  // of the prompt, where asked for
  std::vector<kvcache::ImageSpan> images;         // of the prompt
  // Their rows, as far as they were needed; no longer once the prompt has run.
  std::vector<std::shared_ptr<const EncodedImage>> encoded;
  int64_t image_bytes = 0;                        // that count for EngineOptions::image_bytes
  int64_t first_row = 0;                          // where its prompt is going to begin to run
  bool awaits_images = false;                     // it lacks rows behind first_row
  std::unique_ptr<kvcache::SequenceCache> cache;  // while running
  std::string saved;                              // of a request preempted between output tokens
  int64_t cached_tokens = 0;
  model::Replay replay;
  int64_t draft_from = 0;                      // StepSequence::draft_from
  std::shared_ptr<kvcache::Tiers::Load> load;  // of its prefix, until it was absorbed
  int64_t loaded_from = 0;                     // the first page that it looks for
  double load_awaited = 0;                     // since when that alone is what it lacks
  bool read = false;                           // whether that was asked for

  // What of it is in the prefix cache: the key of the first `kept_pages` pages. `keeping` is false
  // once a page could not be kept.
  kvcache::PrefixKey kept;
  int64_t kept_pages = 0;
  bool keeping = false;
  // The longest prefix in the cache, where others will want to go on.
  int64_t shared_prefix = 0;

  Proposal drafts;                  // of the next step, behind the newest token
  std::vector<int32_t> draft_row;   // that token and its drafts, the rows of that step
  Event drafted;                    // what they gave
  int64_t rows = 0;                 // of the next step
  std::vector<uint8_t> image_mask;  // StepSequence::image of that step
  std::vector<uint8_t> image_rows;  // StepSequence::image_rows
  int64_t stop = 0;                 // where its chunk must end at the latest
  bool started = false;
  bool first_sent = false;
  bool ended = false;
  double queue_seconds = 0;
  double last_token = 0;

  int64_t length() const { return cache->view().length; }
  kvcache::PrefixContent content() const { return {tokens, images}; }
  // Which of the positions [begin, end) are slots of an image: one byte each.
  std::vector<uint8_t> image_positions(int64_t begin, int64_t end) const {
    std::vector<uint8_t> mask(static_cast<size_t>(end - begin), 0);
    for (const kvcache::ImageSpan& image : images) {
      for (int64_t p = std::max(begin, image.begin); p < std::min(end, image.end); ++p) {
        mask[static_cast<size_t>(p - begin)] = 1;
      }
    }
    return mask;
  }
  // The prompt has run: it is never embedded again.
  void release_images() {
    request.images.clear();
    encoded.clear();
  }
  int64_t left() const { return static_cast<int64_t>(tokens.size()) - length(); }
  bool decodes() const { return output.count() > 0 && left() == 1; }
  // Positions that it can come to hold: the last output token is never run.
  int64_t most_positions() const { return prompt + std::max<int64_t>(max_tokens, 1) - 1; }
};

}  // namespace cachalot::engine
