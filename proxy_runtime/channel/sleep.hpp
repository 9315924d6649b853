// How the proxy goes to sleep without a message that lies in the ring unseen.
//
// A rank moves the head, then looks whether the proxy sleeps. A processor may do the second first: the new head waits
// in its store buffer, for as long as the line is in the proxy's cache, which looks at it again and again. A fence
// between the two makes the rank wait for that with every message. So the proxy says that it is drowsy some time before
// it sleeps, and looks at the head all the while: only a rank that finds it drowsy or asleep needs the fence. One that
// found it awake has moved the head before that, and no store stays in a buffer for as long as the proxy is drowsy,
// which is thousands of times what it takes at most. Were it to happen, the proxy would see the message at the end of
// its sleep, which has a limit.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "ring.hpp"

namespace ergo {

// Values of RingHeader::consumer_sleeping.
inline constexpr uint32_t kAwake = 0, kAsleep = 1, kDrowsy = 2;
inline constexpr auto kDrowsyFor = std::chrono::microseconds(10);

// After the head has been moved.
inline void wake_consumer(RingHeader& header) {
  auto& word = header.consumer_sleeping;
  if (word.load(std::memory_order_relaxed) == kAwake) [[likely]]
    return;
  // The fence: who writes the word afterwards, to sleep, sees the head.
  uint32_t found = word.fetch_or(0);
  if (found == kAsleep && word.compare_exchange_strong(found, kAwake)) futex(&word, FUTEX_WAKE, 1);
}

}  // namespace ergo
