// Shared by the tests of server/: an exchange without a network, and an app over a fake engine.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "server/app.h"
#include "tests/server/fake_engine.h"
#include "tests/text/support.h"

namespace cachalot::server {

using json = nlohmann::ordered_json;

// Records the answer. Its strand is a thread of its own.
class TestExchange final : public Exchange {
 public:
  TestExchange() : thread_([this] { run(); }) {}
  // Ends the strand and forgets what is left: afterwards nothing refers back to this object. Not on
  // the strand.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
    tasks_.clear();
    abort_task_ = nullptr;
  }

  const std::string& id() const override { return id_; }
  void respond(HttpResponse response) override {
    const std::lock_guard lock(mutex_);
    response_ = std::move(response);
    complete_ = true;
    changed_.notify_all();
  }
  void begin_stream(std::vector<std::pair<std::string, std::string>>) override {
    const std::lock_guard lock(mutex_);
    response_.content_type = "text/event-stream";
  }
  void write(std::string bytes) override {
    const std::lock_guard lock(mutex_);
    response_.body += bytes;
    changed_.notify_all();
  }
  void end() override {
    const std::lock_guard lock(mutex_);
    complete_ = true;
    changed_.notify_all();
  }
  void post(std::function<void()> task) override {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void on_abort(std::function<void()> task) override {
    const std::lock_guard lock(mutex_);
    abort_task_ = std::move(task);
  }

  // What the network does when the client goes away.
  void abort() {
    std::function<void()> task;
    {
      const std::lock_guard lock(mutex_);
      task = std::exchange(abort_task_, nullptr);
      complete_ = true;
    }
    if (task) {
      post(task);
    }
  }
  // The whole answer.
  HttpResponse wait() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [this] { return complete_; }))
        << response_.body;
    return response_;
  }
  // Waits until the stream holds `text`.
  void wait_for(const std::string& text) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] {
      return response_.body.find(text) != std::string::npos;
    })) << response_.body;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (stop_) {
        return;
      }
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::string id_ = "req-test";
  std::mutex mutex_;
  std::condition_variable changed_;
  HttpResponse response_;
  bool complete_ = false;
  bool stop_ = false;
  std::function<void()> abort_task_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

// One event of a stream.
struct SseEvent {
  std::string name;
  json data;  // null for [DONE]
};

inline std::vector<SseEvent> parse_events(const std::string& body) {
  std::vector<SseEvent> out;
  size_t begin = 0;
  while (begin < body.size()) {
    const size_t end = body.find("\n\n", begin);
    EXPECT_NE(end, std::string::npos) << "the stream ends inside an event";
    if (end == std::string::npos) {
      break;
    }
    SseEvent event;
    size_t line = begin;
    while (line < end) {
      const size_t stop = std::min(body.find('\n', line), end);
      const std::string text = body.substr(line, stop - line);
      if (text.starts_with("event: ")) {
        event.name = text.substr(7);
      } else if (text.starts_with("data: ") && text != "data: [DONE]") {
        event.data = json::parse(text.substr(6));
      }
      line = stop + 1;
    }
    out.push_back(std::move(event));
    begin = end + 2;
  }
  return out;
}

class ServerTest : public testing::Test {
 protected:
  ServerTest() : ServerTest(AppOptions{}) {}
  explicit ServerTest(AppOptions options) : app_(std::move(options)) {
    model_.name = "test-model";
    model_.aliases = {"other-name"};
    model_.tokenizer = &tokenizer();
    model_.vocab_size = tokenizer().vocab_size();
    model_.context = 4096;
    model_.bos_id = *tokenizer().bos_id();
    model_.grammar = grammar();
    app_.serve(*engine_, model_);
  }
  ~ServerTest() override {
    engine_.reset();
    for (const auto& exchange : exchanges_) {
      exchange->close();
    }
  }

  static const text::Tokenizer& tokenizer() { return text::small_tokenizer(); }

  // Null in a build without the grammar core.
  static std::shared_ptr<text::GrammarCompiler> grammar() {
    static const auto compiler =
        text::GrammarCompiler::create(tokenizer(), tokenizer().vocab_size());
    return compiler.ok() ? *compiler : nullptr;
  }

  std::shared_ptr<TestExchange> send(
      const std::string& method,
      const std::string& path,
      const std::string& body = "",
      std::vector<std::pair<std::string, std::string>> headers = {}) {
    const auto exchange = exchanges_.emplace_back(std::make_shared<TestExchange>());
    app_.handle({method, path, std::move(headers), body, "req-test"}, exchange);
    return exchange;
  }
  HttpResponse call(const std::string& path, const json& body) {
    return send("POST", path, body.dump())->wait();
  }
  // The answer's JSON; the status must be as expected.
  json ask(const std::string& path, const json& body, int status = 200) {
    const HttpResponse response = call(path, body);
    EXPECT_EQ(response.status, status) << response.body;
    return json::parse(response.body);
  }
  std::vector<SseEvent> stream(const std::string& path, json body) {
    body["stream"] = true;
    const HttpResponse response = call(path, body);
    EXPECT_EQ(response.content_type, "text/event-stream") << response.body;
    return parse_events(response.body);
  }

  std::vector<std::shared_ptr<TestExchange>> exchanges_;
  std::unique_ptr<FakeEngine> engine_ = std::make_unique<FakeEngine>(tokenizer());
  ServedModel model_;
  App app_;
};

}  // namespace cachalot::server
