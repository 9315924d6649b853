// The three kinds of stream under the fabric. Internal to fabric.cpp and handshake.cpp.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fabric.hpp"

namespace ergo {

// Owns a descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

// Changes a doorbell word and wakes whoever sleeps on it, in this process or another.
void ring_doorbell(std::atomic<uint32_t>& word);
futex_waitv waiter_of(std::atomic<uint32_t>& word);
std::string error_text(int error_number);

class MemoryStream : public Stream {
 public:
  MemoryStream(std::shared_ptr<MemoryLink> link, int side) : link_(std::move(link)), side_(side) {}
  size_t read(std::span<std::byte> into) override;
  size_t write(std::span<const std::byte> from) override;
  std::optional<std::string> closed() override;

 private:
  std::shared_ptr<MemoryLink> link_;
  int side_;
};

// One direction of a segment. Written by its producer: head, closed, version, wants_space (set). By its
// consumer: tail, wants_space (cleared). Positions only grow.
struct ShmDirection {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  alignas(64) std::atomic<uint32_t> closed;
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> attached;                 // producer's proxy index + 1
  alignas(64) std::atomic<uint32_t> wants_space;  // the producer sleeps until the consumer makes room
  alignas(64) std::atomic<uint32_t> doorbell;     // the producer's own: others ring it
};
inline constexpr size_t kShmHeaderBytes = 4096;
static_assert(2 * sizeof(ShmDirection) <= kShmHeaderBytes && std::atomic<uint64_t>::is_always_lock_free);

class ShmStream : public Stream {
 public:
  ShmStream(int self, int peer, int fd, bool first_half);
  ~ShmStream() override;
  size_t read(std::span<std::byte> into) override;
  size_t write(std::span<const std::byte> from) override;
  std::optional<std::string> closed() override;
  void append_waiters(std::vector<futex_waitv>& waiters) override { waiters.push_back(waiter_of(mine().doorbell)); }
  void close_send() override;

 private:
  ShmDirection& mine() const { return directions_[first_half_ ? 0 : 1]; }
  ShmDirection& theirs() const { return directions_[first_half_ ? 1 : 0]; }
  size_t space();

  int self_, peer_;
  bool first_half_, peer_seen_ = false;
  std::byte* base_ = nullptr;
  size_t size_ = 0, ring_bytes_ = 0;
  ShmDirection* directions_ = nullptr;
  std::byte *out_ = nullptr, *in_ = nullptr;
  uint64_t head_ = 0, tail_ = 0;  // our own positions: never read back from shared memory
};

class TcpStream : public Stream {
 public:
  explicit TcpStream(UniqueFd fd) : fd_(std::move(fd)) {}
  size_t read(std::span<std::byte> into) override;
  size_t write(std::span<const std::byte> from) override;
  std::optional<std::string> closed() override { return end_; }
  void close_send() override;
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::optional<std::string> end_;
  bool send_broken_ = false;
};

}  // namespace ergo
