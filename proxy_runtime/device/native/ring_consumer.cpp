#include "ring_consumer.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>

#include "sleep.hpp"

namespace ergo::device {

namespace {

// What answers by moving the tail.
bool is_transfer(Message type) {
  return type == Message::Pull || type == Message::PullPinned || type == Message::PushPinned;
}

}  // namespace

bool is_synchronous(Message type) {
  switch (type) {
    case Message::Read:
    case Message::Define:
    case Message::Sync:
    case Message::GetRng:
    case Message::Store:
    case Message::Stats:
    case Message::Ready:
    case Message::DeviceInfo:
    case Message::Elapsed:
    case Message::Library:
      return true;
    default:
      return false;
  }
}

RingConsumer::RingConsumer(int fd)
    : ring_(RingMapping::map(fd, /*dontfork=*/false)), tail_(ring_.header()->tail.load()), head_(tail_) {
  RingHeader& h = header();
  if (tail_ % 8 != 0 || h.head.load() - tail_ > ring_.ring_bytes())
    throw ProtocolError("the positions in the ring's header are impossible");
  h.proxy_gone.store(0);
  h.consumer_sleeping.store(kAwake);
  h.producer_sleeping.store(0);
}

bool RingConsumer::has_message() const { return header().head.load(std::memory_order_acquire) != tail_; }

bool RingConsumer::holds(Message type) const {
  const uint64_t head = header().head.load(std::memory_order_acquire);
  if (head - tail_ > ring_.ring_bytes()) return false;  // peek says what is wrong with it
  for (uint64_t at = tail_; at < head;) {
    MessageHeader h;
    std::memcpy(&h, ring_.ring() + (at & (ring_.ring_bytes() - 1)), sizeof h);
    if (static_cast<Message>(h.type) == type) return true;
    if (h.length < sizeof h) return false;
    at += h.length;
  }
  return false;
}

// Whether any word in there is this one: more than those that are a handle, never fewer.
bool RingConsumer::names(uint64_t from, uint64_t to, uint64_t word) const {
  while (from < to) {
    const uint64_t at = from & (ring_.ring_bytes() - 1), n = std::min(to - from, ring_.ring_bytes() - at);
    const auto* words = reinterpret_cast<const uint64_t*>(ring_.ring() + at);
    if (std::find(words, words + n / 8, word) != words + n / 8) return true;
    from += n;
  }
  return false;
}

Message RingConsumer::free_ahead(uint64_t& seen, bool to_the_end, const std::function<bool(uint64_t)>& wanted,
                                 const std::function<void(uint64_t)>& release) {
  const uint64_t head = header().head.load(std::memory_order_acquire);
  if (head - tail_ > ring_.ring_bytes()) return Message::Pad;  // peek says what is wrong with it
  seen = std::max(seen, tail_);
  while (seen < head) {
    const char* at = ring_.ring() + (seen & (ring_.ring_bytes() - 1));
    MessageHeader h;
    std::memcpy(&h, at, sizeof h);
    if (h.length < sizeof h || h.length % 8 != 0 || h.length > head - seen) return Message::Pad;
    const auto type = static_cast<Message>(h.type);
    if (type == Message::Collective && seen != tail_ && !to_the_end) return type;
    if (type == Message::Free && h.length == 2 * sizeof(uint64_t)) {
      uint64_t handle = 0;
      std::memcpy(&handle, at + sizeof h, sizeof handle);
      if (wanted(handle) && !names(tail_, seen, handle)) release(handle);
    }
    if (type != Message::Pad) last_ = type;
    seen += h.length;
  }
  return last_;
}

std::optional<MessageView> RingConsumer::peek() {
  for (;;) {
    if (tail_ == head_) head_ = header().head.load(std::memory_order_acquire);
    const uint64_t available = head_ - tail_;
    if (available == 0) return std::nullopt;
    if (available > ring_.ring_bytes() || available % 8 != 0)
      throw ProtocolError("the ring's head is beyond its end or between words");
    uint64_t at = tail_ & (ring_.ring_bytes() - 1);
    MessageHeader h;  // copied once: the rank could still write to it
    std::memcpy(&h, ring_.ring() + at, sizeof h);
    if (h.check != header_check(h.length, h.type)) throw ProtocolError("a torn or foreign message header");
    if (h.length < sizeof h || h.length % 8 != 0 || h.length > available || h.length > ring_.ring_bytes() - at)
      throw ProtocolError("a message of impossible length " + std::to_string(h.length));
    if (static_cast<Message>(h.type) == Message::Pad) {
      tail_ += h.length;
      header().tail.store(tail_, std::memory_order_seq_cst);
      continue;
    }
    auto* words = reinterpret_cast<const uint64_t*>(ring_.ring() + at + sizeof h);
    return MessageView{static_cast<Message>(h.type), h.length, WordReader(words, h.length / 8 - 1)};
  }
}

void RingConsumer::advance(const MessageView& message) {
  RingHeader& h = header();
  const uint64_t half = ring_.ring_bytes() / 2;
  const uint64_t used_before = head_ - tail_;
  tail_ += message.length;
  h.tail.store(tail_, std::memory_order_seq_cst);
  const uint64_t used = head_ - tail_;
  // A rank that waits for space is woken when half of what was seen of the ring, and again when all of it, has become
  // free: one wake-up per message would cost more than the messages.
  if (used == 0 || (used_before > half && used <= half) || is_synchronous(message.type) || is_transfer(message.type))
    wake_producer();
}

bool RingConsumer::drop_to(uint64_t position) {
  if (position <= tail_ || position > header().head.load(std::memory_order_acquire)) return false;
  tail_ = head_ = position;
  header().tail.store(tail_, std::memory_order_seq_cst);
  wake_producer();
  return true;
}

void RingConsumer::wake_producer() {
  RingHeader& h = header();
  if (h.producer_sleeping.load(std::memory_order_seq_cst) == 0) return;
  h.producer_sleeping.store(0, std::memory_order_seq_cst);
  futex(&h.producer_sleeping, FUTEX_WAKE, INT_MAX);
}

void RingConsumer::respond(Status status, const void* bytes, size_t n) {
  static const char kTooLong[] = "the answer does not fit the channel's response area";
  if (n > ring_.response_bytes()) {
    if (status == Status::Ok) {
      status = Status::Runtime, bytes = kTooLong, n = sizeof kTooLong - 1;
    }
    n = std::min<size_t>(n, ring_.response_bytes());
  }
  if (n && bytes != ring_.response()) std::memcpy(ring_.response(), bytes, n);
  RingHeader& h = header();
  h.response_length = n;
  h.response_status = static_cast<uint32_t>(status);
  h.response_seq.fetch_add(1, std::memory_order_seq_cst);
}

void RingConsumer::report(const Failure& failure) {
  RingHeader& h = header();
  if (h.error_flag.load(std::memory_order_acquire) != 0) return;
  size_t n = std::min(failure.message.size(), kErrorBytes - 1);
  std::memcpy(h.error_message, failure.message.data(), n);
  h.error_message[n] = 0;
  h.error_status = static_cast<uint32_t>(failure.status);
  h.error_flag.store(1, std::memory_order_release);
}

void RingConsumer::close(const Failure& failure) {
  report(failure);
  header().proxy_gone.store(1);  // before the answer: whoever reads it keeps the error for what comes after
  respond(failure.status, failure.message.data(), failure.message.size());
  wake_producer();
}

void RingConsumer::grow_drowsy() { header().consumer_sleeping.store(kDrowsy, std::memory_order_seq_cst); }

void RingConsumer::announce_sleep(std::vector<futex_waitv>& waiters) {
  auto& word = header().consumer_sleeping;
  word.exchange(kAsleep);
  futex_waitv waiter{};
  waiter.val = kAsleep;
  waiter.uaddr = reinterpret_cast<uint64_t>(&word);
  waiter.flags = FUTEX_32;  // shared between processes
  waiters.push_back(waiter);
}

void RingConsumer::withdraw_sleep() { header().consumer_sleeping.store(kAwake, std::memory_order_relaxed); }

}  // namespace ergo::device
