// Coroutines under gcc 12: every awaited expression has its operands in named variables, and no
// coroutine is a lambda with captures.
#include "server/load_client.h"

#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <chrono>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/format.h"

namespace cachalot::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr auto kToken = asio::as_tuple(asio::use_awaitable);
constexpr std::chrono::minutes kSilence{10};

// Splits a stream into the data of its events.
class EventSplitter {
 public:
  void push(std::string_view bytes, double seconds, std::vector<LoadAnswer::Event>& events) {
    for (size_t end = 0; (end = bytes.find('\n')) != std::string_view::npos;) {
      line_ += bytes.substr(0, end);
      bytes.remove_prefix(end + 1);
      if (line_.ends_with('\r')) {
        line_.pop_back();
      }
      if (line_.starts_with("data: ")) {
        data_ += line_.substr(6);
      } else if (line_.empty() && !data_.empty()) {
        events.push_back({seconds, std::exchange(data_, {})});
      }
      line_.clear();
    }
    line_ += bytes;
  }

 private:
  std::string line_;
  std::string data_;
};

// What all clients of one run share.
struct Load {
  asio::io_context io{1};
  tcp::endpoint endpoint;
  const std::function<std::optional<LoadRequest>(int64_t)>& next;
  const std::function<void(int64_t, LoadAnswer)>& done;
};

struct Client {
  explicit Client(Load& shared) : load(shared), stream(shared.io) {}

  void disconnect() {
    error_code ignored;
    stream.socket().close(ignored);
    buffer.clear();
    connected = false;
  }

  Load& load;
  beast::tcp_stream stream;
  beast::flat_buffer buffer;
  bool connected = false;
};

asio::awaitable<error_code> send(Client& client, const LoadRequest& request) {
  if (!client.connected) {
    const tcp::endpoint endpoint = client.load.endpoint;
    auto [failed] = co_await client.stream.async_connect(endpoint, kToken);
    if (failed) {
      co_return failed;
    }
    error_code ignored;
    client.stream.socket().set_option(tcp::no_delay(true), ignored);
    client.connected = true;
  }
  http::request<http::string_body> message;
  message.method_string(beast::string_view(request.method.data(), request.method.size()));
  message.target(beast::string_view(request.path.data(), request.path.size()));
  message.set(http::field::host, client.load.endpoint.address().to_string());
  message.set(http::field::content_type, "application/json");
  message.body() = request.body;
  message.prepare_payload();
  auto [failed, bytes] = co_await http::async_write(client.stream, message, kToken);
  co_return failed;
}

// Sends one request and reads its answer; the client stays connected where the server allows it.
asio::awaitable<error_code> exchange(Client& client,
                                     const LoadRequest& request,
                                     double begin,
                                     LoadAnswer& answer) {
  client.stream.expires_after(kSilence);
  const error_code unsent = co_await send(client, request);
  if (unsent) {
    co_return unsent;
  }
  answer.hung_up = request.hang_up_after == 0;
  if (answer.hung_up) {
    co_return error_code();
  }
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(boost::none);
  auto [no_header, header_bytes] =
      co_await http::async_read_header(client.stream, client.buffer, parser, kToken);
  if (no_header) {
    co_return no_header;
  }
  answer.status = static_cast<int>(parser.get().result_int());
  const bool events = parser.get()[http::field::content_type].starts_with("text/event-stream");
  EventSplitter splitter;
  std::array<char, 16384> piece;
  while (!parser.is_done()) {
    auto& body = parser.get().body();
    body.data = piece.data();
    body.size = piece.size();
    client.stream.expires_after(kSilence);
    auto [cut, read] = co_await http::async_read_some(client.stream, client.buffer, parser, kToken);
    const std::string_view got(piece.data(), piece.size() - body.size);
    answer.bytes += static_cast<int64_t>(got.size());
    if (events) {
      splitter.push(got, now_seconds() - begin, answer.events);
    } else {
      answer.body += got;
    }
    if (cut && cut != http::error::need_buffer) {
      co_return cut;
    }
    if (request.hang_up_after > 0 &&
        static_cast<int64_t>(answer.events.size()) >= request.hang_up_after) {
      answer.hung_up = true;
      co_return error_code();
    }
  }
  client.connected = parser.get().keep_alive();
  co_return error_code();
}

asio::awaitable<void> run_client(Load& load, int64_t number) {
  Client client(load);
  while (const std::optional<LoadRequest> request = load.next(number)) {
    LoadAnswer answer;
    const double begin = now_seconds();
    const error_code failed = co_await exchange(client, *request, begin, answer);
    answer.seconds = now_seconds() - begin;
    if (failed) {
      answer.failure = failed.message();
    }
    if (failed || answer.hung_up || !client.connected) {
      client.disconnect();
    }
    load.done(number, std::move(answer));
  }
  client.disconnect();
}

}  // namespace

Result<LoadTarget> LoadTarget::parse(const std::string& url) {
  constexpr std::string_view kScheme = "http://";
  std::string_view rest = url;
  if (rest.starts_with(kScheme)) {
    rest.remove_prefix(kScheme.size());
    while (rest.ends_with('/')) {
      rest.remove_suffix(1);
    }
    LoadTarget target;
    const size_t colon = rest.rfind(':');
    if (colon != std::string_view::npos) {
      const std::string_view port = rest.substr(colon + 1);
      target.host = rest.substr(0, colon);
      const auto [end, failed] =
          std::from_chars(port.data(), port.data() + port.size(), target.port);
      error_code bad_address;
      asio::ip::make_address(target.host, bad_address);
      if (failed == std::errc() && end == port.data() + port.size() && !bad_address) {
        return target;
      }
    }
  }
  return invalid("'{}' is not an address like http://127.0.0.1:8000", url);
}

void run_load(const LoadTarget& target,
              int64_t clients,
              const std::function<std::optional<LoadRequest>(int64_t)>& next,
              const std::function<void(int64_t, LoadAnswer)>& done) {
  Load load{
      .endpoint = {asio::ip::make_address(target.host), target.port}, .next = next, .done = done};
  for (int64_t i = 0; i < clients; ++i) {
    asio::co_spawn(load.io, run_client(load, i), asio::detached);
  }
  load.io.run();
}

LoadAnswer ask(const LoadTarget& target, LoadRequest request) {
  std::optional<LoadRequest> once = std::move(request);
  LoadAnswer out;
  run_load(
      target,
      1,
      [&](int64_t) { return std::exchange(once, std::nullopt); },
      [&](int64_t, LoadAnswer answer) { out = std::move(answer); });
  return out;
}

}  // namespace cachalot::server
