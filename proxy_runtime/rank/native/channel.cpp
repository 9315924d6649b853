#include "channel.hpp"

#include <c10/util/Exception.h>
#include <immintrin.h>
#include <pthread.h>

#include <algorithm>
#include <ctime>
#include <exception>
#include <new>
#include <utility>

#include "interrupt.hpp"
#include "shared_ring.hpp"
#include "sleep.hpp"

namespace ergo::rank {
namespace {

constexpr uint64_t kSpinNanoseconds = 20'000;
constexpr timespec kFutexTimeout{0, 100'000'000};
constexpr uint64_t kFreeLength = 16;
// Released memory that the device may hold until it is told with the next message.
constexpr uint64_t kReleasedBytes = uint64_t{1} << 20;
// What a storage counts at least, so that there is an end to small ones, too.
constexpr uint64_t kLeastReleased = 512;

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000ull + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

void raise_status(Status status, const std::string& message) {
  switch (status) {
    case Status::NotImplemented:
      C10_THROW_ERROR(NotImplementedError, message);
    case Status::Index:
      C10_THROW_ERROR(IndexError, message);
    case Status::Value:
      C10_THROW_ERROR(ValueError, message);
    case Status::Type:
      C10_THROW_ERROR(TypeError, message);
    case Status::OutOfMemory:
      C10_THROW_ERROR(OutOfMemoryError, message);
    case Status::LinAlg:
      C10_THROW_ERROR(LinAlgError, message);
    default:
      C10_THROW_ERROR(Error, message);
  }
}

Channel& Channel::instance() {
  // Never destroyed: tensors in static storage release their handles after every static destructor ran.
  static Channel* channel = new Channel;
  return *channel;
}

void Channel::attach(void* base) {
  GilRelease gil;
  std::lock_guard<std::mutex> lock(mutex_);
  auto* header = static_cast<RingHeader*>(base);
  TORCH_CHECK(header->magic == kRingMagic, "ergosphere: the channel is not a ring");
  TORCH_CHECK(header->version == kProtocolVersion, "ergosphere: the channel speaks protocol ", header->version,
              ", this rank ", kProtocolVersion, "; start the job with one build");
  ring_bytes_ = header->ring_bytes;
  response_bytes_ = header->response_bytes;
  TORCH_CHECK(ring_bytes_ >= 65536 && (ring_bytes_ & (ring_bytes_ - 1)) == 0 && response_bytes_ >= 4096,
              "ergosphere: the channel's sizes are not usable");
  ring_ = static_cast<char*>(base) + kHeaderBytes;
  response_ = ring_ + ring_bytes_;
  pinned_ = response_ + response_bytes_;
  pinned_bytes_ = header->pinned_bytes;
  head_ = published_ = header->head.load();
  tail_seen_ = header->tail.load();
  responses_ = header->response_seq.load();
  header_ = header;
  header_->rank_attached.store(1);
  if (shared_words(*header).shared.load() != 1) return;

  // Nothing of the process that had it before is left when this returns.
  auto consumed = [this] { return header_->tail.load(std::memory_order_acquire) >= head_; };
  header_->step.store(0);
  shared_words(*header).dropped_to.store(head_);
  wake_consumer(*header);
  wait_until(consumed, /*interruptible=*/false);
  const uint64_t length = sizeof(MessageHeader);
  auto* message = reinterpret_cast<MessageHeader*>(reserve(length));
  *message = {static_cast<uint32_t>(length), static_cast<uint16_t>(kResetMessage),
              header_check(length, static_cast<uint16_t>(kResetMessage))};
  wrote(length);
  publish();
  wait_until(consumed, /*interruptible=*/false);
  tail_seen_ = header_->tail.load();
  responses_ = header_->response_seq.load();
}

void Channel::install_fork_handlers() {
  // Nothing is locked before a fork: the lock may be held until the device answers. The child has no mapping and
  // never looks at what the locks guard, so it may have them anew.
  pthread_atfork(nullptr, nullptr, [] {
    Channel& channel = instance();
    new (&channel.mutex_) std::mutex;
    channel.forked_ = channel.forked_ || channel.header_ != nullptr;  // without a channel: it may get its own
    channel.header_ = nullptr;
  });
}

// Why the device cannot be used; returns if a tree's process has got its channel meanwhile.
void Channel::explain() const {
  TORCH_CHECK(!forked_,
              "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
              "'spawn' start method. (Ergosphere: the child has no channel to the device of its parent. Keep device "
              "tensors out of DataLoader workers and other forked processes.)");
  if (header_ == nullptr) connect_current_device();
  TORCH_CHECK(header_ != nullptr, "ergosphere: this process has no device channel");
  TORCH_CHECK(!closed_, "ergosphere: the device channel is closed, the interpreter is ending");
  if (fault_raised_.load(std::memory_order_relaxed)) const_cast<Channel*>(this)->raise_fault();
  TORCH_CHECK(refused() == 0, "ergosphere: native code in this rank called ",
              last_refused_ != nullptr ? last_refused_() : "CUDA",
              " and was refused, so results of this process are no longer valid. Only operators registered with "
              "torch's dispatcher can run on the device proxy.");
}

size_t Channel::write_chunk() const { return std::min<size_t>(size_t{1} << 20, ring_bytes_ / 4) - 64; }

void Channel::raise_gone() {
  raise_asynchronous_error();  // why the proxy stopped serving this rank, if it said so
  TORCH_CHECK(false,
              "ergosphere: the device proxy of this rank has ended; the device's state is lost and the job must go "
              "back to its last checkpoint");
}

// False: it is time to look whether a signal's handler wants to run; only for `interruptible` waits of the thread
// that runs them.
template <class Ready>
bool Channel::wait_until(Ready&& ready, bool interruptible) {
  const uint64_t until = now_ns() + kSpinNanoseconds;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      _mm_pause();
    }
  } while (now_ns() < until);
  interruptible = interruptible && runs_signal_handlers();
  for (;;) {
    if (ready()) return true;
    if (header_->proxy_gone.load() != 0) {
      if (ready()) return true;  // a proxy that stops serving this rank answers, and is gone then
      raise_gone();
    }
    sleepers_.fetch_add(1);
    header_->producer_sleeping.store(1);
    if (!ready()) futex(&header_->producer_sleeping, FUTEX_WAIT, 1, &kFutexTimeout);
    // Only the last sleeper clears the word: the proxy must go on waking as long as anybody sleeps.
    if (sleepers_.fetch_sub(1) == 1) header_->producer_sleeping.store(0);
    if (interruptible) return ready();
  }
}

void Channel::lock_without_gil(std::unique_lock<std::mutex>& lock) {
  // Whoever waits for the device holds the lock meanwhile. Locked with the GIL in hand again, so that it is never
  // waited for under the lock.
  while (!lock.try_lock()) {
    GilRelease gil;
    std::lock_guard<std::mutex> free(mutex_);
  }
}

// The value that the tail must have reached before `length` bytes fit, the padding of a wrap included.
uint64_t Channel::room_end(uint64_t length) const {
  const uint64_t contiguous = ring_bytes_ - (head_ & (ring_bytes_ - 1));
  const uint64_t total = length <= contiguous ? length : contiguous + length;
  const uint64_t end = head_ + total;
  return end > ring_bytes_ ? end - ring_bytes_ : 0;
}

char* Channel::reserve(uint64_t length) {
  uint64_t at = head_ & (ring_bytes_ - 1);
  const uint64_t contiguous = ring_bytes_ - at;
  if (length > contiguous) {
    auto* pad = reinterpret_cast<MessageHeader*>(ring_ + at);
    pad->length = static_cast<uint32_t>(contiguous);
    pad->type = static_cast<uint16_t>(Message::Pad);
    pad->check = header_check(pad->length, pad->type);
    head_ += contiguous;
    at = 0;
  }
  return ring_ + at;
}

void Channel::wrote(uint64_t length) {
  head_ += length;
  ++stats_.messages;
  stats_.bytes += length;
}

// Lets the device see what has been written: whoever gives the channel lock back has done so. Once for all of it, as
// every time costs a transfer between the two processors' caches.
void Channel::publish() {
  if (head_ == published_) return;
  published_ = head_;
  header_->head.store(head_, std::memory_order_release);
  wake_consumer(*header_);
}

// Writes queued releases while they fit together with `keep_free` bytes. The channel lock is held.
void Channel::flush_releases(uint64_t keep_free) {
  if (released_.load(std::memory_order_relaxed) != nullptr) {
    released_bytes_.store(0, std::memory_order_relaxed);
    Holding* in_order = nullptr;  // the last comes first
    for (Holding* taken = released_.exchange(nullptr, std::memory_order_acquire); taken != nullptr;) {
      Holding* const before = std::exchange(taken->next, in_order);
      in_order = std::exchange(taken, before);
    }
    Holding** end = &unsent_;
    while (*end != nullptr) end = &(*end)->next;
    *end = in_order;
  }
  while (unsent_ != nullptr) {
    if (room_end(kFreeLength + keep_free + 2 * kFreeLength) > tail_seen_) {
      tail_seen_ = header_->tail.load(std::memory_order_acquire);
      if (room_end(kFreeLength + keep_free + 2 * kFreeLength) > tail_seen_) return;
    }
    char* p = reserve(kFreeLength);
    auto* header = reinterpret_cast<MessageHeader*>(p);
    *header = {static_cast<uint32_t>(kFreeLength), static_cast<uint16_t>(Message::Free),
               header_check(kFreeLength, static_cast<uint16_t>(Message::Free))};
    reinterpret_cast<uint64_t*>(p)[1] = unsent_->handle;
    delete std::exchange(unsent_, unsent_->next);
    wrote(kFreeLength);
  }
}

Channel::Transaction::Transaction(Channel& channel, size_t words)
    : channel_(channel), lock_(channel.mutex_, std::defer_lock) {
  const uint64_t length = sizeof(MessageHeader) + 8 * words;
  TORCH_CHECK(words <= channel.max_words(), "ergosphere: a message of ", length, " bytes does not fit the channel of ",
              channel.ring_bytes_, " bytes");
  channel.lock_without_gil(lock_);
  for (;;) {
    if (channel_.outstanding_) channel_.settle();
    channel_.flush_releases(length);
    const uint64_t needed = channel_.room_end(length);
    if (needed <= channel_.tail_seen_) return;
    channel_.tail_seen_ = channel_.header_->tail.load(std::memory_order_acquire);
    if (needed <= channel_.tail_seen_) return;
    ++channel_.stats_.waits_for_room;
    channel_.publish();
    lock_.unlock();
    {
      GilRelease gil;
      auto* header = channel_.header_;
      const auto room = [&] { return header->tail.load(std::memory_order_acquire) >= needed; };
      while (!channel_.wait_until(room, /*interruptible=*/true)) run_signal_handlers();
    }
    channel.lock_without_gil(lock_);
  }
}

uint64_t* Channel::Transaction::begin(Message type, size_t words) {
  length_ = sizeof(MessageHeader) + 8 * words;
  char* p = channel_.reserve(length_);
  auto* header = reinterpret_cast<MessageHeader*>(p);
  header->length = static_cast<uint32_t>(length_);
  header->type = static_cast<uint16_t>(type);
  header->check = header_check(header->length, header->type);
  return reinterpret_cast<uint64_t*>(p + sizeof(MessageHeader));
}

void Channel::Transaction::commit() {
  channel_.wrote(length_);
  channel_.publish();
}

std::pair<Status, std::string_view> Channel::answer_in_ring() const {
  const uint64_t length = header_->response_length;
  TORCH_CHECK(length <= response_bytes_, "ergosphere: the device proxy's response is longer than its area");
  return {static_cast<Status>(header_->response_status), std::string_view(response_, length)};
}

// Takes the answer that somebody else waits for, or has been interrupted in waiting for. The channel lock is held.
void Channel::settle() {
  GilRelease gil;
  const uint64_t wanted = outstanding_->wanted;
  const auto answered = [&] { return header_->response_seq.load(std::memory_order_acquire) >= wanted; };
  while (!wait_until(answered, /*interruptible=*/true)) {
    mutex_.unlock();
    try {
      run_signal_handlers();
    } catch (...) {
      mutex_.lock();
      throw;
    }
    mutex_.lock();
    if (!outstanding_ || outstanding_->wanted != wanted) return;  // a handler has used the device
  }
  const auto [status, data] = answer_in_ring();
  const auto take = std::move(outstanding_->take);
  outstanding_.reset();
  take(status, data);
}

void Channel::wait_response(bool raise_asynchronous, Effects effects) {
  const uint64_t wanted = ++responses_;
  ++stats_.responses;
  const auto answered = [&] { return header_->response_seq.load(std::memory_order_acquire) >= wanted; };
  const auto learn = [&effects](Status status, std::string_view data) {
    if (effects.learn && status == Status::Ok) effects.learn(data.data(), data.size());
  };
  std::optional<std::pair<Status, std::string>> taken;  // by whoever came while a handler ran
  while (!taken && !wait_until(answered, /*interruptible=*/true)) {
    outstanding_ = {wanted, [&](Status status, std::string_view data) {
                      learn(status, data);
                      taken.emplace(status, data);
                    }};
    mutex_.unlock();
    std::exception_ptr raised;
    try {
      run_signal_handlers();
    } catch (...) {
      raised = std::current_exception();
    }
    mutex_.lock();
    if (raised) {
      if (!taken)
        outstanding_->take = [effects](Status status, std::string_view data) {
          if (status != Status::Ok || !effects.learn) return;
          effects.learn(data.data(), data.size());
          effects.abandon();
        };
      else if (taken->first == Status::Ok && effects.abandon)
        effects.abandon();
      std::rethrow_exception(raised);
    }
    if (!taken) outstanding_.reset();
  }
  if (taken) late_answer_ = std::move(taken->second);
  const auto [status, answer] = taken ? std::pair(taken->first, std::string_view(late_answer_)) : answer_in_ring();
  answer_ = answer;
  if (!taken) learn(status, answer);
  if (status == Status::Ok) return;
  const std::string message(answer_);
  if (raise_asynchronous) raise_asynchronous_error();
  raise_status(status, message);
}

void Channel::raise_asynchronous_error() {
  if (C10_UNLIKELY(header_->error_flag.load() != 0)) raise_fault();
}

std::string Channel::fault_text() const {
  const std::string message(header_->error_message, strnlen(header_->error_message, kErrorBytes));
  return "device-side assert triggered\n" + message +
         "\nAn earlier operation raised this on the device after its call had returned, so the stack trace may be of a "
         "later one; ERGO_LAUNCH_BLOCKING=1 (or CUDA_LAUNCH_BLOCKING=1) has it raised at its line. The device cannot "
         "be used any more in this process.";
}

// The flag stays: whatever was computed since is not what the script asked for.
void Channel::raise_fault() {
  // A proxy that serves this rank no longer has said why: that stays the answer to everything.
  if (header_->proxy_gone.load() != 0)
    raise_status(static_cast<Status>(header_->error_status),
                 std::string(header_->error_message, strnlen(header_->error_message, kErrorBytes)));
  const bool first = !fault_raised_.exchange(true);
  if (static_cast<Status>(header_->error_status) == Status::OutOfMemory && first)
    C10_THROW_ERROR(OutOfMemoryError,
                    std::string(header_->error_message, strnlen(header_->error_message, kErrorBytes)) +
                        "\nThe machine of the device has less memory than it was said to have, and an earlier "
                        "operation failed after its call had returned: the device cannot be used any more in this "
                        "process. Give the job a smaller device memory (ergo run --device-memory).");
  constexpr int kCudaErrorAssert = 710;
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kCudaErrorAssert,
                              "CUDA error: " + fault_text());
}

void Channel::wait_for(uint64_t place) {
  if (passed(place)) return;
  GilRelease gil;  // nothing, where the caller has done it already
  wait_until([&] { return passed(place); }, /*interruptible=*/false);
}

void Channel::synchronize() {
  call(Message::Sync, 0, [](uint64_t*) {}, [](const char*, size_t) {});
}

void Channel::queue_release(Holding* holding) noexcept {
  Holding* last = released_.load(std::memory_order_relaxed);
  do holding->next = last;
  while (!released_.compare_exchange_weak(last, holding, std::memory_order_release, std::memory_order_relaxed));
}

void Channel::release(Holding* holding) noexcept {
  if (!open()) {
    delete holding;
    return;
  }
  const uint64_t bytes = released_bytes_.load(std::memory_order_relaxed) + std::max(holding->bytes, kLeastReleased);
  released_bytes_.store(bytes, std::memory_order_relaxed);
  queue_release(holding);
  if (bytes < kReleasedBytes) return;
  // Otherwise the next message of whoever holds the lock takes it along.
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !open()) return;
  flush_releases(0);
  publish();
}

void Channel::step() {
  if (!open()) return;
  const uint64_t number = header_->step.load() + 1;
  send(Message::Step, 1, [&](uint64_t* body) { body[0] = number; });
  header_->step.store(number);
}

void Channel::exit() noexcept {
  if (!open()) return;
  try {
    send(Message::Exit, 0, [](uint64_t*) {});
  } catch (const std::exception&) {
    // The proxy is gone: there is nobody to tell.
  }
  closed_ = true;
}

}  // namespace ergo::rank
