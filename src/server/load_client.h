// A client of many streams at once: what measures and tests a server, ours or another one's.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace cachalot::server {

struct LoadRequest {
  std::string method = "POST";
  std::string path;
  std::string body;  // JSON
  // The client hangs up without a word once it has had this many server-sent events; 0: as soon as
  // the request is out. Negative: it reads to the end.
  int64_t hang_up_after = -1;
};

struct LoadAnswer {
  struct Event {
    double seconds = 0;  // when it had come
    std::string data;
  };

  int status = 0;
  std::string body;           // of an answer that is not a stream
  std::vector<Event> events;  // of one that is
  double seconds = 0;         // until the end, since the client began to connect or to send
  int64_t bytes = 0;          // of the body, chunk sizes apart
  bool hung_up = false;       // as the request asked
  std::string failure;        // what cut the answer off, or empty
};

// Where a server listens.
struct LoadTarget {
  std::string host;  // an IP address
  uint16_t port = 0;

  // Errors: kInvalidArgument for anything but http://ADDRESS:PORT.
  static Result<LoadTarget> parse(const std::string& url);
};

// Runs `clients` clients until `next` has no request for any of them. Each has one request at a
// time, on a connection that it keeps as long as the server does. Both functions are called on this
// thread, with the client's number. A connection that fails is an answer with a failure; an answer
// that is silent for ten minutes fails.
void run_load(const LoadTarget& target,
              int64_t clients,
              const std::function<std::optional<LoadRequest>(int64_t client)>& next,
              const std::function<void(int64_t client, LoadAnswer answer)>& done);

// One request, alone.
LoadAnswer ask(const LoadTarget& target, LoadRequest request);

}  // namespace cachalot::server
