// Many requests over one Runtime: the only door of the server into the model.
//
// One engine thread owns scheduling, caches and steps. submit() and cancel() hand work to it
// through a bounded channel and may be called from any thread; events come back on the engine
// thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/histogram.h"
#include "engine/runtime.h"
#include "engine/sampler.h"
#include "engine/speculation.h"
#include "image/picture.h"
#include "kvcache/tiers.h"

namespace cachalot::engine {

using RequestId = uint64_t;

// Narrows the next token, for structured output and named tools. One object per request, called on
// one thread at a time. Steps wait for it: what takes too long is an error, which ends its request.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // One bit per vocabulary id, little-endian 32-bit words, set: allowed. False: everything is
  // allowed and `bits` was left alone.
  virtual Result<bool> fill(std::vector<uint32_t>& bits) = 0;
  // The token was emitted. False: the constraint is violated, an error of the caller.
  virtual Result<bool> accept(int32_t token) = 0;
  // The output is complete: only EOS may follow.
  virtual Result<bool> finished() = 0;
};

// An image of a prompt; see prompt_images.h.
struct PromptImage {
  int64_t position = 0;  // of its first slot
  std::shared_ptr<const image::Picture> picture;
};

struct EngineRequest {
  std::vector<int32_t> prompt;      // at least one token
  std::vector<PromptImage> images;  // in the order of the prompt, whose slots have image_token_id
  SamplingParams sampling;
  int64_t max_tokens = 16;        // 0 with prompt_logprobs alone: score the prompt
  std::vector<std::string> stop;  // ends the text before the first of these
  std::vector<int32_t> stop_ids;  // in addition to EOS
  bool ignore_eos = false;
  bool logprobs = false;
  int64_t top_logprobs = 0;  // alternatives per output token
  bool prompt_logprobs =
      false;  // the prompt's own log-probabilities (echo); computed, never cached
  std::unique_ptr<TokenConstraint> constraint;
  int priority = 0;  // higher runs first
  // As Engine::weights() gave them, so that requests that belong together run on the same; null:
  // those in use when the engine takes it.
  std::shared_ptr<const LoadedModel> weights;
  std::optional<std::chrono::steady_clock::time_point> deadline;
};

enum class StopReason : uint8_t {
  kEos,         // EOS or one of stop_ids
  kStopString,  // Event::stop_string
  kLength,      // max_tokens, or the context is full
  kConstraint,  // the constraint is complete
};

struct TokenOutput {
  int32_t id = 0;
  float logprob = 0;                           // natural logarithm, unmodified distribution
  std::vector<std::pair<int32_t, float>> top;  // best first
};

// What happened to a request. Events of one request come in order; the last one has `done` or a
// `status` that is an error, and none follows.
struct Event {
  // With the first event: tokens of the prompt that a cache answered, and the prompt's own
  // log-probabilities where asked for (the first has no value).
  bool first = false;
  int64_t cached_tokens = 0;
  double queue_seconds = 0;  // from submit() to the first step
  std::vector<std::optional<TokenOutput>> prompt;

  int64_t draft_tokens = 0;         // drafts that the target judged for this event
  int64_t accepted_tokens = 0;      // of them, those that it kept
  std::vector<TokenOutput> tokens;  // output tokens since the last event, EOS apart
  std::string text;  // what of their text is certain: whole characters, no stop string

  bool done = false;
  StopReason reason = StopReason::kLength;
  std::string stop_string;  // the one that matched
  // kCancelled, kDeadlineExceeded, kResourceExhausted, ...: the request failed.
  Status status;
};

// Called on the engine thread; must not block and must not call back into the engine.
using EventSink = std::function<void(RequestId, Event)>;

struct PoolStats {
  std::string name;    // "main": pages of the global cache; "window": window states
  int64_t in_use = 0;  // held by requests
  int64_t cached = 0;  // kept for later requests alone, freed when others need room
  int64_t total = 0;   // 0: bounded by memory alone
};

// A consistent snapshot, cheap to take from any thread.
struct EngineStats {
  int64_t running = 0;
  int64_t waiting = 0;
  uint64_t requests_finished = 0;
  uint64_t requests_failed = 0;
  uint64_t requests_cancelled = 0;
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;
  uint64_t replayed_tokens = 0;  // cached ones that ran again to rebuild windows
  uint64_t generated_tokens = 0;
  uint64_t draft_tokens = 0;
  uint64_t accepted_tokens = 0;
  uint64_t preemptions = 0;
  uint64_t evictions = 0;
  int64_t last_batch_rows = 0;  // rows of the last step
  int64_t image_bytes = 0;      // EngineOptions::image_bytes, as far as they are taken
  uint64_t images_reused = 0;   // whose rows were there
  Histogram image_seconds;      // of every image that was encoded
  std::string weights;          // LoadedModel::fingerprint() of those in use
  int64_t weight_versions = 0;  // in memory: those in use, and replaced ones with requests left
  uint64_t weight_swaps = 0;
  std::vector<PoolStats> pools;
  std::vector<kvcache::TierStats> tiers;
  Histogram queue_seconds;
  Histogram first_token_seconds;
  Histogram inter_token_seconds;
};

struct EngineOptions {
  int64_t chunk = 512;         // most rows of a step
  int64_t max_running = 64;    // sequences in flight
  int64_t max_waiting = 1024;  // requests beside those in flight; more are refused
  int64_t max_context = 0;     // tokens of a request; 0: the model's
  bool prefix_cache = true;
  // Window states kept for prefixes of earlier requests, beside those of running ones.
  int64_t cached_states = 256;
  std::chrono::seconds state_ttl{300};  // since the last use
  // Pixels and rows of the images of requests that were not answered yet, at most; more are
  // refused.
  int64_t image_bytes = int64_t{4} << 30;
  int64_t image_cache_bytes = int64_t{512} << 20;  // rows of images used lately
  // That a request which is next waits for its prefix to be read from the stores; the rest is
  // computed.
  std::chrono::milliseconds prefix_wait{1000};
  SpeculationOptions speculation;  // of a runtime with a drafter
  kvcache::TierOptions tiers;      // stores behind the page pools

  // Requests that are taken at a time.
  int64_t max_present() const { return max_running + max_waiting; }
};

class Engine {
 public:
  // Starts the engine thread. `runtime` must outlive the engine.
  static Result<std::unique_ptr<Engine>> start(Runtime& runtime, const EngineOptions& options);
  // Cancels what is left and joins.
  virtual ~Engine() = default;

  // Checks the request and queues it. kInvalidArgument names the field; kOutOfRange: the
  // request can never fit; kResourceExhausted: the queue is full, try again later; kUnavailable:
  // draining.
  virtual Result<RequestId> submit(EngineRequest request, EventSink sink) = 0;
  // Everything of the request is freed before the next step; its last event is kCancelled. Unknown
  // and finished ids are ignored.
  virtual void cancel(RequestId id) = 0;

  // The weights in use.
  virtual std::shared_ptr<const LoadedModel> weights() const = 0;
  // Loads a checkpoint of the same config and tokenizer and uses it for requests that come after
  // this returns; those before end on the weights they came to, which are freed then. Blocks while
  // the files are read. Errors leave everything as it was: as Runtime::load() gives them;
  // kUnavailable: another swap is in progress, requests of the weights before these still run, or
  // the engine drains.
  virtual Status load_weights(const std::string& directory) = 0;

  virtual EngineStats stats() const = 0;
  virtual const EngineOptions& options() const = 0;

  // Refuses new requests and waits until the others have ended, at most `timeout`; then cancels the
  // rest. True if nothing had to be cancelled.
  virtual bool drain(std::chrono::milliseconds timeout) = 0;
};

}  // namespace cachalot::engine
