// HTTP/1.1 over Boost.Beast and Asio: sockets, limits, timeouts, streams.
//
// A few I/O threads own the sockets, one strand per connection; handlers run on a pool of their
// own, since reading a long prompt takes time. Requests without a body have a thread apart, so that
// /health answers while all others are busy. TLS and HTTP/2 are left to a proxy in front.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/exchange.h"

namespace cachalot::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0: any free one
  int io_threads = 2;
  int handler_threads = 2;  // of requests with a body
  size_t max_body = size_t{64} << 20;
  size_t max_header = size_t{64} << 10;
  size_t max_queued = size_t{4} << 20;  // bytes of one stream that the client has not taken
  int64_t max_connections = 8192;
  std::chrono::milliseconds idle_timeout{75'000};   // between requests
  std::chrono::milliseconds read_timeout{60'000};   // for a header, and for a body
  std::chrono::milliseconds write_timeout{60'000};  // for one write to be taken
  std::chrono::milliseconds heartbeat{15'000};      // silence of a stream before a comment
};

// Called on the handler pool, or on the thread of requests without a body.
using HttpHandler = std::function<void(HttpRequest, std::shared_ptr<Exchange>)>;

// The body of an error that the HTTP layer itself answers with: 400, 413 or 431. The path is empty
// where the header could not be read.
using HttpErrorBody = std::function<std::string(
    int status, const std::string& message, std::string_view path, std::string_view request_id)>;

class HttpServer {
 public:
  // Listens and serves until stop(). Errors: kUnavailable naming the address.
  static Result<std::unique_ptr<HttpServer>> start(const HttpOptions& options,
                                                   HttpHandler handler,
                                                   HttpErrorBody error_body);
  // stop() without grace.
  ~HttpServer();

  uint16_t port() const;
  // Connections that are open now.
  int64_t connections() const;

  // Accepts nothing new, closes idle connections, lets answers in progress end for at most `grace`,
  // and joins the threads. True if no answer was cut off.
  bool stop(std::chrono::milliseconds grace);

  struct State;  // of http.cc

 private:
  explicit HttpServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace cachalot::server
