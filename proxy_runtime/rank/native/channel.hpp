// The rank's end of the ring: one producer for all threads of the process.
//
// Lock order: nobody waits for the channel lock, for room or for a response with the GIL (GilRelease is always
// the outer scope). So a thread of the autograd engine and a Python thread cannot block each other, and whoever
// waits for the device lets every other Python thread run.
// A wait of the main thread runs Python's signal handlers, without the lock: a handler may use the device, or raise.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "gil.hpp"
#include "messages.hpp"
#include "ring.hpp"

namespace ergo::rank {

// A process of a tree that has no channel yet gets the one of its current device (tree.hpp).
void connect_current_device();

// Counters of this rank since its start; they are part of the process image.
struct ChannelStats {
  uint64_t messages = 0, bytes = 0, executed = 0, defined = 0, one_off = 0, responses = 0, waits_for_room = 0;
};

// A storage on the device that this process holds.
struct Holding {
  uint64_t handle;
  uint64_t bytes;
  Holding* next = nullptr;  // of those that have been released and not told to the device yet
};

// Raises the torch exception that belongs to a response status.
[[noreturn]] void raise_status(Status status, const std::string& message);

class Channel {
 public:
  static Channel& instance();

  // Adopts the mapping made by channel_map.c. Throws c10::Error when the header is not one of this build.
  void attach(void* base);
  // Installs the fork handlers: a child can neither send nor free (its copies of tensors would free ours).
  void install_fork_handlers();

  // Throws one clear sentence if the device cannot be used here: not attached, forked child, dead proxy,
  // or a CUDA call that was refused (its result would be garbage).
  void require() const {
    if (C10_UNLIKELY(header_ == nullptr || forked_ || closed_ || fault_raised_.load(std::memory_order_relaxed) ||
                     refused() != 0))
      explain();
  }
  bool open() const { return header_ != nullptr && !closed_ && !forked_; }
  bool forked() const { return forked_; }

  // Message of `words` body words, written by `fill(uint64_t* body)` under the channel lock. Returns when
  // the message is in the ring; the proxy executes it later.
  template <class Fill>
  void send(Message type, size_t words, Fill&& fill) {
    Transaction t(*this, words);
    fill(t.begin(type, words));
    t.commit();
  }

  // Sends and waits; `read(const char* data, size_t length)` sees the response under the channel lock and
  // without the GIL. Throws what the proxy answered. `raise_asynchronous`: an error of an earlier message
  // is raised here, after the response was taken; it comes before an error of this one, whose cause it may be.
  template <class Fill, class Read>
  void call(Message type, size_t words, Fill&& fill, Read&& read, bool raise_asynchronous = true) {
    require();
    GilRelease gil;
    Transaction t(*this, words);
    fill(t.begin(type, words));
    t.commit();
    wait_response(raise_asynchronous);
    read(response(), response_length());
    if (raise_asynchronous) raise_asynchronous_error();
  }

  void synchronize();

  // Bytes sent so far. The channel lock is held.
  uint64_t position() const { return head_; }

  // Releases a storage; never waits and never throws, so it may be called from any destructor. The device hears of it
  // with the next message, of much memory at once.
  void release(Holding* holding) noexcept;

  // For handles that belong to a message just answered; the channel lock is held.
  void take_handles(uint64_t n) { next_handle_ += n; }
  // Sends the release with the next message.
  void queue_release(Holding* holding) noexcept;

  // The optimizer-step boundary of this rank: numbers from 1.
  void step();
  uint64_t steps() const { return header_ != nullptr ? header_->step.load() : 0; }
  // Tells the proxy that no collective follows: the interpreter is ending.
  void leaving() noexcept {
    if (open()) header_->rank_leaving.store(1);
  }
  // Tells the proxy that nothing follows.
  void exit() noexcept;

  const char* response_area() const { return response_; }
  uint64_t response_capacity() const { return response_bytes_; }
  uint64_t ring_capacity() const { return ring_bytes_; }
  // Of an open channel: the message at a place, as long as the device has not come past it, and how far it has come.
  const MessageHeader& message_at(uint64_t place) const {
    return *reinterpret_cast<const MessageHeader*>(ring_ + (place & (ring_bytes_ - 1)));
  }
  const std::atomic<uint64_t>& tail() const { return header_->tail; }
  // Memory that the device proxy has mapped too; none in a process of a tree.
  char* pinned() const { return pinned_; }
  uint64_t pinned_bytes() const { return pinned_bytes_; }
  // Largest body, in words, that a message may have.
  size_t max_words() const { return ring_bytes_ / 16 - 2; }
  // Bytes of payload that a Write message should carry at most.
  size_t write_chunk() const;
  const ChannelStats& stats() const { return stats_; }
  ChannelStats& mutable_stats() { return stats_; }
  // Where the stub libraries count the CUDA calls that they refused, and name the last one.
  void set_refusals(unsigned long (*count)(), const char* (*last)()) {
    refused_ = count;
    last_refused_ = last;
  }
  uint64_t refused() const { return refused_ != nullptr ? refused_() : 0; }

  // Holds the channel lock with room for one message; the GIL is dropped while waiting for room.
  class Transaction {
   public:
    Transaction(Channel& channel, size_t words);
    ~Transaction() {
      if (lock_.owns_lock()) channel_.publish();
    }
    Transaction(const Transaction&) = delete;
    Transaction& operator=(const Transaction&) = delete;
    uint64_t* begin(Message type, size_t words);
    void commit();
    // Consecutive storage handles that belong to this message.
    uint64_t next_handle() const { return channel_.next_handle_; }
    void take_handles(uint64_t n) { channel_.next_handle_ += n; }

   private:
    Channel& channel_;
    std::unique_lock<std::mutex> lock_;
    uint64_t length_ = 0;
  };
  friend class Transaction;

  // For an answer (of status Ok) that changes what may be sent next. Both run under the channel lock: `learn` once,
  // before anything else is sent, whether its waiter still waits or not; `abandon` after it, when the waiter was
  // interrupted by an exception of a signal handler.
  struct Effects {
    std::function<void(const char* data, size_t length)> learn;
    std::function<void()> abandon;
  };

  // Waits for the response of the message just committed. The channel lock is held, the GIL is not.
  void wait_response(bool raise_asynchronous, Effects effects = {});
  // The answer that wait_response has waited for.
  const char* response() const { return answer_.data(); }
  size_t response_length() const { return answer_.size(); }
  void raise_asynchronous_error();
  // An operation failed on the device after its call had returned: as on CUDA, the device is lost to this process.
  bool faulted() const { return header_ != nullptr && header_->error_flag.load(std::memory_order_relaxed) != 0; }
  bool fault_raised() const { return fault_raised_; }
  std::string fault_text() const;

  // Where the queue ends now, and whether the device has come to such a place.
  uint64_t published() const { return header_->head.load(std::memory_order_acquire); }
  bool passed(uint64_t place) const { return header_->tail.load(std::memory_order_acquire) >= place; }
  // Waits for it. Errors of operations before it are the caller's to raise. Not interruptible: a signal handler that
  // raises would have the memory freed that the device reads or writes.
  void wait_for(uint64_t place);

 private:
  void explain() const;
  [[noreturn]] void raise_fault();
  uint64_t room_end(uint64_t length) const;
  char* reserve(uint64_t length);
  void wrote(uint64_t length);
  void publish();
  void flush_releases(uint64_t keep_free);
  template <class Ready>
  bool wait_until(Ready&& ready, bool interruptible);
  void lock_without_gil(std::unique_lock<std::mutex>& lock);
  std::pair<Status, std::string_view> answer_in_ring() const;
  void settle();
  [[noreturn]] void raise_gone();

  RingHeader* header_ = nullptr;
  char* ring_ = nullptr;
  char* response_ = nullptr;
  char* pinned_ = nullptr;
  uint64_t ring_bytes_ = 0, response_bytes_ = 0, pinned_bytes_ = 0;
  uint64_t head_ = 0, published_ = 0, tail_seen_ = 0, responses_ = 0, next_handle_ = 1;
  std::string_view answer_;  // in the response area, or in late_answer_
  std::string late_answer_;
  // An answer that is still to come though its waiter has let go of the lock. The response area holds one answer, so
  // it is taken before anything else is sent.
  struct Outstanding {
    uint64_t wanted;
    std::function<void(Status, std::string_view)> take;
  };
  std::optional<Outstanding> outstanding_;
  std::atomic<bool> fault_raised_{false};
  std::mutex mutex_;
  std::atomic<Holding*> released_{nullptr};  // the last one; anybody adds to it, all of it is taken at once
  std::atomic<uint64_t> released_bytes_{0};  // about: threads that add at the same time count once
  Holding* unsent_ = nullptr;                // taken from there, found no room in the queue; the channel lock's
  std::atomic<uint32_t> sleepers_{0};
  bool closed_ = false, forked_ = false;
  unsigned long (*refused_)() = nullptr;
  const char* (*last_refused_)() = nullptr;
  ChannelStats stats_;
};

}  // namespace ergo::rank
