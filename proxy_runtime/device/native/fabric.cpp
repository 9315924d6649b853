#include "fabric.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "streams.hpp"

namespace ergo {

namespace {

constexpr size_t kStagingBytes = 64 * 1024;
// How much one pump takes from one peer before it looks at the next.
constexpr size_t kReadBudget = 8 * 1024 * 1024;

std::string name(int proxy) { return "proxy " + std::to_string(proxy); }

}  // namespace

uint64_t frame_check(const FrameHeader& header) {
  constexpr size_t kWords = offsetof(FrameHeader, check) / 8;
  std::array<uint64_t, kWords> words;
  std::memcpy(words.data(), &header, sizeof words);
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0xBF58476D1CE4E5B9ull;
    hash ^= hash >> 29;
  }
  return hash;
}

size_t shm_segment_bytes(size_t ring_bytes) { return kShmHeaderBytes + 2 * align_up(ring_bytes, 64); }

// Rings the doorbell when a socket becomes readable or writable. Edge-triggered: pump reads until a socket
// is empty, or returns true and is called again, so that no edge is missed and nothing spins.
class Fabric::Watcher {
 public:
  explicit Watcher(Fabric& fabric) : epoll_(epoll_create1(EPOLL_CLOEXEC)), stop_(eventfd(0, EFD_CLOEXEC)) {
    if (!epoll_ || !stop_) throw FabricError("fabric_system", -1, "cannot watch sockets: " + error_text(errno));
    add(stop_.get(), EPOLLIN);
    thread_ = std::thread([this, &fabric] { loop(fabric); });
  }
  ~Watcher() {
    uint64_t one = 1;
    [[maybe_unused]] ssize_t n = ::write(stop_.get(), &one, sizeof one);
    thread_.join();
  }
  void watch(int fd) { add(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET); }

 private:
  void add(int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      throw FabricError("fabric_system", -1, "cannot watch a socket: " + error_text(errno));
  }
  void loop(Fabric& fabric) {
    std::array<epoll_event, 16> events;
    for (;;) {
      int n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
      for (int i = 0; i < n; ++i)
        if (events[static_cast<size_t>(i)].data.fd == stop_.get()) return;
      if (n > 0) fabric.ring();
    }
  }
  UniqueFd epoll_, stop_;
  std::thread thread_;
};

struct Fabric::Peer {
  int index;
  std::unique_ptr<Stream> stream;
  bool shares_memory = false;

  struct Outgoing {
    FrameHeader header;
    Slice payload;
  };
  std::deque<Outgoing> queue;
  size_t sent = 0;  // bytes of the front frame that have left or are staged
  // Small frames leave together: one system call, one wake-up.
  std::vector<std::byte> out;
  size_t out_at = 0;

  std::vector<std::byte> in = std::vector<std::byte>(kStagingBytes);
  size_t in_begin = 0, in_end = 0;
  std::optional<FrameHeader> header;  // of the frame whose payload is arriving
  std::shared_ptr<Buffer> payload;
  size_t payload_got = 0;

  bool flushed() const { return queue.empty() && out_at == out.size(); }
};

Fabric::Fabric(int self) : self_(self), doorbell_(std::make_unique<std::atomic<uint32_t>>(0)) {}

// The watcher first: it must not see descriptors that are closed and used again.
Fabric::~Fabric() { watcher_.reset(); }

void Fabric::require_new(int peer) const {
  if (peer == self_ || peer < 0 || peers_.count(peer))
    throw FabricError("fabric_peer", peer,
                      name(self_) + ": cannot add " + name(peer) + " as a peer: it is this proxy or known already");
}

void Fabric::add(int peer, std::unique_ptr<Stream> stream) {
  auto entry = std::make_unique<Peer>();
  entry->index = peer;
  entry->stream = std::move(stream);
  peers_.emplace(peer, std::move(entry));
}

void Fabric::add_shm_peer(int peer, int fd, bool first_half) {
  require_new(peer);  // first: attaching marks the segment
  add(peer, std::make_unique<ShmStream>(self_, peer, fd, first_half));
  peers_.at(peer)->shares_memory = true;
}

void Fabric::add_tcp_peer(int peer, int connected_fd) {
  UniqueFd fd(connected_fd);
  require_new(peer);
  int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) | O_NONBLOCK);
  if (!watcher_) watcher_ = std::make_unique<Watcher>(*this);
  watcher_->watch(connected_fd);
  add(peer, std::make_unique<TcpStream>(std::move(fd)));
}

void Fabric::add_memory_peer(int peer, std::shared_ptr<MemoryLink> link, int side) {
  require_new(peer);
  add(peer, std::make_unique<MemoryStream>(std::move(link), side));
}

void Fabric::add_board(int fd, const std::vector<int>& proxies) {
  auto own = std::find(proxies.begin(), proxies.end(), self_);
  board_ =
      std::make_shared<Board>(fd, static_cast<uint32_t>(own - proxies.begin()), static_cast<uint32_t>(proxies.size()));
  for (uint32_t slot = 0; slot < proxies.size(); ++slot)
    if (auto peer = peers_.find(proxies[slot]); peer != peers_.end() && peer->second->shares_memory)
      board_slots_[proxies[slot]] = slot;
}

std::shared_ptr<Buffer> Fabric::allocate(size_t bytes) {
  if (!board_slots_.empty() && bytes >= Board::kLeastBytes)
    if (auto buffer = board_->allocate(bytes)) return buffer;
  return Buffer::allocate(bytes);
}

void Fabric::send(int peer, FrameHeader header, Slice payload) {
  auto found = peers_.find(peer);
  if (found == peers_.end())
    throw FabricError("fabric_peer", peer, name(self_) + ": " + name(peer) + " is not connected");
  if (lost_.count(peer)) return;
  header.length = payload.size();
  if (payload.size() >= Board::kLeastBytes && board_slots_.count(peer))
    if (auto place = board_->place_of(payload)) {
      board_->count_in(place->block);
      header.block = place->block + 1;
      header.place = place->offset;
      bytes_sent_ += payload.size();
      payload = Slice();  // the peer is counted in: the block stays
    }
  header.check = frame_check(header);
  found->second->queue.push_back({header, std::move(payload)});
}

void Fabric::send_control(int peer, std::span<const std::byte> bytes) {
  FrameHeader header;
  header.type = static_cast<uint8_t>(FrameType::Control);
  send(peer, header, Buffer::copy_of(bytes));
}

void Fabric::lose(int peer, std::string why) {
  lost_.emplace(peer, std::move(why));
  Peer& entry = *peers_.at(peer);
  entry.queue.clear();
  entry.out.clear();
  entry.out_at = entry.sent = 0;
  // A peer that shuts down in order waits for our end too.
  entry.stream->close_send();
}

bool Fabric::pump(const Handler& handler) {
  bool moved = false;
  for (auto& [index, peer] : peers_) {
    if (lost_.count(index)) continue;
    bool received = false;
    try {
      moved |= pump_out(*peer);
      moved |= received = pump_in(*peer, handler);
    } catch (const FabricError& error) {
      if (error.peer() == index) lose(index, error.what());
      throw;
    }
    // Ended, and nothing was left to read: every complete frame has been handed over.
    if (auto why = peer->stream->closed(); why && !received) {
      bool inside = peer->header.has_value() || peer->in_begin != peer->in_end;
      lose(index, name(index) + " is gone: " + *why + (inside ? ", in the middle of a frame" : ""));
      moved = true;
    }
  }
  return moved;
}

bool Fabric::pump_out(Peer& peer) {
  bool moved = false;
  for (;;) {
    if (peer.out_at < peer.out.size()) {
      size_t n = peer.stream->write(std::span(peer.out).subspan(peer.out_at));
      peer.out_at += n;
      bytes_sent_ += n;
      moved |= n > 0;
      if (peer.out_at < peer.out.size()) return moved;
    }
    peer.out.clear();
    peer.out_at = 0;
    // Stage headers and small payloads; a payload longer than the staging goes straight from its buffer.
    while (!peer.queue.empty() && peer.out.size() < kStagingBytes) {
      auto& [header, payload] = peer.queue.front();
      if (peer.sent == 0) {
        auto bytes = std::as_bytes(std::span(&header, 1));
        peer.out.insert(peer.out.end(), bytes.begin(), bytes.end());
        peer.sent = sizeof header;
      }
      auto rest = payload.bytes().subspan(peer.sent - sizeof header);
      if (rest.size() > kStagingBytes) break;
      peer.out.insert(peer.out.end(), rest.begin(), rest.end());
      peer.queue.pop_front();
      peer.sent = 0;
    }
    if (!peer.out.empty()) continue;
    if (peer.queue.empty()) return moved;
    auto& [header, payload] = peer.queue.front();
    size_t n = peer.stream->write(payload.bytes().subspan(peer.sent - sizeof header));
    peer.sent += n;
    bytes_sent_ += n;
    moved |= n > 0;
    if (peer.sent < sizeof header + payload.size()) return moved;
    peer.queue.pop_front();
    peer.sent = 0;
  }
}

bool Fabric::pump_in(Peer& peer, const Handler& handler) {
  size_t taken = 0;
  auto bad = [&](const std::string& what) {
    throw FabricError("fabric_bad_frame", peer.index,
                      name(self_) + ": bad frame from " + name(peer.index) + " (" + what +
                          "): the two do not run the same build, or the stream is damaged; the job must go back to its "
                          "last checkpoint");
  };
  for (;;) {
    // Payload first from the staging, then straight into its buffer.
    if (peer.header) {
      size_t missing = peer.header->length - peer.payload_got;
      size_t staged = std::min(missing, peer.in_end - peer.in_begin);
      if (staged) std::memcpy(peer.payload->data() + peer.payload_got, peer.in.data() + peer.in_begin, staged);
      peer.in_begin += staged;
      peer.payload_got += staged;
      missing -= staged;
      if (missing >= kStagingBytes) {
        size_t n =
            peer.stream->read(std::span(peer.payload->data() + peer.payload_got, std::min(missing, kReadBudget)));
        peer.payload_got += n;
        taken += n;
        missing -= n;
        if (n == 0 || taken >= kReadBudget) break;
        if (missing > 0) continue;
      }
      if (missing == 0) {
        Frame frame{*peer.header, Slice(std::move(peer.payload))};
        peer.header.reset();
        peer.payload.reset();
        handler(peer.index, std::move(frame));
        if (taken >= kReadBudget) break;
        continue;
      }
    }
    if (!peer.header && peer.in_end - peer.in_begin >= sizeof(FrameHeader)) {
      FrameHeader header;
      std::memcpy(&header, peer.in.data() + peer.in_begin, sizeof header);
      if (header.magic != kFrameMagic) bad("wrong magic");
      if (header.version != kFabricVersion) bad("fabric version " + std::to_string(header.version));
      if (header.check != frame_check(header)) bad("header check fails");
      if (header.type != static_cast<uint8_t>(FrameType::Collective) &&
          header.type != static_cast<uint8_t>(FrameType::Control))
        bad("unknown type " + std::to_string(header.type));
      if (header.length > kMaxPayload) bad("length " + std::to_string(header.length));
      if (header.block) {
        std::optional<Slice> payload;
        if (auto slot = board_slots_.find(peer.index); slot != board_slots_.end())
          payload = board_->read(slot->second, {header.block - 1, header.place}, header.length);
        if (!payload) bad("a payload that is not in its sender's shared memory");
        peer.in_begin += sizeof header;
        bytes_received_ += header.length;
        handler(peer.index, Frame{header, std::move(*payload)});
        continue;
      }
      try {
        peer.payload = Buffer::allocate(header.length);
      } catch (const std::bad_alloc&) {
        bad("no memory for " + std::to_string(header.length) + " bytes");
      }
      peer.in_begin += sizeof header;
      peer.header = header;
      peer.payload_got = 0;
      continue;
    }
    if (taken >= kReadBudget) break;
    if (peer.in_begin > 0) {
      std::memmove(peer.in.data(), peer.in.data() + peer.in_begin, peer.in_end - peer.in_begin);
      peer.in_end -= peer.in_begin;
      peer.in_begin = 0;
    }
    size_t n = peer.stream->read(std::span(peer.in).subspan(peer.in_end));
    if (n == 0) break;
    peer.in_end += n;
    taken += n;
  }
  bytes_received_ += taken;
  return taken > 0;
}

bool Fabric::flushed() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second->flushed(); });
}

bool Fabric::shutdown(Deadline deadline) {
  std::vector<futex_waitv> waiters;
  auto drive = [&](auto done) {
    for (;;) {
      waiters.clear();
      append_waiters(waiters);
      while (pump([](int, Frame) {})) {
      }
      if (done()) return true;
      if (!wait_any(waiters, deadline) && std::chrono::steady_clock::now() >= deadline) return false;
    }
  };
  bool sent = drive([&] { return flushed(); });
  for (auto& [index, peer] : peers_)
    if (!lost_.count(index)) peer->stream->close_send();
  return sent && drive([&] { return lost_.size() == peers_.size(); });
}

void Fabric::append_waiters(std::vector<futex_waitv>& waiters) {
  waiters.push_back(waiter_of(*doorbell_));
  for (auto& [index, peer] : peers_)
    if (!lost_.count(index)) peer->stream->append_waiters(waiters);
}

void Fabric::ring() { ring_doorbell(*doorbell_); }

bool wait_any(std::vector<futex_waitv>& waiters, Deadline deadline) {
  // steady_clock is CLOCK_MONOTONIC here, as the kernel's absolute timeout wants.
  auto since_epoch = deadline.time_since_epoch();
  auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
  timespec until{seconds.count(), std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch - seconds).count()};
  static std::atomic<bool> missing{false};  // older kernels, and valgrind, do not have it
  while (!missing.load(std::memory_order_relaxed)) {
    long rc = syscall(SYS_futex_waitv, waiters.data(), waiters.size(), 0, &until, CLOCK_MONOTONIC);
    if (rc >= 0 || errno == EAGAIN) return true;
    if (errno == ETIMEDOUT) return false;
    if (errno == EINTR) continue;
    if (errno == ENOSYS) missing.store(true);
    break;  // or more words than the kernel takes (128): look every 100 us instead
  }
  for (;;) {
    for (const auto& waiter : waiters)
      if (reinterpret_cast<std::atomic<uint32_t>*>(static_cast<uintptr_t>(waiter.uaddr))->load() != waiter.val)
        return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace ergo
