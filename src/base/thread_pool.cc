#include "base/thread_pool.h"

#include <algorithm>

namespace cachalot {
namespace {

// Short spins keep the hand-over between back-to-back ops below a microsecond; a thread that finds
// no work in this many polls sleeps.
constexpr int kSpinPolls = 20000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads <= 0) {
    threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  for (int i = 1; i < threads; ++i) {
    workers_.emplace_back([this, i] { worker_loop(i); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void ThreadPool::worker_loop(int index) {
  uint64_t seen = 0;
  while (true) {
    for (int poll = 0; poll < kSpinPolls; ++poll) {
      if (generation_.load(std::memory_order_acquire) != seen) {
        break;
      }
      pause();
    }
    const std::function<void(int)>* task = nullptr;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      if (stop_) {
        return;
      }
      seen = generation_.load(std::memory_order_relaxed);
      task = task_;
    }
    (*task)(index);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard lock(mutex_);
      done_.notify_one();
    }
  }
}

void ThreadPool::run(const std::function<void(int)>& task) {
  if (workers_.empty()) {
    task(0);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    task_ = &task;
    running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  task(0);
  for (int poll = 0; poll < kSpinPolls; ++poll) {
    if (running_.load(std::memory_order_acquire) == 0) {
      return;
    }
    pause();
  }
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return running_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::parallel_for(int64_t n,
                              int64_t grain,
                              const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) {
    return;
  }
  const int64_t chunks = (n + grain - 1) / grain;
  const int64_t parts = std::min<int64_t>(threads(), chunks);
  if (parts <= 1) {
    body(0, n);
    return;
  }
  run([&](int index) {
    if (index >= parts) {
      return;
    }
    const int64_t begin = chunks * index / parts * grain;
    const int64_t end = std::min(n, chunks * (index + 1) / parts * grain);
    if (begin < end) {
      body(begin, end);
    }
  });
}

void ThreadPool::parallel_for_dynamic(int64_t n,
                                      int64_t grain,
                                      const std::function<void(int64_t, int64_t)>& body) {
  if (n <= grain || workers_.empty()) {
    if (n > 0) {
      body(0, n);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  run([&](int) {
    while (true) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) {
        return;
      }
      body(begin, std::min(n, begin + grain));
    }
  });
}

}  // namespace cachalot
