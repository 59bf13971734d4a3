// What an engine's requests give, for callers on other threads.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace cachalot::engine {

// Receives events of many requests and waits for their ends.
class Inbox {
 public:
  EventSink sink() {
    return [this](RequestId id, Event event) {
      const std::lock_guard lock(mutex_);
      Entry& entry = entries_[id];
      EXPECT_FALSE(entry.ended) << "an event behind the last one";
      for (const TokenOutput& token : event.tokens) {
        entry.ids.push_back(token.id);
      }
      entry.ended = event.done || !event.status.ok();
      entry.status = event.status;
      changed_.notify_all();
    };
  }

  // Waits for the end; the output and how it ended.
  std::pair<std::vector<int32_t>, Status> wait(RequestId id) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return entries_[id].ended; });
    return {entries_[id].ids, entries_[id].status};
  }
  void wait_for_tokens(RequestId id, size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return entries_[id].ids.size() >= count; });
  }

 private:
  struct Entry {
    std::vector<int32_t> ids;
    bool ended = false;
    Status status;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<RequestId, Entry> entries_;
};

}  // namespace cachalot::engine
