// The ring: one memfd mapped by a rank (producer) and its device proxy (consumer).
//
// Layout: [RingHeader, kHeaderBytes][ring, ring_bytes][response area, response_bytes][pinned memory, pinned_bytes].
// The rank keeps no descriptor of it; the mapping is MADV_DONTFORK (all but the pinned memory, which children inherit
// as CUDA's), and it travels in the rank's CRIU image, unread messages included. Of the pinned memory only the pages
// exist that have been used. A device proxy of a restored rank finds it in /proc/PID/map_files. Nothing in here runs
// code in the rank for a cut: the quiesce words are the proxy's and the shim's.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ergo {

inline constexpr uint64_t kRingMagic = 0x4552474F52494E47ull;  // "ERGORING"
inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr size_t kHeaderBytes = 8192;
inline constexpr size_t kErrorBytes = 2048;

// Status of a response, mapped by the rank to the exception that torch raises for it.
enum class Status : uint32_t {
  Ok = 0,
  Runtime = 1,
  NotImplemented = 2,
  Index = 3,
  Value = 4,
  Type = 5,
  OutOfMemory = 6,
  LinAlg = 7
};

struct RingHeader {
  uint64_t magic;
  uint32_t version;     // kProtocolVersion of whoever created the ring
  uint32_t rank;        // global rank that produces into it
  uint64_t ring_bytes;  // power of two
  uint64_t response_bytes;
  uint64_t build;  // first 8 bytes of the runtime build id; both sides compare it (handshake)

  alignas(64) std::atomic<uint64_t> head;               // bytes published by the rank
  alignas(64) std::atomic<uint64_t> tail;               // bytes executed by the proxy: moves after a message is done
  alignas(64) std::atomic<uint32_t> consumer_sleeping;  // futex word: proxy waits for messages
  alignas(64) std::atomic<uint32_t> producer_sleeping;  // futex word: rank waits for space or a response
  alignas(64) std::atomic<uint64_t> response_seq;       // responses written so far
  uint64_t response_length;
  uint32_t response_status;  // Status
  uint32_t response_pad;
  alignas(64) std::atomic<uint32_t> error_flag;  // an asynchronous error waits for the next sync point
  uint32_t error_status;                         // Status
  char error_message[kErrorBytes];
  alignas(64) std::atomic<uint32_t> proxy_gone;  // set by the shim: the proxy died, waits must raise
  std::atomic<uint32_t> rank_attached;           // the rank's interposer has mapped the ring and handshaken
  std::atomic<uint32_t> rank_leaving;            // the rank's interpreter is ending: no collective will follow
  alignas(64) std::atomic<uint64_t> step;        // last STEP message *issued* by the rank
  std::atomic<uint64_t> step_done;               // last STEP message *executed* by the proxy
  uint64_t pinned_bytes;                         // never changes; whole pages; 0: there is none
};
static_assert(sizeof(RingHeader) <= kHeaderBytes);
static_assert(offsetof(RingHeader, head) == 64 && offsetof(RingHeader, tail) == 128);
static_assert(offsetof(RingHeader, error_flag) == 384);
static_assert(offsetof(RingHeader, proxy_gone) == 2496 && offsetof(RingHeader, step) == 2560);
static_assert(offsetof(RingHeader, pinned_bytes) == 2576);

// FUTEX_WAIT/WAKE on a word shared between processes. Returns the raw syscall result.
inline long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout = nullptr) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

// A mapping of one ring. Move-only; unmaps on destruction.
class RingMapping {
 public:
  RingMapping() = default;
  // Maps the ring behind `fd`; the descriptor stays the caller's. `dontfork`: the rank's side, whose
  // DataLoader workers must not inherit it. Throws std::runtime_error with one clear sentence.
  static RingMapping map(int fd, bool dontfork) {
    struct stat st{};
    if (fstat(fd, &st) != 0) fail("cannot stat the channel", errno);
    if (static_cast<size_t>(st.st_size) < kHeaderBytes)
      throw std::runtime_error("ergosphere channel: too small to be a ring");
    void* p = mmap(nullptr, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) fail("cannot map the channel", errno);
    RingMapping m;
    m.base_ = static_cast<char*>(p);
    m.size_ = st.st_size;
    auto* h = m.header();
    if (h->magic != kRingMagic) throw std::runtime_error("ergosphere channel: not a ring (wrong magic)");
    if (h->version != kProtocolVersion)
      throw std::runtime_error("ergosphere channel: protocol version " + std::to_string(h->version) +
                               ", this build speaks " + std::to_string(kProtocolVersion));
    if (h->ring_bytes == 0 || (h->ring_bytes & (h->ring_bytes - 1)) != 0 || h->ring_bytes > m.size_ ||
        h->response_bytes > m.size_ || h->pinned_bytes > m.size_ ||
        kHeaderBytes + h->ring_bytes + h->response_bytes + h->pinned_bytes > m.size_)
      throw std::runtime_error("ergosphere channel: header sizes do not fit the mapping");
    if (dontfork && madvise(p, m.size_ - h->pinned_bytes, MADV_DONTFORK) != 0) fail("cannot set MADV_DONTFORK", errno);
    m.ring_bytes_ = h->ring_bytes;
    m.response_bytes_ = h->response_bytes;
    m.pinned_bytes_ = h->pinned_bytes;
    return m;
  }
  RingMapping(RingMapping&& o) noexcept { *this = std::move(o); }
  RingMapping& operator=(RingMapping&& o) noexcept {
    if (this != &o) {
      unmap();
      base_ = o.base_, size_ = o.size_, ring_bytes_ = o.ring_bytes_, response_bytes_ = o.response_bytes_;
      pinned_bytes_ = o.pinned_bytes_;
      o.base_ = nullptr;
    }
    return *this;
  }
  RingMapping(const RingMapping&) = delete;
  RingMapping& operator=(const RingMapping&) = delete;
  ~RingMapping() { unmap(); }

  explicit operator bool() const { return base_ != nullptr; }
  RingHeader* header() const { return reinterpret_cast<RingHeader*>(base_); }
  char* ring() const { return base_ + kHeaderBytes; }
  char* response() const { return base_ + kHeaderBytes + ring_bytes_; }
  char* pinned() const { return response() + response_bytes_; }
  uint64_t ring_bytes() const { return ring_bytes_; }  // as validated at map time, never re-read
  uint64_t response_bytes() const { return response_bytes_; }
  uint64_t pinned_bytes() const { return pinned_bytes_; }

 private:
  [[noreturn]] static void fail(const char* what, int err) {
    throw std::runtime_error(std::string("ergosphere channel: ") + what + ": " + strerror(err));
  }
  void unmap() {
    if (base_) munmap(base_, size_);
    base_ = nullptr;
  }
  char* base_ = nullptr;
  size_t size_ = 0;
  uint64_t ring_bytes_ = 0, response_bytes_ = 0, pinned_bytes_ = 0;
};

}  // namespace ergo
