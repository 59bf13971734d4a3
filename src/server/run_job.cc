#include "server/run_job.h"

#include <algorithm>
#include <utility>

#include "base/rng.h"
#include "server/constraint.h"
#include "text/control_tokens.h"
#include "text/detokenizer.h"

namespace cachalot::server {
namespace {

constexpr int kClientGone = 499;

// Independent of the draws, which use stream 0.
uint64_t derived_seed(uint64_t seed, uint64_t nth) {
  const auto words = Philox(seed, 1).words(nth);
  return uint64_t{words[0]} << 32 | words[1];
}

class Run : public std::enable_shared_from_this<Run> {
 public:
  Run(engine::Engine& engine,
      std::shared_ptr<const Job> job,
      std::shared_ptr<const engine::LoadedModel> weights,
      const Dialect& dialect,
      std::shared_ptr<Exchange> exchange,
      std::function<void(int)> done)
      : engine_(engine),
        job_(std::move(job)),
        weights_(std::move(weights)),
        dialect_(dialect),
        exchange_(std::move(exchange)),
        done_(std::move(done)),
        encoder_(dialect.encoder(job_)),
        choices_(static_cast<size_t>(job_->choices())) {}

  void start() {
    exchange_->on_abort([self = shared_from_this()] { self->end_with(kClientGone); });
    for (int64_t i = 0; i < job_->choices() && !ended_; ++i) {
      submit(i);
    }
    weights_ = nullptr;  // the engine holds them now, and no longer than it runs on them
    if (!ended_ && job_->request.stream) {
      streaming_ = true;
      exchange_->begin_stream({});
    }
  }

 private:
  struct Choice {
    std::optional<engine::RequestId> id;
    std::unique_ptr<text::ChatParser> parser;  // null: plain text
    Output output;
    Usage usage;
    bool finished = false;
  };

  void submit(int64_t index) {
    Choice& choice = choices_[static_cast<size_t>(index)];
    const Prompt& prompt = job_->prompt_of(index);
    choice.usage.prompt_tokens =
        index % job_->request.n == 0 ? static_cast<int64_t>(prompt.ids.size()) : 0;
    const GenerationRequest& request = job_->request;
    engine::EngineRequest out;
    out.weights = weights_;
    out.priority = request.priority;
    out.deadline = job_->deadline;
    out.prompt = prompt.ids;
    out.images = prompt.images;
    out.sampling = request.sampling;
    // The first choice draws with the seed itself, so that n = 1 equals a run from the command
    // line.
    const int64_t nth = index % request.n;
    out.sampling.seed =
        nth == 0 ? job_->seed : derived_seed(job_->seed, static_cast<uint64_t>(nth));
    // Without any output the prompt is scored. If nobody asked for that, one token that is not
    // shown is cheaper, and has the prefix cache's help; but there must be room for it.
    const bool full = std::ssize(prompt.ids) == job_->model->context;
    out.prompt_logprobs = (request.echo && request.logprobs) || full;
    out.max_tokens =
        out.prompt_logprobs ? job_->max_tokens : std::max<int64_t>(1, job_->max_tokens);
    out.stop_ids = request.stop_ids;
    out.ignore_eos = request.ignore_eos;
    out.logprobs = request.logprobs;
    out.top_logprobs = request.top_logprobs;
    if (job_->chat()) {
      text::ChatParserOptions options;
      options.start = prompt.start;
      const auto& chat = std::get<text::ChatRequest>(request.prompt);
      options.parse_tools = !chat.tools.empty() && chat.tool_choice != text::ToolChoice::kNone;
      options.stop = request.stop;
      options.call_id_prefix = std::string(dialect_.call_prefix) + job_->id;
      choice.parser = std::make_unique<text::ChatParser>(*job_->model->tokenizer, options);
    } else {
      out.stop = request.stop;
    }
    if (job_->grammar != nullptr) {
      std::optional<int32_t> after;
      if (prompt.start == text::OutputStart::kReasoning) {
        after = job_->model->tokenizer->id_of(text::kThinkEndToken);
      }
      out.constraint = make_constraint(job_->grammar, after, request.structure_field);
    }
    const Result<engine::RequestId> id = engine_.submit(
        std::move(out), [self = shared_from_this(), index](engine::RequestId, engine::Event event) {
          self->exchange_->post(
              [self, index, event = std::move(event)] { self->on_event(index, event); });
        });
    if (!id.ok()) {
      fail(api_error(id.error()));
      return;
    }
    choice.id = *id;
  }

  void on_event(int64_t index, const engine::Event& event) {
    Choice& choice = choices_[static_cast<size_t>(index)];
    if (ended_ || choice.finished) {
      return;
    }
    if (!event.status.ok()) {
      fail(api_error(event.status));
      return;
    }
    Delta delta;
    delta.choice = index;
    if (event.first) {
      choice.usage.cached_tokens = choice.usage.prompt_tokens > 0 ? event.cached_tokens : 0;
      if (job_->request.echo) {
        echo(index, event, delta);
      }
    }
    if (job_->max_tokens == 0) {
      delta.finish = Finish{Finish::Reason::kLength, ""};
    } else if (choice.parser != nullptr) {
      chat_pieces(choice, event, delta);
    } else {
      plain_pieces(choice, event, delta);
    }
    if (delta.finish) {
      choice.finished = true;
      if (!event.done) {
        engine_.cancel(*choice.id);
      }
    }
    deliver(choice, delta);
  }

  void echo(int64_t index, const engine::Event& event, Delta& delta) {
    const Prompt& prompt = job_->prompt_of(index);
    if (job_->request.logprobs) {
      delta.prompt.assign(
          event.prompt.begin() +
              std::min<int64_t>(prompt.hidden, static_cast<int64_t>(event.prompt.size())),
          event.prompt.end());
    }
    text::ChatEvent text;
    text.text = text::decode(*job_->model->tokenizer,
                             std::span(prompt.ids).subspan(static_cast<size_t>(prompt.hidden)),
                             {.skip_control = false});
    delta.events.push_back(std::move(text));
  }

  void plain_pieces(Choice& choice, const engine::Event& event, Delta& delta) {
    for (const engine::TokenOutput& token : event.tokens) {
      delta.tokens.push_back({token, false});
    }
    choice.usage.completion_tokens += static_cast<int64_t>(event.tokens.size());
    if (!event.text.empty()) {
      text::ChatEvent text;
      text.text = event.text;
      delta.events.push_back(std::move(text));
    }
    if (event.done) {
      delta.finish.emplace();
      delta.finish->reason = event.reason == engine::StopReason::kLength ? Finish::Reason::kLength
                             : event.reason == engine::StopReason::kStopString
                                 ? Finish::Reason::kStopSequence
                                 : Finish::Reason::kStop;
      delta.finish->stop_sequence = event.stop_string;
    }
  }

  void chat_pieces(Choice& choice, const engine::Event& event, Delta& delta) {
    text::ChatParser& parser = *choice.parser;
    for (const engine::TokenOutput& token : event.tokens) {
      if (parser.finished()) {
        // A complete block of calls; EOS should have followed.
        delta.finish = finish_of(parser, engine::StopReason::kEos);
        return;
      }
      const bool reasoning = parser.in_reasoning();
      delta.tokens.push_back({token, reasoning});
      ++choice.usage.completion_tokens;
      choice.usage.reasoning_tokens += reasoning ? 1 : 0;
      if (job_->request.ignore_eos && token.id == job_->model->tokenizer->eos_id()) {
        continue;  // a token like any other, but one without text
      }
      if (take(parser.push(token.id), delta)) {
        delta.finish = Finish{Finish::Reason::kToolCalls, ""};
        return;
      }
      if (const int32_t stop = parser.matched_stop(); stop >= 0) {
        delta.finish =
            Finish{Finish::Reason::kStopSequence, job_->request.stop[static_cast<size_t>(stop)]};
        return;
      }
    }
    if (event.done) {
      take(parser.finish(), delta);
      delta.finish = finish_of(parser, event.reason);
    }
  }

  // True: the one call that may be made is complete.
  bool take(std::vector<text::ChatEvent> events, Delta& delta) {
    for (text::ChatEvent& event : events) {
      const bool call_end = event.type == text::ChatEvent::Type::kToolCallEnd;
      delta.events.push_back(std::move(event));
      if (call_end && !job_->request.parallel_tool_calls) {
        return true;
      }
    }
    return false;
  }

  static Finish finish_of(const text::ChatParser& parser, engine::StopReason reason) {
    if (reason == engine::StopReason::kLength) {
      return {Finish::Reason::kLength, ""};
    }
    return {parser.call_count() > 0 ? Finish::Reason::kToolCalls : Finish::Reason::kStop, ""};
  }

  void deliver(Choice& choice, const Delta& delta) {
    if (delta.finish) {
      ++finished_;
    }
    const bool last = finished_ == choices_.size();
    if (job_->request.stream) {
      std::string out;
      if (!begun_) {
        begun_ = true;
        encoder_->begin(usage(), out);
      }
      const bool empty = delta.events.empty() && delta.tokens.empty() && !delta.finish;
      if (!empty) {
        encoder_->delta(delta, out);
      }
      if (last) {
        encoder_->end(usage(), out);
      }
      exchange_->write(std::move(out));
      if (last) {
        end_with(200);
        exchange_->end();
      }
      return;
    }
    choice.output.apply(delta);
    if (last) {
      std::vector<Output> outputs;
      for (Choice& each : choices_) {
        outputs.push_back(std::move(each.output));
      }
      end_with(200);
      exchange_->respond({.body = encoder_->whole(outputs, usage())});
    }
  }

  Usage usage() const {
    Usage total;
    for (const Choice& choice : choices_) {
      total += choice.usage;
    }
    return total;
  }

  void fail(const ApiError& error) {
    end_with(error.status);
    if (streaming_) {
      std::string out;
      encoder_->error(error, out);
      exchange_->write(std::move(out));
      exchange_->end();
    } else {
      exchange_->respond(error_response(error, dialect_, exchange_->id()));
    }
  }

  void end_with(int status) {
    if (std::exchange(ended_, true)) {
      return;
    }
    for (const Choice& choice : choices_) {
      if (choice.id && !choice.finished) {
        engine_.cancel(*choice.id);
      }
    }
    done_(status);
  }

  engine::Engine& engine_;
  std::shared_ptr<const Job> job_;
  std::shared_ptr<const engine::LoadedModel> weights_;
  const Dialect& dialect_;
  std::shared_ptr<Exchange> exchange_;
  std::function<void(int)> done_;
  std::unique_ptr<Encoder> encoder_;
  std::vector<Choice> choices_;
  size_t finished_ = 0;
  bool streaming_ = false;  // the header of the stream is out
  bool begun_ = false;      // and its first event
  bool ended_ = false;
};

}  // namespace

void run_job(engine::Engine& engine,
             std::shared_ptr<const Job> job,
             std::shared_ptr<const engine::LoadedModel> weights,
             const Dialect& dialect,
             std::shared_ptr<Exchange> exchange,
             std::function<void(int status)> done) {
  const auto run = std::make_shared<Run>(
      engine, std::move(job), std::move(weights), dialect, exchange, std::move(done));
  exchange->post([run] { run->start(); });
}

}  // namespace cachalot::server
