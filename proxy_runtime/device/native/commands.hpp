// Hands work from the control thread to the loop's thread, which alone touches device state.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <vector>

#include "failure.hpp"
#include "ring.hpp"

namespace ergo::device {

using Clock = std::chrono::steady_clock;

class CommandQueue {
 public:
  // Runs `f` in the loop's thread and returns its result or throws what it threw. Throws
  // ControlError("device-proxy.deadline") if it has not come to run and finish by then; it then still runs
  // later, so `f` must own what it uses.
  template <typename F>
  auto call(F f, Clock::time_point deadline) -> decltype(f()) {
    auto task = std::make_shared<std::packaged_task<decltype(f())()>>(std::move(f));
    auto result = task->get_future();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) throw ControlError("device-proxy.ended", "the device proxy's loop has ended");
      queue_.push_back([task] { (*task)(); });
    }
    waiting_.store(true);
    ring();
    if (result.wait_until(deadline) == std::future_status::timeout)
      throw ControlError("device-proxy.deadline", "the device proxy did not come to a message boundary in time");
    return result.get();
  }

  bool waiting() const { return waiting_.load(std::memory_order_relaxed); }
  // In the loop's thread: runs what is queued; true if there was anything.
  bool run() {
    if (!waiting()) return false;
    std::deque<std::function<void()>> queue;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue.swap(queue_);
      waiting_.store(false);
    }
    for (auto& task : queue) task();
    return !queue.empty();
  }
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    queue_.clear();  // breaks their promises: the callers' get() throws
  }

  // Value first, then look at the queue, then sleep.
  void append_waiter(std::vector<futex_waitv>& waiters) {
    futex_waitv waiter{};
    waiter.val = doorbell_.load();
    waiter.uaddr = reinterpret_cast<uint64_t>(&doorbell_);
    waiter.flags = FUTEX_32 | FUTEX_PRIVATE_FLAG;
    waiters.push_back(waiter);
  }
  void ring() {
    doorbell_.fetch_add(1);
    futex(&doorbell_, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1);
  }

 private:
  std::mutex mutex_;
  std::deque<std::function<void()>> queue_;
  std::atomic<bool> waiting_{false};
  bool closed_ = false;
  std::atomic<uint32_t> doorbell_{0};
};

}  // namespace ergo::device
