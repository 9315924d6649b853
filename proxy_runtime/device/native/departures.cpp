#include "departures.hpp"

#include <cstring>

#include "store_service.hpp"

namespace ergo::device {

void Departures::notice(const std::map<uint32_t, std::unique_ptr<RankServer>>& servers) {
  for (const auto& [rank, server] : servers) {
    if (told_.contains(rank) || !server->departed()) continue;
    told_.insert(rank);
    collectives_.engine().depart(static_cast<int>(rank));
    const ControlHeader header{kRankLeft, rank};
    std::set<int> peers(collectives_.rank_to_proxy().begin(), collectives_.rank_to_proxy().end());
    peers.erase(collectives_.fabric().self());
    for (int peer : peers) collectives_.fabric().send_control(peer, std::as_bytes(std::span(&header, 1)));
  }
}

bool Departures::on_control(const Slice& frame) {
  ControlHeader header;
  if (frame.size() != sizeof header) return false;
  std::memcpy(&header, frame.data(), sizeof header);
  if (header.kind != kRankLeft) return false;
  collectives_.engine().depart(static_cast<int>(header.rank));
  return true;
}

}  // namespace ergo::device
