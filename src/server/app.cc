#include "server/app.h"

#include <algorithm>
#include <string_view>

#include "base/format.h"
#include "base/json.h"
#include "server/messages.h"
#include "server/openai_fields.h"
#include "server/run_job.h"
#include "text/detokenizer.h"
#include "text/json_fields.h"

namespace cachalot::server {
namespace {

using text::Json;

// Takes the same time wherever the strings differ.
bool same_secret(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^
                  static_cast<unsigned char>(b.empty() ? 0 : b[i % b.size()]);
  }
  return difference == 0;
}

std::string_view given_key(const HttpRequest& request) {
  const std::string_view bearer = request.header("authorization");
  constexpr std::string_view kScheme = "bearer ";
  if (bearer.size() > kScheme.size() &&
      std::equal(kScheme.begin(), kScheme.end(), bearer.begin(), [](char a, char b) {
        return a == (b >= 'A' && b <= 'Z' ? b - 'A' + 'a' : b);
      })) {
    return bearer.substr(kScheme.size());
  }
  return request.header("x-api-key");
}

ApiError make_error(int status, std::string message, const char* type, const char* code) {
  ApiError out;
  out.status = status;
  out.message = std::move(message);
  out.type = type;
  out.code = code;
  return out;
}

// Bases under which clients look for the same endpoints.
std::string_view without_base(std::string_view path) {
  for (const std::string_view base : {"/anthropic", "/beta", "/v1"}) {
    if (path.starts_with(base) && path.size() > base.size() + 1 && path[base.size()] == '/') {
      path.remove_prefix(base.size());
    }
  }
  return path;
}

// Of errors on paths without a route.
const Dialect& dialect_of(std::string_view path) {
  return path.find("/messages") != std::string_view::npos ? kMessages : kChatCompletions;
}

void ids_field(JsonWriter& w, std::string_view key, const std::vector<int32_t>& ids) {
  w.key(key).begin_array();
  for (const int32_t id : ids) {
    w.value(id);
  }
  w.end_array();
}

}  // namespace

struct App::Route {
  std::string_view method;
  std::string_view path;   // without its base
  const Dialect* dialect;  // of errors, and of generation
  Access access;
  void (*run)(App&, const Call&);
};

const std::vector<App::Route>& App::routes() {
  static const std::vector<Route> table = {
      {"POST",
       "/chat/completions",
       &kChatCompletions,
       Access::kKey,
       [](App& app, const Call& call) { app.generate(call, kChatCompletions); }},
      {"POST",
       "/completions",
       &kCompletions,
       Access::kKey,
       [](App& app, const Call& call) { app.generate(call, kCompletions); }},
      {"POST",
       "/messages",
       &kMessages,
       Access::kKey,
       [](App& app, const Call& call) { app.generate(call, kMessages); }},
      {"POST",
       "/messages/count_tokens",
       &kMessages,
       Access::kKey,
       [](App& app, const Call& call) { app.count_tokens(call); }},
      {"POST",
       "/responses",
       &kResponses,
       Access::kKey,
       [](App& app, const Call& call) { app.generate(call, kResponses); }},
      {"GET",
       "/models",
       &kChatCompletions,
       Access::kKey,
       [](App& app, const Call& call) { app.models(call); }},
      {"GET",
       "/models/",
       &kChatCompletions,
       Access::kKey,
       [](App& app, const Call& call) { app.models(call); }},
      {"POST",
       "/tokenize",
       &kCompletions,
       Access::kKey,
       [](App& app, const Call& call) { app.tokenize(call); }},
      {"POST",
       "/detokenize",
       &kCompletions,
       Access::kKey,
       [](App& app, const Call& call) { app.detokenize(call); }},
      {"POST",
       "/update_weights_from_disk",
       &kCompletions,
       Access::kAdmin,
       [](App& app, const Call& call) { app.update_weights(call); }},
      {"GET",
       "/stats",
       &kCompletions,
       Access::kKey,
       [](App& app, const Call& call) { app.stats(call); }},
      {"GET",
       "/metrics",
       &kCompletions,
       Access::kOpen,
       [](App& app, const Call& call) { app.metrics(call); }},
      {"GET",
       "/health",
       &kCompletions,
       Access::kOpen,
       [](App& app, const Call& call) { app.health(call); }},
      {"GET",
       "/ready",
       &kCompletions,
       Access::kOpen,
       [](App& app, const Call& call) { app.ready(call); }},
      {"GET",
       "/",
       &kCompletions,
       Access::kOpen,
       [](App& app, const Call& call) { app.page(call); }},
  };
  return table;
}

void App::serve(engine::Engine& engine, const ServedModel& model) {
  model_ = &model;
  engine_ = &engine;
  State loading = State::kLoading;
  state_.compare_exchange_strong(loading, State::kReady);
}

void App::drain() {
  state_ = State::kDraining;
}

void App::handle(HttpRequest request, std::shared_ptr<Exchange> exchange) {
  const std::string_view path = without_base(request.path);
  // The network leaves out the body.
  const std::string_view method =
      request.method == "HEAD" ? "GET" : std::string_view(request.method);
  const Route* route = nullptr;
  std::string allowed;  // methods of the path
  for (const Route& candidate : routes()) {
    // A path that ends in a slash stands for everything below it.
    const bool below = candidate.path.size() > 1 && candidate.path.ends_with('/') &&
                       path.size() > candidate.path.size() && path.starts_with(candidate.path);
    if (candidate.path == path || below) {
      route = candidate.method == method ? &candidate : route;
      allowed += (allowed.empty() ? "" : ", ") +
                 std::string(candidate.method == "GET" ? "GET, HEAD" : candidate.method);
    }
  }
  // Unknown paths share a name: clients must not be able to fill the metrics.
  const Call call{request, exchange, route != nullptr ? std::string(route->path) : "unknown"};
  if (route == nullptr) {
    ApiError error =
        allowed.empty()
            ? make_error(
                  404, "there is no such endpoint", "invalid_request_error", "unknown_endpoint")
            : make_error(405,
                         fmt::format("{} is not allowed here", request.method),
                         "invalid_request_error",
                         "method_not_allowed");
    error.allow = std::move(allowed);
    refuse(call, dialect_of(request.path), error);
    return;
  }
  if (route->access != Access::kOpen) {
    if (const Status access = check_access(request, route->access); !access.ok()) {
      const bool forbidden = access.code() == Code::kFailedPrecondition;
      refuse(call,
             *route->dialect,
             make_error(forbidden ? 403 : 401,
                        access.message(),
                        forbidden ? "permission_error" : "authentication_error",
                        forbidden ? "forbidden" : "invalid_api_key"));
      return;
    }
  }
  route->run(*this, call);
}

Status App::check_access(const HttpRequest& request, Access access) const {
  // A page of another site can make a browser send requests here; without an answer that names its
  // origin it cannot read what comes back, but it must not cost work either.
  const std::string_view origin = request.header("origin");
  const size_t scheme = origin.find("://");
  if (scheme != std::string_view::npos && origin.substr(scheme + 3) != request.header("host")) {
    return error(Code::kFailedPrecondition, "requests from pages of another origin are refused");
  }
  const bool admin = access == Access::kAdmin;
  const std::vector<std::string>& keys =
      admin && !options_.admin_keys.empty() ? options_.admin_keys : options_.api_keys;
  if (keys.empty()) {
    return admin ? error(Code::kFailedPrecondition,
                         "this needs a server that was started with --admin-key or --api-key")
                 : Status();
  }
  const std::string_view key = given_key(request);
  bool known = false;
  for (const std::string& expected : keys) {
    known = same_secret(key, expected) || known;
  }
  return known && !key.empty() ? Status()
                               : error(Code::kInvalidArgument, "the API key is missing or unknown");
}

Status App::check_ready() const {
  switch (state_.load()) {
    case State::kLoading:
      return error(Code::kUnavailable, "the model is loading");
    case State::kDraining:
      return error(Code::kUnavailable, "the server is shutting down");
    case State::kReady:
      break;
  }
  return {};
}

std::string App::state_name() const {
  const State state = state_;
  return state == State::kReady ? "ready" : state == State::kLoading ? "loading" : "draining";
}

std::optional<engine::EngineStats> App::engine_stats() const {
  const engine::Engine* engine = engine_;
  if (engine == nullptr) {
    return std::nullopt;
  }
  return engine->stats();
}

void App::reply(const Call& call, HttpResponse response) {
  counts_.add(call.endpoint, response.status);
  call.exchange->respond(std::move(response));
}

void App::refuse(const Call& call, const Dialect& dialect, const ApiError& error) {
  reply(call, error_response(error, dialect, call.request.id));
}

std::string App::unread_error(int status,
                              const std::string& message,
                              std::string_view path,
                              std::string_view request_id) {
  return dialect_of(path).error(make_error(status, message, "invalid_request_error", ""),
                                request_id);
}

std::optional<App::TimePoint> App::deadline_of(const GenerationRequest& request,
                                               TimePoint arrival) const {
  double seconds = request.timeout.value_or(options_.request_timeout);
  if (options_.request_timeout > 0) {
    seconds = std::min(seconds, options_.request_timeout);
  }
  if (seconds <= 0) {
    return std::nullopt;
  }
  return arrival +
         std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(seconds));
}

void App::generate(const Call& call, const Dialect& dialect) {
  const TimePoint arrival = std::chrono::steady_clock::now();
  if (const Status status = check_ready(); !status.ok()) {
    refuse(call, dialect, api_error(status));
    return;
  }
  Result<Json> body = text::parse_json(call.request.body, "request body");
  if (!body.ok()) {
    refuse(call, dialect, api_error(body.error()));
    return;
  }
  const std::shared_ptr<const engine::LoadedModel> weights = engine_.load()->weights();
  const auto job = [&]() -> Result<std::shared_ptr<Job>> {
    CACHALOT_TRY(GenerationRequest request, dialect.parse(*body, *model_));
    // What could never be taken is not to be tried again.
    if (const int64_t most = engine_.load()->options().max_present(); request.choices() > most) {
      return invalid("{} and n ask for {} answers, the server takes {} at a time",
                     dialect.prompt_field,
                     request.choices(),
                     most);
    }
    return prepare(std::move(request), dialect, *model_);
  }();
  if (!job.ok()) {
    refuse(call, dialect, api_error(job.error(), &*body));
    return;
  }
  (*job)->deadline = deadline_of((*job)->request, arrival);
  if (weights != nullptr) {
    (*job)->fingerprint += "-" + weights->fingerprint();
  }
  run_job(*engine_,
          *job,
          weights,
          dialect,
          call.exchange,
          [this, endpoint = call.endpoint](int status) { counts_.add(endpoint, status); });
}

void App::count_tokens(const Call& call) {
  Status status = check_ready();
  Json body;
  if (status.ok()) {
    const auto tokens = [&]() -> Result<int64_t> {
      CACHALOT_TRY(body, text::parse_json(call.request.body, "request body"));
      CACHALOT_TRY(text::ChatRequest chat, read_messages(body));
      // The block that a forced call opens is not the client's.
      chat.tool_choice = chat.tool_choice == text::ToolChoice::kNone ? text::ToolChoice::kNone
                                                                     : text::ToolChoice::kAuto;
      CACHALOT_TRY(const std::vector<int32_t> ids, prompt_ids(chat, *model_));
      return static_cast<int64_t>(ids.size());
    }();
    if (tokens.ok()) {
      JsonWriter w;
      w.begin_object().field("input_tokens", *tokens).end_object();
      reply(call, {.body = w.text()});
      return;
    }
    status = tokens.error();
  }
  refuse(call, kMessages, api_error(status, &body));
}

// The body of POST /tokenize: {"text" or "prompt": string}, or a chat-completions body.
void App::tokenize(const Call& call) {
  Status status = check_ready();
  Json body;
  if (status.ok()) {
    const auto ids = [&]() -> Result<std::vector<int32_t>> {
      CACHALOT_TRY(body, text::parse_json(call.request.body, "request body"));
      if (!body.is_object()) {
        return text::must_be("request body", "an object", body);
      }
      if (text::present(body, "messages") != nullptr) {
        CACHALOT_TRY(const text::ChatRequest chat, text::parse_chat_request(body));
        return prompt_ids(chat, *model_);
      }
      const char* key = text::present(body, "prompt") != nullptr ? "prompt" : "text";
      if (text::present(body, key) == nullptr) {
        return invalid("text must be a string, or messages an array");
      }
      CACHALOT_TRY(const std::string text, text::string_field(body, "", key));
      return model_->tokenizer->encode(text);
    }();
    if (ids.ok()) {
      JsonWriter w;
      w.begin_object();
      ids_field(w, "token_ids", *ids);
      w.field("text", text::decode(*model_->tokenizer, *ids, {.skip_control = false}));
      w.field("count", ids->size()).end_object();
      reply(call, {.body = w.text()});
      return;
    }
    status = ids.error();
  }
  refuse(call, kCompletions, api_error(status, &body));
}

// The body of POST /detokenize: {"token_ids" or "tokens": [...]}.
void App::detokenize(const Call& call) {
  Status status = check_ready();
  Json body;
  if (status.ok()) {
    const auto text = [&]() -> Result<std::string> {
      CACHALOT_TRY(body, text::parse_json(call.request.body, "request body"));
      if (!body.is_object()) {
        return text::must_be("request body", "an object", body);
      }
      const char* key = text::present(body, "tokens") != nullptr ? "tokens" : "token_ids";
      CACHALOT_TRY(const Json* array, text::array_field(body, "", key));
      if (array == nullptr) {
        return invalid("token_ids must be an array");
      }
      CACHALOT_TRY(const std::vector<int32_t> ids, read_ids(*array, key));
      for (const int32_t id : ids) {
        if (id >= model_->vocab_size) {
          return invalid("{} holds token {}, the vocabulary has {}", key, id, model_->vocab_size);
        }
      }
      return text::decode(*model_->tokenizer, ids, {.skip_control = false});
    }();
    if (text.ok()) {
      JsonWriter w;
      w.begin_object().field("text", *text).end_object();
      reply(call, {.body = w.text()});
      return;
    }
    status = text.error();
  }
  refuse(call, kCompletions, api_error(status, &body));
}

// The body of POST /update_weights_from_disk: {"model_path": directory}, as SGLang has it.
void App::update_weights(const Call& call) {
  Status status = check_ready();
  Json body;
  if (!status.ok()) {
    refuse(call, kCompletions, api_error(status));
    return;
  }
  const auto directory = [&]() -> Result<std::string> {
    CACHALOT_TRY(body, text::parse_json(call.request.body, "request body"));
    if (!body.is_object()) {
      return text::must_be("request body", "an object", body);
    }
    CACHALOT_TRY(const auto abort, text::bool_field(body, "", "abort_all_requests"));
    if (abort.value_or(false)) {
      return invalid("abort_all_requests must be false: requests end on the weights they have");
    }
    return text::required_string(body, "", "model_path");
  }();
  if (!directory.ok()) {
    refuse(call, kCompletions, api_error(directory.error(), &body));
    return;
  }
  engine::Engine& engine = *engine_;
  status = engine.load_weights(*directory);
  if (!status.ok()) {
    const ApiError error = api_error(status);
    const bool later = status.code() == Code::kUnavailable;
    // Whatever is wrong with the checkpoint, it is the one that the client named.
    refuse(
        call,
        kCompletions,
        later ? error : make_error(400, error.message, "invalid_request_error", "weights_refused"));
    return;
  }
  JsonWriter w;
  w.begin_object().field("success", true).field("message", "the weights are in use");
  w.field("weight_version", engine.stats().weights).end_object();
  reply(call, {.body = w.text()});
}

// The list, or the one model that the path names.
void App::models(const Call& call) {
  Status status = check_ready();
  const std::string_view path = without_base(call.request.path);
  const std::string_view name =
      path.substr(std::min(path.size(), std::string_view("/models/").size()));
  if (status.ok()) {
    status = check_model(*model_, name);
  }
  if (!status.ok()) {
    refuse(call, kChatCompletions, api_error(status));
    return;
  }
  JsonWriter w;
  const auto entry = [&](std::string_view id) {
    w.begin_object().field("id", id).field("object", "model").field("created", 0);
    w.field("owned_by", "cachalot").field("max_model_len", model_->context);
    w.field("context_length", model_->context);
    w.key("input_modalities").begin_array().value("text");
    if (model_->images) {
      w.value("image");
    }
    w.end_array().end_object();
  };
  if (!name.empty()) {
    entry(name);
    reply(call, {.body = w.text()});
    return;
  }
  w.begin_object().field("object", "list").key("data").begin_array();
  entry(model_->name);
  for (const std::string& alias : model_->aliases) {
    entry(alias);
  }
  w.end_array().end_object();
  reply(call, {.body = w.text()});
}

void App::health(const Call& call) {
  reply(call, {.body = R"({"status": "ok"})"});
}

void App::ready(const Call& call) {
  JsonWriter w;
  w.begin_object().field("status", state_name()).end_object();
  HttpResponse response;
  response.status = state_ == State::kReady ? 200 : 503;
  response.body = w.text();
  if (response.status != 200) {
    response.headers.emplace_back("retry-after", "5");
  }
  reply(call, std::move(response));
}

void App::metrics(const Call& call) {
  const std::optional<engine::EngineStats> stats = engine_stats();
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = prometheus_text(stats ? &*stats : nullptr, counts_);
  reply(call, std::move(response));
}

void App::stats(const Call& call) {
  const std::optional<engine::EngineStats> stats = engine_stats();
  reply(call, {.body = stats_json(stats ? &*stats : nullptr, state_name())});
}

void App::page(const Call& call) {
  HttpResponse response;
  response.content_type = "text/html; charset=utf-8";
  response.body = page_html();
  // The page needs nothing but itself; a script that slipped into a text could load nothing.
  response.headers.emplace_back("content-security-policy",
                                "default-src 'none'; script-src 'unsafe-inline'; style-src "
                                "'unsafe-inline'; connect-src 'self'; img-src data:; base-uri "
                                "'none'; form-action 'none'; frame-ancestors 'none'");
  reply(call, std::move(response));
}

}  // namespace cachalot::server
