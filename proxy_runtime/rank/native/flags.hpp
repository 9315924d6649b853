// torch's precision and determinism flags as this rank has them. The device gets them when they are used: every
// call carries the number of its flags in its key, and the message that sets them goes out right before the first
// call that needs them, under the same lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>

#include "channel.hpp"
#include "torch_flags.hpp"

namespace ergo::rank {

class Flags {
 public:
  static constexpr size_t kMessageWords = 1 + kFlagCount + 1;  // with the header

  static Flags& instance();

  // The number of the flags that are in force.
  uint32_t current() {
    if (C10_UNLIKELY(changed_.load(std::memory_order_relaxed))) refresh();
    return current_.load(std::memory_order_relaxed);
  }
  // A setter of torch has run (ergo_rank/flags.py).
  void touch() { changed_.store(true, std::memory_order_relaxed); }
  // Looks at all of them; true if they are others than before. For setters that nobody announced.
  bool refresh();
  void set_flush_denormal(bool on);
  void set_threads(uint64_t n);

  // Sends flags `number` unless they are the last that were sent. The channel lock is `t`'s.
  void send(Channel::Transaction& t, uint32_t number);

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  std::mutex mutex_;  // of sets_ and what goes into the next one
  std::deque<FlagWords> sets_;
  uint64_t flush_denormal_ = 0, threads_ = 0;
  std::atomic<bool> changed_{true};
  std::atomic<uint32_t> current_{kNone};
  uint32_t sent_ = kNone;  // guarded by the channel lock
};

}  // namespace ergo::rank
