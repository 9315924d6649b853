#include "queue.hpp"

#include <dlfcn.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <string>

#include "../stubs/bodies/queue.h"
#include "channel.hpp"

namespace ergo::rank {
namespace {

uint64_t record(uint64_t marker) {
  Channel& channel = Channel::instance();
  if (!channel.open()) return 0;
  try {
    if (marker != 0) channel.send(Message::Mark, 1, [&](uint64_t* body) { body[0] = marker; });
  } catch (const std::exception&) {
    // The device is lost: the next call that can raise says so.
  }
  return channel.published();
}

// Messages that are no work of a stream's.
bool lets_go(const MessageHeader& message) {
  switch (static_cast<Message>(message.type)) {
    case Message::Pad:
    case Message::Free:
    case Message::FreeGenerator:
    case Message::Unmark:
    case Message::Step:
      return true;
    default:
      return false;
  }
}

// Whether all work before `place` is done: a stream that has been waited for is, whatever has been freed since.
bool worked_off(const Channel& channel, uint64_t place) {
  for (;;) {
    const uint64_t first = channel.tail().load(std::memory_order_acquire);
    uint64_t at = first;
    while (at < place) {
      const MessageHeader& message = channel.message_at(at);
      if (!lets_go(message) || message.length < sizeof message) break;
      at += message.length;
    }
    // What the device has come past meanwhile may have been written anew while it was read here.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (channel.tail().load(std::memory_order_relaxed) == first) return at >= place;
  }
}

int passed(uint64_t place) {
  Channel& channel = Channel::instance();
  return !channel.open() || worked_off(channel, place) ? 1 : 0;
}

int elapsed(uint64_t from, uint64_t to, float* ms) {
  int64_t ns = 0;
  try {
    Channel::instance().call(
        Message::Elapsed, 2,
        [&](uint64_t* body) {
          body[0] = from;
          body[1] = to;
        },
        [&](const char* data, size_t n) {
          if (n == sizeof ns) std::memcpy(&ns, data, n);
        },
        /*raise_asynchronous=*/false);
  } catch (const std::exception&) {
    return -1;
  }
  *ms = static_cast<float>(static_cast<double>(ns) * 1e-6);
  return 0;
}

void forget(uint64_t marker) {
  Channel& channel = Channel::instance();
  if (!channel.open()) return;
  try {
    channel.send(Message::Unmark, 1, [&](uint64_t* body) { body[0] = marker; });
  } catch (const std::exception&) {
    // Called by destructors; the moment goes when the device does.
  }
}

const char* fault() {
  Channel& channel = Channel::instance();
  if (!channel.open() || !channel.faulted()) return nullptr;
  static std::once_flag once;
  static std::string* text = nullptr;
  std::call_once(once, [&] { text = new std::string(channel.fault_text()); });
  return text->c_str();
}

}  // namespace

void connect_queue() {
  static const ergo_queue queue{&record, &passed, &elapsed, &forget, &fault};
  if (auto* set = reinterpret_cast<void (*)(const ergo_queue*)>(dlsym(RTLD_DEFAULT, "ergo_stub_set_queue")))
    set(&queue);
}

}  // namespace ergo::rank
