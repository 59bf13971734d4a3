// Coroutines under gcc 12: every awaited expression has its operands in named variables, and no
// coroutine is a lambda with captures.
#include "server/http.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "base/format.h"
#include "base/log.h"
#include "server/request_id.h"

namespace cachalot::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;

constexpr auto kToken = asio::as_tuple(asio::use_awaitable);
constexpr std::string_view kHeartbeat = ": keep-alive\n\n";
constexpr milliseconds kLinger{2000};  // for a refused client to read the answer
constexpr size_t kLingerBytes = size_t{1} << 20;

class Connection;

}  // namespace

struct HttpServer::State {
  HttpOptions options;
  HttpHandler handler;
  HttpErrorBody error_body;
  uint16_t port = 0;

  asio::io_context io;
  tcp::acceptor acceptor{asio::make_strand(io)};
  std::optional<asio::thread_pool> pool;
  asio::thread_pool light{1};  // of requests without a body
  std::vector<std::thread> threads;
  std::atomic<bool> stopping = false;
  bool stopped = false;

  std::mutex mutex;
  std::condition_variable changed;
  std::list<std::weak_ptr<Connection>> open;  // guarded by mutex
  int64_t count = 0;                          // guarded by mutex
};

namespace {

// The answer in progress on a connection. Its fields belong to the connection's strand.
class Answer final : public Exchange, public std::enable_shared_from_this<Answer> {
 public:
  Answer(asio::any_io_executor strand, size_t max_queued, std::string id)
      : strand_(std::move(strand)), wake_(strand_), max_queued_(max_queued), id_(std::move(id)) {}

  const std::string& id() const override { return id_; }

  void respond(HttpResponse response) override {
    on_strand([this, response = std::move(response)]() mutable {
      if (!head && !complete && !aborted) {
        head = std::move(response);
        complete = true;
        wake_.cancel();
      }
    });
  }

  void begin_stream(std::vector<std::pair<std::string, std::string>> headers) override {
    on_strand([this, headers = std::move(headers)]() mutable {
      if (!head && !aborted) {
        head.emplace();
        head->content_type = "text/event-stream; charset=utf-8";
        head->headers = std::move(headers);
        streaming = true;
        wake_.cancel();
      }
    });
  }

  void write(std::string bytes) override {
    on_strand([this, bytes = std::move(bytes)]() mutable {
      if (complete || aborted || bytes.empty()) {
        return;
      }
      queued_ += bytes.size();
      if (queued_ > max_queued_) {
        log_info("request {}: the client reads too slowly", id_);
        abort();
        return;
      }
      queue_.push_back(std::move(bytes));
      wake_.cancel();
    });
  }

  void end() override {
    on_strand([this] {
      complete = true;
      wake_.cancel();
    });
  }

  void post(std::function<void()> task) override { asio::post(strand_, std::move(task)); }

  void on_abort(std::function<void()> task) override {
    on_strand([this, task = std::move(task)]() mutable {
      if (aborted) {
        task();
      } else if (!complete) {
        abort_task_ = std::move(task);
      }
    });
  }

  // ---- for the connection, on the strand ----

  void abort() {
    if (aborted) {
      return;
    }
    aborted = true;
    queue_.clear();
    wake_.cancel();
    if (!complete && abort_task_) {
      std::exchange(abort_task_, nullptr)();
    }
  }

  // Everything queued, as one piece.
  std::string take() {
    std::string all;
    if (queue_.size() == 1) {
      all = std::move(queue_.front());
    } else {
      for (const std::string& piece : queue_) {
        all += piece;
      }
    }
    queue_.clear();
    queued_ = 0;
    return all;
  }

  // The task may hold this answer: it is dropped once it can no longer run.
  void forget_abort_task() { abort_task_ = nullptr; }

  asio::steady_timer& wake() { return wake_; }

  std::optional<HttpResponse> head;
  bool streaming = false;
  bool complete = false;
  bool aborted = false;

 private:
  template <class F>
  void on_strand(F task) {
    asio::dispatch(strand_,
                   [self = shared_from_this(), task = std::move(task)]() mutable { task(); });
  }

  asio::any_io_executor strand_;
  asio::steady_timer wake_;
  size_t max_queued_;
  std::string id_;
  std::deque<std::string> queue_;
  size_t queued_ = 0;
  std::function<void()> abort_task_;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(HttpServer::State& state, tcp::socket socket)
      : state_(state), stream_(std::move(socket)) {}

  HttpServer::State& state_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  bool idle_ = false;
  std::shared_ptr<Answer> answer_;

  // From any thread, when the server stops: `hard` cuts answers off.
  void stop(bool hard) {
    asio::post(stream_.get_executor(), [self = shared_from_this(), hard] {
      if (hard || self->idle_) {
        error_code ignored;
        self->stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
        self->stream_.socket().close(ignored);
      }
      if (hard && self->answer_ != nullptr) {
        self->answer_->abort();
      }
    });
  }
};

using ConnectionPtr = std::shared_ptr<Connection>;

std::string decoded(std::string_view text) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && digit(text[i + 1]) >= 0 &&
        digit(text[i + 2]) >= 0) {
      out.push_back(static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2])));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

std::string path_of(const http::request<http::string_body>& message) {
  const std::string_view target(message.target().data(), message.target().size());
  return decoded(target.substr(0, target.find('?')));
}

HttpRequest plain_request(http::request<http::string_body>&& message) {
  HttpRequest out;
  out.method = std::string(message.method_string());
  out.path = path_of(message);
  for (const auto& field : message) {
    std::string name(field.name_string());
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) {
      return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : static_cast<char>(c);
    });
    out.headers.emplace_back(std::move(name), std::string(field.value()));
  }
  out.body = std::move(message.body());
  out.id = request_id(out.header("x-request-id"));
  return out;
}

template <class Body>
void set_head(http::response<Body>& message,
              const HttpResponse& head,
              const std::string& id,
              unsigned version,
              bool keep_alive) {
  message.result(static_cast<unsigned>(head.status));
  message.version(version);
  message.set(http::field::server, "cachalot");
  message.set(http::field::content_type, head.content_type);
  message.set(http::field::cache_control, "no-store");
  message.set("x-content-type-options", "nosniff");
  if (!id.empty()) {
    message.set("x-request-id", id);
  }
  for (const auto& [name, value] : head.headers) {
    message.set(name, value);
  }
  message.keep_alive(keep_alive);
}

// What of a request shapes the message around the answer.
struct Framing {
  unsigned version = 11;
  bool keep_alive = false;
  bool head_alone = false;  // HEAD: the length of the body without the body
};

asio::awaitable<error_code> write_whole(ConnectionPtr c,
                                        HttpResponse response,
                                        std::string id,
                                        Framing framing) {
  http::response<http::string_body> message;
  set_head(message, response, id, framing.version, framing.keep_alive);
  message.body() = std::move(response.body);
  message.prepare_payload();
  http::response_serializer<http::string_body> serializer(message);
  c->stream_.expires_after(c->state_.options.write_timeout);
  error_code result;
  if (framing.head_alone) {
    auto [failed, bytes] = co_await http::async_write_header(c->stream_, serializer, kToken);
    result = failed;
  } else {
    auto [failed, bytes] = co_await http::async_write(c->stream_, serializer, kToken);
    result = failed;
  }
  co_return result;
}

// Lets a refused client read the answer: what it still sends is read and dropped for a while, since
// closing on unread bytes would reset the connection.
asio::awaitable<void> linger(ConnectionPtr c) {
  error_code ignored;
  c->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  c->stream_.expires_after(kLinger);
  std::array<char, 16384> dropped;
  const auto target = asio::buffer(dropped);
  for (size_t total = 0; total < kLingerBytes;) {
    auto [failed, bytes] = co_await c->stream_.async_read_some(target, kToken);
    if (failed) {
      break;
    }
    total += bytes;
  }
}

// Aborts the answer when the client closes its side. Pipelined bytes end the watch: from then on a
// failing write tells.
asio::awaitable<void> watch(ConnectionPtr c, std::shared_ptr<Answer> answer) {
  auto [failed] = co_await c->stream_.socket().async_wait(tcp::socket::wait_read, kToken);
  if (failed || answer->complete) {
    co_return;
  }
  char byte;
  const ssize_t got =
      ::recv(c->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) {
    answer->abort();
  }
}

asio::awaitable<error_code> write_bytes(ConnectionPtr c, std::string bytes, bool chunked) {
  error_code result;
  c->stream_.expires_after(c->state_.options.write_timeout);
  if (chunked) {
    const auto chunk = http::make_chunk(asio::buffer(bytes));
    auto [failed, sent] = co_await asio::async_write(c->stream_, chunk, kToken);
    result = failed;
  } else {
    const auto plain = asio::buffer(bytes);
    auto [failed, sent] = co_await asio::async_write(c->stream_, plain, kToken);
    result = failed;
  }
  co_return result;
}

// Sends the answer as it comes. False: the connection is of no further use.
asio::awaitable<bool> send_stream(ConnectionPtr c,
                                  std::shared_ptr<Answer> answer,
                                  Framing framing) {
  const bool chunked = framing.version >= 11;
  const bool keep_alive = framing.keep_alive;
  http::response<http::empty_body> message;
  set_head(message, *answer->head, answer->id(), framing.version, keep_alive && chunked);
  message.chunked(chunked);
  http::response_serializer<http::empty_body> serializer(message);
  c->stream_.expires_after(c->state_.options.write_timeout);
  auto [head_failed, head_bytes] =
      co_await http::async_write_header(c->stream_, serializer, kToken);
  if (head_failed) {
    answer->abort();
    co_return false;
  }
  for (;;) {
    if (answer->aborted) {
      co_return false;
    }
    std::string bytes = answer->take();
    if (bytes.empty() && answer->complete) {
      break;
    }
    if (bytes.empty()) {
      answer->wake().expires_after(c->state_.options.heartbeat);
      auto [woken] = co_await answer->wake().async_wait(kToken);
      if (woken) {
        continue;
      }
      bytes = kHeartbeat;
    }
    const error_code failed = co_await write_bytes(c, std::move(bytes), chunked);
    if (failed) {
      answer->abort();
      co_return false;
    }
  }
  if (chunked) {
    const auto last = http::make_chunk_last();
    auto [failed, sent] = co_await asio::async_write(c->stream_, last, kToken);
    co_return !failed && keep_alive;
  }
  co_return false;
}

// Waits for the answer and sends it. False: close the connection.
asio::awaitable<bool> send_answer(ConnectionPtr c,
                                  std::shared_ptr<Answer> answer,
                                  Framing framing) {
  while (!answer->head && !answer->aborted) {
    answer->wake().expires_at(std::chrono::steady_clock::time_point::max());
    co_await answer->wake().async_wait(kToken);
  }
  if (answer->aborted) {
    co_return false;
  }
  framing.keep_alive = framing.keep_alive && !c->state_.stopping;
  if (answer->streaming) {
    const bool reusable = co_await send_stream(c, answer, framing);
    co_return reusable;
  }
  HttpResponse response = std::move(*answer->head);
  const error_code failed = co_await write_whole(c, std::move(response), answer->id(), framing);
  co_return !failed && framing.keep_alive;
}

// The status for a request that could not be read; 0 if there is nobody to tell, as after a
// timeout, which closes the socket.
int status_of(const error_code& failed) {
  if (failed == http::error::body_limit) {
    return 413;
  }
  if (failed == http::error::header_limit || failed == http::error::buffer_overflow) {
    return 431;
  }
  // Every other parse error; the transport's errors are of another category.
  return failed.category() == http::make_error_code(http::error::bad_method).category() &&
                 failed != http::error::end_of_stream && failed != http::error::partial_message
             ? 400
             : 0;
}

asio::awaitable<void> refuse(ConnectionPtr c, error_code failed, std::string path) {
  const int status = status_of(failed);
  if (status == 0) {
    co_return;
  }
  HttpResponse response;
  response.status = status;
  const std::string message =
      status == 413 ? fmt::format("the request body is larger than {} bytes (--max-body)",
                                  c->state_.options.max_body)
      : status == 431
          ? fmt::format("the request header is larger than {} bytes", c->state_.options.max_header)
          : fmt::format("not an HTTP request: {}", failed.message());
  std::string id = request_id("");
  response.body = c->state_.error_body(status, message, path, id);
  const error_code write_failed =
      co_await write_whole(c, std::move(response), std::move(id), Framing());
  if (!write_failed) {
    co_await linger(c);
  }
}

// Reads one request, answers it. False: close the connection.
asio::awaitable<bool> serve_one(ConnectionPtr c) {
  const HttpOptions& options = c->state_.options;
  http::request_parser<http::string_body> parser;
  parser.header_limit(static_cast<uint32_t>(options.max_header));
  parser.body_limit(options.max_body);

  // The wait for a next request is not the wait for its bytes.
  if (c->buffer_.size() == 0) {
    c->idle_ = true;
    c->stream_.expires_after(options.idle_timeout);
    const auto target = c->buffer_.prepare(4096);
    auto [failed, bytes] = co_await c->stream_.async_read_some(target, kToken);
    c->idle_ = false;
    if (failed) {
      co_return false;
    }
    c->buffer_.commit(bytes);
  }
  c->stream_.expires_after(options.read_timeout);
  auto [header_failed, header_bytes] =
      co_await http::async_read_header(c->stream_, c->buffer_, parser, kToken);
  if (header_failed) {
    co_await refuse(c, header_failed, std::string());
    co_return false;
  }
  const std::string_view expect(parser.get()[http::field::expect].data(),
                                parser.get()[http::field::expect].size());
  if (beast::iequals(boost::string_view(expect.data(), expect.size()), "100-continue")) {
    const std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    const auto bytes = asio::buffer(go_on);
    auto [failed, sent] = co_await asio::async_write(c->stream_, bytes, kToken);
    if (failed) {
      co_return false;
    }
  }
  c->stream_.expires_after(options.read_timeout);
  auto [body_failed, body_bytes] =
      co_await http::async_read(c->stream_, c->buffer_, parser, kToken);
  if (body_failed) {
    std::string path = path_of(parser.get());
    co_await refuse(c, body_failed, std::move(path));
    co_return false;
  }
  c->stream_.expires_never();

  const Framing framing{.version = parser.get().version(),
                        .keep_alive = parser.get().keep_alive(),
                        .head_alone = parser.get().method() == http::verb::head};
  HttpRequest request = plain_request(parser.release());
  const auto answer =
      std::make_shared<Answer>(c->stream_.get_executor(), options.max_queued, request.id);
  c->answer_ = answer;
  asio::co_spawn(c->stream_.get_executor(), watch(c, answer), asio::detached);
  asio::thread_pool& pool = request.body.empty() ? c->state_.light : *c->state_.pool;
  asio::post(pool, [c, answer, request = std::move(request)]() mutable {
    c->state_.handler(std::move(request), answer);
  });
  const bool reusable = co_await send_answer(c, answer, framing);
  c->answer_ = nullptr;
  answer->complete = true;
  answer->forget_abort_task();
  error_code ignored;
  c->stream_.socket().cancel(ignored);  // the watch
  co_return reusable;
}

asio::awaitable<void> serve_connection(ConnectionPtr c) {
  error_code ignored;
  c->stream_.socket().set_option(tcp::no_delay(true), ignored);
  for (;;) {
    if (c->state_.stopping && c->buffer_.size() == 0) {
      break;
    }
    const bool again = co_await serve_one(c);
    if (!again) {
      break;
    }
  }
  c->stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
  c->stream_.socket().close(ignored);
}

void remove(HttpServer::State& state, const std::list<std::weak_ptr<Connection>>::iterator& it) {
  const std::lock_guard lock(state.mutex);
  state.open.erase(it);
  --state.count;
  state.changed.notify_all();
}

asio::awaitable<void> accept_loop(HttpServer::State* state) {
  for (;;) {
    const auto strand = asio::make_strand(state->io);
    auto [failed, socket] = co_await state->acceptor.async_accept(strand, kToken);
    if (state->stopping || failed == asio::error::operation_aborted) {
      co_return;
    }
    if (failed) {
      // Out of file descriptors, most likely: wait for some to be closed.
      log_warning("accepting a connection: {}", failed.message());
      asio::steady_timer pause(state->acceptor.get_executor(), milliseconds(100));
      co_await pause.async_wait(kToken);
      continue;
    }
    const auto connection = std::make_shared<Connection>(*state, std::move(socket));
    std::list<std::weak_ptr<Connection>>::iterator place;
    {
      const std::lock_guard lock(state->mutex);
      // stop() tells those that are listed under the lock; one that comes later is let go.
      if (state->stopping || state->count >= state->options.max_connections) {
        continue;  // closes the socket
      }
      ++state->count;
      place = state->open.insert(state->open.end(), connection);
    }
    asio::co_spawn(strand, serve_connection(connection), [state, place](std::exception_ptr) {
      remove(*state, place);
    });
  }
}

}  // namespace

HttpServer::HttpServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpOptions& options,
                                                      HttpHandler handler,
                                                      HttpErrorBody error_body) {
  auto state = std::make_unique<State>();
  state->options = options;
  state->handler = std::move(handler);
  state->error_body = std::move(error_body);

  const auto unavailable = [&](const error_code& failed) {
    return error(Code::kUnavailable, "{}:{}: {}", options.host, options.port, failed.message());
  };
  error_code failed;
  const auto address =
      asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, failed);
  if (failed) {
    return invalid("--host '{}' is not an IP address", options.host);
  }
  const tcp::endpoint endpoint(address, options.port);
  state->acceptor.open(endpoint.protocol(), failed);
  if (!failed) {
    state->acceptor.set_option(asio::socket_base::reuse_address(true), failed);
  }
  if (!failed) {
    state->acceptor.bind(endpoint, failed);
  }
  if (!failed) {
    state->acceptor.listen(asio::socket_base::max_listen_connections, failed);
  }
  if (failed) {
    return unavailable(failed);
  }
  state->port = state->acceptor.local_endpoint(failed).port();
  state->pool.emplace(static_cast<size_t>(options.handler_threads));
  asio::co_spawn(state->acceptor.get_executor(), accept_loop(state.get()), asio::detached);
  for (int i = 0; i < options.io_threads; ++i) {
    state->threads.emplace_back([s = state.get()] { s->io.run(); });
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(state)));
}

HttpServer::~HttpServer() {
  stop(milliseconds(0));
}

uint16_t HttpServer::port() const {
  return state_->port;
}

int64_t HttpServer::connections() const {
  const std::lock_guard lock(state_->mutex);
  return state_->count;
}

bool HttpServer::stop(milliseconds grace) {
  State& state = *state_;
  if (std::exchange(state.stopped, true)) {
    return true;
  }
  state.stopping = true;
  asio::post(state.acceptor.get_executor(), [&state] {
    error_code ignored;
    state.acceptor.close(ignored);
  });
  const auto tell = [&](bool hard) {
    const std::lock_guard lock(state.mutex);
    for (const std::weak_ptr<Connection>& connection : state.open) {
      if (const ConnectionPtr c = connection.lock()) {
        c->stop(hard);
      }
    }
  };
  const auto wait = [&](milliseconds limit) {
    std::unique_lock lock(state.mutex);
    return state.changed.wait_for(lock, limit, [&] { return state.count == 0; });
  };
  tell(false);
  const bool clean = wait(grace);
  if (!clean) {
    tell(true);
    wait(milliseconds(5000));
  }
  state.pool->join();
  state.light.join();
  state.io.stop();
  for (std::thread& thread : state.threads) {
    thread.join();
  }
  // The threads may have ended before they came to it; clients would wait in the queue of the port.
  error_code ignored;
  state.acceptor.close(ignored);
  return clean;
}

}  // namespace cachalot::server
