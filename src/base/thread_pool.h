// A fixed pool of threads with a static-range parallel_for.
//
// Work is split by index, never by arrival: which thread runs a range does not change what the
// range computes, so results do not depend on the number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cachalot {

class ThreadPool {
 public:
  // `threads` counts the calling thread; 0 means one per processor.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) over disjoint ranges that cover [0, n), on all threads, and returns when
  // all have ended. Ranges start at multiples of `grain`. One caller at a time; not re-entrant.
  void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

  // As parallel_for, but ranges are claimed one after another, shorter and shorter, down to `grain`
  // indices: for uneven work.
  void parallel_for_dynamic(int64_t n,
                            int64_t grain,
                            const std::function<void(int64_t, int64_t)>& body);
  // As parallel_for_dynamic; body(thread, begin, end) learns which of threads() it runs on, so that
  // it can use memory of its own.
  void parallel_for_threads(int64_t n,
                            int64_t grain,
                            const std::function<void(int, int64_t, int64_t)>& body);

 private:
  // Threads that found nothing to do for long enough.
  struct Sleepers {
    std::atomic<int> count{0};
    std::condition_variable wake;
  };

  void run(const std::function<void(int)>& task);
  void start();
  void worker_loop(int index);
  template <class Ready>
  void wait(Sleepers& sleepers, const Ready& ready);
  void wake(Sleepers& sleepers);

  std::vector<std::thread> workers_;
  std::mutex mutex_;  // of those who sleep
  Sleepers idle_;     // workers
  Sleepers caller_;
  // Written before generation_ moves on, read behind it.
  const std::function<void(int)>* task_ = nullptr;
  bool stop_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> running_{0};
};

}  // namespace cachalot
