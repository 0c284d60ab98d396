// Threads that share the work of one pass, piece by piece.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
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

// Work in phases: a phase begins when all pieces of the one before it are done.
class Job {
 public:
  virtual ~Job() = default;

  // Begin the next phase and return the number of its pieces, below kMaxPieces; 0 ends the job. It is called by one
  // thread, which sees everything that earlier phases have written.
  virtual int begin() = 0;

  // Do one piece of the current phase. The pieces of a phase are done in any order, by any of the threads.
  virtual void work(int piece, int thread) = 0;
};

constexpr int kMaxPieces = 1 << 16;

// Workers sleep between jobs unless they are kept awake. Within a job, every thread claims pieces; no thread is waited
// for, only pieces that a thread has begun. So a worker that wakes late, or has lost its core, costs no more than its
// help.
class Pool {
 public:
  explicit Pool(int size) {
    for (int index = 1; index < size; ++index) workers_.push_back(std::make_unique<Worker>());
    try {
      for (int index = 1; index < size; ++index)
        workers_[index - 1]->thread = std::thread([this, index] { serve(*workers_[index - 1], index); });
    } catch (...) {  // the threads that have begun must end before their handles do
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return int(workers_.size()) + 1; }

  // Do a job with the calling thread and num_threads - 1 workers. If a piece throws, the job ends after its phase, and
  // the exception is thrown on here.
  void run(int num_threads, Job& job) {
    if (num_threads <= 1) {
      for (int pieces; (pieces = job.begin());)
        for (int piece = 0; piece < pieces; ++piece) job.work(piece, 0);
      return;
    }
    const int pieces = job.begin();
    if (!pieces) return;
    job_ = &job;
    num_done_.store(0, std::memory_order_relaxed);
    ++generation_;
    state_.store(packed(generation_, 0, pieces, 0), std::memory_order_release);
    if (!is_awake_.load(std::memory_order_relaxed)) call(num_threads);
    help(0);
    if (has_failed_.load(std::memory_order_relaxed)) rethrow();
  }

  // Call body(piece, thread) once for every piece below num_pieces.
  template <class Body>
  void run(int num_threads, int num_pieces, const Body& body) {
    struct Pieces : Job {
      Pieces(int count, const Body& body) : left(count), body(body) {}
      int begin() override { return std::exchange(left, 0); }
      void work(int piece, int thread) override { body(piece, thread); }
      int left;
      const Body& body;
    } pieces(num_pieces, body);
    run(num_threads, static_cast<Job&>(pieces));
  }

  // Keeps workers awake for jobs in quick succession: waking one takes as long as a small job.
  class Awake {
   public:
    Awake(Pool& pool, int num_threads)
        : pool_(pool), num_threads_(std::min(num_threads, pool.size())) {  // the jobs' numbers are checked later
      begin();
    }
    ~Awake() { end(); }

    void begin() {
      pool_.is_awake_.store(true, std::memory_order_relaxed);
      pool_.call(num_threads_);
    }

    void end() { pool_.is_awake_.store(false, std::memory_order_relaxed); }

    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    Pool& pool_;
    const int num_threads_;
  };

 private:
  struct Worker {
    std::mutex mutex;
    std::condition_variable wake;
    bool is_called = false;
    std::thread thread;

    void call() {
      {
        std::lock_guard<std::mutex> lock(mutex);
        is_called = true;
      }
      wake.notify_one();
    }
  };

  // The state of a job in one word, so that one exchange claims a piece: a thread that slept past the job's end finds
  // another generation and claims nothing.
  static uint64_t packed(uint16_t generation, uint16_t phase, int pieces, int next) {
    return uint64_t(generation) << 48 | uint64_t(phase) << 32 | uint64_t(pieces) << 16 | uint64_t(next);
  }

  void stop() {
    is_closing_.store(true);
    for (auto& worker : workers_) worker->call();
    for (auto& worker : workers_)
      if (worker->thread.joinable()) worker->thread.join();
  }

  void call(int num_threads) {
    for (int index = 1; index < num_threads; ++index) workers_[index - 1]->call();
  }

  void serve(Worker& worker, int index) {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(worker.mutex);
        worker.wake.wait(lock, [&] { return worker.is_called; });
        worker.is_called = false;
      }
      if (is_closing_.load()) return;
      for (int spin = 0;;) {
        if (help(index)) spin = 0;
        if (!is_awake_.load(std::memory_order_relaxed)) break;
        wait_a_moment(spin);
      }
    }
  }

  // Claim and do pieces until the job is over; return whether any was done.
  bool help(int thread) {
    bool has_helped = false;
    uint64_t state = state_.load(std::memory_order_acquire);
    for (int spin = 0;;) {
      const int pieces = int(state >> 16 & 0xffff), next = int(state & 0xffff);
      if (!pieces) return has_helped;
      if (next == pieces) {
        wait_a_moment(spin);
        state = state_.load(std::memory_order_acquire);
      } else if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        has_helped = true;
        attempt([&] { job_->work(next, thread); });
        if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) begin_next(state);
        state = state_.load(std::memory_order_acquire);
        spin = 0;
      }
    }
  }

  void begin_next(uint64_t state) {
    num_done_.store(0, std::memory_order_relaxed);
    int pieces = 0;
    if (!has_failed_.load(std::memory_order_relaxed)) attempt([&] { pieces = job_->begin(); });
    state_.store(packed(uint16_t(state >> 48), uint16_t((state >> 32) + 1), pieces, 0), std::memory_order_release);
  }

  // Keep the first exception of a job for the calling thread.
  template <class Body>
  void attempt(const Body& body) {
    try {
      body();
    } catch (...) {
      if (!has_failed_.exchange(true)) thrown_ = std::current_exception();
    }
  }

  void rethrow() {
    has_failed_.store(false);
    std::rethrow_exception(std::exchange(thrown_, nullptr));
  }

  // Spin for about 50 µs; after that, yield, since the thread with the last piece may be waiting for this core.
  static void wait_a_moment(int& spin) {
    constexpr int kSpins = 4000;
    ++spin < kSpins ? pause_cpu() : std::this_thread::yield();
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<bool> is_closing_{false}, is_awake_{false}, has_failed_{false};
  std::exception_ptr thrown_;
  uint16_t generation_ = 0;
  Job* job_ = nullptr;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> num_done_{0};
};

struct Range {
  int first, last;
};

// The part-th of num_parts nearly equal parts of `count` items.
inline Range share(int count, int part, int num_parts) {
  return {int(int64_t(count) * part / num_parts), int(int64_t(count) * (part + 1) / num_parts)};
}

// Items in pieces: a large one for each thread, which then reads a long stream of memory, and small ones for whichever
// thread is free, since one may have lost its core. Pieces but the last consist of whole units.
class Split {
 public:
  Split() = default;
  Split(int count, int unit, int num_threads) : count_(count), num_large_(num_threads) {
    const int num_units = (count + unit - 1) / unit;
    large_ = num_threads == 1 ? num_units : num_units * 3 / (4 * num_threads);
    const int rest = num_units - large_ * num_threads;
    small_ = std::max(1, rest / (2 * num_threads));
    if (!large_) num_large_ = 0;
    num_pieces = num_large_ + (rest + small_ - 1) / small_;
    large_ *= unit, small_ *= unit;
  }

  Range range(int piece) const {
    const bool is_large = piece < num_large_;
    const int first = is_large ? piece * large_ : num_large_ * large_ + (piece - num_large_) * small_;
    return {first, std::min(first + (is_large ? large_ : small_), count_)};
  }

  int num_pieces = 0;

 private:
  int count_ = 0, num_large_ = 0, large_ = 0, small_ = 0;
};

}  // namespace native
