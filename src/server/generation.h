// What every dialect is converted into, and what every dialect's answer is made from.
//
//   body -> Dialect::parse -> GenerationRequest -> prepare -> Job -> run_job (engine) -> Delta...
//        -> Encoder -> bytes
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/prompt_images.h"
#include "server/api_error.h"
#include "server/exchange.h"
#include "text/chat.h"
#include "text/chat_parser.h"
#include "text/grammar.h"
#include "text/json_tree.h"
#include "text/tokenizer.h"

namespace cachalot::server {

// The model behind the engine, as far as requests are concerned.
struct ServedModel {
  std::string name;                  // as /v1/models lists it
  std::vector<std::string> aliases;  // other names that requests may use
  const text::Tokenizer* tokenizer = nullptr;
  int64_t vocab_size = 0;
  int64_t context = 0;  // tokens of prompt and output together
  int32_t bos_id = 0;
  std::shared_ptr<text::GrammarCompiler> grammar;  // null: this build has no grammar core
  std::optional<engine::ImageFormat> images;       // absent: it takes none
};

// Errors: kNotFound for a name that the model does not have. An absent name is the model's.
Status check_model(const ServedModel& model, std::string_view name);

// A prompt of the completions dialect.
struct PlainPrompt {
  std::string text;
  std::vector<int32_t> ids;  // used instead of `text` if `is_ids`
  bool is_ids = false;
  std::optional<std::string> suffix;  // fill in the middle: the text after the gap
};

struct GenerationRequest {
  std::string model;  // as the client named it
  std::variant<text::ChatRequest, std::vector<PlainPrompt>> prompt;
  bool add_bos = true;  // before plain text

  engine::SamplingParams sampling;    // its seed is set below
  std::optional<uint64_t> seed;       // absent: random
  std::optional<int64_t> max_tokens;  // absent: a default of the dialect, within the context
  std::vector<std::string> stop;
  std::vector<int32_t> stop_ids;
  bool ignore_eos = false;
  int64_t n = 1;  // choices per prompt

  bool logprobs = false;
  int64_t top_logprobs = 0;
  bool echo = false;
  bool return_token_ids = false;
  bool parallel_tool_calls = true;
  std::optional<text::GrammarSpec> structure;
  std::string structure_field;  // that asked for `structure`, for messages

  bool stream = false;
  bool include_usage = false;
  int priority = 0;               // higher runs first
  std::optional<double> timeout;  // seconds from the arrival to the last token
  text::Json echoed;              // Responses: fields of the request that its answer repeats

  int64_t choices() const;
};

struct Prompt {
  std::vector<int32_t> ids;
  std::vector<engine::PromptImage> images;
  int64_t hidden = 0;  // leading ids that the client did not write
  text::OutputStart start = text::OutputStart::kContent;
};

struct OutputToken {
  engine::TokenOutput token;
  bool reasoning = false;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;      // of these
  int64_t completion_tokens = 0;  // without EOS
  int64_t reasoning_tokens = 0;   // of these

  Usage& operator+=(const Usage& other);
};

struct Finish {
  enum class Reason : uint8_t { kStop, kStopSequence, kLength, kToolCalls };
  Reason reason = Reason::kStop;
  std::string stop_sequence;
};

// The next piece of one choice.
struct Delta {
  int64_t choice = 0;  // prompt index * n + index
  // Echo: the log-probabilities of the prompt, with the first piece.
  std::vector<std::optional<engine::TokenOutput>> prompt;
  std::vector<text::ChatEvent> events;  // plain completions have kContent alone
  std::vector<OutputToken> tokens;
  std::optional<Finish> finish;  // with the last piece
};

// All pieces of one choice.
struct Output {
  text::ChatOutput message;
  std::vector<std::optional<engine::TokenOutput>> prompt;
  std::vector<OutputToken> tokens;
  Finish finish;

  void apply(const Delta& delta);
};

// A request that is ready to run; immutable once it does.
struct Job {
  GenerationRequest request;
  const ServedModel* model = nullptr;
  std::vector<Prompt> prompts;
  std::string id;                        // random digits, the body of every id in the answer
  int64_t created = 0;                   // seconds since the epoch
  std::string fingerprint = "cachalot";  // of the server and its weights
  int64_t max_tokens = 0;
  uint64_t seed = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline;
  std::shared_ptr<const text::CompiledGrammar> grammar;  // null: unconstrained

  bool chat() const { return std::holds_alternative<text::ChatRequest>(request.prompt); }
  int64_t choices() const { return request.choices(); }
  const Prompt& prompt_of(int64_t choice) const {
    return prompts[static_cast<size_t>(choice / request.n)];
  }
};

// Writes the answer in one dialect. One object per request, used on one strand.
class Encoder {
 public:
  virtual ~Encoder() = default;
  // A stream: begin, any number of deltas, end; or error in place of what is left. Each appends
  // server-sent events to `out`. `prompt` counts the prompt alone.
  virtual void begin(const Usage& prompt, std::string& out) = 0;
  virtual void delta(const Delta& delta, std::string& out) = 0;
  virtual void end(const Usage& usage, std::string& out) = 0;
  virtual void error(const ApiError& error, std::string& out) = 0;
  // An answer in one piece.
  virtual std::string whole(const std::vector<Output>& outputs, const Usage& usage) = 0;
};

// A dialect whose stream is a row of blocks, at most one of them open.
class BlockEncoder : public Encoder {
 public:
  void delta(const Delta& delta, std::string& out) final;

 protected:
  virtual void piece(const text::ChatEvent& event, std::string& out) = 0;
  // Ends the open block, if there is one.
  virtual void close(std::string& out) = 0;

  Finish finish_;
};

struct Dialect {
  // Reads a body; leaves it in an unspecified state. Errors start with the path of the field.
  Result<GenerationRequest> (*parse)(text::Json& body, const ServedModel& model);
  std::unique_ptr<Encoder> (*encoder)(std::shared_ptr<const Job> job);
  std::string (*error)(const ApiError& error, std::string_view request_id);
  std::string_view call_prefix;   // of the ids of tool calls
  std::string_view prompt_field;  // that holds the prompt, for messages
};

// An error as an answer of its own.
HttpResponse error_response(const ApiError& error,
                            const Dialect& dialect,
                            std::string_view request_id);

extern const Dialect kChatCompletions;
extern const Dialect kCompletions;
extern const Dialect kMessages;   // Anthropic
extern const Dialect kResponses;  // OpenAI Responses

// Tokens of a chat's prompt, with those of its images. Errors: those of prepare().
Result<std::vector<int32_t>> prompt_ids(const text::ChatRequest& chat, const ServedModel& model);

// Renders and tokenizes the prompts, fixes defaults, compiles the grammar, and decodes the images
// of what could run. Errors: kOutOfRange when a prompt leaves no room in the context; else as the
// request's.
Result<std::shared_ptr<Job>> prepare(GenerationRequest request,
                                     const Dialect& dialect,
                                     const ServedModel& model);

// "data: <json>\n\n", with an event name in front where one is given.
void append_event(std::string& out, std::string_view name, std::string_view json);

}  // namespace cachalot::server
