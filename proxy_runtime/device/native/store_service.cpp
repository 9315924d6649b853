#include "store_service.hpp"

#include <cstring>

#include "failure.hpp"

namespace ergo::device {
namespace {

void send(Fabric& fabric, int peer, uint32_t kind, uint32_t rank, std::string_view bytes) {
  ControlHeader header{kind, rank};
  std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
  frame.append(bytes);
  fabric.send_control(peer, std::as_bytes(std::span(frame.data(), frame.size())));
}

}  // namespace

bool StoreService::is_master() const { return collectives_.rank_to_proxy().at(0) == collectives_.fabric().self(); }

std::optional<std::string> StoreService::request(uint32_t rank, std::string_view bytes) {
  if (is_master()) return store_.apply(bytes);
  send(collectives_.fabric(), collectives_.rank_to_proxy().at(0), kStoreRequest, rank, bytes);
  return std::nullopt;
}

void StoreService::on_control(int peer, const Slice& frame) {
  ControlHeader header;
  if (frame.size() < sizeof header)
    throw FabricError("fabric_bad_frame", peer,
                      "proxy " + std::to_string(peer) + " sent a control frame that is too short");
  std::memcpy(&header, frame.data(), sizeof header);
  std::string_view bytes(reinterpret_cast<const char*>(frame.data()) + sizeof header, frame.size() - sizeof header);
  if (header.kind == kStoreReply) {
    deliver_(header.rank, std::string(bytes));
  } else if (header.kind == kStoreRequest && is_master()) {
    std::string reply;
    try {
      reply = store_.apply(bytes);
    } catch (const ProtocolError&) {  // its sender has to stop serving the rank: no answer is empty otherwise
    }
    send(collectives_.fabric(), peer, kStoreReply, header.rank, reply);
  } else {
    throw FabricError("fabric_bad_frame", peer,
                      "proxy " + std::to_string(peer) + " sent a control frame of unknown kind");
  }
}

}  // namespace ergo::device
