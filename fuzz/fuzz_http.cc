// Any bytes on a connection. The server answers or closes, and serves the next connection.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "server/http.h"

namespace {

using namespace cachalot;

uint16_t port() {
  static const std::unique_ptr<server::HttpServer> http = [] {
    server::HttpOptions options;
    options.port = 0;
    options.max_body = 4096;
    options.max_header = 4096;
    auto started = server::HttpServer::start(
        options,
        [](server::HttpRequest request, std::shared_ptr<server::Exchange> exchange) {
          if (request.path.size() % 2 == 0) {
            exchange->respond({.body = request.body});
            return;
          }
          exchange->begin_stream({});
          exchange->write(request.body);
          exchange->end();
        },
        [](int, const std::string& message, std::string_view, std::string_view) {
          return message;
        });
    CACHALOT_CHECK(started.ok());
    return std::move(*started);
  }();
  return http->port();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  CACHALOT_CHECK(fd >= 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port());
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CACHALOT_CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  static_cast<void>(::send(fd, data, size, MSG_NOSIGNAL));
  ::shutdown(fd, SHUT_WR);
  char answer[4096];
  while (::recv(fd, answer, sizeof(answer), 0) > 0) {
  }
  ::close(fd);
  return 0;
}
