// The fabric: one device proxy's streams to its peers. Frames are queued and never block; one thread (the
// executor's) calls everything here. Streams are shared memory on a node, TCP between nodes, or a pair of
// in-memory queues whose delivery a test controls.
//
// Sleeping without losing a wake-up:
//   waiters.clear(); fabric.append_waiters(waiters);      // values first
//   while (engine.pump(...)) {}                           // then look
//   futex_waitv(waiters + the rings' words, deadline);    // then sleep: a ring in between changes a value
#pragma once

#include <linux/futex.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "board.hpp"
#include "buffer.hpp"

namespace ergo {

using Deadline = std::chrono::steady_clock::time_point;

// Something is wrong with a peer or its stream. `code` is stable; `peer` is its proxy index, -1 if unknown.
class FabricError : public std::runtime_error {
 public:
  FabricError(std::string code, int peer, const std::string& message)
      : std::runtime_error(message), code_(std::move(code)), peer_(peer) {}
  const std::string& code() const { return code_; }
  int peer() const { return peer_; }

 private:
  std::string code_;
  int peer_;
};

inline constexpr uint32_t kFrameMagic = 0x4D415246;  // "FRAM"
inline constexpr uint16_t kFabricVersion = 2;
inline constexpr uint64_t kMaxPayload = uint64_t{1} << 36;

enum class FrameType : uint8_t { Collective = 1, Control = 2 };
enum class Phase : uint8_t { Contribution = 1, Result = 2 };

// Precedes every payload. Fields that a type does not use are 0. All of it is covered by `check`.
struct FrameHeader {
  uint32_t magic = kFrameMagic;
  uint16_t version = kFabricVersion;
  uint8_t type = 0;   // FrameType
  uint8_t phase = 0;  // Phase
  uint64_t comm = 0;
  uint64_t number = 0;                              // of the instance in its sequence, from 1
  int32_t pair_source = -1, pair_destination = -1;  // group ranks of a send/recv sequence, else -1
  uint32_t source = 0;  // group rank of the contributor; Result: index of the owner among the proxies
  uint32_t part = 0;    // destination group rank of a block
  uint32_t parts = 0;   // how many frames make up this contribution to this proxy
  uint32_t root = 0;
  uint8_t kind = 0, op = 0;  // CollectiveKind, ReduceOp
  uint8_t dtype = 0;         // of the contributor's first tensor, and
  uint8_t absorbed = 0;      // Descriptor::absorbed
  uint32_t block = 0;        // 1 + the block of the sender's region that holds the payload; 0: it follows
  uint64_t place = 0;        // of such a payload in that region
  uint64_t bytes = 0;        // of all tensors of the contributor: what a sentence about it says
  uint64_t signature = 0;    // hash of what all members must agree on
  uint64_t offset = 0;       // of the payload in the packed input, bytes
  uint64_t length = 0;       // payload bytes
  uint64_t check = 0;        // frame_check of all before
};
static_assert(sizeof(FrameHeader) == 104);
uint64_t frame_check(const FrameHeader& header);

struct Frame {
  FrameHeader header;
  Slice payload;
};

// One direction pair of bytes. Implementations: streams.hpp.
class Stream {
 public:
  virtual ~Stream() = default;
  // Both move as many bytes as possible now, 0 when none can move.
  virtual size_t read(std::span<std::byte> into) = 0;
  virtual size_t write(std::span<const std::byte> from) = 0;
  // The peer will send nothing more and what it sent has been read; a sentence why, else nothing.
  virtual std::optional<std::string> closed() = 0;
  virtual void append_waiters(std::vector<futex_waitv>&) {}
  virtual void close_send() {}
};

// In-memory stream pair for tests: bytes written are in flight until the test delivers them.
class MemoryLink {
 public:
  // Moves up to `bytes` in-flight bytes from `side` (0 or 1) to the other; returns how many moved.
  size_t deliver(int side, size_t bytes);
  size_t in_flight(int side) const { return flight_[side].size(); }
  void close() { closed_ = true; }

 private:
  friend class MemoryStream;
  std::array<std::deque<std::byte>, 2> flight_, arrived_;  // indexed by the sending side
  bool closed_ = false;
};

// How many bytes a shared memory segment for one pair of proxies has: two rings of `ring_bytes` (a multiple
// of 64) and a header. A zero-filled memfd of that size is a valid fresh segment.
size_t shm_segment_bytes(size_t ring_bytes);

struct TcpPeer {
  int peer;
  bool listen;  // else connect
  std::string host;
  uint16_t port;
};

class Fabric {
 public:
  explicit Fabric(int self);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  int self() const { return self_; }

  // Maps the segment behind `fd`, which stays the caller's and may be closed at once. Exactly one of the two
  // proxies passes first_half = true. Throws FabricError.
  void add_shm_peer(int peer, int fd, bool first_half);
  // Takes the connected, handshaken socket (closes it in the end).
  void add_tcp_peer(int peer, int connected_fd);
  void add_memory_peer(int peer, std::shared_ptr<MemoryLink> link, int side);
  // Memory shared with the proxies of this node, `proxies` in the order of their slots, this one among them. Between
  // those of them that are shm peers, large payloads of allocate() are not copied. Throws FabricError.
  void add_board(int fd, const std::vector<int>& proxies);
  // Listens, connects, retries and shakes hands with all of them until the deadline, then adds them. The
  // token is the job's secret: both sides prove it, compared in constant time. Strangers are dropped.
  // Throws FabricError naming the peers that are missing.
  void connect_tcp_peers(const std::vector<TcpPeer>& peers, std::string_view token, Deadline deadline);

  // A buffer whose slices are worth sending: on the board where there is one.
  std::shared_ptr<Buffer> allocate(size_t bytes);

  // Queues a frame. Sending to a lost peer does nothing: its loss has been or will be reported by pump.
  void send(int peer, FrameHeader header, Slice payload);
  // A message of the proxies' own (rendezvous store); arrives whole, in order, as FrameType::Control.
  void send_control(int peer, std::span<const std::byte> bytes);

  using Handler = std::function<void(int peer, Frame frame)>;
  // Moves bytes both ways and hands over complete frames. True if anything moved: call again before sleeping.
  // Throws FabricError {fabric_bad_frame} that names the peer.
  bool pump(const Handler& handler);

  // Peers whose stream has ended, with a sentence why. A peer that ended in order is here too: whether it
  // matters depends on what is still expected of it (CollectiveEngine::waiting_for_lost_peer).
  const std::map<int, std::string>& lost() const { return lost_; }
  // All queued frames have left (into the peer's ring or the kernel).
  bool flushed() const;
  // Flushes, ends the sending side of all streams and takes in what still comes, until every peer has ended
  // too or the deadline. False at the deadline. Without it a TCP reset could destroy the last frames.
  bool shutdown(Deadline deadline);

  // The words to sleep on, with their values now. One is private (TCP), one per shared memory peer.
  void append_waiters(std::vector<futex_waitv>& waiters);
  // The private word; ring() changes it and wakes a sleeper, from any thread.
  std::atomic<uint32_t>* doorbell() { return doorbell_.get(); }
  void ring();

  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t bytes_received() const { return bytes_received_; }

 private:
  struct Peer;
  class Watcher;
  void require_new(int peer) const;
  void add(int peer, std::unique_ptr<Stream> stream);
  bool pump_out(Peer& peer);
  bool pump_in(Peer& peer, const Handler& handler);
  void lose(int peer, std::string why);

  int self_;
  std::unique_ptr<std::atomic<uint32_t>> doorbell_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::map<int, std::string> lost_;
  std::shared_ptr<Board> board_;
  std::map<int, uint32_t> board_slots_;  // of the shm peers
  std::unique_ptr<Watcher> watcher_;     // the epoll thread, only with TCP peers
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

// Sleeps until one of the words changes or the deadline; false at the deadline. (futex_waitv, or a poll
// where the kernel lacks it.)
bool wait_any(std::vector<futex_waitv>& waiters, Deadline deadline);

}  // namespace ergo
