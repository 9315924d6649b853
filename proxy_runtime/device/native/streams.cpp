#include "streams.hpp"

#include <limits.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace ergo {

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void ring_doorbell(std::atomic<uint32_t>& word) {
  word.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

futex_waitv waiter_of(std::atomic<uint32_t>& word) {
  futex_waitv waiter{};
  waiter.val = word.load(std::memory_order_seq_cst);
  waiter.uaddr = reinterpret_cast<uintptr_t>(&word);
  waiter.flags = FUTEX_32;  // shared between processes: not private
  return waiter;
}

std::string error_text(int error_number) { return std::generic_category().message(error_number); }

// Memory

size_t MemoryLink::deliver(int side, size_t bytes) {
  auto& from = flight_[side];
  size_t n = std::min(bytes, from.size());
  arrived_[side].insert(arrived_[side].end(), from.begin(), from.begin() + static_cast<ptrdiff_t>(n));
  from.erase(from.begin(), from.begin() + static_cast<ptrdiff_t>(n));
  return n;
}

size_t MemoryStream::read(std::span<std::byte> into) {
  auto& queue = link_->arrived_[1 - side_];
  size_t n = std::min(into.size(), queue.size());
  std::copy_n(queue.begin(), n, into.begin());
  queue.erase(queue.begin(), queue.begin() + static_cast<ptrdiff_t>(n));
  return n;
}

size_t MemoryStream::write(std::span<const std::byte> from) {
  if (link_->closed_) return 0;
  auto& flight = link_->flight_[side_];
  flight.insert(flight.end(), from.begin(), from.end());
  return from.size();
}

std::optional<std::string> MemoryStream::closed() {
  if (link_->closed_ && link_->arrived_[1 - side_].empty()) return "the in-memory link was closed";
  return std::nullopt;
}

// Shared memory

ShmStream::ShmStream(int self, int peer, int fd, bool first_half) : self_(self), peer_(peer), first_half_(first_half) {
  auto fail = [&](const std::string& why) {
    if (base_) munmap(base_, size_);
    throw FabricError(
        "fabric_segment", peer,
        "proxy " + std::to_string(self) + ": the shared memory to proxy " + std::to_string(peer) + " " + why);
  };
  struct stat status{};
  if (fstat(fd, &status) != 0) fail("cannot be examined: " + error_text(errno));
  size_ = static_cast<size_t>(status.st_size);
  if (size_ < shm_segment_bytes(64)) fail("is too small: " + std::to_string(size_) + " bytes");
  ring_bytes_ = (size_ - kShmHeaderBytes) / 2 / 64 * 64;
  void* mapping = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) fail("cannot be mapped: " + error_text(errno));
  base_ = static_cast<std::byte*>(mapping);
  directions_ = reinterpret_cast<ShmDirection*>(base_);  // lock-free atomics, valid when all zero
  std::byte* rings = base_ + kShmHeaderBytes;
  out_ = rings + (first_half ? 0 : ring_bytes_);
  in_ = rings + (first_half ? ring_bytes_ : 0);
  uint32_t nobody = 0;
  if (!mine().attached.compare_exchange_strong(nobody, static_cast<uint32_t>(self) + 1) || mine().head.load() != 0)
    fail("is already used on this side: a segment serves one pair of proxies once, make a new one");
  mine().version.store(kFabricVersion, std::memory_order_release);
}

ShmStream::~ShmStream() {
  close_send();
  munmap(base_, size_);
}

void ShmStream::close_send() {
  mine().closed.store(1, std::memory_order_seq_cst);
  ring_doorbell(theirs().doorbell);
}

size_t ShmStream::space() {
  uint64_t used = head_ - mine().tail.load(std::memory_order_seq_cst);
  if (used > ring_bytes_)
    throw FabricError("fabric_bad_frame", peer_,
                      "proxy " + std::to_string(self_) + ": proxy " + std::to_string(peer_) +
                          " moved the tail of its shared memory past what was written");
  return ring_bytes_ - used;
}

size_t ShmStream::write(std::span<const std::byte> from) {
  if (theirs().closed.load(std::memory_order_acquire)) return 0;
  size_t written = 0;
  while (written < from.size()) {
    size_t room = space();
    if (room == 0) {
      // Announce first, look again after: the consumer moves its tail first and looks at the flag after.
      mine().wants_space.store(1, std::memory_order_seq_cst);
      if ((room = space()) == 0) break;
    }
    size_t at = head_ % ring_bytes_;
    size_t n = std::min({room, from.size() - written, ring_bytes_ - at});
    std::memcpy(out_ + at, from.data() + written, n);
    head_ += n;
    written += n;
    mine().head.store(head_, std::memory_order_release);
  }
  if (written) ring_doorbell(theirs().doorbell);
  return written;
}

size_t ShmStream::read(std::span<std::byte> into) {
  ShmDirection& peer = theirs();
  uint64_t available = peer.head.load(std::memory_order_acquire) - tail_;
  if (available == 0) return 0;
  if (!peer_seen_) {
    uint32_t version = peer.version.load(std::memory_order_acquire), index = peer.attached.load();
    if (version != kFabricVersion || index != static_cast<uint32_t>(peer_) + 1)
      throw FabricError(
          "fabric_handshake", peer_,
          "proxy " + std::to_string(self_) + ": expected proxy " + std::to_string(peer_) + " with fabric version " +
              std::to_string(kFabricVersion) + " behind the shared memory, found proxy " +
              std::to_string(static_cast<int64_t>(index) - 1) + " with version " + std::to_string(version));
    peer_seen_ = true;
  }
  if (available > ring_bytes_)
    throw FabricError("fabric_bad_frame", peer_,
                      "proxy " + std::to_string(self_) + ": proxy " + std::to_string(peer_) +
                          " moved the head of its shared memory past the ring");
  size_t n = std::min<uint64_t>(available, into.size());
  size_t at = tail_ % ring_bytes_;
  size_t first = std::min(n, ring_bytes_ - at);
  std::memcpy(into.data(), in_ + at, first);
  if (n > first) std::memcpy(into.data() + first, in_, n - first);
  tail_ += n;
  peer.tail.store(tail_, std::memory_order_seq_cst);
  if (peer.wants_space.exchange(0, std::memory_order_seq_cst)) ring_doorbell(peer.doorbell);
  return n;
}

std::optional<std::string> ShmStream::closed() {
  // The flag is set after the last write, so it is read before the head.
  if (!theirs().closed.load(std::memory_order_seq_cst)) return std::nullopt;
  if (theirs().head.load(std::memory_order_acquire) != tail_) return std::nullopt;
  return "it closed its shared memory";
}

// TCP

size_t TcpStream::read(std::span<std::byte> into) {
  size_t got = 0;
  while (got < into.size() && !end_) {
    ssize_t n = recv(fd_.get(), into.data() + got, into.size() - got, MSG_DONTWAIT);
    if (n > 0) {
      got += static_cast<size_t>(n);
    } else if (n == 0) {
      end_ = "it closed the connection";
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      end_ = "the connection failed: " + error_text(errno);
    }
  }
  return got;
}

size_t TcpStream::write(std::span<const std::byte> from) {
  size_t sent = 0;
  while (sent < from.size() && !send_broken_) {
    ssize_t n = send(fd_.get(), from.data() + sent, from.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      send_broken_ = true;  // what the peer sent before may still be readable: only read() ends the stream
    }
  }
  return sent;
}

void TcpStream::close_send() {
  send_broken_ = true;
  ::shutdown(fd_.get(), SHUT_WR);
}

}  // namespace ergo
