// Proxies as threads of one process, over shared memory and sockets, running random collectives with cuts in
// between; every result is checked. Built with sanitizers by tests/proxy_runtime/device/test_fabric_stress.py.
//   fabric_stress PROXIES ROUNDS SEED
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "collectives.hpp"

using namespace ergo;

namespace {

constexpr uint8_t kInt64 = 4;
constexpr uint64_t kWorld = 1, kEven = 2;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fabric_stress: %s\n", what);
  std::abort();
}

Slice filled(Fabric& fabric, size_t elements, int64_t value) {
  auto buffer = fabric.allocate(align_up(elements * 8));
  std::memset(buffer->data(), 0, buffer->size());
  for (size_t i = 0; i < elements; ++i) {
    int64_t v = value + static_cast<int64_t>(i);
    std::memcpy(buffer->data() + 8 * i, &v, 8);
  }
  return buffer;
}

int64_t element(const Slice& slice, size_t i) {
  int64_t value;
  std::memcpy(&value, slice.data() + 8 * i, 8);
  return value;
}

// Of a result that comes in pieces.
int64_t element(const std::vector<Slice>& pieces, size_t i) {
  size_t before = 0;
  for (const Slice& piece : pieces) {
    if (8 * i < before + piece.size()) return element(piece, i - before / 8);
    before += piece.size();
  }
  require(false, "a result is too short");
  return 0;
}

// What the proxies share outside their streams: the coordinator of a cut. Its barrier is one at which everybody
// goes on pumping, as a stopped proxy must: the others may need what is still in its queues.
struct Shared {
  std::mutex mutex;
  std::map<SequenceId, std::vector<uint64_t>> contributed;
  std::map<SequenceId, uint64_t> targets;
  std::atomic<int> arrived = 0;
  std::vector<Fabric*> fabrics;
};

// One proxy with two ranks, 2 * self and 2 * self + 1.
class Proxy {
 public:
  Proxy(int self, int proxies, unsigned seed, Shared& shared)
      : self_(self),
        ranks_(2 * proxies),
        fabric(self),
        shared_(shared),
        plan_(seed),
        own_(seed + 1000u * (1 + static_cast<unsigned>(self))) {}

  void run(int rounds) {
    std::vector<int> placement, all, even;
    for (int r = 0; r < ranks_; ++r) {
      placement.push_back(r / 2);
      all.push_back(r);
      if (r % 2 == 0) even.push_back(r);
    }
    CollectiveEngine engine(self_, placement, fabric);
    engine.define(kWorld, all);
    engine.define(kEven, even);
    for (int round = 0; round < rounds; ++round) {
      auto elements = static_cast<size_t>(plan_() % 3 ? plan_() % 100 : 9000 + plan_() % 9000);
      auto kind = plan_() % 4;
      for (int rank : {2 * self_, 2 * self_ + 1}) issue(engine, rank, kind, elements, round);
      if (own_() % 4 == 0) wait(engine, [&] { return outstanding_ == 0; });
      while (engine.pump([](int, Slice) {}) && own_() % 2) {
      }
      if (plan_() % 8 == 0) cut(engine);
    }
    wait(engine, [&] { return outstanding_ == 0; });
    require(engine.pending_count(2 * self_) == 0, "operations are left");
    require(fabric.shutdown(soon()), "the fabric did not shut down");
  }

 private:
  static Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(30); }

  void issue(CollectiveEngine& engine, int rank, unsigned long kind, size_t n, int round) {
    auto expect = [this](auto check) {
      ++outstanding_;
      return [this, check](const CollectiveResult& result) {
        require(result.error.empty(), result.error.c_str());
        check(result);
        --outstanding_;
      };
    };
    std::vector<Segment> segments{{kInt64, 8, n * 8}};
    int64_t base = 1000 * round;
    if (kind < 2) {
      bool sub = kind == 1;
      if (sub && rank % 2) return;
      int64_t members = sub ? ranks_ / 2 : ranks_,
              ranks_sum = sub ? members * (members - 1) : members * (members - 1) / 2;
      engine.issue(rank, {sub ? kEven : kWorld, CollectiveKind::AllReduce, ReduceOp::Sum, 0, segments, 0},
                   filled(fabric, n, base + rank), expect([=](const CollectiveResult& result) {
                     for (size_t i = 0; i < n; i += 1 + n / 50)
                       require(element(result.blocks, i) == members * (base + static_cast<int64_t>(i)) + ranks_sum,
                               "wrong sum");
                   }));
    } else if (kind == 2) {
      engine.issue(rank, {kWorld, CollectiveKind::AllGather, ReduceOp::Sum, 0, segments, 0},
                   filled(fabric, n, base + rank), expect([=, this](const CollectiveResult& result) {
                     for (int r = 0; r < ranks_; ++r)
                       require(n == 0 || element(result.blocks[static_cast<size_t>(r)], n - 1) ==
                                             base + r + static_cast<int64_t>(n) - 1,
                               "wrong block");
                   }));
    } else {
      auto next = static_cast<uint32_t>((rank + 1) % ranks_),
           before = static_cast<uint32_t>((rank + ranks_ - 1) % ranks_);
      engine.issue(
          rank, {kWorld, CollectiveKind::Send, ReduceOp::Sum, next, segments, 0}, filled(fabric, n, base + rank),
          expect([](const CollectiveResult& result) { require(result.blocks.empty(), "a send has no result"); }));
      engine.issue(rank, {kWorld, CollectiveKind::Recv, ReduceOp::Sum, before, {}, 0}, Slice(),
                   expect([=](const CollectiveResult& result) {
                     require(n == 0 || element(result.blocks[0], 0) == base + before, "wrong message");
                   }));
    }
  }

  template <class Done>
  void wait(CollectiveEngine& engine, Done done) {
    std::vector<futex_waitv> waiters;
    while (!done()) {
      waiters.clear();
      fabric.append_waiters(waiters);
      while (engine.pump([](int, Slice) {})) {
      }
      if (!done()) require(wait_any(waiters, soon()), "nothing came for half a minute");
    }
  }

  void meet(CollectiveEngine& engine) {
    int all = static_cast<int>(shared_.fabrics.size()) * ++met_;
    ++shared_.arrived;
    for (Fabric* other : shared_.fabrics) other->ring();
    wait(engine, [&] { return shared_.arrived >= all; });
  }

  void cut(CollectiveEngine& engine) {
    {
      std::lock_guard lock(shared_.mutex);
      for (int rank : {2 * self_, 2 * self_ + 1})
        for (auto& [id, counts] : engine.counts(rank)) shared_.contributed[id].push_back(counts.contributed);
    }
    meet(engine);
    if (self_ == 0)
      for (auto& [id, contributed] : shared_.contributed) {
        size_t members = id.source >= 0      ? 2
                         : id.comm == kWorld ? static_cast<size_t>(ranks_)
                                             : static_cast<size_t>(ranks_ / 2);
        shared_.targets[id] =
            contributed.size() < members ? 0 : *std::min_element(contributed.begin(), contributed.end());
      }
    meet(engine);
    engine.set_targets(shared_.targets);
    wait(engine, [&] { return engine.finished(); });
    meet(engine);
    if (self_ == 0) {
      shared_.contributed.clear();
      shared_.targets.clear();
    }
    meet(engine);
    engine.resume();
  }

  int self_, ranks_;

 public:
  Fabric fabric;

 private:
  Shared& shared_;
  std::mt19937 plan_, own_;  // the same at all proxies; this one's timing
  int outstanding_ = 0, met_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  int count = std::atoi(argv[1]), rounds = std::atoi(argv[2]);
  auto seed = static_cast<unsigned>(std::atoi(argv[3]));
  Shared shared;
  std::vector<std::unique_ptr<Proxy>> proxies;
  for (int p = 0; p < count; ++p) proxies.push_back(std::make_unique<Proxy>(p, count, seed, shared));
  for (auto& proxy : proxies) shared.fabrics.push_back(&proxy->fabric);
  for (int a = 0; a < count; ++a)
    for (int b = a + 1; b < count; ++b) {
      if ((a + b) % 2) {
        int fd = memfd_create("stress", 0);
        require(fd >= 0 && ftruncate(fd, static_cast<off_t>(shm_segment_bytes(1 << 12))) == 0, "no memfd");
        proxies[static_cast<size_t>(a)]->fabric.add_shm_peer(b, fd, true);
        proxies[static_cast<size_t>(b)]->fabric.add_shm_peer(a, fd, false);
        close(fd);
      } else {
        int ends[2];
        require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
        proxies[static_cast<size_t>(a)]->fabric.add_tcp_peer(b, ends[0]);
        proxies[static_cast<size_t>(b)]->fabric.add_tcp_peer(a, ends[1]);
      }
    }
  int board = memfd_create("board", 0);
  std::vector<int> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  require(board >= 0 && ftruncate(board, static_cast<off_t>(Board::segment_bytes(slots.size()))) == 0, "no board");
  for (auto& proxy : proxies) proxy->fabric.add_board(board, slots);
  close(board);
  std::vector<std::thread> threads;
  for (auto& proxy : proxies) threads.emplace_back([&proxy, rounds] { proxy->run(rounds); });
  for (auto& thread : threads) thread.join();
  std::puts("ok");
}
