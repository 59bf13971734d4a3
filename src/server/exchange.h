// One HTTP request and the way to answer it, without the network: what http.cc implements and what
// tests replace.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cachalot::server {

struct HttpRequest {
  std::string method;                                        // upper case
  std::string path;                                          // decoded target without its query
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;
  std::string id;  // of the request: the client's x-request-id, or a fresh one

  // The first header of this lower-case name; empty if there is none.
  std::string_view header(std::string_view name) const {
    for (const auto& [key, value] : headers) {
      if (key == name) {
        return value;
      }
    }
    return {};
  }
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
};

// The answer to one request: either respond(), or begin_stream(), write()..., end(). All functions
// may be called from any thread and never block; what arrives after the end or after the abort is
// dropped. Calls from one thread keep their order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual const std::string& id() const = 0;  // of the request

  virtual void respond(HttpResponse response) = 0;

  // Begins a stream of server-sent events. While nothing is written, comments keep the connection
  // alive.
  virtual void begin_stream(std::vector<std::pair<std::string, std::string>> headers) = 0;
  // A client that reads too slowly for the bounded queue is aborted.
  virtual void write(std::string bytes) = 0;
  virtual void end() = 0;

  // Runs a task on the exchange's own strand: tasks of one exchange never run at the same time, and
  // run in the order of post().
  virtual void post(std::function<void()> task) = 0;
  // The task runs on the strand, at most once, if the client goes away or stalls before the answer
  // is complete; at once if that has happened already.
  virtual void on_abort(std::function<void()> task) = 0;
};

}  // namespace cachalot::server
