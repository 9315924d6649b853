// The rank's end of a ring (rank/native/channel.cpp) against the proxy's (ring_consumer.cpp), as threads of one
// process: several producers, some of which hold the lock that stands for Python's GIL, messages of every size up to
// the largest, calls and releases, a consumer that sleeps and pauses, handlers of "signals" that use the channel in
// the middle of a wait, or raise. What arrives is checked word by word. Built with sanitizers by test_sanitizers.py.
//   ring_stress SECONDS SEED
#include <Python.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "channel.hpp"
#include "fabric.hpp"
#include "ring_consumer.hpp"
#include "sleep.hpp"

using namespace ergo;

namespace {

constexpr uint64_t kRing = 1 << 16, kResponse = 1 << 12;
constexpr int kThreads = 4;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "ring_stress: %s\n", what);
  std::abort();
}

struct Interrupted {};

// The main producer's turn for signal handlers; what a handler does is set by that producer.
thread_local bool is_main = false;
thread_local int in_handler = 0;
thread_local std::function<void()> handler;
std::atomic<uint64_t> handlers_run{0};

uint64_t pattern(uint64_t producer, uint64_t number, uint64_t i) {
  return (producer << 56) ^ (number * 0x9E3779B97F4A7C15ull) ^ (i * 0xBF58476D1CE4E5B9ull);
}

// Takes messages in order: Write [producer, number, words...] must arrive complete and in each producer's order;
// Read [producer, number, n] is answered with n words; Free is collected.
class Consumer {
 public:
  explicit Consumer(int fd, unsigned seed) : ring(fd), random_(seed) {}

  void run(std::atomic<bool>& stop) {
    auto idle = std::chrono::steady_clock::now();
    bool drowsy = false;
    while (true) {
      std::optional<device::MessageView> message = ring.peek();
      if (!message) {
        if (stop && !ring.has_message()) return;
        if (!drowsy) {
          ring.grow_drowsy();
          idle = std::chrono::steady_clock::now();
          drowsy = true;
        }
        if (std::chrono::steady_clock::now() - idle < kDrowsyFor) continue;
        std::vector<futex_waitv> waiters;
        ring.announce_sleep(waiters);
        if (!ring.has_message()) wait_any(waiters, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
        ring.withdraw_sleep();
        drowsy = false;
        continue;
      }
      if (drowsy) ring.withdraw_sleep();
      drowsy = false;
      if (random_() % 4096 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random_() % 30));
      take(*message);
      ring.advance(*message);
      ++messages;
    }
  }

  device::RingConsumer ring;
  uint64_t messages = 0;
  std::set<uint64_t> freed;
  std::map<uint64_t, uint64_t> last;

 private:
  void take(const device::MessageView& message) {
    WordReader body = message.body;
    if (message.type == Message::Free) {
      require(freed.insert(body.word()).second, "a handle was freed twice");
      return;
    }
    uint64_t producer = body.word(), number = body.word();
    require(number > last[producer], "out of order");
    last[producer] = number;
    if (message.type == Message::Write) {
      for (uint64_t i = 0; body.left() != 0; ++i)
        require(body.word() == pattern(producer, number, i), "a word has changed on its way");
      return;
    }
    require(message.type == Message::Read, "an unknown message");
    std::vector<uint64_t> answer(body.word());
    for (uint64_t i = 0; i < answer.size(); ++i) answer[i] = pattern(producer, number, i);
    ring.respond(number % 7 == 0 ? Status::Runtime : Status::Ok, answer.data(), 8 * answer.size());
  }
  std::mt19937 random_;
};

class Producer {
 public:
  Producer(rank::Channel& channel, uint64_t id, unsigned seed, bool with_gil)
      : channel_(channel), id_(id), random_(seed), with_gil_(with_gil) {}

  void run(std::chrono::steady_clock::time_point until) {
    is_main = id_ == 0;
    handler = [this] {
      if (random_() % 2) one();
      if (random_() % 3 == 0) throw Interrupted{};
    };
    if (with_gil_) shim_gil_lock();
    while (std::chrono::steady_clock::now() < until) try {
        one();
      } catch (const Interrupted&) {
        ++interrupted;
      }
    while (true) try {
        call(1);
        break;
      } catch (const Interrupted&) {
      }
    if (with_gil_) shim_gil_unlock();
  }

  uint64_t sent = 0, interrupted = 0, released = 0, defined = 0, learned = 0, late = 0;

  void one() {
    switch (random_() % 16) {
      case 0:
        return write(channel_.max_words() - 2);
      case 1:
        return write(random_() % (channel_.max_words() - 2));
      case 2:
      case 3:
        return call(1 + random_() % (kResponse / 8));
      case 4:
        return define();
      case 5:
        ++released;
        return channel_.release(new rank::Holding{(id_ << 48) | released, random_() % 4 == 0 ? 1ull << 20 : 64});
      case 6:
        return give_up();
      default:
        return write(random_() % 64);
    }
  }
  // As an operator's call whose key is not known: what has been written before it is not lost.
  void give_up() {
    const rank::Channel::Transaction t(channel_, random_() % 64);
    require(channel_.position() >= channel_.published(), "more was published than written");
  }
  void write(size_t n) {
    channel_.send(Message::Write, 2 + n, [&](uint64_t* body) {
      const uint64_t number = ++sent;  // under the lock, as handles are
      body[0] = id_;
      body[1] = number;
      for (size_t i = 0; i < n; ++i) body[2 + i] = pattern(id_, number, i);
    });
  }
  void call(size_t n) {
    uint64_t number = 0;
    const auto check = [&, this](const char* data, size_t length) {
      require(number % 7 != 0, "an error came as an answer");
      require(length == 8 * n, "an answer of another length");
      for (size_t i = 0; i < n; ++i) {
        uint64_t word;
        std::memcpy(&word, data + 8 * i, 8);
        require(word == pattern(id_, number, i), "the answer to another call");
      }
    };
    try {
      channel_.call(
          Message::Read, 3,
          [&](uint64_t* body) {
            number = ++sent;
            body[0] = id_;
            body[1] = number;
            body[2] = n;
          },
          check);
    } catch (const std::runtime_error& error) {
      require(number % 7 == 0, error.what());
    }
  }

  // As an operator's first call: the answer counts even if its sender is interrupted.
  void define() {
    rank::GilRelease gil;
    rank::Channel::Transaction t(channel_, 3);
    uint64_t number = ++sent;
    if (number % 7 == 0) number = ++sent;  // no error
    uint64_t* body = t.begin(Message::Read, 3);
    body[0] = id_, body[1] = number, body[2] = 2;
    t.commit();
    ++defined;
    const auto learn = [this, number](const char* data, size_t length) {
      uint64_t word;
      std::memcpy(&word, data, 8);
      require(length == 16 && word == pattern(id_, number, 0), "the answer to another definition");
      ++learned;
      require(learned == defined, "something was sent before the answer was taken in");
    };
    channel_.wait_response(false, {learn, [this] { ++late; }});
  }

 private:
  rank::Channel& channel_;
  uint64_t id_;
  std::mt19937 random_;
  bool with_gil_;
};

}  // namespace

namespace ergo::rank {

void connect_current_device() {}

bool runs_signal_handlers() { return is_main; }

void run_signal_handlers() {
  if (!is_main || in_handler > 2) return;
  require(!shim_gil_held, "a handler was run while the GIL was held");
  ++handlers_run;
  ++in_handler;
  shim_gil_lock();
  try {
    handler();
  } catch (...) {
    shim_gil_unlock();
    --in_handler;
    throw;
  }
  shim_gil_unlock();
  --in_handler;
}

}  // namespace ergo::rank

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int>(1000 * std::atof(argv[1])));
  const auto seed = static_cast<unsigned>(std::atoi(argv[2]));
  const int fd = memfd_create("ring_stress", 0);
  require(fd >= 0 && ftruncate(fd, kHeaderBytes + kRing + kResponse) == 0, "no memfd");
  RingHeader fixed{};
  fixed.magic = kRingMagic;
  fixed.version = kProtocolVersion;
  fixed.ring_bytes = kRing;
  fixed.response_bytes = kResponse;
  require(pwrite(fd, &fixed, 64, 0) == 64, "no header");
  Consumer consumer(fd, seed);
  rank::Channel& channel = rank::Channel::instance();
  channel.attach(&consumer.ring.header());  // the same mapping: the thread sanitizer knows addresses, not memory

  std::atomic<bool> stop{false};
  std::thread reader([&] { consumer.run(stop); });
  std::vector<std::unique_ptr<Producer>> producers;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    producers.push_back(std::make_unique<Producer>(channel, i, seed + 1 + static_cast<unsigned>(i), i % 2 == 0));
    threads.emplace_back([&producer = *producers.back(), until] { producer.run(until); });
  }
  for (auto& thread : threads) thread.join();
  for (int i = 0; i < 20; ++i) producers[1]->call(1);  // each takes along what fits of the releases that are left
  stop = true;
  reader.join();
  uint64_t released = 0, interrupted = 0, late = 0;
  for (const auto& producer : producers) {
    released += producer->released;
    interrupted += producer->interrupted;
    late += producer->late;
    require(producer->defined == producer->learned, "an answer that must not be lost is lost");
    require(consumer.last[static_cast<uint64_t>(&producer - producers.data())] == producer->sent, "messages are lost");
  }
  require(consumer.freed.size() == released, "releases are lost");
  std::fprintf(stderr, "%llu messages, %llu handlers, %llu interrupted, %llu late answers\n",
               static_cast<unsigned long long>(consumer.messages), static_cast<unsigned long long>(handlers_run.load()),
               static_cast<unsigned long long>(interrupted), static_cast<unsigned long long>(late));
  require(handlers_run > 0 && interrupted > 0 && late > 0, "no handler ran: nothing was tested");
  std::puts("ok");
}
