// What a rank's messages copy between the host and its storages.

#include "message_bodies.hpp"
#include "rank_server.hpp"
#include "splice/splicer.hpp"

namespace ergo::device {
namespace {

void require_range(uint64_t offset, uint64_t length, uint64_t size, const char* what) {
  TORCH_CHECK(offset <= size && length <= size - offset, "ergosphere: a ", what, " of ", length, " bytes at ", offset,
              " does not fit a device storage of ", size, " bytes");
}

}  // namespace

const PhysicalPtr& RankServer::readable(uint64_t handle) {
  const PhysicalPtr& physical = state_.storages.find(handle);
  if (state_.member) state_.member->splicer.readable(physical);
  return physical;
}

RankServer::Outcome RankServer::write(WordReader body) {
  const uint64_t handle = body.word(), offset = body.word(), length = body.word();
  return write(handle, offset, body.bytes(length), length);
}

RankServer::Outcome RankServer::write(uint64_t handle, uint64_t offset, const char* bytes, uint64_t length) {
  const PhysicalPtr& physical = state_.storages.find(handle);
  require_range(offset, length, physical->storage.nbytes(), "write");
  if (auto* member = state_.member) {
    if (!member->splicer.write(*member, handle, offset, bytes, length)) return Outcome::Held;
  } else {
    services_.backend.write(physical->storage, offset, bytes, length);
  }
  return Outcome::Done;
}

void RankServer::read(WordReader body) {
  uint64_t handle = body.word(), offset = body.word(), length = body.word();
  if (length > ring_.response_bytes()) throw ProtocolError("a read of more bytes than the response area has");
  const PhysicalPtr& physical = readable(handle);
  require_range(offset, length, physical->storage.nbytes(), "read");
  services_.backend.read(physical->storage, offset, ring_.response_area(), length);
  ring_.respond(Status::Ok, ring_.response_area(), length);
}

void RankServer::pull(WordReader body) {
  auto [handle, offset, length, at] = operands<4>(body);
  if (at > ring_.response_bytes() || length > ring_.response_bytes() - at)
    throw ProtocolError("a read beyond the end of the response area");
  const PhysicalPtr& physical = readable(handle);
  require_range(offset, length, physical->storage.nbytes(), "read");
  services_.backend.read(physical->storage, offset, ring_.response_area() + at, length);
}

RankServer::Outcome RankServer::copy_pinned(Message type, WordReader body) {
  auto [handle, offset, length, at] = operands<4>(body);
  if (at > ring_.pinned_bytes() || length > ring_.pinned_bytes() - at)
    throw ProtocolError("a copy beyond the end of the pinned memory");
  if (type == Message::PushPinned) return write(handle, offset, ring_.pinned() + at, length);
  const PhysicalPtr& physical = readable(handle);
  require_range(offset, length, physical->storage.nbytes(), "read");
  services_.backend.read(physical->storage, offset, ring_.pinned() + at, length);
  return Outcome::Done;
}

}  // namespace ergo::device
