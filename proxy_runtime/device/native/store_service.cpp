#include "store_service.hpp"

#include <cstring>

#include "failure.hpp"

namespace ergo::device {
namespace {

// A rank that waits asks every few milliseconds.
constexpr auto kFresh = std::chrono::seconds(1);

void send(Fabric& fabric, int peer, uint32_t kind, uint32_t rank, std::string_view bytes) {
  ControlHeader header{kind, rank};
  std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
  frame.append(bytes);
  fabric.send_control(peer, std::as_bytes(std::span(frame.data(), frame.size())));
}

}  // namespace

bool StoreService::is_master() const { return collectives_.rank_to_proxy().at(0) == collectives_.fabric().self(); }

std::optional<std::string> StoreService::request(uint32_t rank, std::string_view bytes) {
  if (is_master()) return apply(rank, bytes);
  send(collectives_.fabric(), collectives_.rank_to_proxy().at(0), kStoreRequest, rank, bytes);
  return std::nullopt;
}

std::string StoreService::apply(uint32_t rank, std::string_view bytes) {
  if (bytes.empty() || static_cast<uint8_t>(bytes[0]) != kStoreAwait) {
    waiting_.erase(rank);
    return store_.apply(bytes);
  }
  std::string check(bytes);
  check[0] = static_cast<char>(StoreOp::Check);
  std::string reply = store_.apply(check);
  uint32_t length = 0;
  std::memcpy(&length, bytes.data() + 1, sizeof length);  // the store has read it: it is there
  const std::string key(bytes.substr(1 + sizeof length, length));
  if (store_.items().contains(key)) {
    waiting_.erase(rank);
    return reply;
  }
  waiting_[rank] = {key, std::chrono::steady_clock::now()};
  std::string why = why_nobody_sets(rank, key);
  if (why.empty()) return reply;
  const int64_t never = 2;
  return std::string(1, '\1').append(reinterpret_cast<const char*>(&never), sizeof never).append(why);
}

// Somebody has gone, and all others wait: in the store, for keys that are not there, or at a collective.
std::string StoreService::why_nobody_sets(uint32_t rank, const std::string& key) const {
  const std::set<int> gone = collectives_.engine().gone();
  if (gone.empty()) return {};
  std::string waits;
  for (uint32_t other = 0; other < collectives_.rank_to_proxy().size(); other++) {
    if (gone.contains(static_cast<int>(other)) || other == rank) continue;
    auto waiting = waiting_.find(other);
    auto standing = standstill_.standing().find(static_cast<int>(other));
    if (waiting != waiting_.end() && std::chrono::steady_clock::now() - waiting->second.asked < kFresh &&
        !store_.items().contains(waiting->second.key))
      waits += ", rank " + std::to_string(other) + " waits for the key " + waiting->second.key;
    else if (standing != standstill_.standing().end())
      waits += ", rank " + std::to_string(other) + " waits in " + standing->second;
    else
      return {};
  }
  std::string ended;
  for (int other : gone) ended += (ended.empty() ? "rank " : ", rank ") + std::to_string(other);
  return "rank " + std::to_string(rank) + " waits in the rendezvous store for the key " + key +
         ", which nobody is left to set: " + ended + (gone.size() == 1 ? " has" : " have") + " ended" + waits;
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
      reply = apply(header.rank, bytes);
    } catch (const ProtocolError&) {  // its sender has to stop serving the rank: no answer is empty otherwise
    }
    send(collectives_.fabric(), peer, kStoreReply, header.rank, reply);
  } else {
    throw FabricError("fabric_bad_frame", peer,
                      "proxy " + std::to_string(peer) + " sent a control frame of unknown kind");
  }
}

}  // namespace ergo::device
