// The stores behind the page pools, and the thread that talks to them.
//
// Pages and window states are written behind: put() copies them and returns. A request's prefix is
// read ahead: load() starts at once, and whoever waits for it takes what is there when it likes. No
// fault of a store is more than a miss, a log line and a number in stats(). A store that made a
// load late is left alone for ten seconds.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "kvcache/layout.h"
#include "kvcache/object.h"
#include "kvcache/object_store.h"

namespace cachalot::kvcache {

struct TierOptions {
  int64_t host_bytes = 0;  // of main memory; 0: none
  std::string disk;        // directory; empty: none
  int64_t disk_bytes = int64_t{64} << 30;
  double disk_retention = 72 * 3600;  // seconds since the last use
  std::string redis;                  // "redis://HOST[:PORT]"; empty: none
  double redis_ttl = 300;             // seconds

  bool any() const { return host_bytes > 0 || !disk.empty() || !redis.empty(); }
};

struct TierStats {
  std::string name;
  uint64_t hits = 0;  // objects
  uint64_t misses = 0;
  uint64_t stored = 0;
  uint64_t faults = 0;  // failed calls and damaged objects
  int64_t bytes = 0;
};

class Tiers {
 public:
  // Errors: as the stores give them when they are opened.
  static Result<std::unique_ptr<Tiers>> open(const CacheLayout& layout, const TierOptions& options);
  // Writes what is queued.
  ~Tiers();

  // Whether put() does anything with a state.
  bool keeps_states() const { return keeps_states_; }
  // Copies an object into the queue of the stores. Left out if the queue is full.
  void put(const Object& object);

  // What was found of a prefix: whole pages in order, then a state behind the last one that has
  // one.
  struct Loaded {
    struct Item {
      std::string bytes;
      std::vector<int32_t> words;
      Object object;
    };
    std::vector<Item> items;
  };
  class Load {
   public:
    // Nothing more will come.
    bool ready() const;
    // What was found so far. Nothing more is looked for; before it is ready, that is a fault of the
    // store that took the most time.
    Loaded take();

   private:
    friend class Tiers;
    mutable std::mutex mutex_;
    bool ready_ = false;
    bool taken_ = false;
    Loaded loaded_;
  };
  // Looks for the pages of these words (PrefixContent::words), one after the other behind the
  // prefix `at`, until nobody holds what it returns.
  std::shared_ptr<Load> load(const PrefixKey& at, std::vector<std::vector<int32_t>> pages);
  // Called on the storage thread whenever a load is ready. Before the first load().
  void on_loaded(std::function<void()> call) { on_loaded_ = std::move(call); }

  std::vector<TierStats> stats() const;
  // Waits until everything queued so far is done.
  void flush();

 private:
  explicit Tiers(const CacheLayout& layout) : layout_(layout) {}

  void run();
  void do_put(ObjectKind kind, const PrefixKey& key, const std::string& bytes);
  void do_load(const PrefixKey& at,
               std::span<const std::vector<int32_t>> pages,
               const std::shared_ptr<Load>& load);
  // The first undamaged object of any store.
  bool find(ObjectKind kind, const PrefixKey& key, Loaded::Item& item);
  // Notes a fault, and says so at most once a minute for each store.
  void fault(size_t store, const Status& status);
  // Notes that the present load was taken before it was ready.
  void late();

  CacheLayout layout_;
  // Nearest first; of the storage thread.
  struct Store {
    std::unique_ptr<ObjectStore> objects;
    bool keeps_states = false;  // not on a disk: they are large and soon of no use
    double warned = 0;          // when
    double spent = 0;           // seconds of the present load
    double rests_until = 0;     // nothing is asked of it before
  };
  std::vector<Store> stores_;
  bool keeps_states_ = false;
  std::function<void()> on_loaded_;

  mutable std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::function<void()>> loads_, puts_;  // loads go first
  int64_t queued_bytes_ = 0;
  bool busy_ = false;
  bool stopping_ = false;
  std::vector<TierStats> stats_;
  std::thread thread_;
};

}  // namespace cachalot::kvcache
