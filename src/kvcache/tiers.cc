#include "kvcache/tiers.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/format.h"
#include "base/log.h"

namespace cachalot::kvcache {
namespace {

// Objects that wait to be written. A store that is slower than the model loses objects, not memory.
constexpr int64_t kQueueBytes = int64_t{256} << 20;
constexpr double kWarnSeconds = 60;
constexpr double kRestSeconds = 10;

}  // namespace

bool Tiers::Load::ready() const {
  const std::lock_guard lock(mutex_);
  return ready_;
}

Tiers::Loaded Tiers::Load::take() {
  const std::lock_guard lock(mutex_);
  taken_ = true;
  return std::move(loaded_);
}

Result<std::unique_ptr<Tiers>> Tiers::open(const CacheLayout& layout, const TierOptions& options) {
  std::unique_ptr<Tiers> tiers(new Tiers(layout));
  const auto add = [&](std::unique_ptr<ObjectStore> store, bool keeps_states) {
    tiers->stats_.push_back({.name = store->name(), .bytes = store->bytes()});
    tiers->stores_.push_back({std::move(store), keeps_states, now_seconds() - kWarnSeconds});
    tiers->keeps_states_ = tiers->keeps_states_ || keeps_states;
  };
  if (options.host_bytes > 0) {
    add(make_memory_store(options.host_bytes), true);
  }
  if (!options.disk.empty()) {
    CACHALOT_TRY(std::unique_ptr<ObjectStore> disk,
                 open_disk_store(options.disk, options.disk_bytes, options.disk_retention));
    add(std::move(disk), false);
  }
  if (!options.redis.empty()) {
    CACHALOT_TRY(std::unique_ptr<ObjectStore> redis,
                 make_redis_store(options.redis, options.redis_ttl));
    add(std::move(redis), true);
  }
  tiers->thread_ = std::thread([t = tiers.get()] { t->run(); });
  return tiers;
}

Tiers::~Tiers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Tiers::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !loads_.empty() || !puts_.empty(); });
    std::deque<std::function<void()>>& queue = loads_.empty() ? puts_ : loads_;
    if (queue.empty()) {
      return;
    }
    const std::function<void()> job = std::move(queue.front());
    queue.pop_front();
    busy_ = true;
    lock.unlock();
    job();
    lock.lock();
    busy_ = false;
    done_.notify_all();
  }
}

void Tiers::flush() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return loads_.empty() && puts_.empty() && !busy_; });
}

std::vector<TierStats> Tiers::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Tiers::put(const Object& object) {
  std::string bytes = encode_object(layout_, object);
  const auto size = static_cast<int64_t>(bytes.size());
  {
    const std::lock_guard lock(mutex_);
    if (queued_bytes_ + size > kQueueBytes) {
      return;
    }
    queued_bytes_ += size;
    puts_.push_back([this, kind = object.kind, key = object.key(), bytes = std::move(bytes)] {
      do_put(kind, key, bytes);
      const std::lock_guard done(mutex_);
      queued_bytes_ -= static_cast<int64_t>(bytes.size());
    });
  }
  wake_.notify_one();
}

void Tiers::do_put(ObjectKind kind, const PrefixKey& key, const std::string& bytes) {
  for (size_t i = 0; i < stores_.size(); ++i) {
    if ((kind == ObjectKind::kState && !stores_[i].keeps_states) ||
        now_seconds() < stores_[i].rests_until) {
      continue;
    }
    ObjectStore& store = *stores_[i].objects;
    const Status status = store.put(key, bytes);
    if (!status.ok()) {
      fault(i, status);
    }
    const std::lock_guard lock(mutex_);
    stats_[i].stored += status.ok() ? 1 : 0;
    stats_[i].bytes = store.bytes();
  }
}

std::shared_ptr<Tiers::Load> Tiers::load(const PrefixKey& at,
                                         std::vector<std::vector<int32_t>> pages) {
  auto load = std::make_shared<Load>();
  {
    const std::lock_guard lock(mutex_);
    loads_.push_back([this, at, pages = std::move(pages), load] {
      do_load(at, pages, load);
      if (on_loaded_) {
        on_loaded_();
      }
    });
  }
  wake_.notify_one();
  return load;
}

void Tiers::do_load(const PrefixKey& at,
                    std::span<const std::vector<int32_t>> pages,
                    const std::shared_ptr<Load>& load) {
  for (Store& store : stores_) {
    store.spent = 0;
  }
  // One reference is the job's own.
  const auto wanted = [&] {
    const std::lock_guard lock(load->mutex_);
    return load.use_count() > 1 && !load->taken_;
  };
  const auto add = [&](Loaded::Item item) {
    const std::lock_guard lock(load->mutex_);
    if (!load->taken_) {
      load->loaded_.items.push_back(std::move(item));
    }
  };
  PrefixKey key = at;
  for (const std::vector<int32_t>& page : pages) {
    const PrefixKey next = key.then(page);
    Loaded::Item item;
    if (!wanted() || !find(ObjectKind::kPage, next, item)) {
      break;
    }
    key = next;
    add(std::move(item));
  }
  // States are few: only the end of what was found is worth the question.
  Loaded::Item state;
  const Object last{.kind = ObjectKind::kState, .parent = key};
  if (keeps_states_ && wanted() && find(ObjectKind::kState, last.key(), state)) {
    add(std::move(state));
  }
  bool taken = false;
  {
    const std::lock_guard lock(load->mutex_);
    load->ready_ = true;
    taken = load->taken_;
  }
  if (taken) {
    late();
  }
}

void Tiers::late() {
  const auto slowest = std::ranges::max_element(stores_, {}, &Store::spent);
  slowest->rests_until = now_seconds() + kRestSeconds;
  fault(static_cast<size_t>(slowest - stores_.begin()),
        error(Code::kDeadlineExceeded,
              "a prefix was not read in time after {:.1f} s; it is left alone for {} s",
              slowest->spent,
              kRestSeconds));
}

bool Tiers::find(ObjectKind kind, const PrefixKey& key, Loaded::Item& item) {
  for (size_t i = 0; i < stores_.size(); ++i) {
    if (kind == ObjectKind::kState && !stores_[i].keeps_states) {
      continue;
    }
    const double begin = now_seconds();
    if (begin < stores_[i].rests_until) {
      continue;
    }
    ObjectStore& store = *stores_[i].objects;
    Result<std::optional<std::string>> bytes = store.get(key);
    stores_[i].spent += now_seconds() - begin;
    Status status = bytes.status();
    bool hit = status.ok() && bytes->has_value();
    if (hit) {
      item.bytes = *std::move(*bytes);
      const Result<Object> object = parse_object(layout_, key, item.bytes, item.words);
      status = object.status();
      hit = object.ok();
      if (hit) {
        item.object = *object;
      }
    }
    if (!status.ok()) {
      fault(i, status);
      if (status.code() == Code::kDataLoss) {
        // What is damaged stays so; a failure to remove it is no news.
        static_cast<void>(store.remove(key));
      }
    }
    const std::lock_guard lock(mutex_);
    ++(hit ? stats_[i].hits : stats_[i].misses);
    if (hit) {
      return true;
    }
  }
  return false;
}

void Tiers::fault(size_t store, const Status& status) {
  const double now = now_seconds();
  if (now - stores_[store].warned >= kWarnSeconds) {
    stores_[store].warned = now;
    log_warning("cache tier '{}': {}", stores_[store].objects->name(), status.message());
  }
  const std::lock_guard lock(mutex_);
  ++stats_[store].faults;
}

}  // namespace cachalot::kvcache
