// Threads that work on one pass together: they sleep between passes and meet at barriers inside one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace native {

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Workers sleep between passes and spin at the barriers inside a pass; a barrier yields when it waits for long,
// because the thread that it waits for may not have a core.
class Pool {
 public:
  explicit Pool(int size) : size_(size) {
    for (int index = 1; index < size; ++index) workers_.emplace_back([this, index] { work(index); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closing_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  // Run body(thread, num_threads) on the calling thread and num_threads - 1 workers.
  void run(int num_threads, const std::function<void(int, int)>& body) {
    num_threads_ = num_threads;
    if (num_threads == 1) return body(0, 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      num_running_.store(size_ - 1, std::memory_order_relaxed);
      ++pass_;
    }
    wake_.notify_all();
    body(0, num_threads);
    wait_until([this] { return num_running_.load(std::memory_order_acquire) == 0; });
  }

  // Wait until every thread of the pass has come here.
  void barrier() {
    if (num_threads_ == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (num_waiting_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      num_waiting_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      wait_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

 private:
  template <class Condition>
  static void wait_until(Condition condition) {
    for (int spin = 0; !condition(); ++spin) spin < 2000 ? pause_cpu() : std::this_thread::yield();
  }

  void work(int index) {
    for (uint64_t seen = 0;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return is_closing_ || pass_ != seen; });
      if (is_closing_) return;
      seen = pass_;
      const auto* body = body_;
      lock.unlock();
      if (index < num_threads_) (*body)(index, num_threads_);
      num_running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  int num_threads_ = 1;
  bool is_closing_ = false;
  uint64_t pass_ = 0;
  const std::function<void(int, int)>* body_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> num_running_{0}, num_waiting_{0}, phase_{0};
  std::vector<std::thread> workers_;
};

struct Range {
  int first, last;
};

// The share of `count` items that one thread works on.
inline Range share(int count, int thread, int num_threads) {
  return {int(int64_t(count) * thread / num_threads), int(int64_t(count) * (thread + 1) / num_threads)};
}

}  // namespace native
