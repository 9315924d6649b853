#include "departures.hpp"

#include <cstring>

#include "store_service.hpp"

namespace ergo::device {
namespace {

constexpr size_t kLongestReason = 600;

}  // namespace

void Departures::notice(const std::map<uint32_t, std::unique_ptr<RankServer>>& servers) {
  for (const auto& [rank, server] : servers) {
    if (told_.contains(rank) || !server->departed()) continue;
    told_.insert(rank);
    const std::string why = server->failure().substr(0, kLongestReason);
    collectives_.engine().depart(static_cast<int>(rank), why);
    const ControlHeader header{kRankLeft, rank};
    std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
    frame += why;
    collectives_.send_to_all(std::as_bytes(std::span(frame)));
  }
}

bool Departures::on_control(const Slice& frame) {
  ControlHeader header;
  if (frame.size() < sizeof header) return false;
  std::memcpy(&header, frame.data(), sizeof header);
  if (header.kind != kRankLeft) return false;
  collectives_.engine().depart(
      static_cast<int>(header.rank),
      {reinterpret_cast<const char*>(frame.data()) + sizeof header, frame.size() - sizeof header});
  return true;
}

}  // namespace ergo::device
