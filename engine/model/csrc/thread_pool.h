// Threads for loops whose bodies take microseconds: they spin shortly, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace blinkbed {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class ThreadPool {
 public:
  // The calling thread of `run` is one of the `num_threads`.
  explicit ThreadPool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      ticket_.store(next_ticket(0), std::memory_order_seq_cst);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Call body(0..num_tasks-1), each once, on all threads; returns when all are done. A thread that
  // the system does not let run costs nothing but its share: the others take the tasks.
  template <typename Body>
  void run(int num_tasks, const Body& body) {
    if (num_tasks <= 1 || threads_.empty()) {
      for (int task = num_tasks; task-- > 0;) body(task);
      return;
    }
    call_ = [](const void* context, int task) { (*static_cast<const Body*>(context))(task); };
    context_ = &body;
    unfinished_.store(num_tasks, std::memory_order_relaxed);
    const std::uint64_t ticket = next_ticket(static_cast<std::uint32_t>(num_tasks));
    ticket_.store(ticket, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    take_tasks(epoch_of(ticket));
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < kSpins) pause_briefly();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpins = 4000;

  // A ticket is the job's number and how many of its tasks are untaken. Whoever takes one knows
  // that the job, and so call_ and context_, lives until the task is reported finished.
  static std::uint32_t epoch_of(std::uint64_t ticket) {
    return static_cast<std::uint32_t>(ticket >> 32);
  }

  std::uint64_t next_ticket(std::uint32_t num_tasks) const {
    const std::uint64_t epoch = epoch_of(ticket_.load(std::memory_order_relaxed)) + 1u;
    return (epoch << 32) | num_tasks;
  }

  void take_tasks(std::uint32_t epoch) {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (epoch_of(ticket) == epoch && static_cast<std::uint32_t>(ticket) > 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      call_(context_, static_cast<int>(static_cast<std::uint32_t>(ticket) - 1));
      unfinished_.fetch_sub(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work() {
    std::uint32_t seen = 0;
    while (true) {
      int spins = 0;
      while (epoch_of(ticket_.load(std::memory_order_acquire)) == seen && spins < kSpins) {
        pause_briefly();
        ++spins;
      }
      if (epoch_of(ticket_.load(std::memory_order_acquire)) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return epoch_of(ticket_.load(std::memory_order_seq_cst)) != seen; });
        sleeping_.fetch_sub(1, std::memory_order_relaxed);
      }
      // In this order: stopping_ is set before the last ticket, so who has seen that ticket stops.
      seen = epoch_of(ticket_.load(std::memory_order_acquire));
      if (stopping_) return;
      take_tasks(seen);
    }
  }

  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  void (*call_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace blinkbed
