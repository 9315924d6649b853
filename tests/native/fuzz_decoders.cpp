// What others send, as a fuzzer makes it up: a ring's header, messages in it and their bodies, frames of the fabric,
// requests of the rendezvous store.
// Whatever comes, the decoder says so by one of its exceptions and reads nothing that is not there. With libFuzzer
// (clang) it is fuzzed by the benchmark proxy.fuzz; with replay.cpp it is a program that runs the files it is given.
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "fabric.hpp"
#include "failure.hpp"
#include "message_bodies.hpp"
#include "messages.hpp"
#include "ring_consumer.hpp"
#include "store.hpp"
#include "streams.hpp"

using namespace ergo;

namespace {

constexpr uint64_t kRing = 4096, kResponse = 4096;

// What was read goes here, so that it is read.
volatile uint64_t seen;

// As the proxy reads it; what no operator is needed for.
void read_body(Message type, WordReader body) {
  try {
    if (type == Message::Define) {
      device::DefineBody define(body);
      if (define.n_handles != 0) seen = define.handles[define.n_handles - 1] + define.name.size();
    } else if (type == Message::Exec) {
      device::ExecBody exec(body);
      if (exec.n_handles != 0) seen = exec.handles[exec.n_handles - 1] + exec.payload.left();
    } else if (type == Message::Pull || type == Message::PullPinned || type == Message::PushPinned) {
      device::operands<4>(body);
    }
  } catch (const std::runtime_error&) {
  }
}

// A channel that somebody else has made: its fields are checked before anything of it is used.
void header(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("fuzz-header", 0);
  static const size_t total = kHeaderBytes + kRing + kResponse + 4096;
  RingHeader fixed{};
  fixed.magic = kRingMagic, fixed.version = kProtocolVersion;
  fixed.ring_bytes = kRing, fixed.response_bytes = kResponse;
  // Each of the bytes that follow spoils one byte of what counts; no spoilt byte: the channel is used.
  for (size_t i = 0; i + 1 < size; i += 2) {
    const size_t at = data[i] < 48 ? data[i] : offsetof(RingHeader, head) + data[i] % 136;
    reinterpret_cast<uint8_t*>(&fixed)[data[i] >= 240 ? offsetof(RingHeader, pinned_bytes) + data[i] % 8 : at] =
        data[i + 1];
  }
  if (ftruncate(fd, 0) != 0 || ftruncate(fd, total) != 0 || pwrite(fd, &fixed, sizeof fixed, 0) < 0) abort();
  try {
    device::RingConsumer consumer(fd);
    if (consumer.pinned_bytes() > total || consumer.response_bytes() > total) abort();
    if (consumer.pinned_bytes() != 0) consumer.pinned()[consumer.pinned_bytes() - 1] = 1;
    consumer.response_area()[consumer.response_bytes() ? consumer.response_bytes() - 1 : 0] = 1;
    consumer.peek();
  } catch (const std::runtime_error&) {
  }
}

// Headers are given the right check: otherwise nearly nothing would come further than that.
void ring(const uint8_t* data, size_t size) {
  static const int fd = [] {
    const int made = memfd_create("fuzz", 0);
    if (ftruncate(made, kHeaderBytes + kRing + kResponse) != 0) abort();
    return made;
  }();
  size = std::min<size_t>(size, kRing) / 8 * 8;
  std::vector<uint8_t> bytes(data, data + size);
  for (size_t at = 0; at + 8 <= size;) {
    MessageHeader header;
    std::memcpy(&header, &bytes[at], sizeof header);
    if (header.check % 8 != 0) header.check = header_check(header.length, header.type);
    std::memcpy(&bytes[at], &header, sizeof header);
    if (header.length < 8 || header.length > size) break;
    at += header.length / 8 * 8;
  }
  RingHeader fixed{};
  fixed.magic = kRingMagic, fixed.version = kProtocolVersion;
  fixed.ring_bytes = kRing, fixed.response_bytes = kResponse;
  if (pwrite(fd, &fixed, sizeof fixed, 0) < 0 || pwrite(fd, bytes.data(), size, kHeaderBytes) < 0) abort();
  device::RingConsumer consumer(fd);
  consumer.header().head.store(size);
  try {
    while (auto message = consumer.peek()) {
      WordReader body = message->body;
      read_body(message->type, body);
      uint64_t sum = 0;
      while (body.left() != 0) sum += body.word();
      if (sum == 42) consumer.respond(Status::Ok, "x", 1);
      consumer.advance(*message);
    }
  } catch (const device::ProtocolError&) {
  }
}

void frames(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes(size);
  if (size != 0) std::memcpy(bytes.data(), data, size);
  for (size_t at = 0; at + sizeof(FrameHeader) <= size;) {
    FrameHeader header;
    std::memcpy(&header, &bytes[at], sizeof header);
    if (header.magic % 8 != 0) header.magic = kFrameMagic, header.version = kFabricVersion;
    header.length %= 1 << 16;  // the fuzzer's memory is small
    if (header.check % 8 != 0) header.check = frame_check(header);
    std::memcpy(&bytes[at], &header, sizeof header);
    at += sizeof header + header.length;
  }
  auto link = std::make_shared<MemoryLink>();
  MemoryStream sender(link, 1);
  sender.write(bytes);
  Fabric fabric(0);
  fabric.add_memory_peer(1, link, 0);
  try {
    uint64_t sum = 0;
    while (link->deliver(1, 1 + size / 3) != 0)
      while (fabric.pump([&](int, Frame frame) {
        for (std::byte byte : frame.payload.bytes()) sum += static_cast<uint64_t>(byte);
      })) {
      }
    if (sum == 42) fabric.ring();
  } catch (const FabricError&) {
  }
}

void store(const uint8_t* data, size_t size) {
  device::KeyValueStore items;
  items.replace({{"a", "1"}, {"b", "xyz"}});
  // Requests of up to 64 bytes, one after another on the same store.
  for (size_t at = 0; at < size; at += 64) try {
      items.apply({reinterpret_cast<const char*>(data) + at, std::min<size_t>(64, size - at)});
    } catch (const device::ProtocolError&) {
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  if (data[0] >= 252) return header(data + 1, size - 1), 0;
  switch (data[0] % 3) {
    case 0:
      ring(data + 1, size - 1);
      break;
    case 1:
      frames(data + 1, size - 1);
      break;
    default:
      store(data + 1, size - 1);
  }
  return 0;
}
