// The HTTP layer over real sockets.
#include "server/http.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

namespace cachalot::server {
namespace {

using std::chrono::milliseconds;

// A client that sends bytes as they are.
class Socket {
 public:
  explicit Socket(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Socket() { close(); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void close() {
    if (fd_ >= 0) {
      ::close(std::exchange(fd_, -1));
    }
  }
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) {
        return false;
      }
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  // Reads until `mark` has come, or until the end. False: the end, or nothing for 10 s.
  bool read_until(std::string_view mark) {
    while (mark.empty() || received_.find(mark) == std::string::npos) {
      pollfd ready{fd_, POLLIN, 0};
      if (::poll(&ready, 1, 10'000) <= 0) {
        return false;
      }
      char bytes[65536];
      const ssize_t got = ::recv(fd_, bytes, sizeof(bytes), 0);
      if (got <= 0) {
        ended_ = true;
        return false;
      }
      received_.append(bytes, static_cast<size_t>(got));
    }
    return true;
  }
  // Everything until the server closes.
  std::string read_all() {
    read_until("");
    return received_;
  }
  std::string take() { return std::exchange(received_, {}); }
  bool ended() const { return ended_; }
  int fd() const { return fd_; }

 private:
  int fd_;
  std::string received_;
  bool ended_ = false;
};

class HttpTest : public testing::Test {
 protected:
  void start(HttpHandler handler, HttpOptions options = {}) {
    options.port = 0;
    auto server = HttpServer::start(
        options,
        std::move(handler),
        [](int status, const std::string& m, std::string_view path, std::string_view) {
          return std::to_string(status) + " " + m + " at " + std::string(path);
        });
    ASSERT_TRUE(server.ok()) << server.error().message();
    server_ = std::move(*server);
  }
  uint16_t port() const { return server_->port(); }

  // Waits for a condition that another thread brings about.
  template <class F>
  static bool eventually(F condition) {
    for (int i = 0; i < 2000; ++i) {
      if (condition()) {
        return true;
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }

  std::unique_ptr<HttpServer> server_;
};

std::string no_body(int, const std::string&, std::string_view, std::string_view) {
  return "";
}

void echo(HttpRequest request, std::shared_ptr<Exchange> exchange) {
  HttpResponse response;
  response.content_type = "text/plain";
  response.body = request.method + " " + request.path + " " + request.body;
  exchange->respond(std::move(response));
}

TEST_F(HttpTest, AnswersAndKeepsTheConnection) {
  start(echo);
  Socket socket(port());
  for (int i = 0; i < 3; ++i) {
    socket.send(
        "POST /a%20b?x=1 HTTP/1.1\r\nHost: x\r\nX-Request-Id: r-7\r\nContent-Length: 2\r\n\r\nhi");
    ASSERT_TRUE(socket.read_until("POST /a b hi"));
    const std::string answer = socket.take();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n"));
    EXPECT_NE(answer.find("x-request-id: r-7\r\n"), std::string::npos) << answer;
  }
}

TEST_F(HttpTest, PipelinedAndSplitRequests) {
  start(echo);
  Socket socket(port());
  socket.send("GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(socket.read_until("GET /2 "));
  socket.take();
  for (const char byte : std::string("POST /3 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
                                     "chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")) {
    socket.send({&byte, 1});
  }
  ASSERT_TRUE(socket.read_until("POST /3 abc"));
}

// Requests with bodies that take all of the handlers' time.
TEST_F(HttpTest, RequestsWithoutABodyDoNotWaitForOthers) {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int held = 0;
  start([&](HttpRequest request, std::shared_ptr<Exchange> exchange) {
    if (!request.body.empty()) {
      std::unique_lock lock(mutex);
      ++held;
      changed.wait_for(lock, std::chrono::seconds(20), [&] { return open; });
    }
    echo(std::move(request), exchange);
  });
  std::vector<std::unique_ptr<Socket>> heavy;
  for (int i = 0; i < 4; ++i) {
    heavy.push_back(std::make_unique<Socket>(port()));
    heavy.back()->send("POST /work HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi");
  }
  ASSERT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return held == HttpOptions().handler_threads;
  }));
  Socket socket(port());
  socket.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(socket.read_until("GET /health"));
  {
    const std::lock_guard lock(mutex);
    open = true;
  }
  changed.notify_all();
  for (const auto& each : heavy) {
    EXPECT_TRUE(each->read_until("POST /work hi"));
  }
}

TEST_F(HttpTest, Http10AndConnectionClose) {
  start(echo);
  Socket old(port());
  old.send("GET /x HTTP/1.0\r\n\r\n");
  EXPECT_NE(old.read_all().find("GET /x"), std::string::npos);
  Socket close(port());
  close.send("GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_NE(close.read_all().find("GET /x"), std::string::npos);
  EXPECT_TRUE(close.ended());
}

TEST_F(HttpTest, HeadHasNoBody) {
  start(echo);
  Socket socket(port());
  socket.send("HEAD /x HTTP/1.1\r\nHost: x\r\n\r\nGET /y HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(socket.read_until("GET /y "));
  const std::string both = socket.take();
  EXPECT_NE(both.find("Content-Length: 8\r\n"), std::string::npos) << both;
  EXPECT_EQ(both.find("HEAD /x"), std::string::npos) << both;
}

TEST_F(HttpTest, ExpectContinue) {
  start(echo);
  Socket socket(port());
  socket.send("POST /x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  ASSERT_TRUE(socket.read_until("100 Continue\r\n\r\n"));
  socket.send("hi");
  ASSERT_TRUE(socket.read_until("POST /x hi"));
}

TEST_F(HttpTest, LimitsAndMalformedRequests) {
  HttpOptions options;
  options.max_body = 1000;
  options.max_header = 2000;
  options.read_timeout = milliseconds(300);
  start(echo, options);
  const std::string big(5000, 'x');
  const std::pair<std::string, std::string> cases[] = {
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n", "413"},
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n" + big, "413"},
      {"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n" + big +
           "\r\n0\r\n\r\n",
       "413"},
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n", "400"},
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", "400"},
      {"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
       "400"},
      {"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", "400"},
      {"GET / HTTP/1.1\r\nX: " + big + "\r\n\r\n", "431"},
      {"hello\r\n\r\n", "400"},
      {"GET / HTTP/9.9\r\n\r\n", "400"},
      {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400"},
      {"GET / HTTP/1.1\r\nHost: x", ""},
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab", ""},
  };
  for (const auto& [bytes, status] : cases) {
    Socket socket(port());
    socket.send(bytes);
    const std::string answer = socket.read_all();
    EXPECT_TRUE(status.empty() ? answer.empty() : answer.starts_with("HTTP/1.1 " + status))
        << bytes.substr(0, 70) << "\n"
        << socket.take();
  }
  Socket good(port());
  good.send("GET /still HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(good.read_until("GET /still"));
}

TEST_F(HttpTest, StreamsInChunksWithHeartbeats) {
  HttpOptions options;
  options.heartbeat = milliseconds(20);
  std::shared_ptr<Exchange> held;
  std::mutex mutex;
  start(
      [&](HttpRequest request, std::shared_ptr<Exchange> exchange) {
        if (request.path != "/stream") {
          echo(std::move(request), std::move(exchange));
          return;
        }
        const std::lock_guard lock(mutex);
        held = exchange;
        exchange->begin_stream({{"x-extra", "1"}});
      },
      options);
  Socket socket(port());
  socket.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(socket.read_until(": keep-alive\n\n"));
  const std::lock_guard lock(mutex);
  held->write("data: 1\n\n");
  ASSERT_TRUE(socket.read_until("9\r\ndata: 1\n\n\r\n"));
  held->write("data: 2\n\n");
  held->end();
  ASSERT_TRUE(socket.read_until("\r\n0\r\n\r\n"));
  const std::string all = socket.take();
  EXPECT_NE(all.find("Content-Type: text/event-stream"), std::string::npos);
  EXPECT_NE(all.find("x-extra: 1"), std::string::npos);
  // What comes after the end is dropped; the connection serves on.
  held->write("late");
  socket.send("GET /next HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(socket.read_until("GET /next"));
  EXPECT_EQ(socket.take().find("late"), std::string::npos);
  held = nullptr;
}

TEST_F(HttpTest, A31_DisconnectsAreNoticed) {
  std::atomic<int> aborted = 0;
  std::mutex mutex;
  std::vector<std::shared_ptr<Exchange>> held;
  start([&](HttpRequest request, std::shared_ptr<Exchange> exchange) {
    exchange->on_abort([&] { ++aborted; });
    if (request.path == "/stream") {
      exchange->begin_stream({});
    }
    const std::lock_guard lock(mutex);
    held.push_back(std::move(exchange));
  });
  int expected = 0;
  for (const char* path : {"/stream", "/whole"}) {
    Socket socket(port());
    socket.send("GET " + std::string(path) + " HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_TRUE(eventually([&] {
      const std::lock_guard lock(mutex);
      return held.size() == static_cast<size_t>(expected + 1);
    }));
    socket.close();
    ++expected;
    EXPECT_TRUE(eventually([&] { return aborted == expected; })) << path;
  }
  EXPECT_TRUE(eventually([&] { return server_->connections() == 0; }));
  // Answers that nobody waits for are dropped, and late interest in the end is satisfied at once.
  for (const auto& exchange : held) {
    exchange->write("x");
    exchange->respond({});
    exchange->on_abort([&] { ++aborted; });
  }
  EXPECT_TRUE(eventually([&] { return aborted == 4; }));
  held.clear();
}

TEST_F(HttpTest, SlowClientsAreCutOff) {
  HttpOptions options;
  options.max_queued = 1 << 20;
  std::atomic<bool> aborted = false;
  start(
      [&](HttpRequest, std::shared_ptr<Exchange> exchange) {
        exchange->on_abort([&] { aborted = true; });
        exchange->begin_stream({});
        for (int i = 0; i < 400; ++i) {
          exchange->write(std::string(size_t{1} << 16, 'x'));
        }
      },
      options);
  Socket socket(port());
  socket.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(eventually([&] { return aborted.load(); }));
}

TEST_F(HttpTest, ManyStreamsAtOnceStayApart) {
  std::mutex mutex;
  std::vector<std::shared_ptr<Exchange>> held;
  start([&](HttpRequest request, std::shared_ptr<Exchange> exchange) {
    exchange->begin_stream({});
    exchange->write(request.path + "\n");
    const std::lock_guard lock(mutex);
    held.push_back(std::move(exchange));
  });
  constexpr size_t kCount = 200;
  std::vector<std::unique_ptr<Socket>> sockets;
  for (size_t i = 0; i < kCount; ++i) {
    sockets.push_back(std::make_unique<Socket>(port()));
    sockets.back()->send("GET /" + std::to_string(i) +
                         " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  }
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return held.size() == kCount;
  }));
  for (int round = 0; round < 5; ++round) {
    for (const auto& exchange : held) {
      exchange->write("tick\n");
    }
  }
  for (const auto& exchange : held) {
    exchange->end();
  }
  held.clear();
  for (size_t i = 0; i < kCount; ++i) {
    const std::string all = sockets[i]->read_all();
    EXPECT_NE(all.find("/" + std::to_string(i) + "\n"), std::string::npos);
    size_t ticks = 0;
    for (size_t at = 0; (at = all.find("tick\n", at)) != std::string::npos; ++at) {
      ++ticks;
    }
    EXPECT_EQ(ticks, 5);
  }
}

TEST_F(HttpTest, DrainsBeforeItStops) {
  std::shared_ptr<Exchange> held;
  std::atomic<bool> arrived = false;
  start([&](HttpRequest, std::shared_ptr<Exchange> exchange) {
    held = std::move(exchange);
    arrived = true;
  });
  Socket idle(port());
  Socket busy(port());
  busy.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(eventually([&] { return arrived.load(); }));
  EXPECT_TRUE(eventually([&] { return server_->connections() == 2; }));
  std::thread answer([&] {
    std::this_thread::sleep_for(milliseconds(100));
    held->respond({.body = "done"});
    held = nullptr;
  });
  EXPECT_TRUE(server_->stop(milliseconds(10'000)));
  answer.join();
  EXPECT_NE(busy.read_all().find("done"), std::string::npos);
  EXPECT_EQ(idle.read_all(), "");
}

TEST_F(HttpTest, StopWithoutGraceCutsOff) {
  std::shared_ptr<Exchange> held;
  std::atomic<bool> arrived = false;
  std::atomic<bool> aborted = false;
  start([&](HttpRequest, std::shared_ptr<Exchange> exchange) {
    exchange->on_abort([&] { aborted = true; });
    held = std::move(exchange);
    arrived = true;
  });
  Socket socket(port());
  socket.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(eventually([&] { return arrived.load(); }));
  EXPECT_FALSE(server_->stop(milliseconds(10)));
  EXPECT_TRUE(aborted);
  held = nullptr;
}

// Whatever its threads were doing, a stopped server no longer listens: a client is refused and does
// not wait in a queue that nobody serves.
TEST_F(HttpTest, StopClosesThePort) {
  for (int i = 0; i < 200; ++i) {
    start(echo);
    server_->stop(std::chrono::milliseconds(0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_GE(fd, 0);
    EXPECT_NE(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0) << i;
    ::close(fd);
  }
}

TEST_F(HttpTest, TakenPortsAreAnError) {
  start(echo);
  HttpOptions options;
  options.port = port();
  const auto second = HttpServer::start(options, echo, no_body);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().message().find(std::to_string(port())), std::string::npos);
  options.host = "nowhere.example";
  EXPECT_FALSE(HttpServer::start(options, echo, no_body).ok());
}

}  // namespace
}  // namespace cachalot::server
