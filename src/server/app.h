// The server's routes: HTTP requests in, jobs and answers out. No sockets here.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "server/exchange.h"
#include "server/generation.h"
#include "server/metrics.h"

namespace cachalot::server {

struct AppOptions {
  std::vector<std::string> api_keys;  // none: open to everyone who reaches the port
  // Of the routes that change the server; none: the API keys, and without those nobody.
  std::vector<std::string> admin_keys;
  double request_timeout = 0;  // seconds that a request may take at most; 0: any time
};

// Thread-safe. Exists before the model is loaded, so that clients learn that it is loading.
class App {
 public:
  explicit App(AppOptions options) : options_(std::move(options)) {}

  // From here on requests are served. Both must outlive every exchange.
  void serve(engine::Engine& engine, const ServedModel& model);
  // New requests get 503; those in progress go on.
  void drain();

  void handle(HttpRequest request, std::shared_ptr<Exchange> exchange);
  // The body of an error of a request that could not be read: HttpErrorBody.
  static std::string unread_error(int status,
                                  const std::string& message,
                                  std::string_view path,
                                  std::string_view request_id);

 private:
  enum class State : uint8_t { kLoading, kReady, kDraining };

  struct Route;
  static const std::vector<Route>& routes();

  // A request on its way to the answer.
  struct Call {
    const HttpRequest& request;
    const std::shared_ptr<Exchange>& exchange;
    std::string endpoint;  // as the metrics name it
  };

  // Who may call a route: everybody, holders of an API key, holders of an admin key.
  enum class Access : uint8_t { kOpen, kKey, kAdmin };
  Status check_access(const HttpRequest& request, Access access) const;
  Status check_ready() const;
  void refuse(const Call& call, const Dialect& dialect, const ApiError& error);
  void reply(const Call& call, HttpResponse response);

  using TimePoint = std::chrono::steady_clock::time_point;
  std::optional<TimePoint> deadline_of(const GenerationRequest& request, TimePoint arrival) const;
  void generate(const Call& call, const Dialect& dialect);
  void count_tokens(const Call& call);
  void tokenize(const Call& call);
  void detokenize(const Call& call);
  void update_weights(const Call& call);
  void models(const Call& call);
  void health(const Call& call);
  void ready(const Call& call);
  void metrics(const Call& call);
  void stats(const Call& call);
  void page(const Call& call);

  std::string state_name() const;
  std::optional<engine::EngineStats> engine_stats() const;

  AppOptions options_;
  RequestCounts counts_;
  std::atomic<State> state_ = State::kLoading;
  std::atomic<engine::Engine*> engine_ = nullptr;
  const ServedModel* model_ = nullptr;
};

// The web page, embedded from page.html.
std::string_view page_html();

}  // namespace cachalot::server
