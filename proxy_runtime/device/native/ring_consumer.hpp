// The consuming end of one ring: validated messages out, responses and errors in.
#pragma once

#include <linux/futex.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "failure.hpp"
#include "messages.hpp"
#include "ring.hpp"
#include "wire.hpp"

namespace ergo::device {

struct MessageView {
  Message type = Message::Pad;
  uint32_t length = 0;  // header included
  WordReader body{nullptr, 0};
};

// Whether the rank waits for a response to messages of this type.
bool is_synchronous(Message type);

class RingConsumer {
 public:
  // Maps the ring behind `fd` (stays the caller's). Throws std::runtime_error, ProtocolError.
  explicit RingConsumer(int fd);

  // The message at the head of the queue, nothing if there is none. Throws ProtocolError.
  std::optional<MessageView> peek();
  bool has_message() const;
  // Whether a message of this type is in the queue.
  bool holds(Message type) const;
  // Calls `release` for every handle that a Free message from position `seen` on gives up, if it is `wanted` and no
  // message before that one names it. `seen` moves on to the end of the queue, or only to the next collective that is
  // not at its head. Returns the type of the last message that it has come to.
  Message free_ahead(uint64_t& seen, bool to_the_end, const std::function<bool(uint64_t)>& wanted,
                     const std::function<void(uint64_t)>& release);
  // After the message has been executed: the only thing that moves the tail.
  void advance(const MessageView& message);
  // Skips what lies before a position; false: there is nothing. Wakes the producer.
  bool drop_to(uint64_t position);

  void respond(Status status, const void* bytes, size_t n);
  // Keeps the first asynchronous error until the rank has raised it.
  void report(const Failure& failure);
  // Tells the rank that nothing of it will be executed any more, and wakes it.
  void close(const Failure& failure);

  // Sleeping: grow drowsy, look for at least kDrowsyFor (sleep.hpp), announce, look once more, sleep on the word, then
  // withdraw, as when there is something to do before.
  void grow_drowsy();
  void announce_sleep(std::vector<futex_waitv>& waiters);
  void withdraw_sleep();

  RingHeader& header() { return *ring_.header(); }
  const RingHeader& header() const { return *ring_.header(); }
  uint64_t response_bytes() const { return ring_.response_bytes(); }
  // Where a response may be built in place before it is given to respond().
  char* response_area() { return ring_.response(); }
  // The rank's pinned memory, as large as it was when the ring was mapped.
  char* pinned() { return ring_.pinned(); }
  uint64_t pinned_bytes() const { return ring_.pinned_bytes(); }

 private:
  bool names(uint64_t from, uint64_t to, uint64_t word) const;
  void wake_producer();
  RingMapping ring_;
  uint64_t tail_;
  Message last_ = Message::Pad;  // that free_ahead() has seen
  uint64_t head_;  // as last seen: looked at again when all before it is executed, as each look delays the rank
};

}  // namespace ergo::device
