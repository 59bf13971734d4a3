#include "base/thread_pool.h"

#include <algorithm>

#include "base/math.h"

namespace cachalot {
namespace {

// Short spins keep the hand-over between back-to-back ops below a microsecond; a thread that finds
// no work in this many polls sleeps.
constexpr int kSpinPolls = 4000;

// A claim takes this share of what is left per thread: ranges are long at first, so that memory is
// read in long stretches, and short at the end, so that no thread waits long.
constexpr int kClaimsPerThread = 4;

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
  stop_ = true;
  start();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

// Who sleeps and who wakes meet without the mutex unless somebody does sleep: a sleeper counts
// itself before it looks at the state for the last time, a waker changes the state before it reads
// the count, and in the one order of these operations at least one of the two sees the other.
template <class Ready>
void ThreadPool::wait(Sleepers& sleepers, const Ready& ready) {
  for (int poll = 0; poll < kSpinPolls; ++poll) {
    if (ready()) {
      return;
    }
    pause();
  }
  std::unique_lock lock(mutex_);
  ++sleepers.count;
  sleepers.wake.wait(lock, ready);
  --sleepers.count;
}

void ThreadPool::wake(Sleepers& sleepers) {
  if (sleepers.count > 0) {
    // Behind this lock, a thread that counted itself waits or has seen the new state.
    {
      std::lock_guard lock(mutex_);
    }
    sleepers.wake.notify_all();
  }
}

void ThreadPool::start() {
  ++generation_;
  wake(idle_);
}

void ThreadPool::worker_loop(int index) {
  for (uint64_t seen = 0;; ++seen) {
    wait(idle_, [&] { return generation_ != seen; });
    if (stop_) {
      return;
    }
    (*task_)(index);
    if (--running_ == 0) {
      wake(caller_);
    }
  }
}

void ThreadPool::run(const std::function<void(int)>& task) {
  if (workers_.empty()) {
    task(0);
    return;
  }
  task_ = &task;
  running_ = static_cast<int>(workers_.size());
  start();
  task(0);
  wait(caller_, [&] { return running_ == 0; });
}

void ThreadPool::parallel_for(int64_t n,
                              int64_t grain,
                              const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) {
    return;
  }
  const int64_t chunks = ceil_div(n, grain);
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
  parallel_for_threads(n, grain, [&](int, int64_t begin, int64_t end) { body(begin, end); });
}

void ThreadPool::parallel_for_threads(int64_t n,
                                      int64_t grain,
                                      const std::function<void(int, int64_t, int64_t)>& body) {
  if (n <= grain || workers_.empty()) {
    if (n > 0) {
      body(0, 0, n);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  run([&](int index) {
    int64_t begin = next;
    while (begin < n) {
      const int64_t share = (n - begin) / (kClaimsPerThread * threads());
      const int64_t end = std::min(n, begin + std::max(grain, share / grain * grain));
      if (next.compare_exchange_weak(begin, end)) {
        body(index, begin, end);
        begin = next;
      }
    }
  });
}

}  // namespace cachalot
