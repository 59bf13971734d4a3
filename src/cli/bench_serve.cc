// cachalot bench serve: many clients at once, every stream of theirs checked.
#include "cli/bench_serve.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/format.h"
#include "base/json.h"
#include "base/log.h"
#include "base/rng.h"
#include "cli/engine_flags.h"
#include "cli/server_process.h"
#include "engine/engine.h"
#include "server/load_client.h"
#include "text/json_tree.h"

namespace cachalot::cli {
namespace {

using server::LoadAnswer;
using server::LoadRequest;
using server::LoadTarget;
using text::Json;

constexpr double kReadySeconds = 600;  // for a model to load
constexpr double kIdleSeconds = 30;    // for a server to free what its last requests held
constexpr double kCeilingSeconds = 10;
// Every vocabulary has these ids, and they are ordinary tokens.
constexpr int32_t kFirstToken = 3, kLastToken = 258;

struct ServeBenchFlags {
  EngineFlags engine;
  std::vector<std::string> serve;  // what is passed on to the server
  std::string url;
  std::vector<int64_t> concurrency = {1, 8, 64};
  int64_t requests = 0;
  double seconds = 0;
  int64_t prompt = 64;
  int64_t output = 32;
  double shared = 0;
  int64_t prefixes = 1;
  bool vary = false;
  double whole = 0;
  double hang_up = 0;
  int64_t check = 16;
  double sample = 0;
  uint64_t seed = 1;
};

// ---- what is asked ------------------------------------------------------------------------------

// One of the distinct requests of a level; a function of its number alone.
struct Question {
  std::vector<int32_t> prompt;
  int64_t output = 0;

  LoadRequest request(bool stream) const {
    JsonWriter w;
    w.begin_object().key("prompt").begin_array();
    for (const int32_t id : prompt) {
      w.value(id);
    }
    w.end_array().field("max_tokens", output).field("temperature", 0).field("ignore_eos", true);
    w.field("return_token_ids", true).field("stream", stream).end_object();
    return {.path = "/v1/completions", .body = w.text()};
  }

  // The same for an engine without a server.
  engine::EngineRequest engine_request() const {
    return {
        .prompt = prompt, .sampling = {.temperature = 0}, .max_tokens = output, .ignore_eos = true};
  }
};

class Questions {
 public:
  // Of the level with so many clients.
  Questions(const ServeBenchFlags& flags, int64_t clients)
      : flags_(flags),
        distinct_(flags.requests > 0 ? flags.requests : 4 * clients),
        seed_(Philox(flags.seed, static_cast<uint64_t>(clients)).words(0)[0]) {}

  int64_t distinct() const { return distinct_; }

  Question operator()(int64_t number) const {
    const Philox rng(seed_, static_cast<uint64_t>(number) + 1);
    const auto length = [&](uint64_t draw, int64_t most) {
      return flags_.vary ? 1 + static_cast<int64_t>(rng.uniform(draw) * static_cast<double>(most))
                         : most;
    };
    Question out;
    const int64_t prompt = length(0, flags_.prompt);
    out.output = length(1, flags_.output);
    const auto prefix =
        static_cast<uint64_t>(std::floor(rng.uniform(2) * static_cast<double>(flags_.prefixes)));
    const auto shared = static_cast<int64_t>(flags_.shared * static_cast<double>(prompt));
    const Philox common(seed_ + 1, prefix);
    for (int64_t i = 0; i < prompt; ++i) {
      const auto index = static_cast<uint64_t>(i) + 3;
      const double draw = i < shared ? common.uniform(index) : rng.uniform(index);
      out.prompt.push_back(kFirstToken +
                           static_cast<int32_t>(draw * (kLastToken - kFirstToken + 1)));
    }
    return out;
  }

 private:
  const ServeBenchFlags& flags_;
  int64_t distinct_;
  uint64_t seed_;
};

// ---- what the engine does without a server ------------------------------------------------------

// Output tokens per second when `clients` of the questions run at a time, each followed by the next
// one: what a server would reach that costs nothing. All questions, or as many as kCeilingSeconds
// allow.
Result<double> engine_rate(engine::Engine& engine, const Questions& questions, int64_t clients) {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t running = 0, tokens = 0;  // guarded by mutex
  Status failed;                    // likewise
  const engine::EventSink sink = [&](engine::RequestId, const engine::Event& event) {
    const std::lock_guard lock(mutex);
    tokens += static_cast<int64_t>(event.tokens.size());
    if (event.done || !event.status.ok()) {
      --running;
      failed = failed.ok() ? event.status : failed;
      changed.notify_one();
    }
  };
  std::vector<engine::RequestId> ids;
  const double begin = now_seconds();
  const auto left = [&] {
    return std::chrono::duration<double>(begin + kCeilingSeconds - now_seconds());
  };
  std::unique_lock lock(mutex);
  for (int64_t next = 0; next < questions.distinct() && failed.ok() && left().count() > 0; ++next) {
    if (!changed.wait_for(lock, left(), [&] { return running < clients; })) {
      break;
    }
    ++running;
    lock.unlock();
    const Result<engine::RequestId> id = engine.submit(questions(next).engine_request(), sink);
    lock.lock();
    if (id.ok()) {
      ids.push_back(*id);
    } else {
      --running;
      failed = id.status();
    }
  }
  changed.wait_for(lock, left(), [&] { return running == 0; });
  const double rate = static_cast<double>(tokens) / (now_seconds() - begin);
  const Status status = failed;
  // The sink refers to what is here.
  lock.unlock();
  for (const engine::RequestId id : ids) {
    engine.cancel(id);
  }
  lock.lock();
  changed.wait(lock, [&] { return running == 0; });
  CACHALOT_RETURN_IF_ERROR(status);
  return rate;
}

// One rate per level. Without tiers: what they hold would be hits of the server's.
Result<std::vector<double>> engine_rates(const ServeBenchFlags& flags) {
  CACHALOT_TRY(const std::unique_ptr<engine::Runtime> runtime, open_runtime(flags.engine.run));
  engine::EngineOptions options = flags.engine.options();
  options.tiers = {};
  const int64_t most = *std::max_element(flags.concurrency.begin(), flags.concurrency.end());
  options.max_waiting = std::max(options.max_waiting, most);
  CACHALOT_TRY(const std::unique_ptr<engine::Engine> engine,
               engine::Engine::start(*runtime, options));
  std::vector<double> rates;
  for (const int64_t clients : flags.concurrency) {
    CACHALOT_TRY(const double rate, engine_rate(*engine, Questions(flags, clients), clients));
    rates.push_back(rate);
  }
  return rates;
}

// ---- what is answered ---------------------------------------------------------------------------

struct Completion {
  std::vector<int32_t> ids;
  std::string text;

  bool operator==(const Completion&) const = default;
};

// An answer, put together from the events of its stream, or from its one body.
struct Reading {
  std::string id;
  Completion completion;
  int64_t cached_tokens = 0;
  std::vector<double> token_seconds;  // when an event with tokens came
};

Result<std::vector<int32_t>> ids_of(const Json& choice, std::string_view key) {
  std::vector<int32_t> out;
  if (const Json* ids = choice.find(key)) {
    for (const Json& id : ids->items) {
      const std::optional<int64_t> value = id.integer();
      if (!value) {
        return invalid("{} holds something that is not an integer", key);
      }
      out.push_back(static_cast<int32_t>(*value));
    }
  }
  return out;
}

std::string string_of(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value != nullptr && value->is_string() ? value->text : std::string();
}

int64_t integer_of(const Json* object, std::string_view key) {
  const Json* value = object != nullptr ? object->find(key) : nullptr;
  return value != nullptr ? value->integer().value_or(-1) : -1;
}

// Everything that can be wrong with an answer but for its tokens. Errors say what is.
Result<Reading> read_answer(const Question& question, const LoadAnswer& answer) {
  std::vector<LoadAnswer::Event> pieces = answer.events;
  if (pieces.empty()) {
    pieces = {{answer.seconds, answer.body}, {answer.seconds, "[DONE]"}};
  }
  Reading out;
  bool finished = false;
  int64_t prompts = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool last = i + 1 == pieces.size();
    if (last != (pieces[i].data == "[DONE]")) {
      return invalid("event {} of {} is '{}'", i, pieces.size(), pieces[i].data);
    }
    if (last) {
      break;
    }
    CACHALOT_TRY(const Json piece, text::parse_json(pieces[i].data, fmt::format("event {}", i)));
    const Json* choices = piece.find("choices");
    if (choices == nullptr || choices->items.size() != 1 || finished) {
      return invalid("event {} is '{}'", i, pieces[i].data);
    }
    const std::string id = string_of(piece, "id");
    if (id.empty() || (i > 0 && id != out.id)) {
      return invalid("event {} has the id '{}' in the answer '{}'", i, id, out.id);
    }
    out.id = id;
    const Json& choice = choices->items[0];
    if (choice.find("prompt_token_ids") != nullptr) {
      ++prompts;
      CACHALOT_TRY(const std::vector<int32_t> prompt, ids_of(choice, "prompt_token_ids"));
      if (i != 0 || prompt != question.prompt) {
        return invalid("event {} has the prompt of another request", i);
      }
    }
    CACHALOT_TRY(const std::vector<int32_t> ids, ids_of(choice, "token_ids"));
    if (!ids.empty()) {
      out.token_seconds.push_back(pieces[i].seconds);
    }
    out.completion.ids.insert(out.completion.ids.end(), ids.begin(), ids.end());
    out.completion.text += string_of(choice, "text");
    finished = string_of(choice, "finish_reason") == "length";
    if (finished) {
      const Json* usage = piece.find("usage");
      const auto prompt = static_cast<int64_t>(question.prompt.size());
      if (integer_of(usage, "prompt_tokens") != prompt ||
          integer_of(usage, "completion_tokens") != question.output) {
        return invalid("the usage is not that of {} and {} tokens", prompt, question.output);
      }
      out.cached_tokens = integer_of(usage->find("prompt_tokens_details"), "cached_tokens");
    }
  }
  if (!finished || prompts != 1 ||
      static_cast<int64_t>(out.completion.ids.size()) != question.output) {
    return invalid("{} tokens came, {} were asked for{}",
                   out.completion.ids.size(),
                   question.output,
                   finished ? "" : ", and no reason to finish");
  }
  return out;
}

// ---- one level of concurrency -------------------------------------------------------------------

struct Percentiles {
  explicit Percentiles(std::vector<double> values) : sorted(std::move(values)) {
    std::sort(sorted.begin(), sorted.end());
  }

  // Nearest rank.
  double at(double share) const {
    const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
    return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
  }
  void write(JsonWriter& w, std::string_view name) const {
    w.key(name);
    if (sorted.empty()) {
      w.null();
      return;
    }
    w.begin_object().field("p50", at(0.5)).field("p95", at(0.95)).field("p99", at(0.99));
    w.field("max", sorted.back()).end_object();
  }

  std::vector<double> sorted;
};

class Level {
 public:
  Level(const ServeBenchFlags& flags, const LoadTarget& target, int64_t clients)
      : flags_(flags),
        target_(target),
        clients_(clients),
        questions_(flags, clients),
        chance_(flags.seed, 0),
        asked_(static_cast<size_t>(clients)) {}

  // The load, then some of the requests again, each alone.
  void run() {
    begin_ = now_seconds();
    server::run_load(
        target_,
        clients_,
        [this](int64_t client) { return next(client); },
        [this](int64_t client, const LoadAnswer& answer) { judge(client, answer); });
    seconds_ = now_seconds() - begin_;
    const auto stored = static_cast<int64_t>(completions_.size());
    const int64_t step =
        flags_.check > 0 ? std::max<int64_t>(1, stored / flags_.check) : stored + 1;
    int64_t at = 0;
    for (const auto& [number, completion] : completions_) {
      if (at++ % step == 0 && checked_ < flags_.check) {
        ++checked_;
        check(number, completion);
      }
    }
  }

  // `ceiling`: of the engine, in output tokens per second.
  void print(std::optional<double> ceiling,
             const std::optional<ServerProcess::Footprint>& idle) const {
    const Percentiles whole(request_seconds_);
    JsonWriter w;
    w.begin_object().field("name", "serve");
    w.field("backend", flags_.url.empty() ? flags_.engine.run.backend : "remote");
    w.field("shape",
            fmt::format("concurrency {} prompt {} output {} shared {} prefixes {}",
                        clients_,
                        flags_.prompt,
                        flags_.output,
                        flags_.shared,
                        flags_.prefixes));
    w.key("median_s");
    number(w, whole, 0.5);
    w.key("min_s");
    number(w, whole, 0);
    w.key("max_s");
    number(w, whole, 1);
    w.field("bytes", bytes_).key("flops").null();
    w.field("gbps", static_cast<double>(bytes_) / seconds_ / 1e9).key("tflops").null();
    const double rate = static_cast<double>(output_tokens_) / seconds_;
    if (ceiling) {
      w.field("ceiling", *ceiling).field("fraction", rate / *ceiling);
    } else {
      w.key("ceiling").null().key("fraction").null();
    }
    w.field("concurrency", clients_).field("prompt", flags_.prompt);
    w.field("output", flags_.output).field("shared", flags_.shared);
    w.field("prefixes", flags_.prefixes).field("seconds", seconds_);
    w.field("requests", issued_).field("complete", complete_).field("hung_up", hung_up_);
    w.field("refused", refused_).field("errors", errors_).field("wrong", wrong_);
    w.field("checked_alone", checked_);
    w.field("requests_per_s", static_cast<double>(complete_) / seconds_);
    w.field("prompt_tokens_per_s", static_cast<double>(prompt_tokens_) / seconds_);
    w.field("output_tokens_per_s", rate);
    w.field("cached_share",
            prompt_tokens_ > 0
                ? static_cast<double>(cached_tokens_) / static_cast<double>(prompt_tokens_)
                : 0.0);
    whole.write(w, "request_s");
    Percentiles(first_seconds_).write(w, "first_token_s");
    Percentiles(gap_seconds_).write(w, "inter_token_s");
    w.key("resident_bytes");
    if (idle) {
      w.value(idle->resident_bytes).field("descriptors", idle->descriptors);
      w.field("cache_files", idle->cache_files);
    } else {
      w.null().key("descriptors").null().key("cache_files").null();
    }
    w.end_object();
    std::fputs((w.text() + "\n").c_str(), stdout);
    std::fflush(stdout);
  }

  // Errors: what was wrong first.
  const Status& verdict() const { return verdict_; }

 private:
  struct Asked {
    int64_t number = 0;
    Question question;
  };

  static void number(JsonWriter& w, const Percentiles& values, double share) {
    if (values.sorted.empty()) {
      w.null();
    } else {
      w.value(values.at(share));
    }
  }

  std::optional<LoadRequest> next(int64_t client) {
    const bool over = flags_.seconds > 0 ? now_seconds() - begin_ >= flags_.seconds
                                         : issued_ >= questions_.distinct();
    if (over) {
      return std::nullopt;
    }
    Asked& asked = asked_[static_cast<size_t>(client)];
    asked.number = issued_ % questions_.distinct();
    asked.question = questions_(asked.number);
    const auto draw = [&](uint64_t nth) {
      return chance_.uniform(4 * static_cast<uint64_t>(issued_) + nth);
    };
    LoadRequest request = asked.question.request(draw(0) >= flags_.whole);
    if (draw(1) < flags_.hang_up) {
      request.hang_up_after =
          static_cast<int64_t>(draw(2) * static_cast<double>(asked.question.output));
    }
    ++issued_;
    return request;
  }

  void wrong(const std::string& what, int64_t number) {
    ++wrong_;
    if (verdict_.ok()) {
      verdict_ = error(Code::kDataLoss, "request {}: {}", number, what);
    }
  }

  void judge(int64_t client, const LoadAnswer& answer) {
    const Asked& asked = asked_[static_cast<size_t>(client)];
    bytes_ += answer.bytes;
    if (answer.hung_up) {
      ++hung_up_;
      return;
    }
    if (answer.status == 429 || answer.status == 503) {
      ++refused_;
      return;
    }
    if (!answer.failure.empty() || answer.status != 200) {
      ++errors_;
      if (verdict_.ok()) {
        verdict_ = error(Code::kUnavailable,
                         "request {}: status {} {} {}",
                         asked.number,
                         answer.status,
                         answer.failure,
                         answer.body);
      }
      return;
    }
    const Result<Reading> reading = read_answer(asked.question, answer);
    if (!reading.ok()) {
      wrong(reading.error().message(), asked.number);
      return;
    }
    if (!ids_.insert(reading->id).second) {
      wrong(fmt::format("another answer has the id {}, too", reading->id), asked.number);
    }
    const auto [known, fresh] = completions_.try_emplace(asked.number, reading->completion);
    if (!fresh && known->second != reading->completion) {
      wrong("its text is not that of its first answer", asked.number);
    }
    ++complete_;
    prompt_tokens_ += static_cast<int64_t>(asked.question.prompt.size());
    cached_tokens_ += reading->cached_tokens;
    output_tokens_ += asked.question.output;
    request_seconds_.push_back(answer.seconds);
    if (!answer.events.empty()) {
      first_seconds_.push_back(reading->token_seconds.front());
      for (size_t i = 1; i < reading->token_seconds.size(); ++i) {
        gap_seconds_.push_back(reading->token_seconds[i] - reading->token_seconds[i - 1]);
      }
    }
  }

  void check(int64_t number, const Completion& completion) {
    const Question question = questions_(number);
    const LoadAnswer answer = server::ask(target_, question.request(false));
    const Result<Reading> alone = read_answer(question, answer);
    if (!alone.ok()) {
      wrong("alone: " + alone.error().message(), number);
    } else if (alone->completion != completion) {
      wrong("its text is not the one that it has alone", number);
    }
  }

  const ServeBenchFlags& flags_;
  const LoadTarget& target_;
  const int64_t clients_;
  Questions questions_;
  Philox chance_;  // who hangs up and who streams
  std::vector<Asked> asked_;

  double begin_ = 0, seconds_ = 0;
  int64_t issued_ = 0, complete_ = 0, hung_up_ = 0, refused_ = 0, errors_ = 0, wrong_ = 0;
  int64_t checked_ = 0, bytes_ = 0;
  int64_t prompt_tokens_ = 0, cached_tokens_ = 0, output_tokens_ = 0;
  std::vector<double> request_seconds_, first_seconds_, gap_seconds_;
  std::set<std::string> ids_;
  std::map<int64_t, Completion> completions_;
  Status verdict_;
};

// ---- the server ---------------------------------------------------------------------------------

// Errors: kUnavailable.
Result<Json> fetch(const LoadTarget& target, const std::string& path) {
  const LoadAnswer answer = server::ask(target, {.method = "GET", .path = path, .body = ""});
  if (answer.status != 200) {
    return error(Code::kUnavailable, "{}: status {} {}", path, answer.status, answer.failure);
  }
  return text::parse_json(answer.body, path);
}

template <class Condition>
bool wait_until(double seconds, const Condition& condition) {
  const double end = now_seconds() + seconds;
  while (!condition()) {
    if (now_seconds() > end) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

// Requests and the pages that they hold are gone.
bool idle(const Json& stats) {
  int64_t held = integer_of(&stats, "running") + integer_of(&stats, "waiting");
  if (const Json* pools = stats.find("pools")) {
    for (const Json& pool : pools->items) {
      held += integer_of(&pool, "in_use");
    }
  }
  return held == 0;
}

// Prints the state of a server from time to time, in a thread of its own.
class Sampler {
 public:
  Sampler(const LoadTarget& target, const ServerProcess* process, double period)
      : target_(target), process_(process), period_(period), begin_(now_seconds()) {
    if (period_ > 0) {
      thread_ = std::thread([this] { run(); });
    }
  }
  ~Sampler() {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        stop_ = true;
      }
      wake_.notify_one();
      thread_.join();
    }
  }
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

 private:
  void run() {
    std::unique_lock lock(mutex_);
    do {
      print();
    } while (!wake_.wait_for(lock, std::chrono::duration<double>(period_), [&] { return stop_; }));
    print();
  }

  void print() const {
    const LoadAnswer stats = server::ask(target_, {.method = "GET", .path = "/stats", .body = ""});
    if (stats.status != 200) {
      return;
    }
    JsonWriter w;
    w.begin_object().field("name", "serve state").field("seconds", now_seconds() - begin_);
    if (process_ != nullptr) {
      if (const auto footprint = process_->footprint(); footprint.ok()) {
        w.field("resident_bytes", footprint->resident_bytes);
        w.field("descriptors", footprint->descriptors);
        w.field("cache_files", footprint->cache_files).field("threads", footprint->threads);
      }
    }
    w.key("stats").raw(stats.body).end_object();
    std::fputs((w.text() + "\n").c_str(), stdout);
    std::fflush(stdout);
  }

  const LoadTarget& target_;
  const ServerProcess* process_;
  const double period_;
  const double begin_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

Status bench_serve(const ServeBenchFlags& flags) {
  raise_file_limit();
  // A soak and a server elsewhere have no engine to be compared with.
  std::vector<double> ceilings;
  if (flags.url.empty() && flags.seconds == 0) {
    CACHALOT_TRY(ceilings, engine_rates(flags));
  }
  std::optional<ServerProcess> process;
  if (flags.url.empty()) {
    CACHALOT_TRY(ServerProcess started,
                 ServerProcess::start(flags.serve, flags.engine.engine.tiers.disk));
    process.emplace(std::move(started));
  } else if (!flags.serve.empty()) {
    return invalid("'{}' is an option of a server of our own, and --url names another one",
                   flags.serve.front());
  }
  CACHALOT_TRY(const LoadTarget target, LoadTarget::parse(process ? process->url() : flags.url));
  if (!wait_until(kReadySeconds, [&] {
        return server::ask(target, {.method = "GET", .path = "/ready", .body = ""}).status == 200 ||
               (process && !process->footprint().ok());
      })) {
    return error(Code::kUnavailable, "the server is not ready");
  }
  Status verdict;
  {
    const Sampler sampler(target, process ? &*process : nullptr, flags.sample);
    for (size_t i = 0; i < flags.concurrency.size(); ++i) {
      Level level(flags, target, flags.concurrency[i]);
      level.run();
      std::optional<ServerProcess::Footprint> footprint;
      if (process) {
        const bool freed = wait_until(kIdleSeconds, [&] {
          const Result<Json> stats = fetch(target, "/stats");
          return stats.ok() && idle(*stats);
        });
        if (!freed && verdict.ok()) {
          verdict = error(Code::kInternal, "the server still holds pages of requests that ended");
        }
        CACHALOT_TRY(footprint, process->footprint());
      }
      level.print(ceilings.empty() ? std::nullopt : std::optional(ceilings[i]), footprint);
      if (verdict.ok()) {
        verdict = level.verdict();
      }
    }
  }
  if (process) {
    const Status stopped = process->stop();
    verdict = verdict.ok() ? stopped : verdict;
  }
  return verdict;
}

// The options of `command` that were given, as they can be given again.
std::vector<std::string> given(const std::vector<const CLI::Option*>& options) {
  std::vector<std::string> out;
  for (const CLI::Option* option : options) {
    if (option->count() > 0) {
      out.push_back(option->get_name());
      out.insert(out.end(), option->results().begin(), option->results().end());
    }
  }
  return out;
}

}  // namespace

void add_bench_serve(CLI::App& bench, Action& action) {
  auto flags = std::make_shared<ServeBenchFlags>();
  CLI::App* command =
      bench.add_subcommand("serve", "Many clients of a server at once; every stream is checked");
  flags->engine.add_to(*command);
  const CLI::App* as_const = command;
  const std::vector<const CLI::Option*> engine_options = as_const->get_options(
      [](const CLI::Option* option) { return option->get_name() != "--help"; });
  const CLI::Range share(0.0, 1.0);
  const CLI::Range tokens(int64_t{1}, int64_t{1} << 24);
  command->add_option("--url", flags->url, "A server that runs already; default: one of our own");
  command->add_option("--concurrency", flags->concurrency, "Clients; several: one measurement each")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  command
      ->add_option(
          "--requests", flags->requests, "Distinct requests of a measurement; 0: four per client")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 32))
      ->capture_default_str();
  command
      ->add_option("--seconds",
                   flags->seconds,
                   "Asks the distinct requests again and again for so long; 0: each once")
      ->check(CLI::Range(0.0, 1e7))
      ->capture_default_str();
  command->add_option("--prompt", flags->prompt, "Tokens of a prompt")
      ->check(tokens)
      ->capture_default_str();
  command->add_option("--output", flags->output, "Tokens of an answer")
      ->check(tokens)
      ->capture_default_str();
  command->add_flag("--vary", flags->vary, "Lengths from 1 to --prompt and --output");
  command->add_option("--shared", flags->shared, "Share of a prompt that others begin with, too")
      ->check(share)
      ->capture_default_str();
  command->add_option("--prefixes", flags->prefixes, "Different shared beginnings")
      ->check(tokens)
      ->capture_default_str();
  command->add_option("--whole", flags->whole, "Share of the requests that ask for no stream")
      ->check(share)
      ->capture_default_str();
  command->add_option("--hang-up", flags->hang_up, "Share whose client leaves before the end")
      ->check(share)
      ->capture_default_str();
  command->add_option("--check", flags->check, "Requests to compare with themselves alone")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 32))
      ->capture_default_str();
  command
      ->add_option(
          "--sample", flags->sample, "Seconds between lines about the state of the server; 0: none")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  add_seed(*command, flags->seed, "Of prompts and choices");
  command->footer("Every other option is one of `cachalot serve`, for a server of our own.");
  command->allow_extras();
  command->callback([flags, command, engine_options, &action] {
    flags->serve = given(engine_options);
    const std::vector<std::string> rest = command->remaining();
    flags->serve.insert(flags->serve.end(), rest.begin(), rest.end());
    action = [flags] { return bench_serve(*flags); };
  });
}

}  // namespace cachalot::cli
