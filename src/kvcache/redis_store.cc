// hiredis is seen by this file alone.
#include <hiredis/hiredis.h>
#include <signal.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/format.h"
#include "kvcache/object_store.h"

namespace cachalot::kvcache {
namespace {

constexpr double kRetrySeconds = 1;
// A server that takes connections and answers nothing costs a timeout per attempt, in which
// requests wait for their prefixes: it is left alone for so many times what the last one took.
constexpr double kRestPerFailure = 10;
constexpr timeval kConnectTimeout{0, 200'000};
constexpr timeval kCommandTimeout{2, 0};

// hiredis writes to a socket that the server may have closed, which would end the process.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutSigpipe() {
    const timespec now{};
    if (::sigismember(&before_, SIGPIPE) == 0) {
      ::sigtimedwait(&pipe_, nullptr, &now);
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_, before_;
};

class RedisStore : public ObjectStore {
 public:
  RedisStore(std::string host, int port, double ttl)
      : host_(std::move(host)),
        port_(port),
        ttl_ms_(fmt::format("{}", static_cast<int64_t>(std::ceil(ttl * 1000)))) {}

  const char* name() const override { return "redis"; }

  Result<std::optional<std::string>> get(const PrefixKey& key) override {
    const std::string name = name_of(key);
    CACHALOT_TRY(const Reply reply, call({"GET", name}));
    if (reply->type == REDIS_REPLY_NIL) {
      return std::optional<std::string>();
    }
    if (reply->type != REDIS_REPLY_STRING) {
      return error(Code::kUnavailable, "redis answers GET with type {}", reply->type);
    }
    return std::optional<std::string>(std::in_place, reply->str, reply->len);
  }

  Status put(const PrefixKey& key, std::string_view object) override {
    return call({"SET", name_of(key), object, "PX", ttl_ms_}).status();
  }

  Status remove(const PrefixKey& key) override { return call({"DEL", name_of(key)}).status(); }

  int64_t bytes() const override { return 0; }

 private:
  struct FreeContext {
    void operator()(redisContext* context) const { redisFree(context); }
  };
  struct FreeReply {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
  };
  using Reply = std::unique_ptr<redisReply, FreeReply>;

  static std::string name_of(const PrefixKey& key) {
    return fmt::format("cachalot:{:016x}{:016x}", key.high, key.low);
  }

  Status connect() {
    if (now_seconds() < retry_at_) {
      return error(Code::kUnavailable, "redis at {}:{} is not there", host_, port_);
    }
    const double begin = now_seconds();
    context_.reset(redisConnectWithTimeout(host_.c_str(), port_, kConnectTimeout));
    if (context_ == nullptr || context_->err != 0 ||
        redisSetTimeout(context_.get(), kCommandTimeout) != REDIS_OK) {
      return lost(begin, kRetrySeconds);
    }
    return {};
  }

  // Drops the connection after an attempt that began then, and rests for `least` seconds.
  Status lost(double begin, double least) {
    const std::string reason = context_ == nullptr ? "out of memory" : context_->errstr;
    context_.reset();
    const double now = now_seconds();
    retry_at_ = now + std::max(least, kRestPerFailure * (now - begin));
    return error(Code::kUnavailable, "redis at {}:{}: {}", host_, port_, reason);
  }

  Result<Reply> call(std::initializer_list<std::string_view> words) {
    if (context_ == nullptr) {
      CACHALOT_RETURN_IF_ERROR(connect());
    }
    const double begin = now_seconds();
    const WithoutSigpipe guard;
    std::vector<const char*> data;
    std::vector<size_t> sizes;
    for (std::string_view word : words) {
      data.push_back(word.data());
      sizes.push_back(word.size());
    }
    Reply reply(static_cast<redisReply*>(redisCommandArgv(
        context_.get(), static_cast<int>(data.size()), data.data(), sizes.data())));
    if (reply == nullptr) {
      // One that was closed while idle is opened again by the next call.
      return lost(begin, 0);
    }
    if (reply->type == REDIS_REPLY_ERROR) {
      return error(Code::kUnavailable, "redis: {}", std::string_view(reply->str, reply->len));
    }
    return reply;
  }

  std::string host_;
  int port_;
  std::string ttl_ms_;
  double retry_at_ = 0;
  std::unique_ptr<redisContext, FreeContext> context_;
};

}  // namespace

Result<std::unique_ptr<ObjectStore>> make_redis_store(const std::string& url, double ttl) {
  constexpr std::string_view kScheme = "redis://";
  const std::string_view rest =
      url.starts_with(kScheme) ? std::string_view(url).substr(kScheme.size()) : std::string_view();
  const size_t colon = rest.rfind(':');
  const std::string_view host = rest.substr(0, colon);
  int port = 6379;
  bool good = !host.empty() && host.find('/') == std::string_view::npos;
  if (good && colon != std::string_view::npos) {
    const std::string_view digits = rest.substr(colon + 1);
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    good = parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size() && port > 0 &&
           port < 65536;
  }
  if (!good) {
    return invalid("redis URL '{}' is not redis://HOST[:PORT]", url);
  }
  return std::unique_ptr<ObjectStore>(std::make_unique<RedisStore>(std::string(host), port, ttl));
}

}  // namespace cachalot::kvcache
